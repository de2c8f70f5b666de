"""`emulate`: a function whose float8 GEMMs have the bits of a chip, by a walk over its program.

The program is traced, flattened (`program.py`) and evaluated again. A dot that XLA makes a float8 GEMM
(`matching.py`) is a GEMM of f8emu; what XLA takes into its epilogue is computed in float32 and rounded once
(`gemm.py`). Everything else, also in the bodies of loops and branches, is computed as it was.
"""

from __future__ import annotations  # short signatures in `help`

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from f8emu.jax.compiling import differentiable_no_more
from f8emu.jax.emulated import gemm
from f8emu.jax.emulated.epilogue import Epilogue
from f8emu.jax.emulated.matching import Matches, matches_of
from f8emu.jax.emulated.program import (
    SCALED_DOTS,
    SCALED_MATMUL,
    Atom,
    Read,
    aval_of,
    closed,
    evaluate,
    flattened,
    run,
)
from f8emu.jax.gemm.call import is_at_hand
from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER, chip_by_name
from f8emu.spec.errors import UnsupportedError
from f8emu.spec.names import ChipName

P = ParamSpec("P")
R = TypeVar("R")
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_COMPUTED = object()
"""Stands for an array among the results of a function; what is no array is returned as it is."""
_REFUSAL = (
    "emulate: float8 GEMMs have no gradient, and XLA makes others of those of a backward pass; got a derivative of an "
    "emulated function; emulate the derivative: f8emu.jax.emulate(jax.grad(f))"
)


