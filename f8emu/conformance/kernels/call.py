"""How the suite runs a declared kernel: the case that it gets, its call, and what is checked around it."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from f8emu.conformance.arrays import Framework
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import GemmCase, Memory, Mode, NotOffered, Placement, Sample
from f8emu.conformance.compare import text_of
from f8emu.conformance.kernels.faults import Guarded, KernelFault, check_written, unwritten
from f8emu.conformance.kernels.imported import function_of
from f8emu.conformance.kernels.kernel import (
    Accumulation,
    Arg,
    Kernel,
    Laid,
    filled,
    laid_blocks,
    laid_operand,
    laid_scale,
)
from f8emu.spec import Granularity, format_by_name
from f8emu.spec.gemm_call import GroupKind, Shaped, group_parts, scaled_grouped_mm_call
from f8emu.spec.scaling import BLOCK, MX_BLOCK

_SQUARE = Granularity.BLOCKWISE_128X128
_VECTOR = Granularity.BLOCKWISE_1X128
_ROWWISE = Granularity.ROWWISE
# Words of a RuntimeError that refuses where operands lie; `misaligned address` is a crash.
_LAYOUT = re.compile(r"\b(strid|contiguous|align|CUBLAS_STATUS_INVALID_VALUE)", re.IGNORECASE)
# The library's word for a GEMM that it has no kernel for.
_NOT_SUPPORTED = "CUBLAS_STATUS_NOT_SUPPORTED"
_Pair = tuple[Granularity, Granularity]


def question(kernel: Kernel, case: GemmCase) -> GemmCase:
    """The case in the form that this kernel accepts: another output type, no bias, scales that it can hold.

    The judge gets the same case. A case that no such change makes possible stays, and is not offered.
    """
    if case.mode is Mode.BF16 or case.mode.is_grouped != kernel.is_grouped:
        return case
    if case.mode.is_microscaled and kernel.is_microscaled:
        case = replace(case, chip=kernel.chip)
    changes: list[str] = []
    # 1. Output type and accumulation: those that the kernel has.
    if case.out_dtype not in kernel.out_dtypes:
        out_dtype = kernel.out_dtypes[0]
        bias = None if case.bias is None else case.bias.astype(dtype_of(out_dtype))
        case = replace(case, out_dtype=out_dtype, bias=bias)
    if not case.granularity_a.is_blockwise and not kernel.chooses_accumulation:
        case = replace(case, use_fast_accum=kernel.accumulation is Accumulation.FAST)
    # 2. [EPI-3] [EPI-5] Bias and scales. The name says what was changed: the case has other bits then.
    if case.bias is not None and not kernel.takes_bias:
        case, changes = replace(case, bias=None), [*changes, "no bias"]
    if case.scale_a is not None and _needs_squares(kernel, (case.granularity_a, case.granularity_b)):
        case = replace(case, scale_a=case.scale_a[_first_of_block(case)])
        changes.append("a's scales in squares")
    has_inverse = any(layout.is_inverse for pair in kernel.scales.values() for layout in pair)
    if has_inverse and case.scale_a is not None and case.scale_b is not None:
        case = replace(case, scale_a=_power_of_two(case.scale_a), scale_b=_power_of_two(case.scale_b))
        changes.append("scales powers of two")
    # 3. The calls between, in the same form.
    case = replace(case, between=tuple(question(kernel, call) for call in case.between))
    return replace(case, id=f"{case.id} ({', '.join(changes)})") if changes else case


def rows_run(kernel: Kernel, case: GemmCase) -> int:
    """With how many rows the kernel is called for a case: M padded, but not of groups."""
    return case.a.shape[-2] if kernel.is_grouped else _padded(kernel, case.granularity_a, case.a.shape[0], 1, 1)[0]


Calls = Callable[[Sequence[GemmCase]], tuple[np.ndarray, ...]]
"""Calls a kernel with one GEMM after the other, and only then looks at what it returned: the outputs, in order.

