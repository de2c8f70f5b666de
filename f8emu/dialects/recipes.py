"""Recipes whose forward pass casts as a server does."""

from dataclasses import replace

from f8emu.dialects.rules import GROUP, ROW, SQUARE, TENSOR, Dialect
from f8emu.dialects.stacks import dialect_by_name
from f8emu.spec.errors import UnsupportedError
from f8emu.spec.recipe import BLOCKWISE, ROWWISE, TENSORWISE, Gemm, Recipe

_BASES = ((GROUP, SQUARE, BLOCKWISE), (ROW, ROW, ROWWISE), (TENSOR, TENSOR, TENSORWISE))
"""Blocks of input and of weight -> the recipe that scales so."""


def serving_recipe(*, input: Dialect | str, weight: Dialect | str) -> Recipe:
    """The recipe that casts input and weight by two dialects, to train what will be served.

    It is blockwise, rowwise or tensorwise, whichever both dialects exist for, but for the scale rules of the two
    tensors. Gradients, which no server casts, have torchao's floor, and scales that are powers of two if those of both
    dialects are. `serving_recipe(input="vllm_group_ue8m0", weight="deep_gemm_block_ue8m0")` is `BLOCKWISE_UE8M0`.

    Exactness: for finite bfloat16 inputs codes and scales of the GEMM `output` are those of the dialects; `caveat` says
    where those of other dtypes are not. Its product is that of the recipe's chip; a server's is the same if its kernel
    adds up and scales in the same order, as DeepGEMM's does.

    Raises:
        SpecError: an unknown dialect.
        UnsupportedError: a dialect whose bytes no `ScaleRule` gives, or two that no GEMM takes together.
    """
    dialects = dialect_by_name(input), dialect_by_name(weight)
    rules = [dialect.scale_rule for dialect in dialects]
    of_input, of_weight = (dialect.blocks for dialect in dialects)
    base = next((base for a, b, base in _BASES if a in of_input and b in of_weight), None)
    if base is None:
        raise UnsupportedError(
            f"serving_recipe: input and weight must have blocks 1x128 and 128x128, or both rows, or both one scale; "
            f"got {dialects[0].name} with {of_input} and {dialects[1].name} with {of_weight}; choose others"
        )
    x, w = (replace(cast, scale_rule=rule) for cast, rule in zip((base.output.a, base.output.b), rules, strict=True))
    gradient = base.grad_input.a
    return replace(
        base,
        name=f"{dialects[0].name}+{dialects[1].name}",
        output=replace(base.output, a=x, b=w, split_k=base is not BLOCKWISE),
        grad_input=Gemm(a=gradient, b=w),
        grad_weight=Gemm(a=gradient, b=x),
        scale_rule=replace(base.scale_rule, power_of_two=all(rule.power_of_two for rule in rules)),
    )
