"""A linear layer under a recipe, forward and backward, with everything that happens on the way."""

from collections.abc import Mapping

from numpy.typing import ArrayLike

from f8emu.numpy import emulation
from f8emu.numpy.dtypes import typed
from f8emu.numpy.scaled_mm import chip_of
from f8emu.spec.chip import Chip
from f8emu.spec.errors import SpecError
from f8emu.spec.recipe import OPERANDS, Recipe, recipe_by_name
from f8emu.spec.trace import DelayedState, LinearTrace
from f8emu.split_k.ask import known_split_k
from f8emu.split_k.gemm import of_layer
from f8ref.numpy.linear import traced

_LAYOUTS = {"output": "tn", "grad_input": "nn", "grad_weight": "nt"}
"""GEMM -> its layout in a linear layer, as cuBLAS names it."""


def linear(
    recipe: Recipe | str,
    input: ArrayLike,
    weight: ArrayLike,
    grad_output: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    delayed_state: Mapping[str, DelayedState] | None = None,
    split_k: Mapping[str, int] | None = None,
    chip: Chip | str | None = None,
) -> LinearTrace:
    """Every amax, scale, code and product of a linear layer; the backward too if `grad_output` is given.

    The layer of `f8emu.torch.convert_to_float8_training` and of `f8emu.jax.dot_general`, opened up. All products have
    the dtype of `input`. A bias is rounded to that dtype and added to the rounded output.

    Shapes:
        input [M, K], weight [N, K], grad_output [M, N], bias [N], float32, bfloat16, float16 or values that float32
        holds; operands in the trace are [rows, summed dimension].

    Exactness: exact.

    Args:
        recipe: a Recipe, or the name of one.
        input: the activations.
        weight: the weights.
        grad_output: the gradient of the loss by the output.
        bias: added to the output.
        delayed_state: tensor name -> state, for a recipe with delayed scaling. It stays as it is: calling
            `update_delayed_state` once a step, with an amax of the trace, is the caller's. Until a state is
            initialised, a cast uses its own amax.
        split_k: GEMM name -> the number of slices of K [CHAIN-3]; for a GEMM that it does not name, the plan's, as in
            `scaled_mm`.
        chip: a profile, or its name, in place of the recipe's.

    Raises:
        OperandError: wrong dtypes or shapes; `delayed_state` missing, or given to a recipe without delayed scaling.
        SpecError: an unknown recipe, chip or GEMM.
    """
    plan = recipe if isinstance(recipe, Recipe) else recipe_by_name(recipe)
    on = chip_of("linear", plan.chip if chip is None else chip)
    tensors = {"input": typed("linear", "input", input), "weight": typed("linear", "weight", weight)}
    if grad_output is not None:
        tensors["grad_output"] = typed("linear", "grad_output", grad_output)
    slices = dict(split_k or {})
    if not slices.keys() <= OPERANDS.keys():
        raise SpecError(f"linear: split_k must name GEMMs, {', '.join(OPERANDS)}; got {', '.join(map(str, slices))}")
    if all(x.ndim == 2 for x in tensors.values()):  # if not, the oracle says so
        (m, k), n = tensors["input"].shape, tensors["weight"].shape[0]
        sizes = {"output": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}
        out = tensors["input"].dtype.name
        for name, gemm in plan.gemms.items():
            if name in slices or not set(OPERANDS[name]) <= tensors.keys() or 0 in sizes[name]:
                continue
            slices[name] = known_split_k("f8emu.numpy", of_layer(gemm, sizes[name], out, _LAYOUTS[name]), on)
    return traced(
        plan,
        tensors["input"],
        tensors["weight"],
        tensors.get("grad_output"),
        None if bias is None else typed("linear", "bias", bias),
        delayed_state=delayed_state,
        split_k=slices,
        chip=on,
        verbs=emulation.VERBS,
    )
