"""The emulation cuts K as the plan says: eager, compiled, in layers, and said once where the plan does not know."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import f8emu.torch as f8
from f8emu.conformance.arrays import torch_arrays
from f8emu.conformance.compare import different
from f8emu.conformance.layers.layer import LayerCase, LayerMode
from f8emu.conformance.layers.trace import layer_parts, planned_slices
from f8emu.conformance.run.subject import load_subject
from f8emu.spec import BLOCKWISE, FLOAT32, HOPPER, ROWWISE_WITH_GW_HP, TENSORWISE, GemmName, Granularity, Recipe
from f8emu.spec.gemm_call import layer_call
from f8emu.split_k import ask
from f8emu.split_k.gemm import Source, Split
from f8emu.torch.gemm import emulation as torch_emulation
from f8emu.torch.gemm import operators
from tests.torch_path.layers import draw, draw_codes

pytest.importorskip("jax")
# Loading the compiler warns about torch's own old code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

ARRAYS = torch_arrays("test")


def equal(a: Tensor, b: np.ndarray) -> bool:
    return ARRAYS.store(a).tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("of_a", "of_b", "m", "n", "k", "s"),
    [
        ("tensorwise", "tensorwise", 8, 64, 8192, 3),
        ("tensorwise", "tensorwise", 5, 32, 6144, 2),
        ("tensorwise", "tensorwise", 8, 64, 4096, 1),
        ("rowwise", "rowwise", 8, 64, 8192, 1),  # never split
        ("blockwise_1x128", "blockwise_1x128", 8, 32, 8192, 3),  # of 22 blocks
        ("blockwise_1x128", "blockwise_128x128", 8, 32, 8192, 3),  # of 24
        ("blockwise_1x128", "blockwise_128x128", 8, 32, 4096, 1),
    ],
)
def test_scaled_mm_is_cut_as_planned(of_a: str, of_b: str, m: int, n: int, k: int, s: int) -> None:
    import f8ref.numpy as oracle

    generator = torch.Generator().manual_seed(3)
    scale_a = torch.rand(Granularity(of_a).scale_shape(m, k), generator=generator) + 0.5
    scale_b = torch.rand(Granularity(of_b).scale_shape(n, k), generator=generator).t().contiguous() + 0.5
    operands = draw_codes(m, k, seed=1), draw_codes(n, k, seed=2).t(), scale_a, scale_b
    options: dict[str, Any] = {"granularity_a": of_a, "granularity_b": of_b, "use_fast_accum": "block" not in of_a}
    expected = {
        slices: oracle.scaled_mm(*map(ARRAYS.store, operands), **options, out_dtype="float32", split_k=slices)
        for slices in (1, s)
    }
    options |= {"out_dtype": torch.float32, "engine": "emulated"}
    out = f8.scaled_mm(*operands, **options)
    assert equal(out, expected[s])
    assert equal(f8.scaled_mm(*operands, **options, split_k=1), expected[1])
    assert s == 1 or not equal(out, expected[1])


def test_the_layout_of_mm_decides() -> None:
    """The recording has 8 slices of 8 x 1536 x 16384 as tn, 11 as nn and 4 as nt, where a is contiguous along M."""
    import f8ref.numpy as oracle

    a, b = draw(8, 16384, seed=1), draw(16384, 1536, seed=2)
    layouts = {"tn": (a, b.t().contiguous().t()), "nn": (a, b), "nt": (a.t().contiguous().t(), b)}
    few = ARRAYS.store(a), ARRAYS.store(b[:, :16].contiguous())
    expected = {s: oracle.mm(*few, out_dtype="float32", split_k=s) for s in (1, 4, 8, 11)}
    assert len({x.tobytes() for x in expected.values()}) == 4
    for (layout, operands), s in zip(layouts.items(), (8, 11, 4), strict=True):
        out = f8.mm(*operands, out_dtype=torch.float32, engine="emulated")[:, :16]
        assert equal(out.contiguous(), expected[s]), layout


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [
        *((recipe, LayerMode.EAGER) for recipe in (TENSORWISE, ROWWISE_WITH_GW_HP, BLOCKWISE)),
        *((recipe, LayerMode.COMPILED) for recipe in (ROWWISE_WITH_GW_HP, BLOCKWISE)),
    ],
    ids=str,
)
def test_layers_are_cut_as_the_oracle_is_told(recipe: Recipe, mode: LayerMode) -> None:
    """K of one GEMM of each layer is long: of `output`, or of the bfloat16 `grad_weight`."""
    shape, slices = {
        TENSORWISE.name: ((16, 32, 8192), {"output": 3}),
        ROWWISE_WITH_GW_HP.name: ((4096, 32, 64), {"grad_weight": 3}),
        BLOCKWISE.name: ((7, 32, 8192), {"output": 3}),
    }[recipe.name]
    kind: dict[str, Any] = {"dtype": FLOAT32, "weight_dtype": FLOAT32, "with_bias": False}
    case = LayerCase(recipe=recipe, mode=mode, shape=shape, **kind)
    assert planned_slices(case, 1) == slices
    oracle, subject = load_subject("f8ref.numpy"), load_subject("torch")
    assert subject.train is not None
    expected, observed = layer_parts(case, oracle.verbs), subject.train(case)
    assert observed and [part for part in observed if different(observed[part], expected[part]).any()] == []


def test_the_plan_is_asked_for_padded_rows() -> None:
    """1x128 scales want rows in multiples of 4: of 125 rows the library sees 128, and those it does not cut."""
    kind: dict[str, Any] = {"recipe": BLOCKWISE, "mode": LayerMode.EAGER, "dtype": FLOAT32, "weight_dtype": FLOAT32}
    slices = [planned_slices(LayerCase(shape=(rows, 1024, 8192), **kind), 1) for rows in (124, 125)]
    assert slices == [{"output": 2}, {}]


def test_zero_padding_leaves_the_layout_as_it_is() -> None:
    """[PLAN-3] S of the bfloat16 `grad_weight` is that of nt, 1, also for a batch that is padded; as tn it is 2."""
    import f8emu.numpy

    x, weight, grad = (draw(rows, 512, seed=seed).float() for seed, rows in enumerate((4104, 512, 4104)))
    layer = f8.Float8Linear(512, 512, False, recipe=ROWWISE_WITH_GW_HP)
    layer.weight = torch.nn.Parameter(weight.clone())
    layer(x).backward(grad)
    tensors = [ARRAYS.store(tensor) for tensor in (x, weight, grad)]
    assert layer.weight.grad is not None
    for split_k in (None, 2):
        slices: dict[GemmName, int] | None = None if split_k is None else {"grad_weight": split_k}
        trace = f8emu.numpy.linear(ROWWISE_WITH_GW_HP, *tensors, split_k=slices)
        assert trace.grad_weight is not None
        assert equal(layer.weight.grad, trace.grad_weight.product) is (split_k is None)


def test_an_h100_has_a_plan_of_its_own() -> None:
    """20 x 512 x 11904 is cut into 4 on an H200 and into 3 on an H100, by every backend."""
    import jax.numpy as jnp

    import f8emu.jax
    import f8emu.numpy

    a, b, one = draw_codes(20, 11904, seed=1), draw_codes(512, 11904, seed=2).t(), torch.ones(())
    arrays = [ARRAYS.store(x) for x in (a, b, one, one)]
    for chip, s in (("Hopper", 4), ("H100", 3)):
        options: dict[str, Any] = {"out_dtype": "float32", "use_fast_accum": True, "chip": chip}
        expected = f8emu.numpy.scaled_mm(*arrays, **options, split_k=s)
        assert f8emu.numpy.scaled_mm(*arrays, **options).tobytes() == expected.tobytes()
        assert np.asarray(f8emu.jax.scaled_mm(*map(jnp.asarray, arrays), **options)).tobytes() == expected.tobytes()
        assert equal(f8.scaled_mm(a, b, one, one, **options), expected)
        assert f8emu.numpy.scaled_mm(*arrays, **options, split_k=7 - s).tobytes() != expected.tobytes()


def test_on_the_gpu_whose_bits_are_wanted_its_library_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says 2 where the plan says 3."""
    asked: list[Any] = []
    monkeypatch.setattr(operators, "_PREPARED", {})  # which remembers S
    monkeypatch.setattr(torch_emulation, "is_device_of", lambda chip, device: (chip, device) == (HOPPER, a.device))
    monkeypatch.setattr(ask, "split_k_at_hand", lambda gemm: asked.append(gemm) or Split(2, Source.ASKED))
    a, b, one = draw_codes(8, 8192, seed=1), draw_codes(64, 8192, seed=2).t(), torch.ones(())
    options: dict[str, Any] = {"out_dtype": torch.float32, "use_fast_accum": True, "engine": "emulated"}
    found = {s: f8.scaled_mm(a, b, one, one, **options, split_k=s) for s in (None, 2, 3)}
    assert torch.equal(found[None], found[2]) and not torch.equal(found[None], found[3])
    high: dict[str, Any] = {"out_dtype": torch.float32, "engine": "emulated"}
    of_mm = {s: f8.mm(a.bfloat16(), b.bfloat16(), **high, split_k=s) for s in (None, 2)}
    assert torch.equal(of_mm[None], of_mm[2])
    gemm = layer_call(TENSORWISE.gemms["output"], (8, 64, 8192), FLOAT32, HOPPER)
    assert torch_emulation.split_of(gemm, a.device, "tn", warns=False) == (2, Source.ASKED)
    assert [(gemm.table, gemm.k) for gemm in asked] == [
        *(("tensorwise float32", 8192), ("bfloat16 tn", 8192), ("tensorwise float32", 8192))
    ]


def test_what_the_plan_does_not_know_is_said_once_for_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "_WARNED", set())
    monkeypatch.setattr(operators, "_PREPARED", {})
    a, b = draw(4096, 12, seed=1).t(), draw(4096, 32, seed=2)  # rows of a are not 16 bytes apart
    with pytest.warns(UserWarning, match=r"plan of cuBLAS .* on NVIDIA H200 has no split-K for this GEMM.*layout='nt'"):
        out = f8.mm(a, b, engine="emulated")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(out, f8.mm(a, b, engine="emulated"))
        assert torch.equal(out, f8.mm(a, b, engine="emulated", split_k=1))
