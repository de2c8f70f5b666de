"""The alterations that the suite knows: each a name, a sentence, and a function from rules to rules."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
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
    """All of the accumulation of a chip, or of an instruction: no other alteration of the adding has an effect."""


PROMOTIONS = (32, 64, 128, 256, 512)
STEPS = (4, 8, 16, 32, 64, 128)
FRACTION_BITS = tuple(range(12, 26))
SUM_BITS = (23, *range(12, 20))
"""A sum of 32 terms of 14 bits has no more than 20: from 19 on the step is exact, and all of these are one."""
SPLITS = (2, 3, 4, 8)
SPLIT_ABOVE = 512
"""Where a kernel begins to split is not measured: between the short probes and the long ones."""
BLOCKS = (256, 384, 512)
"""Block lengths of K in CPU libraries: MKL's sgemm has 384 at most."""
TAILS = (32, 64, 128, 256, 512)
LAST = (32, 64, 128)
TILES = (64, 128)
_FLOAT32_BITS = 23
_BLOCK_K = 128


@cache
def alterations() -> tuple[Alteration, ...]:
    """All of them; the simpler of two that explain the same comes first."""
    return (*_chaining(), *_epilogue(), *_misreadings(), *_misplacements(), *_splits(), *_adding())


def from_there_on(starts: Mapping[Places, int]) -> Iterator[Alteration]:
    """What a kernel may do from a row or a column on, the first that was seen to be wrong."""
    for places, start in starts.items():
        taken = (
            *((Taken.NOWHERE, 0), (Taken.SHIFTED, start), (Taken.REPEATED, start)),
            *((Taken.ONE, 0), (Taken.ONE, start - 1), (Taken.SHIFTED, 1), (Taken.SHIFTED, -1)),
        )
        for of in (places, *((Places.SCALES_A,) if places is Places.ROWS else (Places.SCALES_B, Places.BIAS))):
            yield from (_misplaced(Misplaced(of=of, taken=one, size=size, start=start)) for one, size in taken)


def _row(name: str, sentence: str, *, model: Mapping[str, int | None] | None = None, **changed: Any) -> Alteration:
    """An alteration that changes fields of the rules, and of their model of accumulation."""

    def change(rules: Rules) -> Rules:
        is_tensor_core = rules.adder is Adder.TENSOR_CORE
        rules = replace(rules, **{k: v for k, v in changed.items() if is_tensor_core or k not in ("terms", "sums")})
        return rules if model is None else _model(rules, **model)

    return Alteration(name=name, sentence=sentence, change=change)


def _model(rules: Rules, **numbers: int | None) -> Rules:
    """Other numbers of the accumulation; steps and bits have no meaning for other adders."""
    if rules.adder is not Adder.TENSOR_CORE:
        numbers = {name: value for name, value in numbers.items() if name == "promote_k"}
    return replace(rules, model=replace(rules.model, **numbers))


def _chaining() -> Iterator[Alteration]:
    one_chain = {"promote_k": None}
    yield _row(
        "no promotion",
        "keeps one chain of the tensor core over all of K [CHAIN-1]; use_fast_accum=False has no effect",
        model=one_chain,
    )
    for length in PROMOTIONS:
        sentence = f"adds the tensor core's accumulator to a float32 total every {length} of K"
        yield _row(f"promotion every {length}", sentence, model={"promote_k": length})
    sentence = "adds every product in float32; no tensor core cuts bits"
    yield _row("float32 accumulation", sentence, model=one_chain, adder=Adder.FLOAT32)
    for lanes in (2, 4, 8, 16, 32):
        sentence = f"adds in float32, {lanes} sums taking turns along K, which are added up pairwise at its end"
        name = f"float32 accumulation in {lanes} lanes"
        yield _row(name, sentence, model=one_chain, adder=Adder.FLOAT32, lanes=lanes)
    for length in BLOCKS:
        yield Alteration(
            name=f"float32 accumulation in blocks of {length}",
            sentence=f"adds in float32, and adds up the sums of every {length} of K",
            change=lambda rules, length=length: (
                rules if rules.scales.is_fused else _model(replace(rules, adder=Adder.FLOAT32), promote_k=length)
            ),
        )
    sentence = "adds all products exactly, or in a wider format than float32, and rounds once"
    yield _row("exact accumulation", sentence, model=one_chain, adder=Adder.EXACT)


