"""The audit: names first, then every weight in bands, two at a time, then what all of them together show."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from f8emu.audit.blocks import Weight, measured, weights_of
from f8emu.audit.checkpoint import FLOATS, Checkpoint, read_checkpoint
from f8emu.audit.findings import CHECKS, Audit, Severity
from f8emu.audit.formats import Format, consumers_of, format_of
from f8emu.audit.layers import layered
from f8emu.audit.names import changed, infinite, named
from f8emu.audit.pairs import paired, siblings_of
from f8emu.audit.plain import altered, comparable, gaps, left_out
from f8emu.audit.serving import cuts, served
from f8emu.audit.source import compare
from f8emu.audit.values import examine, together, unscaled
from f8emu.audit.zeros import fingerprints, lost_whole
from f8emu.conformance.run.result import Progress, Silent

_THREADS = 2


def audit(
    path: str | Path,
    *,
    source: str | Path | None = None,
    consumer: str | None = None,
    tp: int | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Find what is wrong with a float8 checkpoint.

    `path` is a .safetensors file or a directory with shards, index and configuration. `source` is the model in high
    precision that was quantized: it shows which dialects give every byte of codes and scales. `consumer` is what will
    serve it, STACK or STACK:CHIP (`vllm:b200`), `tp` the size of its tensor parallelism. A KeyboardInterrupt ends it,
    and what was found so far is returned.

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
    result = Audit(
        path=str(path),
        format=form.name if weights or form.method else "not float8",
        consumer=f"{consumer} ({', '.join(consumers)})" if consumer is not None else "",
        source=str(source or ""),
    )
    bar = progress or Silent()
    pool = ThreadPoolExecutor(_THREADS)
    try:
        result.tensors_total = len(weights)
        result.findings += named(checkpoint, form, weights, consumers)
        result.findings += layered(checkpoint, form, weights, consumers)
        result.findings += cuts(checkpoint, weights, consumers, tp)
        if origin is not None:
            weights = [shard for weight in weights for shard in paired(weight, origin.tensors)]
            result.findings += left_out(checkpoint, origin, weights)
        else:
            result.findings += gaps(checkpoint, weights)
        result.tensors_total = len(weights)
        exported = sorted(checkpoint.manifest and checkpoint.manifest.keys() | checkpoint.tensors.keys())
        others = [
            tensor for tensor in checkpoint.tensors.values() if tensor.dtype in FLOATS and "scale" not in tensor.name
        ]
        plain = comparable(checkpoint, origin) if origin is not None and weights else []
        for title, check, items in (
            ("hashes of the manifest", partial(changed, checkpoint), exported),
            ("weights in high precision", infinite, others if weights else []),
            ("weights in high precision beside the source", altered, plain),
        ):
            bar.begin("audit", title, len(items))
            for findings in pool.map(check, items):
                result.findings += findings
                result.unquantized_compared += items is plain
                bar.advance()
        bar.begin("audit", "float8 weights", len(weights))
        for _ in pool.map(partial(_examine, form=form, origin=origin, consumers=consumers), weights):
            result.tensors += 1
            bar.advance()
    except KeyboardInterrupt:
        result.is_interrupted = True
    finally:
        pool.shutdown(cancel_futures=True)
    _conclude(result, form, weights[: result.tensors])
    result.findings += served(checkpoint, weights[: result.tensors], consumers)
    severities, checks = [*Severity], [*CHECKS]
    result.findings.sort(key=lambda one: (severities.index(one.severity), checks.index(one.check)))
    return result


def _examine(weight: Weight, *, form: Format, origin: Checkpoint | None, consumers: Sequence[str]) -> None:
    blocks, source = measured(weight), weight.origin
    if weight.is_scaled:
        examine(weight, blocks, form, consumers)
    else:
        unscaled(weight, blocks, is_told=form.is_certain or weight.scale is not None)
    if source is None or weight.uncompared:
        return
    if weight.codes.dtype != "F8_E4M3":
        weight.uncompared = f"no dialect gives {weight.codes.dtype}"
    elif not weight.is_scaled and (form.is_certain or weight.scale):
        weight.uncompared = "it has no scale that can be read"
    elif source.shape == weight.codes.shape:
        compare(weight, blocks, source, siblings_of(weight, origin.tensors) if origin else [], form)
    else:
        weight.uncompared = f"the source has another shape, {list(source.shape)}"
        weight.add("source-shape", f"{list(weight.codes.shape)}", f"{list(source.shape)}")


def _conclude(result: Audit, form: Format, weights: Sequence[Weight]) -> None:
    result.blocks, result.elements = (
        sum(weight.blocks for weight in weights),
        sum(weight.codes.size for weight in weights),
    )
    result.unscaled = [x.name for x in weights if not x.is_scaled and (form.is_certain or x.scale is not None)]
    result.scales = ", ".join(dict.fromkeys(weight.kind for weight in weights if weight.kind is not None))
    result.zero_blocks = fingerprints(weights)
    # Dialects of the stack that the configuration names come first.
    compared = [weight.dialects for weight in weights if weight.dialects is not None]
    counts, stack = Counter(name for names in compared for name in names), form.method.replace("-", "_") or "?"
    result.dialects = dict(sorted(counts.items(), key=lambda pair: (-pair[1], not pair[0].startswith(stack))))
    result.compared = len(compared)
    lost_whole(weights)
    together(form, weights)
    result.findings += [finding for weight in weights for finding in weight.findings]
    result.uncompared = {weight.name: weight.uncompared for weight in weights if weight.uncompared}
    has_shape = any(finding.check == "source-shape" for finding in result.findings)
    if result.source and weights and not compared and not has_shape:
        expected = f"{weights[0].source} in high precision, in blocks of a known dialect"
        result.findings.append(weights[0].finding("source-missing", expected, "none", blocks=len(weights)))
