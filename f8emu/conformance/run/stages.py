"""The stages of the suite, in the order in which a mistake would spread: formats, scales, GEMMs, layers.

A stage is a list of cases and who judges them. `Stage.cases` leaves out what is outside of a subject's range.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Literal

import numpy as np

from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.cases.golden import GoldenFile
from f8emu.conformance.cases.tables import (
    CASTS,
    DECODED,
    DELAYED_AMAXES,
    DELAYED_TRACES,
    SCALE_RULES,
    all_codes,
    amax_corners,
    amax_inputs,
    cast_inputs,
    gemm_cases,
    inv_scales,
    live_cases,
    quantize_inputs,
    values,
)
from f8emu.conformance.compare import abbreviated, different, hexadecimal
from f8emu.conformance.diagnosis.probes import kind_of
from f8emu.conformance.layers.layer import LayerCase, LayerMode, describe_layer, layer_traits
from f8emu.conformance.layers.layer_cases import layer_cases
from f8emu.conformance.layers.trace import layer_parts, trace_parts
from f8emu.conformance.run.check import Case, Parts, Slicing
from f8emu.conformance.run.gemm_text import describe_gemm, gemm_traits, options_of, recorded_inputs, torch_snippet
from f8emu.conformance.run.oracle import OwnSplit, gemm_oracle, layer_oracle, value_oracle
from f8emu.conformance.run.subject import NotOffered, Subject
from f8emu.spec import HIGH_PRECISION, HOPPER

StageName = Literal["formats", "scales", "golden", "gemms", "layers", "live"]
"""A stage by name: `STAGES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of the suite."""

    name: str
    title: str
    needs: tuple[str, ...]
    """The verbs without which a subject cannot run any of it."""
    cases: Callable[[Subject, GoldenFile], Iterator[Case]]
    """Raises NotOffered where the subject or the machine has no such thing."""
    judge: Callable[[str], Subject] | None
    """Name of a subject -> its oracle; None is a recording."""
    is_whole: bool = True
    """False: some of its cases alone, which may be too few to tell which S are a subject's own."""

    def is_offered_by(self, subject: Subject) -> bool:
        """Whether a subject has the verbs; without those it cannot run any of it."""
        return set(self.needs) <= {*subject.offers} if self.needs else subject.has_layer


def share_of(stage: Stage, index: int, count: int) -> Stage:
    """The stage with one of `count` shares of its cases."""
    return replace(stage, cases=lambda subject, golden: islice(stage.cases(subject, golden), index, None, count))


# 1 Formats


def _formats(subject: Subject, golden: GoldenFile) -> Iterator[Case]:
    # Every code decoded; every bfloat16 and float16 and the boundaries of float32 cast, under both policies.
    for fmt in DECODED:
        x = all_codes(fmt)
        yield Case(
            id=f"decode {fmt}",
            run=lambda s, x=x: {"": s.verbs["decode"](x)},
            describe=partial(_element, x),
            traits={"operation": "decode", "format": fmt.name},
        )
    for source, target, overflow in CASTS:
        x = cast_inputs(source, target)
        yield Case(
            id=f"cast {source} to {target} {overflow.value}",
            run=lambda s, x=x, target=target, overflow=overflow: {"": s.verbs["cast"](x, target, overflow=overflow)},
            describe=partial(_element, x),
            traits={"operation": "cast", "format": target.name, "from": source.name, "overflow": overflow.value},
        )


def _element(x: np.ndarray, part: str, index: tuple[int, ...]) -> str:
    return hexadecimal(x[index])


# 2 Scales


def _scales(subject: Subject, golden: GoldenFile) -> Iterator[Case]:
    # Amax, scales, quantisation and its inverse, and the states of delayed scaling over 19 steps.
    for i, (distribution, shape, granularity) in enumerate(amax_inputs()):
        x = values(distribution, shape, HIGH_PRECISION[i % 3])
        yield Case(
            id=f"amax {distribution} {x.dtype} {shape[0]}x{shape[1]} {granularity.value}",
            run=lambda s, x=x, g=granularity: {"": s.verbs["amax"](x, g)},
            describe=lambda part, index, x=x: abbreviated(x, "x"),
            traits={"operation": "amax", "granularity": granularity.value, "inputs": distribution},
        )
    for i, (distribution, shape, granularity) in enumerate(quantize_inputs()):
        x, target = values(distribution, shape, HIGH_PRECISION[i % 3]), HOPPER.operand_formats[i // 2 % 2]
        factors = inv_scales(x, granularity, target)

        def quantize(s: Subject, x=x, factors=factors, to=(target, granularity)) -> Parts:
            codes = s.verbs["quantize"](x, factors, *to)
            return {"codes": codes, "values": s.verbs["dequantize"](codes, factors, to[1])}

        def describe(part: str, index: tuple[int, ...], x=x, factors=factors, block=granularity.block) -> str:
            factor = factors[tuple(i // (side or n) for i, side, n in zip(index, block, x.shape, strict=True))]
            return f"x={hexadecimal(x[index])} factor={hexadecimal(factor)}"

        operation = {"operation": "quantize and dequantize", "granularity": granularity.value}
        yield Case(
            id=f"quantize {distribution} {x.dtype} {shape[0]}x{shape[1]} {granularity.value} to {target}",
            run=quantize,
            describe=describe,
            traits={**operation, "inputs": distribution, "format": target.name},
        )
    for (rule, margin), target in product(SCALE_RULES, HOPPER.operand_formats):
        amax = amax_corners()
        power = " power of two" if rule.power_of_two else ""

        def scale(s: Subject, amax=amax, to=(target, rule), margin=margin) -> Parts:
            return s.verbs["scale_from_amax"](amax, *to, margin=margin)._asdict()

        yield Case(
            id=f"scale_from_amax {target}{power} floor {rule.amax_floor:g} margin {margin}",
            run=scale,
            describe=partial(_element, amax),
            traits={"operation": "scale_from_amax", "format": target.name, "rule": power.strip() or "any scale"},
        )
    for delayed, rule, target in DELAYED_TRACES:
        power = " power of two" if rule.power_of_two else ""

        def steps(s: Subject, to=(target, rule, delayed)) -> Parts:
            states = [s.verbs["initial_delayed_state"](to[-1])]
            for amax in DELAYED_AMAXES:
                states.append(s.verbs["update_delayed_state"](states[-1], np.full((1, 1), amax, np.float32), *to))
            named = ((f"step {i} {name}", x) for i, state in enumerate(states) for name, x in state._asdict().items())
            return {name: np.asarray(x) for name, x in named}

        yield Case(
            id=f"delayed {delayed.reduction.value} of {delayed.history_length} margin {delayed.margin} {target}{power}",
            run=steps,
            describe=lambda part, index: "amaxes " + " ".join(f"{x:g}" for x in DELAYED_AMAXES),
            traits={"operation": "delayed scaling", "format": target.name, "rule": power.strip() or "any scale"},
        )


# 3 GEMMs


def _golden(subject: Subject, golden: GoldenFile) -> Iterator[Case]:
    if subject.kernel is not None and subject.kernel.is_microscaled:
        raise NotOffered("GEMMs with E8M0 scales were recorded nowhere; the oracle judges the generated ones")
    own_split = _own_split(subject)
    for case in golden.cases:
        mode = case.gemm.mode.value
        name = case.id if mode in case.id else f"{case.id} {mode}"
        inputs = recorded_inputs(case.name, case.gemm.mode)
        yield _gemm_case(case.gemm, name, own_split, inputs=inputs, recorded=case.out)


def _gemms(subject: Subject, golden: GoldenFile) -> Iterator[Case]:
    own_split = _own_split(subject)
    if subject.first_call is not None:
        first, output = subject.first_call
        case = _gemm_case(first, f"first call: {first.id}", own_split)

        def run(runner: Subject, judged=case.run) -> Parts:
            if runner is not subject:
                return judged(runner)
            if isinstance(output, Exception):
                raise output
            return {"": output}

        yield replace(case, run=run)
    for gemm in (*gemm_cases(), *subject.more_gemms()):
        if subject.takes(gemm):
            question = subject.question(gemm)
            yield _gemm_case(question, question.id, own_split)


def _live(subject: Subject, golden: GoldenFile) -> Iterator[Case]:
    if not subject.runs_full_size:
        raise NotOffered("no GPU: these GEMMs are run at full size, on the hardware that chooses their kernels")
    if subject.kernel is not None and subject.kernel.is_microscaled:
        raise NotOffered("GEMMs with E8M0 scales are all among the generated ones")
    own_split = _own_split(subject)
    for gemm in live_cases():
        question = subject.question(gemm)
        case = _gemm_case(question, question.id, own_split)
        yield replace(case, id=question.id) if question is gemm else case


def _own_split(subject: Subject) -> OwnSplit | None:
    return OwnSplit(gemm_oracle(subject.name).gemm) if subject.chooses_split_k else None


def _gemm_case(
    gemm: GemmCase, name: str, own_split: OwnSplit | None, *, inputs: str = "", recorded: np.ndarray | None = None
) -> Case:
    turns = gemm.in_turn

    def explained(outputs: Parts, expected: Parts) -> Slicing | None:
        split: Slicing | None = None
        again = [outputs[part] for part, turn in turns.items() if turn is gemm]
        if any(different(again[0], other).any() for other in again[1:]):
            return None  # asked again it has another S, which no library has
        for part, right in expected.items():
            if own_split is not None and different(outputs[part], right).any():
                split = own_split(turns[part], outputs[part], right)
                if split is None:
                    break
        return split

    kind = kind_of(gemm)
    return Case(
        id=f"{name} {options_of(gemm)}",
        kind=kind.name if kind else gemm_traits(gemm)["scales"],
        gemms=turns,
        run=lambda subject: subject.outputs(gemm),
        recorded=None if recorded is None else {"": recorded},
        own_split=explained,
        describe=lambda part, index: describe_gemm(turns[part], index),
        snippet=lambda mismatch: torch_snippet(turns[mismatch.part], mismatch),
        traits=gemm_traits(gemm, inputs),
        one_of=gemm.one_of,
    )


# 4 Layers


def _layers(subject: Subject, golden: GoldenFile) -> Iterator[Case]:
    # The layers that a subject trains itself, eager and compiled; for another subject, those of the verb `linear`.
    if not subject.has_layer:
        raise NotOffered(f"{subject.name} has neither a layer that trains nor linear")
    for case in layer_cases(full_size=subject.runs_full_size):
        if (case.mode is LayerMode.TRACE) == (subject.train is None):
            yield Case(
                id=case.id,
                run=partial(_run_layer, case, subject.asks_library),
                describe=partial(describe_layer, case),
                traits=layer_traits(case),
                context=subject.asks_library,
            )


def _run_layer(case: LayerCase, asks_library: bool, subject: Subject) -> Parts:
    # `asks_library` is that of the subject that is verified, its judge included.
    if case.mode is LayerMode.TRACE:
        return trace_parts(case, subject.verbs, asks_library)
    return layer_parts(case, subject.verbs, asks_library) if subject.train is None else subject.train(case)


_VALUES = ("decode", "cast")
_SCALES = ("amax", "scale_from_amax", "quantize", "dequantize", "initial_delayed_state", "update_delayed_state")

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(name="formats", title="formats and casts", needs=_VALUES, cases=_formats, judge=value_oracle),
        Stage(name="scales", title="scales", needs=_SCALES, cases=_scales, judge=value_oracle),
        Stage(name="golden", title="recorded GEMMs", needs=("scaled_mm",), cases=_golden, judge=None),
        Stage(name="gemms", title="generated GEMMs", needs=("scaled_mm",), cases=_gemms, judge=gemm_oracle),
        Stage(name="layers", title="layers, forward and backward", needs=(), cases=_layers, judge=layer_oracle),
        Stage(name="live", title="large GEMMs on the GPU", needs=("scaled_mm",), cases=_live, judge=gemm_oracle),
    )
}
"""Name -> stage, in the order in which they run."""
