"""A small byte-level transformer of flax's own modules, trained under every recipe, beside bfloat16 and beside torch.

    python -m benchmarks.jax_train --json OUT    200 steps of each; on two CPU cores about a minute for a run

Text, schedule and verdict are those of `benchmarks.train`: a recipe's losses, the mean over its seeds, must lie between
the least and the greatest of the bfloat16 seeds, otherwise the exit status is 1. Every run starts from weights that
torch drew and `f8emu.interop` carried over, so that the same model of torch's own modules trains beside it, from the
same weights, on the same batches; its losses are shown, not judged, since norms, attention and optimizer round
differently. Parameters are float32, matrix multiplications run in bfloat16, and every linear layer but the head is
under the recipe.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
import torch
from flax import linen
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training.train_state import TrainState
from torch import nn

import f8emu.jax
from benchmarks.models import Corpus, read_corpus
from benchmarks.runner import BASELINE, Bench, draw, option, say
from benchmarks.train import FIGURES, HEAD, WARMUP, Batches, Model, followed, judge, of_torch, rate, rows_of
from f8emu import interop
from f8emu.interop import DEFAULT_RULES, ParameterRule
from f8emu.jax.hosts.flax_linen import Float8DotGeneral
from f8emu.spec import NAMED_RECIPES, RECIPES, RecipeName

SIZE: dict[str, Any] = {"layers": 2, "dim": 128, "hidden": 256, "heads": 2, "length": 64}
BATCHES = Batches(rows=4, length=SIZE["length"], held_out=8)


class Block(linen.Module):
    """`x + attention(norm(x))`, then `x + down(gelu(up(norm(x))))`."""

    hidden: int
    heads: int
    recipe: RecipeName | None

    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        product = None if self.recipe is None else functools.partial(Float8DotGeneral, recipe=self.recipe)
        mask = linen.make_causal_mask(jnp.zeros(x.shape[:2]))
        y = linen.LayerNorm(name="attention_norm")(x)
        x = x + linen.MultiHeadAttention(
            self.heads,
            use_bias=False,
            dtype=jnp.bfloat16,
            qkv_dot_general_cls=product,
            out_dot_general_cls=product,
            name="attention",
        )(y, mask=mask)
        dense = functools.partial(linen.Dense, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=product)
        y = linen.LayerNorm(name="feed_forward_norm")(x)
        return x + dense(x.shape[-1], name="down")(linen.gelu(dense(self.hidden, name="up")(y))), None


class Transformer(linen.Module):
    """`tokens [batch, length + 1]` -> mean cross-entropy of each byte given those before it.

    The blocks are one in a scan, with stacked parameters and states: XLA compiles the emulation of its GEMMs once.
    """

    layers: int
    dim: int
    hidden: int
    heads: int
    length: int
    recipe: RecipeName | None = None

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = linen.Embed(256, self.dim, name="embedding")(tokens[:, :-1])
        x = x + linen.Embed(self.length, self.dim, name="position_embedding")(jnp.arange(self.length))[None]
        axes: dict[Any, Any] = {"params": 0, OVERWRITE_WITH_GRADIENT: 0}
        blocks = linen.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=self.layers)
        x, _ = blocks(self.hidden, self.heads, self.recipe, name="layers")(x, None)
        x = linen.LayerNorm(name="norm")(x)
        logits = linen.Dense(256, use_bias=False, dtype=jnp.bfloat16, name=HEAD)(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


class SameBlock(nn.Module):
    """`Block` of torch's modules."""

    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = (nn.LayerNorm(dim, eps=1e-6) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (w(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.query, self.key, self.value))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.feed_forward_norm(x)), approximate="tanh"))


class SameTransformer(nn.Module):
    """`Transformer` of torch's modules; its weights are the first of both."""

    def __init__(self, *, layers: int, dim: int, hidden: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding, self.position_embedding = nn.Embedding(256, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(SameBlock(dim, hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1]) + self.position_embedding.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, -2), tokens[:, 1:].flatten())


def params_of(model: SameTransformer) -> dict[str, Any]:
    """The weights of torch's model in flax's, where those of all blocks are stacked."""
    sizes = {"heads": SIZE["heads"]}
    into_heads, out_of_heads = "(heads d) in -> in heads d", "out (heads d) -> heads d out"
    of_attention = [(name, into_heads) for name in ("query", "key", "value")] + [("out", out_of_heads)]
    rules = [
        ParameterRule(torch=f"{name}.weight", flax=f"attention.{name}.kernel", axes=axes, sizes=sizes)
        for name, axes in of_attention
    ]
    blocks = [interop.params_from_state_dict(b.state_dict(), rules=[*rules, *DEFAULT_RULES]) for b in model.layers]
    others = {name: x for name, x in model.state_dict().items() if not name.startswith("layers.")}
    return interop.params_from_state_dict(others) | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *blocks)}


