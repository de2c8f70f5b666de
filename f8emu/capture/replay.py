"""A captured step computed again by the oracle, without a GPU: which stage is the first whose bits differ.

    scale, codes of a and of b   from the tensors before their casts, where they were captured
    product                      from the captured operands, so that a fault does not spread to later stages

The engine that computed a capture does not judge it: a capture that f8ref.jax emulated is judged by f8ref.numpy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from f8emu.capture.cast import Tensors, replay_casts, require_of_recipe
from f8emu.capture.compared import Finding, absences, absent_ranks, numbered
from f8emu.capture.product import Sampled, likely_cause, product_of, sampled
from f8emu.capture.read import Arrays, CapturedRecord, CapturedStep
from f8emu.capture.record import CaptureError, GemmRecord
from f8emu.conformance.compare import Mismatch, abbreviated, different, mismatches
from f8emu.conformance.run.result import Progress
from f8emu.conformance.run.subject import NotOffered, Subject, load_subject
from f8emu.spec import F8Error, MissingExtraError, SpecError

ORACLES = ("f8ref.numpy", "f8ref.jax")
KINDS = ("scale", "codes", "product")


@dataclass(slots=True, kw_only=True)
class Count:
    """What was compared of one kind."""

    parts: int = 0
    parts_equal: int = 0
    elements: int = 0
    elements_equal: int = 0


@dataclass(slots=True, kw_only=True)
class Replay:
    """What a replay found; also of one that was interrupted."""

    steps: list[str] = field(default_factory=list)
    gemms: int = 0
    counts: dict[str, Count] = field(default_factory=lambda: {kind: Count() for kind in KINDS})
    outputs: int = 0
    """The number of outputs of all products; `counts` has how many of them were computed again."""
    findings: list[Finding] = field(default_factory=list)
    """All findings in the order of execution: look at the first."""
    damaged: list[str] = field(default_factory=list)
    """Files that are not what was written, by their SHA-256, or that hold no record of a capture, and why."""
    not_replayed: list[str] = field(default_factory=list)
    """Place and reason."""
    missing: list[str] = field(default_factory=list)
    """What was left out, never finished, is there twice, or is of a rank that captured nothing.

    Whatever of it is there is replayed.
    """
    reasons: list[str] = field(default_factory=list)
    """Why a ring was written."""
    oracles: list[str] = field(default_factory=list)
    is_interrupted: bool = False

    @property
    def has_difference(self) -> bool:
        return bool(self.findings or self.damaged)

    @property
    def is_equal(self) -> bool:
        """Every product was computed again, none is missing, and nothing differed.

        Scales and codes are computed again where their tensors are there.
        """
        is_whole = not self.missing and not self.is_interrupted
        count = self.counts["product"]
        return is_whole and not self.has_difference and count.elements > 0 and count.parts == self.gemms


def replay(
    steps: Sequence[CapturedStep],
    *,
    oracle: str | None = None,
    outputs: int | None = None,
    errors: int = 20,
    progress: Progress | None = None,
) -> Replay:
    """Compute every stage again. KeyboardInterrupt ends it, and the findings so far are returned.

    Args:
        steps: the result of `read_capture`.
        oracle: f8ref.numpy or f8ref.jax; by default the first for emulated GEMMs, the second for a GPU's.
        outputs: the most outputs of each product to compute, rows and columns drawn at random; None: all.
        errors: mismatches to keep of each finding.
        progress: receives the progress.

    Raises:
        SpecError: an unknown oracle.
        CaptureError: no GEMM could be read.
        MissingExtraError: the named oracle needs JAX, which is not installed.
    """
    # 1. Bad arguments, and what the steps say of themselves: ranks and steps that are missing or there twice.
    if oracle is not None and oracle not in ORACLES:
        raise SpecError(f"replay: oracle must be one of {', '.join(ORACLES)}; got {oracle!r}")
    if outputs is not None and outputs < 1:
        raise SpecError(f"replay: outputs must be at least 1, or None for all; got {outputs}")
    found = Replay()
    _, twice = numbered(steps)
    found.missing = twice + absent_ranks(steps)
    run = _Run(found, oracle, outputs, errors)
    # 2. Step by step, record by record; a damaged record costs itself alone.
    try:
        for step in steps:
            if progress is not None:
                progress.begin("replay", step.name, len(step.records))
            found.steps.append(step.name)
            found.missing += absences(step)
            found.damaged += step.damaged
            if step.header.reason not in ("", *found.reasons):
                found.reasons.append(step.header.reason)
            tensors = Tensors(step)
            for captured in step.records:
                try:
                    run.record(step, captured, tensors)
                except CaptureError as error:  # says more than that the file is another than was written
                    found.damaged = [one for one in found.damaged if one != captured.named] + [str(error)]
                if progress is not None:
                    progress.advance()
    except KeyboardInterrupt:
        found.is_interrupted = True
    else:
        if found.damaged and not found.gemms:
            raise CaptureError(found.damaged[0])
    return found


class _Run:
    def __init__(self, found: Replay, oracle: str | None, outputs: int | None, errors: int) -> None:
        self.found, self.oracle, self.outputs, self.errors = found, oracle, outputs, errors
        self.subjects: dict[str, Subject] = {}

    def judge(self, record: GemmRecord) -> Subject:
        """Never who computed it; f8ref.numpy, which is slower, where JAX is missing."""
        name = self.oracle or ("f8ref.jax" if record.engine == "hardware" else "f8ref.numpy")
        # torch and JAX are loaded for a capture that needs them only
        if name not in self.subjects:
            try:
                self.subjects[name] = load_subject(name)
            except MissingExtraError:
                if self.oracle is not None:
                    raise
                self.subjects[name] = load_subject("f8ref.numpy")
            self.found.oracles.append(self.subjects[name].engine)
        return self.subjects[name]

    def record(self, step: CapturedStep, captured: CapturedRecord, tensors: Tensors) -> None:
        record = captured.record
        # 1. A changed file is named, and replayed all the same: its bits say what was changed.
        if not captured.is_intact():
            self.found.damaged.append(captured.named)
        if not isinstance(record, GemmRecord):
            captured.load()
            return
        # 2. A record must be what its recipe says, or scales and codes would be judged by another rule.
        recipe = step.header.recipes.get(record.recipe)
        if recipe is not None:
            require_of_recipe(record, recipe)
        # 3. Scales and codes from the tensors before their casts, then the product from the captured operands.
        arrays = captured.load()
        self.found.gemms += 1
        for part, tensor, expected in replay_casts(record, arrays, recipe, tensors):
            if isinstance(expected, str):
                self.found.not_replayed.append(f"{step.name}: {record.place} {part} ({tensor}): {expected}")
            else:
                observed, wanted = arrays[part], expected.array
                self.compare(step, record, part, tensor, observed, wanted, cause="", wrong=expected.wrong)
        self.product(step, record, arrays)

    def product(self, step: CapturedStep, record: GemmRecord, arrays: Arrays) -> None:
        self.found.outputs += arrays["product"].size
        # A product is judged by the captured operands, so that a wrong cast does not make it wrong too.
        part = sampled(record, arrays, self.outputs)
        judge = self.judge(record)
        try:
            expected = product_of(record, part, judge, record.split_k)
        except (NotOffered, F8Error) as error:
            self.found.not_replayed.append(f"{step.name}: {record.place} product: {error}")
            return
        wrong = different(part.product, expected)
        cause = likely_cause(record, arrays, part, wrong, judge) if wrong.any() else ""
        self.compare(step, record, "product", "", part.product, expected, cause=cause, wrong=wrong, sample=part)

    def compare(
        self,
        step: CapturedStep,
        record: GemmRecord,
        part: str,
        tensor: str,
        observed: np.ndarray,
        expected: np.ndarray,
        *,
        cause: str,
        wrong: np.ndarray,
        sample: Sampled | None = None,
    ) -> None:
        # 1. The counts of the kind: scales, codes, products. 2. A finding, with its first mismatches.
        count = self.found.counts[part.rpartition(".")[2]]
        bad = int(np.count_nonzero(wrong))
        count.parts += 1
        count.parts_equal += not bad
        count.elements += wrong.size
        count.elements_equal += wrong.size - bad
        if not bad:
            return
        case = f"{step.name}: {record.place}"
        shown = np.where(wrong, expected, observed)  # an element that is equal under another inv_scale is equal
        lines = islice(_placed(mismatches(case, part, observed, shown), sample), self.errors)
        self.found.findings.append(
            Finding(
                step=step.name,
                place=record.place,
                part=part,
                tensor=tensor,
                elements=wrong.size,
                elements_different=bad,
                cause=cause,
                mismatches=tuple(lines),
            )
        )


def _placed(found: Iterator[Mismatch], sample: Sampled | None) -> Iterator[Mismatch]:
    """With the index in the whole product, and the operands that lead to it."""
    for one in found:
        if sample is None:
            yield one
            continue
        i, j = one.index
        inputs = f"{abbreviated(sample.a[i], 'a')} {abbreviated(sample.b[j], 'b')}"
        yield replace(one, index=(int(sample.rows[i]), int(sample.columns[j])), inputs=inputs)
