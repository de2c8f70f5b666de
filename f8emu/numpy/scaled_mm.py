"""The GEMMs, scaled_mm, scaled_grouped_mm and mm, single instructions, mma, and linear layers of three GEMMs.

Exactness of all: the bits of the verbs of `f8ref.numpy`, which define them: on all recorded cases those of the device.
"""

from __future__ import annotations  # the signatures that `help` shows have names of types, not numpy's unions

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from f8emu.numpy import emulation
from f8emu.numpy.cast import FormatLike, array_of, chip_of, output_format, typed
from f8emu.numpy.emulation import Array
from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER
from f8emu.spec.errors import SpecError
from f8emu.spec.formats import BFLOAT16, E4M3FN, FORMATS
from f8emu.spec.gemm import GEMM_NAMES, LAYER_LAYOUTS, OPERANDS, LinearTrace
from f8emu.spec.gemm_call import layer_call
from f8emu.spec.names import ChipName, GemmName, GranularityName, RecipeName
from f8emu.spec.recipe import Recipe, recipe_by_name
from f8emu.spec.scaling import DelayedState, Granularity
from f8emu.split_k.ask import split_of
from f8ref import numpy as oracle
from f8ref.numpy.checks import GemmArrays, checked_mm, checked_scaled_mm, grouped_product
from f8ref.numpy.grouped_linear import GroupedLinearTrace, by_expert
from f8ref.numpy.linear import traced

_CALLER = "f8emu.numpy"


def scaled_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    out_dtype: FormatLike = "bfloat16",
    use_fast_accum: bool = False,
    granularity_a: Granularity | GranularityName | None = None,
    granularity_b: Granularity | GranularityName | None = None,
    split_k: int | None = None,
    chip: Chip | ChipName = HOPPER,
) -> Array:
    """The float8 GEMM of a chip's tensor core, Hopper's by default: `out = round(accumulate(a @ b) * scales + bias)`.

    Granularities that are not given are inferred from the shapes of the scales, as `torch._scaled_mm` does; the first
    that fits is taken: tensorwise (one element each), rowwise, then 1x128 before 128x128. Give them if the shapes fit
    more than one: a single row with block scales, or K <= 128.

    Shapes:
        a [M, K], b [K, N], float8, of any extents; float32 scales, of `a`: one element, [M, 1], [M, ceil(K / 128)] or
        [ceil(M / 128), ceil(K / 128)], and of `b`, as the transposed scales of `b.T`: one element, [1, N],
        [ceil(K / 128), N] or [ceil(K / 128), ceil(N / 128)]; bias [N] of any high precision -> [M, N] of out_dtype.
        MXFP8, on chips such as "B200": float8_e8m0fnu scales [M, ceil(K / 32)] and [ceil(K / 32), N] [MX-1..5].

    Args:
        a: left operand.
        b: right operand.
        scale_a: factors that decode `a`.
        scale_b: factors that decode `b`.
        bias: added in float32 after scaling [EPI-3].
        out_dtype: float32, bfloat16 or float16: a Format, its name or a dtype.
        use_fast_accum: one chain over all of K [CHAIN-1] instead of promotion every 128 [CHAIN-2].
        granularity_a: of `scale_a`, if its shape is ambiguous.
        granularity_b: of `scale_b`, if its shape is ambiguous.
        split_k: the number of slices of K that are accumulated separately [CHAIN-3]; None takes it from the plan,
            `f8emu.split_k.plan` [PLAN-1..7]. A shape that the plan does not know is not split; a warning says so once.
        chip: whose bits: a profile such as those of `f8emu.spec.CHIPS`, or the name of one of them. Each says what it
            stands on (`evidence`). Hopper (an H200's) and H100 have a `plan`; for others S is 1.

    Raises:
        OperandError: wrong dtype, shape or scales.
        SpecError: an unknown chip, granularity or `out_dtype`, or a `split_k` below 1.
        UnsupportedError: a combination that the chip has no GEMM for.
    """
    call = "scaled_mm"
    gemm = checked_scaled_mm(
        array_of(call, "a", a),
        array_of(call, "b", b),
        _scale(call, "scale_a", scale_a),
        _scale(call, "scale_b", scale_b),
        bias=None if bias is None else typed(call, "bias", bias),
        granularity_a=granularity_a,
        granularity_b=granularity_b,
        out_dtype=output_format(call, out_dtype),
        use_fast_accum=use_fast_accum,
        split_k=split_k,
        chip=chip_of(call, chip),
    )
    return emulation.product(_planned(gemm))


