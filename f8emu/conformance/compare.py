"""Strict comparison: bit by bit, NaN as NaN, -0 different from +0; the words that explain a difference; how far off.

Vectorised first; only elements that differ are looked at one by one.

A distance, in units in the last place of the outputs' own format, is signed by magnitude, because that is what tells
truncation from rounding: positive is farther from zero than expected, negative is nearer to zero, or beyond it. A wrong
sign of zero has the distance 0. NaN and infinity have no distance, and are counted apart.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from f8emu.conformance.cases.distributions import codes_of
from f8emu.shown import Shown

Describe = Callable[[tuple[int, ...]], str]
"""Index of an output -> the inputs that lead to it, as hex."""


# Bits, and words for them


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Mismatch(Shown):
    """One output that differs, or one case that failed as a whole."""

    case: str
    part: str = ""
    """The part of the case that differs, if it has parts: `output.a.scale`, ..."""
    index: tuple[int, ...] = ()
    inputs: str = ""
    observed: str = ""
    expected: str = ""
    error: str = ""
    """The error, if the case failed as a whole."""
    outputs: int = 0
    """The number of outputs of the part; 0 if they were not counted."""
    differing: int = 0
    """How many of these outputs differ."""
    snippet: str = ""
    """A program in plain torch that computes this output alone; empty if there is none."""

    @property
    def share(self) -> float:
        """The share of the outputs of the part that differ; 1 where they were not counted."""
        return self.differing / self.outputs if self.outputs else 1.0

    def line(self) -> str:
        """`<case> [index] <inputs> => <observed>  expected: <expected>; <differing> of <outputs> differ`."""
        head = f"{self.case}: {self.part}" if self.part else self.case
        if self.error:
            return f"{head} => {self.error}"
        place = f" [{', '.join(map(str, self.index))}]" if self.index else ""
        share = f"; {self.differing:,} of {self.outputs:,} differ" if self.outputs else ""
        inputs = f" {self.inputs}" if self.inputs else ""
        return f"{head}{place}{inputs} => {self.observed}  expected: {self.expected}{share}"


def shape_fault(observed: object, expected: np.ndarray) -> str:
    """Empty where `observed` can be compared with `expected`, else what is wrong with its type, dtype or shape."""
    wanted = f"{expected.dtype.name}{list(expected.shape)}"
    if not isinstance(observed, np.ndarray | np.generic):
        return f"gave {type(observed).__name__}, expected an array {wanted}"
    actual = f"{observed.dtype.name}{list(observed.shape)}"
    return "" if actual == wanted else f"gave {actual}, expected {wanted}"


def different(observed: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Which outputs differ, [same shape] bool: unequal bits, unless both are NaN."""
    unequal = codes_of(observed) != codes_of(expected)
    if expected.dtype.kind in "biu" or not unequal.any():
        return unequal
    with np.errstate(invalid="ignore"):  # of signalling NaN
        return unequal & ~(np.isnan(observed) & np.isnan(expected))


def mismatches(
    case: str, part: str, observed: np.ndarray, expected: np.ndarray, describe: Describe | None = None
) -> Iterator[Mismatch]:
    """The outputs that differ, in order."""
    observed, expected = np.asarray(observed), np.asarray(expected)
    for where in np.argwhere(different(observed, expected)):
        yield mismatch_at(tuple(where.tolist()), case, part, observed, expected, describe)


def mismatch_at(
    index: tuple[int, ...],
    case: str,
    part: str,
    observed: np.ndarray,
    expected: np.ndarray,
    describe: Describe | None = None,
) -> Mismatch:
    """One output that differs."""
    inputs, was, right = describe(index) if describe else "", show(observed[index]), show(expected[index])
    return Mismatch(case=case, part=part, index=index, inputs=inputs, observed=was, expected=right)


def show(scalar: np.ndarray | np.generic) -> str:
    """`0x3f80 (1.0)`."""
    scalar = np.asarray(scalar)
    if scalar.dtype.kind in "biu":
        return str(scalar[()])
    if scalar.dtype == np.float64:
        return f"{hexadecimal(scalar)} ({float(scalar)!r})"
    with np.errstate(invalid="ignore"):  # of signalling NaN
        return f"{hexadecimal(scalar)} ({scalar.astype(np.float32)[()]:.9g})"


def hexadecimal(scalar: np.ndarray | np.generic) -> str:
    """The bit pattern, as wide as the dtype."""
    scalar = np.asarray(scalar)
    return f"0x{int(codes_of(scalar)[()]):0{2 * scalar.dtype.itemsize}x}"


def abbreviated(array: np.ndarray, name: str, *, shown: int = 8) -> str:
    """The codes of a vector, `a=<38 c0 7e .. 7c>(512)`: the first, the last, how many."""
    codes = codes_of(array).ravel()
    if codes.size == 1:
        return f"{name}={hexadecimal(codes[0])}"
    words = [hexadecimal(code)[2:] for code in codes[:shown]]
    words += ["..", hexadecimal(codes[-1])[2:]] if codes.size > shown else []
    return f"{name}=<{' '.join(words)}>({codes.size})"


