"""The alterations that the suite knows: each a name, a sentence, and a function from rules to rules."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

from f8emu.conformance.cases.gemm import Mode
from f8emu.conformance.diagnosis.groups import GROUP_RULES
from f8emu.conformance.diagnosis.places import Misplaced, Places, Taken
from f8emu.conformance.diagnosis.rules import (
    MODEL_PARTS,
    Adder,
    BiasRule,
    EqualScales,
    Grid,
    Misreading,
    Reading,
    Rounding,
    Rules,
    ScaleOrder,
    ScaleSign,
    ScaleValue,
)
from f8emu.spec import BLACKWELL_MMA, CHIPS, H100, AccumulationModel
from f8emu.spec.scaling import BLOCK

Change = Callable[[Rules], Rules]
"""Gives the same rules where it has no meaning."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alteration:
    """One way in which a kernel may differ."""

    name: str
    sentence: str  # what such a kernel does, in few words that follow "it"
    change: Change
    detail: str = ""  # the formula, and the rule's number
    is_of_chip: bool = False  # the whole accumulation of a chip, or of an instruction, which stands alone


@cache
def claims(alteration: Alteration, right: Rules) -> Mapping[str, Any]:
    """The parts of the rules that an alteration alters, and their values: no other one may say something else of them.

    Who does not add as a tensor core does has none of its steps; a chip's accumulation is one whole.
    """
    before, after = right.parts(), alteration.change(right).parts()
    altered = {part: value for part, value in after.items() if value != before[part]}
    if altered.keys() & {"adder", "scales"} and after["promote_k"] is None:  # asked for or not, one may be added
        altered.pop("promote_k", None)
    is_other = "adder" in altered or after["scales"] is ScaleOrder.BEFORE_DOT_BFLOAT16
    whole = MODEL_PARTS if alteration.is_of_chip and altered else _STEP_PARTS if is_other else ()
    return altered | {part: after[part] for part in whole}


def rule_of_mxfp8(parts: Iterable[str]) -> str:
    """The id of the rule of MXFP8 that an alteration of these parts breaks; empty where another rule is."""
    for words, rule in ((("scale", "SCALES", "BLOCKS", "grids"), "MX-2"), (("adder", "split_k", "promote_k"), "MX-4")):
        if any(word in part for part in parts for word in words):
            return rule
    return ""


PROMOTIONS = [32, 64, 128, 256, 512]
# 32 terms of 14 bits sum to at most 20 bits, so every width from 19 up is exact and equivalent.
SUM_BITS = [23, *range(12, 20)]
_SPLITS = [2, 3, 4, 8]
# The K at which a kernel begins to split is not measured: between the short probes and the long ones.
_SPLIT_ABOVE = 512
_LANES = [2, 4, 8, 16, 32]
# Tiles of K in a kernel, and in CPU libraries: MKL's sgemm has 384 at most.
_BLOCKS = [32, 64, 128, 256, 384, 512]
_NARROW = ["bfloat16", "float16"]
_MULTIPLES = [32, 64, 128, 256, 512]
_FLOAT32, _EXACT = Adder.FLOAT32, Adder.EXACT
_IN_FLOAT32: Mapping[str, Any] = {"adder": _FLOAT32, "promote_k": None}
_IN_FLOAT64: Mapping[str, Any] = {"adder": _EXACT, "promote_k": None}
_OF_TERMS = {"aligned_fraction_bits": list(range(12, 26))}
_OF_SUMS = {"result_fraction_bits": list(range(12, 26))}
# Fields that have a meaning in one mode alone.
_MODES = {
    "equal_scales": (Mode.ROWWISE,),
    "groups": (Mode.GROUPED_ROWWISE, Mode.GROUPED_MX),
    "scale_signs": tuple(mode for mode in Mode if not mode.is_microscaled),
}
_STEP_PARTS = (MODEL_PARTS - {"promote_k", "split_k_multiple"}) | {"terms", "sums"}


