"""An accumulation model as the engine's C struct."""

import ctypes
import functools

from f8emu.spec.chip import AccumulationModel, Rounding
from f8emu.spec.formats import FLOAT16, FLOAT32

_LONGEST_ORDER = 32
_GROUP_K = 16


class Model(ctypes.Structure):
    """`f8_model` of engine.h."""

    _fields_ = (
        ("step_k", ctypes.c_int32),
        ("aligned_fraction_bits", ctypes.c_int32),
        ("result_fraction_bits", ctypes.c_int32),
        ("promote_k", ctypes.c_int32),
        ("nearest_even", ctypes.c_int32),
        ("converts", ctypes.c_int32),
        ("order_length", ctypes.c_int32),
        ("order", ctypes.c_int32 * _LONGEST_ORDER),
        ("interleaved", ctypes.c_int32),
        ("fraction_bits", ctypes.c_int32),
        ("accumulator_fraction_bits", ctypes.c_int32),
        ("accumulator_reach", ctypes.c_int32),
    )


def fits(model: AccumulationModel) -> bool:
    """Whether the engine has a model: all of `f8emu.spec.CHIPS`, and most of those that a user makes.

    Its panels hold whole steps, orders of K and promotions: steps of 8, 16 or 32, promotions of whole groups of 16.
    """
    # A slice of K begins with a whole order, a promotion with a whole step and a group of 16.
    order, promote_k = len(model.order) or 1, model.promote_k or 32
    return (
        model.accumulator == FLOAT32
        and model.operand in (None, FLOAT16)
        and model.step_k in (8, 16, 32)
        and promote_k % model.step_k == promote_k % _GROUP_K == 0
        and _LONGEST_ORDER % order == model.split_k_multiple % order == 0
        and (model.floored is None or model.floored.interleaved in (1, 2, 4, 8))
    )


@functools.cache
def model_of(model: AccumulationModel) -> Model:
    """The struct of a profile's model, whose order of K is at most 32 long."""
    # 0 stands for None, but for the reach, of which 0 is a value.
    found = Model(
        step_k=model.step_k,
        aligned_fraction_bits=model.aligned_fraction_bits,
        result_fraction_bits=model.result_fraction_bits,
        promote_k=model.promote_k or 0,
        nearest_even=model.rounding is Rounding.NEAREST_EVEN,
        converts=model.operand is not None,
        order_length=len(model.order),
        order=model.order,
    )
    if model.floored is not None:
        reach = model.floored.accumulator_reach
        found.interleaved = model.floored.interleaved
        found.fraction_bits = model.floored.fraction_bits
        found.accumulator_fraction_bits = model.floored.accumulator_fraction_bits
        found.accumulator_reach = -1 if reach is None else reach
    return found


def slice_k(model: AccumulationModel, k: int, split_k: int) -> int:
    """[CHAIN-3], [BF16-2] K of a slice: `ceil(K / S)` rounded up; all of K for one slice."""
    if split_k == 1:
        return max(k, 1)
    multiple = model.split_k_multiple
    return max(-(-k // (split_k * multiple)), 1) * multiple
