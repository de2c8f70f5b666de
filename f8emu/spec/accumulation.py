"""What a matrix unit does with products, as data.

The numbers are measured on an NVIDIA H200 and stated with rule ids in `reference/README.md`. The
algorithms that they drive are `f8ref.exact`, `f8ref.numpy` and `f8ref.jax`, each written on its own.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationModel:
    """One tensor-core step and how steps are chained along K."""

    name: str
    step_k: int
    """[ACC-1] K is consumed in order, this many products at a time; a shorter tail is padded with zeros."""
    aligned_fraction_bits: int
    """[ACC-3] Every term of a step is cut toward zero to a multiple of `2^(e_max - this)`."""
    result_fraction_bits: int
    """[ACC-5] The sum of a step is normalised and cut toward zero to this many fraction bits."""
    promote_k: int | None
    """[CHAIN-2] After this much of K the chain restarts from zero, and the partial is added to a float32 total
    with round to nearest even; None [CHAIN-1] is one chain over all of K."""
    split_k_multiple: int
    """[CHAIN-3] The length of a split-K slice is `ceil(K / S)` rounded up to a multiple of this."""


HOPPER_FP8_FAST = AccumulationModel(
    name="hopper_fp8_fast",
    step_k=32,
    aligned_fraction_bits=13,
    result_fraction_bits=13,
    promote_k=None,
    split_k_multiple=128,
)
"""float8 with `use_fast_accum=True`."""

HOPPER_FP8 = AccumulationModel(
    name="hopper_fp8",
    step_k=32,
    aligned_fraction_bits=13,
    result_fraction_bits=13,
    promote_k=128,
    split_k_multiple=128,
)
"""float8 with `use_fast_accum=False`."""

HOPPER_BF16 = AccumulationModel(
    name="hopper_bf16",
    step_k=16,
    aligned_fraction_bits=25,
    result_fraction_bits=23,
    promote_k=None,
    split_k_multiple=64,
)
"""bfloat16 [BF16-1], [BF16-2]."""

ACCUMULATION_MODELS: dict[str, AccumulationModel] = {m.name: m for m in (HOPPER_FP8_FAST, HOPPER_FP8, HOPPER_BF16)}
"""Every known model by name."""
