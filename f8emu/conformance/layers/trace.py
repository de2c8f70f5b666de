"""A layer as the verb `linear` computes it, and what that says of a layer that trains.

`trace_parts` gives all that the verb gives. `layer_parts` gives what can be seen of a layer that trains: the operands
as they enter a GEMM, its product, the output, the gradients that autograd leaves, and the state of delayed scaling.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import Verbs
from f8emu.conformance.layers.layer import LayerCase, Parts, Place
from f8emu.conformance.layers.training import Executed, Training
from f8emu.spec.chips import CHIPS, chip_by_name
from f8emu.spec.formats import Format
from f8emu.spec.gemm import GEMM_NAMES, LAYER_LAYOUTS, OPERANDS, Cast, GemmTrace, LinearTrace, OperandTrace
from f8emu.spec.gemm_call import layer_call
from f8emu.spec.recipe import CastFrom, Recipe
from f8emu.spec.scaling import DelayedState, Granularity
from f8emu.split_k.ask import split_of


def planned_slices(case: LayerCase, layer: int, *, asks_library: bool = False) -> dict[str, int]:
    """GEMM -> S, for those whose K is cut [PLAN-1]. A layer that trains is emulated with the same S.

    `asks_library`: S is that of the library of the Hopper GPU at hand, not the plan's.
    """
    slices: dict[str, int] = {}
    for name, sizes in case.gemm_sizes(layer).items():
        call = layer_call(case.recipe.gemms[name], sizes, case.dtype, CHIPS[case.recipe.chip])
        split_k = split_of(None, call, LAYER_LAYOUTS[name], at_hand=asks_library).split_k
        if split_k > 1:
            slices[name] = split_k
    return slices


class Traced(Training):
    """The layers as the verb `linear` computes them, with the verbs of the state of delayed scaling."""

    def __init__(self, case: LayerCase, verbs: Verbs, asks_library: bool) -> None:
        super().__init__(case)
        delayed, self.verbs = case.recipe.delayed, verbs
        self.options: list[dict[str, Any]] = []
        for number in self.numbers:
            slices = planned_slices(case, number, asks_library=asks_library)
            self.options.append({"split_k": slices} if slices else {})
            if delayed is not None:
                states = {tensor: verbs["initial_delayed_state"](delayed) for tensor in delayed.tensors}
                self.options[-1]["delayed_state"] = states

    def begin(self, step: int) -> None:
        self.grads: list[Parts] = [{} for _ in self.numbers]

    def forward(self, places: Sequence[Place], x: np.ndarray | None = None) -> list[np.ndarray]:
        """The outputs; the traces are kept. The input is the case's own."""
        case, self.places, self.traces = self.case, places, list[LinearTrace]()
        for place, options in zip(places, self.options, strict=True):
            self.traces.append(self.verbs["linear"](case.recipe, **case.linear_tensors(place), **options))
            self.executed.append(self._executed("output", self.traces[-1]))
        return [np.asarray(trace.result).reshape(*case.rows, -1) for trace in self.traces]

    def backward(self, grads: Sequence[np.ndarray]) -> np.ndarray | None:
        case = self.case
        # 1. The GEMMs: the last layer first, as autograd does.
        self.executed += [self._executed(name, trace) for trace in self.traces[::-1] for name in case.gemms[1:]]
        # 2. Gradients of parameters are sums over passes.
        for place, trace, known in zip(self.places, self.traces, self.grads, strict=True):
            of_pass: Parts = {}
            if "weight" in case.trained and trace.grad_weight is not None:
                of_pass["weight"] = _added([trace.grad_weight.product], case.weight_dtype)
            # The order in which grad_output is added up shows, but if it is of integers.
            if case.with_bias and case.gradient == "integers":
                grad_output = case.tensors(place)["grad_output"]
                total = grad_output.astype(np.float64).sum(axis=0)  # exact, as float32 is
                of_pass["bias"] = total.astype(grad_output.dtype).astype(np.float32)
            known |= {name: _added([known[name], grad]) if name in known else grad for name, grad in of_pass.items()}
        # 3. The states; and the gradient of a shared input, a sum over layers.
        self.update()
        if "input" not in case.trained:
            return None
        products = [trace.grad_input.product for trace in self.traces if trace.grad_input is not None]
        return _added(products, case.input_dtype).reshape(*case.rows, -1)

    def update(self) -> None:
        """Updates the states of delayed scaling, as every pass ends."""
        recipe = self.case.recipe
        for options, trace in zip(self.options, self.traces, strict=True):
            states: dict[str, DelayedState] = {}
            for tensor, state in options.get("delayed_state", {}).items():
                gemm, _, cast = next(entry for entry in recipe.casts(tensor) if entry[2].format is not None)
                operand: OperandTrace = getattr(getattr(trace, gemm), "ab"[OPERANDS[gemm].index(tensor)])
                by_rule = cast.format, recipe.scale_rule, recipe.delayed
                states[tensor] = self.verbs["update_delayed_state"](state, np.asarray(operand.amax), *by_rule)
            if states:
                options["delayed_state"] = states

    def parameter_grads(self) -> Iterator[tuple[int, str, np.ndarray]]:
        for number, grads in zip(self.numbers, self.grads, strict=True):
            for name, grad in grads.items():
                yield number, name, grad

    def state(self, number: int, tensor: str, field: str) -> np.ndarray:
        return np.asarray(getattr(self.options[number - 1]["delayed_state"][tensor], field))

    def _executed(self, name: str, trace: LinearTrace) -> Executed:
        gemm: GemmTrace = getattr(trace, name)
        a, b, product = map(np.asarray, (gemm.a.codes, gemm.b.codes, gemm.product))
        scales: list[np.ndarray | None] = []
        pairs = zip((gemm.a, gemm.b), self.case.recipe.gemms[name].scaled_gemm_granularities, strict=True)
        for operand, granularity in pairs:
            # Beside a rowwise operand, the one scale of a tensorwise one is that of every row.
            shape = granularity.scale_shape(*operand.codes.shape)
            scales.append(None if operand.scale is None else np.broadcast_to(operand.scale, shape))
        return Executed(a, b, scales[0], scales[1], product)


