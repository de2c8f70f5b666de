"""What one probe of `f8emu doctor` reports, and the IEEE values that it compares with."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One measured behaviour of one library on one device."""

    subject: str
    """Library and device: `torch cpu`, `torch cuda`, `jax cpu`, `jax gpu`."""
    name: str
    observed: str
    expected: str
    agrees: bool
    f8emu: str
    """What f8emu does so that its bits do not depend on this behaviour."""
    relied_on: bool = False
    """Whether f8emu's bits depend on it; a deviation is then a fault of this machine or of f8emu."""


def significands() -> F32:
    """65,536 float32 in [1, 2), spread over all significands: the stride is odd, so low bits vary too."""
    return (np.uint32(0x3F800000) + np.arange(1 << 16, dtype=np.uint32) * np.uint32(127)).view(np.float32)


def powers_of_two() -> F32:
    """All 254 normal powers of two, 2^-126 to 2^127."""
    return (np.arange(1, 255, dtype=np.uint32) << np.uint32(23)).view(np.float32)


def below_powers_of_two() -> F32:
    """The float32 just below 2^-125 to 2^127; the power of two below each is `powers_of_two()[:-1]`."""
    return (powers_of_two()[1:].view(np.uint32) - np.uint32(1)).view(np.float32)


def counted(
    subject: str,
    name: str,
    observed: npt.ArrayLike,
    expected: npt.NDArray[np.float32],
    f8emu: str,
    *,
    relied_on: bool = False,
) -> Probe:
    """A probe that counts float32 results which are not the expected bits (any NaN equals any NaN)."""
    got, want = np.asarray(observed, np.float32), np.asarray(expected, np.float32)
    wrong = int(np.count_nonzero((got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))))
    share = f"{wrong} of {want.size} wrong"
    if wrong:
        share += f" ({100 * wrong / want.size:.3g} %)"
    return Probe(
        subject=subject,
        name=name,
        observed=share,
        expected="0 wrong",
        agrees=wrong == 0,
        f8emu=f8emu,
        relied_on=relied_on,
    )


def coded(subject: str, name: str, observed: npt.NDArray[np.uint8], expected: list[int], f8emu: str) -> Probe:
    """A probe that compares float8 codes."""
    got = [int(code) for code in observed.ravel()]
    return Probe(
        subject=subject,
        name=name,
        observed=_hex(got),
        expected=_hex(expected),
        agrees=got == expected,
        f8emu=f8emu,
    )


def _hex(codes: list[int]) -> str:
    return " ".join(f"0x{code:02x}" for code in codes)
