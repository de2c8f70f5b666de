"""The alterations that the suite knows: each a name, a sentence, and a function from rules to rules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import product
from typing import Any

from f8emu.conformance.diagnosis.rules import (
    Adder,
    BiasRule,
    Misplaced,
    Misreading,
    Places,
    Reading,
    Rounding,
    Rules,
    ScaleOrder,
    Taken,
)
from f8emu.spec import BLACKWELL_MMA, CHIPS, H100, AccumulationModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Alteration:
    """One way in which a kernel may differ."""

    name: str
    sentence: str
    """What such a kernel does; ends a sentence that begins with "it"."""
    change: Callable[[Rules], Rules]
    """Gives the same rules where it has no meaning."""
    is_of_chip: bool = False
    """The whole accumulation of a chip, or of an instruction: no other alteration of the adding has an effect."""


PROMOTIONS = (32, 64, 128, 256, 512)
FRACTION_BITS = tuple(range(12, 26))
SUM_BITS = (23, *range(12, 20))
"""32 terms of 14 bits sum to at most 20 bits, so every width from 19 up is exact and equivalent."""
SPLITS = (2, 3, 4, 8)
SPLIT_ABOVE = 512
"""The K at which a kernel begins to split is not measured: between the short probes and the long ones."""
BLOCKS = (256, 384, 512)
"""Block lengths of K in CPU libraries: MKL's sgemm has 384 at most."""
_BLOCK_K = 128
_MODEL_FIELDS = frozenset(field.name for field in fields(AccumulationModel))
_IN_FLOAT32: Mapping[str, Any] = {"adder": Adder.FLOAT32, "promote_k": None}

_SCALE_NAMES = {
    ScaleOrder.BEFORE_DOT: "scales before the dot, in float32",
    ScaleOrder.BEFORE_DOT_BFLOAT16: "scales before the dot, in bfloat16",
    ScaleOrder.EACH_PRODUCT: "scales on each product, in float32",
    ScaleOrder.AFTER_OUTPUT: "scales after the output type",
}
_BIAS_NAMES = {
    BiasRule.FUSED: "bias by FMA",
    BiasRule.BEFORE_SCALES: "bias before the scales",
    BiasRule.AFTER_OUTPUT: "bias after the output type",
    BiasRule.IGNORED: "bias ignored",
}
_MISREADING_NAMES = {
    Misreading.SCALES_SWAPPED: "scales swapped",
    Misreading.SCALES_INVERTED: "scales inverted",
    Misreading.SCALES_TRANSPOSED: "block scales transposed",
    Misreading.SCALES_FIRST_BLOCK: "first block's scales everywhere",
    Misreading.SCALES_IGNORED: "scales ignored",
    Misreading.SCALES_UNSIGNED: "sign of scales dropped",
    Misreading.OPERANDS_SWAPPED: "operands swapped",
    Misreading.OUTPUT_TRANSPOSED: "output transposed",
    Misreading.NAN_AS_NUMBER: "NaN codes as numbers",
}
_READ_AS = {Reading.E4M3: "E4M3", Reading.E5M2: "E5M2", Reading.OTHER: "the other's", Reading.FNUZ: "FNUZ"}


@cache
def alterations() -> tuple[Alteration, ...]:
    """All of them; the simpler of two that explain the same comes first."""
    return (*_chaining(), *_epilogue(), *_misreadings(), *_misplacements(), *_splits(), *_adding(), *_chips())


def from_there_on(starts: Mapping[Places, int]) -> Iterator[Alteration]:
    """What a kernel may do from a row or a column on, the first that was seen to be wrong."""
    for places, start in starts.items():
        taken = (
            *((Taken.NOWHERE, 0), (Taken.SHIFTED, start), (Taken.REPEATED, start)),
            *((Taken.ONE, 0), (Taken.ONE, start - 1), (Taken.SHIFTED, 1), (Taken.SHIFTED, -1)),
        )
        for of in (places, *((Places.SCALES_A,) if places is Places.ROWS else (Places.SCALES_B, Places.BIAS))):
            yield from (_misplaced(Misplaced(of=of, taken=one, size=size, start=start)) for one, size in taken)


def _row(name: str, sentence: str, **changed: Any) -> Alteration:
    """An alteration that changes fields of the rules, and of their model of accumulation."""
    return Alteration(name=name, sentence=sentence, change=partial(_changed, changed=changed))


def _rows(name: str, sentence: str, values: Sequence[Any], *takers: str, **changed: Any) -> Iterator[Alteration]:
    """One alteration a value, which its name and its sentence tell, and which is that of the fields `takers`."""
    for value in values:
        yield _row(name.format(value), sentence.format(value), **dict.fromkeys(takers, value), **changed)


