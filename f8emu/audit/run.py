"""The audit: names first, then every weight in bands, two at a time, then what all of them together show."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from threading import local

import numpy as np

from f8emu.audit.blocks import Weight, buffer_for, measured, shards_of, weights_of
from f8emu.audit.checkpoint import DTYPES, FLOATS, Checkpoint, read_checkpoint
from f8emu.audit.faults import CHECKS, Severity
from f8emu.audit.findings import Audit, Finding, finding
from f8emu.audit.formats import Format, consumers_of, format_of
from f8emu.audit.names import left_out, lone_scales, named
from f8emu.audit.source import Comparison, compared, misplaced, mixed
from f8emu.audit.values import Summary, examined, fingerprints, forbidden, together, unscaled
from f8emu.conformance.run.result import Progress, Silent

_THREADS = 2
_BY_CHANCE = ("saturated", "scale-constant", "too-coarse", "rounded-after")
"""Checks of codes against the rule of their scales, which know no source."""


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
    of an accident, which is below 1e-3 for each finding, unless weights were clipped themselves; a source tells those
    apart, and makes what it refutes a note.

    Raises:
        CheckpointError: a file that is missing, cut short, foreign or inconsistent.
        SpecError: an unknown consumer.
    """
    consumers = consumers_of(consumer) if consumer is not None else []
    checkpoint = read_checkpoint(path)
    origin = read_checkpoint(source) if source is not None else None
    form = format_of(checkpoint)
    weights = list(weights_of(checkpoint, form))
    found = Audit(path=str(path), format=form.name, tensors_total=len(weights))
    found.consumer, found.source = ", ".join(consumers), "" if source is None else str(source)
    told = progress or Silent()
    parts: list[_Part] = []
    try:
        found.findings += named(checkpoint, form, weights)
        found.findings += lone_scales(checkpoint)
        if origin is not None:
            found.findings += left_out(checkpoint, origin, weights)
            weights = [shard for one in weights for shard in shards_of(one, origin.tensors)]
            found.tensors_total = len(weights)
        told.begin("audit", "float8 weights", len(weights))
        for part in _parts(weights, form, origin):
            parts.append(part)
            found.tensors += 1
            found.elements += part.weight.codes.size
            found.findings += part.findings
            told.advance()
    except KeyboardInterrupt:
        found.is_interrupted = True
    _conclude(found, form, parts, consumers)
    return found


@dataclass(slots=True, kw_only=True)
class _Part:
    """What was found of one weight."""

    weight: Weight
    findings: list[Finding] = field(default_factory=list)
    summary: Summary | None = None
    comparison: Comparison | None = None


def _parts(weights: list[Weight], form: Format, origin: Checkpoint | None) -> Iterator[_Part]:
    own = local()

    def examine(weight: Weight) -> _Part:
        part = _Part(weight=weight)
        if weight.scale is None or weight.block is None or weight.scale.dtype not in DTYPES:
            part.findings += unscaled(weight, is_told=form.is_certain or weight.scale is not None)
            return part
        if len(getattr(own, "buffer", ())) < buffer_for(weight):
            own.buffer = np.empty(buffer_for(weight), np.uint8)
        blocks = measured(weight, own.buffer)
        part.findings += forbidden(weight, blocks)
        part.summary, more = examined(weight, blocks)
        part.findings += more
        source = None if origin is None else origin.tensors.get(weight.source_name)
        if source is not None and source.dtype in FLOATS and weight.codes.dtype == "F8_E4M3":
            if source.shape == weight.codes.shape:
                part.comparison = compared(weight, blocks, source, is_power_of_two=form.is_power_of_two)
            else:
                shapes = (f"{list(one.shape)}" for one in (weight.codes, source))
                part.findings.append(finding("source-shape", weight.name, *shapes))
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


def _excused(one: Finding, known: Mapping[str, Weight]) -> Finding:
    # A dialect that gives every byte refutes what was judged by chance: the weights were clipped before.
    # A float32 scale of 0 is then its way with zeros; smaller dtypes underflow.
    scale = known[one.tensor].scale if one.tensor in known else None
    is_zero = one.check == "scale-zero" and scale is not None and scale.dtype == "F32"
    return replace(one, severity=Severity.NOTE) if is_zero or (scale and one.check in _BY_CHANCE) else one


def _conclude(found: Audit, form: Format, parts: list[_Part], consumers: list[str]) -> None:
    summaries = [part.summary for part in parts if part.summary is not None]
    explained = {one.tensor for one in found.findings if one.check in ("saturated", "scale-constant")}
    found.findings += together(form, summaries, explained, consumers)
    found.blocks = sum(math.prod(one.weight.grid) for one in summaries)
    found.scales = ", ".join(dict.fromkeys(one.kind for one in summaries if one.kind is not None))
    found.zero_blocks = fingerprints(summaries)
    comparisons = [part.comparison for part in parts if part.comparison is not None]
    found.compared = len(comparisons)
    if found.source and parts and not comparisons and not any(one.check == "source-shape" for one in found.findings):
        expected = f"{parts[0].weight.source_name} in high precision, in blocks of a known dialect"
        found.findings.append(finding("source-missing", parts[0].weight.name, expected, "none", blocks=len(parts)))
    # Dialects of the stack that the configuration names come first.
    names = Counter(name for one in comparisons for name in one.dialects)
    stack = form.method.replace("-", "_") or "?"
    found.dialects = dict(sorted(names.items(), key=lambda one: (-one[1], not one[0].startswith(stack))))
    found.findings += misplaced(comparisons)
    found.findings += mixed(comparisons)
    known = {one.weight.name: one.weight for one in comparisons if one.dialects}
    found.findings = [_excused(one, known) for one in found.findings]
    order = {check: i for i, check in enumerate(CHECKS)}
    found.findings.sort(key=lambda one: (list(Severity).index(one.severity), order[one.check]))
