"""Captures of a trainer and a server: one pass of both, a replayed sample, the server's inputs, and decode."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from f8emu.capture.diffing import FORWARD_ALONE, diff
from f8emu.capture.findings import paired
from f8emu.capture.read import CapturedStep
from f8emu.capture.record import CaptureError
from f8emu.capture.replaying import replay
from f8emu.conformance.compare import counted
from f8emu.rollout.certificate import Difference
from f8emu.rollout.decode import decoded
from f8emu.rollout.passes import Pass, before, by_rank, forward_of, longest_of, passes_of
from f8emu.rollout.seen import Seen
from f8emu.rollout.served import served_layers

_OUTPUTS = 4096
"""Outputs of each product that are computed again."""


def compare_captures(
    trainer: Sequence[CapturedStep], server: Sequence[CapturedStep], names: Sequence[str], result: Seen
) -> None:
    """Compare two captures, replay a sample of the trainer's, compare the server's passes; add to `result`."""
    passes, of_server = passes_of(trainer), passes_of(server)
    # 1. One pass of both; of several lengths on a side the longest, which is the prefill.
    ranks = by_rank(of_server)
    has_lengths = _has_lengths(ranks)
    is_chosen = has_lengths or _has_lengths(by_rank(passes))
    pair = [longest_of(passes), longest_of(of_server)] if is_chosen else [forward_of(trainer), forward_of(server)]
    compared = diff(*pair, errors=4, names=names)
    layers: dict[str, dict[str, int]] = defaultdict(lambda: {"stages": 0, "equal": 0, "elements_different": 0})
    for place, _, is_equal in compared.course:
        layer = layers[place.partition(": ")[2].partition(" ")[0]]
        layer["stages"], layer["equal"] = layer["stages"] + 1, layer["equal"] + is_equal
    for difference in compared.divergences:
        layer = layers[difference.place.partition(" ")[0]]
        layer["elements_different"] += difference.elements_different
        layer["ulps_max"] = max(layer.get("ulps_max", 0), difference.ulps_max)
    result.captures = {"stages": compared.stages, "stages_equal": compared.stages_equal, "context": compared.context}
    result.captures |= {"layers": dict(layers), "first": compared.divergences[0].line() if compared.divergences else ""}
    if compared.divergences:
        first = compared.divergences[0]
        is_input = (first.part, first.tensor) == ("value", "input")
        cause = first.cause or (before(first.place.partition(" ")[0]) if is_input else "")
        result.differences.append(Difference(part="captures", place=first.where, cause=cause, seen=first.share))
    for cause, places in (
        ("a damaged record", compared.damaged),
        ("in the trainer's capture alone", compared.only_a),
        ("in the server's capture alone", compared.only_b),
    ):
        if places:
            seen = counted(len(places), "such record")
            result.differences.append(Difference(part="captures", place=places[0], cause=cause, seen=seen))
    if not compared.stages:
        result.lacks("captures", "no stage of one is in the other")
    for text in compared.missing:
        result.lacks("captures", text, was_asked=FORWARD_ALONE not in text)
    # 2. A sample of the trainer's products, computed again.
    again = replay(pair[0], outputs=_OUTPUTS, errors=4)
    products = again.counts["product"]
    result.captures["replayed"] = {"outputs": products.elements, "equal": products.elements_equal}
    result.captures["replayed"] |= {"of": again.outputs, "oracles": again.oracles}
    for difference in again.findings[:4]:
        result.differences.append(
            Difference(part="replay", place=difference.where, cause=difference.cause, seen=difference.share)
        )
    for text in again.not_replayed:
        result.lacks("replay", text, was_asked=False)
    for text in again.damaged:
        if text not in compared.damaged:  # a record that is not as its recipe has it
            result.lacks("replay", text)
    if not products.elements:
        result.lacks("replay", "no GEMM of the trainer's capture can be computed again")
    # 3. The server's products, beside what the trainer's GEMMs give of the server's inputs.
    _served(pair[0], pair[1], names, result)
    # 4. Decode beside prefill.
    if has_lengths:
        for of_rank in ranks:
            try:
                decoded(of_rank, result)
            except CaptureError as error:
                result.lacks("decode", str(error))
    else:
        result.lacks("decode", "the server's capture has passes of one length only", was_asked=False)


def _has_lengths(ranks: Sequence[Sequence[Pass]]) -> bool:
    # Whether a rank has passes of several numbers of rows.
    return any(len({shown.rows for shown in of_rank if shown.outputs}) > 1 for of_rank in ranks)


def _served(
    trainer: Sequence[CapturedStep], server: Sequence[CapturedStep], names: Sequence[str], result: Seen
) -> None:
    of_trainer, of_server, _ = paired(trainer, server)
    layers: dict[str, dict[str, Any]] = {}
    for key in (key for key in of_trainer if key in of_server):
        for layer in served_layers(of_trainer[key], of_server[key], outputs=_OUTPUTS, names=names):
            if layer.why_not:
                result.lacks("served", f"{layer.layer}: {layer.why_not}", was_asked=False)
                continue
            entry = {"outputs": layer.outputs, "equal": layer.equal, "dialects": list(layer.dialects)}
            earlier = layers.setdefault(layer.layer, entry)
            if earlier is not entry:
                earlier["outputs"] += layer.outputs
                earlier["equal"] += layer.equal
    outputs, equal = (sum(layer[name] for layer in layers.values()) for name in ("outputs", "equal"))
    result.captures["served"] = {"outputs": outputs, "equal": equal, "layers": layers}
    wrong = [name for name, layer in layers.items() if layer["equal"] < layer["outputs"]]
    if wrong:
        dialects = ", ".join(layers[wrong[0]]["dialects"][:3]) or "no known dialect, or not shown"
        seen = f"of {counted(outputs, 'output')} of the server's inputs {outputs - equal} differ, in "
        seen += f"{len(wrong)} of {counted(len(layers), 'layer')}; the server's activations are of {dialects}"
        cause = "the trainer's GEMM gives other bits of the same input"
        result.differences.append(Difference(part="served", place=wrong[0], cause=cause, seen=seen))
