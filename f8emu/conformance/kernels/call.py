"""How the suite runs a declared kernel: the case that it gets, its call, and what is checked around it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from f8emu.conformance.arrays import Framework
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import Call, GemmCase, Mode, NotOffered, Placement
from f8emu.conformance.compare import text_of
from f8emu.conformance.kernels.faults import Guarded, KernelFault, check_written, unwritten
from f8emu.conformance.kernels.imported import function_of
from f8emu.conformance.kernels.kernel import Accumulation, Arg, Kernel, Laid, filled, laid_operand, laid_scale
from f8emu.spec import Format, Granularity, SpecError, format_by_name

_SQUARE = Granularity.BLOCKWISE_128X128
_VECTOR = Granularity.BLOCKWISE_1X128
_SIDE = 128
_VERBS = ("scaled_mm", "scaled_grouped_mm")
_LAYOUT = re.compile(r"\b(strid|contiguous|align|CUBLAS_STATUS_INVALID_VALUE)", re.IGNORECASE)
"""What a RuntimeError says that refuses where operands lie; `misaligned address` is a crash."""
_NOT_SUPPORTED = "CUBLAS_STATUS_NOT_SUPPORTED"
"""The library's word for a GEMM that it has no kernel for."""


def question(kernel: Kernel, case: GemmCase) -> GemmCase:
    """The case in the form that this kernel accepts: another output type, no bias, scales that it can hold.

    The judge gets the same case. A case that no such change makes possible stays, and is not offered.
    """
    if case.mode is Mode.BF16 or (case.mode is Mode.GROUPED_ROWWISE) != kernel.is_grouped:
        return case
    changes: list[str] = []
    # 1. Output type and accumulation: those that the kernel has.
    if case.out_dtype not in kernel.out_dtypes:
        out_dtype = kernel.out_dtypes[0]
        bias = None if case.bias is None else case.bias.astype(dtype_of(out_dtype))
        case = replace(case, out_dtype=out_dtype, bias=bias)
    if case.mode is not Mode.BLOCKWISE and not kernel.chooses_accumulation:
        case = replace(case, use_fast_accum=kernel.accumulation is Accumulation.FAST)
    # 2. [EPI-3] [EPI-5] Bias and scales. The name says what was changed: the case has other bits then.
    if case.bias is not None and not kernel.takes_bias:
        case, changes = replace(case, bias=None), [*changes, "no bias"]
    if case.scale_a is not None and _needs_squares(kernel, (case.granularity_a, case.granularity_b)):
        case = replace(case, scale_a=np.repeat(case.scale_a[::_SIDE], _SIDE, axis=0)[: case.a.shape[0]])
        changes = [*changes, "a's scales in squares"]
    has_inverse = any(layout.is_inverse for pair in kernel.scales.values() for layout in pair)
    if has_inverse and case.scale_a is not None and case.scale_b is not None:
        case = replace(case, scale_a=_power_of_two(case.scale_a), scale_b=_power_of_two(case.scale_b))
        changes = [*changes, "scales powers of two"]
    # 3. The calls between, in the same form.
    if case.between:
        case = replace(case, between=tuple(question(kernel, one) for one in case.between))
    return replace(case, id=f"{case.id} ({', '.join(changes)})") if changes else case


