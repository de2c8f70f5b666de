"""Shared by tests of checkpoints: the state of a model, its comparison, and a file in between."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import f8emu.torch as f8


def local(x: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of this rank's weights, and of the state of delayed scaling."""
    weights = {name: local(parameter).clone() for name, parameter in model.named_parameters()}
    return {**weights, **f8.delayed_state_dict(model)}


def assert_same_state(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> None:
    """Equal names in the same order, dtypes and values."""
    assert list(one) == list(two)
    for key in one:
        assert one[key].dtype is two[key].dtype and torch.equal(one[key], two[key]), key


def assert_updated(model: nn.Module, updates: int) -> None:
    """Every history has as many amaxes."""
    for key, value in f8.delayed_state_dict(model).items():
        if key.endswith("amax_history"):
            assert (value > 0).sum(1).tolist() == [updates] * 3, key


def through_file(state: Any, *, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
