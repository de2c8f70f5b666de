"""The names that callers write, as types: a type checker finds a misspelled one where it stands.

A function takes these beside the object itself (`Recipe | RecipeName`). Text that a program computes goes through
`recipe_by_name`, `chip_by_name` and their like, which raise SpecError. `tests/typing` compares each type with the list
that the code has.
"""

from typing import Literal

RecipeName = Literal[
    "tensorwise",
    "rowwise",
    "rowwise_fast",
    "rowwise_with_gw_hp",
    "delayed",
    "blockwise",
    "blockwise_ue8m0",
    "mxfp8",
    "mxfp8_floor",
]
"""A named recipe: `NAMED_RECIPES`. Older names are left out: a type checker refuses them."""
_Hopper = Literal["Hopper", "hopper", "H200", "NVIDIA H200", "sm90", "H100", "NVIDIA H100 80GB HBM3"]
_Ada = Literal["Ada", "ada", "L4", "L40", "L40S", "RTX 4090", "sm89"]
_Blackwell = Literal[
    "Blackwell", "blackwell", "Blackwell mma.sync", "Blackwell tcgen05", "B100", "B200", "GB200", "sm100"
]
_RtxBlackwell = Literal["RTX Blackwell", "RTX 5090", "RTX PRO 6000", "sm120"]
_Cdna3 = Literal["CDNA3", "MI300", "MI300A", "MI300X", "gfx942"]
ChipName = Literal[_Hopper, _Ada, _Blackwell, _RtxBlackwell, _Cdna3]
"""A chip, an architecture or a GPU: the names of `f8emu.spec.chips.GPUS`, which `chip_by_name` takes in any case."""
EngineName = Literal["auto", "hardware", "emulated"]
"""The engine of a GEMM; "auto" is the hardware where it is the chip, otherwise the emulation."""
GranularityName = Literal["tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128", "blockwise_1x32"]
"""A `Granularity` by name."""
Float8Name = Literal["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
"""A format that a cast gives: `FLOAT8`."""
HighPrecisionName = Literal["float32", "bfloat16", "float16"]
"""A format that a GEMM returns: `HIGH_PRECISION`."""
FormatName = Literal[Float8Name, "float8_e8m0fnu", HighPrecisionName]
"""A `Format` by name: `FORMATS`."""
OverflowName = Literal["saturate", "nonfinite"]
"""An `Overflow` by name."""
CastFromName = Literal["parameter", "bfloat16"]
"""A `CastFrom` by name."""
GemmName = Literal["output", "grad_input", "grad_weight"]
"""A GEMM of a linear layer: `GEMM_NAMES`."""
TensorName = Literal["input", "weight", "grad_output"]
"""A tensor of a linear layer that is cast: `TENSORS`."""
ArraysName = Literal["torch", "numpy", "jax"]
"""The framework whose arrays a kernel under test takes."""
