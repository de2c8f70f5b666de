"""The rules of NUMERICS that a GEMM needs, by their ids."""

from collections.abc import Sequence

import numpy as np

from f8emu.spec.chip import AccumulationModel
from f8emu.spec.chips import ADA, BLACKWELL_TCGEN05, HOPPER
from f8emu.spec.formats import FLOAT16
from f8emu.split_k.gemm import BLOCKWISE_GEMMS

# How scales enter -> the rule
_EPILOGUES = {"tensorwise": "EPI-1", "rowwise": "EPI-2", "grouped": "EPI-6", **dict.fromkeys(BLOCKWISE_GEMMS, "EPI-5")}
# Models that have a rule beside those that their fields show
_STATED = {
    HOPPER.bfloat16: "BF16-1",
    ADA.bfloat16: "CHIP-5",
    **{instruction.model: "CHIP-7" for instruction in BLACKWELL_TCGEN05.instructions[:2]},
}


def rules_of_gemm(model: AccumulationModel, scaling: str, *, has_bias: bool, is_split: bool) -> list[str]:
    """The rules of a model, then those of slices, scales, bias and output."""
    slices = "BF16-2" if scaling not in _EPILOGUES else "CHAIN-3"
    optional = {slices: is_split, _EPILOGUES.get(scaling, ""): scaling in _EPILOGUES, "EPI-3": has_bias, "EPI-4": True}
    return rules_of_model(model) + [rule for rule, is_needed in optional.items() if is_needed]


def rules_of_model(model: AccumulationModel) -> list[str]:
    """The rules of operands, of a step, and of the chain of steps."""
    has_half_accumulator = model.accumulator == FLOAT16
    needed = {
        "OP-1": True,
        "OP-2": True,
        "ACC-1": True,
        "ACC-2": not model.floored,
        "ACC-3": not model.floored,
        "ACC-4": not model.floored,
        "ACC-5": not (model.floored or has_half_accumulator),
        "CHIP-1": model.operand,
        "CHIP-2": model.order,
        "CHIP-4": has_half_accumulator,
        "CHIP-6": model.floored,
        _STATED.get(model, ""): model in _STATED,
        "CHAIN-1": not model.promote_k,
        "CHAIN-2": model.promote_k and not model.order,
        "CHIP-3": model.promote_k and model.order,
    }
    return [rule for rule, is_needed in needed.items() if is_needed]


def by_case(rules: Sequence[str], *operands: np.ndarray) -> list[str]:
    """The rules of each case; [SPEC-1] where an operand [cases, ...] has an infinity or a NaN."""
    finite = [np.isfinite(x.astype(np.float32)).reshape(len(x), -1).all(axis=1) for x in operands]
    plain, special = ",".join(rules), ",".join([*rules, "SPEC-1"])
    return np.where(np.logical_and.reduce(finite), plain, special).tolist()
