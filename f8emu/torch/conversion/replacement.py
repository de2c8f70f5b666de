"""Warns once when another library replaces a Float8Linear by its own layer.

torchao's and accelerate's conversions replace every `nn.Linear`, which a Float8Linear is.
"""

import warnings
from functools import cache

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from f8emu.torch.float8_layer import Float8Layer
from f8emu.torch.torch_internals import own_modules


@cache
def watch_replacements() -> None:
    """From the first call on, compare every submodule that is registered anywhere with the one that it replaces."""
    register_module_module_registration_hook(_compare)


def _compare(parent: nn.Module, name: str, new: nn.Module | None) -> None:
    old = own_modules(parent).get(name)
    if not isinstance(old, Float8Layer) or new is None or isinstance(new, Float8Layer):
        return
    sizes = tuple(getattr(new, size, None) for size in ("in_features", "out_features"))
    is_back = isinstance(old, type(new))  # an nn.Linear: dequantize_float8_training, or a new layer of the user's
    is_wrapped = any(module is old for module in new.modules())
    if not is_back and not is_wrapped and sizes == (old.in_features, old.out_features):
        _warn(f"{type(new).__module__}.{type(new).__qualname__}")


@cache
def _warn(name: str) -> None:
    warnings.warn(
        f"f8emu: a Float8Linear was replaced by a {name}, which no longer computes under f8emu's recipe; convert the "
        "model with one library only: leave out that library's conversion, or f8emu's",
        UserWarning,
        stacklevel=5,
    )
