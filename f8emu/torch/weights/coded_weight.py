"""A weight that consists of float8 codes: FSDP2 has gathered it so, or its layer holds it so (`Float8Weight`)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.torch import torch_internals as internals
from f8emu.torch.casts.operand import Delayed, Operand
from f8emu.torch.weights.codes import WeightCodes
from f8emu.torch.weights.weight_tensor import WeightTensor, require_own_call

# What operators of autograd, modules, FSDP2 and initializations make of a weight that is no plain tensor. Each class of
# weights answers some of these kinds in its `__torch_dispatch__`, or in `result_of`; all other operators need values.
_aten = torch.ops.aten
ALIASES = {getattr(_aten, name).default for name in ("alias", "as_strided", "detach", "expand", "view")}
PARTS = {_aten.slice.Tensor, _aten.split.Tensor}
MOVES = {_aten._to_copy.default, _aten._pin_memory.default}
COPIES = {_aten.clone.default}
EMPTIES = {_aten.empty_like.default}
NEW = {_aten.new_empty.default, _aten.new_full.default, _aten.new_ones.default, _aten.new_zeros.default}
FILLED = {getattr(_aten, f"{name}_like").default for name in ("full", "ones", "rand", "randn", "zeros")}

_OF_IDLE_OPERAND = (
    3  # references to an operand that nothing else uses: `rows`, the weight, the argument of `references`
)


def is_view(func: Any) -> bool:
    """Whether the operator's result is a view of an argument."""
    return any(x.alias_info is not None and not x.alias_info.is_write for x in internals.schema_of(func).returns)


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors to which the operator writes."""
    tensors: list[Tensor] = []
    for i, argument in enumerate(internals.schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            tensors += internals.tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
    return tensors


class CodedWeight(WeightTensor):
    """[N, K], or experts [E, N, K], in the dtype of the gradient. Only float8 layers can compute with it."""

    template = "_rows"
    cols: Tensor | None
    row_scale: Tensor
    col_scale: Tensor
    master_amax: Tensor | None
    memory: "GatherMemory | None" = None  # where gathered codes lie, if the two operands have codes of their own
    refusal = (
        "the weight was gathered as float8 codes, with which only float8 layers compute; read the sharded "
        "weight (model.state_dict() outside of the forward and backward pass), or convert without "
        "enable_fsdp_float8_all_gather"
    )

    def __new__(cls, codes: WeightCodes, dtype: torch.dtype | None = None, *_: Any, **options: Any) -> Any:
        require_own_call(cls, options)
        return internals.wrapper_of(cls, codes.rows, dtype)

    def __init__(self, codes: WeightCodes, dtype: torch.dtype) -> None:
        self._rows, self.row_scale, self.col_scale, self.cols, self.master_amax = codes

    @property
    def rows(self) -> Tensor:
        """Float8, the operand of `output`. Compiled code reads it by this name, and may save it."""
        if self.memory is not None and not torch.compiler.is_compiling():
            self.memory.before_read(self._rows)
        return self._rows

    @property
    def held(self) -> WeightCodes:
        """The codes and scales of the weight, whose memory FSDP2 may have freed."""
        return WeightCodes(self._rows, self.row_scale, self.col_scale, self.cols, self.master_amax)

    def parts(self) -> Iterator[Tensor]:
        raise UnsupportedError(f"share_memory_: {self.refusal}")

    def become(self, value: Tensor) -> None:
        raise UnsupportedError(f"weight.data = ...: {self.refusal}")

    def of_output(self) -> Operand:
        return Operand(self.rows, self.row_scale)

    def of_grad_input(self) -> Operand:
        """The operand of `grad_input`, [N, K], still to be transposed. The `cols` of experts are, [E, K, N]."""
        return Operand(self.rows if self.cols is None else self.cols, self.col_scale)

    def note_call(self, delayed: Delayed | None) -> None:
        """Under delayed scaling of a weight at rest, record its amax, as a cast of it in this call would."""
        if delayed is not None and self.master_amax is not None:
            with torch.no_grad():
                # As integers, which keeps NaN.
                bits = torch.maximum(delayed.amax.view(torch.int32), self.master_amax.view(torch.int32))
                delayed.amax.copy_(bits.view(torch.float32))

    def alias(self) -> "CodedWeight":
        same = CodedWeight(self.held, self.dtype)
        same.memory = self.memory
        return same

    def experts(self) -> list["CodedWeight"]:
        """The matrices of experts, each a weight [N, K]."""
        count, cols = self.shape[0], [None] * self.shape[0] if self.cols is None else self.cols.mT
        scales = [scale.unflatten(0, (count, -1)) for scale in (self.row_scale, self.col_scale)]
        parts = [CodedWeight(WeightCodes(*x), self.dtype) for x in zip(self._rows, *scales, cols, strict=True)]
        for part in parts:
            part.memory = self.memory
        return parts

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [name for name, value in self.held._asdict().items() if value is not None], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Any:
        return cls(WeightCodes(**inner), dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(x, CodedWeight):
            if func in ALIASES and (len(args) < 2 or tuple(args[1]) == tuple(x.shape)):
                return internals.with_aliases(func, args, kwargs, x.alias())
            if func is _aten.unbind.int and x.ndim == 3 and args[1:] in ((), (0,)):
                return internals.with_aliases(func, args, kwargs, x.experts())
        weights = [leaf for leaf in internals.tree_leaves((args, kwargs)) if isinstance(leaf, CodedWeight)]
        if (result := weights[0].result_of(func, args, kwargs)) is NotImplemented:
            refused = OperandError if internals.takes_for_uninvertible() else UnsupportedError
            raise refused(f"{func}: {cls.refusal}")
        return result

    def result_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator other than `ALIASES`; NotImplemented if it needs values."""
        return NotImplemented

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        scale = f"scale {list(self.row_scale.shape)}"
        return f"{type(self).__name__}({list(self.shape)}, {self._rows.dtype}, {scale}, {self.dtype})"


