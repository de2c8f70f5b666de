"""What XLA makes of float8 GEMMs in programs as people write them, compiled for an H200 without one.

    PYTHONPATH=.:reference JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 /tmp/jax11/bin/python -m benchmarks.proofs.jax_programs

/tmp/jax11 as `absent_h200` says. XLA rewrites what stands around a GEMM (NUMERICS 7), so every GEMM of codes must be a
call of cuBLASLt that adds nothing of its own: no codes are widened for another one, and where a recipe folds its scales
into the call, they must be in it. Exit status 1 if one is not.
"""

import argparse
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax

import f8emu.jax
from benchmarks.proofs.absent_h200 import absent_h200, shapes_on
from f8emu.jax.hosts.flax_linen import Float8DotGeneral

FOLDED = {"tensorwise", "delayed"}
"""Recipes that multiply a GEMM by one factor. Those of the others have scales for every row, or a GEMM of bfloat16."""
RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp")
SIZES = ((32, 64), (2048, 2048))
"""Tokens of a sequence, and the model's width."""
_FLOAT8_GEMM = "__cublas$lt$matmul$f8"
_BATCH = 2

Program = tuple[Callable[..., Any], tuple[Any, ...]]


class Block(nn.Module):
    """A transformer's block of flax's own modules, with biases: q, k and v share an input."""

    recipe: str

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        product = functools.partial(Float8DotGeneral, recipe=self.recipe)
        dense = functools.partial(nn.Dense, dtype=jnp.bfloat16, dot_general_cls=product)
        attention = nn.MultiHeadAttention(
            4, dtype=jnp.bfloat16, qkv_dot_general_cls=product, out_dot_general_cls=product
        )
        x = x + attention(nn.LayerNorm()(x))
        y = nn.LayerNorm()(x)
        y = nn.silu(dense(4 * x.shape[-1])(y)) * dense(4 * x.shape[-1])(y)
        return x + dense(x.shape[-1])(y), None


class Stack(nn.Module):
    """Two blocks, one after another, or one in a scan that computes its forward pass again."""

    recipe: str
    is_scanned: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.is_scanned:
            return Block(self.recipe)(Block(self.recipe)(x)[0])[0]
        axes: dict[Any, Any] = {"params": 0, nn.fp8_ops.OVERWRITE_WITH_GRADIENT: 0}
        blocks = nn.scan(nn.remat(Block), variable_axes=axes, split_rngs={"params": True}, length=2)
        return blocks(self.recipe)(x, None)[0]


