"""Single instructions of a chip."""

from numpy.typing import ArrayLike

from f8emu.numpy.dtypes import Array, FormatLike, array_of, output_format, typed
from f8emu.numpy.scaled_mm import chip_of
from f8emu.spec.chip import Chip
from f8emu.spec.chips import HOPPER
from f8ref import numpy as oracle


def mma(
    a: ArrayLike, b: ArrayLike, c: ArrayLike, *, chip: Chip | str = HOPPER, out_dtype: FormatLike = "float32"
) -> Array:
    """`dot(a, b) + c` of every case by one matrix instruction of the chip, or several in a row where K is longer.

    Shapes:
        a and b [cases, K], float8 or bfloat16; c [cases] of `out_dtype`, or values that it holds -> [cases] of
        `out_dtype`.

    Exactness: the public recordings of single instructions, every bit, for chips whose `evidence` is not LITERATURE.

    Raises:
        OperandError: operands of the wrong dtype or shape.
        SpecError: unknown `out_dtype` or chip.
        UnsupportedError: formats that the chip's profile has no instruction for.
    """
    target = output_format("mma", out_dtype)
    return oracle.mma(
        array_of("mma", "a", a),
        array_of("mma", "b", b),
        typed("mma", "c", c, target),
        chip=chip_of("mma", chip),
        out_dtype=target,
    )