def scaled_grouped_mm(
    a: ArrayLike,
    b: ArrayLike,
    scale_a: ArrayLike,
    scale_b: ArrayLike,
    offs: ArrayLike | None = None,
    *,
    out_dtype: FormatLike = "bfloat16",
    use_fast_accum: bool = False,
    chip: Chip | ChipName = HOPPER,
) -> Array:
    """`(acc * scale_a) * scale_b` of every group, each a GEMM of its own [EPI-6].

    `offs` divides one dimension: group g runs from `offs[g - 1]` (0 for the first) up to `offs[g]`, and may be empty.
    Rows or columns beyond the last group give zeros; a K beyond it is not summed. On hardware these outputs are
    undefined, and groups along K must have sizes that are multiples of 16.

    Shapes:
        a and b float8, scales float32, offs integers [G]; the result is of out_dtype.
        rows of a: a [M, K], b [G, K, N], scale_a [M], scale_b [G, N] -> [M, N].
        columns of b: a [G, M, K], b [K, N], scale_a [G, M], scale_b [N] -> [M, N].
        K: a [M, K], b [K, N], scale_a [G * M], scale_b [G * N] -> [G, M, N].
        nothing, without offs: a [G, M, K], b [G, K, N], scale_a [G, M], scale_b [G, N] -> [G, M, N].
        MXFP8: float8_e8m0fnu scales of their operand's shape, with ceil(K / 32) in place of K. Groups of K then begin
        at multiples of 32.

    Raises:
        OperandError: offsets that fall or pass the size that they divide.
        OperandError, SpecError, UnsupportedError: as for `scaled_mm`.
    """
    call = "scaled_grouped_mm"
    ends = None if offs is None else _ends(call, offs)
    return grouped_product(
        emulation.product,
        array_of(call, "a", a),
        array_of(call, "b", b),
        _scale(call, "scale_a", scale_a),
        _scale(call, "scale_b", scale_b),
        ends,
        out_dtype=output_format(call, out_dtype),
        use_fast_accum=use_fast_accum,
        chip=chip_of(call, chip),
    )


def mm(
    a: ArrayLike,
    b: ArrayLike,
    *,
    out_dtype: FormatLike = "bfloat16",
    split_k: int | None = None,
    chip: Chip | ChipName = HOPPER,
) -> Array:
    """The bfloat16 GEMM of a chip's tensor core, Hopper's by default, for GEMMs kept in high precision [BF16-1].

    Shapes:
        a [M, K], b [K, N], bfloat16 or values that bfloat16 holds, of any extents -> [M, N] of out_dtype.

    `split_k` is as for `scaled_mm` [BF16-2]; the plan's depends on the strides of `a` and `b`.

    Raises:
        OperandError: values that bfloat16 does not hold.
        OperandError, SpecError, UnsupportedError: as for `scaled_mm`.
    """
    a_MK, b_KN = typed("mm", "a", a, BFLOAT16), typed("mm", "b", b, BFLOAT16)
    options = {"out_dtype": output_format("mm", out_dtype), "split_k": split_k, "chip": chip_of("mm", chip)}
    return emulation.product(_planned(checked_mm(a_MK, b_KN, **options)))


def mma(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    *,
    chip: Chip | ChipName = HOPPER,
    out_dtype: FormatLike = "float32",
) -> Array:
    """`dot(a, b) + c` of every case by one matrix instruction of the chip, or several in a row where K is longer.

    Shapes:
        a and b [cases, K], float8 or bfloat16; c [cases] of `out_dtype`, or values that it holds -> [cases] of
        `out_dtype`. With scales, both float8_e8m0fnu [cases, ceil(K / 32)], the block-scaled instruction [MX-2].

    Raises:
        OperandError: operands of the wrong dtype or shape.
        SpecError: unknown `out_dtype` or chip.
        UnsupportedError: formats that the chip's profile has no instruction for.
    """
    target = output_format("mma", out_dtype)
    operands = array_of("mma", "a", a), array_of("mma", "b", b), typed("mma", "c", c, target)
    named = ("scale_a", scale_a), ("scale_b", scale_b)
    scales = (None if scale is None else array_of("mma", name, scale) for name, scale in named)
    return oracle.mma(*operands, *scales, chip=chip_of("mma", chip), out_dtype=target)


def _scale(call: str, name: str, x: ArrayLike) -> Array:
    """Scales of float32, values that it holds, or E8M0; bytes stay, since they are no values, and are refused later."""
    array = array_of(call, name, x)
    return array if array.dtype == np.uint8 else typed(call, name, array)


def _planned(gemm: GemmArrays) -> GemmArrays:
    """The GEMM with the S of the plan, if its caller gives none [PLAN-1..7]."""
    # [PLAN-3] As cuBLAS names layouts: its first operand is `b`.
    is_transposed = [x.strides[1] != x.itemsize and x.strides[0] == x.itemsize for x in (gemm.b_NK.T, gemm.a_MK)]
    split = split_of(_CALLER, gemm.call, "".join("nt"[is_t] for is_t in is_transposed))
    return gemm._replace(call=replace(gemm.call, split_k=split.split_k))


