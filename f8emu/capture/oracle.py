"""The stages of a captured GEMM as the oracle computes them.

Scales and codes follow from the tensors before their casts. A dynamic scale follows from the tensor. A delayed scale
follows from earlier steps, and the scale of a sharded tensor also from other ranks: such a scale is taken as captured,
and the codes are checked with the inv_scale whose reciprocal it is. The product follows from the captured operands,
whole or of some rows and columns.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import f8ref.numpy as f8ref
from f8emu.capture.read import REMEDY, Arrays, CapturedStep
from f8emu.capture.record import CaptureError, GemmRecord, TensorRecord
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.compare import different
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import BFLOAT16, HOPPER, OPERANDS, TRANSPOSED, Cast, Granularity, Recipe, format_by_name
from f8emu.spec.chips import GPUS
from f8emu.spec.gemm import granularities_that_run
from f8emu.spec.scaling import BLOCK

_MOST_SLICES = 16
_SHORTEST_SLICE = 64
"""The shortest slice of K, in bfloat16 [BF16-2]."""
_TRIED = 64
"""Rows and columns on which another S is tried."""
_NEIGHBOURS = 2
"""Among float32 numbers, the inv_scale whose reciprocal rounds to a scale is this close to the scale's reciprocal."""


class Expected(NamedTuple):
    """One part as the oracle computes it, and where the captured one differs."""

    array: np.ndarray
    wrong: np.ndarray


def require_of_recipe(record: GemmRecord, recipe: Recipe) -> None:
    """Refuse a record that is not as its recipe has it: it would be judged by the wrong rule."""
    gemm = recipe.gemms[record.gemm]
    expected = {
        "a_format": (gemm.a.format or BFLOAT16).name,
        "b_format": (gemm.b.format or BFLOAT16).name,
        "granularity_a": gemm.a.granularity.value,
        "granularity_b": gemm.b.granularity.value,
        "use_fast_accum": gemm.use_fast_accum,
        "chip": recipe.chip,
    }
    for name, value in expected.items():
        if getattr(record, name) != value:
            raise CaptureError(
                f"{record.place}: expected {name} {value!r}, as its recipe {recipe.label} has it; found "
                f"{getattr(record, name)!r:.60}; {REMEDY}"
            )


def replay_casts(
    step: CapturedStep, record: GemmRecord, arrays: Arrays, recipe: Recipe | None
) -> Iterator[tuple[str, str, Expected | str]]:
    """(part, tensor, what is expected, or why that is not known) of scales and codes, in the order of computation."""
    for side, tensor, is_transposed in zip("ab", OPERANDS[record.gemm], TRANSPOSED[record.gemm], strict=True):
        codes, scale = arrays[f"{side}.codes"], arrays.get(f"{side}.scale")
        if recipe is None:
            yield f"{side}.codes", tensor, "the capture has no recipe"
            continue
        cast: Cast = getattr(recipe.gemms[record.gemm], side)
        is_local = recipe.delayed_scaling_of(tensor) is None and not record.is_sharded
        # Several tensors of a layer may have been cast to this operand: the one that explains every bit, or the first.
        best: dict[str, Expected] = {}
        for value in _tensors(step, record, tensor):
            x = value.T if is_transposed else value
            if x.shape != codes.shape:
                continue
            found = _operand(x, cast, recipe, codes, scale, is_local)
            is_explained = not any(expected.wrong.any() for expected in found.values())
            best = found if is_explained else best or found
            if is_explained:
                break
        if not best:
            yield f"{side}.codes", tensor, "the tensor before its cast was not captured"
        for part, expected in best.items():
            yield f"{side}.{part}", tensor, expected


def _tensors(step: CapturedStep, record: GemmRecord, tensor: str) -> Iterator[np.ndarray]:
    # The tensors that could be read: those before the GEMM, latest first, then those after it, next first.
    # Backward passes may come in another order than forward passes, and the callbacks of JAX in any order.
    place = record.layer, tensor
    tensors = [
        captured
        for captured in step.records
        if isinstance(captured.record, TensorRecord) and captured.record.key[:2] == place
    ]
    tensors.sort(key=lambda one: (one.record.order > record.order, abs(one.record.order - record.order)))
    for captured in tensors:
        try:
            yield captured.load()["value"]
        except CaptureError:  # whoever reads the records in turn says so
            continue


