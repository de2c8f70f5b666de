"""The casts as Inductor compiles them for a GPU, without one: lowerings run, and their code calls plans that exist.

The device is described to the compiler and to Triton; nothing is launched. On a GPU test_gpu.py runs such code.
"""

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from f8emu.torch.fused import delayed, inductor
from f8emu.torch.fused import operators as fused
from f8emu.torch.fused.launch import amax_tiles

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Inductor needs Triton")
FMT, RULE = "float8_e4m3fn", (False, 1e-12)
H200: dict[str, Any] = {
    "major": 9,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
}


@pytest.fixture
def described_gpu() -> Iterator[None]:
    import triton  # pyright: ignore[reportMissingImports]
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    properties = DeviceProperties(type="cuda", index=0, cc=90, **H200)
    patches = [
        mock.patch.object(triton.runtime.driver, "_active", target),
        mock.patch.object(DeviceProperties, "create", lambda device: properties),
        mock.patch("torch.cuda.get_device_properties", lambda device=None: SimpleNamespace(minor=0, **H200)),
        mock.patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)),
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.device_count", lambda: 1),
        mock.patch("torch.cuda.current_device", lambda: 0),
        mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda *args: None),
        mock.patch("torch._inductor.scheduler.has_triton", lambda *args, **kwargs: True),
        mock.patch("f8emu.torch.fused.lowering.has_float8_hardware", lambda device: True),
        mock.patch("f8emu.torch.fused.plans.compares_pairs", lambda device: True),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def code_of(function: Any, *shapes: tuple[int, ...]) -> str:
    """The code for `function` of tensors on a GPU: float32 of one element, otherwise bfloat16."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    fake = FakeTensorMode()
    with fake:
        dtypes = [torch.float32 if shape == (1, 1) else torch.bfloat16 for shape in shapes]
        tensors = [torch.empty(s, device="cuda", dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
        inductor.install()
        graph = make_fx(function)(*tensors)
        lowering = GraphLowering(graph, example_inputs=tensors, is_inference=True)
        with V.set_fake_mode(fake), V.set_graph_handler(lowering), DebugContext():
            lowering.run(*tensors)
            code, *_ = lowering.codegen()
    return str(getattr(code, "value", code))


def everything(x: Tensor, weight: Tensor, inv_scale: Tensor, amax: Tensor) -> list[Tensor]:
    """Every cast that has a lowering, with both, one or none of its results read."""
    state = (amax, *RULE, 0)
    rows, cols, _, scale = delayed.cast_pair_delayed(x, FMT, inv_scale, True, True, *state)
    w, _, used, w_scale = delayed.cast_pair_delayed(weight, FMT, inv_scale, True, False, *state)
    w_cols = fused.cast_pair_given(weight, FMT, used, False, True)[1]
    of_all = x.abs().amax(dim=1).reshape(1, -1)
    of_rows, of_cols = (part.unsqueeze(1) for part in fused.row_col_amaxes(x).split([*x.shape]))
    found = [rows, cols, scale, w, w_scale, w_cols]
    for amaxes in ((of_all, of_all), (of_rows, of_cols), (of_rows, None)):
        found += [y for y in fused.cast_pair(x, FMT, *amaxes, *RULE) if y.numel()]
    found += fused.cast_pair(x, FMT, of_all, of_all, *RULE)[2:]
    (m, n), (tiles_m, tiles_n) = x.shape, amax_tiles(*x.shape)
    parts = fused.amaxes_of_tiles(x).split([tiles_n * m, tiles_m * n])
    of_tiles = parts[0].view(tiles_n, m, 1), parts[1].view(tiles_m, n, 1)
    for amaxes in (of_tiles, (of_tiles[0], None), (of_all, of_tiles[1])):
        found += [y for y in fused.cast_pair(x, FMT, *amaxes, True, RULE[1]) if y.numel()]
    found += [*fused.cast_rows(x, FMT, *RULE), fused.row_amax(weight), fused.tensor_amax(weight)]
    found.append(fused.cast_columns(x, FMT, fused.scales(of_cols, FMT, *RULE, 0)[0]))
    for square in (False, True):
        found += fused.cast_blocks(x, FMT, square, True, True, *RULE)
    found.append(fused.transpose_codes(rows, x))
    return found


def arguments(call: str) -> int:
    """How many arguments are passed."""
    (statement,) = ast.parse(call.strip()).body
    assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return len(statement.value.args)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_code_calls_plans_that_exist(described_gpu: None) -> None:
    code = code_of(everything, (512, 256), (128, 256), (1, 1), (1, 1))
    made = dict(re.findall(r"^(f8emu_\w+) = (f8emu.*)$", code, re.MULTILINE))
    called = [(name, arguments(call)) for call, name in re.findall(r"^ +((f8emu_\w+)\(.*\))$", code, re.MULTILINE)]
    assert {name for name, _ in called} == set(made) and len(called) >= 12
    import f8emu.torch.fused.delayed
    from f8emu.torch.fused import plans as f8emu_plans

    names = {"f8emu_plans": f8emu_plans, "f8emu": f8emu, "torch": torch}
    for name, count in called:
        (bound,) = re.findall(r"f8emu_plans\.\w+\(.*\)\.bound\([^()]*\)", made[name])
        plan = eval(bound.split(".bound(")[0], names)
        tensors = len(plan.kernel.arg_names) - len(plan.sizes) - len(plan.constants)
        assert count == tensors == bound.split(".bound(")[1].count(","), "one dtype each, after the device"
        assert callable(eval(made[name], names))
    assert any(".by_state(" in made[name] for name in made), "a state's owner is told"
    assert not re.search(r"^[^#\n]*torch\.ops\.f8emu", code, re.MULTILINE), "nothing is left to the dispatcher"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("gone", ["an argument more", "a method less"])
def test_another_inductor_costs_speed_alone(gone: str, described_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts are called as operators where a part is gone that their lowerings rest on."""
    from torch._inductor import ir, lowering

    def node(self: Any, *, kernel_idx: int, grid: Any, kernel_args: Any, unheard_of: Any) -> None: ...

    overload = fused.cast_rows.overload
    for name in (overload, overload.overloadpacket):
        monkeypatch.delitem(lowering.lowerings, name, raising=False)
    monkeypatch.delitem(sys.modules, "f8emu.torch.fused.lowering")
    monkeypatch.delattr("f8emu.torch.fused.lowering")
    monkeypatch.setattr(inductor, "_register_lowerings", inductor._register_lowerings.__wrapped__)
    if gone == "an argument more":
        monkeypatch.setattr(ir.UserDefinedTritonKernel, "__init__", node)
    else:
        monkeypatch.delattr(ir.ExternKernel, "get_kwargs_value")
    with pytest.warns(RuntimeWarning, match="casts in compiled code are calls of operators: the same bits"):
        code = code_of(lambda x: fused.cast_rows(x, FMT, *RULE), (512, 256))
    assert "torch.ops.f8emu.cast_rows.default(" in code and "f8emu_plans" not in code


def test_fusion_is_chosen_here(described_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a product and a sum are rounded once: not by Triton's default, which 3.10 turns around."""
    from triton import knobs  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    from f8emu.torch.fused import plans

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    chosen: list[bool] = []

    def instead_of_compiling(*, compile: dict[str, Any], **_: Any) -> bool:
        chosen.append(compile["enable_fp_fusion"])
        return True

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", instead_of_compiling)
    x = torch.ones(64, 64)
    plans.row_amax(64, 64)(x, x.new_empty(64))
    assert chosen == [True]