def changing(**changed: Any) -> Change:
    """A change of fields of the rules, and of their model of accumulation; none where these have no meaning."""
    of_model = {name: value for name, value in changed.items() if name in MODEL_PARTS}
    of_rules = {name: value for name, value in changed.items() if name not in MODEL_PARTS}
    if "result_fraction_bits" in changed:  # a sum of a step is a float32 number
        of_model["result_fraction_bits"] = min(changed["result_fraction_bits"], SUM_BITS[0])

    def change(rules: Rules) -> Rules:
        # 1. What has a meaning for this GEMM. A block of scales is promoted as a whole.
        is_whole_block = rules.mode is Mode.BLOCKWISE and (changed.get("promote_k") or 0) >= BLOCK
        if is_whole_block or any(rules.mode not in _MODES.get(name, (rules.mode,)) for name in changed):
            return rules
        model, others = dict(of_model), dict(of_rules)
        # 2. Steps, bits and their rounding are those of a tensor core.
        if rules.adder is not Adder.TENSOR_CORE:
            model = {name: value for name, value in model.items() if name == "promote_k"}
            others = {name: value for name, value in others.items() if name not in ("terms", "sums")}
        # 3. Misreadings add up; what stands in one place is the last that was said of it.
        if "misreads" in others:
            others["misreads"] |= rules.misreads
        if "misplaced" in others:
            places = {place.of for place in others["misplaced"]}
            kept = (place for place in rules.misplaced if place.of not in places)
            others["misplaced"] = (*kept, *others["misplaced"])
        return replace(rules, model=replace(rules.model, **model) if model else rules.model, **others)

    return change


def _row(name: str, sentence: str, detail: str = "", **changed: Any) -> Alteration:
    return Alteration(name=name, sentence=sentence, detail=detail, change=changing(**changed))


def _rows(name: str, sentence: str, detail: str = "", **changed: Any) -> Iterator[Alteration]:
    """One alteration for each value of a list, which its name and sentence tell."""
    for value in next(values for values in changed.values() if isinstance(values, list)):
        fields = {field: value if isinstance(old, list) else old for field, old in changed.items()}
        yield _row(*(text.format(value) for text in (name, sentence, detail)), **fields)


def _reading(side: str, reading: Reading) -> Alteration:
    reads = tuple(reading if operand in side.split() else Reading.OWN for operand in "ab")
    is_swap = reads == (Reading.OTHER, Reading.OTHER)
    name = "formats swapped" if is_swap else f"codes of {side} read as {reading.alteration}"
    return _row(name, f"decodes {side} as {reading.value}", reads=reads)


# Places


def _misplaced(taken: Sequence[tuple[Taken, int]], *places: Places, start: int = 0) -> Iterator[Alteration]:
    """One alteration each, of all these places together."""
    for rule, size in taken:
        together = tuple(Misplaced(of=of, taken=rule, size=size, start=start) for of in places)
        sentence = " and ".join(place.sentence for place in together)
        yield _row(" and ".join(map(str, together)), sentence, misplaced=together)


def _misplacements() -> Iterator[Alteration]:
    neighbours = [(taken, size) for size in (1, -1) for taken in (Taken.SHIFTED, Taken.ROLLED)]
    of_tiles = (*neighbours, (Taken.SWAPPED, 1), (Taken.REPEATED, 1), (Taken.FIRST_OF_TILE, 1))
    tiles = [(taken, size * tile) for tile in (64, 128) for taken, size in of_tiles]
    # Neighbours of a fragment of the tensor core: a thread has columns n and n + 1, rows m and m + 8.
    lanes = [(Taken.SWAPPED, size) for size in (1, 8)]
    yield from _misplaced([*neighbours, *lanes, *tiles], Places.SCALES_A)
    yield from _misplaced([*neighbours, *lanes, *tiles], Places.SCALES_B)
    for places in ((Places.BLOCKS_A, Places.BLOCKS_B), (Places.BLOCKS_A,), (Places.BLOCKS_B,)):
        yield from _misplaced(neighbours, *places)
    yield from _misplaced([*neighbours, *lanes], Places.BIAS)
    yield from _misplaced(lanes, Places.ROWS)
    yield from _misplaced(lanes, Places.COLUMNS)


def from_there_on(starts: Mapping[Places, int]) -> Iterator[Alteration]:
    """Alterations from a row or a column on, the first that was seen to be wrong."""
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
        where = "" if model is turns else place
        for length in (None, *PROMOTIONS):
            adds = replace(model, promote_k=length)
            promotes = f"promotes every {length} of K" if length else "never promotes"
            yield Alteration(
                name=f"products of float16{where}, {f'promotion every {length}' if length else 'no promotion'}",
                sentence=f"converts float8 to float16, adds 16 products a step{place}, and {promotes}",
                detail="as mma.sync on Blackwell [CHIP-3]" if adds == turns else "steps of 16 [BF16-1]",
                is_of_chip=True,
                change=partial(_of_chip, model=adds),
            )
    # 2. Other chips; an H100 adds as Hopper does.
    for chip, fast in product((chip for chip in CHIPS.values() if chip is not H100), (True, False)):
        yield Alteration(
            name=f"{chip.name}'s {'fast' if fast else 'promoted'} accumulation",
            sentence=f"adds as {chip.name} does with use_fast_accum={fast}",
            is_of_chip=True,
            change=partial(_of_chip, model=chip.float8_fast if fast else chip.float8),
        )