def training_step(recipe: str, length: int, dim: int, is_scanned: bool) -> Program:
    """Loss, gradients and the update of an optimizer."""
    model = Stack(recipe, is_scanned)
    x = jnp.zeros((_BATCH, length, dim), jnp.bfloat16)

    def step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
        loss = lambda variables: jnp.mean((state.apply_fn(variables, x).astype(jnp.float32) - y) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    def made() -> TrainState:
        params = model.init(jax.random.key(0), x)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    return step, (jax.eval_shape(made), x, x.astype(jnp.float32))


def multiply(recipe: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` of a kernel [K, N]; under delayed scaling with a state that nobody keeps."""
    kernel = (((1,), (0,)), ((), ()))
    if recipe != "delayed":
        return f8emu.jax.dot_general(recipe)(x, w, kernel)
    return f8emu.jax.delayed_dot_general(recipe)(x, w, f8emu.jax.linear_delayed_state(recipe), kernel)


def gradients(recipe: str, length: int, dim: int, is_transposed: bool) -> Program:
    """Of the kernels [K, N] of two layers of one input, as they are or transposed, over two parts of a batch."""
    rows = _BATCH * length

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return sum((jnp.sum(jnp.tanh(multiply(recipe, x, w).astype(jnp.float32))) for w in weights), jnp.zeros(()))

    def step(weights: list[jax.Array], parts: jax.Array) -> list[jax.Array]:
        def one_part(total: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], None]:
            found = jax.grad(loss)(weights, x)
            return [a + (b.T if is_transposed else b) for a, b in zip(total, found, strict=True)], None

        zeros = [jnp.zeros_like(w.T if is_transposed else w) for w in weights]
        return lax.scan(one_part, zeros, parts)[0]

    weights = [jnp.zeros((dim, n), jnp.bfloat16) for n in (dim, 2 * dim)]
    return step, (weights, jnp.zeros((2, rows, dim), jnp.bfloat16))


def outputs(recipe: str, length: int, dim: int) -> Program:
    """The forward pass alone, of a batch that `jax.vmap` maps, with a residual and as float32."""

    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.vmap(lambda x: multiply(recipe, x, w))(x)
        return y + x, y.astype(jnp.float32)

    return step, (jnp.zeros((_BATCH, length, dim), jnp.bfloat16), jnp.zeros((dim, dim), jnp.bfloat16))


def feed_forward(recipe: str, length: int, dim: int) -> Program:
    """Gradients of two blocks with residuals, in a scan that computes the forward pass again."""

    def block(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        if recipe != "delayed":
            return x + f8emu.jax.feed_forward(recipe)(x, *weights), None
        states = [f8emu.jax.linear_delayed_state(recipe) for _ in weights]
        return x + f8emu.jax.delayed_feed_forward(recipe)(x, *weights, states=states), None

    def loss(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(lax.scan(jax.checkpoint(block), x, weights)[0].astype(jnp.float32)))

    shapes = ((2, dim, 4 * dim), (2, 4 * dim, dim), (2, dim, 4 * dim))
    weights = tuple(jnp.zeros(shape, jnp.bfloat16) for shape in shapes)
    return jax.grad(loss, argnums=(0, 1)), (weights, jnp.zeros((_BATCH, length, dim), jnp.bfloat16))


PROGRAMS: dict[str, Callable[[str, int, int], Program]] = {
    "a training step of flax": functools.partial(training_step, is_scanned=False),
    "the same, scanned and recomputed": functools.partial(training_step, is_scanned=True),
    "accumulated gradients": functools.partial(gradients, is_transposed=False),
    "transposed gradients": functools.partial(gradients, is_transposed=True),
    "outputs under vmap": outputs,
    "feed-forward blocks": feed_forward,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints a line for each program, and gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proofs.jax_programs")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    given = parser.parse_args(argv)
    of_device = absent_h200()
    is_wrong = False
    for recipe, (length, dim), name in itertools.product(given.recipes, SIZES, given.programs):
        step, arguments = PROGRAMS[name](recipe, length, dim)
        text = f8emu.jax.jit(step).lower(*shapes_on(of_device, arguments)).compile().as_text()
        defined = dict(_INSTRUCTION.findall(text))
        found = list(float8_gemms(defined))
        faults = sorted({fault for call in found for fault in faults_of(call, recipe in FOLDED)})
        faults += [] if found else ["no float8 GEMM"]
        faults += ["codes that are widened"] if widens_codes(defined) else []
        is_wrong |= bool(faults)
        print(
            f"{recipe:20}{length:6} x {dim:<6}{name:34}{len(found):3} GEMMs  {'; '.join(faults) or 'right'}", flush=True
        )
    return int(is_wrong)


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", re.MULTILINE)


def float8_gemms(defined: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Every call among the instructions of a program: its text, and those of its scales."""
    for call in defined.values():
        if f'custom_call_target="{_FLOAT8_GEMM}"' in call:
            operands = re.search(r"custom-call\(([^)]*)\)", call)
            assert operands is not None
            names = [operand.split()[-1].lstrip("%") for operand in operands[1].split(", ")]
            yield call, [defined[name] for name in names if defined.get(name, "").startswith("f32[]")]


def widens_codes(defined: dict[str, str]) -> bool:
    """Whether XLA converts float8, as it does for a GEMM of another dtype."""
    converted = (re.search(r" convert\(%?([\w.\-]+)\)", instruction) for instruction in defined.values())
    return any(found is not None and defined.get(found[1], "").startswith("f8e") for found in converted)


def faults_of(gemm: tuple[str, list[str]], is_folded: bool) -> Iterator[str]:
    """What is wrong with a call."""
    call, scales = gemm
    if '"epilogue":"DEFAULT"' not in call:
        yield "an epilogue of its own"
    if not re.search(r'"beta":0[,}]', call.replace(" ", "")):
        yield "something is added"
    if is_folded and all(" constant(1)" in scale for scale in scales):
        yield "scales that are not in the call"


if __name__ == "__main__":
    sys.exit(main())
