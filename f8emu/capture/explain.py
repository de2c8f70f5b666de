"""Why two captures of a matrix have different codes or scales: the dialect, or the rule, that gives those of each side.

A dialect explains a side if it gives every code and every scale from the tensor before its cast. Where none does, a
rule of the same vocabulary may: another division, another floor, a scale that was rounded after the cast.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.compare import counted, different
from f8emu.dialects import DIALECTS, CodeForm, Dialect, ScaleForm, Stored, arithmetic, dequantize, quantize
from f8emu.dialects.matching import fitting, relation
from f8emu.dialects.rules import Arithmetic, Block, CodeRule, Division, PowerOfTwo
from f8emu.environment import spanned
from f8emu.spec import BFLOAT16, E4M3FN

_SHOWN = 4
"""Dialects named of a side; those that agree on the matrix at hand may be many."""
_DIVISIONS = tuple(division for division in Division if division is not Division.EXPONENT)
_CODES = (CodeRule.MULTIPLIER, CodeRule.INVERSE, CodeRule.QUOTIENT)
_ANY = next(iter(DIALECTS.values()))
"""A dialect whose rules are replaced by others."""
OF_OTHER = (" of the value rounded to bfloat16", " of float32 values whose bfloat16 copy the value is")
CAST_FROM = (
    "one side casts a float32 weight, the other its bfloat16 copy: convert the trainer with cast_weight_from='bfloat16'"
)
_OF_SHARDS = "vllm_fused_shards"
_LATE = "the scale was rounded up to a power of two after the cast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The operand of one capture, [rows, K]."""

    codes: np.ndarray
    scale: np.ndarray
    """The factors that decode, [ceil(rows / block rows), ceil(K / block columns)]."""
    block: tuple[int, int]
    stack: str
    """The package of the layer, or the one whose rule f8emu's recipes have: its dialects are named first."""
    shards: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    """Of a part of a fused weight, the layers that are fused -> the scales of the other capture."""

    @property
    def factors(self) -> np.ndarray:
        """The scales as float32, whatever dtype they are kept in."""
        return self.scale.astype(np.float32)

    @property
    def dialects(self) -> list[Dialect]:
        """Every dialect, those of its stack first."""
        return sorted(DIALECTS.values(), key=lambda dialect: not dialect.name.startswith(self.stack))

    def has_block(self, block: Block) -> bool:
        """Whether these are its blocks; those larger than the matrix are the matrix."""
        return arithmetic.extent(self.codes.shape, block) == arithmetic.extent(self.codes.shape, self.block)


def explained(value: np.ndarray | None, a: Side, b: Side) -> str:
    """`A: torchao_rowwise; B: vllm_group_ue8m0`: what gives the codes and scales of both sides from `value`.

    Without the value, what the sides tell of each other; empty where nothing fits.
    """
    for name, of, other in (("A", a, b), ("B", b, a)):
        if text := _fused(of, other):
            return f"{name}: {text}"
    causes = _related(a, b)
    for name, side in (("A", a), ("B", b)):
        if name not in causes and value is not None and side.codes.dtype == dtype_of(E4M3FN):
            causes[name] = _origin(value, side)
    return "; ".join(f"{name}: {causes[name]}" for name in sorted(causes))


def first_block(wrong: Any, block: tuple[int, int], shape: tuple[int, ...]) -> str:
    """The first block with an element that differs, of codes of this shape, and how many have one; "" of one alone."""
    if wrong.shape != arithmetic.grid_shape(shape, block):
        wrong = arithmetic.block_amax(wrong.astype(np.float32), block) > 0
    if wrong.size == 1:
        return ""
    first = [int(index) for index in np.argwhere(wrong)[0]]
    ends = zip(("row", "column"), first, block, shape, strict=True)
    place = ", ".join(spanned(noun, i * size, min((i + 1) * size, most) - 1) for noun, i, size, most in ends)
    return f"first in block {first} ({place}), {np.count_nonzero(wrong)} of {wrong.size} blocks"


