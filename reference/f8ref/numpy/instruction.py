"""Single instructions of a chip: `d = dot(a, b) + c`.

Shape suffixes: C cases, K summed.
"""

import numpy as np
from numpy.typing import ArrayLike

from f8emu.spec import BFLOAT16, FLOAT8, HOPPER, Chip, Format, OperandError, output_format
from f8ref.numpy.accumulate import multiply_add, operand
from f8ref.numpy.cast import convert
from f8ref.numpy.codec import Array, as_float32, typed_array


def mma(a: ArrayLike, b: ArrayLike, c: ArrayLike, *, chip: Chip = HOPPER, out_dtype: Format | str = "float32") -> Array:
    """`dot(a, b) + c` of every case by one matrix instruction of the chip, or by several in a row if K is longer.

    c is the first accumulator of the steps [ACC-2], [CHIP-6], or is added to their sum [CHIP-3].

    Shapes: `a` and `b` [cases, K], `c` [cases] of `out_dtype`; result [cases].
    Exactness: the public recordings of single instructions, every bit, for chips whose `evidence` is not LITERATURE.

    Raises:
        OperandError: operands of the wrong dtype or shape.
        SpecError: an unknown `out_dtype`.
        UnsupportedError: formats that the chip's profile has no instruction for.
    """
    a_CK, format_a = typed_array(a, (BFLOAT16, *FLOAT8), "mma: a")
    b_CK, format_b = typed_array(b, (BFLOAT16, *FLOAT8), "mma: b")
    out_format = output_format("mma", out_dtype)
    model = chip.instruction("mma", (format_a, format_b), out_format).model
    c_C, _ = typed_array(c, (out_format,), "mma: c")
    if a_CK.ndim != 2 or b_CK.shape != a_CK.shape or c_C.shape != a_CK.shape[:1]:
        raise OperandError(
            f"mma: a and b must be [cases, K] and c [cases]; got {a_CK.shape}, {b_CK.shape} and {c_C.shape}; "
            "reshape them"
        )
    left, right = (operand(x, f, model)._replace(is_paired=True) for x, f in ((a_CK, format_a), (b_CK, format_b)))
    with np.errstate(over="ignore", invalid="ignore"):
        return convert(multiply_add(left, right, as_float32(c_C, "mma: c"), model), out_format)