def counted(count: int, singular: str, plural: str = "") -> str:
    """`1 case differs`, `2 cases differ`; without `plural` it is `singular` and an s."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def text_of(error: BaseException) -> str:
    """`str(error)`, or nothing: the text of a foreign exception may raise."""
    try:
        return str(error).strip()
    except Exception:  # whatever it raises, the error itself is still told
        return ""


def said_by(error: BaseException, longest: int = 400) -> str:
    """`ValueError: the first line of its text`, or the type alone where it has none."""
    lines = text_of(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:longest]}" if lines else type(error).__name__


# How far off


LAST_BIN = 18
"""Bin of everything beyond 2^16 ulps."""
# 3 * kind of what was observed + kind of what was expected (`_kind`) -> the name of what has no distance.
_APART = {
    1: "number for infinity",
    2: "number for NaN",
    3: "infinity for number",
    4: "the other infinity",
    5: "infinity for NaN",
    6: "NaN for number",
    7: "NaN for infinity",
}
OTHER_SIGN = "number of the other sign"
APART = (*_APART.values(), OTHER_SIGN)
NOT_COMPARED = "not compared"
"""Outputs of a case that raised, or whose dtype or shape is wrong."""


# The distance, at most, of outputs that differ by a rounding or two.
_ROUNDINGS = 2


def ulps_text(lowest: int, highest: int) -> str:
    """`-3 to +1 ulps`, `+1 ulp`."""
    if lowest != highest:
        return f"{lowest:+,} to {highest:+,} ulps"
    return f"{lowest:+,} {'ulp' if abs(lowest) == 1 else 'ulps'}"


def have_other_sign(observed: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Which are numbers on different sides of zero: their distance in ulps says nothing."""
    if expected.dtype.kind in "biu":
        return np.zeros(expected.shape, np.bool_)
    with np.errstate(invalid="ignore"):  # of signalling NaN
        is_number = np.isfinite(observed) & np.isfinite(expected)
    return is_number & (np.sign(_places(observed)) * np.sign(_places(expected)) < 0)


def farthest(observed: np.ndarray, expected: np.ndarray) -> tuple[int, ...]:
    """The first output without a distance, else the first with another sign, else the one that is farthest off."""
    places = np.argwhere(different(observed, expected))
    observed, expected = observed[tuple(places.T)], expected[tuple(places.T)]
    distance, apart = distances(observed, expected)
    ranked = (apart, have_other_sign(observed, expected), np.abs(distance))
    return tuple(places[next((rank for rank in ranked if rank.any()), apart).argmax()].tolist())