def is_of_copy(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether one of two tensors is the bfloat16 copy of the other, which is float32."""
    narrow = dtype_of(BFLOAT16)
    are_both = {x.dtype, y.dtype} == {np.dtype(np.float32), narrow} and x.shape == y.shape
    return are_both and not different(x.astype(narrow), y.astype(narrow)).any()


def _fused(side: Side, other: Side) -> str:
    # Whether one scale of a fused weight is the largest of its shards' scales, as vLLM and SGLang make it.
    if not side.shards or side.scale.size != 1:
        return ""
    largest = np.max([scale.astype(np.float32).max() for scale in side.shards.values()]).reshape(1, 1)
    if different(side.factors, largest).any():
        return ""
    text = f"shards fused: one scale, the largest of {', '.join(side.shards)}"
    if other.scale.size == 1 and other.codes.dtype == dtype_of(E4M3FN):
        value = dequantize(other.codes, other.factors, _OF_SHARDS, out_dtype="float16")
        if not different(quantize(value, _OF_SHARDS, scale=largest).codes, side.codes).any():
            return f"{text}; its codes are cast again by {_OF_SHARDS}"
    return text


def _related(a: Side, b: Side) -> dict[str, str]:
    # What two scales of equal codes tell of each other.
    if a.codes.shape != b.codes.shape or a.scale.shape != b.scale.shape or different(a.codes, b.codes).any():
        return {}
    pair = a.factors, b.factors
    for name, (x, y) in (("B", pair), ("A", pair[::-1])):
        if np.array_equal(_up(x), y):
            return {name: _LATE}
    of_a = relation(*pair)
    of_what = "the scales are" if of_a.startswith("the ") else "the codes of A, with scales that are"
    return {"B": f"{of_what} {of_a} A's"} if of_a else {}


def _up(scale: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(scale)
    return np.ldexp(np.float32(1), exponent - (mantissa == 0.5))


def _origin(value: np.ndarray, side: Side) -> str:
    # 1. Of the value as it is, or as a checkpoint in bfloat16 has it.
    if value.shape != side.codes.shape:
        return "no dialect"
    values = {"": value}
    if value.dtype == np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            values[OF_OTHER[0]] = value.astype(dtype_of(BFLOAT16))
    # 2. A dialect; one whose scale was rounded afterwards; a rule that no dialect has.
    known = side.dialects
    for of, x in values.items():
        if fits := fitting(x, side.codes, side.scale, side.block, known):
            names = [dialect.dialect.name for dialect in fits]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            zeros = min(dialect.zeros_differ for dialect in fits)
            signs = f", but for the sign of {counted(zeros, 'zero')}" if zeros else ""
            return ", ".join(names[:_SHOWN]) + more + of + signs
        if late := fitting(x, side.codes, side.scale, side.block, known, change=_up):
            return f"codes of {late[0].dialect.name}, but {_LATE}{of}"
    if value.dtype == dtype_of(BFLOAT16):
        if name := next((dialect.name for dialect in known if _is_of_master(value, side, dialect)), ""):
            return name + OF_OTHER[1]
    for of, x in values.items():
        if fits := fitting(x, side.codes, side.scale, side.block, _rules(side)):
            return f"no dialect; {fits[0].dialect.formula}{of}"
    return "no dialect"


def _is_of_master(value: np.ndarray, side: Side, dialect: Dialect) -> bool:
    # Whether the dialect may have cast float32 values whose copy this is.
    own, form = next((block for block in dialect.blocks if side.has_block(block)), None), dialect.scale
    if own is None or form is None:
        return False
    amax = arithmetic.block_amax(value, own, ignores_nan=form.ignores_nan)
    return arithmetic.codes_of_other(value, amax, side.codes, side.factors, dialect, own) > value.size // 1000


def _rules(side: Side) -> list[Dialect]:
    # Combinations of the vocabulary, without a floor or with the one that the scales show.
    least = float(np.fmin.reduce(side.factors, axis=None))
    forms = [
        ScaleForm(division=division, arithmetic=numbers, power_of_two=power)
        for division, numbers, power in product(_DIVISIONS, Arithmetic, (None, PowerOfTwo.UP))
    ]
    if (side.factors > least).any():  # else any scale is a floor
        floored = [replace(form, amax_floor=float(f"{448 * least:.3g}")) for form in forms]
        forms += [*floored, *(replace(form, scale_floor=least) for form in forms)]
    fixed = {"stored": Stored(), "blocks": (side.block,)}
    return [replace(_ANY, scale=form, code=CodeForm(rule=code), **fixed) for form, code in product(forms, _CODES)]
