"""A layer as the verb `linear` computes it, and what that says of a layer that trains.

`trace_parts` gives all that the verb gives. `layer_parts` gives what can be seen of a layer that trains: the operands
as they enter a GEMM, its product, the output, the gradients that autograd leaves, and the state of delayed scaling.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import Verbs
from f8emu.conformance.compare import abbreviated, hexadecimal
from f8emu.conformance.layers.layer import LayerCase, Place, place_of
from f8emu.spec import (
    GEMM_NAMES,
    OPERANDS,
    TRANSPOSED,
    DelayedState,
    Format,
    GemmTrace,
    Granularity,
    LinearTrace,
    OperandTrace,
    Recipe,
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
        gemm = case.recipe.gemms[name]
        asked = of_layer(gemm, sizes, case.dtype.name, _LAYOUTS[name])
        slices = slices_of(asked)
        if slices > 1:
            found[name] = slices
    return found


def _updated(case: LayerCase, verbs: Verbs, states: States, trace: LinearTrace) -> States:
    """The states after a pass."""
    recipe = case.recipe
    found: dict[str, DelayedState] = {}
    for tensor, state in states.items():
        gemm, _, cast = next(found for found in recipe.casts(tensor) if found[2].format is not None)
        amax = np.asarray(_operand_trace(trace, gemm, tensor).amax)
        found[tensor] = verbs["update_delayed_state"](state, amax, cast.format, recipe.scale_rule, recipe.delayed)
    return found


def _operand_trace(trace: LinearTrace, gemm: str, tensor: str) -> OperandTrace:
    """The operand of a GEMM that was made of a tensor."""
    return (getattr(trace, gemm).a, getattr(trace, gemm).b)[OPERANDS[gemm].index(tensor)]


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


# What explains a difference


def describe_layer(case: LayerCase, part: str, index: tuple[int, ...]) -> str:
    """The inputs of one element of a part, as hex: values of the tensor, or of the two that a product multiplies."""
    place, name = place_of(part)
    tensors = case.linear_tensors(place)
    source, _, field = name.partition(".")
    if name == "gemms" or field.endswith("padding"):
        return ""
    if source == "delayed":
        tensor = field.partition(".")[0]
        return abbreviated(tensors[tensor], tensor)
    if name == "bias.grad":
        return abbreviated(tensors["grad_output"][:, index[0]], f"grad_output[:, {index[0]}]")
    if name in _PRODUCTS or field == "product":
        gemm = _PRODUCTS.get(name, source)
        *rows, column = index
        row = rows[0] if len(rows) == 1 else int(np.ravel_multi_index(rows, case.batch))
        bias = f" bias={hexadecimal(tensors['bias'][column])}" if name == "result" and case.with_bias else ""
        return " ".join(_vector(tensors, gemm, side, i) for side, i in ((0, row), (1, column))) + bias
    side, field = "ab".index(field[0]), field[2:]
    operand, tensor = _operand(tensors, source, side), OPERANDS[source][side]
    if field == "codes":
        return f"{tensor}={hexadecimal(operand[index])}"
    return abbreviated(_group(operand, _granularity(case.recipe, source, side), index), tensor)


_PRODUCTS = {"result": "output", "input.grad": "grad_input", "weight.grad": "grad_weight"}
"""Part -> the GEMM whose product it is made of."""


def _operand(tensors: Mapping[str, np.ndarray], gemm: str, side: int) -> np.ndarray:
    tensor = tensors[OPERANDS[gemm][side]]
    return tensor.T if TRANSPOSED[gemm][side] else tensor


def _vector(tensors: Mapping[str, np.ndarray], gemm: str, side: int, row: int) -> str:
    return abbreviated(_operand(tensors, gemm, side)[row], f"{OPERANDS[gemm][side]}[{row}]")


def _granularity(recipe: Recipe, gemm: str, side: int) -> Granularity:
    of = recipe.gemms[gemm]
    return (of.a, of.b)[side].granularity


def _group(operand: np.ndarray, granularity: Granularity, index: tuple[int, ...]) -> np.ndarray:
    """The elements that share a scale."""
    rows, columns = (
        slice(None) if block is None else slice(i * block, (i + 1) * block)
        for i, block in zip(index, granularity.block, strict=True)
    )
    return operand[rows, columns]
