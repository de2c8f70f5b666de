"""The alterations that the suite knows: each a name, a sentence, and a function from rules to rules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
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

Change = Callable[[Rules], Rules]
"""Gives the same rules where it has no meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alteration:
    """One way in which a kernel may differ."""

    name: str
    sentence: str  # what such a kernel does; ends a sentence that begins with "it"
    change: Change
    is_of_chip: bool = False  # the whole accumulation of a chip, or of an instruction, which stands alone


PROMOTIONS = [32, 64, 128, 256, 512]
# 32 terms of 14 bits sum to at most 20 bits, so every width from 19 up is exact and equivalent.
SUM_BITS = [23, *range(12, 20)]
_SPLITS = [2, 3, 4, 8]
# The K at which a kernel begins to split is not measured: between the short probes and the long ones.
_SPLIT_ABOVE = 512
_LANES = [2, 4, 8, 16, 32]
# Block lengths of K in CPU libraries: MKL's sgemm has 384 at most.
_BLOCKS = [256, 384, 512]
_NARROW = ["bfloat16", "float16"]
_MULTIPLES = [32, 64, 128, 256, 512]
_BLOCK_K = 128
_FLOAT32, _EXACT = Adder.FLOAT32, Adder.EXACT
_IN_FLOAT32: Mapping[str, Any] = {"adder": _FLOAT32, "promote_k": None}
_OF_TERMS = {"aligned_fraction_bits": list(range(12, 26))}
_OF_SUMS = {"result_fraction_bits": list(range(12, 26))}
_MODEL_FIELDS = frozenset(field.name for field in fields(AccumulationModel))


def changing(**changed: Any) -> Change:
    """A change of fields of the rules, and of their model of accumulation; none where these have no meaning."""
    of_model = {name: value for name, value in changed.items() if name in _MODEL_FIELDS}
    of_rules = {name: value for name, value in changed.items() if name not in _MODEL_FIELDS}
    if "result_fraction_bits" in changed:  # a sum of a step is a float32 number
        of_model["result_fraction_bits"] = min(changed["result_fraction_bits"], SUM_BITS[0])

    def change(rules: Rules) -> Rules:
        if rules.scales.is_fused and (changed.get("promote_k") or 0) >= _BLOCK_K:  # no more than a block of scales
            return rules
        model, others = dict(of_model), dict(of_rules)
        # 1. Steps, bits and their rounding are those of a tensor core.
        if rules.adder is not Adder.TENSOR_CORE:
            model = {name: value for name, value in model.items() if name == "promote_k"}
            others = {name: value for name, value in others.items() if name not in ("terms", "sums")}
        # 2. Misreadings add up; what stands in one place is the last that was said of it.
        if "misreads" in others:
            others["misreads"] |= rules.misreads
        if "misplaced" in others:
            places = {one.of for one in others["misplaced"]}
            others["misplaced"] = (*(one for one in rules.misplaced if one.of not in places), *others["misplaced"])
        return replace(rules, model=replace(rules.model, **model), **others)

    return change


def _row(name: str, sentence: str, **changed: Any) -> Alteration:
    return Alteration(name=name, sentence=sentence, change=changing(**changed))


def _rows(name: str, sentence: str, **changed: Any) -> Iterator[Alteration]:
    """One alteration for each value of a list, which its name and sentence tell."""
    for value in next(values for values in changed.values() if isinstance(values, list)):
        fields = {field: value if isinstance(old, list) else old for field, old in changed.items()}
        yield _row(name.format(value), sentence.format(value), **fields)


def _scaled(rules: Rules, *, order: ScaleOrder) -> Rules:
    """Scaled operands have no promotion of a tensor core unless asked for; a fused total belongs to block scales."""
    is_blockwise = rules.scales.is_fused
    if order.is_fused > is_blockwise or (is_blockwise and order is ScaleOrder.AFTER_OUTPUT):
        return rules
    if order is ScaleOrder.BEFORE_DOT:
        rules = replace(rules, adder=Adder.FLOAT32)
    model = replace(rules.model, promote_k=None) if order.is_before_dot else rules.model
    return replace(rules, scales=order, model=model)


