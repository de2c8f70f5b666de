"""Arrays on their way to a framework and back: the same bits, the same contiguous dimension, no shared memory."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from f8emu.conformance.arrays import FRAMEWORKS, travelling
from f8emu.conformance.cases.distributions import codes_of
from f8emu.conformance.cases.tables import all_codes
from f8emu.spec import BFLOAT16, E4M3FN, E5M2, E8M0FNU, FLOAT16, FLOAT32, Format, Scales

NAMES = list(FRAMEWORKS)
FORMATS = (E4M3FN, E5M2, E8M0FNU, BFLOAT16, FLOAT16, FLOAT32)


def framework(name: str) -> Any:
    if name != "numpy":
        pytest.importorskip(name)
    return FRAMEWORKS[name]("test")


def every_code(fmt: Format) -> np.ndarray:
    if fmt != FLOAT32:
        return all_codes(fmt).reshape(16, -1)
    random = np.random.default_rng(0).integers(0, 1 << 32, (16, 512), dtype=np.uint32)
    random[0, :4] = 0x7F800001, 0xFFC00000, 0x80000000, 0x00000001
    return random.view(np.float32)


@pytest.mark.parametrize(("name", "fmt"), list(product(NAMES, FORMATS)), ids=str)
def test_no_bit_changes_in_any_layout(name: str, fmt: Format) -> None:
    arrays = framework(name)
    x = every_code(fmt)
    stack = x.reshape(2, 8, -1)
    read_only = np.frombuffer(x.tobytes(), x.dtype)
    for view in (x, x.T, x[::3, 1::2], x[:0], x[0, 0], x[:, :1].T, stack.swapaxes(1, 2), read_only):
        array = np.asarray(view)
        back = np.asarray(arrays.store(arrays.load(array)))
        assert back.dtype == array.dtype and back.shape == array.shape
        assert np.array_equal(codes_of(back), codes_of(array))
    assert arrays.dtype(fmt) is not None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("x", [np.array([3, -1], np.int32), np.array(True), np.array([1, 2], np.uint8)], ids=str)
def test_integers_and_flags(name: str, x: np.ndarray) -> None:
    arrays = framework(name)
    back = arrays.store(arrays.load(x))
    assert back.dtype == x.dtype and back.shape == x.shape and np.array_equal(back, x)


def test_torch_gets_column_major_as_column_major_and_its_own_memory() -> None:
    arrays = framework("torch")
    x = every_code(E4M3FN)
    assert arrays.load(x).stride() == (16, 1)
    assert arrays.load(x.T).stride() == (1, 16)
    assert arrays.load(x.reshape(2, 8, 16).swapaxes(1, 2)).stride() == (128, 1, 16)
    assert arrays.load(x.T).data_ptr() % 64 == 0
    mine = np.zeros(4, np.float32)
    arrays.load(mine).fill_(1.0)
    assert not mine.any()


def test_jax_gets_column_major_as_row_major_on_a_cpu() -> None:
    arrays = framework("jax")
    x = every_code(E4M3FN)
    on_gpu = (1, 0) if arrays.on_gpu else (0, 1)
    assert arrays.load(x).format.layout.major_to_minor == (0, 1)
    assert arrays.load(x.T).format.layout.major_to_minor == on_gpu
    assert (np.asarray(arrays.load(x.T)).view(np.uint8) == x.T.view(np.uint8)).all()


def test_travelling_reaches_into_dicts_and_named_tuples() -> None:
    arrays = framework("torch")
    seen: list[type] = []

    def function(x: Any, rule: str, *, state: dict[str, Any], options: tuple[Any, ...]) -> Scales:
        seen.extend(type(value) for value in (x, rule, state["s"].scale, *options))
        return Scales(inv_scale=x, scale=[rule])

    result = travelling(arrays, function)(
        np.zeros(2, np.float32), "rule", state={"s": Scales(1, np.ones(1, np.float32))}, options=(np.zeros(1, bool), 3)
    )
    assert [kind.__name__ for kind in seen] == ["Tensor", "str", "Tensor", "Tensor", "int"]
    assert isinstance(result, Scales) and isinstance(result.inv_scale, np.ndarray) and result.scale == ["rule"]