def _of_chip(rules: Rules, *, model: AccumulationModel) -> Rules:
    """A promotion is shorter than a block of scales."""
    fits = rules.mode is not Mode.BLOCKWISE or (model.promote_k or 0) < BLOCK
    model = replace(model, split_k_multiple=rules.model.split_k_multiple)
    return replace(rules, model=model) if fits and rules.adder is Adder.TENSOR_CORE else rules


# Scales, groups


def _scaled(rules: Rules, *, order: ScaleOrder) -> Rules:
    """Scaled operands have no promotion of a tensor core unless asked for; a fused total belongs to block scales."""
    if rules.mode.is_microscaled != (order is ScaleOrder.AFTER_BLOCK) and not order.is_before_dot:
        return rules
    is_blockwise = rules.mode is Mode.BLOCKWISE
    if order.is_fused > is_blockwise or (is_blockwise and order is ScaleOrder.AFTER_OUTPUT):
        return rules
    if order is ScaleOrder.BEFORE_DOT:
        rules = replace(rules, adder=Adder.FLOAT32)
    model = replace(rules.model, promote_k=None) if order.is_before_dot else rules.model
    return replace(rules, scales=order, model=model)


def _of_mxfp8(*alterations: Alteration) -> Iterator[Alteration]:
    """The same, of E8M0 scales alone."""

    def change(rules: Rules, of: Change) -> Rules:
        return of(rules) if rules.mode.is_microscaled else rules

    for alteration in alterations:
        yield replace(alteration, change=partial(change, of=alteration.change))


def _scale_orders() -> Iterator[Alteration]:
    for order, sentence in _ORDERS.items():
        yield Alteration(
            name=order.alteration or f"scales as {order.value}",
            sentence=sentence,
            detail=order.value,
            change=partial(_scaled, order=order),
        )


def _of_one_or_both(field: str, choices: Sequence[ScaleValue | ScaleSign | Grid]) -> Iterator[Alteration]:
    """For each the alteration of both scales, and those of one."""
    for choice, sides in product(choices, ("ab", "a", "b")):
        scales = "scales" if sides == "ab" else f"scale_{sides}"
        pair = tuple(choice if side in sides else type(choice).OWN for side in "ab")
        changed: dict[str, Any] = {field: pair}
        yield _row(
            choice.alteration.format(scales),
            choice.value.format(scales),
            choice.of_mxfp8 and f"[{choice.of_mxfp8}]",
            **changed,
        )


# All of them

