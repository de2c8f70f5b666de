"""One linear layer as data: its tensors, what surrounds it, and the names of its parts.

A layer takes some steps; a step is some passes, forward and backward, that add up gradients. Where there are several
steps, passes or layers, the name of a part says which: `step 2 pass 1 layer 2 output.a.codes`.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from f8emu.conformance.cases.distributions import draw, dtype_of
from f8emu.conformance.compare import abbreviated, hexadecimal
from f8emu.spec import FLOAT32, GEMM_NAMES, OPERANDS, TRANSPOSED, Format, Recipe

Parts = dict[str, np.ndarray]

# Magnitudes of input and grad_output, by step. With the scales of earlier steps values saturate or become
# subnormal; an amax of zero updates nothing.
MAGNITUDES = (1.0, 4.0, 0.0, 2.0**-6)
_MORE_OUTPUTS = 16  # what the second layer has beyond the first, so that their GEMMs have different sizes


class LayerMode(Enum):
    """How a layer is run."""

    TRACE = "trace"  # the verb `linear`, which gives every amax and inv_scale too
    EAGER = "eager"
    COMPILED = "compiled"


class Place(NamedTuple):
    """Which step, pass and layer; all count from 1."""

    step: int = 1
    turn: int = 1  # the pass
    layer: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase:
    """A linear layer, forward and backward, under a recipe."""

    recipe: Recipe
    mode: LayerMode
    shape: tuple[int, int, int]  # M, N, K
    dtype: Format  # the format of input, grad_output and products
    weight_dtype: Format
    distribution: str = "normal"  # the distribution of input and weight
    gradient: str = "gradient"  # distribution of grad_output
    with_bias: bool = True  # whether the layer has a bias; it is float32, and the layer rounds it
    batch: tuple[int, ...] = ()  # the leading dimensions of an input that is not a matrix; their product is M
    is_autocast: bool = False  # the input is float32, and autocast brings it to `dtype`
    trained: tuple[str, ...] = ("input", "weight")  # tensors whose gradients are computed; none is a forward pass alone
    layers: int = 1  # 2 share one input tensor
    passes: int = 1  # forward and backward passes of a step, whose gradients add up
    steps: int = 1

    @property
    def name(self) -> str:
        """Everything but the mode, which changes nothing that is computed."""
        frozen = [f"no {tensor}.grad" for tensor in ("input", "weight") if tensor not in self.trained]
        words = [
            self.recipe.name,
            self.dtype.name,
            "" if self.weight_dtype == self.dtype else f"weight {self.weight_dtype}",
            "x".join(map(str, self.shape)),
            self.distribution,
            "" if self.gradient == "gradient" else f"grad_output {self.gradient}",
            "bias" if self.with_bias else "",
            f"batch {'x'.join(map(str, self.batch))}" if self.batch else "",
            "autocast" if self.is_autocast else "",
            *(frozen if self.trained else ["forward only"]),
            "shared input" if self.layers > 1 else "",
            f"{self.passes} passes" if self.passes > 1 else "",
            f"{self.steps} steps" if self.steps > 1 else "",
        ]
        return " ".join(word for word in words if word)

    @property
    def id(self) -> str:
        return f"{self.name} {self.mode.value}"

    @property
    def input_dtype(self) -> Format:
        return FLOAT32 if self.is_autocast else self.dtype

    @property
    def rows(self) -> tuple[int, ...]:
        """The dimensions of the input but K."""
        return self.batch or self.shape[:1]

    @property
    def updates(self) -> bool:
        """Whether every pass ends with an update of delayed scaling."""
        return self.recipe.delayed is not None and bool(self.trained)

    def sizes(self, layer: int) -> tuple[int, int, int]:
        m, n, k = self.shape
        return m, n + _MORE_OUTPUTS * (layer - 1), k

    def gemm_sizes(self, layer: int) -> dict[str, tuple[int, int, int]]:
        """GEMM -> rows of a, rows of b, dimension that is summed."""
        m, n, k = self.sizes(layer)
        return {"output": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}

    @property
    def gemms(self) -> tuple[str, ...]:
        """The GEMMs that run, in order."""
        return GEMM_NAMES[:1] + tuple(f"grad_{tensor}" for tensor in ("input", "weight") if tensor in self.trained)

    def tensors(self, place: Place) -> dict[str, np.ndarray]:
        """The tensors input [M, K], weight [N, K], grad_output [M, N] and bias [N] of one pass through one layer.

        Layers share the input; weight and bias are new in every step, as after a step of an optimizer.
        """
        (m, n, k), (step, turn, layer) = self.sizes(place.layer), place
        magnitude = np.float32(MAGNITUDES[step - 1] * 2.0 ** (turn - 1))

        def drawn(tensor: str, distribution: str, shape: tuple[int, int], fmt: Format, *key: int) -> np.ndarray:
            return draw(distribution, shape, fmt, (self.name, tensor, *key))

        tensors = {
            "input": drawn("input", self.distribution, (m, k), self.input_dtype, step, turn),
            "weight": drawn("weight", self.distribution, (n, k), self.weight_dtype, step, layer),
            "grad_output": drawn("grad_output", self.gradient, (m, n), self.dtype, step, turn, layer),
        }
        with np.errstate(over="ignore", invalid="ignore"):
            for name in ("input", "grad_output"):
                tensors[name] = (tensors[name].astype(np.float32) * magnitude).astype(tensors[name].dtype)
        if self.with_bias:
            tensors["bias"] = drawn("bias", "normal", (1, n), FLOAT32, step, layer)[0]
        return tensors

    def linear_tensors(self, place: Place) -> dict[str, np.ndarray]:
        """The arguments of the verb `linear`: the input in `dtype`; no grad_output of a forward pass alone."""
        tensors = self.tensors(place)
        with np.errstate(over="ignore", invalid="ignore"):
            tensors["input"] = tensors["input"].astype(dtype_of(self.dtype))
        if not self.trained:
            del tensors["grad_output"]
        return tensors

    def part(self, place: Place, name: str, *, of: str = "layer") -> str:
        """The name of a part: of a layer, of a pass or of a step."""
        words = [f"step {place.step}"] if self.steps > 1 else []
        if self.passes > 1 and of != "step":
            words.append(f"pass {place.turn}")
        if self.layers > 1 and of != "pass":
            words.append(f"layer {place.layer}")
        return " ".join([*words, name])


_PART = re.compile(r"(?:step (\d+) )?(?:pass (\d+) )?(?:layer (\d+) )?(.*)")


def place_of(part: str) -> tuple[Place, str]:
    """The place and the name that `LayerCase.part` joined."""
    match = _PART.fullmatch(part)
    assert match is not None, "everything matches"
    return Place(*(int(word or 1) for word in match.groups()[:3])), match[4]


def layer_traits(case: LayerCase) -> dict[str, str]:
    """The traits of a layer under a recipe."""
    return {
        "recipe": case.recipe.name or "unnamed",
        "run": case.mode.value,
        "dtype": case.dtype.name,
        "weight": case.weight_dtype.name,
        "bias": "with bias" if case.with_bias else "without bias",
        "M x N x K": "x".join(map(str, case.shape)),
        "inputs": case.distribution,
        "trained": " and ".join(case.trained) or "nothing, forward alone",
    }


# Explanations of a difference

# Part -> the GEMM whose product it is made of
_PRODUCTS = {"result": "output", "input.grad": "grad_input", "weight.grad": "grad_weight"}


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
    gemm = _PRODUCTS.get(name, source)
    names = OPERANDS[gemm]
    operands = [tensors[x].T if turned else tensors[x] for x, turned in zip(names, TRANSPOSED[gemm], strict=True)]
    # 1. An element of a product: its row of a, its row of b, and a bias.
    if name in _PRODUCTS or field == "product":
        *rows, column = index
        row = rows[0] if len(rows) == 1 else int(np.ravel_multi_index(rows, case.batch))
        bias = f" bias={hexadecimal(tensors['bias'][column])}" if name == "result" and case.with_bias else ""
        places = zip(operands, names, (row, column), strict=True)
        return " ".join(abbreviated(x[i], f"{tensor}[{i}]") for x, tensor, i in places) + bias
    # 2. A code: its value. An amax or a scale: the elements that share it.
    side, field = "ab".index(field[0]), field[2:]
    if field == "codes":
        return f"{names[side]}={hexadecimal(operands[side][index])}"
    spec = case.recipe.gemms[source]
    blocks = zip(index, (spec.a, spec.b)[side].granularity.block, strict=True)
    rows, columns = (slice(None) if n is None else slice(i * n, (i + 1) * n) for i, n in blocks)
    return abbreviated(operands[side][rows, columns], names[side])
