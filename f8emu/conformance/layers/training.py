"""A layer as people train it, forward and backward, step by step; `trained` says how.

There is no second path to look into. Operands and product of a GEMM are taken where its engine is entered, by taps on
the functions that compute it, behind the compiler; gradients and the state of delayed scaling are read where training
leaves them. An amax or inv_scale stays inside of a kernel, so it is no part of such a layer.

Compiled code calls GEMMs in the order of its compiler, so they are told apart by their sizes (`padded`). Taps are on
functions of the whole process, so one case runs at a time.
"""

import importlib
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from f8emu.conformance.arrays import Framework
from f8emu.conformance.cases.distributions import codes_of
from f8emu.conformance.layers.layer import LayerCase, LayerMode, Parts, Place
from f8emu.spec import DelayedState

_MULTIPLES = (4, 16, 16)  # rows of a, rows of b and the summed dimension are zero-padded to no more than these
_ALONE = threading.Lock()


class GemmTap(NamedTuple):
    """A function that computes GEMMs: `(a, b, ...)`, or with scales `(a, b, scale_a, scale_b, ...)`."""

    module: str
    attribute: str  # dotted, from the module
    is_scaled: bool


class Executed(NamedTuple):
    """One GEMM as its engine got it, its operands seen as `[rows, summed dimension]`, zero-padded."""

    a: np.ndarray
    b: np.ndarray
    scale_a: np.ndarray | None
    scale_b: np.ndarray | None
    product: np.ndarray


class ExpectedGemm(NamedTuple):
    """One GEMM of the recipe."""

    place: Place
    name: str
    sizes: tuple[int, int, int]  # rows of a, rows of b, summed dimension


