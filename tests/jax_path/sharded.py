"""Layers on 8 virtual devices, each case in terms of the oracle: run by `test_sharding`, in a process of its own.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 PYTHONPATH=.:reference python -m tests.jax_path.sharded

The oracle makes the codes of the whole matrices. Where both operands of a GEMM are divided along K, it multiplies each
part, and the same devices add the products; everywhere else bits are those of one device.
"""

import functools
import gc
import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import f8emu.jax as f8
import f8ref.numpy as reference
from f8emu.spec import DELAYED, TENSORS, Granularity, OperandError, Recipe, UnsupportedError, recipe_by_name
from f8emu.spec.gemm import GemmTrace, OperandTrace
from tests.jax_path.layers import KERNEL, assert_same_bits, draw

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
DATA, MODEL, BOTH = "data", "model", ("data", "model")
NAMES = ("output", "grad_input", "grad_weight")
SIZES = (72, 80, 48)


def tensors(m: int, k: int, n: int) -> Arrays:
    """input [M, K], kernel [K, N] and grad_output [M, N], whose magnitudes grow: each part has another amax."""
    drawn = []
    for seed, (rows, columns) in enumerate(((m, k), (k, n), (m, n))):
        size = np.exp2(4 * np.arange(rows) / rows)[:, None] * np.exp2(4 * np.arange(columns) / columns)
        values = draw(rows, columns, seed=seed, dtype="float32") * size.astype(np.float32)
        drawn.append(values.astype(jnp.dtype(jnp.bfloat16)))
    return drawn[0], drawn[1], drawn[2]


def oracle(recipe: Recipe, arrays: Arrays, parts: Mapping[str, int]) -> tuple[Arrays, list[np.float32]]:
    """output, grad_input and the gradient of the kernel, and amaxes; `parts` of K by GEMM are multiplied alone."""
    x, kernel, g = arrays
    options: dict[str, Any] = {}
    if recipe.delayed is not None:
        options["delayed_state"] = {name: reference.initial_delayed_state(recipe.delayed) for name in TENSORS}
    trace = reference.linear(recipe, x, kernel.T.copy(), g, **options)
    gemms = trace._asdict()
    output, grad_input, grad_weight = (summed(recipe, name, gemms[name], parts.get(name, 1)) for name in NAMES)
    amaxes = [gemms[name].a.amax for name in ("output", "grad_input")]
    of_tensors = [amaxes[0], trace.output.b.amax, amaxes[1]] if recipe.delayed is not None else []
    return (output, grad_input, grad_weight.T.copy()), [np.float32(np.max(amax)) for amax in of_tensors]


def summed(recipe: Recipe, name: str, gemm: GemmTrace, parts: int) -> np.ndarray:
    """The product of a GEMM, or the sum over devices of the products of the parts of K."""
    if parts == 1:
        return gemm.product
    spec = recipe.gemms[name]
    codes_a, codes_b = (np.split(x.codes, parts, axis=1) for x in (gemm.a, gemm.b))
    if spec.is_high_precision:
        products = [reference.mm(a, b.T) for a, b in zip(codes_a, codes_b, strict=True)]
    else:
        kinds = spec.scaled_gemm_granularities
        scales_a, scales_b = (scales_of(x, k, parts) for x, k in zip((gemm.a, gemm.b), kinds, strict=True))
        how = {"granularity_a": kinds[0], "granularity_b": kinds[1], "use_fast_accum": spec.use_fast_accum}
        products = [
            reference.scaled_mm(a, b.T, s_a, s_b.T, **how)
            for a, b, s_a, s_b in zip(codes_a, codes_b, scales_a, scales_b, strict=True)
        ]
    mesh = mesh_of(parts)
    add = jax.shard_map(lambda x: jax.lax.psum(x[0], DATA), mesh=mesh, in_specs=P(DATA), out_specs=P())
    return np.asarray(jax.jit(add)(np.stack(products)))


