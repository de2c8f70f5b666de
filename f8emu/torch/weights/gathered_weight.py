"""A weight that FSDP2 has gathered as float8: codes and scales in the place of values.

Both operands of the weight travel as rows of it: `output` reads `rows` as they are, `grad_input` reads `cols`, the
codes of `weight^T`, after a transpose. Where both have one scale, they are the same codes.
"""

from typing import Any

import torch
from torch import Tensor

from f8emu.spec.errors import UnsupportedError
from f8emu.torch.layer.operands import Operand
from f8emu.torch.torch_internals import with_aliases, wrapper_of
from f8emu.torch.weights.gathered_codes import GatheredCodes, is_freed

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.as_strided.default, _aten.view.default)
"""Views of the whole, which autograd and FSDP2 take."""


class GatheredWeight(Tensor):
    """[N, K] in the dtype of the gradient; it holds codes, so only a Float8Linear can compute with it."""

    cols: Tensor | None
    """[N, K] float8, the operand of `grad_input` before its transpose; None where it is `rows`."""
    row_scale: Tensor
    """[1, 1] or [N, 1]."""
    col_scale: Tensor
    """[1, 1] or [K, 1]."""
    memory: GatheredCodes | None = None
    """Where the codes lie, if `cols` are others than `rows`."""

    def __new__(
        cls, rows: Tensor, cols: Tensor | None, row_scale: Tensor, col_scale: Tensor, dtype: torch.dtype
    ) -> "GatheredWeight":
        return wrapper_of(cls, rows, dtype)

    def __init__(
        self, rows: Tensor, cols: Tensor | None, row_scale: Tensor, col_scale: Tensor, dtype: torch.dtype
    ) -> None:
        self._rows, self.cols, self.row_scale, self.col_scale = rows, cols, row_scale, col_scale

    @property
    def rows(self) -> Tensor:
        """[N, K] float8, the operand of `output`. Compiled code reads it by this name, and may save it."""
        if self.memory is not None and not torch.compiler.is_compiling():
            self.memory.before_read(self._rows)
        return self._rows

    def of_output(self) -> Operand:
        """The operand of `output`, [N, K]."""
        return Operand(self.rows, self.row_scale)

    def of_grad_input(self) -> Operand:
        """The operand of `grad_input`, [N, K], still to be transposed."""
        return Operand(self.of_output().codes if self.cols is None else self.cols, self.col_scale)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["rows", "row_scale", "col_scale"]
        return (names if self.cols is None else [*names, "cols"]), self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> "GatheredWeight":
        return cls(inner["rows"], inner.get("cols"), inner["row_scale"], inner["col_scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAME and isinstance(args[0], cls):
            x = args[0]
            same = cls(x._rows, x.cols, x.row_scale, x.col_scale, x.dtype)
            same.memory = x.memory
            return with_aliases(func, args, kwargs or {}, same)
        raise UnsupportedError(
            f"{func}: the weight was gathered as float8 codes, with which only Float8Linear computes; read the sharded "
            "weight (model.state_dict() outside of the forward and backward pass), or convert without "
            "enable_fsdp_float8_all_gather"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GatheredWeight({list(self.shape)}, {self._rows.dtype}, scale {list(self.row_scale.shape)})"


def require_gathered(codes: Tensor) -> None:
    """Raise UnsupportedError in eager code if FSDP2 has not gathered what the backward pass reads."""
    if not torch.compiler.is_compiling() and is_freed(codes):
        raise UnsupportedError(
            "Float8Linear: in earlier steps FSDP2 gathered this weight again in the backward pass, now it does not, "
            "so the codes for grad_input are not there; choose reshard_after_forward before the first step, call no "
            "unshard() between the forward and the backward pass, or convert without enable_fsdp_float8_all_gather"
        )
