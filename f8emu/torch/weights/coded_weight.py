"""A weight that consists of float8 codes: FSDP2 has gathered it so, or its layer holds it so (`Float8Weight`)."""

from typing import Any

import torch
from torch import Tensor

from f8emu.spec.errors import UnsupportedError
from f8emu.torch.layer.operands import Operand
from f8emu.torch.torch_internals import with_aliases, wrapper_of
from f8emu.torch.weights.codes import WeightCodes
from f8emu.torch.weights.gather_memory import GatherMemory, is_freed

_aten = torch.ops.aten
ALIASES = {_aten.detach.default, _aten.alias.default, _aten.as_strided.default, _aten.view.default}
"""Operators of autograd, modules and FSDP2 whose result is the weight itself, if its size stays."""


class CodedWeight(Tensor):
    """[N, K] in the dtype of the gradient. Only a Float8Linear can compute with it."""

    cols: Tensor | None
    row_scale: Tensor
    col_scale: Tensor
    master_amax: Tensor | None
    memory: GatherMemory | None = None
    """Where gathered codes lie, if the two operands have codes of their own."""

    def __new__(cls, codes: WeightCodes, dtype: torch.dtype, *_: Any) -> Any:
        return wrapper_of(cls, codes.rows, dtype)

    def __init__(self, codes: WeightCodes, dtype: torch.dtype) -> None:
        self._rows, self.row_scale, self.col_scale, self.cols, self.master_amax = codes

    @property
    def rows(self) -> Tensor:
        """[N, K] float8, the operand of `output`. Compiled code reads it by this name, and may save it."""
        if self.memory is not None and not torch.compiler.is_compiling():
            self.memory.before_read(self._rows)
        return self._rows

    @property
    def held(self) -> WeightCodes:
        """What the weight holds now, of which FSDP2 may have freed the memory."""
        return WeightCodes(self._rows, self.row_scale, self.col_scale, self.cols, self.master_amax)

    def of_output(self) -> Operand:
        """The operand of `output`, [N, K]."""
        return Operand(self.rows, self.row_scale)

    def of_grad_input(self) -> Operand:
        """The operand of `grad_input`, [N, K], still to be transposed."""
        return Operand(self.rows if self.cols is None else self.cols, self.col_scale)

    def alias(self) -> "CodedWeight":
        """The same weight as another tensor."""
        same = CodedWeight(self.held, self.dtype)
        same.memory = self.memory
        return same

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [name for name, value in self.held._asdict().items() if value is not None], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Any:
        return cls(WeightCodes(**inner), dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = args[0] if args else None
        if isinstance(x, CodedWeight) and func in ALIASES and (len(args) < 2 or tuple(args[1]) == tuple(x.shape)):
            return with_aliases(func, args, kwargs or {}, x.alias())
        return cls.computed(func, args, kwargs or {})

    @classmethod
    def computed(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator that needs values."""
        raise UnsupportedError(
            f"{func}: the weight was gathered as float8 codes, with which only Float8Linear computes; read the sharded "
            "weight (model.state_dict() outside of the forward and backward pass), or convert without "
            "enable_fsdp_float8_all_gather"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        scale = f"scale {list(self.row_scale.shape)}"
        return f"{type(self).__name__}({list(self.shape)}, {self._rows.dtype}, {scale}, {self.dtype})"


def require_gathered(codes: Tensor) -> None:
    """Raise UnsupportedError in eager code if FSDP2 has not gathered what the backward pass reads."""
    if not torch.compiler.is_compiling() and is_freed(codes):
        raise UnsupportedError(
            "Float8Linear: in earlier steps FSDP2 gathered this weight again in the backward pass, now it does not, "
            "so the codes for grad_input are not there; choose reshard_after_forward before the first step, call no "
            "unshard() between the forward and the backward pass, or convert without enable_fsdp_float8_all_gather"
        )
