"""What cases have in common: the traits by which differences are counted, in the words of a report."""

from f8emu.conformance.cases.distributions import CODES, VALUES
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.layers.layer import LayerCase

_K_BOUNDS = (128, 512, 2048)
_ROW_BOUNDS = (1, 16, 64, 128, 256)
"""Sizes are counted in ranges: few enough to read."""
_STEP, _PROMOTION = 32, 128
"""[ACC-1] [CHAIN-2] What a K that is no multiple leaves a tail of."""
_RECORDED = {"special": "specials", "layer": "a layer of Llama-3"}
"""Name of a recorded case -> its inputs, where that is no name of a distribution."""


def gemm_traits(gemm: GemmCase, inputs: str = "") -> dict[str, str]:
    """The traits of a GEMM. `inputs` says how it was recorded, if the case does not know its distribution."""
    return {
        "accumulation": "bf16 matmul" if gemm.mode is Mode.BF16 else "fast" if gemm.use_fast_accum else "promoted",
        "scales": _scales(gemm),
        "operands": f"{gemm.a.dtype} x {gemm.b.dtype}",
        "output": gemm.out_dtype.name,
        "bias": "without bias" if gemm.bias is None else "with bias",
        "M": _range_of(gemm.sample.m if gemm.sample else gemm.output_shape[0], _ROW_BOUNDS),
        "N": _range_of(gemm.sample.n if gemm.sample else gemm.output_shape[1], _ROW_BOUNDS),
        "K": _range_of(gemm.k, _K_BOUNDS),
        "tail of K": _tail(gemm.k),
        "slices of K": str(gemm.split_k),
        "inputs": inputs or gemm.distribution or "other",
        "family": gemm.family.value,
    }


def _scales(gemm: GemmCase) -> str:
    match gemm.mode:
        case Mode.BF16:
            return "none"
        case Mode.GROUPED_ROWWISE:
            return "grouped rowwise"
        case Mode.BLOCKWISE:
            return f"{gemm.granularity_a.value} x {gemm.granularity_b.value}"
        case Mode.TENSORWISE | Mode.ROWWISE:
            return gemm.mode.value


def _range_of(size: int, bounds: tuple[int, ...]) -> str:
    first = 1
    for last in bounds:
        if size <= last:
            return f"{first} to {last}" if first < last else str(last)
        first = last + 1
    return f"{first} and more"


def _tail(k: int) -> str:
    if k % _PROMOTION == 0:
        return f"none (a multiple of {_PROMOTION})"
    return f"whole steps (a multiple of {_STEP})" if k % _STEP == 0 else "a part of a step"


def recorded_inputs(name: str, mode: Mode) -> str:
    """The inputs of a recorded case by its name, `tensorwise-outlier` or `layer`; empty where the name is silent."""
    name = name.removeprefix(f"{mode.value}-")
    return name if name in CODES or name in VALUES else _RECORDED.get(name, "")


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
