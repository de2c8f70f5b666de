"""Llama's feed-forward block in JAX, forward and backward: bfloat16, flax's float8 and f8emu, timed side by side.

    python -m benchmarks.jax_feed_forward --json OUT    RMSNorm, w1, w3, SiLU, product, w2, residual; 8,192 tokens
    python -m benchmarks.jax_feed_forward --blocks 4    several in a row

A recipe is `dot_general` for each of the three layers.

Every subject is one program: the forward pass, the gradients of weights and input, and under delayed scaling the next
states. Subjects take turns for several rounds, steps run back to back, and the figure is the median over rounds. Memory
is the compiler's account of the program (`memory_analysis`): results and temporaries. Exit status 1 if a program of
f8emu has a GEMM of codes that is no call of cuBLASLt on a GPU, or gives something that is not finite.
"""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import f8emu.jax
from benchmarks import runner
from benchmarks.runner import BASELINE, Entry
from f8emu.spec import RECIPES, recipe_by_name

FLAX = ("flax/Fp8DirectDotGeneralOp", "flax/Fp8DotGeneralOp")
SUBJECTS = (BASELINE, *FLAX, *(f"f8emu/{name}" for name in RECIPES))
FLOAT8_GEMM = "__cublas$lt$matmul$f8"  # XLA's name for cuBLASLt's float8 GEMM
BENCH = runner.Bench(
    "benchmarks.jax_feed_forward",
    __doc__,
    runner.option("subjects", SUBJECTS, choices=SUBJECTS),
    runner.option("blocks", 1, "in a row"),
    runner.option("tokens", 8192),
    runner.option("dim", 4096),
    runner.option("hidden", 14336),
    *runner.turns_of(7, 10),
)
_COLUMNS = "ms:.3f bounds speed:.3f bytes:GiB memory:.3f float8_gemms: triton_kernels:"


def main(argv: Sequence[str] | None = None) -> int:
    is_gpu = jax.default_backend() == "gpu"
    run = BENCH.parse(argv, device="cuda" if is_gpu else "cpu")
    arguments = run.arguments
    sizes = {name: getattr(arguments, name) for name in ("blocks", "tokens", "dim", "hidden", "rounds", "steps")}
    tensors = _tensors(arguments.tokens, arguments.dim, arguments.hidden, arguments.blocks)
    entries: list[Entry] = [{"subject": name} for name in arguments.subjects]
    turn = functools.partial(_back_to_back, steps=arguments.steps)
    runner.race(entries, lambda entry: _prepared(entry, tensors), turn, arguments.rounds)
    runner.add_ratios(entries, {"memory": "bytes"})
    blocks = f"{arguments.blocks} feed-forward block(s), {arguments.dim} -> {arguments.hidden} -> {arguments.dim}"
    title = f"{blocks}, {arguments.tokens} tokens, forward + backward; speed and memory: times bf16's"
    runner.draw_entries(title, entries, _COLUMNS)
    run.record(**sizes, subjects=entries)
    return int(any(runner.is_wrong(e) or (is_gpu and _lacks_gemms(e, arguments.blocks)) for e in entries))


# 1 How a subject multiplies

Linear = Callable[[jax.Array, jax.Array], jax.Array]


class Layers(NamedTuple):
    """The layers of a subject; most have no states."""

    linears: Callable[[Sequence[Any]], Sequence[Linear]]  # of the states, one each
    states: list[Any]
    updated: Callable[[Any, Any], Any]  # (states, their gradients) -> those of the next step
    # What a state becomes after the first step, before the program is compiled.
    settled: Callable[[Any], Any] | None = None


def _layers(subject: str, matrices: Sequence[jax.Array]) -> Layers:
    library, _, name = subject.partition("/")
    if library == "flax":
        return _of_flax(name, matrices)
    recipe = None if subject == BASELINE else recipe_by_name(name)
    if recipe is None or recipe.delayed is None:
        bf16 = functools.partial(lax.dot_general, preferred_element_type=jnp.bfloat16)
        product: Any = bf16 if recipe is None else f8emu.jax.dot_general(recipe)
        linear = lambda x, w: product(x, w, _last_by_first(x))  # noqa: E731
        return Layers(lambda states: [linear for _ in states], [() for _ in matrices], lambda states, _: states)
    delayed: Any = f8emu.jax.delayed_dot_general(recipe)

    def linears(states: Sequence[Any]) -> list[Linear]:
        return [lambda x, w, s=s: delayed(x, w, s, _last_by_first(x)) for s in states]

    def updated(states: Sequence[Any], amaxes: Sequence[Any]) -> list[Any]:
        return [f8emu.jax.linear_delayed_update(*both, recipe) for both in zip(states, amaxes, strict=True)]

    states = [f8emu.jax.linear_delayed_state(recipe) for _ in matrices]
    return Layers(linears, states, updated, f8emu.jax.linear_delayed_settled)


def _last_by_first(x: jax.Array) -> Any:
    """The dimension numbers of `x @ w`."""
    return ((x.ndim - 1,), (0,)), ((), ())