def scales_of(operand: OperandTrace, granularity: Granularity, parts: int) -> list[np.ndarray]:
    """The scales of each part of K."""
    if granularity.is_blockwise:
        return np.split(operand.scale, parts, axis=1)
    is_rowwise = granularity is Granularity.ROWWISE
    return [np.broadcast_to(operand.scale, (len(operand.codes), 1)) if is_rowwise else operand.scale] * parts


def mesh_of(*shape: int, explicit: bool = False) -> Mesh:
    """A mesh of the first devices, with axes data and model."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, BOTH[: len(shape)], axis_types=(kind,) * len(shape), devices=devices)


def layer(recipe: Recipe, **options: Any) -> Callable[..., Any]:
    """(input, kernel, state) -> output."""
    if recipe.delayed is None:
        multiply = f8.dot_general(recipe, **{k: v for k, v in options.items() if k != "out_sharding"})
        return lambda x, w, s: multiply(x, w, KERNEL, out_sharding=options.get("out_sharding"))
    delayed = f8.delayed_dot_general(recipe, **options)
    return lambda x, w, s: delayed(x, w, s, KERNEL)


def step(function: Callable[..., Any], x: Any, w: Any, g: Any, s: Any) -> Any:
    output, pull = jax.vjp(function, x, w, s)
    return output, *pull(g)


def state_of(recipe: Recipe) -> Any:
    return None if recipe.delayed is None else f8.linear_delayed_state(recipe)


def placed(mesh: Mesh, arrays: Any, specs: Any) -> list[Any]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


def assert_right(results: Any, recipe: Recipe, arrays: Arrays, parts: Mapping[str, int]) -> None:
    wanted, amaxes = oracle(recipe, arrays, parts)
    for name, observed, right in zip(NAMES, results, wanted, strict=False):
        try:
            assert_same_bits(observed, right)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    if amaxes:
        assert [float(of.amax_history[0]) for of in results[3]] == amaxes
        assert all(not np.asarray(of.amax_history[1:]).any() and float(of.inv_scale) == 1 for of in results[3])


def gathers(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """dtype and shape of every all-gather of a compiled program."""
    lines = re.findall(r"= (.*?) all-gather(?:-start)?\(", text)
    arrays = [a for line in lines for a in re.findall(r"(\w+)\[([\d,]*)\]", line)]
    return [(dtype, tuple(int(n) for n in shape.split(",") if n)) for dtype, shape in arrays]


def assert_gathers_codes(text: str, at_least: int) -> None:
    """Of matrices only codes are gathered; scales of rows are vectors."""
    matrices = [(dtype, shape) for dtype, shape in gathers(text) if sum(n > 4 for n in shape) > 1]
    assert all(dtype in ("u8", "f8e4m3fn", "f8e5m2") for dtype, _ in matrices), matrices
    assert len(matrices) >= at_least, matrices


# Programs that XLA partitions


def by_xla(
    recipe: str,
    shape: tuple[int, ...],
    specs: tuple[P, P, P],
    *,
    parts: Mapping[str, int] | None = None,
    gathered: int = 0,
    explicit: bool = False,
    sizes: tuple[int, int, int] = SIZES,
    jit: Any = jax.jit,
) -> None:
    """Output, gradients and amaxes of a layer whose input, kernel and output are sharded by `specs`.

    `parts` of K are summed; None gathers codes instead. `gathered` is the number of gathers of codes, at least.
    """
    spec, mesh, arrays = recipe_by_name(recipe), mesh_of(*shape, explicit=explicit), tensors(*sizes)
    of_x, of_w, of_y = (NamedSharding(mesh, p) for p in specs)
    way = "gather" if parts is None else "sum"
    options: dict[str, Any] = {"out_sharding": of_y} if explicit else {}
    run = functools.partial(step, layer(spec, sharded_k=way, **options))
    operands = *placed(mesh, arrays, (specs[0], specs[1], specs[2])), state_of(spec)
    shardings = (of_y, of_x, of_w, NamedSharding(mesh, P()))
    program = jit(run, **({} if explicit else {"out_shardings": shardings})).lower(*operands).compile()
    results = program(*operands)
    assert [x.sharding.is_equivalent_to(s, 2) for x, s in zip(results, shardings[:3], strict=False)] == [True] * 3
    assert_right(results, spec, arrays, parts or {})
    # A program that is told to gather codes along K gathers products too.
    if parts is not None:
        assert_gathers_codes(program.as_text(), gathered)


# jax.shard_map


def by_hand(
    recipe: str,
    shape: tuple[int, ...],
    specs: tuple[P, P, P],
    parts: Mapping[str, int],
    *,
    gathered: int = 0,
    outside: bool = True,
    sizes: tuple[int, int, int] = SIZES,
) -> None:
    """The same in `jax.shard_map`, differentiated outside of it or inside; the user adds the outputs of parts of K."""
    spec, mesh, arrays = recipe_by_name(recipe), mesh_of(*shape), tensors(*sizes)
    of_k = specs[0][1] if len(specs[0]) > 1 else None
    part = layer(spec, in_specs=specs[:2])

    def inner(x: Any, w: Any, s: Any) -> Any:
        return jax.lax.psum(part(x, w, s), of_k) if of_k else part(x, w, s)

    if outside:
        run = functools.partial(step, jax.shard_map(inner, mesh=mesh, in_specs=(*specs[:2], P()), out_specs=specs[2]))
    else:
        run = jax.shard_map(
            functools.partial(step, inner),
            mesh=mesh,
            in_specs=(*specs, P()),
            out_specs=(specs[2], specs[0], specs[1], P()),
        )
    operands = *placed(mesh, arrays, specs), state_of(spec)
    program = f8.jit(run).lower(*operands).compile()
    assert_right(program(*operands), spec, arrays, parts)
    assert_gathers_codes(program.as_text(), gathered)


def planted_local_scales() -> None:
    """Without in_specs, and with a dimension left out of them, scales are those of a device: the comparison sees it."""
    spec, mesh, arrays = recipe_by_name("tensorwise"), mesh_of(4), tensors(*SIZES)
    (wanted, _, _), _ = oracle(spec, arrays, {})
    for in_specs, is_right in ((None, False), ((P(), P()), False), ((P(DATA), P()), True)):
        part = layer(spec, in_specs=in_specs)
        run = jax.shard_map(lambda x, w: part(x, w, None), mesh=mesh, in_specs=(P(DATA), P()), out_specs=P(DATA))  # noqa: B023
        observed = np.asarray(jax.jit(run)(*arrays[:2]))
        assert (observed.view(np.uint16) == wanted.view(np.uint16)).all() == is_right


def training() -> None:
    """Three steps of delayed scaling under FSDP, state in and out: the states of one device."""
    mesh, recipe, specs = mesh_of(len(jax.devices())), DELAYED, (P(DATA), P(DATA), P(DATA))
    part = f8.delayed_dot_general(in_specs=specs[:2])
    sharded = jax.shard_map(
        lambda x, w, s: part(x, w, s, KERNEL), mesh=mesh, in_specs=(*specs[:2], P()), out_specs=specs[2]
    )

    @f8.jit
    def one_step(x: Any, w: Any, g: Any, state: Any) -> Any:
        *_, amaxes = step(sharded, x, w, g, state)
        return f8.linear_delayed_update(state, amaxes, recipe)

    delayed, formats = recipe.delayed, [recipe.output.a.format, recipe.output.b.format, recipe.grad_input.a.format]
    assert delayed is not None
    state = f8.linear_delayed_state()
    wanted = {name: reference.initial_delayed_state(delayed) for name in TENSORS}
    for i in range(3):
        x, w, g = (a * np.array(2.0**i, a.dtype) for a in tensors(*SIZES))
        state = one_step(x, w, g, state)
        trace = reference.linear(recipe, x, w.T.copy(), g, delayed_state=wanted)
        assert trace.grad_input is not None
        amaxes = (trace.output.a.amax, trace.output.b.amax, trace.grad_input.a.amax)
        for name, amax, format, of_tensor in zip(TENSORS, amaxes, formats, state, strict=True):
            assert format is not None
            newest = np.float32(np.max(amax))
            wanted[name] = reference.update_delayed_state(wanted[name], newest, format, recipe.scale_rule, delayed)
            assert_same_bits(of_tensor.amax_history, wanted[name].amax_history)
            assert_same_bits(of_tensor.inv_scale, np.asarray(wanted[name].inv_scale))


def refusals() -> None:
    """What cannot be right says so when it is traced."""
    mesh, (x, w, _) = mesh_of(2, 2), tensors(256, 256, 64)
    state = f8.linear_delayed_state()

    def traced(specs: tuple[P, P, P], part: Callable[..., Any], **options: Any) -> Any:
        inner = jax.shard_map(part, mesh=mesh, in_specs=(*specs[:2], P()), out_specs=specs[2], **options)
        jax.eval_shape(functools.partial(jax.grad(lambda x, w, s: inner(x, w, s).astype("f").sum(), 2), x, w), state)

    rows = (P(DATA), P(), P(DATA))
    delayed = f8.delayed_dot_general(in_specs=rows[:2])

    def with_specs(of_lhs: P, of_rhs: P) -> Any:
        return traced(rows, layer(DELAYED, in_specs=(of_lhs, of_rhs)))

    def unchecked() -> Any:
        return traced(rows, lambda x, w, s: delayed(x, w, s, KERNEL), check_vma=False)

    def parts_of_blocks() -> Any:
        part = f8.dot_general("blockwise", in_specs=(P(), P(None, MODEL)))
        specs: dict[str, Any] = {"in_specs": (P(), P(None, MODEL)), "out_specs": P(None, MODEL)}
        return jax.eval_shape(jax.shard_map(lambda x, w: part(x, w, KERNEL), mesh=mesh, **specs), x, w)

    def other_axes() -> Any:
        specs: dict[str, Any] = {"in_specs": (P(DATA), P()), "out_specs": P(DATA), "axis_names": {DATA}}
        part = jax.shard_map(lambda x, w: f8.dot_general("rowwise")(x, w, KERNEL), mesh=mesh, **specs)
        return f8.jit(part).trace(*placed(mesh, (x, w), (P(DATA), P()))).lower(lowering_platforms=("cuda",))

    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (OperandError, "one that varies along .'data'.", lambda: traced(rows, layer(DELAYED))),
        (UnsupportedError, "leave check_vma True", unchecked),
        (OperandError, "must be the PartitionSpecs", lambda: layer(DELAYED, in_specs=P(DATA))),
        (OperandError, "sharded_k must be one of", lambda: f8.dot_general("rowwise", sharded_k="add")),  # pyright: ignore[reportArgumentType]
        (OperandError, "under jax.jit alone leave in_specs out", lambda: delayed(x, w, state, KERNEL)),
        (OperandError, "at most its 2 dimensions", lambda: with_specs(P(DATA), P(None, None, None))),
        (OperandError, "along the same axes", lambda: with_specs(P(DATA, MODEL), P())),
        (OperandError, "after axes that stay", lambda: with_specs(P(DATA), P(None, BOTH))),
        (OperandError, "must be a multiple of 128; got 32 along model", parts_of_blocks),
        (UnsupportedError, "axes that axis_names leaves out", other_axes),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


def emulated() -> None:
    """`f8.emulate` of unmodified dots: XLA's partition, and a `jax.shard_map` with a sum along K."""
    shapes, dtype = ((64, 256), (256, 96)), jnp.float8_e4m3fn
    a, b = (jnp.asarray(draw(*shape, seed=seed)).astype(dtype) for seed, shape in enumerate(shapes))

    def of_chip(a: jax.Array, b: jax.Array) -> jax.Array:
        unit = jnp.ones((), jnp.float32)
        return f8.scaled_mm(a, b, unit, unit, out_dtype="float32", use_fast_accum=True)

    whole, parts = of_chip(a, b), of_chip(a[:, :128], b[:128]) + of_chip(a[:, 128:], b[128:])
    mesh = jax.make_mesh((4, 2), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)

    def product(a: Any, b: Any) -> jax.Array:
        return jnp.dot(a, b, preferred_element_type=jnp.float32)

    def summed(a: Any, b: Any) -> jax.Array:
        return jax.lax.psum(product(a, b), MODEL)

    for specs in ((P(DATA), P(None, MODEL)), (P(BOTH), P())):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((a, b), specs, strict=True)]
        assert_same_bits(jax.jit(f8.emulate(product))(*placed), whole)
    by_hand = jax.shard_map(summed, mesh=mesh, in_specs=(P(DATA, MODEL), P(MODEL)), out_specs=P(DATA))
    assert_same_bits(jax.jit(f8.emulate(by_hand))(a, b), parts)
    assert [dot.place for dot in f8.explain(by_hand)(a, b).dots] == ["shard_map"]