def _splits() -> Iterator[Alteration]:
    for slices in SPLITS:
        sentence = f"cuts K into {slices} slices, each from zero, and adds their float32 results [CHAIN-3]"
        yield _row(f"split-K {slices}", sentence, split_k=slices)
    for slices in SPLITS:
        sentence = f"cuts a K above {SPLIT_ABOVE} into {slices} slices, and adds their float32 results"
        yield _row(f"split-K {slices} of a long K", sentence, split_k=slices, split_above=SPLIT_ABOVE)


def _epilogue() -> Iterator[Alteration]:
    for order in ScaleOrder:
        if order is ScaleOrder.NONE:
            continue
        adder = {"adder": Adder.FLOAT32} if order in (ScaleOrder.BEFORE_DOT, ScaleOrder.EACH_PRODUCT) else {}
        yield Alteration(
            name=_SCALE_NAMES.get(order, f"scales as {order.value}"),
            sentence=f"multiplies the scales in another place: {order.value}",
            change=lambda rules, order=order, adder=adder: _scaled(replace(rules, scales=order, **adder), rules),
        )
    yield _row("-0 kept", "keeps the -0 that the scales give; the hardware adds 0 to it [EPI-1]", adds_zero=False)
    yield _row("-0 lost", "turns the -0 that the scales give into +0; only tensorwise does so [EPI-1]", adds_zero=True)
    for rule, name in _BIAS_NAMES.items():
        yield _row(name, f"adds the bias {rule.value}", bias=rule)
    yield _row(
        "output cut toward zero", "cuts the result to the output type instead of rounding it", output=Rounding.CUT
    )
    yield _row(
        "output cut toward zero in bfloat16",
        "cuts the result to bfloat16, the upper half of a float32; other types are rounded",
        output=Rounding.CUT_BFLOAT16,
    )
    yield _row("output ties away from zero", "rounds ties of the output away from zero", output=Rounding.NEAREST_AWAY)
    for fmt in ("bfloat16", "float16"):
        yield _row(f"output through {fmt}", f"rounds the result to {fmt} before the output type", output_through=fmt)
    sentence = "gives the largest number of the output type where the hardware gives infinity"
    yield _row("output saturates", sentence, saturates=True)
    yield _row("subnormal operands flushed", "takes subnormal float8 codes for zero", flushes_operands=True)
    sentence = "turns float32 results below the smallest normal number into zero"
    yield _row("subnormal results flushed", sentence, flushes_results=True)


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


def _scaled(altered: Rules, rules: Rules) -> Rules:
    """Scaled operands have no promotion of a tensor core unless asked for; a fused total belongs to block scales."""
    is_blockwise = rules.scales.is_fused
    if altered.scales in (ScaleOrder.AFTER_OUTPUT, ScaleOrder.EACH_PRODUCT) and is_blockwise:
        return rules
    if altered.scales.is_before_dot:
        return replace(altered, model=replace(altered.model, promote_k=None))
    return altered if altered.scales.is_fused <= is_blockwise else rules


def _misreadings() -> Iterator[Alteration]:
    for misreading, name in _MISREADING_NAMES.items():
        yield Alteration(
            name=name,
            sentence=f"takes its arguments for something else: {misreading.value}",
            change=lambda rules, misreading=misreading: replace(rules, misreads=rules.misreads | {misreading}),
        )
    for (reading, short), sides in product(_READ_AS.items(), ("a", "b", "a and b")):
        reads = tuple(reading if side in sides.split() else Reading.OWN for side in "ab")
        is_swap = reads == (Reading.OTHER, Reading.OTHER)
        sentence = f"takes the codes of {sides} for those of another format: {reading.value}"
        yield _row("formats swapped" if is_swap else f"codes of {sides} read as {short}", sentence, reads=reads)
    for multiple in TAILS:
        sentence = f"rounds K down to a multiple of {multiple}, and leaves out the products beyond"
        yield _row(f"tail of K beyond a multiple of {multiple} dropped", sentence, k_multiple=multiple)
    for less in LAST:
        yield _row(f"last {less} of K dropped", f"ends {less} of K too early", k_less=less)


