"""The scales and codes of a captured GEMM from the tensors before their casts.

A dynamic scale follows from the tensor. A delayed scale follows from earlier steps, and the scale of a sharded tensor
also from other ranks: such a scale is taken as captured, and the codes are checked with the inv_scale whose reciprocal
it is.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

import f8ref.numpy as f8ref
from f8emu.capture.read import REMEDY, Arrays, CapturedRecord, CapturedStep
from f8emu.capture.record import CaptureError, GemmRecord, TensorRecord
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.compare import different
from f8emu.spec import BFLOAT16, OPERANDS, TRANSPOSED, Cast, Recipe

_NEIGHBOURS = 2
"""Among float32 numbers, the inv_scale whose reciprocal rounds to a scale is this close to the scale's reciprocal."""


class Expected(NamedTuple):
    """One part as the oracle computes it."""

    array: np.ndarray
    wrong: np.ndarray
    """Where the captured one differs."""


class Tensors:
    """The tensors of a step, by layer; only the few that an operand may be made of are read."""

    def __init__(self, step: CapturedStep) -> None:
        self._found: dict[tuple[str, str], list[CapturedRecord]] = {}
        for captured in step.records:
            record = captured.record
            if isinstance(record, TensorRecord):
                self._found.setdefault((record.layer, record.tensor), []).append(captured)

    def values(self, record: GemmRecord, tensor: str) -> Iterator[np.ndarray]:
        """The tensors that could be read: those before the GEMM, latest first, then those after it, next first.

        Backward passes may come in another order than forward passes, and the callbacks of JAX in any order.
        """
        found = self._found.get((record.layer, tensor), [])
        before = [one for one in reversed(found) if one.record.order < record.order]
        for captured in (*before, *(one for one in found if one.record.order > record.order)):
            try:
                yield captured.load()["value"]
            except CaptureError:  # whoever reads the records in turn says so
                continue


def require_of_recipe(record: GemmRecord, recipe: Recipe) -> None:
    """Refuse a record that is not as its recipe has it.

    Raises:
        CaptureError: another format, granularity, accumulation or chip.
    """
    # A record under another rule than its recipe's would be judged by the wrong one.
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
    record: GemmRecord, arrays: Arrays, recipe: Recipe | None, tensors: Tensors
) -> Iterator[tuple[str, str, Expected | str]]:
    """(part, tensor, what is expected, or why that is not known) of scales and codes, in the order of computation."""
    for side, tensor, is_transposed in zip("ab", OPERANDS[record.gemm], TRANSPOSED[record.gemm], strict=True):
        part = f"{side}.codes"
        if recipe is None:
            yield part, tensor, "the capture has no recipe"
            continue
        gemm = recipe.gemms[record.gemm]
        cast = gemm.a if side == "a" else gemm.b
        is_local = recipe.delayed_scaling_of(tensor) is None and not record.is_sharded
        # Several tensors of a layer may have been cast to this operand: the one that explains every bit, or the first.
        best: list[tuple[str, Expected]] | None = None
        for value in tensors.values(record, tensor):
            x = value.T if is_transposed else value
            if x.shape != arrays[part].shape:
                continue
            found = list(_operand(x, cast, recipe, side, arrays, is_local))
            if best is None or not any(expected.wrong.any() for _, expected in found):
                best = found
            if not any(expected.wrong.any() for _, expected in best):
                break
        if best is None:
            yield part, tensor, "the tensor before its cast was not captured"
            continue
        for name, expected in best:
            yield name, tensor, expected


def _operand(
    x: np.ndarray, cast: Cast, recipe: Recipe, side: str, arrays: Arrays, is_local: bool
) -> Iterator[tuple[str, Expected]]:
    codes = arrays[f"{side}.codes"]
    # 1. An operand in high precision is bfloat16, without scales.
    if cast.format is None:
        with np.errstate(over="ignore", invalid="ignore"):
            expected = x.astype(np.float32).astype(dtype_of(BFLOAT16))
        yield f"{side}.codes", Expected(expected, different(codes, expected))
        return
    # 2. The scale, where this tensor alone decides it.
    scale = arrays[f"{side}.scale"]
    scales = f8ref.scale_from_amax(f8ref.amax(x, cast.granularity), cast.format, recipe.scale_rule)
    foreign = different(scale, scales.scale)
    if is_local:
        yield f"{side}.scale", Expected(scales.scale, foreign)
    # 3. The codes. A scale that is its own has one inv_scale; any other is judged by those whose reciprocal it is.
    first, *others = _inverses(scale) if foreign.any() else iter((scales.inv_scale,))
    expected = f8ref.quantize(x, first, cast.format, cast.granularity)
    wrong = different(codes, expected)
    for inv_scale in others:
        wrong = wrong & different(codes, f8ref.quantize(x, inv_scale, cast.format, cast.granularity))
    yield f"{side}.codes", Expected(expected, wrong)


def _inverses(scale: np.ndarray) -> Iterator[np.ndarray]:
    """Float32 arrays whose reciprocals are `scale`, or the nearest one where none is."""
    # The captured scale is float32(1 / inv_scale): rounding may have made several inv_scales one scale.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        nearest = np.float32(1) / scale
        yield nearest
        for distance in range(1, _NEIGHBOURS + 1):
            for sign in (-1, 1):
                moved = (nearest.view(np.int32) + np.int32(sign * distance)).view(np.float32)
                fits = np.float32(1) / moved == scale
                if fits.any():
                    yield np.where(fits, moved, nearest)
