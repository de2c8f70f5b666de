"""The audit: names first, then every weight in bands, two at a time, then what all of them together show."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import local

import numpy as np

from f8emu.audit import checks
from f8emu.audit.blocks import Weight, buffer_for, measured, weights_of
from f8emu.audit.checkpoint import Checkpoint, read_checkpoint
from f8emu.audit.checks import Summary
from f8emu.audit.findings import Audit, Finding, finding
from f8emu.audit.formats import SCALES, Format, consumers_of, format_of
from f8emu.audit.source import Comparison, compared, misplaced
from f8emu.conformance.run.result import Progress, Silent

_THREADS = 2
_HIGH = ("BF16", "F16", "F32")


def audit(
    path: str | Path, *, source: str | Path | None = None, consumer: str | None = None, progress: Progress | None = None
) -> Audit:
    """What is wrong with a float8 checkpoint.

    `path` is a .safetensors file or a directory with shards, index and configuration. `source` is the model in high
    precision that was quantized: it shows which dialects give every byte of codes and scales. `consumer` is what will
    serve it, STACK or STACK:CHIP (`vllm:b200`). A KeyboardInterrupt ends it, and what was found so far is returned.

    Memory: a few megabytes for each of two threads, and the scales of two weights.

    Exactness: every code and every scale is read. What is found in names, shapes, forbidden codes, kinds of scales and
    against a source is certain. Codes against the rule of their scales, and amplitudes, are judged by the probability
    of an accident, which is below 1e-4 for each finding.

    Raises:
        CheckpointError: a file that is missing, cut short, foreign or inconsistent.
        SpecError: an unknown consumer.
    """
    consumers = consumers_of(consumer) if consumer is not None else []
    checkpoint = read_checkpoint(path)
    origin = read_checkpoint(source) if source is not None else None
    form = format_of(checkpoint)
    weights = list(weights_of(checkpoint, form))
    found = Audit(
        path=str(path),
        format=form.name,
        consumer=", ".join(consumers),
        source="" if source is None else str(source),
        tensors_total=len(weights),
    )
    told = progress or Silent()
    parts: list[_Part] = []
    try:
        found.findings += checks.names(checkpoint, form, weights, consumers)
        found.findings += checks.lone_scales(checkpoint, form)
        told.begin("audit", "float8 weights", len(weights))
        for part in _examined(checkpoint, origin, form, weights):
            parts.append(part)
            found.findings += part.findings
            found.tensors += 1
            found.elements += part.weight.codes.size
            told.advance()
    except KeyboardInterrupt:
        found.is_interrupted = True
    _conclude(found, form, parts, consumers, has_source=origin is not None)
    return found


@dataclass(slots=True, kw_only=True)
class _Part:
    """What was found of one weight."""

    weight: Weight
    findings: list[Finding] = field(default_factory=list)
    summary: Summary | None = None
    comparison: Comparison | None = None
    has_source: bool = False


def _examined(
    checkpoint: Checkpoint, origin: Checkpoint | None, form: Format, weights: list[Weight]
) -> Iterator[_Part]:
    own = local()

    def examine(weight: Weight) -> _Part:
        part = _Part(weight=weight)
        is_told = form.method != "" or form.scales != SCALES
        if weight.scale is None or weight.block is None:
            part.findings += checks.unscaled(weight, is_told or weight.scale is not None)
            return part
        if len(getattr(own, "buffer", ())) < buffer_for(weight):
            own.buffer = np.empty(buffer_for(weight), np.uint8)
        blocks = measured(weight, own.buffer)
        part.findings += checks.forbidden(weight, blocks)
        part.findings += checks.amplitude(weight, blocks)
        part.summary, more = checks.summarized(weight, blocks)
        part.findings += more
        other = None if origin is None else origin.tensors.get(weight.source_name)
        if other is not None and other.dtype in _HIGH and weight.largest_code == 0x7E:
            part.has_source = True
            if other.shape == weight.codes.shape:
                part.comparison = compared(weight, blocks, other)
            else:
                expected = f"{list(weight.codes.shape)}"
                part.findings.append(finding("source-shape", weight.name, expected, f"{list(other.shape)}"))
        return part

    with ThreadPoolExecutor(_THREADS) as pool:
        rest = iter(weights)
        running: list[Future[_Part]] = [pool.submit(examine, one) for one in islice(rest, 2 * _THREADS)]
        try:
            while running:
                yield running.pop(0).result()
                running += [pool.submit(examine, one) for one in islice(rest, 1)]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _conclude(found: Audit, form: Format, parts: list[_Part], consumers: list[str], *, has_source: bool) -> None:
    summaries = [part.summary for part in parts if part.summary is not None]
    clipped = {one.tensor for one in found.findings if one.check == "saturated"}
    found.findings += checks.together(form, summaries, clipped, consumers)
    found.blocks = sum(one.blocks for one in summaries)
    kinds = dict.fromkeys(str(one.kind) for one in summaries if one.kind is not None)
    found.scales = ", ".join(kinds)
    found.zero_blocks = checks.fingerprints(summaries)
    comparisons = [part.comparison for part in parts if part.comparison is not None]
    found.compared = len(comparisons)
    for one in comparisons:
        for name in one.dialects:
            found.dialects[name] = found.dialects.get(name, 0) + 1
    found.findings += misplaced(comparisons)
    if has_source and parts and not any(part.has_source for part in parts):
        name = parts[0].weight.source_name
        found.findings.append(finding("source-missing", parts[0].weight.name, f"{name} in the source", "none"))
