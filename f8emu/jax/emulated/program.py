"""A traced program as XLA reads it: calls opened, what nobody uses left out, and who makes and uses each value."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from f8emu.jax.emulated.rules import FLOAT8
from f8emu.spec.errors import UnsupportedError

Atom = Var | Literal
Read = Callable[[Atom], Any]
"""The value of an atom while a program is evaluated."""

_OPENED = {
    **dict.fromkeys(("jit", "pjit", "remat2", "checkpoint", "composite"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_lin"), "call_jaxpr"),
    "custom_vmap_call": "call",
    "linear_call": "callee",
}
"""The primitives that XLA inlines, and the parameter with their program."""
_WITH_BODIES = ("scan", "while", "cond", "shard_map")
"""The primitives whose programs are emulated, each by itself."""
_OWN = "f8emu_"
"""How the primitives of f8emu's own layers begin, whose GEMMs have the chip's bits as they are."""
_OWN_GEMMS = (f"{_OWN}gemm", f"{_OWN}emulated_gemm", f"{_OWN}tensor_core_dot", f"{_OWN}linear")
SCALED_MATMUL = "scaled_matmul_wrapper"
SCALED_DOTS = ("scaled_dot", SCALED_MATMUL)
DOTS = ("dot_general", "ragged_dot_general", *SCALED_DOTS)
_SHAPES = ("broadcast_in_dim", "reshape", "squeeze")


def flattened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with its calls opened, without equations that neither an output nor an effect needs."""
    flat = jax.make_jaxpr(lambda *args: _evaluate_opened(closed, args))(*closed.in_avals)
    needed = {v for v in flat.jaxpr.outvars if isinstance(v, Var)}
    kept: list[JaxprEqn] = []
    for eqn in reversed(flat.jaxpr.eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, Var))
    return ClosedJaxpr(flat.jaxpr.replace(eqns=kept[::-1]), flat.consts)


def closed(jaxpr: ClosedJaxpr | Jaxpr) -> ClosedJaxpr:
    """A program with its constants."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def evaluate(program: ClosedJaxpr, args: Sequence[Any], step: Callable[[JaxprEqn, Read], Sequence[Any]]) -> list[Any]:
    """The outputs of a program of which `step` computes each equation."""
    values: dict[Var, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    values.update(zip(program.jaxpr.invars, args, strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in program.jaxpr.eqns:
        values.update(zip(eqn.outvars, step(eqn, read), strict=True))
    return [read(v) for v in program.jaxpr.outvars]


def _evaluate_opened(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    def step(eqn: JaxprEqn, read: Read) -> Sequence[Any]:
        name, operands = eqn.primitive.name, [read(v) for v in eqn.invars]
        if name == "custom_linear_solve":  # XLA inlines its solver, and runs none of its other programs
            lengths = eqn.params["const_lengths"]
            start = lengths.matvec + lengths.vecmat
            operands = operands[start : start + lengths.solve] + operands[sum(lengths) :]
            body = eqn.params["jaxprs"].solve
        elif name in _OPENED:
            body = closed(eqn.params[_OPENED[name]])
        elif name not in _WITH_BODIES and not name.startswith(_OWN) and any(map(_multiplies_float8, _bodies(eqn))):
            raise UnsupportedError(
                "emulate and explain: float8 dots must stand in functions, loops and branches that XLA compiles as "
                f"they are; got one in the primitive {name}; apply them to the functions around it"
            )
        else:
            return run(program.jaxpr, eqn, read)
        with jax.named_scope(name_of(eqn)):
            return _evaluate_opened(body, operands)

    return evaluate(program, args, step)


def _bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The programs among the parameters of an equation."""
    for parameter in eqn.params.values():
        for body in parameter if isinstance(parameter, tuple) else (parameter,):
            if isinstance(body, ClosedJaxpr | Jaxpr):
                yield closed(body).jaxpr


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a program, and of the programs in them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in _bodies(eqn):
            yield from _equations(body)


def own_gemms(jaxpr: Jaxpr) -> int:
    """The GEMMs of f8emu's own layers in a program; of branches, as of platforms, those of the longest."""
    return sum(
        1 if eqn.primitive.name in _OWN_GEMMS else max(map(own_gemms, _bodies(eqn)), default=0) for eqn in jaxpr.eqns
    )