def _changed(rules: Rules, *, changed: Mapping[str, Any]) -> Rules:
    """The rules with other fields, or the same where these have no meaning."""
    if rules.scales.is_fused and (changed.get("promote_k") or 0) >= _BLOCK_K:  # no more than a block of scales
        return rules
    # 1. Fields of the model, and those of the rules around it, as far as the adder has them.
    model = {name: value for name, value in changed.items() if name in _MODEL_FIELDS}
    others = {name: value for name, value in changed.items() if name not in _MODEL_FIELDS}
    if rules.adder is not Adder.TENSOR_CORE:  # steps, bits and their rounding are those of a tensor core
        model = {name: value for name, value in model.items() if name == "promote_k"}
        others = {name: value for name, value in others.items() if name not in ("terms", "sums")}
    if "result_fraction_bits" in model:  # a sum of a step is a float32 number
        model["result_fraction_bits"] = min(model["result_fraction_bits"], SUM_BITS[0])
    # 2. Misreadings add up; what stands in one place is the last that was said of it.
    if "misreads" in others:
        others["misreads"] |= rules.misreads
    if "misplaced" in others:
        places = {one.of for one in others["misplaced"]}
        kept = tuple(one for one in rules.misplaced if one.of not in places)
        others["misplaced"] = kept + others["misplaced"]
    return replace(rules, model=replace(rules.model, **model), **others)


def _chaining() -> Iterator[Alteration]:
    sentence = "keeps one chain of the tensor core over all of K [CHAIN-1]; use_fast_accum=False has no effect"
    yield _row("no promotion", sentence, promote_k=None)
    sentence = "adds the tensor core's accumulator to a float32 total every {} of K"
    yield from _rows("promotion every {}", sentence, PROMOTIONS, "promote_k")
    sentence = "adds every product in float32; no tensor core cuts bits"
    yield _row("float32 accumulation", sentence, **_IN_FLOAT32)
    sentence = "adds in float32, {} sums taking turns along K, which are added up pairwise at its end"
    yield from _rows("float32 accumulation in {} lanes", sentence, (2, 4, 8, 16, 32), "lanes", **_IN_FLOAT32)
    sentence = "adds in float32, and adds up the sums of every {} of K"
    yield from _rows("float32 accumulation in blocks of {}", sentence, BLOCKS, "promote_k", adder=Adder.FLOAT32)
    sentence = "adds all products exactly, or in a wider format than float32, and rounds once"
    yield _row("exact accumulation", sentence, promote_k=None, adder=Adder.EXACT)


def _splits() -> Iterator[Alteration]:
    sentence = "cuts K into {} slices, each from zero, and adds their float32 results [CHAIN-3]"
    yield from _rows("split-K {}", sentence, SPLITS, "split_k")
    sentence = f"cuts a K above {SPLIT_ABOVE} into {{}} slices, and adds their float32 results"
    yield from _rows("split-K {} of a long K", sentence, SPLITS, "split_k", split_above=SPLIT_ABOVE)


def _epilogue() -> Iterator[Alteration]:
    for order in ScaleOrder:
        name = _SCALE_NAMES.get(order, f"scales as {order.value}")
        sentence = f"multiplies the scales in another place: {order.value}"
        yield Alteration(name=name, sentence=sentence, change=partial(_scaled, order=order))
    yield _row("-0 kept", "keeps the -0 that the scales give; the hardware adds 0 to it [EPI-1]", adds_zero=False)
    yield _row("-0 lost", "turns the -0 that the scales give into +0; only tensorwise does so [EPI-1]", adds_zero=True)
    yield from (_row(name, f"adds the bias {rule.value}", bias=rule) for rule, name in _BIAS_NAMES.items())
    sentence = "cuts the result to the output type instead of rounding it"
    yield _row("output cut toward zero", sentence, output=Rounding.CUT)
    sentence = "cuts the result to bfloat16, the upper half of a float32; other types are rounded"
    yield _row("output cut toward zero in bfloat16", sentence, output=Rounding.CUT_BFLOAT16)
    yield _row("output ties away from zero", "rounds ties of the output away from zero", output=Rounding.NEAREST_AWAY)
    sentence = "rounds the result to {} before the output type"
    yield from _rows("output through {}", sentence, ("bfloat16", "float16"), "output_through")
    sentence = "gives the largest number of the output type where the hardware gives infinity"
    yield _row("output saturates", sentence, saturates=True)
    yield _row("subnormal operands flushed", "takes subnormal float8 codes for zero", flushes_operands=True)
    sentence = "turns float32 results below the smallest normal number into zero"
    yield _row("subnormal results flushed", sentence, flushes_results=True)


def _scaled(rules: Rules, *, order: ScaleOrder) -> Rules:
    """Scaled operands have no promotion of a tensor core unless asked for; a fused total belongs to block scales."""
    is_blockwise = rules.scales.is_fused
    if order.is_fused > is_blockwise or (is_blockwise and order in (ScaleOrder.AFTER_OUTPUT, ScaleOrder.EACH_PRODUCT)):
        return rules
    if order in (ScaleOrder.BEFORE_DOT, ScaleOrder.EACH_PRODUCT):
        rules = replace(rules, adder=Adder.FLOAT32)
    model = replace(rules.model, promote_k=None) if order.is_before_dot else rules.model
    return replace(rules, scales=order, model=model)


