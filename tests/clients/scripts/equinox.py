"""equinox: an MLP with converted layers in `filter_jit`, and leaves on the disk."""

from pathlib import Path
from typing import Any

import jax
import optax

from f8emu.spec import Float8State
from tests.clients.watch_jax import CLASSES, WIDTH, JaxWatch, rows

WATCH = JaxWatch
NEEDS = ("jax", "optax")


def mlp(watch: JaxWatch, folder: Path) -> None:
    import equinox as eqx

    from f8emu.jax.hosts.equinox import Float8Linear, convert_linears

    def is_state(x: Any) -> bool:
        return isinstance(x, Float8State)

    model: Any = eqx.nn.MLP(WIDTH, CLASSES, 64, depth=2, key=jax.random.key(0))
    model = convert_linears(model, watch.recipe)
    x, labels = rows()
    optimizer = optax.adamw(1e-2)

    def parts(tree: Any) -> tuple[Any, Any]:
        """States, which overwrite themselves, and the rest."""
        return eqx.partition(tree, is_state, is_leaf=is_state)

    @eqx.filter_jit
    def step(model: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        @eqx.filter_value_and_grad
        def loss_of(model: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), labels).mean()

        loss, grads = loss_of(model)
        states, grads = parts(grads)
        updates, state = optimizer.update(grads, state, eqx.filter(parts(model)[1], eqx.is_array))
        return eqx.combine(states, eqx.apply_updates(parts(model)[1], updates), is_leaf=is_state), state, loss

    def trained(model: Any, state: Any, steps: int) -> tuple[Any, Any]:
        for _ in range(steps):
            model, state, loss = step(model, state)
            watch.losses.append(float(loss))
        return model, state

    arrays = lambda model: eqx.filter(parts(model)[1], eqx.is_array)  # noqa: E731
    first, state = arrays(model), optimizer.init(arrays(model))
    model, state = trained(model, state, 3)
    eqx.tree_serialise_leaves(folder / "model.eqx", (model, state))
    loaded = eqx.tree_deserialise_leaves(folder / "model.eqx", (model, state))
    one, other = trained(model, state, 1), trained(*loaded, 1)
    watch.resumed(eqx.filter(one, eqx.is_array), eqx.filter(other, eqx.is_array))
    states = [layer.state for layer in one[0].layers if isinstance(layer, Float8Linear)]
    watch.learned(first, arrays(one[0]), layers=3, states=states)


RUNS = {"`MLP` in `filter_jit`, `tree_serialise_leaves`": mlp}
