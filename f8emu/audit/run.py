"""The audit: names first, then every weight in bands, two at a time, then what all of them together show."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from f8emu.audit.blocks import Weight, measured, shards_of, weights_of
from f8emu.audit.checkpoint import DTYPES, FLOATS, Checkpoint, read_checkpoint
from f8emu.audit.findings import CHECKS, Audit, Finding, Severity
from f8emu.audit.formats import Format, consumers_of, format_of
from f8emu.audit.names import left_out, named
from f8emu.audit.source import compared
from f8emu.audit.values import Examined, examined, fingerprints, together, unscaled
from f8emu.conformance.run.result import Progress, Silent

_THREADS = 2


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
    found = Audit(path=str(path), format=form.name, consumer=", ".join(consumers), source=str(source or ""))
    told, every = progress or Silent(), list[Examined]()
    pool = ThreadPoolExecutor(_THREADS)
    try:
        found.tensors_total = len(weights)
        found.findings += named(checkpoint, form, weights)
        if origin is not None:
            found.findings += left_out(checkpoint, origin, weights)
            weights = [shard for one in weights for shard in shards_of(one, origin.tensors)]
        found.tensors_total = len(weights)
        told.begin("audit", "float8 weights", len(weights))
        for one in pool.map(partial(_examined, form=form, origin=origin, consumers=consumers), weights):
            every.append(one)
            told.advance()
    except KeyboardInterrupt:
        found.is_interrupted = True
    finally:
        pool.shutdown(cancel_futures=True)
    _conclude(found, form, every)
    return found


def _examined(weight: Weight, *, form: Format, origin: Checkpoint | None, consumers: Sequence[str]) -> Examined:
    if weight.scale is None or weight.block is None or weight.scale.dtype not in DTYPES:
        return unscaled(weight, is_told=form.is_certain or weight.scale is not None)
    blocks = measured(weight)
    one = examined(weight, blocks, form, consumers)
    source = None if origin is None else origin.tensors.get(weight.source_name)
    if source is None or source.dtype not in FLOATS or weight.codes.dtype != "F8_E4M3":
        return one
    if source.shape != weight.codes.shape:
        one.findings.append(weight.finding("source-shape", f"{list(weight.codes.shape)}", f"{list(source.shape)}"))
        return one
    one.comparison = compared(weight, blocks, source, is_power_of_two=form.is_power_of_two)
    one.findings += one.comparison.findings if one.comparison is not None else ()
    return one


def _conclude(found: Audit, form: Format, every: Sequence[Examined]) -> None:
    found.tensors, found.blocks = len(every), sum(one.blocks for one in every)
    found.elements = sum(one.weight.codes.size for one in every)
    found.scales = ", ".join(dict.fromkeys(one.kind for one in every if one.kind is not None))
    found.zero_blocks = fingerprints(every)
    comparisons = [one.comparison for one in every if one.comparison is not None]
    found.compared = len(comparisons)
    # Dialects of the stack that the configuration names come first.
    names = Counter(name for one in comparisons for name in one.dialects)
    stack = form.method.replace("-", "_") or "?"
    found.dialects = dict(sorted(names.items(), key=lambda one: (-one[1], not one[0].startswith(stack))))
    found.findings += [*together(form, every), *_mixed(every)]
    if found.source and every and not comparisons and not any(one.check == "source-shape" for one in found.findings):
        first = every[0].weight
        expected = f"{first.source_name} in high precision, in blocks of a known dialect"
        found.findings.append(first.finding("source-missing", expected, "none", blocks=len(every)))
    order = [*CHECKS]
    found.findings.sort(key=lambda one: (list(Severity).index(one.severity), order.index(one.check)))


def _mixed(every: Sequence[Examined]) -> Iterator[Finding]:
    # Weights whose dialects are not that of the others with the same blocks.
    known = [(one.weight, one.comparison.dialects) for one in every if one.comparison and one.comparison.dialects]
    for block in dict.fromkeys(weight.block for weight, _ in known):
        alike = [(weight, names) for weight, names in known if weight.block == block]
        ((usual, count),) = Counter(name for _, names in alike for name in names).most_common(1)
        other = [(weight, names) for weight, names in alike if usual not in names]
        if other and count > len(other):
            (weight, names) = other[0]
            yield weight.finding("dialects-mixed", usual, f"{names[0]}, in {len(other)} of {len(alike)} weights")
