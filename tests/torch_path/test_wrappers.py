"""Models in wrappers, and layers that hold layers: names, checkpoints and conversion are those of the plain model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # pyright: ignore[reportMissingTypeStubs]
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel

import f8emu.torch as f8
from f8emu.spec import OperandError
from f8emu.torch.layer.float8_layer import all_float8_layers
from f8emu.torch.layer.float8_linear import Float8Linear

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    # Or asks a tensor between two graphs for its gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
NAMES = ["first", "module.0", "module._orig.1"]


class Model(nn.Module):
    """Its own parts have names that resemble those of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.module = nn.Sequential(nn.Linear(32, 32))
        self.module._orig = nn.Sequential(nn.ReLU(), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(self.first(x))


class Fsdp(nn.Module):
    """Holds a module as FSDP1 does, which needs an accelerator."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, x: Tensor) -> Tensor:
        return self._fsdp_wrapped_module(x)


class Fabric(Fsdp):
    """Holds a module as Lightning Fabric does."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._forward_module = module
        self._original_module = module

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_module(x)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def in_parts(wrap: Callable[[nn.Module], Any]) -> Callable[[Model], Model]:
    def wrapped(model: Model) -> Model:
        model.first, model.module[0] = wrap(model.first), wrap(model.module[0])
        return model

    return wrapped


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compiled": compiled,
    "DDP": DistributedDataParallel,
    "DataParallel": DataParallel,
    "FSDP1": Fsdp,
    "Fabric": Fabric,
    "checkpointed parts": in_parts(checkpoint_wrapper),
    "offloaded parts": in_parts(offload_wrapper),
    "compiled layers": in_parts(compiled),
    "FSDP1 of FSDP1": lambda model: Fsdp(in_parts(lambda layer: Fsdp(checkpoint_wrapper(layer)))(model)),
    "all": lambda model: compiled(DistributedDataParallel(compiled(in_parts(checkpoint_wrapper)(model)))),
}


TRACED = ("compiled", "compiled layers")
"""Wrappers whose code is compiled here, which takes seconds; the others show names alone."""


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_and_checkpoints_do_not_depend_on_wrappers(wrapper: str) -> None:
    with torch.compiler.set_stance("default" if wrapper in TRACED else "force_eager"):
        compare_with_plain(WRAPPERS[wrapper])


def compare_with_plain(wrap: Callable[[Any], Any]) -> None:
    x = torch.randn(16, 32)

    def stepped(model: Any) -> Any:
        model(x).sum().backward()
        f8.sync_float8_amax_and_scale_history(model)
        return model

    plain = stepped(f8.convert_to_float8_training(Model(), config="delayed"))
    # 1. Converted, then wrapped: the names and the state are those of the plain model, and load into each other.
    before = wrap(f8.convert_to_float8_training(Model(), config="delayed"))
    state, fresh = f8.delayed_state_dict(plain), f8.delayed_state_dict(before)
    assert list(fresh) == list(state)
    f8.load_delayed_state_dict(before, state)
    assert torch.equal(before(x), plain(x)), "the scales are those of the step"
    f8.load_delayed_state_dict(plain, f8.delayed_state_dict(before))
    f8.load_delayed_state_dict(stepped(before), fresh)
    # 2. Wrapped, then converted: filter and report have the plain names, and every layer that runs is converted.
    seen: list[str] = []
    after = wrap(Model())
    float_output = after(x)
    f8.convert_to_float8_training(after, module_filter_fn=lambda _, name: bool(seen.append(name)) or name != "first")
    assert seen == NAMES
    assert list(all_float8_layers(after)) == NAMES[1:]
    expected = f8.convert_to_float8_training(Model(), module_filter_fn=lambda _, name: name != "first")
    assert torch.equal(after(x), expected(x))
    # 3. And back.
    f8.dequantize_float8_training(after)
    assert torch.equal(after(x), float_output)


class Adapted(nn.Linear):
    """A linear layer with an adapter among its own parts, one of which holds another."""

    down: Any

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.down = nn.Linear(32, 16)
        self.down.inner = nn.Linear(32, 32)
        self.up = nn.Sequential(nn.Linear(16, 32))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.up(self.down(self.down.inner(input)))


def adapted() -> Any:
    """An nn.Linear with the same parts, called by a hook."""
    source = Adapted()
    layer: Any = nn.Linear(32, 32)
    layer.down, layer.up = source.down, source.up
    layer.register_forward_hook(lambda self, args, output: output + self.up(self.down(self.down.inner(args[0]))))
    return layer


@pytest.mark.parametrize("make", [Adapted, adapted], ids=["subclass", "hook"])
@pytest.mark.parametrize("is_root", [True, False], ids=["root", "part"])
def test_layers_in_layers_are_converted_with_them(make: Callable[[], Any], is_root: bool) -> None:
    torch.manual_seed(1)
    layer, x = make(), torch.randn(16, 32)
    model = layer if is_root else nn.Sequential(layer)
    names, parameters, float_output = [n for n, _ in model.named_modules()], dict(model.named_parameters()), model(x)

    converted = f8.convert_to_float8_training(model, config="delayed", subclasses=[Adapted])
    assert [name for name, _ in converted.named_modules()] == names
    assert all(isinstance(part, Float8Linear) for part in converted.modules() if isinstance(part, nn.Linear))
    assert {name: p is parameters[name] for name, p in converted.named_parameters()} == dict.fromkeys(parameters, True)
    assert len(f8.delayed_state_dict(converted)) == 4 * 5, "a state for each"
    converted(x).sum().backward()
    assert all(p.grad is not None for p in parameters.values())
    if is_root:
        assert type(layer) is not type(converted) and isinstance(layer.down, nn.Linear), "a copy"
        assert not isinstance(layer.down, Float8Linear)

    with pytest.raises(OperandError, match=r"requested are 'rowwise'"):
        f8.convert_to_float8_training(converted, config="rowwise", subclasses=[Adapted])
    back = f8.dequantize_float8_training(converted)
    assert not any(isinstance(part, Float8Linear) for part in back.modules())
    assert torch.equal(back(x), float_output)


def test_one_of_the_layers_in_a_layer_may_stay() -> None:
    model = nn.Sequential(adapted())
    f8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in ("0.down", "0.up.0"))
    assert list(all_float8_layers(model)) == ["0.down", "0.up.0"]
    model = nn.Sequential(adapted())
    f8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in ("0", "0.down.inner"))
    assert list(all_float8_layers(model)) == ["0", "0.down.inner"]
