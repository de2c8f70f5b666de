"""f8emu.torch on a Hopper GPU against the oracle: casts, scales, GEMMs on the tensor cores, compiled and captured."""

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import f8emu.torch as f8
import f8ref.numpy as reference
from benchmarks import workloads
from benchmarks.models import FeedForward
from benchmarks.subjects import make_subject
from benchmarks.timing import peak_bytes
from f8emu.conformance import load_subject, verify
from f8emu.conformance.layers.layer import LayerMode
from f8emu.conformance.layers.layer_cases import layer_cases
from f8emu.spec import (
    BLOCKWISE_UE8M0,
    E4M3FN,
    E5M2,
    FLOAT32,
    HOPPER,
    RECIPES,
    Granularity,
    OperandError,
    Overflow,
    ScaleRule,
    UnsupportedError,
)
from f8emu.spec.gemm_call import GemmCall, layer_call
from f8emu.split_k.gemm import Source
from f8emu.torch.gemm import emulation, hardware
from tests.torch_path.bits import assert_all_same_bits, assert_same_bits, expect, to_numpy
from tests.torch_path.layers import COPIED, draw, gemm_operands, laid_out

# Other people's deprecations are not what is tested here.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

E4M3 = torch.float8_e4m3fn
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = pytest.mark.parametrize("pair", HOPPER.granularity_pairs, ids=lambda p: f"{p[0].value}-{p[1].value}")
PARTS = 16
"""The cases of layers are tested in so many parts."""
GRANULARITIES = pytest.mark.parametrize("granularity", Granularity, ids=lambda g: g.value)


def test_the_gradient_of_a_bias_is_rounded_in_a_backward_pass_under_autocast() -> None:
    """Autograd rounds that of nn.Linear so, whose sum autocast does not see."""
    x, g = draw(64, 32, seed=1, dtype=torch.float32).cuda(), draw(64, 48, seed=2, dtype=torch.float32).cuda().bfloat16()
    found: list[torch.Tensor] = []
    for is_inside in (True, False):
        torch.manual_seed(0)
        layer = f8.Float8Linear(32, 48, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x)
            if is_inside:
                y.backward(g)
        if not is_inside:
            y.backward(g)
        assert layer.bias.grad is not None
        found.append(layer.bias.grad)
    assert torch.equal(*found) and torch.equal(found[0], g.sum(0).float())


def on_gpu(x: Any) -> Any:
    """The tensor on the GPU, in its own layout."""
    return x.cuda() if isinstance(x, torch.Tensor) else x


@pytest.fixture(autouse=True)
def forget_compiled_code() -> None:
    """Each test compiles its own variant of a function; together they would reach the limit of recompilations."""
    torch._dynamo.reset()


def test_values_and_gemms_equal_the_oracle() -> None:
    """Eager, as the suite has them: codes, casts, amaxes, scales; recorded and generated GEMMs on the tensor cores."""
    (found,) = verify([load_subject("torch")], stages=["formats", "scales", "golden", "gemms"]).subjects
    assert found.engine.startswith("torch") and "emulated" not in found.engine
    assert found.is_equal and all(stage.cases_total > 20 for stage in found.stages)


@pytest.mark.parametrize("overflow", Overflow, ids=lambda o: o.value)
@pytest.mark.parametrize("format", [E4M3FN, E5M2], ids=str)
def test_every_16_bit_cast_is_compiled_to_the_oracle_s(format, overflow) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)

    @torch.compile(fullgraph=True)
    def cast(x: torch.Tensor) -> torch.Tensor:
        return f8.cast(x, format, overflow=overflow).view(torch.uint8)

    codes = cast(x.cuda()).view(getattr(torch, format.name))
    assert_same_bits(codes, reference.cast(to_numpy(x), format, overflow=overflow), nan_codes=True)