def layer_parts(case: LayerCase, verbs: Verbs, asks_library: bool = False) -> Parts:
    """The parts that a layer that trains must give, in the order of computation.

    Zero-padding is no part of `codes`, `scale` and `product`; `padding` counts what is not zero in that of the codes.
    `gemms` is the number of GEMMs of a pass. `bias.grad` is a part where grad_output is of integers.
    """
    return Traced(case, verbs, asks_library).parts()


def trace_parts(case: LayerCase, verbs: Verbs, asks_library: bool = False) -> Parts:
    """Part -> array, in the order of computation: `output.a.amax`, ..., `output.product`, `result`, ..."""
    layers, parts = Traced(case, verbs, asks_library), Parts()
    for step in range(1, case.steps + 1):
        for turn in range(1, case.passes + 1):
            places = [Place(step, turn, number) for number in layers.numbers]
            layers.forward(places)
            if case.updates:
                layers.update()
            for place, trace in zip(places, layers.traces, strict=True):
                parts |= {case.part(place, name): np.asarray(array) for name, array in _of_trace(trace)}
        parts |= layers.state_parts(step)
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
            inv_scale, scale = verbs["scale_from_amax"](amax, cast.format, recipe.rule_of(cast), margin=margin)
        return OperandTrace(amax, inv_scale, scale, verbs["quantize"](x, inv_scale, cast.format, cast.granularity))

    def product(name: str, x: np.ndarray, y: np.ndarray) -> GemmTrace:
        gemm, sources, slices = recipe.gemms[name], OPERANDS[name], (split_k or {}).get(name, 1)
        a, b = operand(x, gemm.a, sources[0]), operand(y, gemm.b, sources[1])
        if gemm.a.format is None:
            return GemmTrace(a, b, verbs["mm"](a.codes, b.codes.T, split_k=slices, **options))
        kinds = gemm.scaled_gemm_granularities
        scales = [
            np.repeat(side.scale, len(side.codes), axis=0)
            if kind is Granularity.ROWWISE and side.scale.size == 1
            else side.scale
            for side, kind in zip((a, b), kinds, strict=True)
        ]
        of_scales: dict[str, Any] = {"granularity_a": kinds[0], "granularity_b": kinds[1]}
        rest = {"use_fast_accum": gemm.use_fast_accum, "split_k": slices, **options}
        return GemmTrace(a, b, verbs["scaled_mm"](a.codes, b.codes.T, scales[0], scales[1].T, **of_scales, **rest))

    if recipe.cast_weight_from is CastFrom.BFLOAT16:
        with np.errstate(over="ignore", invalid="ignore"):
            weight = weight.astype(np.float32).astype(ml_dtypes.bfloat16)
    output = product("output", input, weight)
    result = output.product
    if bias is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            addend = bias.astype(result.dtype).astype(np.float32)
            result = (result.astype(np.float32) + addend).astype(result.dtype)
    grad_input = product("grad_input", grad_output, weight.T)
    return LinearTrace(output, grad_input, product("grad_weight", grad_output.T, input.T), result)
