"""What a library of JAX does with float8 layers: they are called, their parameters and states learn, and come back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from f8emu.jax.layer import dot_general
from tests.jax_path.layers import assert_same_bits

WIDTH, CLASSES = 32, 16


def rows() -> tuple[jax.Array, jax.Array]:
    """Inputs and their labels, which the largest of the first features is."""
    x = jax.random.normal(jax.random.key(1), (32, WIDTH))
    return x, x[:, :CLASSES].argmax(1)


class JaxWatch:
    """The model of one run under one recipe."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        self.losses: list[float] = []
        self.resumes: bool | None = None
        """Whether a run that was resumed from the library's checkpoint has the same bits; None: not tried."""
        self.layers, self.traced, self.calls = 0, 0, 0
        self.parameters = 0

    @property
    def is_delayed(self) -> bool:
        return self.recipe == "delayed"

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Traces and eager calls of float8 layers count inside."""
        inner = dot_general.float8_matmul

        def counted(*args: Any) -> jax.Array:
            self.calls += 1
            return inner(*args)

        with mock.patch.object(dot_general, "float8_matmul", counted):
            yield

    def learned(self, first: Any, last: Any, *, layers: int, states: Any = (), traced: int = 0) -> None:
        """The parameters before and after, how many float8 layers use them (in how many traces: a scan is one), and the
        states of these."""
        self.layers, self.traced = layers, traced or layers
        before, after = jax.tree.leaves(first), jax.tree.leaves(last)
        self.parameters = len(before)
        assert len(after) == len(before) and all(bool(jnp.isfinite(leaf).all()) for leaf in after), "not finite"
        same = sum(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        assert not same, f"{same} of {len(before)} parameters did not change"
        if self.is_delayed:
            inv_scales = [of.inv_scale for of in jax.tree.leaves(states, is_leaf=lambda x: hasattr(x, "amax_history"))]
            histories = [leaf for leaf in jax.tree.leaves(states) if leaf.ndim]
            assert len(inv_scales) == 3 * layers, f"{len(inv_scales)} states for {layers} layers"
            assert all(bool((leaf[0] > 0).all()) for leaf in histories), "scales were never updated"

    def resumed(self, one: Any, other: Any) -> None:
        """`other` went on from a checkpoint of `one`: the bits of parameters, optimizer and states must be the same."""
        jax.tree.map(assert_same_bits, *(jax.tree.map(jnp.asarray, tree) for tree in (one, other)))
        self.resumes = True

    def facts(self) -> dict[str, Any]:
        """What is recorded, after everything was checked; an AssertionError names what is wrong."""
        assert self.layers and self.calls >= self.traced, f"{self.calls} calls of {self.layers} float8 layers"
        assert len(self.losses) > 1 and np.isfinite(self.losses).all(), f"losses {self.losses}"
        assert self.losses[-1] < self.losses[0], f"losses do not fall: {self.losses}"
        return {
            "layers": self.layers,
            "parameters": self.parameters,
            "steps": len(self.losses),
            "losses": [round(float(self.losses[place]), 4) for place in (0, -1)],
            "resumes": self.resumes,
        }
