"""The equations behind a dot that XLA takes into the GEMM's epilogue: float32 throughout, rounded once at its end."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from f8emu.jax.emulated.operands import Factor, Operand, factor_of
from f8emu.jax.emulated.program import Atom, Graph, aval_of
from f8emu.jax.emulated.rules import ACTIVATIONS, FLOAT8, ROUNDED, SCALES, Doubt, Fold, Sizes

_GELU = ("integer_pow", "mul", "add", "mul", "tanh", "add", "mul", "mul")
_GELU_CONSTANTS = {1: 0.044715, 3: (2 / np.pi) ** 0.5, 5: 1.0, 6: 0.5}
"""By the places of the equations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A dot that is a float8 GEMM."""

    eqn: JaxprEqn
    left: Operand
    right: Operand
    sizes: Sizes
    is_fast: bool

    @property
    def out(self) -> Var:
        return self.eqn.outvars[0]

    @property
    def scales(self) -> tuple[Factor | None, Factor | None]:
        return self.left.scale, self.right.scale


@dataclass(slots=True, kw_only=True)
class Epilogue:
    """What XLA takes into the GEMM of a dot."""

    dot: Dot
    factors: dict[Var, Factor] = field(default_factory=dict)
    """The results of equations that scale: by which factor."""
    steps: set[Var] = field(default_factory=set)
    """The results of all equations that are taken."""
    gelus: dict[Var, Var] = field(default_factory=dict)
    """The results of activations: of what."""
    folded: list[Fold] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)

    def operands(self, eqn: JaxprEqn) -> list[Atom]:
        """What a step takes: everything, or of one that scales or activates what it is applied to."""
        out, results = eqn.outvars[0], (self.dot.out, *self.steps)
        if out in self.gelus:
            return [self.gelus[out]]
        return [v for v in eqn.invars if out not in self.factors or v in results]

    def take(self, *eqns: JaxprEqn, fold: Fold | None = None) -> Var:
        """Take equations, of which the last gives the result."""
        self.steps.update(eqn.outvars[0] for eqn in eqns)
        if fold is not None:
            self.folded.append(fold)
        return eqns[-1].outvars[0]


def epilogue_of(graph: Graph, dot: Dot, taken: Mapping[Var, Epilogue]) -> Epilogue:
    """[XLA-3], [XLA-5] to [XLA-8] What XLA takes, in the order in which it does, of what no other dot has taken."""
    return _Walk(graph, dot, taken).epilogue


class _Walk:
    def __init__(self, graph: Graph, dot: Dot, taken: Mapping[Var, Epilogue]) -> None:
        self.graph, self.dot, self.taken = graph, dot, taken
        self.dtype: np.dtype = aval_of(dot.out).dtype
        self.epilogue = Epilogue(dot=dot)
        self._doubt(Doubt.SPLIT, dot.sizes.may_be_split)
        for scale, fold in zip(dot.scales, (Fold.LEFT_SCALE, Fold.RIGHT_SCALE), strict=True):
            if scale is not None:
                self.epilogue.folded.append(fold)
                self._doubt(Doubt.RECIPROCAL, scale.is_reciprocal)
        value: Var | None = dot.out
        while value is not None:
            self.value = value
            value = self._gelu() or self._step() or self._float8()
        self._doubt(Doubt.TWO_FACTORS, self._has(Fold.SCALE, Fold.LEFT_SCALE) and self._has(Fold.CONSTANT))

    def _has(self, *folds: Fold) -> bool:
        return any(fold in self.epilogue.folded for fold in folds)

    def _doubt(self, doubt: Doubt, is_there: bool = True) -> None:
        if is_there and doubt not in self.epilogue.doubts:
            self.epilogue.doubts.append(doubt)

    def _follow(self, eqn: JaxprEqn | None, *names: str) -> list[JaxprEqn] | None:
        """Equations of these names from `eqn` on, each the only user of the one before; None: there are others."""
        chain: list[JaxprEqn] = []
        for name in names:
            if eqn is None or eqn.primitive.name != name:
                return None
            chain.append(eqn)
            eqn = self.graph.only_user(eqn.outvars[0])
        return chain

    def _step(self) -> Var | None:
        eqn = self.graph.only_user(self.value)
        if eqn is None:
            return None
        match eqn.primitive.name:
            case "reshape" | "squeeze":
                return self.epilogue.take(eqn)
            case "transpose" if self._swaps(eqn) and not self.epilogue.folded:
                return self.epilogue.take(eqn)  # XLA exchanges the operands instead
            case "mul" | "div":
                return self._scale(eqn)
            case "add" | "add_any":
                return self._sum(eqn)
            case "max" if self.graph.literal(self._other(eqn)) == 0 and not self._has(*ACTIVATIONS):
                return self.epilogue.take(eqn, fold=Fold.RELU)
        return None

    def _other(self, eqn: JaxprEqn) -> Atom:
        return eqn.invars[int(eqn.invars[0] is self.value)]

    def _swaps(self, eqn: JaxprEqn) -> bool:
        """Whether a transpose exchanges the two free dimensions of the dot."""
        permutation, batch = eqn.params["permutation"], len(self.dot.eqn.params["dimension_numbers"][1][0])
        return permutation == (*range(batch), batch + 1, batch)

    def _scale(self, eqn: JaxprEqn) -> Var | None:
        factor = factor_of(self.graph, eqn, self.value)
        if factor is None or self._has(Fold.RESIDUAL) or self.dot.sizes.is_padded:
            return None
        if factor.is_constant and self._has(Fold.BIAS, *ACTIVATIONS):
            self._doubt(Doubt.LATE_CONSTANT)
            return None
        fold = Fold.CONSTANT if factor.is_constant else Fold.SCALE
        if self._has(fold, Fold.BIAS, Fold.GELU) or (fold is Fold.SCALE and self._has(Fold.LEFT_SCALE)):
            return None
        if self.graph.repetitions(eqn, self._other(eqn)) > 1:
            self._doubt(Doubt.SHARED)
            return None
        user = self.graph.only_user(eqn.outvars[0])
        if self.dtype in ROUNDED and user is not None and user.primitive.name == "transpose":
            self._doubt(Doubt.TRANSPOSED)
            return None
        return self._take_scaled(eqn, factor, fold)

    def _take_scaled(self, eqn: JaxprEqn, factor: Factor, fold: Fold | None = None) -> Var:
        self._doubt(Doubt.RECIPROCAL, factor.is_reciprocal)
        self.epilogue.factors[eqn.outvars[0]] = factor
        return self.epilogue.take(eqn, fold=fold)

    def _sum(self, eqn: JaxprEqn) -> Var | None:
        other, shape = self._other(eqn), aval_of(eqn.outvars[0]).shape
        if (other_sum := self.taken.get(eqn.outvars[0])) is not None:
            other_sum.doubts.append(Doubt.TWO_GEMMS)
            return None
        if self._has(*ACTIVATIONS, Fold.RESIDUAL):
            return None
        if (row := self.graph.row(other, shape[-1])) is not None:
            # A float32 bias joins if it was bfloat16 before.
            widened = self.graph.maker(row, "convert_element_type") or self.graph.maker(other, "convert_element_type")
            was_bfloat16 = widened is not None and aval_of(widened.invars[0]).dtype == jnp.bfloat16
            fits = self.dtype in ROUNDED or (self.dtype == jnp.float32 and was_bfloat16)
            return self.epilogue.take(eqn, fold=Fold.BIAS) if fits and not self._has(Fold.BIAS) else None
        is_matrix = aval_of(other).shape == shape and self.graph.maker(other, "broadcast_in_dim") is None
        if not is_matrix or isinstance(other, Literal) or self.dtype in FLOAT8:
            return None
        self._doubt(Doubt.TWO_ROUNDINGS, self.dtype == jnp.float32 and self._has(*SCALES))
        return self.epilogue.take(eqn, fold=Fold.RESIDUAL)

    def _gelu(self) -> Var | None:
        """[XLA-7] x * (0.5 * (1 + tanh(c * (x + d * x**3)))), each value but x used once."""
        x = self.value
        cubes = [eqn for eqn in self.graph.users(x) if eqn is not None and eqn.params.get("y") == 3]
        chain = self._follow(cubes[0], *_GELU) if len(cubes) == 1 and not self._has(*ACTIVATIONS) else None
        if chain is None or x not in chain[2].invars or x not in chain[7].invars:
            return None
        for place, constant in _GELU_CONSTANTS.items():
            numbers = [number for v in chain[place].invars if (number := self.graph.literal(v)) is not None]
            if not numbers or abs(numbers[0] / constant - 1) > 2**-6:
                return None
        self._doubt(Doubt.GELU)
        self.epilogue.gelus[chain[-1].outvars[0]] = x
        return self.epilogue.take(*chain, fold=Fold.GELU)

    def _float8(self) -> Var | None:
        """[XLA-8] The conversion to float8 of what is clipped to its range, perhaps scaled; beside it an amax."""
        users = self.graph.users(self.value)
        amax = [chain for eqn in users if (chain := self._follow(eqn, "abs", "reduce_max")) is not None]
        if self.dot.sizes.is_padded or self._has(Fold.RESIDUAL) or len(users) != 1 + len(amax):
            return None
        for first in filter(None, users):
            factor = factor_of(self.graph, first, self.value)
            clipped = self._clip(first if factor is None else self.graph.only_user(first.outvars[0]))
            if clipped is None:
                continue
            if factor is not None:
                self._take_scaled(first, factor)
            if amax:
                self.epilogue.take(*amax[0], fold=Fold.AMAX)
            return self.epilogue.take(*clipped, fold=Fold.FLOAT8)
        return None

    def _clip(self, eqn: JaxprEqn | None) -> list[JaxprEqn] | None:
        """A clip to the range of a float8 format, and the conversion to it."""
        convert = "convert_element_type"
        chain = self._follow(eqn, "max", "min", convert) or self._follow(eqn, "clamp", convert)
        dtype = aval_of(chain[-1].outvars[0]).dtype if chain else None
        if chain is None or dtype not in FLOAT8:
            return None
        limits = {self.graph.literal(v) for eqn in chain[:-1] for v in eqn.invars} - {None}
        top = float(jnp.finfo(dtype).max)
        return chain if limits == {-top, top} else None
