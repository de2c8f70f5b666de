"""The scales and codes of a captured GEMM from the tensors before their casts.

A dynamic scale follows from the tensor. A delayed scale follows from earlier steps, and the scale of a sharded tensor
also from other ranks: such a scale is taken as captured, and the codes are checked with the inv_scale whose reciprocal
it is.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

import f8ref.numpy as f8ref
from f8emu.capture.read import REMEDY, Arrays, CapturedStep
from f8emu.capture.record import CaptureError, GemmRecord, TensorRecord
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.compare import different
from f8emu.spec import BFLOAT16, OPERANDS, TRANSPOSED, Cast, Recipe

_NEIGHBOURS = 2
"""Among float32 numbers, the inv_scale whose reciprocal rounds to a scale is this close to the scale's reciprocal."""


class Expected(NamedTuple):
    """One part as the oracle computes it, and where the captured one differs."""

    array: np.ndarray
    wrong: np.ndarray


def require_of_recipe(record: GemmRecord, recipe: Recipe) -> None:
    """Refuse a record that is not as its recipe has it: it would be judged by the wrong rule.

    Raises:
        CaptureError: another format, granularity, accumulation or chip.
    """
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
    found = [one for one in step.records if isinstance(one.record, TensorRecord) and one.record.key[:2] == place]
    found.sort(key=lambda one: (one.record.order > record.order, abs(one.record.order - record.order)))
    for captured in found:
        try:
            yield captured.load()["value"]
        except CaptureError:  # whoever reads the records in turn says so
            continue


def _operand(
    x: np.ndarray, cast: Cast, recipe: Recipe, codes: np.ndarray, scale: np.ndarray | None, is_local: bool
) -> dict[str, Expected]:
    # 1. An operand in high precision is bfloat16, without scales.
    if cast.format is None or scale is None:
        with np.errstate(over="ignore", invalid="ignore"):
            expected = x.astype(np.float32).astype(dtype_of(BFLOAT16))
        return {"codes": Expected(expected, different(codes, expected))}
    # 2. The scale, where this tensor alone decides it.
    scales = f8ref.scale_from_amax(f8ref.amax(x, cast.granularity), cast.format, recipe.scale_rule)
    foreign = different(scale, scales.scale)
    found = {"scale": Expected(scales.scale, foreign)} if is_local else {}
    # 3. The codes. A scale that is its own has one inv_scale; any other is judged by those whose reciprocal it is.
    first, *others = _inverses(scale) if foreign.any() else iter((scales.inv_scale,))
    expected = f8ref.quantize(x, first, cast.format, cast.granularity)
    wrong = different(codes, expected)
    for inv_scale in others:
        wrong = wrong & different(codes, f8ref.quantize(x, inv_scale, cast.format, cast.granularity))
    return {**found, "codes": Expected(expected, wrong)}


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
