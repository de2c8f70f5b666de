"""The GEMMs of f8ref.exact as verbs of arrays, and what else computes them: the parameter of the tests of the oracle.

The verbs have the arguments of `f8ref.numpy`. `at` asks for some rows and columns only, since each output takes long.
"""

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tests.oracle.together as together
from f8emu.spec import BFLOAT16, FORMATS, HOPPER, Chip, Format, Granularity, format_by_name
from f8ref import exact

CODE_TYPES = {8: np.uint8, 16: np.uint16, 32: np.uint32}
At = tuple[Sequence[int], Sequence[int]] | None


def dtype_of(format: Format) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, format.name, None) or format.name)


def typed(codes: Any, format: Format) -> np.ndarray:
    """Codes as an array of the format's dtype."""
    return np.asarray(codes).astype(CODE_TYPES[format.bits]).view(dtype_of(format))


def codes_of(x: Any) -> np.ndarray:
    """The bit patterns of an array, as an array of their own."""
    array = np.asarray(x)
    return array.copy(order="C").view(CODE_TYPES[8 * array.dtype.itemsize])


def format_of(x: np.ndarray) -> Format:
    return FORMATS[x.dtype.name]


def scales_of(scales: np.ndarray, granularity: Granularity, row: int) -> list[int]:
    """The float32 codes of the scales [scale_shape] that one row meets along K."""
    block = granularity.block[0]
    return codes_of(scales.reshape(-1, scales.shape[-1]))[0 if block is None else row // block].tolist()


def scaled_mm(
    a: np.ndarray,
    b: np.ndarray,
    scale_a: np.ndarray,
    scale_b: np.ndarray,
    *,
    granularity_a: Granularity = Granularity.TENSORWISE,
    granularity_b: Granularity = Granularity.TENSORWISE,
    bias: np.ndarray | None = None,
    out_dtype: Format | str = BFLOAT16,
    at: At = None,
    **options: Any,
) -> np.ndarray:
    out = format_by_name(str(out_dtype))
    biases = [None] * b.shape[1] if bias is None else codes_of(bias.astype(np.float32)).tolist()
    rows, columns = at or (range(a.shape[0]), range(b.shape[1]))
    a_codes, b_codes = codes_of(a), codes_of(b.T)
    codes = [
        [
            exact.scaled_dot(
                a_codes[m].tolist(),
                b_codes[n].tolist(),
                a_format=format_of(a),
                b_format=format_of(b),
                scale_a=scales_of(scale_a, granularity_a, m),
                scale_b=scales_of(scale_b.T, granularity_b, n),
                granularity_a=granularity_a,
                granularity_b=granularity_b,
                bias=biases[n],
                out_format=out,
                **options,
            )
            for n in columns
        ]
        for m in rows
    ]
    return typed(np.array(codes, np.uint32).reshape(len(rows), len(columns)), out)


def scaled_grouped_mm(
    a: np.ndarray,
    b: np.ndarray,
    scale_a: np.ndarray,
    scale_b: np.ndarray,
    offs: np.ndarray,
    *,
    at: At = None,
    **options: Any,
) -> np.ndarray:
    options |= {"granularity_a": Granularity.ROWWISE, "granularity_b": Granularity.ROWWISE, "is_grouped": True}
    rows, columns = at or (range(len(a)), range(b.shape[2]))
    groups = [exact.group_of_row(m, offs.tolist()) for m in rows]
    products = [
        scaled_mm(a[m : m + 1], b[g], scale_a[m : m + 1, None], scale_b[g][None], at=((0,), columns), **options)
        for m, g in zip(rows, groups, strict=True)
    ]
    return np.concatenate(products)


def mm(
    a: np.ndarray,
    b: np.ndarray,
    *,
    out_dtype: Format | str = BFLOAT16,
    split_k: int = 1,
    chip: Chip = HOPPER,
    at: At = None,
) -> np.ndarray:
    out = format_by_name(str(out_dtype))
    options: Any = {"out_format": out, "split_k": split_k, "chip": chip}
    rows, columns = at or (range(len(a)), range(b.shape[1]))
    of_a, of_b = codes_of(a), codes_of(b.T)
    codes = [[exact.mm_dot(of_a[m].tolist(), of_b[n].tolist(), **options) for n in columns] for m in rows]
    return typed(np.array(codes, np.uint32).reshape(len(rows), len(columns)), out)


EXACT = SimpleNamespace(scaled_mm=scaled_mm, scaled_grouped_mm=scaled_grouped_mm, mm=mm)
IMPLEMENTATIONS = ("exact", "numpy")
"""`numpy` is f8ref.numpy and the engine at every width, which must agree."""


def implementation(name: str) -> Any:
    """The verbs of f8ref.exact, f8ref.numpy with the engine, or f8ref.jax."""
    verbs: dict[str, SimpleNamespace | ModuleType] = {"exact": EXACT, "numpy": together}
    return verbs[name] if name in verbs else pytest.importorskip("f8ref.jax")


def assert_same_bits(observed: Any, expected: np.ndarray) -> None:
    """NaN too is one code [SPEC-1]."""
    observed = np.asarray(observed)
    assert observed.dtype == expected.dtype and observed.shape == expected.shape
    wrong = np.argwhere(codes_of(observed) != codes_of(expected))
    assert not len(wrong), (wrong[:5].tolist(), observed[tuple(wrong[0])], expected[tuple(wrong[0])])
