"""A linear layer put to a subject: every amax, scale, code and product of its trace as a part of one case."""

from collections.abc import Iterator

import numpy as np

from f8emu.conformance.cases import RecipeCase
from f8emu.conformance.compare import abbreviated, hexadecimal
from f8emu.conformance.subject import Subject
from f8emu.spec import (
    GEMM_NAMES,
    OPERANDS,
    TENSORS,
    TRANSPOSED,
    DelayedState,
    GemmTrace,
    Granularity,
    LinearTrace,
    OperandTrace,
    Recipe,
)


def run_linear(case: RecipeCase, subject: Subject) -> dict[str, np.ndarray]:
    """Part -> array, in the order of computation: `output.a.amax`, ..., `output.product`, ..., `result`.

    Under delayed scaling the states are the subject's own, after the case's earlier steps.
    """
    states = {"delayed_state": _states(case, subject)} if case.recipe.delayed else {}
    trace = subject.verbs["linear"](case.recipe, **case.tensors(), **states)
    return dict(_parts(trace))


def _states(case: RecipeCase, subject: Subject) -> dict[str, DelayedState]:
    recipe, delayed = case.recipe, case.recipe.delayed
    assert delayed is not None
    states: dict[str, DelayedState] = {}
    for tensor in TENSORS:
        fmt = next(cast.format for _, _, cast in recipe.casts(tensor))
        state = subject.verbs["initial_delayed_state"](delayed)
        for amax in case.amaxes:
            step = np.full((1, 1), amax, np.float32)
            state = subject.verbs["update_delayed_state"](state, step, fmt, recipe.scale_rule, delayed)
        states[tensor] = state
    return states


def _parts(trace: LinearTrace) -> Iterator[tuple[str, np.ndarray]]:
    for name in GEMM_NAMES:
        gemm: GemmTrace = getattr(trace, name)
        for side, operand in (("a", gemm.a), ("b", gemm.b)):
            for field in OperandTrace._fields:
                array = getattr(operand, field)
                if array is not None:  # a GEMM in high precision has codes only
                    yield f"{name}.{side}.{field}", np.asarray(array)
        yield f"{name}.product", np.asarray(gemm.product)
    yield "result", np.asarray(trace.result)


def describe_linear(case: RecipeCase, part: str, index: tuple[int, ...]) -> str:
    """The inputs of one element of a part, as hex: values of the tensor, or of the two that a product multiplies."""
    tensors = case.tensors()
    if part == "result":
        bias = f" bias={hexadecimal(tensors['bias'][index[1]])}" if case.with_bias else ""
        return f"{_vector(tensors, case.recipe, 'output', 'a', index[0])}{bias}"
    gemm, *rest = part.split(".")
    if rest == ["product"]:
        return " ".join(_vector(tensors, case.recipe, gemm, side, index[i]) for i, side in enumerate("ab"))
    side, field = rest
    operand = _operand(tensors, gemm, side)
    name = _source(gemm, side)
    if field == "codes":
        return f"{name}={hexadecimal(operand[index])}"
    granularity = getattr(case.recipe.gemms[gemm], side).granularity
    return abbreviated(_group(operand, granularity, index), name)


def _source(gemm: str, side: str) -> str:
    return OPERANDS[gemm]["ab".index(side)]


def _operand(tensors: dict[str, np.ndarray], gemm: str, side: str) -> np.ndarray:
    tensor = tensors[_source(gemm, side)]
    return tensor.T if TRANSPOSED[gemm]["ab".index(side)] else tensor


def _vector(tensors: dict[str, np.ndarray], recipe: Recipe, gemm: str, side: str, row: int) -> str:
    return abbreviated(_operand(tensors, gemm, side)[row], f"{_source(gemm, side)}[{row}]")


def _group(operand: np.ndarray, granularity: Granularity, index: tuple[int, ...]) -> np.ndarray:
    """The elements that share a scale."""
    rows, columns = granularity.block
    row, column = (*index, 0, 0)[:2]
    rows, columns = rows or operand.shape[0], columns or operand.shape[1]
    return operand[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