def _of_flax(name: str, matrices: Sequence[jax.Array]) -> Layers:
    try:
        from flax import linen
        from flax.linen import fp8_ops
    except ImportError as error:
        raise runner.AbsentError(str(error)) from error

    options: dict[str, Any] = {"use_bias": False, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    # Each layer is applied by itself, so that the block is the same code for every subject.
    layers = [linen.Dense(w.shape[1], dot_general_cls=getattr(fp8_ops, name), **options) for w in matrices]

    def first(path: Any, like: Any) -> jax.Array:
        """flax starts with scales of one and histories of zeros."""
        return jnp.full(like.shape, float("scale" in jax.tree_util.keystr(path)), like.dtype)

    states: list[Any] = []
    for layer, w in zip(layers, matrices, strict=True):
        shapes = jax.eval_shape(layer.init, jax.random.key(0), jax.ShapeDtypeStruct((1, w.shape[0]), jnp.bfloat16))
        states.append(jax.tree.map_with_path(first, {key: of for key, of in shapes.items() if key != "params"}))

    def linears(states: Sequence[Any]) -> list[Any]:
        return [
            lambda x, w, layer=layer, s=s: layer.apply({"params": {"kernel": w}, **s}, x)
            for layer, s in zip(layers, states, strict=True)
        ]

    return Layers(linears, states, lambda _, overwritten: overwritten)  # by their gradients


# 2 The program


def _step(layers: Layers, states: Any, x: jax.Array, grad: jax.Array, *weights: jax.Array) -> Any:
    """Output, gradients of input and weights, and the next states."""

    def blocks(x: jax.Array, weights: Sequence[jax.Array], states: Sequence[Any]) -> jax.Array:
        return _blocks(layers.linears(states), x, weights)

    output, backward = jax.vjp(blocks, x, weights, states)
    # The gradient comes once the output is there, as a loss has it; else XLA computes parts of both passes at once.
    *grads, of_states = backward(lax.optimization_barrier((output, grad))[1])
    return output, grads, layers.updated(states, of_states)


def _blocks(linears: Sequence[Linear], x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
    """Blocks in a row, of four weights and three layers each: of the norm, w1, w3, w2."""
    for i in range(len(weights) // 4):
        norm, w1, w3, w2 = weights[4 * i : 4 * i + 4]
        first, third, second = linears[3 * i : 3 * i + 3]
        wide = x.astype(jnp.float32)
        normalized = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
        y = normalized.astype(jnp.bfloat16) * norm
        x = x + second(jax.nn.silu(first(y, w1)) * third(y, w3), w2)
    return x


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _tensors(tokens: int, dim: int, hidden: int, blocks: int) -> tuple[jax.Array, ...]:
    """Input, gradient; of each block the weight of the norm, w1, w3, w2."""
    shapes = ((tokens, dim), (tokens, dim), *((dim,), (dim, hidden), (dim, hidden), (hidden, dim)) * blocks)
    factors = (1.0, 0.01, *(0.1, dim**-0.5, dim**-0.5, hidden**-0.5) * blocks)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    drawn = (
        jax.random.normal(key, shape, jnp.float32) * factor
        for key, shape, factor in zip(keys, shapes, factors, strict=True)
    )
    return tuple((x + 1 if x.ndim == 1 else x).astype(jnp.bfloat16) for x in drawn)


def _prepared(entry: Entry, tensors: tuple[jax.Array, ...]) -> Callable[[], Any]:
    """The compiled step; what is known of it goes into `entry`."""
    layers = _layers(entry["subject"], [w for w in tensors[2:] if w.ndim == 2])  # without those of norms
    step, states = functools.partial(_step, layers), layers.states
    if layers.settled is not None:
        *_, states = f8emu.jax.jit(step)(states, *tensors)  # scales of an earlier step
        states = [layers.settled(state) for state in states]
    # Compiled ahead of time, so that the program can be looked at: its GEMMs, its memory.
    arguments = (states, *tensors)
    start = time.perf_counter()
    compiled = f8emu.jax.jit(step).lower(*arguments).compile()
    entry["compile_s"] = time.perf_counter() - start
    text = compiled.as_text()
    entry["float8_gemms"] = text.count(f'custom_call_target="{FLOAT8_GEMM}"')
    entry["triton_kernels"] = text.count('custom_call_target="__gpu$xla.gpu.triton"')
    memory = compiled.memory_analysis()
    entry["bytes"] = memory.output_size_in_bytes + memory.temp_size_in_bytes
    entry["peak_bytes"] = getattr(memory, "peak_memory_in_bytes", None)  # with the arguments, of later versions of JAX
    results = jax.block_until_ready(compiled(*arguments))
    entry["is_finite"] = all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in jax.tree.leaves(results[:2]))
    return functools.partial(compiled, *arguments)


# 3 Its figures


def _back_to_back(call: Callable[[], Any], steps: int) -> float:
    """Milliseconds a step."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    result = None
    for _ in range(steps):
        result = call()
    jax.block_until_ready(result)
    return 1e3 * (time.perf_counter() - start) / steps


def _lacks_gemms(entry: Entry, blocks: int) -> bool:
    """Whether a GEMM of codes is no call of cuBLASLt, which has none of blocks."""
    library, _, name = entry["subject"].partition("/")
    if library != "f8emu" or recipe_by_name(name).output.a.granularity.is_blockwise:
        return False
    gemms = sum(3 for gemm in recipe_by_name(name).gemms.values() if not gemm.is_high_precision)
    return entry["float8_gemms"] != gemms * blocks


if __name__ == "__main__":
    sys.exit(main())
