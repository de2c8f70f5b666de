"""The libraries that are installed, one process each; and that the checks of a run find what is wrong."""

import json
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.clients.clients import CLIENTS, RECIPES, ROOT, errors_of, is_installed, run_apart
from tests.clients.models import mlp, rows
from tests.clients.watch import Watch

ELSEWHERE = {"accelerate", "lightning", "peft", "transformers", "equinox", "flax", "optax", "orbax", "qwix"}
"""What `make install` brings: tests/test_examples.py, test_integrations.py, test_huggingface.py, jax_path/test_hosts.py
and jax_path/test_interop_checkpoints.py test them."""


@pytest.mark.parametrize("client", [name for name in CLIENTS if name not in ELSEWHERE])
def test_a_client_that_is_installed(client: str) -> None:
    if not is_installed(client):
        pytest.skip("not installed")
    assert not errors_of(run_apart(client))


def test_every_script_has_a_row_and_every_row_is_good() -> None:
    held = json.loads((ROOT / "benchmarks" / "results" / "clients-cpu.json").read_text())["clients"]
    assert {row["client"] for row in held} == set(CLIENTS)
    assert not [row["client"] for row in held if errors_of(row)]


class Broken(nn.Module):
    """A fault in one place."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.net = fault, mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, act, last = cast(Any, self.net)
        if self.fault == "never called: net.0":  # as DPO's head
            return last(act(nn.functional.linear(x, first.weight, first.bias)))
        hidden = act(first(x))
        return last(hidden.detach() if self.fault.startswith("without") else hidden)


@pytest.mark.parametrize(
    "fault",
    [
        "never called: net.0",
        "without a finite gradient: net.0.weight",
        "did not change: net.2.bias",
        "losses do not fall",
    ],
)
def test_a_fault_is_found(fault: str) -> None:
    watch = Watch("delayed")
    model: Any = watch.convert(Broken(fault))
    x, labels = rows()
    trained = [p for name, p in model.named_parameters() if not fault.endswith(name)]
    optimizer = torch.optim.SGD(trained, lr=0.1, maximize=fault.startswith("losses"))
    with watch.counting():
        watch.fit(optimizer, lambda: nn.functional.cross_entropy(model(x), labels))
    with pytest.raises(AssertionError, match=fault):
        watch.facts()


def test_a_run_that_does_not_resume_is_found() -> None:
    one, other = (Watch(recipe).convert(mlp()) for recipe in RECIPES[:2])
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    with pytest.raises(AssertionError):
        Watch("rowwise").resumed(one, other)