def linear(
    recipe: Recipe | RecipeName,
    input: ArrayLike,
    weight: ArrayLike,
    grad_output: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    delayed_state: Mapping[str, DelayedState] | None = None,
    split_k: Mapping[GemmName, int] | None = None,
    chip: Chip | ChipName | None = None,
) -> LinearTrace:
    """Every amax, scale, code and product of a linear layer; the backward too if `grad_output` is given.

    The layer of `f8emu.torch.convert_to_float8_training` and of `f8emu.jax.dot_general`, opened up. All products have
    the dtype of `input`. A bias is rounded to that dtype and added to the rounded output.

    Shapes:
        input [M, K], weight [N, K], grad_output [M, N], bias [N], float32, bfloat16, float16 or values that float32
        holds; operands in the trace are [rows, summed dimension].

    `delayed_state` is a mapping tensor name -> state, for a recipe with delayed scaling. It stays as it is: calling
    `update_delayed_state` once a step, with an amax of the trace, is the caller's. Until a state is initialised, a cast
    uses its own amax. `split_k` maps GEMM names to slices of K [CHAIN-3]; for others it is the plan's, as in
    `scaled_mm`. `chip` is a profile, or its name, in place of the recipe's.

    Raises:
        OperandError: wrong dtypes or shapes; `delayed_state` missing, or given to a recipe without delayed scaling.
        SpecError: an unknown recipe, chip or GEMM.
    """
    plan = recipe if isinstance(recipe, Recipe) else recipe_by_name(recipe)
    on = chip_of("linear", plan.chip if chip is None else chip)
    tensors = {"input": typed("linear", "input", input), "weight": typed("linear", "weight", weight)}
    if grad_output is not None:
        tensors["grad_output"] = typed("linear", "grad_output", grad_output)
    return traced(
        plan,
        tensors["input"],
        tensors["weight"],
        tensors.get("grad_output"),
        None if bias is None else typed("linear", "bias", bias),
        delayed_state=delayed_state,
        split_k=dict(planned_slices(plan, tensors, split_k, on).items()),
        chip=on,
        verbs=emulation.VERBS,
    )


def planned_slices(
    plan: Recipe, tensors: Mapping[str, Array], split_k: Mapping[GemmName, int] | None, on: Chip
) -> dict[GemmName, int]:
    """The slices of K of a layer's GEMMs: those of `split_k`, and for the others the plan's."""
    slices = dict(split_k or {})
    if not slices.keys() <= OPERANDS.keys():
        raise SpecError(f"linear: split_k must name GEMMs, {', '.join(OPERANDS)}; got {', '.join(map(str, slices))}")
    if all(x.ndim == 2 for x in tensors.values()):  # if not, the oracle says so
        (m, k), n = tensors["input"].shape, tensors["weight"].shape[0]
        sizes = {"output": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}
        out = FORMATS[tensors["input"].dtype.name]
        for name, gemm in zip(GEMM_NAMES, plan.gemms.values(), strict=True):
            if name not in slices and set(OPERANDS[name]) <= tensors.keys():
                call = layer_call(gemm, sizes[name], out, on)
                slices[name] = split_of(_CALLER, call, LAYER_LAYOUTS[name]).split_k
    return slices


def grouped_linear(
    recipe: Recipe | RecipeName,
    input: ArrayLike,
    weight: ArrayLike,
    offs: ArrayLike,
    grad_output: ArrayLike | None = None,
    *,
    delayed_state: Sequence[Mapping[str, DelayedState]] | None = None,
    chip: Chip | ChipName | None = None,
) -> GroupedLinearTrace:
    """Every amax, scale, code and product of a grouped linear layer; the backward too if `grad_output` is given.

    Expert by expert a `linear` of the rows from `offs[e - 1]` (0 for the first) up to `offs[e]`, which may be none, and
    of `weight[e]`, with scales of its own. `delayed_state` gives the states of each expert. GEMMs of E4M3 or bfloat16
    with a bfloat16 product are not split, as the grouped kernels split none; for the others S is the plan's.

    Shapes:
        input [T, K], weight [E, N, K], offs integers [E], grad_output [T, N] -> result [T, N], grad_input [T, K],
        grad_weight [E, N, K]; rows beyond the last group give zeros.

    Raises:
        OperandError: wrong dtypes or shapes, offsets that fall or pass the last row, and what `linear` refuses.
        SpecError: an unknown recipe or chip.
    """
    call, plan = "grouped_linear", recipe if isinstance(recipe, Recipe) else recipe_by_name(recipe)
    x, weights = typed(call, "input", input), typed(call, "weight", weight)
    is_bfloat16 = x.dtype.name == BFLOAT16.name
    gemms = zip(GEMM_NAMES, plan.gemms.values(), strict=True) if is_bfloat16 else ()
    unsplit: dict[GemmName, int] = {name: 1 for name, gemm in gemms if {gemm.a.format, gemm.b.format} <= {E4M3FN, None}}

    def expert(number: int, x: Array, w: Array, g: Array | None) -> LinearTrace:
        state = None if delayed_state is None else delayed_state[number]
        return linear(plan, x, w, g, delayed_state=state, split_k=unsplit, chip=chip)

    g = None if grad_output is None else typed(call, "grad_output", grad_output)
    return by_expert(expert, x, weights, _ends(call, offs), g)


def _ends(call: str, offs: ArrayLike) -> Array:
    """Integers of any width as int32, where that holds them."""
    ends = array_of(call, "offs", offs)
    return ends.astype(np.int32) if ends.dtype.kind in "iu" and (np.abs(ends) < 2**31).all() else ends
