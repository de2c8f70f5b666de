"""A tensor core of float64 numbers, with a knob for each fault; nothing of the diagnosis computes it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from f8emu.conformance.cases.distributions import codes_of, dtype_of
from f8emu.conformance.run.subject import NotOffered, Subject, load_subject
from f8emu.spec import Format, Granularity, format_by_name

Number = np.ndarray


def _same(i: Number) -> Number:
    return i


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What can be wrong with the kernel below; the defaults are the hardware's."""

    step: int = 32
    term_bits: int = 13
    sum_bits: int = 13
    to_integer: Callable[[Number], Number] = np.trunc
    in_float32: bool = False
    as_float16: bool = False
    by_turns: bool = False
    promote: int | None = 128
    promote_fast: int | None = None
    slices: int = 1
    slices_above: int = 0
    slice_multiple: int = 128
    order: str = ""
    keeps_minus_zero: bool | None = None
    """None: tensorwise does not [EPI-1]."""
    bias: str = "added"
    through: Any = None
    flush: bool = False
    normalises: bool = False
    nan_is_480: bool = False
    cut_output: bool = False
    swap_scales: bool = False
    swap_operands: bool = False
    tail: int = 1
    last: int = 0
    read_a: Any = None
    read_b: Any = None
    scale_a_of: Callable[[Number], Number] = _same
    scale_b_of: Callable[[Number], Number] = _same
    block_a_of: Callable[[Number], Number] = _same
    block_b_of: Callable[[Number], Number] = _same
    bias_of: Callable[[Number], Number] = _same
    scales: Callable[[Number], Number] = _same
    spoil: Callable[[Number], None] = lambda out: None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")


@np.errstate(all="ignore")
def kernel(
    knobs: Knobs, a: Number, b: Number, scale_a: Number, scale_b: Number, *, out_dtype: Format, **options: Any
) -> Number:
    granularity_a: Granularity = options["granularity_a"]
    is_tensorwise, is_blockwise = granularity_a is Granularity.TENSORWISE, granularity_a.is_blockwise
    bias: Number | None = options["bias"]
    if out_dtype.name not in knobs.dtypes:
        raise NotOffered(f"no {out_dtype.name}")
    whole = (a.shape[1] - knobs.last) // knobs.tail * knobs.tail
    a, b = a[:, :whole], b[:whole]
    a = a if knobs.read_a is None else a.view(knobs.read_a)
    b = b if knobs.read_b is None else np.ascontiguousarray(b).view(knobs.read_b)
    if not is_tensorwise:
        places = (np.arange(n) for n in scale_a.shape)
        scale_a = scale_a[knobs.scale_a_of(next(places))][:, knobs.block_a_of(next(places))]
        places = (np.arange(n) for n in scale_b.shape)
        scale_b = scale_b[knobs.block_b_of(next(places))][:, knobs.scale_b_of(next(places))]
    bias = None if bias is None else bias[knobs.bias_of(np.arange(len(bias)))]
    if knobs.swap_operands:
        a, b = b.T, a.T
    if knobs.swap_scales and scale_a.shape == scale_b.T.shape:
        scale_a, scale_b = scale_b.T, scale_a.T
    scale_a, scale_b = knobs.scales(scale_a), knobs.scales(scale_b)
    keeps = not is_tensorwise if knobs.keeps_minus_zero is None else knobs.keeps_minus_zero
    zero = np.float32(-0.0 if keeps else 0)
    if is_blockwise:
        result = blocks(knobs, a, b, scale_a, scale_b, granularity_a, options["granularity_b"]) + zero
    else:
        promote = knobs.promote_fast if options["use_fast_accum"] else knobs.promote
        acc = accumulated(knobs, a, b, promote, options.get("split_k", 1))
        if bias is not None and knobs.bias == "first":
            acc = acc + bias.astype(np.float32)
        orders = {
            "acc*(sa*sb)": (acc, scale_a * scale_b),
            "(acc*sb)*sa": (acc * scale_b, scale_a),
            "(acc*sa)*sb": (acc * scale_a, scale_b),
        }
        value, factor = orders.get(knobs.order, orders["acc*(sa*sb)" if is_tensorwise else "(acc*sb)*sa"])
        result = value * factor + zero
        if bias is not None and knobs.bias == "fma":
            # of float64: a product of 48 bits and a sum that cancels are exact where it matters
            result = (value.astype(np.float64) * factor + bias.astype(np.float64)).astype(np.float32)
        elif bias is not None and knobs.bias == "added":
            result = result + bias.astype(np.float32)
    if knobs.through is not None:
        result = result.astype(knobs.through).astype(np.float32)
    output = result.astype(dtype_of(out_dtype))
    if knobs.cut_output and out_dtype.bits == 16:
        codes = codes_of(output)
        codes -= (np.abs(output.astype(np.float64)) > np.abs(result)) & np.isfinite(result)
    knobs.spoil(output)
    return output