class Training(ABC):
    """One case in one framework; `train` makes and runs it."""

    taps: tuple[GemmTap, ...] = ()

    def __init__(self, case: LayerCase) -> None:
        self.case = case
        self.numbers = range(1, case.layers + 1)
        self.is_compiled = case.mode is LayerMode.COMPILED
        self.executed: list[Executed] = []
        """The GEMMs that ran, in the order of the calls."""

    def tapped(self, run: Callable[..., Any], is_scaled: bool) -> Callable[..., Any]:
        """`run`, whose GEMMs are added to `executed`."""
        raise NotImplementedError

    @abstractmethod
    def begin(self, step: int) -> None:
        """Weights as after a step of an optimizer, gradients cleared."""

    @abstractmethod
    def forward(self, places: Sequence[Place], x: np.ndarray) -> Sequence[np.ndarray]:
        """The outputs of all layers."""

    @abstractmethod
    def backward(self, grads: Sequence[np.ndarray]) -> np.ndarray | None:
        """The gradient of the input, where it is trained."""

    @abstractmethod
    def parameter_grads(self) -> Iterator[tuple[int, str, np.ndarray]]:
        """Number of a layer, name of a parameter, its gradient after a step."""

    @abstractmethod
    def state(self, number: int, tensor: str, field: str) -> np.ndarray:
        """A field of the state of delayed scaling of a layer."""

    def parts(self) -> Parts:
        case, parts = self.case, Parts()
        with self._taps():
            for step in range(1, case.steps + 1):
                self.begin(step)
                for turn in range(1, case.passes + 1):
                    parts |= self._pass(step, turn)
                for number, name, grad in self.parameter_grads():
                    parts[case.part(Place(step, layer=number), f"{name}.grad", of="step")] = grad
                parts |= self.state_parts(step)
        return parts

    def state_parts(self, step: int) -> Parts:
        """The states of delayed scaling after a step."""
        case, parts = self.case, Parts()
        tensors = case.recipe.delayed.tensors if case.updates and case.recipe.delayed else ()
        for number, tensor, field in product(self.numbers, tensors, DelayedState._fields):
            part = case.part(Place(step, layer=number), f"delayed.{tensor}.{field}", of="step")
            parts[part] = self.state(number, tensor, field)
        return parts

    @contextmanager
    def _taps(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, attribute, is_scaled in self.taps:
                *path, name = attribute.split(".")
                owner = reduce(getattr, path, importlib.import_module(module))
                if hasattr(owner, name):
                    stack.enter_context(patch.object(owner, name, self.tapped(getattr(owner, name), is_scaled)))
            yield

    def _pass(self, step: int, turn: int) -> Parts:
        case, parts = self.case, Parts()
        places = [Place(step, turn, number) for number in self.numbers]
        tensors = [case.tensors(place) for place in places]
        # 1. Forward.
        outputs = self.forward(places, tensors[0]["input"].reshape(*case.rows, -1))
        count = len(self.executed)
        for place, taken, output in zip(places, self._taken(places, case.gemms[:1]), outputs, strict=True):
            parts |= {**taken, case.part(place, "result"): output}
        # 2. Backward.
        input_grad = None
        if case.trained:
            pairs = zip(tensors, outputs, strict=True)
            input_grad = self.backward([drawn["grad_output"].reshape(output.shape) for drawn, output in pairs])
        count += len(self.executed)
        for taken in self._taken(places[::-1], case.gemms[1:]):
            parts |= taken
        # 3. What is left.
        parts[case.part(places[0], "gemms", of="pass")] = np.array(count)
        if input_grad is not None:
            parts[case.part(places[0], "input.grad", of="pass")] = input_grad
        return parts

    def _taken(self, places: list[Place], names: tuple[str, ...]) -> list[Parts]:
        """The parts of these GEMMs, of those that ran since the last call."""
        sizes = self.case.gemm_sizes
        wanted = [ExpectedGemm(place, name, sizes(place.layer)[name]) for place in places for name in names]
        taken = [gemm_parts(self.case, *pair) for pair in matched(wanted, self.executed)]
        self.executed.clear()
        return taken


def train(kind: Callable[[LayerCase, Framework], Training], framework: Framework, case: LayerCase) -> Parts:
    """The parts of a case, one case at a time. Warnings are no part."""
    with _ALONE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(case, framework).parts()


def gemm_parts(case: LayerCase, wanted: ExpectedGemm, gemm: Executed | None) -> Parts:
    """Operands and product without their padding; nothing of a GEMM that did not run."""
    if gemm is None:
        return {}
    (place, name, (rows_a, rows_b, k)), parts = wanted, Parts()
    granularities = case.recipe.gemms[name].scaled_gemm_granularities
    operands = ((gemm.a, gemm.scale_a, rows_a), (gemm.b, gemm.scale_b, rows_b))
    for side, (codes, scale, rows), granularity in zip("ab", operands, granularities, strict=True):
        if scale is not None:
            scale_rows, scale_columns = granularity.scale_shape(rows, k)
            parts[f"{side}.scale"] = scale[:scale_rows, :scale_columns]
        beyond = codes_of(codes).copy()
        beyond[:rows, :k] = 0
        parts |= {f"{side}.codes": codes[:rows, :k], f"{side}.padding": np.array(np.count_nonzero(beyond))}
    parts["product"] = gemm.product[:rows_a, :rows_b]
    return {case.part(place, f"{name}.{part}"): array for part, array in parts.items()}


def matched(wanted: list[ExpectedGemm], executed: list[Executed]) -> Iterator[tuple[ExpectedGemm, Executed | None]]:
    """Which GEMM of the recipe each one is: by its sizes, or where they say nothing by the order of the calls."""
    # 1. By sizes: the first GEMM of the same padded ones.
    left = list(executed)
    matches: list[Executed | None] = []
    for gemm in wanted:
        size = padded(gemm.sizes)
        match = next((ran for ran in left if padded((len(ran.a), *ran.b.shape)) == size), None)
        matches.append(match)
        left = [ran for ran in left if ran is not match]
    # 2. By order, what is left: it has other sizes than it should, and is reported as that.
    for gemm, match in zip(wanted, matches, strict=True):
        yield gemm, match if match is not None or not left else left.pop(0)


def padded(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes, whatever they were padded to."""
    return tuple(-(-size // multiple) for size, multiple in zip(sizes, _MULTIPLES, strict=True))
