"""A captured step computed again by the oracle, without a GPU: which stage is the first whose bits differ.

    scale, codes of a and of b   from the tensors before their casts, where they were captured
    product                      from the captured operands, so that a fault does not spread to later stages

The engine that computed a capture does not judge it: a capture that f8ref.jax emulated is judged by f8ref.numpy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, get_args

import numpy as np

from f8emu.capture.findings import Comparison, Difference, compared, findings_page, numbered
from f8emu.capture.oracle import (
    Expected,
    Sampled,
    likely_cause,
    product_of,
    replay_casts,
    require_of_recipe,
    sampled,
)
from f8emu.capture.read import CapturedRecord, CapturedStep, steps_of
from f8emu.capture.record import CaptureError, ForeignRecord, GemmRecord
from f8emu.conformance.compare import Mismatch, abbreviated, counted, different
from f8emu.conformance.run.result import Progress
from f8emu.conformance.run.subject import NotOffered, Subject, load_subject
from f8emu.report.page import Cell, Page, Row, Table, Tone
from f8emu.spec import F8Error, MissingExtraError, SpecError
from f8emu.verdict import Verdict

OracleName = Literal["f8ref.numpy", "f8ref.jax"]
ORACLES: tuple[OracleName, ...] = get_args(OracleName)
KINDS = ("scale", "codes", "product")
_AS_CAPTURED = (
    "scales are used as captured: they follow from earlier steps or other ranks, which the step does not hold"
)


@dataclass(slots=True, kw_only=True)
class Count:
    """The number of compared parts and elements of one kind."""

    parts: int = 0
    parts_equal: int = 0
    elements: int = 0
    elements_equal: int = 0


@dataclass(slots=True, kw_only=True, repr=False)
class Replay(Comparison):
    """The result of a replay, which covers everything that a capture holds."""

    _page: ClassVar[str] = "f8emu.capture.replaying:replay_page"
    steps: list[str] = field(default_factory=list)
    gemms: int = 0
    counts: dict[str, Count] = field(default_factory=lambda: {kind: Count() for kind in KINDS})
    outputs: int = 0
    """The number of outputs of all products; `counts` has how many of them were computed again."""
    findings: list[Difference] = field(default_factory=list)
    """All findings in the order of execution: look at the first."""
    not_replayed: list[str] = field(default_factory=list)
    """Place and reason."""
    reasons: list[str] = field(default_factory=list)
    """Why a ring was written."""
    oracles: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """Every product counts. Scales and codes are computed again where their tensors are there."""
        count, undone = self.counts["product"], self.gemms - self.counts["product"].parts
        undone_words = counted(undone, "product was not computed again", "products were not computed again")
        return self.judged(
            self.findings,
            f"{count.elements:,} of {counted(self.outputs, 'output')} of {counted(self.gemms, 'GEMM')}; judge: "
            f"{', '.join(self.oracles)}",
            equal=f"{count.elements_equal:,} of ",
            otherwise=f"DAMAGED: {counted(len(self.damaged), 'file')}" if self.damaged else "",
            nothing="" if count.elements else "nothing was computed again",
            undone=undone_words if undone else "",
        )


def replay(
    steps: str | Path | Sequence[CapturedStep],
    *,
    oracle: OracleName | None = None,
    outputs: int | None = None,
    errors: int = 20,
    progress: Progress | None = None,
) -> Replay:
    """Compute every stage again. KeyboardInterrupt ends it, and the findings so far are returned.

    Args:
        steps: the result of `read_capture`.
        oracle: f8ref.numpy or f8ref.jax; by default f8ref.jax for GEMMs of a GPU where JAX is installed, else
            f8ref.numpy.
        outputs: the most outputs of each product to compute, rows and columns drawn at random; None: all.
        errors: mismatches to keep of each finding.
        progress: receives the progress.
    """
    if oracle is not None and oracle not in ORACLES:
        raise SpecError(f"replay: oracle must be one of {', '.join(ORACLES)}; got {oracle!r}")
    if outputs is not None and outputs < 1:
        raise SpecError(f"replay: outputs must be at least 1, or None for all; got {outputs}")
    steps = steps_of(steps)
    result = Replay(missing=numbered(steps)[1])
    judges: dict[str, Subject] = {}

    def tasks() -> Iterator[tuple[str, list[Callable[[], None]]]]:
        for step in steps:
            result.steps.append(step.name)
            result.damaged += step.damaged
            if step.header.reason not in ("", *result.reasons):
                result.reasons.append(step.header.reason)
            run = _Step(step, result, partial(_judge, judges, oracle, result), outputs, errors)
            yield step.name, [partial(run.record, captured) for captured in step.records]

    result.examine("replay", tasks(), progress)
    if result.damaged and not result.gemms and not result.is_interrupted:
        raise CaptureError(result.damaged[0])
    return result


def _judge(judges: dict[str, Subject], oracle: str | None, result: Replay, record: GemmRecord) -> Subject:
    # Never the implementation that computed it; f8ref.numpy where JAX is missing.
    name = oracle or ("f8ref.jax" if record.engine == "hardware" else "f8ref.numpy")
    # torch and JAX are loaded for a capture that needs them only
    if name not in judges:
        try:
            judges[name] = load_subject(name)
        except MissingExtraError:
            if oracle is not None:
                raise
            judges[name] = load_subject("f8ref.numpy")
        result.oracles.append(judges[name].engine)
    return judges[name]


@dataclass(frozen=True, slots=True)
class _Step:
    step: CapturedStep
    found: Replay
    judge: Callable[[GemmRecord], Subject]
    outputs: int | None
    errors: int

    def record(self, captured: CapturedRecord) -> None:
        # 1. A record that cannot be read, or is not what its recipe says, is not judged.
        record, arrays = captured.record, captured.load()
        recipe = self.step.header.recipes.get(record.recipe) if isinstance(record, GemmRecord) else None
        if isinstance(record, GemmRecord) and recipe is not None:
            require_of_recipe(record, recipe)
        # 2. A changed file is named, and replayed all the same: its bits say what was changed.
        if not captured.is_intact():
            self.found.damaged.append(captured.named)
        if isinstance(record, ForeignRecord):
            self.left(record, "is of another stack's layer: f8emu diff compares it")
        if not isinstance(record, GemmRecord):
            return
        # 3. Scales and codes from the tensors before their casts.
        self.found.gemms += 1
        self.found.outputs += arrays["product"].size
        for part, tensor, expected in replay_casts(self.step, record, arrays, recipe):
            if isinstance(expected, str):
                self.left(record, f"{part} ({tensor}): {expected}")
            else:
                self.compare(record, part, arrays[part], expected, tensor=tensor)
        # 4. The product from the captured operands, so that a wrong cast does not make it wrong too.
        sample, judge = sampled(record, arrays, self.outputs), self.judge(record)
        try:
            product = product_of(sample, judge, record.split_k)
        except (NotOffered, F8Error) as error:
            return self.left(record, f"product: {error}")
        observed = sample.product
        wrong = different(observed, product)
        cause = likely_cause(sample, wrong, judge) if wrong.any() else ""
        self.compare(record, "product", observed, Expected(product, wrong), cause=cause, sample=sample)

    def left(self, record: GemmRecord | ForeignRecord, why: str) -> None:
        self.found.not_replayed.append(f"{self.step.name}: {record.place} {why}")

    def compare(
        self,
        record: GemmRecord,
        part: str,
        observed: np.ndarray,
        expected: Expected,
        *,
        tensor: str = "",
        cause: str = "",
        sample: Sampled | None = None,
    ) -> None:
        # 1. The counts of the kind: scales, codes, products.
        count, wrong = self.found.counts[part.rpartition(".")[2]], expected.wrong
        bad = int(np.count_nonzero(wrong))
        count.parts += 1
        count.parts_equal += not bad
        count.elements += wrong.size
        count.elements_equal += wrong.size - bad
        self.found.course.append((f"{self.step.name}: {record.place}", part, not bad))
        if not bad:
            return
        # 2. A finding. An element that is equal under another inv_scale is equal.
        shown = np.where(wrong, expected.array, observed)
        facts = compared(observed, shown, f"{self.step.name}: {record.place}", part, self.errors)
        if sample is not None:
            facts["mismatches"] = tuple(_placed(mismatch, sample) for mismatch in facts["mismatches"])
        place = {"step": self.step.name, "place": record.place, "part": part, "tensor": tensor, "cause": cause}
        self.found.findings.append(Difference(elements=wrong.size, **place, **facts))


def _placed(mismatch: Mismatch, sample: Sampled) -> Mismatch:
    # With the index in the whole product, and the operands that lead to it.
    i, j = mismatch.index
    inputs = f"{abbreviated(sample.a[i], 'a')} {abbreviated(sample.b[j], 'b')}"
    return replace(mismatch, index=(int(sample.rows[i]), int(sample.columns[j])), inputs=inputs)


def replay_page(result: Replay, errors: int = 20) -> Page:
    """One row a kind of stage; findings, first to last, with mismatches of the first; then what was not judged."""
    rows: list[Row] = []
    counts = {kind: count for kind, count in result.counts.items() if count.parts}
    for kind, count in counts.items():
        share = f"{count.elements}" + (f" (of {result.outputs})" if kind == "product" != count.elements else "")
        tone: Tone = "good" if count.parts == count.parts_equal else "bad"
        equal = Cell(text=f"{count.parts_equal}/{count.parts}", tone=tone)
        rows.append([kind, equal, share, str(count.elements_equal)])
    table = Table(
        caption=f"replay of {', '.join(result.steps) or 'nothing'}",
        columns=("stage", "equal", "bits of", "elements equal"),
        rows=rows,
        numeric=frozenset((1, 2, 3)),
    )
    lists = {"damaged": result.damaged, "not replayed": result.not_replayed, "missing": result.missing}
    above = [table, *(f"captured because of {reason}" for reason in result.reasons)]
    above += [_AS_CAPTURED] if "codes" in counts and "scale" not in counts else []
    return findings_page("replay", result, above, result.findings, lists, errors)