def _multiplies_float8(jaxpr: Jaxpr) -> bool:
    equations = list(_equations(jaxpr))
    avals = (aval_of(v) for eqn in equations for v in (*eqn.invars, *eqn.outvars))
    has_dot = any(eqn.primitive.name in DOTS for eqn in equations)
    return has_dot and any(getattr(aval, "dtype", None) in FLOAT8 for aval in avals)


def run(jaxpr: Jaxpr, eqn: JaxprEqn, read: Read) -> Sequence[Any]:
    """The outputs of one equation of `jaxpr`, computed as JAX does, in its context and under its name."""
    variables = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
    alone = jaxpr.replace(constvars=[], invars=variables, outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects)
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*map(read, variables))


def aval_of(v: Atom) -> Any:
    """The shape and dtype of a value."""
    return v.aval


def name_of(eqn: JaxprEqn) -> str:
    """The names of the scopes that an equation was traced in."""
    return str(eqn.source_info.name_stack)


class Graph:
    """Who makes and who uses each value of a flat program."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._users: dict[Var, dict[int, JaxprEqn | None]] = {}
        for eqn in jaxpr.eqns:
            for v in eqn.invars:
                if isinstance(v, Var):
                    self._users.setdefault(v, {})[id(eqn)] = eqn
        for v in jaxpr.outvars:
            if isinstance(v, Var):
                self._users.setdefault(v, {})[0] = None
        self._repeated = Counter(self._repetition(eqn, v) for eqn in jaxpr.eqns for v in eqn.invars)

    def maker(self, v: Atom, *names: str) -> JaxprEqn | None:
        """The equation that gives `v`, if it has one of these names; any, if none is given."""
        eqn = self._makers.get(v) if isinstance(v, Var) else None
        return eqn if eqn is not None and (not names or eqn.primitive.name in names) else None

    def users(self, v: Var) -> list[JaxprEqn | None]:
        """The equations that take `v`; None: an output of the program."""
        return list(self._users.get(v, {}).values())

    def only_user(self, v: Var) -> JaxprEqn | None:
        """The equation that takes `v`, if nothing else does."""
        users = self.users(v)
        return users[0] if len(users) == 1 else None

    def spread(self, v: Atom) -> Atom | None:
        """The value of one element that `v` repeats; None: `v` has elements of its own."""
        while math.prod(aval_of(v).shape) != 1:
            eqn = self.maker(v, "broadcast_in_dim")
            if eqn is None:
                return None
            v = eqn.invars[0]
        while aval_of(v).shape and (eqn := self.maker(v, *_SHAPES)) is not None:
            v = eqn.invars[0]
        return v

    def unconverted(self, v: Atom) -> Atom:
        """The value of which `v` is a conversion, or of which that is one, and so on."""
        while (eqn := self.maker(v, "convert_element_type")) is not None:
            v = eqn.invars[0]
        return v

    def literal(self, v: Atom) -> float | None:
        """The number that `v` repeats, if the program has it as a constant."""
        v = self.unconverted(self.spread(v) or v)
        return float(v.val) if isinstance(v, Literal) else None

    def repetitions(self, eqn: JaxprEqn, v: Atom) -> int:
        """How many equations take what the operand `v` of `eqn` repeats, in the shape and dtype of its result."""
        return self._repeated[self._repetition(eqn, v)]

    def _repetition(self, eqn: JaxprEqn, v: Atom) -> Any:
        repeated, number = self.spread(v), self.literal(v)
        shape = getattr(eqn.outvars[0].aval, "shape", ()) if eqn.outvars else ()
        if repeated is None or not shape or eqn.primitive.name in (*_SHAPES, "convert_element_type"):
            return None
        return self.unconverted(repeated) if number is None else number, shape, aval_of(eqn.outvars[0]).dtype

    def row(self, v: Atom, n: int) -> Atom | None:
        """The vector [n] that every row of `v` repeats; None: there is none."""
        while aval_of(v).shape != (n,):
            eqn = self.maker(v, *_SHAPES)
            if eqn is None or (math.prod(aval_of(v).shape[:-1]) != 1 and eqn.primitive.name != "broadcast_in_dim"):
                return None
            dims = eqn.params.get("broadcast_dimensions", (aval_of(v).ndim - 1,))
            if math.prod(aval_of(eqn.invars[0]).shape) != n or not dims or dims[-1] != aval_of(v).ndim - 1:
                return None
            v = eqn.invars[0]
        return v
