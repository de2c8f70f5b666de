"""Tensors as arrays without a change of bits, their comparison, and the verbs of the oracle on tensors."""

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import torch

import f8ref.numpy as reference

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """The tensor as an array of the same (ml_dtypes) dtype."""
    name = str(x.dtype).removeprefix("torch.")
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    flat = x.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().view(dtype).reshape(x.shape)


def _canonical_bits(x: np.ndarray) -> np.ndarray:
    bits = np.atleast_1d(x).view(_UNSIGNED[x.dtype.itemsize]).reshape(x.shape)
    return np.where(np.isnan(x.astype(np.float32)), np.iinfo(bits.dtype).max >> 1, bits)


def assert_same_bits(observed: Any, expected: Any, *, nan_codes: bool = False, name: str = "") -> None:
    """Equal dtype, shape and bits of two tensors or arrays; a NaN equals any NaN unless `nan_codes`."""
    observed, expected = (to_numpy(x) if isinstance(x, torch.Tensor) else np.asarray(x) for x in (observed, expected))
    assert (observed.dtype, observed.shape) == (expected.dtype, expected.shape), name
    if nan_codes:
        view = _UNSIGNED[observed.dtype.itemsize]
        bits, wanted = (np.ascontiguousarray(x).view(view) for x in (observed, expected))
    else:
        bits, wanted = _canonical_bits(observed), _canonical_bits(expected)
    wrong = np.flatnonzero(bits != wanted)
    first = [(int(i), hex(bits.flat[i]), hex(wanted.flat[i])) for i in wrong[:5]]
    assert not wrong.size, f"{name} {wrong.size} of {bits.size} differ; (index, observed, expected): {first}"


def assert_all_same_bits(observed: Iterable[Any], expected: Iterable[Any], *, nan_codes: bool = False) -> None:
    """`assert_same_bits` of as many pairs; None, a gradient that nobody wanted, equals None."""
    for i, (ours, theirs) in enumerate(zip(observed, expected, strict=True)):
        assert (ours is None) == (theirs is None), i
        if ours is not None:
            assert_same_bits(ours, theirs, nan_codes=nan_codes)


def expect(verb: str, *tensors: torch.Tensor | None, **options: Any) -> np.ndarray:
    """A verb of the oracle, called with tensors."""
    options = {k: to_numpy(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    options["out_dtype"] = str(options["out_dtype"]).removeprefix("torch.")
    return getattr(reference, verb)(*(None if x is None else to_numpy(x) for x in tensors), **options)