def _misreadings() -> Iterator[Alteration]:
    for misreading, name in _MISREADING_NAMES.items():
        sentence = f"takes its arguments for something else: {misreading.value}"
        yield _row(name, sentence, misreads=frozenset((misreading,)))
    for (reading, short), sides in product(_READ_AS.items(), ("a", "b", "a and b")):
        reads = tuple(reading if side in sides.split() else Reading.OWN for side in "ab")
        is_swap = reads == (Reading.OTHER, Reading.OTHER)
        sentence = f"takes the codes of {sides} for those of another format: {reading.value}"
        yield _row("formats swapped" if is_swap else f"codes of {sides} read as {short}", sentence, reads=reads)
    sentence = "rounds K down to a multiple of {}, and leaves out the products beyond"
    yield from _rows("tail of K beyond a multiple of {} dropped", sentence, (32, 64, 128, 256, 512), "k_multiple")
    yield from _rows("last {} of K dropped", "ends {} of K too early", (32, 64, 128), "k_less")


def _misplacements() -> Iterator[Alteration]:
    neighbours = [(taken, size) for size in (1, -1) for taken in (Taken.SHIFTED, Taken.ROLLED)]
    kept = (Taken.SWAPPED, Taken.REPEATED, Taken.FIRST_OF_TILE)
    tiles = [(taken, s * tile) for tile in (64, 128) for taken, s in (*neighbours, *((taken, 1) for taken in kept))]
    for of in (Places.SCALES_A, Places.SCALES_B):
        yield from (_misplaced(Misplaced(of=of, taken=taken, size=size)) for taken, size in (*neighbours, *tiles))
    for sides in ((Places.BLOCKS_A, Places.BLOCKS_B), (Places.BLOCKS_A,), (Places.BLOCKS_B,), (Places.BIAS,)):
        for taken, size in neighbours:
            yield _misplaced(*(Misplaced(of=of, taken=taken, size=size) for of in sides))


def _misplaced(*together: Misplaced) -> Alteration:
    words, of = " and ".join(one.words for one in together), together[0].of
    what = "writes outputs" if of.is_output else "takes biases" if of is Places.BIAS else "takes scales"
    return _row(words, f"{what} that belong elsewhere, or none: {words}", misplaced=together)


def _adding() -> Iterator[Alteration]:
    sentence = "adds {} products in one step of the tensor core [ACC-1]"
    yield from _rows("steps of {}", sentence, (4, 8, 16, 32, 64, 128), "step_k")
    sentence = "keeps {} fraction bits of the terms and sums of a step [ACC-3], [ACC-5]"
    yield from _rows("{} fraction bits", sentence, FRACTION_BITS, "aligned_fraction_bits", "result_fraction_bits")
    sentence = "aligns the terms of a step to {} fraction bits [ACC-3]"
    yield from _rows("terms of {} fraction bits", sentence, FRACTION_BITS, "aligned_fraction_bits")
    sentence = "keeps {} fraction bits of the sum of a step [ACC-5]"
    yield from _rows("sums of {} fraction bits", sentence, SUM_BITS, "result_fraction_bits")
    for what in (("sums",), ("terms",), ("terms", "sums")):
        name = f"{' and '.join(what)} rounded to nearest"
        sentence = f"has {name}, even on a tie, where the tensor core cuts [ACC-3], [ACC-5]"
        yield from _rows(name, sentence, (Rounding.NEAREST,), *what)


def _chips() -> Iterator[Alteration]:
    # What Triton does on Hopper with tiles that are too small for wgmma, and a kernel that converts by itself.
    turns = BLACKWELL_MMA.float8
    for place, order, model in (
        ("", ", pairs of K by turns [CHIP-2]", turns),
        (" in the order of K", " in the order of K", replace(turns, order=())),
    ):
        for length in (None, *PROMOTIONS):
            adds = replace(model, promote_k=length)
            chain = f"promotes every {length} of K" if length else "keeps one chain over all of K"
            chain += ", as mma.sync on Blackwell [CHIP-3]" * (adds == turns)
            yield Alteration(
                name=f"products of float16{place}, {f'promotion every {length}' if length else 'no promotion'}",
                sentence=f"converts float8 to float16, adds 16 products in a step [BF16-1]{order}, and {chain}",
                is_of_chip=True,
                change=partial(_whole_model, model=adds, is_instruction=True),
            )
    for chip, fast in product(CHIPS.values(), (True, False)):
        if chip is not H100:  # it adds as Hopper does
            yield Alteration(
                name=f"{chip.name}'s {'fast' if fast else 'promoted'} accumulation",
                sentence=f"adds as {chip.name} does with use_fast_accum={fast}",
                is_of_chip=True,
                change=partial(_whole_model, model=chip.float8_fast if fast else chip.float8, is_instruction=False),
            )


def _whole_model(rules: Rules, *, model: AccumulationModel, is_instruction: bool) -> Rules:
    """Another instruction, whose promotion is no longer than a block of scales; or a chip, without scales of blocks."""
    fits = not rules.scales.is_fused or (is_instruction and (model.promote_k or 0) < _BLOCK_K)
    if rules.adder is not Adder.TENSOR_CORE or not fits:
        return rules
    multiple = rules.model.split_k_multiple if is_instruction else model.split_k_multiple
    return replace(rules, model=replace(model, split_k_multiple=multiple))