COLUMN, ROW = (P(DATA), P(None, MODEL), P(DATA, MODEL)), (P(DATA, MODEL), P(MODEL), P(DATA))
FSDP_COLUMN, FSDP_ROW = (P(DATA), P(DATA, MODEL), P(DATA, MODEL)), (P(DATA, MODEL), P(MODEL, DATA), P(DATA))
CASES: dict[str, Callable[[], None]] = {
    "data parallel, tensorwise": lambda: by_xla("tensorwise", (8,), (P(DATA), P(), P(DATA)), parts={"grad_weight": 8}),
    "fsdp and column, rowwise": lambda: by_xla(
        "rowwise", (4, 2), FSDP_COLUMN, parts={"grad_input": 2, "grad_weight": 4}, gathered=2, jit=f8.jit
    ),
    "fsdp and row, rowwise_with_gw_hp": lambda: by_xla(
        "rowwise_with_gw_hp", (2, 4), FSDP_ROW, parts={"output": 4, "grad_weight": 2}, gathered=2
    ),
    "fsdp and row, delayed": lambda: by_xla(
        "delayed", (2, 4), FSDP_ROW, parts={"output": 4, "grad_weight": 2}, gathered=2
    ),
    "fsdp and column, tensorwise, codes of K gathered": lambda: by_xla("tensorwise", (4, 2), FSDP_COLUMN),
    "fsdp, blockwise, codes of K gathered": lambda: by_xla("blockwise", (2, 2), FSDP_ROW, sizes=(256, 256, 256)),
    "data parallel, mxfp8, fewer blocks than devices": lambda: by_xla(
        "mxfp8", (4,), (P(DATA), P(), P(DATA)), sizes=(64, 128, 64)
    ),
    "explicit axes, column, tensorwise": lambda: by_xla(
        "tensorwise", (4, 2), COLUMN, parts={"grad_input": 2, "grad_weight": 4}, explicit=True
    ),
    "shard_map, fsdp and row, tensorwise": lambda: by_hand(
        "tensorwise", (4, 2), FSDP_ROW, {"output": 2, "grad_weight": 4}, gathered=2
    ),
    "shard_map, fsdp and column, rowwise": lambda: by_hand(
        "rowwise", (2, 4), FSDP_COLUMN, {"grad_input": 4, "grad_weight": 2}, gathered=2, outside=False
    ),
    "shard_map, row, delayed": lambda: by_hand("delayed", (2, 4), ROW, {"output": 4, "grad_weight": 2}, outside=False),
    "shard_map, fsdp, blockwise": lambda: by_hand(
        "blockwise", (2,), (P(DATA), P(DATA), P(DATA)), {"grad_weight": 2}, gathered=2, sizes=(256, 256, 128)
    ),
    "shard_map, local scales": planted_local_scales,
    "shard_map, three steps of delayed": training,
    "refusals": refusals,
    "emulate": emulated,
}


def main() -> None:
    """Prints a JSON object: nothing of a case that is right, the traceback of another."""
    warnings.simplefilter("ignore")
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # as in conftest.py
    assert len(jax.devices()) == 8, "XLA_FLAGS=--xla_force_host_platform_device_count=8"
    results, wanted = {}, sys.argv[1:]
    for name, case in CASES.items():
        if wanted and not any(word in name for word in wanted):
            continue
        try:
            case()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc(limit=-6)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