def distances(observed: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Signed distances of outputs of one dtype, and which of them have none.

    `d = (place(observed) - place(expected)) * sign(expected)`, where `place` counts the values of the format from zero,
    so that neighbours are 1 apart. Integers and flags: `observed - expected`, as it is.

    Shapes: any; both results have it: int64, Python's integers if 64 bits do not hold one; and bool that is True where
    NaN or an infinity is on one side alone.
    """
    observed, expected = np.asarray(observed), np.asarray(expected)
    if expected.dtype.kind in "biu":
        return _minus(observed, expected), np.zeros(expected.shape, np.bool_)
    # Codes of one sign are in the order of magnitudes, so that indices of codes are indices of values.
    place = _places(expected)
    signs = np.where(place < 0, -1, 1)
    with np.errstate(invalid="ignore"):  # of signalling NaN
        apart = ~(np.isfinite(observed) & np.isfinite(expected)) & different(observed, expected)
    return np.where(apart, 0, _minus(_places(observed) * signs, place * signs)), apart


def _minus(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    # int64, or Python's integers where a difference may be beyond them.
    if (np.abs(x.astype(np.float64) - y.astype(np.float64)) >= 2.0**62).any():
        return np.array(x.astype(object) - y.astype(object), object)
    with np.errstate(over="ignore"):  # of unsigned numbers, whose difference wraps back
        return np.subtract(x.astype(np.int64), y.astype(np.int64))


def _places(array: np.ndarray) -> np.ndarray:
    codes = codes_of(array)
    if array.dtype.name == "float8_e8m0fnu":  # it has no sign
        return codes.astype(np.int64)
    magnitudes = (1 << (8 * array.dtype.itemsize - 1)) - 1
    places = (codes & magnitudes).astype(np.int64)
    return np.where(codes > magnitudes, -places, places)


def bins(distance: np.ndarray) -> np.ndarray:
    """Bins of distances: 0, 1, 2, 3 to 4, 5 to 8, .. are 0, 1, 2, 3, 4, ..; with the sign of the distance."""
    magnitude = np.abs(distance).astype(np.float64)
    exponents = np.ceil(np.log2(np.maximum(magnitude, 1))).astype(np.int64) + 1
    return np.sign(distance).astype(np.int64) * np.minimum(np.where(magnitude == 0, 0, exponents), LAST_BIN)


def bin_label(index: int) -> str:
    """`-4 to -3`, `-2`, `+1`, `zero of the other sign`, `beyond +65536`."""
    if index == 0:
        return "zero of the other sign"
    sign, magnitude = "-" if index < 0 else "+", abs(index)
    if magnitude == LAST_BIN:
        return f"beyond {sign}{1 << (LAST_BIN - 2)}"
    last = 1 << (magnitude - 1)
    first = last // 2 + 1
    if first >= last:
        return f"{sign}{last}"
    return f"{sign}{last} to {sign}{first}" if index < 0 else f"{sign}{first} to {sign}{last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UlpHistogram:
    """The outputs that differ, by how far. Its counts add up to the number of outputs that differ."""

    finite: Mapping[int, int] = field(default_factory=dict)
    """Bin (see `bins`) -> outputs."""
    apart: Mapping[str, int] = field(default_factory=dict)
    """`observed for expected` or `OTHER_SIGN` of `APART`, or `NOT_COMPARED` -> outputs."""
    lowest: int = 0
    highest: int = 0
    """The extreme distances; both 0 where there is none."""

    @property
    def total(self) -> int:
        return sum(self.finite.values()) + sum(self.apart.values())

    @property
    def not_compared(self) -> int:
        return self.apart.get(NOT_COMPARED, 0)

    @property
    def manner(self) -> str:
        """How outputs differ: by a rounding, or by more."""
        if self.apart.keys() - {OTHER_SIGN}:
            return "by NaN or infinity"
        is_rounding = not self.apart and max(-self.lowest, self.highest) <= _ROUNDINGS
        return f"by {'up to' if is_rounding else 'more than'} {_ROUNDINGS} ulps"

    def words(self) -> str:
        """`120 outputs differ, by -3 to +1 ulps, most often +1 (60 %); NaN for number 4`."""
        parts = ["1 output differs" if self.total == 1 else f"{self.total:,} outputs differ"]
        if self.finite:
            parts.append(f"by {ulps_text(self.lowest, self.highest)}")
        name, count = max(self.labelled().items(), key=lambda item: item[1])
        parts.append(f"most often {name} ({100 * count / self.total:.0f} %)")
        return "; ".join([", ".join(parts), *(f"{name} {count:,}" for name, count in self.apart.items())])

    def labelled(self) -> dict[str, int]:
        """Label -> outputs, from the most negative to the most positive, then what has no distance."""
        finite = {bin_label(index): self.finite[index] for index in sorted(self.finite)}
        return finite | {name: self.apart[name] for name in (*APART, NOT_COMPARED) if name in self.apart}


def ulp_histogram(observed: np.ndarray, expected: np.ndarray) -> UlpHistogram:
    """The histogram of the outputs that differ; arrays of one dtype and shape."""
    observed, expected = np.asarray(observed), np.asarray(expected)
    wrong = different(observed, expected)
    observed, expected = observed[wrong], expected[wrong]
    if not observed.size:
        return UlpHistogram()
    distance, apart = distances(observed, expected)
    turned = have_other_sign(observed, expected)
    finite = distance[~(apart | turned)]
    indices, counts = np.unique(bins(finite), return_counts=True)
    kinds = np.bincount(3 * _kind(observed[apart]) + _kind(expected[apart]), minlength=9)
    counts_apart = {name: int(kinds[pair]) for pair, name in _APART.items()} | {OTHER_SIGN: int(turned.sum())}
    return UlpHistogram(
        finite={int(index): int(count) for index, count in zip(indices, counts, strict=True)},
        apart={name: count for name, count in counts_apart.items() if count},
        lowest=int(finite.min()) if finite.size else 0,
        highest=int(finite.max()) if finite.size else 0,
    )


def _kind(array: np.ndarray) -> np.ndarray:
    # 0 of a finite number, 1 of an infinity, 2 of NaN.
    with np.errstate(invalid="ignore"):  # of signalling NaN
        return np.where(np.isnan(array), 2, np.where(np.isfinite(array), 0, 1))


def merged(histograms: Iterable[UlpHistogram]) -> UlpHistogram:
    """All of them counted together."""
    listed = list(histograms)
    finite, apart = Counter[int](), Counter[str]()
    for histogram in listed:
        finite.update(histogram.finite)
        apart.update(histogram.apart)
    return UlpHistogram(
        finite=dict(finite),
        apart=dict(apart),
        lowest=min((histogram.lowest for histogram in listed if histogram.finite), default=0),
        highest=max((histogram.highest for histogram in listed if histogram.finite), default=0),
    )


def merged_by_name(histograms: Sequence[Mapping[str, UlpHistogram]]) -> dict[str, UlpHistogram]:
    """Those of each name counted together, in the order in which the names first appear."""
    names = dict.fromkeys(name for by_name in histograms for name in by_name)
    return {name: merged(by_name[name] for by_name in histograms if name in by_name) for name in names}
