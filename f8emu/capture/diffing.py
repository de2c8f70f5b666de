"""Two captures side by side: the first stage, in the order of execution, whose bits differ, and why they do.

Stages are compared as they were captured. Records are matched by layer, GEMM and call; steps by number and rank, or
where each capture is one step, whatever their numbers: so two ranks, or two steps, are compared. A trainer and a server
are compared too (`f8emu.capture.pairing`): what a layer of another stack does not show is missing, not different.
Scales in other formats are compared as the numbers that they are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from f8emu.capture.explain import CAST_FROM, OF_OTHER, explained, first_block, is_of_copy
from f8emu.capture.findings import Comparison, Difference, compared, findings_page, paired
from f8emu.capture.pairing import Half, Key, renamed, unseen
from f8emu.capture.read import CapturedRecord, CapturedStep, steps_of
from f8emu.capture.record import CaptureError, ForeignRecord, GemmRecord, TensorRecord
from f8emu.conformance.compare import Mismatch, counted, different
from f8emu.conformance.run.result import Progress
from f8emu.report.page import Page
from f8emu.spec import OPERANDS, SpecError
from f8emu.verdict import Verdict

FORWARD_ALONE = "the other capture is of another stack's layers, which show forward passes alone"
"""Why records of one side were not compared."""
_REST = "Only the first divergence is shown; --json has all."
_TO_COMPARE = "To compare recipes on one run: f8emu.torch.inspect with what_if, or examples/compare_recipes.py."
_OTHER_WEIGHTS = "The weights differ already, so what follows drifts: capture step 1 of both runs, from one checkpoint."
_ORDER = ("value", "a.scale", "a.codes", "b.scale", "b.codes", "product")
_OPTIONS = ("a_format", "b_format", "granularity_a", "granularity_b", "out_dtype", "use_fast_accum", "chip", "split_k")
"""Options of a GEMM; if they differ, the bits may differ too."""


@dataclass(slots=True, kw_only=True, repr=False)
class CaptureDiff(Comparison):
    """The equal and the differing parts of two captures. Missing parts were not compared."""

    _page: ClassVar[str] = "f8emu.capture.diffing:diff_page"
    context: list[str] = field(default_factory=list)
    """Differences in how the two were made: device, versions, recipe, ..."""
    steps: int = 0
    stages: int = 0
    stages_equal: int = 0
    elements: int = 0
    elements_equal: int = 0
    divergences: list[Difference] = field(default_factory=list)
    """All divergences in the order of execution: the first is where the captures part."""
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    """Steps and records that the other does not have, and does not say that it left out or never finished."""

    @property
    def verdict(self) -> Verdict:
        lone = self.only_a or self.only_b or self.damaged
        return self.judged(
            self.divergences,
            f"{self.stages_equal} of {self.stages} stages, {self.elements_equal} of {self.elements} elements",
            otherwise="NOT EQUAL: the captures do not hold the same" if lone else "",
            nothing="" if self.stages else "nothing was compared",
        )

    def compare(self, of_a: Half, of_b: Half, errors: int, key: Key) -> None:
        """Count and compare every part of one record, and note what differs, is missing or was changed."""
        a, b, step = of_a.records[key], of_b.records[key], of_a.step.name
        arrays, place = (a.load(), b.load()), f"{step}: {a.record.place}"
        self.damaged += [one.named for one in (a, b) if not one.is_intact()]
        # 1. What one side does not show was not compared.
        hidden: set[str] = set()
        for name, one, other in (("A", a, b), ("B", b, a)):
            for parts, why in unseen(one.record, other.record):
                hidden.update(parts)
                self.missing.append(f"{name}: {place}: {', '.join(parts)} {why}")
        shown = [part for part in _ORDER if (part in arrays[0] or part in arrays[1]) and part not in hidden]
        # 2. In the order of computation: why an operand differs is said of its first part, in as many lines as are
        #    shown; a product is judged by whether its operands were equal.
        unexplained, before = {"a", "b"}, len(self.divergences)
        for part in shown:
            x, y = (of.get(part) for of in arrays)
            if part.endswith("scale") and x is not None and y is not None and x.dtype != y.dtype:
                x, y = x.astype(np.float32), y.astype(np.float32)
            facts, size = compared(x, y, place, part, errors), max(one.size for one in (x, y) if one is not None)
            self.stages += 1
            self.stages_equal += not facts
            self.course.append((place, part, not facts))
            self.elements += size
            self.elements_equal += size - facts.get("elements_different", 0)
            if not facts:
                continue
            tensor, side = a.record.what, part[0]
            if not isinstance(a.record, TensorRecord):
                tensor = "" if part == "product" else OPERANDS[a.record.gemm]["ab".index(side)]
            if part == "product" and "fault" not in facts:
                pairs = [(name, getattr(a.record, name, ""), getattr(b.record, name, "")) for name in _OPTIONS]
                facts["options"] = ", ".join(f"{name} {i} / {j}" for name, i, j in pairs if "" not in (i, j) and i != j)
                is_judged = len(self.divergences) == before and {"a.codes", "b.codes"} <= set(shown)
                facts["cause"] = "of equal operands: the GEMM itself" if is_judged else ""
            elif side in unexplained and len(self.divergences) <= errors:
                unexplained.remove(side)
                facts |= _why(of_a, of_b, key, part, "fault" in facts, tensor)
            elif part == "value" and tensor == "weight" and x is not None and y is not None and is_of_copy(x, y):
                facts["cause"] = CAST_FROM
            where = {"step": step, "place": a.record.place, "part": part, "tensor": tensor}
            self.divergences.append(Difference(**where, elements=size, **facts))


def diff(
    a: str | Path | Sequence[CapturedStep],
    b: str | Path | Sequence[CapturedStep],
    *,
    errors: int = 20,
    names: Sequence[str] = (),
    progress: Progress | None = None,
) -> CaptureDiff:
    """Compare two captures, as `f8emu diff` does. KeyboardInterrupt ends it, and the findings so far are returned.

    Args:
        a: the first, a trainer's for example: a path, or steps of `read_capture`.
        b: the second, a server's for example.
        errors: mismatches to keep of each divergence.
        names: pairs `REGEX=REPLACEMENT` that make the names of A's layers those of B's, as `re.sub` does.
        progress: receives the progress.

    Raises:
        CaptureError: a path without a capture, or with one that cannot be read.
        SpecError: no step of one is in the other, or a name that is no pair.
    """
    a, b = steps_of(a), steps_of(b)
    result = CaptureDiff()

    def tasks() -> Iterator[tuple[str, list[Callable[[], None]]]]:
        for step_a, step_b in _paired(a, b, result):
            # 1. How the two were made, and what is broken.
            result.steps += 1
            result.context += [text for text in _context(step_a, step_b) if text not in result.context]
            result.damaged += [*step_a.damaged, *step_b.damaged]
            one, other = _half("A", renamed(step_a, names), result), _half("B", step_b, result)
            one, other = one.without_fusion(other), other.without_fusion(one)
            # 2. Records of one layer, GEMM and call.
            compare = partial(result.compare, one, other, errors)
            yield step_a.name, [partial(compare, key) for key in one.records if key in other.records]
            # 3. What is on one side only counts unless the other side says that it lacks it.
            for lone, half, there in ((result.only_a, one, other), (result.only_b, other, one)):
                rest = [x for key, x in half.records.items() if key not in there.records and not there.lacks(x)]
                shown = [x for x in rest if not there.never_shows(x.record)]
                lone += [f"{half.step.name}: {x.record.place}" for x in shown]
                if more := len(rest) - len(shown):
                    missing = f"{counted(more, 'record')} not compared: {FORWARD_ALONE}"
                    result.missing.append(f"{half.name}: {half.step.name}: {missing}")

    result.examine("diff", tasks(), progress)
    if result.damaged and not result.stages and not result.is_interrupted:
        raise CaptureError(result.damaged[0])
    return result


def _paired(
    a: Sequence[CapturedStep], b: Sequence[CapturedStep], result: CaptureDiff
) -> Iterator[tuple[CapturedStep, CapturedStep]]:
    of_a, of_b, missing = paired(a, b)
    result.missing += missing
    if not of_a.keys() & of_b.keys():
        names = (", ".join(step.name for step in steps[:8]) for steps in (a, b))
        raise SpecError(
            f"diff: no step of one capture is in the other: {' against '.join(names)}; give one step of each, "
            "PATH/step-..., to compare steps or ranks with each other"
        )
    result.only_a += [of_a[key].name for key in of_a if key not in of_b]
    result.only_b += [of_b[key].name for key in of_b if key not in of_a]
    yield from ((of_a[key], of_b[key]) for key in of_a if key in of_b)


def _half(name: str, step: CapturedStep, result: CaptureDiff) -> Half:
    # A second record of one place is noted.
    records: dict[Key, CapturedRecord] = {}
    for captured in step.records:
        if records.setdefault(captured.record.key, captured) is not captured:
            result.missing.append(f"{name}: {step.name}: {captured.record.place} appears twice: {captured.path}")
    return Half(name, step, records)


def _context(a: CapturedStep, b: CapturedStep) -> Iterator[str]:
    # What may explain a difference: said first, and no difference in itself.

    def shown(step: CapturedStep) -> dict[str, str]:
        header, records = step.header, [captured.record for captured in step.records]
        return {
            "step": str(header.step),
            "rank": f"{header.rank} of {header.world_size}",
            "recipe": _listed((recipe.label for recipe in header.recipes.values()), "none"),
            **{"framework": header.framework, "device": header.device, "plan": header.plan},
            **{name: version for name, version in header.versions.items() if version is not None},
            "engine": _listed((captured.engine for captured in records if isinstance(captured, GemmRecord)), "none"),
            "layers of": _listed(
                (captured.module for captured in records if isinstance(captured, ForeignRecord)), "f8emu"
            ),
        }

    if a.path.resolve() == b.path.resolve():
        yield f"{a.name} is the same on both sides: {a.path}"
    # A key that only one side has is a difference too.
    of_a, of_b = shown(a), shown(b)
    for name in dict.fromkeys((*of_a, *of_b)):
        if of_a.get(name) != of_b.get(name):
            yield f"{name}: {of_a.get(name, 'none')} / {of_b.get(name, 'none')}"


def _listed(words: Iterable[str], none: str) -> str:
    return ", ".join(sorted(set(words))) or none


def _why(of_a: Half, of_b: Half, key: Key, part: str, is_fault: bool, tensor: str) -> dict[str, str]:
    # The first block of an operand that differs, and what gives the bits of either side.
    side = part[0]
    a, b = of_a.operand(key, side, of_b), of_b.operand(key, side, of_a)
    if a is None or b is None:
        return {}
    x, y = (a.factors, b.factors) if part.endswith("scale") else (a.codes, b.codes)
    first = {} if is_fault else {"block": first_block(different(x, y), a.block, a.codes.shape)}
    # from the tensor before its cast; a tensor that differs itself is cause enough
    x, y = of_a.value(key, side), of_b.value(key, side)
    if x is not None and y is not None and compared(x, y, "", "", 0):
        return first
    cause = explained(y if x is None else x, a, b)
    is_of_other = tensor == "weight" and any(of in cause for of in OF_OTHER)
    return first | {"cause": f"{cause}; {CAST_FROM}" if is_of_other else cause}


def diff_page(result: CaptureDiff, errors: int = 20) -> Page:
    """Differences in how the captures were made, then where they part."""
    lists = {"A alone has": result.only_a, "B alone has": result.only_b}
    lists |= {"missing": result.missing, "damaged": result.damaged}
    above, findings = [f"A / B: {text}" for text in result.context], result.divergences
    if sentence := _of_two_recipes(result):
        above, findings, errors = [sentence, *above], findings[:1], 1
    elif _has_other_weights(findings):
        above = [_OTHER_WEIGHTS, *above]

    def shown(mismatch: Mismatch) -> str:
        return f"{mismatch.part} [{', '.join(map(str, mismatch.index))}]: A {mismatch.observed}  B {mismatch.expected}"

    return findings_page("diff", result, above, findings, lists, errors, shown)


def _has_other_weights(findings: Sequence[Difference]) -> bool:
    # In the first step that differs, which is a later one than step 1.
    step = findings[0].step if findings else "step 1"
    places = [(finding.step, finding.part, finding.tensor, finding.cause) for finding in findings]
    return not f"{step} ".startswith("step 1 ") and (step, "value", "weight", "") in places


def _of_two_recipes(result: CaptureDiff) -> str:
    # One sentence, where the recipes differ and so everything after the first divergence does.
    recipes = next((text.removeprefix("recipe: ") for text in result.context if text.startswith("recipe: ")), "")
    a, _, b = recipes.partition(" / ")
    if "none" in (a, b) or not b or not result.divergences:  # other stacks' layers have no recipe of f8emu's
        return ""
    first = result.divergences[0]
    runs = f"The runs use different recipes (A {a}, B {b})"
    if first.part == "value":
        return (
            f"{runs}, but they already differ before any cast, in {first.tensor or 'a tensor'}. {_TO_COMPARE} {_REST}"
        )
    return f"{runs}, so their scales and codes differ by rule: compare runs of one recipe. {_TO_COMPARE} {_REST}"
