"""A parameter's answers to libraries, beside its operators: address, storage, `.data`, copies, pickles, sharing.

torch answers for a tensor that has memory. A weight of this package is a wrapper around other tensors. Without these
answers every one of them lies at address 0, and a library that knows parameters by their address takes one for another.
"""

import copy
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from f8emu.spec.errors import UnsupportedError
from f8emu.torch import torch_internals as internals
from f8emu.torch.chip import FLOAT8_DTYPES


def require_own_call(weight: type, options: dict[str, Any]) -> None:
    """Raise UnsupportedError if a library makes a weight from a tensor and options of `nn.Parameter`."""
    if options:
        raise UnsupportedError(
            f"f8emu.torch: a library makes a {weight.__name__} from a tensor, as cpu_offload of accelerate does, which "
            "leaves its codes behind; offload the model before convert_to_float8_training, or convert it without "
            "float8_primary_weights and enable_fsdp_float8_all_gather"
        )


class WeightTensor(Tensor):
    """A weight that consists of other tensors, its attributes; `template` names the one that has its sizes."""

    template: str
    parameter: Tensor | None = None  # of which this is `.data` or another alias

    @property
    def addressed(self) -> Tensor | None:
        """The tensor at whose address the weight is, if it has one."""
        return None

    def parts(self) -> Iterator[Tensor]:
        yield from (x for x in vars(self).values() if isinstance(x, Tensor) and not isinstance(x, WeightTensor))

    def become(self, value: Tensor) -> None:
        """Take the values of another tensor, and its dtype and device."""
        raise NotImplementedError

    def data_ptr(self) -> int:
        return 0 if (addressed := self.addressed) is None else addressed.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        addressed = None if internals.is_described_to_a_tracer() else self.addressed
        return super().untyped_storage() if addressed is None else addressed.untyped_storage()

    def share_memory_(self) -> Self:
        for part in self.parts():
            part.share_memory_()
        return self

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight without its gradient history, like `detach`; what is assigned becomes the weight's values."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.become(value)

    def _state_of_copy(self) -> tuple[Any, ...]:
        # As bytes: torch pickles float8, but does not load it again outside of torch.save.
        kinds = {name: x.dtype for name, x in vars(self).items() if isinstance(x, Tensor) and x.dtype in FLOAT8_DTYPES}
        stored = {name: x for name, x in vars(self).items() if name != "parameter"}
        attributes = {name: x.view(torch.uint8) if name in kinds else x for name, x in stored.items()}
        return type(self), attributes, kinds, self.dtype, self.requires_grad

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            new = memo[id(self)] = _rebuilt(*copy.deepcopy(self._state_of_copy(), memo))
            new.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, self._state_of_copy()


def _rebuilt(cls: Any, attributes: dict[str, Any], kinds: Any, dtype: torch.dtype, requires_grad: bool) -> Tensor:
    # Also what users have set on it, and that it is an nn.Parameter, are attributes.
    attributes = {name: x.view(kinds[name]) if name in kinds else x for name, x in attributes.items()}
    new = internals.wrapper_of(cls, attributes[cls.template], dtype)
    vars(new).update(attributes)
    return new.requires_grad_(requires_grad)
