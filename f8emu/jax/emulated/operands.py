"""Float8 codes and scales as XLA finds them in front of a dot and behind it [XLA-1], [XLA-3], [XLA-4]."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from f8emu.jax.emulated.program import Atom, Graph, Read, aval_of, run
from f8emu.jax.emulated.rules import FLOAT8

_MOVES = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "dynamic_slice", "pad", "copy", "select_n")
"""What may stand between a dequantization and the dot: XLA moves the codes instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A scale that joins a GEMM, where it is one float32 number."""

    value: Atom
    is_divided: bool
    """Whether its reciprocal joins."""
    dtype: np.dtype
    """The dtype of the array that it scales."""

    @property
    def is_constant(self) -> bool:
        return isinstance(self.value, Literal)

    @property
    def is_reciprocal(self) -> bool:
        """Whether the GPU divides, when the program runs."""
        return self.is_divided and not self.is_constant

    def read(self, read: Read) -> jax.Array:
        """[XLA-4] The number."""
        x = jnp.asarray(read(self.value)).reshape(())
        if self.is_constant:
            x = x.astype(self.dtype)  # as XLA inverts it when it compiles
        elif self.is_divided and self.dtype != jnp.float16:
            x = x.astype(jnp.float32)  # XLA divides bfloat16 in float32, and leaves out both conversions
        return (1 / x if self.is_divided else x).astype(jnp.float32)


def factor_of(graph: Graph, eqn: JaxprEqn, operand: Atom) -> Factor | None:
    """[XLA-4] The factor by which an equation multiplies or divides its operand; None: it does not."""
    is_divided = eqn.primitive.name == "div"
    if not (is_divided or eqn.primitive.name == "mul") or (is_divided and eqn.invars[0] is not operand):
        return None
    dtype, value = aval_of(eqn.outvars[0]).dtype, graph.spread(eqn.invars[int(eqn.invars[0] is operand)])
    if value is None:
        return None
    # A conversion to the dtype of the array stands directly before the one to float32, and XLA leaves it out. One
    # element that is not yet a scalar is reshaped between the two, which keeps the rounding.
    unrounded = graph.unconverted(value)
    is_float = is_scalar(value) and jnp.issubdtype(aval_of(unrounded).dtype, jnp.floating)
    if isinstance(unrounded, Literal) or (is_float and not (is_divided and dtype == jnp.float16)):
        value = unrounded
    return Factor(value=value, is_divided=is_divided, dtype=dtype)


def is_scalar(v: Atom) -> bool:
    """Whether XLA converts `v` to float32 without a reshape before."""
    return aval_of(v).shape == ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """An operand of a dot: `codes`, dequantized or as they are, then moved."""

    codes: Atom
    scale: Factor | None = None
    moves: tuple[JaxprEqn, ...] = ()

    @property
    def dtype(self) -> np.dtype:
        return aval_of(self.codes).dtype

    def read(self, jaxpr: Jaxpr, read: Read) -> jax.Array:
        """The codes, moved instead of the values."""
        x = jnp.asarray(read(self.codes))
        for eqn in self.moves:
            x = _moved(jaxpr, eqn, x, read)
        return x


def operand_of(graph: Graph, v: Atom) -> Operand | None:
    """[XLA-1] The float8 operand that an operand of a dot is; None: it is none."""
    if aval_of(v).dtype in FLOAT8:
        return Operand(codes=v)
    if (codes := _converted(graph, v)) is not None:
        return Operand(codes=codes)
    if (eqn := graph.maker(v, "mul", "div", *_MOVES)) is None:
        return None
    if eqn.primitive.name in _MOVES:
        is_select = eqn.primitive.name == "select_n"
        if is_select and len(eqn.invars) != 3:
            return None
        if (is_select or eqn.primitive.name == "pad") and graph.literal(eqn.invars[1]) != 0:
            return None  # XLA moves what fills with zeros alone
        before = operand_of(graph, eqn.invars[2 if is_select else 0])
        return None if before is None else replace(before, moves=(*before.moves, eqn))
    for side in eqn.invars:
        if (codes := _converted(graph, side)) is not None and (scale := factor_of(graph, eqn, side)) is not None:
            return Operand(codes=codes, scale=scale)
    return None


def _converted(graph: Graph, v: Atom) -> Atom | None:
    """The float8 codes of which `v` is the values."""
    eqn = graph.maker(v, "convert_element_type")
    return eqn.invars[0] if eqn is not None and aval_of(eqn.invars[0]).dtype in FLOAT8 else None


def _moved(jaxpr: Jaxpr, eqn: JaxprEqn, x: jax.Array, read: Read) -> Any:
    zero = jnp.zeros((), x.dtype)
    match eqn.primitive.name:
        case "pad":
            return lax.pad(x, zero, eqn.params["padding_config"])
        case "select_n":
            return lax.select_n(jnp.asarray(read(eqn.invars[0])), jnp.broadcast_to(zero, x.shape), x)
        case _:  # of codes in the place of the values
            return run(jaxpr, eqn, lambda v: x if v is eqn.invars[0] else read(v))[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotient:
    """A bfloat16 array that is divided by a scalar, clipped and converted to float8."""

    dividend: Atom
    divisor: Factor
    clips: tuple[JaxprEqn, ...]

    def read(self, read: Read) -> jax.Array:
        """[XLA-8] What is converted: float32, where the program rounds to bfloat16."""
        x = jnp.asarray(read(self.dividend)).astype(jnp.float32) / self.divisor.read(read)
        for eqn in self.clips:
            limits = [None if aval_of(v).shape else jnp.asarray(read(v)).astype(jnp.float32) for v in eqn.invars]
            x = eqn.primitive.bind(*(x if limit is None else limit for limit in limits), **eqn.params)
        return x


def quotient_of(graph: Graph, convert: JaxprEqn) -> Quotient | None:
    """[XLA-8] The quotient that an equation converts to float8; None: XLA rounds what it converts."""
    (v,), clips = convert.invars, list[JaxprEqn]()
    while (eqn := graph.maker(v, "max", "min", "clamp")) is not None and graph.only_user(eqn.outvars[0]) is not None:
        arrays = [operand for operand in eqn.invars if aval_of(operand).shape]
        if len(arrays) != 1:
            return None
        (v,) = arrays
        clips.insert(0, eqn)
    division = graph.maker(v, "div")
    if not clips or division is None or aval_of(v).dtype != jnp.bfloat16:
        return None
    factor = factor_of(graph, division, division.invars[0])
    if factor is None or graph.only_user(division.outvars[0]) is None:
        return None
    return Quotient(dividend=division.invars[0], divisor=replace(factor, is_divided=False), clips=tuple(clips))
