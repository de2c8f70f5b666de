"""The float8 GEMMs of a flat program: what each dot is on a Hopper GPU, and what XLA takes into it."""

import math
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from f8emu.jax.emulated.epilogue import Dot, Epilogue, epilogue_of
from f8emu.jax.emulated.gemm import free_of
from f8emu.jax.emulated.operands import Quotient, operand_of, quotient_of
from f8emu.jax.emulated.program import DOTS, Graph, aval_of
from f8emu.jax.emulated.rules import FLOAT8, Sizes, is_fast, why_no_gemm


@dataclass(slots=True)
class Matches:
    """The dots of a flat program."""

    epilogues: dict[Var, Epilogue] = field(default_factory=dict)
    """Of every result of a float8 GEMM's dot and its epilogue."""
    reasons: dict[Var, str | None] = field(default_factory=dict)
    """Of every dot: why it is no float8 GEMM, or None."""
    quotients: dict[Var, Quotient] = field(default_factory=dict)
    """Of conversions to float8 that are no GEMM's: what is converted."""


def matches_of(jaxpr: Jaxpr) -> Matches:
    """What each dot of a flat program is; a sum of two GEMMs belongs to the first of them."""
    graph, matches = Graph(jaxpr), Matches()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in DOTS:
            continue
        dot = _dot(graph, eqn)
        matches.reasons[eqn.outvars[0]] = dot if isinstance(dot, str) else None
        if isinstance(dot, Dot):
            epilogue = epilogue_of(graph, dot, matches.epilogues)
            for v in (dot.out, *epilogue.steps):
                matches.epilogues.setdefault(v, epilogue)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type" and aval_of(eqn.outvars[0]).dtype in FLOAT8:
            if eqn.outvars[0] not in matches.epilogues and (quotient := quotient_of(graph, eqn)) is not None:
                matches.quotients[eqn.outvars[0]] = quotient
    return matches


def _dot(graph: Graph, eqn: JaxprEqn) -> Dot | str | None:
    """The float8 GEMM that a dot is, or why not; None: a ragged dot of codes, which has no epilogue."""
    a, b = map(aval_of, eqn.invars[:2])
    if eqn.primitive.name == "ragged_dot_general":
        dims = eqn.params["ragged_dot_dimension_numbers"]
        is_plain = dims.dot_dimension_numbers == (((1,), (1,)), ((), ())) and (a.ndim, b.ndim) == (2, 3)
        if not {a.dtype, b.dtype} <= set(FLOAT8):
            return f"operands in {a.dtype} and {b.dtype}"
        if not is_plain or tuple(dims.lhs_ragged_dimensions) != (0,):
            return "a ragged dot whose groups do not divide the rows: not recorded"
        return why_no_gemm((a.dtype, b.dtype), aval_of(eqn.outvars[0]).dtype, (1, 1))
    if eqn.primitive.name != "dot_general":
        return "block scales: XLA dequantizes on a Hopper GPU; on Blackwell they are those of emulate(f, chip='B200')"
    left, right = (operand_of(graph, v) for v in eqn.invars)
    if left is None or right is None:
        names = [x.dtype.name if y is None else y.dtype.name for x, y in ((a, left), (b, right))]
        return f"operands in {names[0]} and {names[1]}"
    dims = eqn.params["dimension_numbers"]
    (contracting, contracting_b), (batch, batch_b) = dims
    rows, columns = free_of(a, contracting, batch), free_of(b, contracting_b, batch_b)
    reason = why_no_gemm((left.dtype, right.dtype), aval_of(eqn.outvars[0]).dtype, (len(rows), len(columns)))
    m, n, k = (math.prod(x.shape[i] for i in axes) for x, axes in ((a, rows), (b, columns), (a, contracting)))
    fast = is_fast(eqn.params["precision"])
    return reason or Dot(eqn=eqn, left=left, right=right, sizes=Sizes(m=m, n=n, k=k), is_fast=fast)


def merged_dots(jaxpr: Jaxpr) -> set[Var]:
    """The results of dots that share an operand with another, which XLA makes one dot if they are small."""
    alike: dict[Any, list[Var]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            params = eqn.params["dimension_numbers"], str(eqn.params["precision"]), aval_of(eqn.outvars[0]).dtype
            dtypes = tuple(aval_of(v).dtype for v in eqn.invars)
            for side, v in enumerate(eqn.invars):
                alike.setdefault((side, id(v), params, dtypes), []).append(eqn.outvars[0])
    return {v for outs in alike.values() if len(outs) > 1 for v in outs}
