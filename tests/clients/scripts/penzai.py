"""penzai: the `Linear` layers of a model, selected and replaced by one that multiplies in float8."""

from pathlib import Path
from typing import Any

import jax
import optax

import f8emu.jax
from tests.clients.watch_jax import CLASSES, WIDTH, JaxWatch, rows

WATCH = JaxWatch
NEEDS = ("jax", "optax")
RECIPES = ("tensorwise", "rowwise", "blockwise")
REMARK = "`pz.nn.Linear` takes no `dot_general`: a layer of 12 lines replaces it."


def mlp(watch: JaxWatch, folder: Path) -> None:
    from penzai import pz
    from penzai.models.simple_mlp import MLP

    product = f8emu.jax.dot_general(watch.recipe)

    @pz.pytree_dataclass
    class Float8Linear(pz.nn.Layer):
        linear: Any

        def __call__(self, x: Any, **_: Any) -> Any:
            taken, given = self.linear.in_axis_names, self.linear.out_axis_names
            rest = [name for name in x.named_shape if name not in taken]
            values, kernel = x.unwrap(*rest, *taken), self.linear.weights.value.unwrap(*taken, *given)
            numbers = (tuple(range(len(rest), values.ndim)), tuple(range(len(taken))))
            return pz.nx.wrap(product(values, kernel, (numbers, ((), ())))).tag(*rest, *given)

    sizes = [WIDTH, 64, CLASSES]
    model = MLP.from_config(name="mlp", init_base_rng=jax.random.key(0), feature_sizes=sizes)
    model = model.select().at_instances_of(pz.nn.Linear).apply(Float8Linear)
    unbound, params = pz.unbind_params(model, freeze=True)
    x, labels = rows()
    optimizer = optax.adamw(1e-2)

    @f8emu.jax.jit
    def step(params: Any, state: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            logits = pz.bind_variables(unbound, params)(pz.nx.wrap(x).tag("batch", "features"))
            logits = logits.unwrap("batch", "features")
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    first, state = params, optimizer.init(params)
    for _ in range(4):
        params, state, loss = step(params, state)
        watch.losses.append(float(loss))
    watch.learned(first, params, layers=2)


RUNS = {"`MLP`, layers replaced by a selector": mlp}
