"""Captured steps of one small layer, as a training loop writes them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import f8ref.numpy as f8ref
from f8emu.capture import GemmRecord, LeftOut, StepHeader, StepWriter, Stored, TensorRecord
from f8emu.capture.handle import arrays_of, facts_of
from f8emu.capture.record import Record
from f8emu.conformance.cases.distributions import draw
from f8emu.spec import (
    BFLOAT16,
    GEMM_NAMES,
    NAMED_RECIPES,
    OPERANDS,
    TENSORS,
    DelayedState,
    GemmTrace,
    Recipe,
    RecipeName,
)

M, N, K = 40, 144, 272
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def stored(array: np.ndarray) -> Stored:
    data = np.ascontiguousarray(array)
    return Stored(DTYPES.get(array.dtype.name, "U8"), array.shape, data.view(np.uint8).reshape(-1).data)


def header(recipe: Recipe, **changes: Any) -> StepHeader:
    fields = {"step": 7, "rank": 0, "world_size": 1, "framework": "numpy", "device": "cpu", "plan": "none"}
    made = StepHeader(versions={"f8emu": "1", "torch": None}, recipes={recipe.content_hash: recipe}, **fields)
    return replace(made, **changes)


Records = list[tuple[Record, dict[str, np.ndarray]]]


def layer(recipe: Recipe, name: str = "layers.0.w1", split_k: dict[str, int] | None = None) -> Records:
    """A layer under a recipe as the oracle's verb `linear` computes it, as a tap would show it."""
    shapes = {"input": (M, K), "weight": (N, K), "grad_output": (M, N)}
    tensors = {t: draw("normal", shape, BFLOAT16, (recipe.name, name, t)) for t, shape in shapes.items()}
    options: dict[str, Any] = {"split_k": split_k or {}}
    if recipe.delayed is not None:  # a scale of earlier steps
        state = DelayedState(np.zeros(16, np.float32), np.float32(100.3), np.bool_(True))
        options["delayed_state"] = dict.fromkeys(TENSORS, state)
    trace = f8ref.linear(recipe, **tensors, **options)
    found: Records = []
    for gemm in GEMM_NAMES:
        for tensor in OPERANDS[gemm]:
            if not any(isinstance(r, TensorRecord) and r.tensor == tensor for r, _ in found):
                one = TensorRecord(order=len(found), layer=name, tensor=tensor, turn=1, dtype="bfloat16")
                found.append((one, {"value": tensors[tensor]}))
        found.append(gemm_record(recipe, name, gemm, getattr(trace, gemm), len(found), (split_k or {}).get(gemm, 1)))
    return found


def gemm_record(
    recipe: Recipe, name: str, gemm: str, trace: GemmTrace, order: int, split_k: int
) -> tuple[GemmRecord, dict[str, np.ndarray]]:
    record = GemmRecord(
        order=order,
        layer=name,
        gemm=gemm,
        turn=1,
        **facts_of(trace.a, trace.b, trace.product, recipe.gemms[gemm]),
        engine="hardware",
        chip=recipe.chip,
        split_k=split_k,
        split_k_source="recorded",
        recipe=recipe.content_hash,
        is_sharded=False,
    )
    return record, arrays_of(trace.a, trace.b, trace.product)


def unfinished(
    root: Path, records: Records, recipe: RecipeName = "rowwise", room: int | None = None, **changes: Any
) -> Any:
    """The writer of a step whose process died; with `room`, on a disk that is full after so many records."""
    made = StepWriter(root, header(NAMED_RECIPES[recipe], **changes))
    for record, arrays in records[:room]:
        made.add(record, {name: stored(array) for name, array in arrays.items()})
    if room is not None:
        reason = "No space left on device"
        made.left_out += [LeftOut(place=record.place, size=1, reason=reason) for record, _ in records[room:]]
    return made


def written(root: Path, records: Records, recipe: RecipeName = "rowwise", **changes: Any) -> Path:
    made = unfinished(root, records, recipe, **changes)
    path = made.close()
    assert path is not None, made.fault
    return path
