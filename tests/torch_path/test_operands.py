"""Bad input of the GEMMs that torch alone can have: each a clear error that names the remedy, for both engines."""

from typing import Any

import pytest
import torch

import f8emu.torch as f8
from f8emu.spec import OperandError, SpecError, UnsupportedError

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


def zeros(rows: int, k: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.zeros(rows, k, dtype=dtype)


GOOD: dict[str, Any] = {
    "a": zeros(32, 64),
    "b": zeros(48, 64).t(),
    "scale_a": torch.ones(()),
    "scale_b": torch.ones(()),
    "out_dtype": BF16,
}


def call(**changes: Any) -> torch.Tensor:
    """The good tensorwise call with some arguments changed."""
    return f8.scaled_mm(**(GOOD | changes))


ROWWISE: dict[str, Any] = {"scale_a": torch.ones(32, 1), "scale_b": torch.ones(1, 48)}
BLOCKWISE: dict[str, Any] = {
    "a": zeros(32, 256),
    "b": zeros(48, 256).t(),
    "scale_a": torch.ones(32, 2),
    "scale_b": torch.ones(2, 1),
}

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # What f8emu.spec.gemm_call refuses (tests/spec/test_gemm_call.py) reaches it: one of each kind.
    "float32 operand": ({"a": zeros(32, 64, torch.float32)}, OperandError, "a must be float8.*got float32"),
    "weight not transposed": ({"b": zeros(48, 64)}, OperandError, r"got shapes \[32, 64\] and \[48, 64\]"),
    "scales of another granularity": (
        ROWWISE | {"granularity_a": "tensorwise"},
        OperandError,
        r"\[1, 1\] and \[1, 1\] for tensorwise x tensorwise; got \[32, 1\]",
    ),
    "N not a multiple": ({"b": zeros(40, 64).t()}, OperandError, "multiples of 16; got K = 64, N = 40; pad"),
    "blockwise, fast": (BLOCKWISE | {"use_fast_accum": True}, UnsupportedError, "use_fast_accum"),
    "bias of another size": ({"bias": torch.zeros(32, dtype=BF16)}, OperandError, r"shape \[N\] = \[48\]"),
    "split_k 0": ({"split_k": 0}, SpecError, "split_k must be a static integer of at least 1"),
    # What torch alone knows: tensors, strides, devices, engines.
    "an array": ({"a": [1.0]}, OperandError, r"scaled_mm: a must be a torch.Tensor; got list.*interop.to_torch"),
    "raw codes": ({"a": zeros(32, 64, torch.uint8)}, OperandError, "a must be float8.*got uint8"),
    "a column-major": ({"a": zeros(64, 32).t()}, OperandError, r"a must be row-major.*\[1, 32\].*a.contiguous\(\)"),
    "a strided": ({"a": zeros(32, 128)[:, ::2]}, OperandError, r"a must be row-major.*strides \[128, 2\]"),
    "a expanded": ({"a": zeros(1, 64).expand(32, 64)}, OperandError, r"a must be row-major.*strides \[0, 1\]"),
    "b row-major": ({"b": zeros(64, 48)}, OperandError, r"b must be column-major.*b.t\(\).contiguous\(\).t\(\)"),
    "strided rowwise scales": (
        ROWWISE | {"scale_b": torch.ones(1, 96)[:, ::2]},
        OperandError,
        r"rowwise scales must be contiguous; call scale.contiguous\(\)",
    ),
    "no out_dtype": ({"out_dtype": None}, UnsupportedError, "out_dtype=None asks for float8.*pass out_dtype=torch.bf"),
    "float8 out": ({"out_dtype": E4M3}, UnsupportedError, "out_dtype must be.*got torch.float8_e4m3fn; quantize"),
    "float64 out": ({"out_dtype": torch.float64}, UnsupportedError, "out_dtype must be.*got torch.float64"),
    "unknown out": ({"out_dtype": "float33"}, SpecError, "unknown format 'float33'"),
    "odd out": ({"out_dtype": 32}, OperandError, "out_dtype must be a torch.dtype, a Format or its name; got 32"),
    "unknown engine": ({"engine": "gpu"}, OperandError, "engine must be one of auto, hardware, emulated; got 'gpu'"),
    "another device": ({"scale_a": torch.ones((), device="meta")}, OperandError, "one device; a is on cpu and scale_a"),
    "a bias elsewhere": (
        {"bias": torch.zeros(48, dtype=BF16, device="meta")},
        OperandError,
        "a is on cpu and bias on meta; move",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_scaled_mm_refuses(name) -> None:
    changes, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize("verb", ["scaled_mm", "mm", "scaled_grouped_mm", "engine_of"])
def test_hardware_is_refused_where_there_is_none(verb) -> None:
    """No silent fallback: what was asked for by name runs or fails."""
    codes, high = zeros(32, 64), zeros(32, 64, BF16)
    calls = {
        "scaled_mm": lambda: call(engine="hardware"),
        "mm": lambda: f8.mm(high, high.t(), engine="hardware"),
        "scaled_grouped_mm": lambda: f8.scaled_grouped_mm(
            codes,
            codes[None].mT,
            torch.ones(32),
            torch.ones(1, 32),
            torch.tensor([32], dtype=torch.int32),
            engine="hardware",
        ),
        "engine_of": lambda: f8.engine_of("cpu", "hardware"),
    }
    message = f"{verb}: engine='hardware' needs tensors on a CUDA device.*9.0, Hopper; got cpu; .*engine='emulated'"
    with pytest.raises(UnsupportedError, match=message):
        calls[verb]()


GOOD_GROUPED: dict[str, Any] = {
    "a": zeros(32, 64),
    "b": zeros(2 * 16, 64).view(2, 16, 64).mT,
    "scale_a": torch.ones(32),
    "scale_b": torch.ones(2, 16),
    "offs": torch.tensor([16, 32], dtype=torch.int32),
}
GROUPED = f8.scaled_grouped_mm
GOOD_MM = {"a": zeros(32, 64, BF16), "b": zeros(32, 64, BF16).t()}
BAD_OTHERS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "2-d b": (GROUPED, {"b": zeros(16, 64).t()}, OperandError, "a b of two dimensions has no groups"),
    "no groups": (GROUPED, {"b": GOOD_GROUPED["b"][:0]}, OperandError, "groups"),
    "b row-major": (GROUPED, {"b": zeros(2 * 64, 16).view(2, 64, 16)}, OperandError, "b must be column-major"),
    "strided scale": (GROUPED, {"scale_a": torch.ones(64)[::2]}, OperandError, "scales must be contiguous"),
    "rows left over": (GROUPED, {"offs": torch.tensor([8, 16]).int()}, OperandError, r"got \[8, 16\]"),
    "ends that fall": (GROUPED, {"offs": torch.tensor([40, 32]).int()}, OperandError, r"got \[40, 32\]"),
    "mm, N": (f8.mm, {"b": zeros(64, 8, BF16)}, OperandError, "K and N must be multiples of 16; got K = 64, N = 8"),
    "mm, out": (f8.mm, {"out_dtype": torch.float64}, UnsupportedError, "mm: out_dtype must be"),
    "mm, None": (f8.mm, {"a": None}, OperandError, "mm: a must be a torch.Tensor; got NoneType"),
}


@pytest.mark.parametrize("name", BAD_OTHERS)
def test_other_gemms_refuse(name) -> None:
    verb, changes, error, message = BAD_OTHERS[name]
    with pytest.raises(error, match=message):
        verb(**((GOOD_MM if verb is f8.mm else GOOD_GROUPED) | changes))


def test_the_good_calls_are_good() -> None:
    """What the calls above change one thing of: nothing is refused without the change."""
    for changes in ({}, ROWWISE, BLOCKWISE):
        on_meta = {k: v.to("meta") for k, v in changes.items()}
        rest = {k: v.to("meta") for k, v in GOOD.items() if isinstance(v, torch.Tensor)}
        assert call(**(rest | on_meta)).shape == (32, 48)
    assert f8.scaled_grouped_mm(**{k: v.to("meta") for k, v in GOOD_GROUPED.items()}).shape == (32, 16)
