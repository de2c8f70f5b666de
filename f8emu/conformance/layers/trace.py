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
from f8emu.conformance.layers.layer import LayerCase, Parts, Place
from f8emu.spec.chips import chip_by_name
from f8emu.spec.formats import Format
from f8emu.spec.gemm import GEMM_NAMES, OPERANDS, Cast
from f8emu.spec.recipe import Recipe
from f8emu.spec.scaling import Granularity
from f8emu.spec.trace import DelayedState, GemmTrace, LinearTrace, OperandTrace
from f8emu.split_k.gemm import PlannedGemm, of_layer
from f8emu.split_k.plan import split_k

_LAYOUTS = {"output": "tn", "grad_input": "nn", "grad_weight": "nt"}  # of a bfloat16 GEMM, as cuBLAS names them
States = Mapping[str, DelayedState]  # tensor -> state of delayed scaling
SplitK = Callable[[PlannedGemm], int]  # S of a GEMM, as a library chooses it


def planned(gemm: PlannedGemm) -> int:
    """S by the shipped plan."""
    return split_k(gemm).split_k


class Step(NamedTuple):
    """One step of a case, each list by layer."""

    turns: list[list[LinearTrace]]  # the passes
    states: list[States]  # after the last update, where there was one


def steps(case: LayerCase, verbs: Verbs, slices_of: SplitK) -> Iterator[Step]:
    """What `linear`, and under delayed scaling the verbs of its state, make of every step."""
    # 1. The state of every layer, and the S of its GEMMs.
    delayed, numbers = case.recipe.delayed, range(1, case.layers + 1)
    options: list[dict[str, Any]] = []
    for layer in numbers:
        slices = planned_slices(case, layer, slices_of)
        options.append({"split_k": slices} if slices else {})
        if delayed is not None:
            initial = {tensor: verbs["initial_delayed_state"](delayed) for tensor in delayed.tensors}
            options[-1]["delayed_state"] = initial
    # 2. Its passes, with an update at the end of every backward one.
    for step in range(1, case.steps + 1):
        turns: list[list[LinearTrace]] = []
        for turn in range(1, case.passes + 1):
            tensors = [case.linear_tensors(Place(step, turn, layer)) for layer in numbers]
            traces = [verbs["linear"](case.recipe, **x, **y) for x, y in zip(tensors, options, strict=True)]
            turns.append(traces)
            if case.updates:
                for one, trace in zip(options, traces, strict=True):
                    one["delayed_state"] = _updated(case.recipe, verbs, one["delayed_state"], trace)
        yield Step(turns, [one["delayed_state"] for one in options] if case.updates else [])


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


def _updated(recipe: Recipe, verbs: Verbs, states: States, trace: LinearTrace) -> States:
    found: dict[str, DelayedState] = {}
    for tensor, state in states.items():
        gemm, _, cast = next(one for one in recipe.casts(tensor) if one[2].format is not None)
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
                parts |= {case.part(Place(i, j, k), name): np.asarray(array) for name, array in _of_trace(trace)}
        parts |= _of_states(case, i, step.states)
    return parts


def _of_trace(trace: LinearTrace) -> Iterator[tuple[str, Any]]:
    for name in GEMM_NAMES:
        gemm: GemmTrace | None = getattr(trace, name)
        if gemm is None:
            continue
        for side, operand in (("a", gemm.a), ("b", gemm.b)):
            for field, array in operand._asdict().items():
                if array is not None:  # a GEMM in high precision has codes only
                    yield f"{name}.{side}.{field}", array
        yield f"{name}.product", gemm.product
        if name == "output":
            yield "result", trace.result


def _of_states(case: LayerCase, step: int, states: list[States]) -> Parts:
    return {
        case.part(Place(step, layer=layer), f"delayed.{tensor}.{field}", of="step"): np.asarray(value)
        for layer, of_layer in enumerate(states, start=1)
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
    rows = case.batch or case.shape[:1]
    for i, step in enumerate(steps(case, verbs, slices_of), start=1):
        grads: Parts = {}
        for j, traces in enumerate(step.turns, start=1):
            # 1. Forward, layer by layer.
            placed = [(Place(i, j, k), trace) for k, trace in enumerate(traces, start=1)]
            for place, trace in placed:
                parts |= _of_gemm(case, place, "output", trace.output)
                parts[case.part(place, "result")] = np.asarray(trace.result).reshape(*rows, -1)
            # 2. Backward, the last layer first, as autograd does.
            for place, trace in reversed(placed):
                for name in case.gemms[1:]:
                    parts |= _of_gemm(case, place, name, getattr(trace, name))
            # 3. Gradients: that of a shared input is a sum over layers, those of parameters are sums over passes.
            parts[case.part(placed[0][0], "gemms", of="pass")] = np.array(len(case.gemms) * case.layers)
            if "input" in case.trained:
                products = [trace.grad_input.product for trace in traces if trace.grad_input is not None]
                total = _added(products, case.input_dtype).reshape(*rows, -1)
                parts[case.part(placed[0][0], "input.grad", of="pass")] = total
            for place, trace in placed:
                for part, grad in _parameter_grads(case, place, trace).items():
                    grads[part] = _added([grads[part], grad]) if part in grads else grad
        parts |= grads | _of_states(case, i, step.states)
    return parts


def _of_gemm(case: LayerCase, place: Place, name: str, gemm: GemmTrace) -> Parts:
    parts: Parts = {}
    granularities = case.recipe.gemms[name].scaled_gemm_granularities
    for side, operand, granularity in zip("ab", (gemm.a, gemm.b), granularities, strict=True):
        codes = np.asarray(operand.codes)
        if operand.scale is not None:
            # Beside a rowwise operand, the one scale of a tensorwise one is that of every row.
            parts[f"{side}.scale"] = np.broadcast_to(operand.scale, granularity.scale_shape(*codes.shape))
        parts |= {f"{side}.codes": codes, f"{side}.padding": np.array(0)}
    parts["product"] = np.asarray(gemm.product)
    return {case.part(place, f"{name}.{part}"): array for part, array in parts.items()}


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

    def product(name: str, x: np.ndarray, y: np.ndarray) -> GemmTrace:
        gemm, sources, slices = recipe.gemms[name], OPERANDS[name], (split_k or {}).get(name, 1)
        a, b = operand(x, gemm.a, sources[0]), operand(y, gemm.b, sources[1])
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
        rest = {"use_fast_accum": gemm.use_fast_accum, "split_k": slices, **options}
        return GemmTrace(a, b, verbs["scaled_mm"](a.codes, b.codes.T, scales[0], scales[1].T, **of_scales, **rest))

    output = product("output", input, weight)
    result = output.product
    if bias is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            addend = bias.astype(result.dtype).astype(np.float32)
            result = (result.astype(np.float32) + addend).astype(result.dtype)
    grad_input = product("grad_input", grad_output, weight.T)
    return LinearTrace(output, grad_input, product("grad_weight", grad_output.T, input.T), result)