def _reading(side: str, reading: Reading) -> Alteration:
    reads = tuple(reading if one in side.split() else Reading.OWN for one in "ab")
    is_swap = reads == (Reading.OTHER, Reading.OTHER)
    name = "formats swapped" if is_swap else f"codes of {side} read as {reading.alteration}"
    return _row(name, f"takes the codes of {side} for those of another format: {reading.value}", reads=reads)


# Places


def _misplaced(taken: Sequence[tuple[Taken, int]], *places: Places, start: int = 0) -> Iterator[Alteration]:
    """One alteration each, of all these places together."""
    for one, size in taken:
        together = tuple(Misplaced(of=of, taken=one, size=size, start=start) for of in places)
        words = " and ".join(map(str, together))
        yield _row(words, f"has in the wrong place, or loses: {words}", misplaced=together)


def _misplacements() -> Iterator[Alteration]:
    neighbours = [(taken, size) for size in (1, -1) for taken in (Taken.SHIFTED, Taken.ROLLED)]
    of_tiles = (*neighbours, (Taken.SWAPPED, 1), (Taken.REPEATED, 1), (Taken.FIRST_OF_TILE, 1))
    tiles = [(taken, size * tile) for tile in (64, 128) for taken, size in of_tiles]
    yield from _misplaced([*neighbours, *tiles], Places.SCALES_A)
    yield from _misplaced([*neighbours, *tiles], Places.SCALES_B)
    for places in ((Places.BLOCKS_A, Places.BLOCKS_B), (Places.BLOCKS_A,), (Places.BLOCKS_B,), (Places.BIAS,)):
        yield from _misplaced(neighbours, *places)


def from_there_on(starts: Mapping[Places, int]) -> Iterator[Alteration]:
    """What a kernel may do from a row or a column on, the first that was seen to be wrong."""
    for places, start in starts.items():
        taken = (
            *((Taken.NOWHERE, 0), (Taken.SHIFTED, start), (Taken.REPEATED, start)),
            *((Taken.ONE, 0), (Taken.ONE, start - 1), (Taken.SHIFTED, 1), (Taken.SHIFTED, -1)),
        )
        for of in (places, *((Places.SCALES_A,) if places is Places.ROWS else (Places.SCALES_B, Places.BIAS))):
            yield from _misplaced(taken, of, start=start)


# Chips


def _chips() -> Iterator[Alteration]:
    # 1. What Triton does on Hopper with tiles that are too small for wgmma, and a kernel that converts by itself.
    turns = BLACKWELL_MMA.float8
    for place, model in ((", pairs of K by turns [CHIP-2]", turns), (" in the order of K", replace(turns, order=()))):
        for length in (None, *PROMOTIONS):
            adds = replace(model, promote_k=length)
            promotes = f"promotes every {length} of K" if length else "keeps one chain over all of K"
            promotes += ", as mma.sync on Blackwell [CHIP-3]" * (adds == turns)
            where = "" if model is turns else place
            yield Alteration(
                name=f"products of float16{where}, {f'promotion every {length}' if length else 'no promotion'}",
                sentence=f"converts float8 to float16, adds 16 products in a step [BF16-1]{place}, and {promotes}",
                is_of_chip=True,
                change=partial(_of_instruction, model=adds),
            )
    # 2. Other chips; an H100 adds as Hopper does.
    for chip, fast in product((chip for chip in CHIPS.values() if chip is not H100), (True, False)):
        yield Alteration(
            name=f"{chip.name}'s {'fast' if fast else 'promoted'} accumulation",
            sentence=f"adds as {chip.name} does with use_fast_accum={fast}",
            is_of_chip=True,
            change=partial(_of_chip, model=chip.float8_fast if fast else chip.float8),
        )


def _of_instruction(rules: Rules, *, model: AccumulationModel) -> Rules:
    """A promotion is no longer than a block of scales."""
    fits = not rules.scales.is_fused or (model.promote_k or 0) < _BLOCK_K
    model = replace(model, split_k_multiple=rules.model.split_k_multiple)
    return replace(rules, model=model) if fits and rules.adder is Adder.TENSOR_CORE else rules


def _of_chip(rules: Rules, *, model: AccumulationModel) -> Rules:
    """Without scales of blocks."""
    fits = not rules.scales.is_fused and rules.adder is Adder.TENSOR_CORE
    return replace(rules, model=model) if fits else rules