@pytest.mark.parametrize("format", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_every_mantissa_gives_the_correctly_rounded_quotient(mode, format) -> None:
    amax = ((np.uint32(127) << 23) | np.arange(1 << 23, dtype=np.uint32)).view(np.float32)

    def scales(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return f8.scale_from_amax(amax, format)

    run = scales if mode == "eager" else torch.compile(scales, fullgraph=True)
    inv_scale, scale = run(torch.from_numpy(amax).cuda())
    expected = (np.float64(format.max) / amax.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(inv_scale.cpu().numpy().view(np.uint32), expected.view(np.uint32))
    expected = (1.0 / expected.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(scale.cpu().numpy().view(np.uint32), expected.view(np.uint32))


@GRANULARITIES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_operand_equals_the_oracle(dtype, granularity) -> None:
    """Amax, scale and codes in one compiled piece, with NaN, infinity, zeros and subnormals in some groups."""
    x = draw(272, 400, seed=5, dtype=torch.float32).to(dtype)
    x[0, 0], x[140, 7], x[3], x[5] = float("nan"), -float("inf"), 0, 1e-40
    rule = ScaleRule(power_of_two=True)

    @torch.compile(fullgraph=True)
    def operand(x: torch.Tensor) -> list[torch.Tensor]:
        amax = f8.amax(x, granularity)
        scales = f8.scale_from_amax(amax, E4M3FN, rule)
        codes = f8.quantize(x, scales.inv_scale, E4M3FN, granularity)
        return [amax, scales.inv_scale, scales.scale, codes.view(torch.uint8)]

    amax, inv_scale, scale, codes = operand(x.cuda())
    expected = reference.amax(to_numpy(x), granularity)
    scales = reference.scale_from_amax(expected, E4M3FN, rule)
    assert_same_bits(amax, expected)
    assert_same_bits(inv_scale, scales.inv_scale)
    assert_same_bits(scale, scales.scale)
    expected = reference.quantize(to_numpy(x), scales.inv_scale, E4M3FN, granularity)
    assert_same_bits(codes.view(torch.float8_e4m3fn), expected, nan_codes=True)


@PAIRS
@pytest.mark.parametrize("shape", [(1, 32, 256), (7, 48, 512), (48, 144, 272), (130, 272, 400), (64, 16, 16)], ids=str)
def test_sizes_beyond_the_recorded_ones(pair, shape) -> None:
    """The device takes whatever `f8emu.torch.gemm.engine` lets through, which refuses what the device does.

    M is any number, with 1x128 scales of a any multiple of 4; K and N come in steps of 16.
    """
    args = gemm_operands(pair, *shape)
    options = {"granularity_a": pair[0], "granularity_b": pair[1], "out_dtype": torch.float32}
    if pair[0] is Granularity.BLOCKWISE_1X128 and shape[0] % 4:
        with pytest.raises(OperandError, match="M must be a multiple of 4"):
            f8.scaled_mm(*map(on_gpu, args), **options, engine="hardware")
        a, b, scale_a, scale_b = map(on_gpu, args)
        formats = E4M3FN, E4M3FN
        gemm = GemmCall(call="scaled_mm", sizes=shape, formats=formats, granularities=pair, out=FLOAT32)
        with pytest.raises(RuntimeError, match="CUBLAS_STATUS_NOT_SUPPORTED"):
            hardware.scaled_mm(a, b, scale_a, scale_b, None, gemm)
        return
    out = f8.scaled_mm(*map(on_gpu, args), **options, engine="hardware")
    assert_same_bits(out, expect("scaled_mm", *args, **options))


@pytest.mark.parametrize("granularity", [Granularity.TENSORWISE, Granularity.ROWWISE], ids=lambda g: g.value)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("part", [slice(None, None, 2), slice(1, 97)], ids=["every other", "at 2 bytes"])
def test_bias_equals_the_oracle(granularity, out_dtype, part) -> None:
    args = gemm_operands((granularity, granularity), 64, 96, 512)
    bias = draw(192, seed=6, dtype=torch.float32).to(out_dtype)
    options = {"granularity_a": granularity, "granularity_b": granularity, "out_dtype": out_dtype}
    out = f8.scaled_mm(*map(on_gpu, args), bias=bias.cuda()[part], **options, engine="hardware")
    assert_same_bits(out, expect("scaled_mm", *args, bias=bias[part], **options))


@pytest.mark.parametrize("layout", COPIED)
@PAIRS
def test_layouts_that_may_be_copied(pair, layout) -> None:
    a, b, *scales = (on_gpu(x) for x in gemm_operands(pair, 128, 128, 512))
    out = f8.scaled_mm(
        laid_out(a, layout), laid_out(b.t(), layout).t(), *scales, out_dtype=torch.float32, engine="hardware"
    )
    assert_same_bits(out, f8.scaled_mm(a, b, *scales, out_dtype=torch.float32, engine="hardware"))


@pytest.mark.parametrize("use_fast_accum", [False, True])
def test_grouped_equals_the_oracle(use_fast_accum) -> None:
    a = f8.cast(draw(112, 512, seed=1, dtype=torch.float32), E4M3FN)
    b = torch.stack([f8.cast(draw(64, 512, seed=s, dtype=torch.float32), E4M3FN) for s in (2, 3, 4)]).mT
    offs = torch.tensor([32, 96, 112], dtype=torch.int32)
    args = (a, b, draw(112, seed=5, dtype=torch.float32).abs(), draw(3, 64, seed=6, dtype=torch.float32).abs(), offs)
    options = {"use_fast_accum": use_fast_accum, "out_dtype": torch.bfloat16}
    out = f8.scaled_grouped_mm(*map(on_gpu, args), **options, engine="hardware")
    assert_same_bits(out, expect("scaled_grouped_mm", *args, **options))


GROUPS = {"even": [64] * 16, "odd": [5, 0, 129, 1, 300, 0, 77], "many": [3, 40] * 128, "one": [513], "empty": [0, 0, 0]}


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("is_of_rows", [True, False], ids=["rows", "inner"])
def test_promoted_groups_equal_the_library_s(sizes: list[int], is_of_rows: bool) -> None:
    """Any codes but NaN, scales of every magnitude; groups along K begin at multiples of 16, as casts lay them."""
    sizes = sizes if is_of_rows else [-(-size // 16) * 16 for size in sizes]
    groups, total = len(sizes), sum(sizes) + 16
    total += -total % 16
    torch.manual_seed(0)
    m, n, k = (total, 272, 1040) if is_of_rows else (288, 336, total)
    a, b = (
        torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        for shape in ((m, k), (groups, n, k) if is_of_rows else (n, k))
    )
    a, b = (x.masked_fill_(x & 127 == 127, 1).view(E4M3) for x in (a, b))
    scale_a, scale_b = (
        torch.exp2(torch.randint(-80, 20, shape, device="cuda") + torch.rand(shape, device="cuda"))
        for shape in ((m,) if is_of_rows else (groups * m,), (groups, n) if is_of_rows else (groups * n,))
    )
    offs = torch.tensor(sizes, device="cuda").cumsum(0).int()
    wanted = torch._scaled_grouped_mm(a, b.mT, scale_a, scale_b, offs=offs, out_dtype=torch.bfloat16)  # pyright: ignore[reportPrivateImportUsage]
    out = f8.scaled_grouped_mm(a, b.mT, scale_a, scale_b, offs, engine="hardware")
    rows = int(offs[-1])
    assert_same_bits(*((x[:rows] for x in (out, wanted)) if is_of_rows else (out, wanted)))


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["row, column", "column, row"])
@pytest.mark.parametrize("shape", [(64, 96, 512), (48, 32, 144), (17, 16, 16)], ids=str)
def test_bfloat16_mm_equals_the_oracle(shape, out_dtype, layout) -> None:
    m, n, k = shape
    a, b = draw(m, k, seed=1), draw(n, k, seed=2).t()
    if layout == "column, row":
        a, b = a.t().contiguous().t(), b.contiguous()
    out = f8.mm(a.cuda(), b.cuda(), out_dtype=out_dtype, engine="hardware")
    assert_same_bits(out, expect("mm", a, b, out_dtype=out_dtype))


@PAIRS
def test_the_emulation_on_the_gpu_equals_the_tensor_cores(pair) -> None:
    args = [on_gpu(x) for x in gemm_operands(pair, 128, 256, 512)]
    out = f8.scaled_mm(*args, out_dtype=torch.float32, engine="emulated")
    assert out.device == args[0].device
    assert_same_bits(out, f8.scaled_mm(*args, out_dtype=torch.float32, engine="hardware"))


@pytest.mark.parametrize("part", range(PARTS))
def test_converted_layers_equal_the_oracle(part: int, assert_layers_equal: Any) -> None:
    """Every code, scale, product and gradient, eager and compiled: the stage of the suite, with its larger shapes.

    In parts, since several processes have the answers of the oracle, minutes of a CPU, sooner than one.
    """
    cases = [case for case in layer_cases(full_size=True) if case.mode is not LayerMode.TRACE][part::PARTS]
    assert len(cases) > 10
    assert_layers_equal("torch", cases)


def test_a_compiled_amax_is_that_of_the_rounded_values() -> None:
    """The compiled code computes the input in float32, and rounds it where it stores it."""
    layer = f8.Float8Linear(256, 128, False, dtype=torch.bfloat16, device="cuda", engine="hardware")
    compiled = torch.compile(lambda x: layer(x * x), fullgraph=True, dynamic=False)
    for value in (1 + torch.arange(128, device="cuda") / 128).bfloat16():
        x = value.expand(64, 256).contiguous()
        assert_same_bits(compiled(x), layer(x * x))


def drawn_step(step: int, tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and grad_output [tokens, dim] of a step; the steps differ in magnitude, so that an old scale shows."""
    x, grad_output = (draw(tokens, dim, seed=2 * step + i) * 4.0 ** (step - 4 * i) for i in range(2))
    return x.cuda(), grad_output.cuda()


def stepped(model: Any, parameters: Any, x: torch.Tensor, grad_output: torch.Tensor) -> list[torch.Tensor]:
    """Output, grad_input and gradients of the parameters, fresh ones."""
    x.grad = None
    for parameter in parameters:
        parameter.grad = None
    output = model(x)
    output.backward(grad_output)
    grads = [x.grad, *(parameter.grad for parameter in parameters)]
    return [output.detach(), *(grad for grad in grads if grad is not None)]


def captured(
    model: Any, parameters: Any, x: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """One step as a CUDA graph, after some on a side stream; and what a replay overwrites."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            stepped(model, parameters, x, grad_output)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = stepped(model, parameters, x, grad_output)
    return graph, results


@pytest.mark.parametrize("name", RECIPES)
def test_a_captured_step_gives_the_bits_of_the_eager_one(name) -> None:
    """Replayed with new data; the state of delayed scaling is updated in the graph."""
    torch.manual_seed(0)
    eager = FeedForward(256, 384).to("cuda", torch.bfloat16)
    f8.convert_to_float8_training(eager, config=RECIPES[name], engine="hardware")
    # The first step of delayed scaling has no scales yet: it is another graph, and not the one to keep.
    x, grad_output = drawn_step(0, 192, 256)
    stepped(eager, list(eager.parameters()), x.requires_grad_(), grad_output)
    replayed = copy.deepcopy(eager)
    static_x, static_grad_output = drawn_step(1, 192, 256)
    graph, observed = captured(replayed, list(replayed.parameters()), static_x.requires_grad_(), static_grad_output)
    # The capture computed nothing, the steps before it have updated the scales.
    f8.load_delayed_state_dict(replayed, f8.delayed_state_dict(eager))
    for step in range(1, 4):
        x, grad_output = drawn_step(step, 192, 256)
        expected = stepped(eager, list(eager.parameters()), x.clone().requires_grad_(), grad_output)
        with torch.no_grad():
            static_x.copy_(x)
            static_grad_output.copy_(grad_output)
        graph.replay()
        assert len(observed) == len(expected) == 2 + 4
        for found, wanted in zip(observed, expected, strict=True):
            assert wanted.count_nonzero() > 0
            assert_same_bits(found, wanted)
        raised, wanted_state = f8.delayed_state_dict(replayed), f8.delayed_state_dict(eager)
        for key, wanted in wanted_state.items():
            assert torch.equal(raised[key], wanted), key


def test_a_captured_layer_casts_its_input_anew() -> None:
    """A graph may neither use operands that were made before it, nor lend its own, which no replay has computed yet."""
    layer = f8.Float8Linear(256, 384, False, dtype=torch.bfloat16, device="cuda", engine="hardware")
    x, grad_output = drawn_step(0, 192, 256)[0].requires_grad_(), drawn_step(0, 192, 384)[1]
    expected = stepped(layer, [layer.weight], x.detach().clone().requires_grad_(), grad_output)
    graph, observed = captured(layer, [layer.weight], x, grad_output)
    assert_all_same_bits(stepped(layer, [layer.weight], x, grad_output), expected)
    other = drawn_step(1, 192, 256)[0]
    expected = stepped(layer, [layer.weight], other.clone().requires_grad_(), grad_output)
    with torch.no_grad():
        x.copy_(other)
    graph.replay()
    assert_all_same_bits(observed, expected)


@pytest.mark.parametrize("kind", ["eager", "captured", "captured without a report"])
def test_an_infinity_is_told_without_waiting_for_the_device(kind) -> None:
    """Once, by name, at the update after the one that the device has finished; replays of a graph tell nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 128, False, dtype=torch.bfloat16, device="cuda"))
    f8.convert_to_float8_training(model, config="delayed", engine="hardware")
    sync = f8.sync_float8_amax_and_scale_history
    x, grad_output = drawn_step(0, 192, 256)[0], drawn_step(0, 192, 128)[1]
    stepped(model, [], x, grad_output)
    sync(model)
    if kind == "captured without a report":  # none may be allocated then, and a loaded state begins another
        f8.load_delayed_state_dict(model, f8.delayed_state_dict(model))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if kind != "eager":
        with torch.cuda.graph(graph):
            sync(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(4):
            stepped(model, [], x if step == 0 else x * float("inf"), grad_output)
            torch.cuda.set_sync_debug_mode("error")
            try:
                if kind == "eager":
                    sync(model)
                else:
                    graph.replay()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        sync(model)
        torch.cuda.synchronize()
        sync(model)
    texts = [str(warning.message) for warning in seen if "infinite or NaN" in str(warning.message)]
    assert len(texts) == 1 and "infinite or NaN for: input of 0;" in texts[0]
    assert f8.delayed_state_dict(model)["0.counts"][2].tolist() == [3, 0, 0]


@pytest.mark.parametrize("way", ["reduce-overhead", "make_graphed_callables"])
def test_passes_that_are_replayed_follow_their_scales(way: str) -> None:
    """Forward and backward are graphs of their own, between which and after which no host code of ours runs."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 384, bias=False), torch.nn.Linear(384, 128, bias=False)]
    eager = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
    f8.convert_to_float8_training(eager, config="delayed", engine="hardware")
    x, grad_output = drawn_step(0, 192, 256)[0].requires_grad_(), drawn_step(0, 192, 128)[1]
    for _ in range(3):  # the scales are known to be set
        stepped(eager, list(eager.parameters()), x, grad_output)
        torch.cuda.synchronize()
    model = copy.deepcopy(eager)
    kept = f8.delayed_state_dict(model)
    if way == "reduce-overhead":
        run: Any = torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")
    else:
        run = torch.cuda.make_graphed_callables(model, (x.detach().clone().requires_grad_(),))
        f8.load_delayed_state_dict(model, kept)  # capturing called the model
    for step in range(6):
        x, grad_output = drawn_step(step, 192, 256)[0].requires_grad_(), drawn_step(step, 192, 128)[1]
        expected = stepped(eager, list(eager.parameters()), x, grad_output)
        torch.compiler.cudagraph_mark_step_begin()
        assert_all_same_bits(stepped(run, list(model.parameters()), x, grad_output), expected)
    f8.sync_float8_amax_and_scale_history(model)
    observed, wanted = f8.delayed_state_dict(model), f8.delayed_state_dict(eager)
    assert all(torch.equal(observed[key], value) for key, value in wanted.items())


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_reduced_overhead_gives_the_bits_of_eager(name) -> None:
    """The first step warms up, the second is recorded as a CUDA graph, the others are replays.

    Linear layers alone: between others the compiler keeps float32 where eager rounds.
    """
    layers = [torch.nn.Linear(256, 384, bias=False), torch.nn.Linear(384, 128, bias=False)]
    model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16)
    f8.convert_to_float8_training(model, config=RECIPES[name], engine="hardware")
    compiled = torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    parameters = list(model.parameters())
    for step in range(5):
        x, grad_output = drawn_step(step, 192, 256)[0].requires_grad_(), drawn_step(step, 192, 128)[1]
        expected = stepped(model, parameters, x, grad_output)
        torch.compiler.cudagraph_mark_step_begin()
        observed = [found.clone() for found in stepped(compiled, parameters, x, grad_output)]
        assert_all_same_bits(observed, expected)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skipped


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "delayed", "blockwise"])
def test_a_compiled_block_holds_no_more_memory_than_bfloat16(name: str) -> None:
    """A cast's input is computed before the results of the cast are allocated."""
    device, workload = torch.device("cuda"), workloads.feed_forward(2048, 1024, 3584)
    model = workload.build().to(device, torch.bfloat16)
    peaks: list[int] = []
    for subject in ("bf16", f"f8emu/{name}"):
        step = make_subject(subject, "compiled", model, workload.input(device), workload.grad_output(device), "none")
        for _ in range(3):
            step.step()
        step.free()
        peaks.append(peak_bytes(step.step, device) or 0)
        step.free()
    assert 0 < peaks[1] <= 1.05 * peaks[0]  # results that are allocated too early take 16 % more


def test_the_emulation_leaves_the_memory_of_the_gpu_to_torch() -> None:
    """JAX on its own would take three quarters of it at its first use."""
    code = """
import torch, f8emu.torch as f8
a = torch.zeros(64, 64, device="cuda").to(torch.float8_e4m3fn)
one = torch.ones((), device="cuda")
f8.scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16, engine="emulated")
import jax
memory = jax.local_devices()[0].memory_stats()
print(f8.engine_of("cuda", "emulated"), memory["pool_bytes"] < 0.01 * memory["bytes_limit"])
"""
    script = f"import sys; sys.path[:0] = {sys.path!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("emulated by f8ref.jax on ")
    assert done.stdout.splitlines()[-1].endswith(" True")


def test_the_report_names_the_hardware() -> None:
    assert f8.engine_of("cuda") == f"torch._scaled_mm on {torch.cuda.get_device_name()}"
    assert f8.engine_of("cpu") == "emulated by f8emu.native on cpu"


@pytest.mark.parametrize(
    ("pair", "m", "n", "k"), [(0, 20, 512, 11904), (2, 20, 512, 11904), (3, 4, 4096, 8448)], ids=str
)
def test_the_emulation_on_the_gpu_asks_its_library_for_s(pair: int, m: int, n: int, k: int) -> None:
    """An H100 cuts these otherwise than an H200."""
    args = [on_gpu(x) for x in gemm_operands(HOPPER.granularity_pairs[pair], m, n, k)]
    options: dict[str, Any] = {"out_dtype": torch.float32, "use_fast_accum": pair == 0}
    observed, expected = (f8.scaled_mm(*args, **options, engine=engine) for engine in ("emulated", "hardware"))
    assert_same_bits(observed, expected)


def test_the_emulated_mm_and_what_is_captured_ask_too() -> None:
    a, b = draw(56, 7936, seed=1).cuda(), draw(128, 7936, seed=2).cuda()
    observed, expected = (
        f8.mm(a, b.t(), out_dtype=torch.float32, engine=engine) for engine in ("emulated", "hardware")
    )
    assert_same_bits(observed, expected)
    gemm = layer_call(RECIPES["tensorwise"].gemms["output"], (56, 128, 7936), FLOAT32, HOPPER)
    split = emulation.split_of(gemm, a.device, "tn", warns=False)
    assert split.source is Source.ASKED and split.split_k > 1


def test_the_hardware_chooses_its_own_split() -> None:
    args = [on_gpu(x) for x in gemm_operands(HOPPER.granularity_pairs[0], 64, 64, 256)]
    with pytest.raises(UnsupportedError, match=r"scaled_mm: on the hardware the library's heuristic decides"):
        f8.scaled_mm(*args, out_dtype=torch.bfloat16, split_k=2)
    high = torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(UnsupportedError, match=r"mm: on the hardware the library's heuristic decides"):
        f8.mm(high, high, split_k=1)


@pytest.mark.parametrize("rows", [1, 5, 16, 60])
def test_the_serving_recipe_is_never_split(rows: int, tmp_path: Path) -> None:
    """Few outputs and a long K, which cuBLAS splits: the product is one sum. Exported weights are those of a CPU."""
    torch.manual_seed(rows)
    model: Any = nn.Sequential(nn.Linear(8192, 128, bias=False, dtype=torch.float32))
    f8.convert_to_float8_training(model, config="blockwise_ue8m0")
    x = torch.randn(rows, 8192) * torch.logspace(-6, 2, 8192)
    expected = reference.linear(BLOCKWISE_UE8M0, x.numpy(), model[0].weight.detach().numpy()).result
    f8.export_float8(model, tmp_path / "cpu", format="block")
    model.cuda()
    f8.export_float8(model, tmp_path / "gpu", format="block")
    assert (tmp_path / "cpu/f8emu_manifest.json").read_text() == (tmp_path / "gpu/f8emu_manifest.json").read_text()
    with torch.no_grad():
        assert_same_bits(model(x.cuda()).cpu(), expected)
        assert_same_bits(torch.compile(model)(x.cuda()).cpu(), expected)
