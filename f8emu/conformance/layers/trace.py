"""A layer as the verb `linear` computes it, and what that says of a layer that trains.

`trace_parts` gives all that the verb gives. `layer_parts` gives what can be seen of a layer that trains: the operands
as they enter a GEMM, its product, the output, the gradients that autograd leaves, and the state of delayed scaling.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import Verbs
from f8emu.conformance.layers.layer import LayerCase, Place
from f8emu.spec import (
    GEMM_NAMES,
    OPERANDS,
    Cast,
    DelayedState,
    Format,
    GemmTrace,
    Granularity,
    LinearTrace,
    OperandTrace,
    Recipe,
    chip_by_name,
)
from f8emu.split_k.gemm import PlannedGemm, of_layer
from f8emu.split_k.plan import split_k

Parts = dict[str, np.ndarray]
_LAYOUTS = {"output": "tn", "grad_input": "nn", "grad_weight": "nt"}
"""How the operands of a bfloat16 GEMM lie in memory, as cuBLAS names it."""
States = Mapping[str, DelayedState]
"""Tensor -> state of delayed scaling."""


SplitK = Callable[[PlannedGemm], int]
"""S of a GEMM, as a library chooses it."""


def planned(gemm: PlannedGemm) -> int:
    """S by the shipped plan."""
    return split_k(gemm).split_k


class Step(NamedTuple):
    """One step of a case, each list by layer."""

    turns: list[list[LinearTrace]]
    """The passes."""
    states: list[States] | None
    """After the last update, where there was one."""


def steps(case: LayerCase, verbs: Verbs, slices_of: SplitK) -> Iterator[Step]:
    """What `linear`, and under delayed scaling the verbs of its state, make of every step."""
    delayed = case.recipe.delayed
    numbers = range(1, case.layers + 1)
    states: list[States] = [
        {} if delayed is None else {tensor: verbs["initial_delayed_state"](delayed) for tensor in delayed.tensors}
        for _ in numbers
    ]
    for step in range(1, case.steps + 1):
        turns: list[list[LinearTrace]] = []
        for turn in range(1, case.passes + 1):
            traces = []
            for layer, state in zip(numbers, states, strict=True):
                options: dict[str, Any] = {"delayed_state": state} if state else {}
                if slices := planned_slices(case, layer, slices_of):
                    options["split_k"] = slices
                tensors = case.linear_tensors(Place(step, turn, layer))
                traces.append(verbs["linear"](case.recipe, **tensors, **options))
            turns.append(traces)
            if case.updates:  # at the end of every backward pass
                states = [_updated(case, verbs, s, trace) for s, trace in zip(states, traces, strict=True)]
        yield Step(turns, states if case.updates else None)


def planned_slices(case: LayerCase, layer: int, slices_of: SplitK = planned) -> dict[str, int]:
    """GEMM -> S, for those whose K is cut [PLAN-1]. A layer that trains is emulated with the same S.

    `slices_of` is asked for the sizes that the library sees, zero-padding included; that of rows it knows itself.
    """
    found: dict[str, int] = {}
    for name, sizes in case.gemm_sizes(layer).items():
        slices = slices_of(of_layer(case.recipe.gemms[name], sizes, case.dtype.name, _LAYOUTS[name]))
        if slices > 1:
            found[name] = slices
    return found


def _updated(case: LayerCase, verbs: Verbs, states: States, trace: LinearTrace) -> States:
    """The states after a pass."""
    recipe = case.recipe
    found: dict[str, DelayedState] = {}
    for tensor, state in states.items():
        gemm, _, cast = next(found for found in recipe.casts(tensor) if found[2].format is not None)
        side = "ab"[OPERANDS[gemm].index(tensor)]
        amax = np.asarray(getattr(getattr(trace, gemm), side).amax)
        found[tensor] = verbs["update_delayed_state"](state, amax, cast.format, recipe.scale_rule, recipe.delayed)
    return found


def trace_parts(case: LayerCase, verbs: Verbs, slices_of: SplitK = planned) -> Parts:
    """Part -> array, in the order of computation: `output.a.amax`, ..., `output.product`, `result`, ..."""
    parts: Parts = {}
    for i, step in enumerate(steps(case, verbs, slices_of), start=1):
        for j, traces in enumerate(step.turns, start=1):
            for k, trace in enumerate(traces, start=1):
                parts |= {case.part(Place(i, j, k), name): array for name, array in _of_trace(trace)}
        parts |= _of_states(case, i, step.states)
    return parts


def _of_trace(trace: LinearTrace) -> Iterator[tuple[str, np.ndarray]]:
    for name in GEMM_NAMES:
        gemm: GemmTrace | None = getattr(trace, name)
        if gemm is None:
            continue
        for side, operand in (("a", gemm.a), ("b", gemm.b)):
            for field in OperandTrace._fields:
                array = getattr(operand, field)
                if array is not None:  # a GEMM in high precision has codes only
                    yield f"{name}.{side}.{field}", np.asarray(array)
        yield f"{name}.product", np.asarray(gemm.product)
        if name == "output":
            yield "result", np.asarray(trace.result)


def _of_states(case: LayerCase, step: int, states: list[States] | None) -> Parts:
    return {
        case.part(Place(step, layer=layer), f"delayed.{tensor}.{field}", of="step"): np.asarray(value)
        for layer, of_layer in enumerate(states or (), start=1)
        for tensor, state in of_layer.items()
        for field, value in state._asdict().items()
    }


def layer_parts(case: LayerCase, verbs: Verbs, slices_of: SplitK = planned) -> Parts:
    """What a layer that trains must give, in the order of computation.

    Zero-padding is no part of `codes`, `scale` and `product`; `padding` counts what is not zero in that of the codes.
    `gemms` is the number of GEMMs of a pass. `bias.grad` is a part where grad_output is of integers, because the order
    in which others are added shows.
    """
    parts: Parts = {}
    for i, step in enumerate(steps(case, verbs, slices_of), start=1):
        grads: Parts = {}
        for j, traces in enumerate(step.turns, start=1):
            # 1. Forward, layer by layer.
            places = [Place(i, j, k) for k in range(1, case.layers + 1)]
            for place, trace in zip(places, traces, strict=True):
                parts |= _of_gemm(case, place, "output", trace.output)
                rows = case.batch or case.shape[:1]
                parts[case.part(place, "result")] = np.asarray(trace.result).reshape(*rows, -1)
            # 2. Backward, the last layer first, as autograd does.
            for place, trace in reversed(list(zip(places, traces, strict=True))):
                for name in case.gemms[1:]:
                    parts |= _of_gemm(case, place, name, getattr(trace, name))
            # 3. Gradients: that of a shared input is a sum over layers, those of parameters are sums over passes.
            parts[case.part(places[0], "gemms", of="pass")] = np.array(len(case.gemms) * case.layers)
            if "input" in case.trained:
                products = [trace.grad_input.product for trace in traces if trace.grad_input is not None]
                parts[case.part(places[0], "input.grad", of="pass")] = _added(products, case.input_dtype).reshape(
                    *(case.batch or case.shape[:1]), -1
                )
            for place, trace in zip(places, traces, strict=True):
                for part, grad in _parameter_grads(case, place, trace).items():
                    grads[part] = _added([grads[part], grad]) if part in grads else grad
        parts |= grads
        parts |= _of_states(case, i, step.states)
    return parts


def _of_gemm(case: LayerCase, place: Place, name: str, gemm: GemmTrace) -> Parts:
    parts: Parts = {}
    granularities = case.recipe.gemms[name].scaled_gemm_granularities
    for side, operand, granularity in zip("ab", (gemm.a, gemm.b), granularities, strict=True):
        codes = np.asarray(operand.codes)
        if operand.scale is not None:
            # Beside a rowwise operand, the one scale of a tensorwise one is that of every row.
            scale = np.broadcast_to(operand.scale, granularity.scale_shape(*codes.shape))
            parts[case.part(place, f"{name}.{side}.scale")] = scale
        parts[case.part(place, f"{name}.{side}.codes")] = codes
        parts[case.part(place, f"{name}.{side}.padding")] = np.array(0)
    return parts | {case.part(place, f"{name}.product"): np.asarray(gemm.product)}


def _parameter_grads(case: LayerCase, place: Place, trace: LinearTrace) -> Parts:
    """What one pass adds to the gradients of weight and bias."""
    found: Parts = {}
    if "weight" in case.trained and trace.grad_weight is not None:
        found[case.part(place, "weight.grad", of="step")] = _added([trace.grad_weight.product], case.weight_dtype)
    if case.trained and case.with_bias and case.gradient == "integers":
        grad_output = case.tensors(place)["grad_output"]
        total = grad_output.astype(np.float64).sum(axis=0)  # exact, as float32 is
        found[case.part(place, "bias.grad", of="step")] = total.astype(grad_output.dtype).astype(np.float32)
    return found


def _added(products: list[np.ndarray], fmt: Format | None = None) -> np.ndarray:
    """One or two products, each brought to a format, added in it: rounded once, whichever comes first."""
    dtype = products[0].dtype if fmt is None else dtype_of(fmt)
    with np.errstate(over="ignore", invalid="ignore"):
        first, *others = (np.asarray(product).astype(dtype) for product in products)
        for other in others:
            first = (first.astype(np.float32) + other.astype(np.float32)).astype(dtype)
    return first


def engine_linear(
    verbs: Verbs,
    recipe: Recipe,
    input: np.ndarray,
    weight: np.ndarray,
    grad_output: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    delayed_state: Mapping[str, DelayedState] | None = None,
    split_k: Mapping[str, int] | None = None,
) -> LinearTrace:
    """`f8ref.numpy.linear` of the casts and GEMMs `verbs`. It shares no code with that one, whose judge it is."""
    options = {"out_dtype": input.dtype.name, "chip": chip_by_name("linear", recipe.chip)}

    def operand(x: np.ndarray, cast: Cast, tensor: str) -> OperandTrace:
        if cast.format is None:
            with np.errstate(over="ignore", invalid="ignore"):
                return OperandTrace(None, None, None, x.astype(np.float32).astype(ml_dtypes.bfloat16))
        amax = verbs["amax"](x, cast.granularity)
        delayed = recipe.delayed_scaling_of(tensor)
        if delayed is not None and delayed_state is not None and delayed_state[tensor].initialized:
            inv_scale = np.float32(delayed_state[tensor].inv_scale).reshape(1, 1)
            with np.errstate(divide="ignore"):
                scale = np.float32(1) / inv_scale
        else:
            margin = 0 if delayed is None else delayed.margin
            inv_scale, scale = verbs["scale_from_amax"](amax, cast.format, recipe.scale_rule, margin=margin)
        return OperandTrace(amax, inv_scale, scale, verbs["quantize"](x, inv_scale, cast.format, cast.granularity))

    def product(name: str, a: OperandTrace, b: OperandTrace) -> GemmTrace:
        gemm, slices = recipe.gemms[name], (split_k or {}).get(name, 1)
        if gemm.a.format is None:
            return GemmTrace(a, b, verbs["mm"](a.codes, b.codes.T, split_k=slices, **options))
        kinds = gemm.scaled_gemm_granularities
        scales = [
            np.repeat(one.scale, len(one.codes), axis=0)
            if kind is Granularity.ROWWISE and one.scale.size == 1
            else one.scale
            for one, kind in zip((a, b), kinds, strict=True)
        ]
        of_scales: dict[str, Any] = {"granularity_a": kinds[0], "granularity_b": kinds[1]}
        found = verbs["scaled_mm"](
            a.codes, b.codes.T, scales[0], scales[1].T, **of_scales, **options,
            use_fast_accum=gemm.use_fast_accum, split_k=slices,
        )  # fmt: skip
        return GemmTrace(a, b, found)

    of_output, of_input, of_weight = recipe.output, recipe.grad_input, recipe.grad_weight
    output = product("output", operand(input, of_output.a, "input"), operand(weight, of_output.b, "weight"))
    result = output.product
    if bias is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            addend = bias.astype(result.dtype).astype(np.float32)
            result = (result.astype(np.float32) + addend).astype(result.dtype)
    grads = operand(grad_output, of_input.a, "grad_output"), operand(grad_output.T, of_weight.a, "grad_output")
    grad_input = product("grad_input", grads[0], operand(weight.T, of_input.b, "weight"))
    grad_weight = product("grad_weight", grads[1], operand(input.T, of_weight.b, "input"))
    return LinearTrace(output, grad_input, grad_weight, result)
