"""Whether a row of each layer depends on the rest of the batch: by rule, by plan, measured, or not known."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from f8emu.audit.blocks import CODES
from f8emu.audit.checkpoint import Checkpoint
from f8emu.capture.read import CapturedStep
from f8emu.rollout.certificate import Difference
from f8emu.spec import Recipe
from f8emu.split_k.invariance import Dependence, Invariance, invariance
from f8emu.split_k.trees import SplitPlan

UNKNOWN, SHARED = "not known", "a scale that depends on the batch"
SPLIT, KERNEL = "a split that depends on the batch", "a split or a kernel that depends on the batch"
_EVIDENCE = {Dependence.BY_RULE: "by rule", Dependence.BY_PLAN: "by plan", Dependence.DEPENDS: "by rule"}


class Measured(NamedTuple):
    """Rows of a layer with equal operands in two passes."""

    rows: int = 0
    equal: int = 0
    """How many of them have equal products."""
    cause: str = KERNEL
    """Why others have other products: SPLIT where the captures show S, as those of f8emu's layers do."""


def shapes_of(checkpoints: Iterable[Checkpoint], steps: Sequence[CapturedStep]) -> dict[str, tuple[int, int]]:
    """Layer -> [n, k] of its weight: of float8 weights, or of captured GEMMs."""
    shapes: dict[str, tuple[int, int]] = {}
    for checkpoint in checkpoints:
        for name, tensor in checkpoint.tensors.items():
            if tensor.dtype in CODES and tensor.is_matrix:
                shapes.setdefault(name.removesuffix(".weight"), (tensor.shape[-2], tensor.shape[-1]))
    for step in steps:
        for captured in step.records:
            if captured.record.what == "output":
                shapes.setdefault(captured.record.layer, (captured.record.n, captured.record.k))  # pyright: ignore
    return shapes


def invariances(
    recipes: Sequence[Recipe],
    shapes: Mapping[str, tuple[int, int]],
    batch: Sequence[int],
    measured: Mapping[str, Measured],
    plan: SplitPlan | None,
) -> tuple[list[dict[str, Any]], list[Difference]]:
    """An entry for each layer: the rule and the plan are of the recipe's GEMM, what is measured is the server's."""
    entries: list[dict[str, Any]] = []
    differences: list[Difference] = []
    answers: dict[tuple[int, int], Invariance] = {}
    for layer in dict.fromkeys((*(shapes if batch else ()), *measured)):
        shape, entry = (
            shapes.get(layer),
            {"layer": layer, "verdict": UNKNOWN, "evidence": UNKNOWN, "because": "no recipe"},
        )
        # 1. By rule or by plan, at the numbers of rows that were given.
        if shape is not None and len(recipes) == 1 and batch:
            if shape not in answers:
                answers[shape] = invariance(recipes[0], *shape, rows=max(batch), plan=plan)
            entry |= _at(answers[shape], batch)
        # 2. Measured: rows with equal operands in passes of other lengths.
        if layer in measured:
            same, right, _ = measured[layer]
            text = f"{right} of {same} rows with equal operands have equal products"
            entry["measured"] = text
            if right < same or entry["evidence"] == UNKNOWN:
                verdict = Dependence.DEPENDS.value if right < same else "invariant where it was measured"
                entry |= {"verdict": verdict, "evidence": "measured", "because": text}
        entries.append(entry)
        if entry["verdict"] == Dependence.DEPENDS.value:
            # By rule, rows share a scale; by plan, S follows from their number.
            causes = {_EVIDENCE[Dependence.DEPENDS]: SHARED, "by plan": SPLIT}
            cause = causes.get(entry["evidence"]) or measured[layer].cause
            differences.append(Difference(part="invariance", place=layer, cause=cause, seen=str(entry["because"])))
    return entries, differences


def _at(answer: Invariance, batch: Sequence[int]) -> dict[str, str]:
    # S matters at the given numbers of rows alone.
    verdict, evidence, because = answer.verdict, _EVIDENCE.get(answer.verdict, UNKNOWN), answer.because
    if answer.splits:
        used = {m: [s for first, s in answer.splits if first <= m][-1] for m in sorted({*batch})}
        evidence, because = "by plan", f"S = {', '.join(f'{s} at M = {m}' for m, s in used.items())}"
        verdict = Dependence.BY_PLAN if len({*used.values()}) == 1 else Dependence.DEPENDS
    return {
        "verdict": verdict.value if verdict is not Dependence.UNKNOWN else UNKNOWN,
        "evidence": evidence,
        "because": because,
    }