Of a sampled GEMM that is run at its full size, those of the sample: the whole does not travel between processes.
"""


def calls_of(kernel: Kernel, framework: Framework) -> Calls:
    """How GEMMs are put to a kernel; one that it does not have raises NotOffered."""
    kernel.require_writable(framework.name)
    try:
        called = _Called(kernel=kernel, framework=framework, function=function_of(kernel, framework))
    except NotOffered as reason:
        return absent(str(reason))

    def calls(cases: Sequence[GemmCase]) -> tuple[np.ndarray, ...]:
        begun, inputs = list[_Output](), _Inputs()
        for case in cases:
            sample = case.sample if case.sample is not None and (framework.on_gpu or case.sample.is_run) else None
            whole = case if sample is None else case.embedded(sample)
            output, inputs = called.begun(whole, {} if case.memory is Memory.NEW else inputs)
            begun.append(output if sample is None else partial(_sampled, output, sample))
        return tuple(output() for output in begun)

    return calls


def absent(reason: str) -> Calls:
    """The calls of a kernel that is not here."""
    return partial(_refused, reason)


def _sampled(output: "_Output", sample: Sample) -> np.ndarray:
    return output()[np.ix_(sample.rows, sample.cols)]


def _refused(reason: str, cases: Sequence[GemmCase]) -> tuple[np.ndarray, ...]:
    raise NotOffered(reason)


# Looks at what a call returned, and at what it did beside: the output, or an exception.
_Output = Callable[[], np.ndarray]
_Inputs = dict[Arg, Guarded]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Called:
    """A kernel with its framework."""

    kernel: Kernel
    framework: Framework
    function: Callable[..., Any]

    def begun(self, case: GemmCase, before: _Inputs) -> tuple[_Output, _Inputs]:
        """Calls the kernel, and does not look at what it returned; `before` are arrays that it is given again."""
        # 1. What the kernel does not declare is not offered.
        for reason in self._refusals(case):
            raise NotOffered(reason)
        # 2. Operands and scales, padded and laid out as declared.
        name, (rows, n) = self.kernel.name, case.output_shape
        m, up_n, k = _padded(self.kernel, case.granularity_a, rows, n, case.k)
        if case.group_kind is not None:
            m = case.a.shape[-2]  # `offs` ends with it
            up_n, k = (up_n, k) if case.group_kind is GroupKind.ROWS else (n, case.k)
        values = self._values(case, m, up_n, k)
        # 3. The call, and later a look at what it returned.
        try:
            inputs = self._inputs(case, values, before)
            output = self._output_of(case, values, inputs, (*case.leading, m, up_n))
        except (NotOffered, KernelFault):
            raise
        except Exception as refusal:  # what no declaration says of memory a kernel may refuse, aloud
            is_runtime = isinstance(refusal, RuntimeError)
            if is_runtime and _NOT_SUPPORTED in str(refusal):
                raise NotOffered(f"{name}: {_NOT_SUPPORTED}") from None
            is_of_layout = isinstance(refusal, ValueError) or (is_runtime and _LAYOUT.search(str(refusal)))
            if case.placement is None or not is_of_layout:
                raise
            raise NotOffered(f"{name} refuses {case.placement.text}: {refusal}") from None
        return lambda: output().reshape(-1, up_n)[:rows, :n], inputs

    def _refusals(self, case: GemmCase) -> Iterator[str]:
        # Reasons, by the declaration, for which the kernel does not have such a GEMM.
        kernel, formats = self.kernel, (format_by_name(case.a.dtype.name), format_by_name(case.b.dtype.name))
        kind, offs = case.group_kind, case.offs
        if kernel.is_grouped != (kind is not None):
            yield f"{kernel.name} {'multiplies only groups' if kernel.is_grouped else 'has no groups'}"
        elif kind is not None:
            multiple = kernel.group_multiples.get(kind)
            if multiple is None:
                yield f"{kernel.name} has no groups where {kind.description}"
            elif offs is not None and (np.diff(offs, prepend=0) % multiple).any():
                yield f"{kernel.name} takes groups whose sizes are multiples of {multiple}"
        if case.chip != kernel.chip:
            yield f"{kernel.name} has the bits of {kernel.chip}, this GEMM those of {case.chip}"
        if case.placement is not None and self.framework.name == "jax":
            yield "JAX decides where its arrays lie"
        if case.split_k != 1:
            yield "the library chooses the split-K, and your own kernel is not passed it"
        if formats not in kernel.formats:
            yield f"{kernel.name} does not multiply {formats[0]} x {formats[1]}"
        if case.out_dtype not in kernel.out_dtypes:
            yield f"{kernel.name} has no output {case.out_dtype}"
        if not kernel.has_accumulation(_pair(case), case.use_fast_accum):
            yield f"{kernel.name} has only {kernel.accumulation.value} accumulation"
        if case.bias is not None and not kernel.takes_bias:
            yield f"{kernel.name} takes no bias"

    def _values(self, case: GemmCase, m: int, n: int, k: int) -> dict[Arg, Any]:
        kernel, at, offs = self.kernel, case.placement or Placement(), case.offs
        pair, scale_a, scale_b = self._scales(case, m, n, k)
        a, b = laid_operand(case.a, (m, k), kernel.a), laid_operand(case.b, (n, k), kernel.b)
        if at.is_turned and m == 1:
            a = a._replace(column_major=not a.column_major)
        values: dict[Arg, Any] = {
            Arg.A: a,
            Arg.B: b,
            Arg.SCALE_A: scale_a,
            Arg.SCALE_B: scale_b,
            Arg.BIAS: None if case.bias is None else Laid(_wider(case.bias, n, 0)),
            Arg.GRANULARITY_A: kernel.granularity_word(pair[0]),
            Arg.GRANULARITY_B: kernel.granularity_word(pair[1]),
            Arg.OUT_DTYPE: self.framework.dtype(case.out_dtype),
            Arg.USE_FAST_ACCUM: case.use_fast_accum,
            Arg.USE_SPLIT_ACCUMULATOR: not case.use_fast_accum,
            Arg.ZEROS: Laid(np.zeros((m, n), dtype_of(case.out_dtype)), kernel.out_column_major),
        }
        values |= dict.fromkeys((Arg.OFFS, Arg.GROUP_SIZES))
        if offs is not None:
            values[Arg.OFFS], values[Arg.GROUP_SIZES] = Laid(offs), Laid(np.diff(offs, prepend=offs.dtype.type(0)))
        if Arg.SCALE_PRODUCT in kernel.args and case.scale_a is not None and case.scale_b is not None:
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                values[Arg.SCALE_PRODUCT] = float((case.scale_a.reshape(-1) * case.scale_b.reshape(-1))[0])
        for arg, laid in values.items():
            if isinstance(laid, Laid):
                padding, offset = at.paddings.get(arg.value, 0), at.offsets.get(arg.value, 0)
                values[arg] = laid._replace(padding=padding, offset=offset)
        return values

    def _scales(self, case: GemmCase, m: int, n: int, k: int) -> tuple[_Pair, Laid | float, Laid | float]:
        # Scales in granularities that the kernel takes: 1x128 scales whose rows repeat are 128x128 ones.
        kernel, pair, (scale_a, scale_b) = self.kernel, _pair(case), case.scales
        if case.group_kind is not None and case.mode.is_microscaled:
            shapes, of_b = ((m, k), (n, k)), scale_b.swapaxes(-1, -2)
            sides = zip((scale_a, of_b), shapes, _places(case), kernel.scales[pair], strict=True)
            laid_a, laid_b = (
                laid_blocks(scale, (rows, -(-k // MX_BLOCK)), groups, layout)
                for scale, (rows, k), groups, layout in sides
            )
            return pair, laid_a, laid_b
        if case.group_kind is not None:
            is_wider = case.group_kind is GroupKind.ROWS
            return pair, Laid(scale_a), Laid(_wider(scale_b, n, 1) if is_wider else scale_b)
        if _needs_squares(kernel, pair):
            pair, squares = (_SQUARE, _SQUARE), scale_a[::BLOCK]
            if not np.array_equal(_repeated(squares, len(case.a)), scale_a):
                raise NotOffered(f"{kernel.name} takes 128x128 scales of a; these are 1x128")
            scale_a = squares
        if pair not in kernel.scales:
            raise NotOffered(f"{kernel.name} takes no scales {pair[0].value} x {pair[1].value}")
        of_a, of_b = kernel.scales[pair]
        for layout, scale in ((of_a, scale_a), (of_b, scale_b)):
            if layout.is_inverse and not (scale == _power_of_two(scale)).all():
                raise NotOffered(f"{kernel.name} takes inverse scales, exact only for powers of two")
        # recorded tensorwise scales are vectors
        scale_a, scale_b = np.atleast_2d(scale_a), np.atleast_2d(scale_b.T)
        return pair, laid_scale(scale_a, pair[0], (m, k), of_a), laid_scale(scale_b, pair[1], (n, k), of_b)

    def _inputs(self, case: GemmCase, values: dict[Arg, Any], before: _Inputs) -> _Inputs:
        # The arrays between guard zones: new ones, or those of the call before with other contents.
        inputs = _Inputs()
        for arg, laid in values.items():
            if isinstance(laid, Laid) and arg in self.kernel.args:
                known = before.get(arg)
                if known is None or not known.refill(laid.array, in_new_array=case.memory is Memory.ADDRESSES):
                    known = Guarded(self.framework, f"the input {arg.value}", laid)
                inputs[arg] = known
        return inputs

    def _output_of(self, case: GemmCase, values: dict[Arg, Any], inputs: _Inputs, shape: tuple[int, ...]) -> _Output:
        # Calls the kernel; its output is [M, N] with the padding, of groups [G, M, N] too.
        framework, kernel, dtype = self.framework, self.kernel, dtype_of(case.out_dtype)
        arguments, out = {**values, **{arg: guarded.array for arg, guarded in inputs.items()}}, list[Guarded]()
        if case.placement is not None and case.placement.is_shared:
            for first, second in ((Arg.A, Arg.B), (Arg.SCALE_A, Arg.SCALE_B)):
                if {first, second} <= inputs.keys() and (both := inputs[first].shared(values[second])) is not None:
                    arguments[second] = both
        # Rows behind the last group are zeros, or nobody's.
        end = shape[-2]
        if kernel.leaves_rows_behind and case.group_kind is GroupKind.ROWS and case.offs is not None:
            end = int(case.offs[-1])
        if Arg.OUT in kernel.args:
            out = [Guarded(framework, "the output", Laid(unwritten(shape, dtype), kernel.out_column_major))]
            arguments[Arg.OUT] = out[0].array
        keywords = {name: filled(template, arguments) for name, template in kernel.keywords.items()}
        try:
            returned = self.function(*filled(kernel.arguments, arguments), **keywords)
        except NotImplementedError as reason:
            raise NotOffered(text_of(reason)) from None

        def output() -> np.ndarray:
            for guarded in (*inputs.values(), *out):
                guarded.check_guards()
            for guarded in inputs.values():
                guarded.check_unchanged()
            result = out[0].array if out else returned
            if not isinstance(result, framework.array_type):
                raise TypeError(f"gave {type(result).__name__}, expected an array of {framework.name}")
            computed = framework.store(result)
            if computed.shape != shape:  # before the padding is cut off, which would hide it
                raise TypeError(f"gave an output of shape {list(computed.shape)}, expected {list(shape)}")
            if out:
                check_written(computed[..., :end, :])
            return computed if end == shape[-2] else np.pad(computed[:end], ((0, shape[-2] - end), (0, 0)))

        return output


def _padded(kernel: Kernel, granularity_a: Granularity, *sizes: int) -> tuple[int, ...]:
    multiples = kernel.block_multiples if granularity_a.is_blockwise else kernel.multiples
    if granularity_a.is_microscaled:
        multiples = (*kernel.multiples[:2], math.lcm(kernel.multiples[2], MX_BLOCK))
    return tuple(-(-size // multiple) * multiple for size, multiple in zip(sizes, multiples, strict=True))


def _pair(case: GemmCase) -> _Pair:
    # Groups have rowwise scales, or E8M0 ones.
    is_rowwise = case.mode is Mode.GROUPED_ROWWISE
    return (_ROWWISE, _ROWWISE) if is_rowwise else (case.granularity_a, case.granularity_b)


def _places(case: GemmCase) -> tuple[list[Any], list[Any]]:
    # The indices of each group's E8M0 scales, [.., rows, blocks] of a and of b.
    arrays = case.a, case.b.swapaxes(-1, -2), *case.scales, case.offs
    call = scaled_grouped_mm_call(*(Shaped(x.shape, x.dtype.name) for x in arrays if x is not None), chip=case.chip)
    parts = group_parts(call, None if case.offs is None else case.offs.tolist())
    of_b = ((*part.scale_b[:-2], *part.scale_b[:-3:-1]) for part in parts)
    return [part.scale_a for part in parts], list(of_b)


def _wider(x: np.ndarray, columns: int, value: int) -> np.ndarray:
    return np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, columns - x.shape[-1])], constant_values=value)


def _needs_squares(kernel: Kernel, pair: _Pair) -> bool:
    # A kernel of 128x128 by 128x128 scales is asked with 1x128 by 128x128 ones whose rows repeat.
    return pair == (_VECTOR, _SQUARE) and pair not in kernel.scales and (_SQUARE, _SQUARE) in kernel.scales


def _first_of_block(case: GemmCase) -> np.ndarray:
    # For each row of a the first of its block of 128; of a sample the first that is sampled.
    rows = np.arange(case.a.shape[0]) if case.sample is None else np.array(case.sample.rows)
    _, first, block = np.unique(rows // BLOCK, return_index=True, return_inverse=True)
    return first[block]


def _repeated(squares: np.ndarray, rows: int) -> np.ndarray:
    return np.repeat(squares, BLOCK, axis=0)[:rows]


def _power_of_two(scale: np.ndarray) -> np.ndarray:
    # The significand cut off.
    return (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
