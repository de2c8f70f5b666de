"""`explain`: of each dot of a function, whether XLA makes it a float8 GEMM on a Hopper GPU, and what joins it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, ParamSpec

import jax
import numpy as np
from jax.extend.core import Jaxpr

from f8emu.jax.emulated.epilogue import Epilogue
from f8emu.jax.emulated.matching import Matches, merged_dots
from f8emu.jax.emulated.program import DOTS, aval_of, flattened, name_of, own_gemms
from f8emu.jax.emulated.rules import FLOAT8, RULE_OF, Rule, is_fast
from f8emu.jax.emulated.transform import Emulation, evaluated, traced
from f8emu.shown import Shown, columns
from f8emu.spec.chips import HOPPER

P = ParamSpec("P")
_MERGED = "needs xla_gpu_dot_merger_threshold_mb=0: XLA would merge it with a dot of the same operand"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExplainedDot(Shown):
    """What one dot of a program is on a Hopper GPU."""

    name: str
    """The scopes that it was traced in, as JAX names them."""
    place: str
    """The loops, branches and `shard_map`s around it."""
    operands: str
    """Dtypes and shapes of the operands, codes where they are dequantized, and of the product."""
    is_promised: bool
    """Whether `emulate` promises the bits of this GEMM."""
    accumulation: str | None
    """"fast" or "promoted"; None: no float8 GEMM."""
    folded: tuple[str, ...]
    """What joins the GEMM: scales, bias, residual, activation, the conversion to float8."""
    rules: tuple[str, ...]
    """The ids of the rules that decide (NUMERICS 7)."""
    notes: tuple[str, ...]
    """Why it is no float8 GEMM, why its bits are not promised, and which option of XLA they need."""

    @property
    def is_float8(self) -> bool:
        return self.accumulation is not None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Shown):
    """The dots of a function, those of a loop's body after those around it; `str` is a table for the terminal."""

    dots: tuple[ExplainedDot, ...]
    own_gemms: int = 0
    """The GEMMs of f8emu's own layers, which have the chip's bits and are not listed."""
    _page: ClassVar[str] = "f8emu.report.explanation:explanation_page"

    def __str__(self) -> str:
        return "\n".join(self._lines(columns(1 << 20)))


def explain(f: Callable[P, Any]) -> Callable[P, Explanation]:
    """A function of the arguments of `f` that traces it, runs nothing, and says of each dot what XLA makes of it.

        print(f8emu.jax.explain(step)(params, batch))

    A dot in the body of a loop is one row. What is said holds for a program that XLA compiles with
    `xla_gpu_enable_triton_gemm=False`; `explain` agrees with the HLO of every program that an H100 recorded
    (`tests/jax_path/test_emulate.py`).

    Raises:
        UnsupportedError: a float8 dot in a primitive that `emulate` does not open.
    """

    def explained(*args: P.args, **kwargs: P.kwargs) -> Explanation:
        dots: list[ExplainedDot] = []
        emulation = Emulation(chip=HOPPER, listen=lambda *program: dots.extend(_explained(*program)))
        program, arrays, _ = traced(f, args, kwargs)
        jax.eval_shape(lambda *arrays: evaluated(program, arrays, emulation), *arrays)
        return Explanation(dots=tuple(dots), own_gemms=own_gemms(flattened(program).jaxpr))

    return explained


def _explained(place: str, jaxpr: Jaxpr, matches: Matches) -> Iterator[ExplainedDot]:
    """The dots of one flat program."""
    merged = merged_dots(jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in DOTS:
            continue
        out = eqn.outvars[0]
        reason, epilogue = matches.reasons[out], matches.epilogues.get(out)
        dtypes = [aval_of(v).dtype for v in (*eqn.invars[:2], out)]
        if epilogue is not None:
            dtypes[:2] = epilogue.dot.left.dtype, epilogue.dot.right.dtype
        shapes = [list(aval_of(v).shape) for v in (*eqn.invars[:2], out)]
        left, right, product = (f"{dtype}{shape}" for dtype, shape in zip(dtypes, shapes, strict=True))
        doubts = [] if epilogue is None else [doubt.value for doubt in epilogue.doubts]
        is_gemm, notes = reason is None, [*filter(None, [reason]), *doubts, *([_MERGED] if out in merged else [])]
        yield ExplainedDot(
            name=name_of(eqn),
            place=place,
            operands=f"{left} x {right} -> {product}",
            is_promised=is_gemm and not doubts,
            accumulation=("fast" if is_fast(eqn.params["precision"]) else "promoted") if is_gemm else None,
            folded=() if epilogue is None else tuple(fold.value for fold in epilogue.folded),
            rules=_rules(epilogue, dtypes[2]) if is_gemm else (),
            notes=tuple(notes),
        )


def _rules(epilogue: Epilogue | None, out: np.dtype) -> tuple[str, ...]:
    """The ids of the rules that decide a float8 GEMM."""
    rules = {Rule.GEMM, Rule.ACCUMULATION, *([Rule.FLOAT8] if out in FLOAT8 else [])}
    if epilogue is None:
        rules.add(Rule.RAGGED)
    else:
        rules.update(RULE_OF[fold] for fold in epilogue.folded)
        rules.update([Rule.FACTOR] if epilogue.factors or any(epilogue.dot.scales) else [])
    return tuple(sorted(rule.value for rule in rules))