def rows_run(kernel: Kernel, case: GemmCase) -> int:
    """With how many rows the kernel is called for a case: M padded."""
    multiple = 1 if kernel.is_grouped else _multiples(kernel, case.granularity_a)[0]
    return -(-case.a.shape[0] // multiple) * multiple


def kernel_verbs(kernel: Kernel, framework: Framework) -> dict[str, Callable[..., Any]]:
    """The verbs `scaled_mm` and `scaled_grouped_mm` of a kernel, of which one raises NotOffered, and `in_turn`.

    `in_turn(calls)` makes one call after the other and only then looks at what they returned: the outputs, in order.

    Raises:
        SpecError: its function cannot be imported, and nothing says how to install it.
    """
    if Arg.OUT in kernel.args and framework.name == "jax":
        raise SpecError(f"Kernel {kernel.name!r}: a jax.Array cannot be written to; let the kernel return its output")
    try:
        call = _Call(kernel=kernel, framework=framework, function=function_of(kernel, framework))
    except NotOffered as reason:
        return absent(str(reason))
    return {**{verb: partial(call.run, verb) for verb in _VERBS}, "in_turn": call.in_turn}


def absent(reason: str) -> dict[str, Callable[..., Any]]:
    """The verbs of a kernel that is not here."""

    def refused(*args: Any, **options: Any) -> np.ndarray:
        raise NotOffered(reason)

    return dict.fromkeys((*_VERBS, "in_turn"), refused)


_Output = Callable[[], np.ndarray]
"""Looks at what a call returned, and at what it did beside: the output, or an exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A kernel with its framework."""

    kernel: Kernel
    framework: Framework
    function: Callable[..., Any]

    def run(self, verb: str, *arguments: Any, **options: Any) -> np.ndarray:
        """The output of a verb."""
        return self._begun()[verb](*arguments, **options)()

    def in_turn(self, calls: Sequence[Call]) -> tuple[np.ndarray, ...]:
        """The outputs of several calls, looked at after the last; raises as the verbs."""
        outputs: list[_Output] = [call.run(self._begun()) for call in calls]
        return tuple(output() for output in outputs)

    def _begun(self) -> dict[str, Callable[..., _Output]]:
        """The verbs, which call the kernel and do not look at what it returned."""
        return {"scaled_mm": self._scaled_mm, "scaled_grouped_mm": self._scaled_grouped_mm}

    def _scaled_mm(
        self,
        a: np.ndarray,
        b: np.ndarray,
        scale_a: np.ndarray,
        scale_b: np.ndarray,
        *,
        granularity_a: Granularity,
        granularity_b: Granularity,
        bias: np.ndarray | None,
        out_dtype: Format,
        use_fast_accum: bool,
        split_k: int,
        placement: Placement | None = None,
    ) -> _Output:
        # 1. What the kernel does not declare is not offered.
        name, is_placed = self.kernel.name, placement is not None
        _offer(
            (not self.kernel.is_grouped, f"{name} multiplies only groups of rows"),
            (not (is_placed and self.framework.name == "jax"), "JAX decides where its arrays lie"),
            (split_k == 1, "the library chooses the split-K, and your own kernel is not passed it"),
            *self._declared(a, b, out_dtype, use_fast_accum, is_blockwise=granularity_a.is_blockwise),
            (bias is None or self.kernel.takes_bias, f"{name} takes no bias"),
        )
        # 2. Scales in the granularities that it takes: rows of 1x128 scales that repeat are 128x128 ones.
        pair = granularity_a, granularity_b
        if _needs_squares(self.kernel, pair):
            squares = scale_a[::_SIDE]
            is_repeated = np.array_equal(np.repeat(squares, _SIDE, axis=0)[: len(a)], scale_a)
            _offer((is_repeated, f"{name} takes 128x128 scales of a; these are 1x128"))
            pair, scale_a = (_SQUARE, _SQUARE), squares
        _offer((pair in self.kernel.scales, f"{name} takes no scales {pair[0].value} x {pair[1].value}"))
        layouts = self.kernel.scales[pair]
        for layout, scale in zip(layouts, (scale_a, scale_b), strict=True):
            is_exact = not layout.is_inverse or bool((scale == _power_of_two(scale)).all())
            _offer((is_exact, f"{name} takes inverse scales, exact only for powers of two"))
        # 3. Operands and scales padded with zeros and ones, and laid out as declared.
        m, n, k = _padded((a.shape[0], b.shape[1], a.shape[1]), _multiples(self.kernel, granularity_a))
        at = placement or Placement()
        values: dict[Arg, Any] = {
            Arg.A: laid_operand(a, (m, k), self.kernel.a)._replace(padding=at.padding_a, offset=at.offset_a),
            Arg.B: laid_operand(b.T, (n, k), self.kernel.b)._replace(padding=at.padding_b, offset=at.offset_b),
            Arg.SCALE_A: laid_scale(scale_a.reshape(_shape(scale_a, pair[0])), pair[0], (m, k), layouts[0]),
            Arg.SCALE_B: laid_scale(scale_b.T.reshape(_shape(scale_b.T, pair[1])), pair[1], (n, k), layouts[1]),
            Arg.BIAS: None if bias is None else Laid(np.pad(bias, (0, n - bias.size)), False),
            Arg.GRANULARITY_A: self.kernel.granularity_word(pair[0]),
            Arg.GRANULARITY_B: self.kernel.granularity_word(pair[1]),
        }
        if Arg.SCALE_PRODUCT in self.kernel.args:
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                values[Arg.SCALE_PRODUCT] = float((scale_a.reshape(-1) * scale_b.reshape(-1))[0])
        # 4. The call, and later a look at what it returned.
        try:
            output = self._called(values, (m, n), out_dtype, use_fast_accum)
        except (NotOffered, KernelFault):
            raise
        except Exception as refusal:  # what no declaration says of memory a kernel may refuse, aloud
            if isinstance(refusal, RuntimeError) and _NOT_SUPPORTED in str(refusal):
                raise NotOffered(f"{name}: {_NOT_SUPPORTED}") from None
            is_of_layout = isinstance(refusal, RuntimeError) and _LAYOUT.search(str(refusal))
            if placement is None or not (isinstance(refusal, ValueError) or is_of_layout):
                raise
            raise NotOffered(f"{name} refuses {placement.text}: {refusal}") from None
        return lambda: output()[: a.shape[0], : b.shape[1]]

    def _scaled_grouped_mm(
        self,
        a: np.ndarray,
        b: np.ndarray,
        scale_a: np.ndarray,
        scale_b: np.ndarray,
        offs: np.ndarray,
        *,
        out_dtype: Format,
        use_fast_accum: bool,
    ) -> _Output:
        _offer(
            (self.kernel.is_grouped, f"{self.kernel.name} has no groups"),
            *self._declared(a, b, out_dtype, use_fast_accum, is_blockwise=False),
        )
        _, up_n, k = _padded((1, b.shape[2], a.shape[1]), self.kernel.multiples)
        values: dict[Arg, Any] = {
            Arg.A: laid_operand(a, (len(a), k), self.kernel.a),
            Arg.B: laid_operand(b.swapaxes(1, 2), (up_n, k), self.kernel.b),
            Arg.SCALE_A: Laid(scale_a, False),
            Arg.SCALE_B: Laid(np.pad(scale_b, ((0, 0), (0, up_n - b.shape[2])), constant_values=1), False),
            Arg.GRANULARITY_A: self.kernel.granularity_word(Granularity.ROWWISE),
            Arg.GRANULARITY_B: self.kernel.granularity_word(Granularity.ROWWISE),
            Arg.OFFS: Laid(offs, False),
            Arg.GROUP_SIZES: Laid(np.diff(offs, prepend=offs.dtype.type(0)), False),
        }
        output = self._called(values, (len(a), up_n), out_dtype, use_fast_accum)
        return lambda: output()[:, : b.shape[2]]

    def _declared(
        self, a: np.ndarray, b: np.ndarray, out_dtype: Format, use_fast_accum: bool, *, is_blockwise: bool
    ) -> tuple[tuple[bool, str], ...]:
        """For `_offer`: what every kernel declares."""
        kernel = self.kernel
        formats = format_by_name(a.dtype.name), format_by_name(b.dtype.name)
        is_fast = kernel.accumulation is Accumulation.FAST
        has_accumulation = kernel.chooses_accumulation or is_blockwise or use_fast_accum == is_fast
        return (
            (formats in kernel.formats, f"{kernel.name} does not multiply {formats[0]} x {formats[1]}"),
            (out_dtype in kernel.out_dtypes, f"{kernel.name} has no output {out_dtype}"),
            (has_accumulation, f"{kernel.name} has only {kernel.accumulation.value} accumulation"),
        )

    def _called(
        self, values: dict[Arg, Any], shape: tuple[int, int], out_dtype: Format, use_fast_accum: bool
    ) -> _Output:
        """Calls the kernel; its output is [M, N] with the padding."""
        framework, kernel = self.framework, self.kernel
        values[Arg.ZEROS] = Laid(np.zeros(shape, dtype_of(out_dtype)), kernel.out_column_major)
        inputs = {
            arg: Guarded(framework, f"the input {arg.value}", laid)
            for arg, laid in values.items()
            if isinstance(laid, Laid) and arg in kernel.args
        }
        output: Guarded | None = None
        if Arg.OUT in kernel.args:
            empty = Laid(unwritten(shape, dtype_of(out_dtype)), kernel.out_column_major)
            output = Guarded(framework, "the output", empty)
        given = {
            **values,
            **{arg: guarded.array for arg, guarded in inputs.items()},
            Arg.OUT: None if output is None else output.array,
            Arg.OUT_DTYPE: framework.dtype(out_dtype),
            Arg.USE_FAST_ACCUM: use_fast_accum,
            Arg.USE_SPLIT_ACCUMULATOR: not use_fast_accum,
        }
        keywords = {name: filled(template, given) for name, template in kernel.keywords.items()}
        try:
            returned = self.function(*filled(kernel.arguments, given), **keywords)
        except NotImplementedError as reason:
            raise NotOffered(text_of(reason)) from None
        return partial(self._output, returned, inputs, output, shape)

    def _output(
        self, returned: Any, inputs: dict[Arg, Guarded], output: Guarded | None, shape: tuple[int, int]
    ) -> np.ndarray:
        """What a call returned or wrote, after a look at the memory around its arrays."""
        framework = self.framework
        for guarded in (*inputs.values(), *([] if output is None else [output])):
            guarded.check_guards()
        for guarded in inputs.values():
            guarded.check_unchanged()
        if output is not None:
            returned = output.array
        elif not isinstance(returned, framework.array_type):
            raise TypeError(f"gave {type(returned).__name__}, expected an array of {framework.name}")
        computed = framework.store(returned)
        if computed.shape != shape:  # before the padding is cut off, which would hide it
            raise TypeError(f"gave an output of shape {list(computed.shape)}, expected {list(shape)}")
        if output is not None:
            check_written(computed)
        return computed


def _offer(*conditions: tuple[bool, str]) -> None:
    """Raises NotOffered with the reason of the first condition that does not hold."""
    for holds, reason in conditions:
        if not holds:
            raise NotOffered(reason)


def _multiples(kernel: Kernel, granularity_a: Granularity) -> tuple[int, int, int]:
    return kernel.block_multiples if granularity_a.is_blockwise else kernel.multiples


def _padded(sizes: tuple[int, int, int], multiples: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(-(-size // multiple) * multiple for size, multiple in zip(sizes, multiples, strict=True))


def _shape(scale: np.ndarray, granularity: Granularity) -> tuple[int, int]:
    """Recorded tensorwise scales have one dimension."""
    return (1, 1) if granularity is Granularity.TENSORWISE else (scale.shape[0], scale.shape[1])


def _needs_squares(kernel: Kernel, pair: tuple[Granularity, Granularity]) -> bool:
    """Whether a kernel of 128x128 by 128x128 scales is asked with 1x128 by 128x128 ones whose rows repeat."""
    return pair == (_VECTOR, _SQUARE) and pair not in kernel.scales and (_SQUARE, _SQUARE) in kernel.scales


def _power_of_two(scale: np.ndarray) -> np.ndarray:
    """The significand cut off."""
    return (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