@functools.cache
def _programs(name: str, steps: int, lr: float) -> tuple[Transformer, Any, Callable[..., Any], Callable[..., Any]]:
    """Model, optimizer, and the compiled step and loss, which all seeds share."""
    model = Transformer(**SIZE, recipe=None if name == BASELINE else cast("RecipeName", name))
    rates = jnp.array([lr * rate(step, steps) for step in range(steps)])
    adamw = optax.adamw(lambda step: rates[step], b1=0.9, b2=0.95, weight_decay=0.1)

    @f8emu.jax.jit
    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(lambda variables: model.apply(variables, tokens))(state.params)
        return state.apply_gradients(grads=grads), loss

    return model, optax.chain(optax.clip_by_global_norm(1.0), adamw), step, f8emu.jax.jit(model.apply)


def flax_model(name: str, weights: SameTransformer, arguments: argparse.Namespace) -> Model:
    """flax's model for a run, with the weights of torch's."""
    # 1. Torch's weights, in the shapes that flax asks for.
    model, optimizer, step, evaluate = _programs(name, arguments.steps, arguments.lr)
    example = jax.random.key(0), jnp.zeros((1, SIZE["length"] + 1), jnp.int32)
    params = params_of(weights)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, jax.eval_shape(model.init, *example)["params"])
    # without the parameters XLA has little to compile
    states = jax.jit(
        lambda *key_and_tokens: {name: x for name, x in model.init(*key_and_tokens).items() if name != "params"}
    )(*example)
    state = TrainState.create(apply_fn=model.apply, params={**states, "params": params}, tx=optimizer)
    # As it is after a step, so that JAX compiles once: a number would be traced as another type, and what torch made is
    # bound to its device while the rest is not.
    state = jax.device_put(state.replace(step=jnp.int32(0)), jax.devices()[0])

    def one(tokens: torch.Tensor, _: float) -> jax.Array:
        nonlocal state
        state, loss = step(state, _array(tokens))
        return loss

    return Model(one, lambda tokens: evaluate(state.params, _array(tokens)))


def train(library: str, name: str, seed: int, corpus: Corpus, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of flax's model, or of torch's on the CPU."""
    torch.manual_seed(seed)
    weights = SameTransformer(**SIZE)
    is_jax = library == "jax"
    model = flax_model(name, weights, arguments) if is_jax else of_torch(name, weights, torch.device("cpu"))
    losses = followed(f"{library} {name}", seed, corpus, arguments, BATCHES, model)
    return {"library": library, "name": name, "seed": seed, **losses}


def _array(tokens: torch.Tensor) -> jax.Array:
    return interop.to_jax(tokens.to(torch.int32))


BENCH = Bench(
    "benchmarks.jax_train",
    __doc__,
    option("recipes", tuple(RECIPES), choices=tuple(NAMED_RECIPES), nargs="*"),
    option("steps", 200),
    option("seeds", 3, "of bfloat16 and of every recipe in JAX"),
    option("torch-seeds", 1, "those of them that torch trains too"),
    option("lr", 1e-3),
)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv, device="cpu")
    arguments, report = run.arguments, run.report
    corpus = read_corpus()
    report |= {"jax_device": jax.devices()[0].device_kind, "corpus": corpus.description, "model": SIZE}
    report |= {"rows": BATCHES.rows, "steps": arguments.steps, "warmup": WARMUP, "learning_rate": arguments.lr}
    say(f"JAX on {report['jax_device']}, {report['versions']['jax']}; torch on the CPU")
    runs: list[dict[str, Any]] = []
    for name in (BASELINE, *arguments.recipes):
        for seed in range(arguments.seeds):
            for library in ("jax", "torch") if seed < arguments.torch_seeds else ("jax",):
                runs.append(train(library, name, seed, corpus, arguments))
            run.record(
                runs=runs,
                verdicts=judge([entry for entry in runs if entry["library"] == "jax"]),
            )
    columns = ("recipe", "loss", "bf16 seeds", "in range", "seed 0: jax", "torch", "first step: jax", "torch")
    draw(f"loss after {arguments.steps} steps, mean of {arguments.seeds} seeds", columns, _rows(report))
    return int(not all(verdict["passes"] for verdict in report["verdicts"]))


def _rows(report: dict[str, Any]) -> list[list[str]]:
    """A row for every recipe and figure, and bfloat16's beside torch's."""
    judged = {verdict["name"]: rows_of(verdict) for verdict in report["verdicts"]}
    of_bf16 = {figure: [f"{BASELINE}, {figure.replace('_', ' ')}", "", "", ""] for figure in FIGURES}
    first = {(run["library"], run["name"]): run for run in report["runs"] if run["seed"] == 0}
    rows: list[list[str]] = []
    for name in dict.fromkeys(name for _, name in first):
        pair = [first.get((library, name)) for library in ("jax", "torch")]
        begun = ["-" if run is None else f"{run['losses'][0]:.6f}" for run in pair]
        for figure, row in judged.get(name, of_bf16).items():
            rows.append([*row, *("-" if run is None else f"{run[figure]:.4f}" for run in pair), *begun])
    return rows


if __name__ == "__main__":
    sys.exit(main())