def emulate(f: Callable[P, R], *, chip: Chip | ChipName = HOPPER, force: bool = False) -> Callable[P, R]:
    """`f`, whose float8 GEMMs have the bits that XLA's have on a Hopper GPU.

        step = jax.jit(f8emu.jax.emulate(step))  # outermost: around gradients, inside jit alone

    A float8 GEMM is what XLA makes one (NUMERICS 7): a dot of float8 codes or of dequantized ones, together with the
    scales, bias, residual and activation that join its epilogue. flax's float8 operators, qwix and plain
    `jax.lax.dot_general` need no change. `explain` lists the dots. Where JAX's default device is the chip, `f` runs as
    it is.

    With `chip="B200"`, MXFP8 runs on a CPU [XLA-10]: `jax.nn.scaled_matmul`, `jax.nn.scaled_dot_general`, whose casts
    are JAX's own, and `jax.lax.scaled_dot`.

    Exactness: 115 of 126 programs that an H100 ran are equal in every bit (`tests/jax_path/test_emulate.py`). Promised
    are GEMMs, of equal codes and scales, under `XLA_FLAGS="--xla_gpu_enable_triton_gemm=false
    --xla_gpu_dot_merger_threshold_mb=0"`. What is computed around them is the device's own. MXFP8 is equal to
    `f8ref.numpy.scaled_mm`; what XLA and cuDNN make of it on Blackwell was not recorded.

    Args:
        f: a function of pytrees of arrays; arguments that are no arrays are static.
        chip: the chip, a profile of `f8emu.spec.CHIPS` or its name.
        force: emulate also where the device is the chip.

    Raises:
        SpecError: an unknown chip.
        UnsupportedError: a derivative of the result; a float8 dot in a primitive that is not opened, as in Pallas; a
            `jax.nn.scaled_matmul` on a CPU that is not MXFP8, or not for Blackwell.
    """
    profile = chip_by_name("emulate", chip)

    @functools.wraps(f)
    def emulated(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_at_hand(profile) and not force:
            return f(*args, **kwargs)
        program, arrays, results = traced(f, args, kwargs)
        arrays = differentiable_no_more(arrays, _REFUSAL)
        computed = iter(evaluated(program, arrays, Emulation(chip=profile)))
        return jax.tree.map(lambda x: jnp.asarray(next(computed)) if x is _COMPUTED else x, results)

    return emulated


def traced(f: Callable[..., Any], args: Any, kwargs: Any) -> tuple[ClosedJaxpr, list[Any], Any]:
    """The program of a call, its arguments that are arrays, and its results, `_COMPUTED` where the program's are."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]
    results: Any = None

    def of_arrays(*arrays: Any) -> list[Any]:
        nonlocal results
        filled = [*leaves]
        for i, array in zip(places, arrays, strict=True):
            filled[i] = array
        args, kwargs = jax.tree.unflatten(tree, filled)
        outputs = f(*args, **kwargs)
        results = jax.tree.map(lambda x: _COMPUTED if isinstance(x, jax.Array) else x, outputs)
        return [x for x in jax.tree.leaves(outputs) if isinstance(x, jax.Array)]

    arrays = [leaves[i] for i in places]
    program = jax.make_jaxpr(of_arrays)(*arrays)
    return program, arrays, results


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """How a program is evaluated, and where in the whole it stands."""

    chip: Chip
    place: str = ""
    """The loops, branches and `shard_map`s around it."""
    listen: Callable[[str, Jaxpr, Matches], None] | None = None
    """Told of every flat program and its matches."""

    def within(self, eqn: JaxprEqn, body: int = 0) -> Emulation:
        """For a program of an equation."""
        name = eqn.primitive.name
        names = {"scan": f"scan of {eqn.params.get('length')}", "cond": f"branch {body}"}
        return replace(self, place=f"{self.place} > {names.get(name, name)}".removeprefix(" > "))


def evaluated(program: ClosedJaxpr, args: Sequence[Any], emulation: Emulation) -> list[Any]:
    """The outputs of a program, its float8 GEMMs emulated."""
    program = flattened(program)
    matches = matches_of(program.jaxpr)
    if emulation.listen is not None:
        emulation.listen(emulation.place, program.jaxpr, matches)
    unrounded: dict[Var, jax.Array] = {}

    def float32(epilogue: Epilogue, v: Atom, read: Read) -> jax.Array:
        # What another GEMM gives is rounded for this one.
        if isinstance(v, Var) and v in unrounded and matches.epilogues[v] is epilogue:
            return unrounded[v]
        return jnp.asarray(read(v)).astype(jnp.float32)

    def step(eqn: JaxprEqn, read: Read) -> Sequence[Any]:
        out, epilogue = eqn.outvars[0] if eqn.outvars else None, None
        if out in matches.epilogues:
            epilogue = matches.epilogues[out]
            if out is epilogue.dot.out:
                product = _product(program.jaxpr, epilogue, read, emulation.chip)
            else:
                factor = epilogue.factors.get(out)
                operands = [float32(epilogue, v, read) for v in epilogue.operands(eqn)]
                product = gemm.step(eqn, operands, None if factor is None else factor.read(read))
            unrounded[out] = product
            return [gemm.rounded(product, aval_of(out).dtype)]
        if out in matches.quotients:
            return [gemm.rounded(matches.quotients[out].read(read), aval_of(out).dtype)]
        if eqn.primitive.name == "ragged_dot_general" and matches.reasons[eqn.outvars[0]] is None:
            return [gemm.ragged_dot(eqn, *map(read, eqn.invars), chip=emulation.chip)]
        if eqn.primitive.name in SCALED_DOTS and emulation.listen is None:
            product = _scaled_dot(eqn, [read(v) for v in eqn.invars], emulation.chip)
            if product is not None:
                return [product]
        if eqn.primitive.name == "shard_map":
            return _in_shards(eqn, [read(v) for v in eqn.invars], emulation)
        return run(program.jaxpr, _with_emulated_bodies(eqn, emulation), read)

    return evaluate(program, args, step)


def _product(jaxpr: Jaxpr, epilogue: Epilogue, read: Read, chip: Chip) -> jax.Array:
    """The product of a float8 GEMM: as the dot gives it, or float32 for its epilogue."""
    dot, planned = epilogue.dot, aval_of(epilogue.dot.out).dtype
    out = jnp.dtype(jnp.float32) if epilogue.steps or planned in gemm.FLOAT8 else planned
    left, right = (operand.read(jaxpr, read) for operand in (dot.left, dot.right))
    scales = [None if scale is None else scale.read(read) for scale in dot.scales]
    dims = dot.eqn.params["dimension_numbers"]
    return gemm.dot(left, right, dims, out=out, planned=planned, fast=dot.is_fast, chip=chip, scales=scales)


def _scaled_dot(eqn: JaxprEqn, operands: list[Any], chip: Chip) -> jax.Array | None:
    """[XLA-10] A dot with block scales; None: XLA dequantizes, as JAX itself does for `lax.scaled_dot`."""
    reason = gemm.why_no_scaled_dot(eqn, chip)
    if reason is None:
        return gemm.scaled_dot(eqn, *map(jnp.asarray, operands), chip=chip)
    if eqn.primitive.name == SCALED_MATMUL and jax.default_backend() == "cpu":
        raise UnsupportedError(
            f"emulate: JAX has no jax.nn.scaled_matmul on a CPU, other than of MXFP8 with chip='B200'; got {reason}"
        )
    return None


def _with_emulated_bodies(eqn: JaxprEqn, emulation: Emulation) -> JaxprEqn:
    """A loop or a branch, its programs emulated; any other equation as it is."""

    def emulated(body: ClosedJaxpr, number: int = 0) -> ClosedJaxpr:
        within = emulation.within(eqn, number)
        return jax.make_jaxpr(lambda *args: evaluated(body, args, within))(*body.in_avals)

    match eqn.primitive.name:
        case "scan" | "while":
            bodies = {name: emulated(x) for name, x in eqn.params.items() if isinstance(x, ClosedJaxpr)}
        case "cond":
            branches = eqn.params["branches"]
            bodies = {"branches": tuple(emulated(branch, i) for i, branch in enumerate(branches))}
        case _:
            return eqn
    return eqn.replace(params={**eqn.params, **bodies})


def _in_shards(eqn: JaxprEqn, args: list[Any], emulation: Emulation) -> Sequence[Any]:
    body, within = closed(eqn.params["jaxpr"]), emulation.within(eqn)

    def emulated(*args: Any) -> tuple[Any, ...]:
        return tuple(evaluated(body, args, within))

    specs = {name: eqn.params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    return jax.shard_map(emulated, **specs, axis_names=eqn.params["newly_manual_axes"])(*args)
