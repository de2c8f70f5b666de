"""Two captures side by side: the first stage, in the order of execution, whose bits differ, and why they do.

Stages are compared as they were captured. Records are matched by layer, GEMM and call; steps by number and rank, or
where each capture is one step, whatever their numbers: so two ranks, or two steps, are compared. A trainer and a server
are compared too (`f8emu.capture.pairing`): what a layer of another stack does not show is missing, not different.
Scales in other formats are compared as the numbers that they are.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from f8emu.capture.divergence import CaptureDiff, Pair
from f8emu.capture.findings import absences, findings_page, numbered
from f8emu.capture.pairing import Records, is_never_shown, renamed, without_fusion
from f8emu.capture.read import CapturedRecord, CapturedStep
from f8emu.capture.record import CaptureError, ForeignRecord, GemmRecord
from f8emu.conformance.compare import counted
from f8emu.conformance.run.result import Progress
from f8emu.report.page import Page
from f8emu.spec import SpecError


def diff_captures(
    a: Sequence[CapturedStep],
    b: Sequence[CapturedStep],
    *,
    errors: int = 20,
    names: Sequence[str] = (),
    progress: Progress | None = None,
) -> CaptureDiff:
    """Compare two captures of `read_capture`. KeyboardInterrupt ends it, and the findings so far are returned.

    Args:
        a: the first, a trainer's for example.
        b: the second, a server's for example.
        errors: mismatches to keep of each divergence.
        names: pairs `REGEX=REPLACEMENT` that make the names of A's layers those of B's, as `re.sub` does.
        progress: receives the progress.

    Raises:
        SpecError: the captures have no step in common; or one of `names` is not of that form.
        CaptureError: no two records could be read.
    """
    found = CaptureDiff()

    def tasks() -> Iterator[tuple[str, list[Callable[[], None]]]]:
        for step_a, step_b in _paired(a, b, found):
            step_a = renamed(step_a, names)
            # 1. How the two were made, and what is broken.
            found.steps += 1
            found.context += [text for text in _context(step_a, step_b) if text not in found.context]
            found.damaged += [*step_a.damaged, *step_b.damaged]
            ours, others = _by_key("A", step_a, found), _by_key("B", step_b, found)
            ours, others = without_fusion(ours, others), without_fusion(others, ours)
            # 2. Records of one layer, GEMM and call.
            both = [key for key in ours if key in others]
            pair = Pair(step_a.name, ours, others, found, errors)
            yield step_a.name, [partial(pair.compare, key) for key in both]
            # 3. What is on one side only counts unless the other side says that it lacks it.
            for name, lone, step, of, other in (
                ("A", found.only_a, step_a, ours, step_b),
                ("B", found.only_b, step_b, others, step_a),
            ):
                unmatched = [one for key, one in of.items() if key not in both and not _is_excused(other, one)]
                told = [one for one in unmatched if not is_never_shown(other, one.record)]
                lone += [f"{step.name}: {one.record.place}" for one in told]
                if more := len(unmatched) - len(told):
                    why = "the other capture is of another stack's layers, which show forward passes alone"
                    found.missing.append(f"{name}: {step.name}: {counted(more, 'record')} not compared: {why}")

    found.examine("diff", tasks(), progress)
    if found.damaged and not found.stages and not found.is_interrupted:
        raise CaptureError(found.damaged[0])
    return found


def _paired(
    a: Sequence[CapturedStep], b: Sequence[CapturedStep], found: CaptureDiff
) -> Iterator[tuple[CapturedStep, CapturedStep]]:
    (of_a, twice_a), (of_b, twice_b) = numbered(a), numbered(b)
    found.missing += [f"A: {text}" for text in (*twice_a, *absences(a))]
    found.missing += [f"B: {text}" for text in (*twice_b, *absences(b))]
    # Two steps that were named are compared whatever their numbers and ranks are.
    if len(of_a) == len(of_b) == 1:
        yield next(iter(of_a.values())), next(iter(of_b.values()))
        return
    if not of_a.keys() & of_b.keys():
        names = (", ".join(step.name for step in steps[:8]) for steps in (a, b))
        raise SpecError(
            f"diff: no step of one capture is in the other: {' against '.join(names)}; give one step of each, "
            "PATH/step-..., to compare steps or ranks with each other"
        )
    found.only_a += [of_a[key].name for key in of_a if key not in of_b]
    found.only_b += [of_b[key].name for key in of_b if key not in of_a]
    yield from ((of_a[key], of_b[key]) for key in of_a if key in of_b)


def _by_key(side: str, step: CapturedStep, found: CaptureDiff) -> Records:
    # Layer, GEMM and call -> the record; a second record of one place is noted.
    records: Records = {}
    for one in step.records:
        if records.setdefault(one.record.key, one) is not one:
            found.missing.append(f"{side}: {step.name}: {one.record.place} appears twice: {one.path}")
    return records


def _is_excused(step: CapturedStep, one: CapturedRecord) -> bool:
    # A list of what was left out may end with "N more", which stands for any record.
    places = [left.place for left in step.left_out]
    is_told = any(one.record.place.startswith(place) or place.endswith(" more") for place in places)
    return is_told or not step.is_complete


def _context(a: CapturedStep, b: CapturedStep) -> Iterator[str]:
    # What may explain a difference: said first, and no difference in itself.

    def shown(step: CapturedStep) -> dict[str, str]:
        header = step.header
        engines = {one.record.engine for one in step.records if isinstance(one.record, GemmRecord)}
        own = {"step": str(header.step), "rank": f"{header.rank} of {header.world_size}"}
        own |= {"recipe": ", ".join(sorted(recipe.label for recipe in header.recipes.values())) or "none"}
        own |= {"framework": header.framework, "device": header.device, "plan": header.plan}
        own |= {name: version for name, version in header.versions.items() if version is not None}
        modules = {one.record.module for one in step.records if isinstance(one.record, ForeignRecord)}
        return own | {
            "engine": ", ".join(sorted(engines) or ["none"]),
            "layers of": ", ".join(sorted(modules)) or "f8emu",
        }

    if a.path.resolve() == b.path.resolve():
        yield f"{a.name} is the same on both sides: {a.path}"
    # A key that only one side has is a difference too.
    of_a, of_b = shown(a), shown(b)
    for name in dict.fromkeys((*of_a, *of_b)):
        if of_a.get(name) != of_b.get(name):
            yield f"{name}: {of_a.get(name, 'none')} / {of_b.get(name, 'none')}"


def diff_page(found: CaptureDiff, errors: int) -> tuple[Page, str]:
    """Differences in how the captures were made, then where they part."""
    lists = {"A alone has": found.only_a, "B alone has": found.only_b}
    lists |= {"missing": found.missing, "damaged": found.damaged}
    above = [f"A / B: {text}" for text in found.context]
    page = findings_page(
        "diff",
        above,
        found.divergences,
        lists,
        errors,
        lambda one: f"{one.part} [{', '.join(map(str, one.index))}]: A {one.observed}  B {one.expected}",
    )
    return page, diff_verdict(found)


def diff_verdict(found: CaptureDiff) -> str:
    """The last line."""
    difference = "NOT EQUAL: the captures do not hold the same" if found.has_difference else ""
    if found.divergences:
        first = found.divergences[0]
        difference = f"NOT EQUAL, first at {first.step}: {first.place} {first.part}"
    return found.verdict(
        "",
        f"{found.stages_equal} of {found.stages} stages, {found.elements_equal} of {found.elements} elements",
        difference=difference,
        nothing="" if found.stages else "nothing was compared",
        lacks=(),
    )