@dataclass(slots=True)
class GatherMemory:
    """The memory of a gathered weight whose operands have codes of their own: bytes, flat, with all ranks' padding."""

    # By these rules, half of bfloat16's bytes travel in a pass:
    # 1. FSDP2 gathers `rows` before a forward pass and `cols` before a backward pass. Each has a storage of its own,
    #    since autograd saves tensors that refer to it; FSDP2's one buffer is laid into the storage that it is to fill.
    #    After either pass FSDP2 frees both.
    # 2. Before the first backward pass nobody knows whether FSDP2 will gather again: the first forward pass gathers
    #    `cols` too, beside FSDP2.
    # 3. A backward pass that recomputes `output` reads `rows` too. In eager code it recomputes what a checkpoint
    #    surrounds: saved-tensor hooks are set when a layer reads `rows` in a forward pass. In compiled code it
    #    recomputes what autograd has saved: something besides this module and the weight refers to the operand `rows`.
    # 4. All ranks must gather the same. They vote once, before the first backward pass: if any rank needs `rows` then,
    #    all gather `rows` in every backward pass.
    # 5. A rank that needs `rows` later, although the vote was against it, keeps them from its forward pass.
    # 6. A reader whom the last gather did not foresee has `rows` gathered at once, by all ranks.
    cols: Tensor
    rows: Tensor
    buffer: Tensor  # FSDP2's; it lies in the storage of `rows` or `cols` while it is filled, and has none otherwise
    operand: Tensor | None = None  # the view of `rows` that layers read, and that compiled code may save
    gather_rows: Callable[[], None] | None = None  # fills `rows` if FSDP2 did not
    is_in_checkpoint: bool = False  # whether a checkpoint surrounds a reader of `rows` in the current step
    is_recomputed: bool | None = None  # the vote of rule 4; None before it
    stream: Any = None  # the CUDA stream that computes with the weight

    @classmethod
    def adopt(cls, output: Tensor) -> "GatherMemory":
        """The first gathered `output`, a view of FSDP2's buffer, as `rows`, and empty memory for `cols`."""
        # In the stream that computes with the weight, as FSDP2 hands it out. Memory of another stream would stay with
        # that stream for good, and as much of it as the host is ahead of the device: a whole model's, at worst.
        buffer = internals.base_of(output)
        memory = cls(cols=torch.empty_like(buffer), rows=buffer.detach(), buffer=buffer)
        memory.end_gather()
        return memory

    def begin_forward(self) -> bool:
        """FSDP2 will fill `rows`; whether `cols` must be filled too (rule 2)."""
        self.is_in_checkpoint = False
        self._lay_buffer_in(self.rows)
        return self.is_recomputed is None

    def begin_backward(self, group: Any) -> bool:
        """FSDP2 will fill `cols`; whether `rows` must be filled too (rule 4)."""
        self._lay_buffer_in(self.cols)
        if self.is_recomputed is None:
            vote = torch.full((1,), int(self._is_needed()), dtype=torch.int32, device=self.cols.device)
            self.is_recomputed = bool(internals.reduce_max(vote, (group,)).item())
        return self.is_recomputed

    def end_gather(self) -> None:
        """FSDP2 has filled its buffer. It frees it after the pass, so from here on the buffer is nothing."""
        if self.cols.is_cuda:
            self.stream = torch.cuda.current_stream()
        self._lay_buffer_in(self.cols.new_empty(0))

    def __iter__(self) -> Iterator[Tensor]:
        """The codes that FSDP2 may free now, after a pass; it asks when it does (rule 5)."""
        for codes in (self.cols, self.rows):
            is_kept = codes is self.rows and self.is_recomputed is False and self._is_needed()
            if not is_freed(codes) and not is_kept:
                yield codes

    def before_read(self, rows: Tensor) -> None:
        """A layer, or compiled code, is going to read `rows` (rules 3 and 6)."""
        # The last gather did not foresee a forward pass that follows a backward pass without resharding, or a
        # reentrant checkpoint.
        if not internals.is_in_backward_pass() and internals.top_saved_tensors_hooks(True) is not None:
            self.is_in_checkpoint = True
        if is_freed(rows) and self.gather_rows is not None:
            self.gather_rows()

    def _is_needed(self) -> bool:
        # Whether this rank's backward pass reads `rows` (rule 3). A reference to the operand that is left for another
        # reason does no harm: more is gathered than needed.
        return self.is_in_checkpoint or (
            self.operand is not None and internals.references(self.operand) > _OF_IDLE_OPERAND
        )

    def gather(self, codes: Tensor, codes_of_rank: Tensor, group: Any) -> None:
        storage = codes.untyped_storage()
        if not storage.size() and self.stream is None:
            storage.resize_(codes.numel())
        elif not storage.size():
            # From the memory of the stream that reads and frees it, as FSDP2's own: a kernel of that stream may still
            # be reading what was there before.
            with torch.cuda.stream(self.stream):
                storage.resize_(codes.numel())
            torch.cuda.current_stream().wait_stream(self.stream)
        with internals.keeping_version(codes):
            internals.all_gather(codes, codes_of_rank.view(-1), group)

    def _lay_buffer_in(self, codes: Tensor) -> None:
        self.buffer.data = codes  # set_() does not take a storage that is freed


def is_freed(codes: Tensor) -> bool:
    """Whether FSDP2 holds no memory for these codes."""
    return codes.numel() > 0 and codes.untyped_storage().size() == 0


def require_gathered(codes: Tensor) -> None:
    """Raise UnsupportedError in eager code if FSDP2 has not gathered what the backward pass reads."""
    if not torch.compiler.is_compiling() and is_freed(codes):
        raise UnsupportedError(
            "Float8Linear: in earlier steps FSDP2 gathered this weight again in the backward pass, now it does not, "
            "so the codes for grad_input are not there; choose reshard_after_forward before the first step, call no "
            "unshard() between the forward and the backward pass, or convert without enable_fsdp_float8_all_gather"
        )