def _operand(
    x: np.ndarray, cast: Cast, recipe: Recipe, codes: np.ndarray, scale: np.ndarray | None, is_local: bool
) -> dict[str, Expected]:
    # 1. An operand in high precision is bfloat16, without scales.
    if cast.format is None or scale is None:
        expected = _in_bfloat16(x)
        return {"codes": Expected(expected, different(codes, expected))}
    # 2. The scale, where this tensor alone decides it.
    scales = f8ref.scale_from_amax(f8ref.amax(x, cast.granularity), cast.format, recipe.rule_of(cast))
    foreign = different(scale, scales.scale)
    found = {"scale": Expected(scales.scale, foreign)} if is_local else {}
    # 3. The codes. A scale that is its own has one inv_scale; any other is judged by those whose reciprocal it is.
    first, *others = _inverses(scale) if foreign.any() else iter((scales.inv_scale,))
    expected = f8ref.quantize(x, first, cast.format, cast.granularity)
    wrong = different(codes, expected)
    for inv_scale in others:
        wrong = wrong & different(codes, f8ref.quantize(x, inv_scale, cast.format, cast.granularity))
    return {**found, "codes": Expected(expected, wrong)}


def cast_operand(x: np.ndarray, cast: Cast, recipe: Recipe) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes and scales of [rows, K] whose scales follow from it alone; bfloat16 and None in high precision."""
    if cast.format is None:
        return _in_bfloat16(x), None
    scales = f8ref.scale_from_amax(f8ref.amax(x, cast.granularity), cast.format, recipe.rule_of(cast))
    return f8ref.quantize(x, scales.inv_scale, cast.format, cast.granularity), scales.scale


def _in_bfloat16(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(np.float32).astype(dtype_of(BFLOAT16))


def _inverses(scale: np.ndarray) -> Iterator[np.ndarray]:
    # Float32 arrays whose reciprocals are `scale`, or the nearest one where none is.
    # The captured scale is float32(1 / inv_scale): rounding may have made several inv_scales one scale.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        nearest = np.float32(1) / scale
        yield nearest
        for distance in (sign * n for n in range(1, _NEIGHBOURS + 1) for sign in (-1, 1)):
            moved = (nearest.view(np.int32) + np.int32(distance)).view(np.float32)
            fits = np.float32(1) / moved == scale
            if fits.any():
                yield np.where(fits, moved, nearest)


# The product


@dataclass(frozen=True, slots=True)
class Sampled:
    """Some rows and columns of a captured GEMM; of rows that share 128x128 scales always whole blocks."""

    record: GemmRecord
    arrays: Arrays
    rows: np.ndarray
    columns: np.ndarray

    @property
    def a(self) -> np.ndarray:
        return self.arrays["a.codes"][self.rows]

    @property
    def b(self) -> np.ndarray:
        return self.arrays["b.codes"][self.columns]

    @property
    def product(self) -> np.ndarray:
        """The product as captured."""
        return self.arrays["product"][np.ix_(self.rows, self.columns)]

    def scale(self, side: str) -> np.ndarray | None:
        """The scales of these rows of a side; None in high precision."""
        scale = self.arrays.get(f"{side}.scale")
        places, size = (self.rows, self.record.m) if side == "a" else (self.columns, self.record.n)
        if scale is None or scale.shape[0] == 1 != size:
            return scale  # one for all, or of one block
        return scale[np.unique(places // BLOCK)] if _has_blocks(self.record, side) else scale[places]


def sampled(record: GemmRecord, arrays: Arrays, outputs: int | None) -> Sampled:
    """All rows and columns, or of `outputs` outputs at most as many of both as that allows.

    Rows with 128x128 scales are drawn in whole blocks, so there may be 128 of them where fewer would do.
    """
    if outputs is None or outputs >= record.m * record.n:
        return Sampled(record, arrays, np.arange(record.m), np.arange(record.n))
    # Drawn by the record's number: a second replay judges the same outputs.
    generator = np.random.default_rng(record.order)
    count = min(record.m, math.isqrt(outputs))

    def drawn(side: str, size: int, count: int) -> np.ndarray:
        unit = BLOCK if _has_blocks(record, side) else 1
        most = -(-size // unit)
        return _rows(np.sort(generator.choice(most, max(1, min(count // unit, most)), replace=False)), unit, size)

    rows = drawn("a", record.m, count)
    return Sampled(record, arrays, rows, drawn("b", record.n, min(record.n, outputs // count)))


def _has_blocks(record: GemmRecord, side: str) -> bool:
    return getattr(record, f"granularity_{side}") == Granularity.BLOCKWISE_128X128.value


def _rows(units: np.ndarray, unit: int, size: int) -> np.ndarray:
    rows = (units[:, None] * unit + np.arange(unit)).ravel()
    return rows[rows < size]


def product_of(part: Sampled, judge: Subject, split_k: int) -> np.ndarray:
    """The product of the captured operands."""
    # 1. The chip and the output type that the record names.
    record, captured = part.record, part.product
    chip = GPUS.get(record.chip)
    if chip is None:
        raise NotOffered(f"this version of f8emu does not know the chip {record.chip!r}")
    if 0 in captured.shape or record.k == 0:
        return np.zeros(captured.shape, captured.dtype)
    options = {"out_dtype": format_by_name(record.out_dtype), "split_k": split_k, "chip": chip}
    # Zeros along K add nothing, but the library slices the padded length [CHAIN-3].
    a, b = _padded(part.a), _padded(part.b)
    scale_a, scale_b = part.scale("a"), part.scale("b")
    # 2. In high precision no scales; else as the chip pairs them.
    if scale_a is None or scale_b is None:
        return judge.verbs["mm"](a, b.T, **options)
    pair = granularities_that_run(Granularity(record.granularity_a), Granularity(record.granularity_b))
    if pair[0] is Granularity.ROWWISE:  # beside it, a tensorwise operand has its scale in every row
        scale_a, scale_b = (np.broadcast_to(s, (len(x), 1)).copy() for s, x in ((scale_a, a), (scale_b, b)))
    options |= {"granularity_a": pair[0], "granularity_b": pair[1]}
    return judge.verbs["scaled_mm"](a, b.T, scale_a, scale_b.T, use_fast_accum=record.use_fast_accum, **options)


def _padded(codes: np.ndarray) -> np.ndarray:
    beyond = -codes.shape[1] % HOPPER.size_multiple
    if not beyond:
        return np.ascontiguousarray(codes)
    return np.pad(codes.view(f"u{codes.itemsize}"), ((0, 0), (0, beyond))).view(codes.dtype)


def likely_cause(part: Sampled, wrong: np.ndarray, judge: Subject) -> str:
    """The cause that fits the pattern of wrong outputs: another S, one row (of a), one column (of b), one output."""
    # 1. One wrong line of outputs is a wrong operand.
    record = part.record
    rows, columns = part.rows[wrong.any(axis=1)], part.columns[wrong.any(axis=0)]
    of_a, of_b = OPERANDS[record.gemm]
    if len(rows) == len(columns) == 1:
        return "one output: the product itself"
    if len(rows) == 1:
        return f"all in row {rows[0]}: what differs is that row of a ({of_a}), or its scale"
    if len(columns) == 1:
        return f"all in column {columns[0]}: what differs is that row of b ({of_b}), or its scale"
    # 2. Wrong outputs all over may be another split of K: a few rows and columns decide it.
    tried = (
        _rows(np.unique(places // BLOCK)[:1], BLOCK, size) if _has_blocks(record, side) else places[:_TRIED]
        for side, places, size in (("a", rows, record.m), ("b", columns, record.n))
    )
    few = Sampled(record, part.arrays, *tried)
    for slices in range(1, min(_MOST_SLICES, -(-record.k // _SHORTEST_SLICE)) + 1):
        if slices != record.split_k and not different(product_of(few, judge, slices), few.product).any():
            planned = f"{record.split_k} ({record.split_k_source})"
            return f"every bit equals split-K with S = {slices}; the plan says {planned} [CHAIN-3]"
    return ""
