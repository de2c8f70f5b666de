"""What the torch tests share: torch to numpy without a change of bits, and comparison of bits."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist

import f8ref.numpy as reference
from f8emu.native import library
from f8emu.torch import cpu_casts

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.")
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def _to_numpy(x: torch.Tensor) -> np.ndarray:
    flat = x.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy().view(_numpy_dtype(x.dtype)).reshape(x.shape)


def _canonical_bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    bits = np.atleast_1d(x).view(_UNSIGNED[x.dtype.itemsize]).reshape(x.shape)
    return np.where(np.isnan(x.astype(np.float32)), np.iinfo(bits.dtype).max >> 1, bits)


def _assert_same_bits(observed: Any, expected: Any, *, nan_codes: bool = False) -> None:
    """Equal dtype, shape and bits; a NaN equals any NaN unless `nan_codes`."""
    observed, expected = (_to_numpy(x) if isinstance(x, torch.Tensor) else np.asarray(x) for x in (observed, expected))
    assert observed.dtype == expected.dtype
    assert observed.shape == expected.shape
    if nan_codes:
        view = _UNSIGNED[observed.dtype.itemsize]
        bits, wanted = (np.ascontiguousarray(x).view(view) for x in (observed, expected))
    else:
        bits, wanted = _canonical_bits(observed), _canonical_bits(expected)
    wrong = np.flatnonzero(bits != wanted)
    first = [(int(i), hex(bits.flat[i]), hex(wanted.flat[i])) for i in wrong[:5]]
    assert not wrong.size, f"{wrong.size} of {bits.size} differ; (index, observed, expected): {first}"


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """A test's compiled code counts toward no other's limit of recompilations."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def to_numpy() -> Callable[[torch.Tensor], np.ndarray]:
    """The tensor as an array of the same (ml_dtypes) dtype."""
    return _to_numpy


@pytest.fixture(scope="session")
def assert_same_bits() -> Callable[..., None]:
    """Compare a tensor or array with another, bit for bit."""
    return _assert_same_bits


@pytest.fixture
def expect(to_numpy: Callable[[torch.Tensor], np.ndarray]) -> Callable[..., np.ndarray]:
    """A verb of the oracle, called with tensors."""

    def call(verb: str, *tensors: torch.Tensor | None, **options: Any) -> np.ndarray:
        options = {k: to_numpy(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        options["out_dtype"] = str(options["out_dtype"]).removeprefix("torch.")
        return getattr(reference, verb)(*(None if x is None else to_numpy(x) for x in tensors), **options)

    return call


@pytest.fixture(params=(True, False), ids=("engine", "torch"))
def engine_and_torch(request, monkeypatch) -> None:
    """The engine's casts, and the operations of torch that run on GPUs, under compilers and without an engine."""
    if request.param and library.unavailable():
        pytest.skip(str(library.unavailable()))
    if not request.param:
        monkeypatch.setattr(cpu_casts, "takes", lambda x: False)