_NOT_IN_STEPS = "instead of the tensor core's cut steps"
_BITS = "Hopper has 13 of a term and of a sum, MXFP8 25 and 23"
_ORDERS = {
    ScaleOrder.PRODUCT: "multiplies by the rounded product of both scales",
    ScaleOrder.COLUMN_FIRST: "multiplies scale_b before scale_a",
    ScaleOrder.ROW_FIRST: "multiplies scale_a before scale_b",
    ScaleOrder.FMA_PRODUCT: "adds each block by FMA with the product of both scales",
    ScaleOrder.FMA_ROW_FIRST: "multiplies a block by scale_a, and adds it by FMA with scale_b",
    ScaleOrder.FMA_COLUMN_FIRST: "multiplies a block by scale_b, and adds it by FMA with scale_a",
    ScaleOrder.BEFORE_DOT: "scales the operands before the dot, in float32",
    ScaleOrder.BEFORE_DOT_BFLOAT16: "scales the operands before the dot, in bfloat16",
    ScaleOrder.AFTER_OUTPUT: "rounds to the output type before it scales",
    ScaleOrder.AFTER_BLOCK: "scales the float32 sum of each block of 32",
}
ALTERATIONS: tuple[Alteration, ...] = (
    # 1. Chains along K.
    _row("no promotion", "never promotes its accumulator", "one chain over all of K [CHAIN-1]", promote_k=None),
    *_rows("promotion every {}", "promotes its accumulator to float32 every {} of K", promote_k=PROMOTIONS),
    _row("float32 accumulation", f"accumulates in float32 {_NOT_IN_STEPS}", "one product at a time", **_IN_FLOAT32),
    *_rows(
        "float32 accumulation in {} lanes",
        f"accumulates in float32 {_NOT_IN_STEPS}",
        "{} interleaved partial sums",
        **_IN_FLOAT32,
        lanes=_LANES,
    ),
    # numpy with OpenBLAS adds so on a CPU with AVX2; with AVX-512 in 16 lanes.
    _row(
        "float32 accumulation of OpenBLAS",
        f"accumulates in float32 {_NOT_IN_STEPS}",
        "1 or 2 partial sums, as the row has it, and blocks of 320 of K",
        **_IN_FLOAT32,
        lanes_of_rows=(1, 2),
        goto_k=320,
    ),
    *_rows(
        "float32 accumulation in blocks of {}",
        f"accumulates in float32 {_NOT_IN_STEPS}",
        "a partial sum every {} of K",
        adder=_FLOAT32,
        promote_k=_BLOCKS,
    ),
    _row("exact accumulation", "accumulates in float64, and rounds to float32 before it scales", **_IN_FLOAT64),
    _row("float64 throughout", "computes in float64 up to the output type", adder=Adder.FLOAT64, promote_k=None),
    _row(
        "float64 throughout, output through float32",
        "computes in float64, then rounds to float32 and to the output type",
        adder=Adder.FLOAT64,
        promote_k=None,
        output_through="float32",
    ),
    # 2. Scales, bias, output.
    *_scale_orders(),
    *(_row(equal.alteration, equal.value, equal_scales=equal) for equal in EqualScales if equal.alteration),
    *_of_one_or_both("scale_values", [choice for choice in ScaleValue if choice.alteration]),
    *_of_one_or_both("scale_signs", [choice for choice in ScaleSign if choice.alteration]),
    *_of_one_or_both("grids", [choice for choice in Grid if choice.alteration and not choice.of_mxfp8]),
    *_of_mxfp8(
        *_of_one_or_both("grids", [choice for choice in Grid if choice.of_mxfp8]),
        *(_row(x.alteration, x.value, f"[{x.of_mxfp8}]", misreads=frozenset((x,))) for x in Misreading if x.of_mxfp8),
        _row("zeros without an exponent", "leaves zeros out of the largest exponent", "[MX-3]", zero_exponent=None),
    ),
    _row("-0 kept", "keeps -0", "the tensorwise epilogue adds 0 to it [EPI-1]", adds_zero=False),
    _row("-0 lost", "turns -0 into +0", "the tensorwise epilogue alone does so [EPI-1]", adds_zero=True),
    *(_row(rule.alteration, rule.value, bias=rule) for rule in BiasRule if rule.alteration),
    _row("output cut toward zero", "truncates the result to the output type", output=Rounding.CUT),
    _row("output cut toward zero in bfloat16", "truncates results to bfloat16", output=Rounding.CUT_BFLOAT16),
    _row("output ties away from zero", "rounds ties of the output away from zero", output=Rounding.NEAREST_AWAY),
    *_rows("output through {}", "rounds the result to {} before the output type", output_through=_NARROW),
    _row("output saturates", "gives the largest number of the output type for infinity", saturates=True),
    _row("subnormal operands flushed", "takes subnormal float8 codes for zero", flushes_operands=True),
    _row("subnormal results flushed", "flushes subnormal float32 results to zero", flushes_results=True),
    # 3. Arguments.
    *(_row(wrong.alteration, wrong.value, misreads=frozenset((wrong,))) for wrong in Misreading if not wrong.of_mxfp8),
    *(_reading(side, reading) for reading in Reading if reading.alteration for side in ("a", "b", "a and b")),
    *_rows("tail of K beyond a multiple of {} dropped", "drops K beyond a multiple of {}", k_multiple=_MULTIPLES),
    *_rows("last {} of K dropped", "drops the last {} of K", k_less=[32, 64, 128]),
    *_misplacements(),
    *(_row(rule.name, rule.sentence, groups=rule) for rule in GROUP_RULES),
    # 4. Slices of K, and steps of the tensor core.
    *_rows("split-K {}", "splits K into {} slices", "their float32 results are added [CHAIN-3]", split_k=_SPLITS),
    *_rows("split-K {} of a long K", "splits a K above 512 into {} slices", split_k=_SPLITS, split_above=_SPLIT_ABOVE),
    *_rows("steps of {}", "adds {} products a step, not 32", "[ACC-1]", step_k=[4, 8, 16, 32, 64, 128]),
    *_rows("{} fraction bits", "keeps {} fraction bits", f"{_BITS} [ACC-3], [ACC-5]", **_OF_TERMS, **_OF_SUMS),
    *_rows("terms of {} fraction bits", "aligns products to {} fraction bits", f"{_BITS} [ACC-3]", **_OF_TERMS),
    *_rows(
        "sums of {} fraction bits",
        "keeps {} fraction bits of a step's sum",
        f"{_BITS} [ACC-5]",
        result_fraction_bits=SUM_BITS,
    ),
    *(
        _row(
            f"{' and '.join(rounded)} rounded to nearest",
            f"rounds the {' and '.join(rounded)} of a step to nearest instead of cutting them",
            "[ACC-3], [ACC-5]",
            **dict.fromkeys(rounded, Rounding.NEAREST),
        )
        for rounded in (("sums",), ("terms",), ("terms", "sums"))
    ),
    *_chips(),
)
"""All of them; the simpler of two that explain the same comes first."""