# All of them

ALTERATIONS: tuple[Alteration, ...] = (
    # 1. Chains along K.
    _row("no promotion", "keeps one chain over all of K [CHAIN-1], whatever use_fast_accum is", promote_k=None),
    *_rows("promotion every {}", "adds its accumulator to a float32 total every {} of K", promote_k=PROMOTIONS),
    _row("float32 accumulation", "adds every product in float32; no tensor core cuts bits", **_IN_FLOAT32),
    *_rows("float32 accumulation in {} lanes", "adds in {} float32 sums by turns", **_IN_FLOAT32, lanes=_LANES),
    *_rows("float32 accumulation in blocks of {}", "adds every {} of K in float32", adder=_FLOAT32, promote_k=_BLOCKS),
    _row("exact accumulation", "adds in a wider format than float32, and rounds once", adder=_EXACT, promote_k=None),
    # 2. Scales, bias, output.
    *(
        Alteration(
            name=order.alteration or f"scales as {order.value}",
            sentence=f"multiplies the scales in another place: {order.value}",
            change=partial(_scaled, order=order),
        )
        for order in ScaleOrder
    ),
    _row("-0 kept", "keeps the -0 that the scales give; the hardware adds 0 to it [EPI-1]", adds_zero=False),
    _row("-0 lost", "turns the -0 that the scales give into +0; only tensorwise does so [EPI-1]", adds_zero=True),
    *(_row(rule.alteration, f"adds the bias {rule.value}", bias=rule) for rule in BiasRule if rule.alteration),
    _row("output cut toward zero", "cuts the result to the output type, and does not round it", output=Rounding.CUT),
    _row("output cut toward zero in bfloat16", "cuts bfloat16 results, rounds others", output=Rounding.CUT_BFLOAT16),
    _row("output ties away from zero", "rounds ties of the output away from zero", output=Rounding.NEAREST_AWAY),
    *_rows("output through {}", "rounds the result to {} before the output type", output_through=_NARROW),
    _row("output saturates", "gives the largest number of the output type for infinity", saturates=True),
    _row("subnormal operands flushed", "takes subnormal float8 codes for zero", flushes_operands=True),
    _row("subnormal results flushed", "turns subnormal float32 results into zero", flushes_results=True),
    # 3. Arguments.
    *(
        _row(wrong.alteration, f"takes its arguments for something else: {wrong.value}", misreads=frozenset((wrong,)))
        for wrong in Misreading
    ),
    *(_reading(side, reading) for reading in Reading if reading.alteration for side in ("a", "b", "a and b")),
    *_rows("tail of K beyond a multiple of {} dropped", "rounds K down to a multiple of {}", k_multiple=_MULTIPLES),
    *_rows("last {} of K dropped", "ends {} of K too early", k_less=[32, 64, 128]),
    *_misplacements(),
    # 4. Slices of K, and steps of the tensor core.
    *_rows("split-K {}", "cuts K into {} slices and adds their float32 results [CHAIN-3]", split_k=_SPLITS),
    *_rows("split-K {} of a long K", "cuts a K above 512 into {} slices", split_k=_SPLITS, split_above=_SPLIT_ABOVE),
    *_rows("steps of {}", "adds {} products in one step of the tensor core [ACC-1]", step_k=[4, 8, 16, 32, 64, 128]),
    *_rows(
        "{} fraction bits", "keeps {} fraction bits of all terms and sums [ACC-3], [ACC-5]", **_OF_TERMS, **_OF_SUMS
    ),
    *_rows("terms of {} fraction bits", "aligns the terms of a step to {} fraction bits [ACC-3]", **_OF_TERMS),
    *_rows("sums of {} fraction bits", "keeps {} fraction bits of the sum of a step", result_fraction_bits=SUM_BITS),
    *(
        _row(
            f"{' and '.join(what)} rounded to nearest",
            f"rounds the {' and '.join(what)} of a step, where the tensor core cuts them [ACC-3], [ACC-5]",
            **dict.fromkeys(what, Rounding.NEAREST),
        )
        for what in (("sums",), ("terms",), ("terms", "sums"))
    ),
    *_chips(),
)
"""All of them; the simpler of two that explain the same comes first."""