def blocks(
    knobs: Knobs, a: Number, b: Number, scale_a: Number, scale_b: Number, of_a: Granularity, of_b: Granularity
) -> Number:
    rows = np.arange(a.shape[0]) // (of_a.block[0] or 1)
    columns = np.arange(b.shape[1]) // (of_b.block[0] or 1)
    exact = np.longdouble  # 64 bits of significand: the product of two float32 numbers, and nearly any sum with it
    total: Number = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for block in range(-(-a.shape[1] // 128)):
        k = slice(128 * block, 128 * block + 128)
        p = chain(knobs, a[:, k], b[k]).astype(np.float32)
        sa, sb = scale_a[rows, block][:, None], scale_b[block, columns][None]
        match knobs.order or ("fma(p*sa,sb)" if of_a is of_b else "fma(p,sa*sb)"):
            case "fma(p*sa,sb)":
                total = np.asarray(exact(p * sa) * exact(sb) + exact(total)).astype(np.float32)
            case "fma(p,sa*sb)":
                total = np.asarray(exact(p) * exact(sa * sb) + exact(total)).astype(np.float32)
            case "(p*sa)*sb":
                total = np.asarray((p * sa) * sb + total)
            case _:
                total = np.asarray(p * (sa * sb) + total)
    return total


def accumulated(knobs: Knobs, a: Number, b: Number, promote: int | None, split_k: int) -> Number:
    k = a.shape[1]
    slices = split_k if split_k > 1 else knobs.slices if k > knobs.slices_above else 1
    multiple = knobs.slice_multiple if slices > 1 else 128
    length = max(-(-k // (slices * multiple)) * multiple, multiple)
    total: Number = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for start in range(0, k, length):
        stop = min(start + length, k)
        part, piece = np.zeros_like(total), promote or length
        for begin in range(start, stop, piece):
            end = min(begin + piece, stop)
            part = part + chain(knobs, a[:, begin:end], b[begin:end]).astype(np.float32)
        total = total + part
    return total


def chain(knobs: Knobs, a: Number, b: Number) -> Number:
    if knobs.by_turns:
        a, b = by_turns(a.T).T, by_turns(b)
    (value_a, exp_a), (value_b, exp_b) = unpacked(knobs, a), unpacked(knobs, b)
    acc = np.zeros((a.shape[0], b.shape[1]))
    finite_a, finite_b = np.nan_to_num(value_a, posinf=0, neginf=0), np.nan_to_num(value_b, posinf=0, neginf=0)
    exp_a, exp_b = np.where(finite_a == 0, -400, exp_a), np.where(finite_b == 0, -400, exp_b)
    for start in range(0, a.shape[1], 1 if knobs.in_float32 else knobs.step):
        if knobs.in_float32:
            acc = (acc + finite_a[:, start, None] * finite_b[start]).astype(np.float32).astype(np.float64)
            continue
        step = np.arange(start, min(start + knobs.step, a.shape[1]))
        k = step[finite_a[:, step].any(axis=0) & finite_b[step].any(axis=1)]  # zeros add nothing
        if not k.size and knobs.sum_bits <= knobs.term_bits:
            continue  # what was cut once loses nothing more
        products = finite_a.T[k, :, None] * finite_b[k, None]
        exponents = exp_a.T[k, :, None] + exp_b[k, None]
        e_max = np.maximum(exponents.max(axis=0, initial=-800), np.where(acc == 0, -400, np.frexp(acc)[1] - 1))
        units = np.ldexp(1.0, knobs.term_bits - e_max)
        total = (knobs.to_integer(products * units).sum(axis=0) + knobs.to_integer(acc * units)) / units
        last = np.ldexp(1.0, np.frexp(total)[1] - 1 - knobs.sum_bits)
        acc = knobs.to_integer(total / last) * last + 0.0
    ieee = value_a @ value_b
    return np.where(np.isfinite(ieee), acc, ieee)


def by_turns(x: Number) -> Number:
    """[K, ..] with the first pair of each four of a group of 32 before the second pairs."""
    whole = np.concatenate([x, np.zeros((-len(x) % 32, x.shape[1]), x.dtype)])
    return whole.reshape(-1, 8, 2, 2, x.shape[1]).swapaxes(1, 2).reshape(whole.shape)


def unpacked(knobs: Knobs, x: Number) -> tuple[Number, Number]:
    fmt = format_by_name(x.dtype.name)
    fields = (codes_of(x) & fmt.magnitude_mask).astype(np.int64) >> fmt.fraction_bits
    values = x.astype(np.float64)
    if knobs.nan_is_480:
        values = np.where(np.isnan(values), np.where(np.signbit(x), -480, 480), values)
    if knobs.normalises:
        return values, np.frexp(np.nan_to_num(values, posinf=1, neginf=1))[1] - 1
    if knobs.as_float16:
        return values, np.maximum(np.frexp(np.nan_to_num(values, posinf=1, neginf=1))[1] - 1, -14)
    return np.where(fields == 0, 0.0, values) if knobs.flush else values, np.maximum(fields, 1) - fmt.bias


def subject_of(scaled_mm: Callable[..., Number]) -> Subject:
    return Subject(name="x", engine="numpy", verbs={"scaled_mm": scaled_mm})


def subject(**knobs: Any) -> Subject:
    return replace(subject_of(partial(kernel, Knobs(**knobs))), name="planted")


def failing(fails: Callable[[int, int], bool], error: BaseException, **knobs: Any) -> tuple[Subject, list[int]]:
    """A planted kernel that fails on GEMMs of some (call, K), and the K of its calls."""
    verb, calls = subject(**knobs).verbs["scaled_mm"], list[int]()

    def run(a: Number, *args: Any, **options: Any) -> Number:
        calls.append(a.shape[1])
        if fails(len(calls), a.shape[1]):
            raise error
        return verb(a, *args, **options)

    return subject_of(run), calls


def spoilt(spoil: Callable[[Number, Number], None]) -> Subject:
    """The oracle, after which `spoil(a, out)` writes to its output."""
    verb = load_subject("f8ref.numpy").verbs["scaled_mm"]

    def run(a: Number, *args: Any, **options: Any) -> Number:
        output = verb(a, *args, **options).copy()
        spoil(a, output)
        return output

    return subject_of(run)


def never_promoting(has_nan: Callable[[Number], bool]) -> Subject:
    """The oracle with fast accumulation alone, and NaN in a corner of some outputs."""
    right = load_subject("f8ref.numpy")

    def scaled_mm(*operands: Number, **options: Any) -> Number:
        out = right.verbs["scaled_mm"](*operands, **{**options, "use_fast_accum": True}).copy()
        if has_nan(out):
            out[:2, -3:] = np.nan
        return out

    return replace(right, name="planted", verbs={"scaled_mm": scaled_mm}, chooses_split_k=True)