def _misplacements() -> Iterator[Alteration]:
    neighbours = [(taken, size) for size in (1, -1) for taken in (Taken.SHIFTED, Taken.ROLLED)]
    kept = (Taken.SWAPPED, Taken.REPEATED, Taken.FIRST_OF_TILE)
    tiles = [(taken, s * tile) for tile in TILES for taken, s in (*neighbours, *((taken, 1) for taken in kept))]
    for of in (Places.SCALES_A, Places.SCALES_B):
        yield from (_misplaced(Misplaced(of=of, taken=taken, size=size)) for taken, size in (*neighbours, *tiles))
    for sides in ((Places.BLOCKS_A, Places.BLOCKS_B), (Places.BLOCKS_A,), (Places.BLOCKS_B,), (Places.BIAS,)):
        for taken, size in neighbours:
            yield _misplaced(*(Misplaced(of=of, taken=taken, size=size) for of in sides))


def _misplaced(*together: Misplaced) -> Alteration:
    words = " and ".join(one.words for one in together)
    of = {one.of for one in together}
    what = "writes outputs" if together[0].of.is_output else "takes biases" if Places.BIAS in of else "takes scales"
    return Alteration(
        name=words,
        sentence=f"{what} that belong elsewhere, or none: {words}",
        change=lambda rules: replace(
            rules, misplaced=(*(other for other in rules.misplaced if other.of not in of), *together)
        ),
    )


def _adding() -> Iterator[Alteration]:
    for size in STEPS:
        sentence = f"adds {size} products in one step of the tensor core [ACC-1]"
        yield _row(f"steps of {size}", sentence, model={"step_k": size})
    for bits in FRACTION_BITS:
        yield _row(
            f"{bits} fraction bits",
            f"keeps {bits} fraction bits of the terms and sums of a step [ACC-3], [ACC-5]",
            model={"aligned_fraction_bits": bits, "result_fraction_bits": min(bits, _FLOAT32_BITS)},
        )
    for bits in FRACTION_BITS:
        sentence = f"aligns the terms of a step to {bits} fraction bits [ACC-3]"
        yield _row(f"terms of {bits} fraction bits", sentence, model={"aligned_fraction_bits": bits})
    for bits in SUM_BITS:
        sentence = f"keeps {bits} fraction bits of the sum of a step [ACC-5]"
        yield _row(f"sums of {bits} fraction bits", sentence, model={"result_fraction_bits": bits})
    for what in (("sums",), ("terms",), ("terms", "sums")):
        name = f"{' and '.join(what)} rounded to nearest"
        sentence = f"has {name}, even on a tie, where the tensor core cuts [ACC-3], [ACC-5]"
        rounded: dict[str, Any] = dict.fromkeys(what, Rounding.NEAREST)
        yield _row(name, sentence, **rounded)
    yield from _adding_as_float16()
    for chip in CHIPS.values():
        for fast in () if chip is H100 else (True, False):  # it adds as Hopper does
            yield Alteration(
                name=f"{chip.name}'s {'fast' if fast else 'promoted'} accumulation",
                sentence=f"adds as {chip.name} does with use_fast_accum={fast}",
                is_of_chip=True,
                change=lambda rules, chip=chip, fast=fast: (
                    replace(rules, model=chip.float8_fast if fast else chip.float8)
                    if rules.adder is Adder.TENSOR_CORE and not rules.scales.is_fused
                    else rules
                ),
            )


def _adding_as_float16() -> Iterator[Alteration]:
    """What Triton does on Hopper with tiles that are too small for wgmma, and a kernel that converts by itself."""
    by_turns = BLACKWELL_MMA.float8
    for place, order, model in (
        ("", ", pairs of K by turns [CHIP-2]", by_turns),
        (" in the order of K", " in the order of K", replace(by_turns, order=())),
    ):
        for length in (None, *PROMOTIONS):
            adds = replace(model, promote_k=length)
            chain = f"promotes every {length} of K" if length else "keeps one chain over all of K"
            chain += ", as mma.sync on Blackwell [CHIP-3]" * (adds == by_turns)
            yield Alteration(
                name=f"products of float16{place}, {f'promotion every {length}' if length else 'no promotion'}",
                sentence=f"converts float8 to float16, adds 16 products in a step [BF16-1]{order}, and {chain}",
                is_of_chip=True,
                change=lambda rules, adds=adds: _float16(rules, adds),
            )


def _float16(rules: Rules, model: AccumulationModel) -> Rules:
    """Another instruction; a block of scales is no longer than 128, so that longer promotions have no meaning there."""
    is_longer = rules.scales.is_fused and (model.promote_k or 0) >= _BLOCK_K
    if rules.adder is not Adder.TENSOR_CORE or is_longer:
        return rules
    return replace(rules, model=replace(model, split_k_multiple=rules.model.split_k_multiple))
