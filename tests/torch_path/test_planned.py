"""The emulation cuts K as the plan says: eager, compiled, in layers, and said once where the plan does not know."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import f8emu.torch as f8
from f8emu.conformance.arrays import torch_arrays
from f8emu.spec import E4M3FN, TENSORWISE
from f8emu.torch.gemm import planned

pytest.importorskip("jax")
# Loading the compiler warns about torch's own old code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

ARRAYS = torch_arrays("test")


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def codes(seed: int, *shape: int) -> Tensor:
    return f8.cast(normal(seed, *shape).float() * 4, E4M3FN)


def equal(a: Tensor, b: np.ndarray) -> bool:
    return ARRAYS.store(a).tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("m", "n", "k", "fast", "s"), [(8, 64, 8192, True, 3), (5, 32, 6144, True, 2), (8, 64, 4096, True, 1)]
)
def test_scaled_mm_is_cut_as_planned(m: int, n: int, k: int, fast: bool, s: int) -> None:
    import f8ref.numpy as oracle

    a, b, one = codes(1, m, k), codes(2, n, k).t(), torch.ones(())
    expected = {
        slices: oracle.scaled_mm(
            *map(ARRAYS.store, (a, b, one, one)), out_dtype="float32", use_fast_accum=fast, split_k=slices
        )
        for slices in (1, s)
    }
    options: dict[str, Any] = {"out_dtype": torch.float32, "use_fast_accum": fast, "engine": "emulated"}
    out = f8.scaled_mm(a, b, one, one, **options)
    assert equal(out, expected[s])
    assert equal(f8.scaled_mm(a, b, one, one, **options, split_k=1), expected[1])
    assert s == 1 or not equal(out, expected[1])
    rowwise = f8.scaled_mm(a, b, torch.ones(m, 1), torch.ones(1, n), **options)
    assert equal(rowwise, expected[1])  # never split


def test_the_layout_of_mm_decides() -> None:
    """The recording has 8 slices of 8 x 1536 x 16384 as tn, 11 as nn and 4 as nt, where a is contiguous along M."""
    import f8ref.numpy as oracle

    a, b = normal(1, 8, 16384), normal(2, 16384, 1536)
    layouts = {"tn": (a, b.t().contiguous().t()), "nn": (a, b), "nt": (a.t().contiguous().t(), b)}
    few = ARRAYS.store(a), ARRAYS.store(b[:, :16].contiguous())
    expected = {s: oracle.mm(*few, out_dtype="float32", split_k=s) for s in (1, 4, 8, 11)}
    assert len({x.tobytes() for x in expected.values()}) == 4
    for (layout, operands), s in zip(layouts.items(), (8, 11, 4), strict=True):
        out = f8.mm(*operands, out_dtype=torch.float32, engine="emulated")[:, :16]
        assert equal(out.contiguous(), expected[s]), layout


def test_layers_and_compiled_code_are_cut_too() -> None:
    linear = torch.nn.Linear(8192, 32, bias=False).bfloat16()
    model = f8.convert_to_float8_training(torch.nn.Sequential(linear), config=TENSORWISE)
    x = normal(3, 16, 8192)
    eager = model(x)
    operands: list[tuple[Tensor, Tensor]] = []
    for tensor in (x, linear.weight.detach()):
        scales = f8.scale_from_amax(f8.amax(tensor), E4M3FN)
        operands.append((f8.quantize(tensor, scales.inv_scale, E4M3FN), scales.scale))
    (a, scale_a), (b, scale_b) = operands
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": TENSORWISE.output.use_fast_accum}
    by_slices = {s: f8.scaled_mm(a, b.t(), scale_a, scale_b, **options, engine="emulated", split_k=s) for s in (1, 3)}
    assert torch.equal(eager, by_slices[3]) and not torch.equal(eager, by_slices[1])
    assert torch.equal(torch.compile(model)(x), eager)


def test_what_the_plan_does_not_know_is_said_once_for_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "_SAID", set())
    a, b = normal(1, 4096, 12).t(), normal(2, 4096, 32)  # rows of a are not 16 bytes apart
    with pytest.warns(UserWarning, match=r"cuBLAS .* on NVIDIA H200 cuts K of this GEMM is not known.*layout='nt'"):
        out = f8.mm(a, b, engine="emulated")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(out, f8.mm(a, b, engine="emulated"))
        assert torch.equal(out, f8.mm(a, b, engine="emulated", split_k=1))
