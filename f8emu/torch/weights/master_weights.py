"""An optimizer over the float32 masters of weights that their layers hold as float8."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from f8emu.spec.errors import OperandError
from f8emu.torch.torch_internals import like_dtensor, set_local
from f8emu.torch.weights.float8_weight import Float8Weight, at_rest, refill_all
from f8emu.torch.weights.sharded_weight import ShardedWeight


class MasterWeights(Optimizer):
    """Any optimizer of torch.optim, for a model converted with `float8_primary_weights=True`.

        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3, weight_decay=0.1)

    It holds a float32 master of every float8 weight, or of this rank's part of it, and steps it with the gradient of
    the layer. Make it after `fully_shard` and `parallelize_module`. After each step, and at no other time, it casts the
    masters into the codes of the layers, under the scales of the whole weights (one reduction over the ranks): passes
    that accumulate gradients multiply the same codes. Other parameters are stepped as they are. Parameter groups,
    schedulers, GradScaler, closures, hooks and state dict are those of `optimizer_class` over the parameters of the
    model. The masters are in the state dict of the model, under the keys of nn.Linear. A step converts all gradients
    that are not float32 at once: 4 bytes an element.

    Exactness: masters, codes and optimizer state equal those of `optimizer_class` and a `Float8Linear` whose weight is
    the master.

    Args:
        params: as for torch.optim: parameters, (name, parameter) pairs or groups of either.
        optimizer_class: such as torch.optim.AdamW, called with the masters in the place of the float8 weights.
        defaults: the arguments of `optimizer_class`.

    Raises:
        OperandError: `optimizer_class` is an optimizer instance, or not a class of optimizers.
    """

    inner: Optimizer
    """The optimizer of `optimizer_class`, over the masters."""

    def __init__(self, params: Iterable[Any], optimizer_class: Callable[..., Optimizer], **defaults: Any) -> None:
        if isinstance(optimizer_class, Optimizer) or not callable(optimizer_class):
            raise OperandError(
                "MasterWeights: optimizer_class must be a class of optimizers, since the optimizer is made over the "
                f"masters; got {type(optimizer_class).__name__}; pass torch.optim.AdamW and then its arguments"
            )
        listed: list[Any] = list(params)
        groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
        groups = [_listed(group) for group in groups]
        self.inner = optimizer_class([_of_masters(group) for group in groups], **defaults)
        super().__init__(groups, self.inner.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        param_group = _listed(param_group)
        if len(self.inner.param_groups) == len(self.param_groups):  # the first groups are there already
            self.inner.add_param_group(_of_masters(param_group))
        settings = self.inner.param_groups[len(self.param_groups)]
        own = {key: value for key, value in settings.items() if key not in ("params", "param_names")}
        super().add_param_group({**own, "params": param_group["params"]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the masters and cast them. A closure sees the codes of the current masters."""
        # 1. Schedulers write to this optimizer's groups.
        _copy_settings(self, self.inner)
        # 2. The step of the masters. Cast them even if it raises: some may have been stepped.
        self._take_gradients()
        try:
            loss = self.inner.step(None if closure is None else self._with_casts(closure))
        finally:
            self._cast()
            for _, master in self._masters():
                master.grad = None
        self._take_settings()
        return loss

    def __getattr__(self, name: str) -> Any:
        """An attribute that only the wrapped optimizer has, such as `train` and `eval` of a schedule-free one."""
        if name.startswith("_") or "inner" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        attribute = getattr(self.inner, name)
        return self._with_casts_after(attribute) if inspect.ismethod(attribute) else attribute

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """`Optimizer.load_state_dict`. The masters are loaded with the model."""
        self.inner.load_state_dict(state_dict)
        self._take_settings()

    def _with_casts_after(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            _copy_settings(self, self.inner)
            result = method(*args, **options)
            self._take_settings()
            refill_all([weight for weight, _ in self._masters()])  # it may have written to any
            return result

        return call

    def _with_casts(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        calls = itertools.count()

        def evaluate() -> Any:
            if next(calls):  # the masters have changed since the last call
                self._cast()
            with torch.enable_grad():
                loss = closure()
            self._take_gradients()
            return loss

        return evaluate

    def _masters(self) -> Iterator[tuple[Float8Weight | ShardedWeight, Tensor]]:
        # Each weight at rest, or this rank's part of it, and what the optimizer steps in its place.
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for mine, master in zip(own["params"], inner["params"], strict=True):
                if (weight := at_rest(mine)) is not None:
                    yield weight, master

    def _take_gradients(self) -> None:
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for i, mine in enumerate(own["params"]):
                weight = at_rest(mine)
                if isinstance(weight, ShardedWeight):
                    set_local(inner["params"][i], weight.master)  # FSDP2 pads a shard before the first pass
                elif weight is not None and mine.grad is not None:
                    inner["params"][i] = weight.take_master()  # it may have been frozen until now
                if weight is not None:
                    master = inner["params"][i]
                    master.grad = None if mine.grad is None else mine.grad.to(master.device, master.dtype)

    def _cast(self) -> None:
        refill_all([weight for weight, master in self._masters() if master.grad is not None])

    def _take_settings(self) -> None:
        # The state of each parameter is its master's: state dicts are those of the model's parameters. Some optimizers
        # count in their groups.
        _copy_settings(self.inner, self)
        self.state.clear()
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            for mine, master in zip(own["params"], inner["params"], strict=True):
                if master in self.inner.state:
                    self.state[mine] = self.inner.state[master]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inner": self.inner}


def _copy_settings(source: Optimizer, target: Optimizer) -> None:
    for its, own in zip(source.param_groups, target.param_groups, strict=True):
        own.update({key: value for key, value in its.items() if key != "params"})


def _listed(group: dict[str, Any]) -> dict[str, Any]:
    # The parameters may have been one, or an iterator.
    params: Any = group["params"]
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def _of_masters(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": [_of_master(x) for x in group["params"]]}


def _of_master(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_of_master(part) for part in cast("tuple[Any, ...]", x))
    weight = at_rest(x)
    if isinstance(weight, Float8Weight):
        return weight.take_master() if x.requires_grad else weight.master
    return x if weight is None else like_dtensor(x, weight.master.detach())
