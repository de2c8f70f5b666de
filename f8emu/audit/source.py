"""A float8 weight beside the weight that it was quantized from: which dialects give every byte, and where none does."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from f8emu.audit.blocks import Blocks, Weight, bands
from f8emu.audit.checkpoint import Stored
from f8emu.audit.faults import Severity
from f8emu.audit.findings import Finding, finding
from f8emu.dialects import DIALECTS, Dialect
from f8emu.dialects.arithmetic import Factors, block_amax, encode, factors_from_amax
from f8emu.dialects.rules import PowerOfTwo, ScaleForm

_Part = tuple[int, int, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One weight against its source."""

    weight: Weight
    stored: int
    """A hash of the scales as they are stored."""
    dialects: tuple[str, ...] = ()
    """Those that give every byte of codes and scales; the sign of a zero is left out."""
    expected: frozenset[int] = frozenset()
    """Without any, hashes of the scales that the nearest ones give."""
    finding: Finding | None = None


@dataclass(slots=True, kw_only=True)
class _Candidate:
    """A dialect, and where it differs; arrays are [down, across] of all matrices, one below the other."""

    dialect: Dialect
    factors: Factors
    ours: np.ndarray
    """The scales that it gives, in the dtype of the checkpoint: a float32 rule may be stored as bfloat16."""
    scales_differ: np.ndarray
    codes_differ: np.ndarray
    """How many codes of a block differ."""
    first: dict[int, str] = field(default_factory=dict)
    """Row of blocks -> the first code in it that differs."""

    @property
    def differs(self) -> np.ndarray:
        return self.scales_differ | (self.codes_differ > 0)

    @property
    def form(self) -> ScaleForm:
        assert self.dialect.scale is not None
        return self.dialect.scale


def compared(weight: Weight, blocks: Blocks, source: Stored, *, is_power_of_two: bool = False) -> Comparison | None:
    """The dialects of a weight; None if no dialect has its blocks. `is_power_of_two`: the configuration says so.

    Raises:
        CheckpointError: a file has changed.
    """
    _, rows, k = weight.matrices
    raw = blocks.raw.reshape(-1, weight.grid[2])

    def has_extent(one: Dialect) -> bool:  # of a matrix of one block, several granularities are the same
        return any((min(h or rows, rows), min(w or k, k)) == weight.extent for h, w in one.blocks)

    # 1. The scales, for which the largest magnitudes are enough.
    amax = np.zeros(raw.shape, np.float32)
    for first, height, x in _parts(weight, source):
        found = block_amax(x, (height, weight.extent[1]))
        np.maximum(amax[first : first + len(found)], found, out=amax[first : first + len(found)])
    dtype = next(_parts(weight, source))[2].dtype
    every = [_candidate(one, amax, raw, dtype) for one in DIALECTS.values() if one.scale and has_extent(one)]
    if not every:
        return None
    # 2. The codes: of dialects with these scales to the end; of all others a part, to find the nearest.
    right = [one for one in every if not one.scales_differ.any()]
    _count_codes(weight, source, right or every, is_sample=not right)
    fits = [one for one in right if not one.codes_differ.any()]
    if fits:
        powers = [one for one in fits if one.form.is_power_of_two]
        found = _by_logarithm(weight, raw, every, powers) if is_power_of_two or powers == fits else None
        names = tuple(one.dialect.name for one in fits)
        return Comparison(weight=weight, stored=hash(blocks.raw.tobytes()), dialects=names, finding=found)
    # 3. The nearest: by its codes, as long as some are right; then the one whose scales moved; then by its scales.
    half = (weight.codes.size if right else next(_parts(weight, source))[2].size) // 2
    fewest = min(min(int(one.codes_differ.sum()), half) for one in right or every)
    tied = [one for one in right or every if min(int(one.codes_differ.sum()), half) == fewest]
    with np.errstate(all="ignore"):
        far = {id(one): np.median(np.abs(np.log2(one.factors.scale / raw.astype(np.float32)))) for one in tied}
    best = next((one for one in tied if _moved(one.ours, raw)), min(tied, key=lambda one: float(far[id(one)])))
    if not right:
        best.codes_differ[:] = 0
        _count_codes(weight, source, [best], is_sample=False)
    expected = frozenset(hash(one.ours.tobytes()) for one in tied)
    found = _finding(weight, raw, best)
    return Comparison(weight=weight, stored=hash(blocks.raw.tobytes()), expected=expected, finding=found)


def misplaced(comparisons: Sequence[Comparison]) -> Iterator[Finding]:
    """Findings of all comparisons; scales that belong to another tensor are told as that."""
    owners = {scales: one.weight.name for one in comparisons for scales in one.expected}
    for one in comparisons:
        if one.finding is not None:
            owner = owners.get(one.stored)
            is_other = one.stored not in one.expected and owner is not None and one.finding.check == "no-dialect"
            moved = (f"scales of {one.weight.name}", f"those of {owner}")
            yield finding("grid-moved", one.weight.name, *moved, block=one.finding.block) if is_other else one.finding


def mixed(comparisons: Sequence[Comparison]) -> Iterator[Finding]:
    """Weights whose dialects are not that of the others with the same blocks."""
    for block in dict.fromkeys(one.weight.block for one in comparisons):
        known = [one for one in comparisons if one.weight.block == block and one.dialects]
        counts = Counter(name for one in known for name in one.dialects)
        usual, count = counts.most_common(1)[0] if counts else ("", 0)
        other = [one for one in known if usual not in one.dialects]
        if other and count > len(other):
            found = f"{other[0].dialects[0]}, in {len(other)} of {len(known)} weights"
            yield finding("dialects-mixed", other[0].weight.name, usual, found)


def _parts(weight: Weight, stored: Stored) -> Iterator[_Part]:
    # First row of blocks, rows of a block in this part, and the part of a matrix: whole blocks, or a piece of one.
    _, rows, k = weight.matrices
    for matrix, row, taken in bands(weight):
        begin = (matrix * rows + row) * k
        first = matrix * weight.grid[1] + row // weight.extent[0]
        yield first, min(weight.extent[0], taken), stored.read(begin, begin + taken * k).reshape(taken, k)


def _candidate(dialect: Dialect, amax: np.ndarray, raw: np.ndarray, dtype: np.dtype) -> _Candidate:
    factors = factors_from_amax(amax, dialect, dtype)
    scale = factors.scale if dialect.stored.is_multiplier else factors.stored
    with np.errstate(all="ignore"):
        ours = scale if scale.dtype == raw.dtype else scale.astype(np.float32).astype(raw.dtype)
    bits = f"u{raw.dtype.itemsize}"
    differ = np.ascontiguousarray(ours).view(bits) != np.ascontiguousarray(raw).view(bits)
    more = {"scales_differ": differ, "codes_differ": np.zeros(raw.shape, np.int64)}
    return _Candidate(dialect=dialect, factors=factors, ours=ours, **more)


def _count_codes(weight: Weight, source: Stored, of: Sequence[_Candidate], *, is_sample: bool) -> None:
    starts = np.arange(0, weight.codes.shape[-1], weight.extent[1])
    for (at, height, x), (_, _, codes) in zip(_parts(weight, source), _parts(weight, weight.codes), strict=True):
        found = codes.view(np.uint8)
        down = slice(at, at + -(-len(x) // height))
        made: dict[object, np.ndarray] = {}  # dialects with the same rule and factors give the same codes
        for one in of:
            part = Factors(*(grid if grid is None else grid[down] for grid in one.factors))  # pyright: ignore[reportArgumentType]
            key = (one.dialect.code, *(None if grid is None else grid.tobytes() for grid in part[1:]))
            if key not in made:
                made[key] = encode(x, part, one.dialect, (height, weight.extent[1])).view(np.uint8)
            differs = (made[key] != found) & (((made[key] | found) & 0x7F) != 0)
            if differs.any():
                across = np.add.reduceat(differs, starts, axis=1, dtype=np.int64)
                one.codes_differ[down] += np.add.reduceat(across, np.arange(0, len(x), height), axis=0)
                r, c = np.argwhere(differs)[0]
                one.first.setdefault(
                    at + r // height, f"{made[key][r, c]:#04x} for {x[r, c]:.6g}, not {found[r, c]:#04x}"
                )
        if is_sample:
            return


def _by_logarithm(weight: Weight, raw: np.ndarray, every: list[_Candidate], powers: list[_Candidate]) -> Finding | None:
    # Where all that fits rounds by a float logarithm, and the bits give twice the scale.
    bits = [one for one in every if one.form.power_of_two in (PowerOfTwo.UP, PowerOfTwo.DOWN)]
    logarithms = (PowerOfTwo.UP_LOG2, PowerOfTwo.DOWN_LOG2)
    if not bits or not all(one.form.power_of_two in logarithms for one in powers):
        return None
    best = min(bits, key=lambda one: int(one.scales_differ.sum()))
    wrong = best.ours.astype(np.float32) == 2 * raw.astype(np.float32)
    if not powers or not wrong.any():
        return None
    scales = (f"{array[wrong][0]:.9g}" for array in (best.ours.astype(np.float32), raw.astype(np.float32)))
    place = {"block": weight.place(int(wrong.argmax())), "blocks": int(wrong.sum())}
    return finding("logarithm", weight.name, *scales, **place)


def _finding(weight: Weight, raw: np.ndarray, best: _Candidate) -> Finding:
    wrong = best.differs
    down, across = (int(i) for i in np.argwhere(wrong)[0])
    place = {"block": weight.place(int(wrong.argmax())), "blocks": int(wrong.sum())}
    # 1. Scales that moved: the codes say which they should be.
    codes, scales = int(best.codes_differ.sum()), int(best.scales_differ.sum())
    name = best.dialect.name
    if codes == 0 and (moved := _moved(best.ours, raw)):
        return finding("grid-moved", weight.name, f"the order of blocks, by {name}", moved, **place)
    # 2. What the nearest dialect gives, and what is there.
    expected = f"by {name}, the nearest: scale {float(best.ours[down, across]):.9g}"
    if best.codes_differ[down, across]:
        expected += f", code {best.first[down]}"
    found = f"scale {float(raw[down, across]):.9g}; {scales} scales and {codes} codes differ in all"
    is_other = scales or codes > weight.codes.size // 20  # dialects with the same scales differ in 3% of codes at most
    severity = Severity.ERROR if is_other else Severity.WARNING
    return finding("no-dialect", weight.name, expected, found, severity=severity, **place)


def _moved(a: np.ndarray, b: np.ndarray) -> str:
    # How the stored grid b came from a; empty, if it did not.
    a, b = a.astype(np.float32), b.astype(np.float32)
    if np.array_equal(a, b):
        return ""
    if np.array_equal(b.reshape(-1), a.T.reshape(-1)):
        return "the transposed grid"
    for axis, name in ((0, "down"), (1, "across")):
        for by in (1, -1):
            inner = [slice(None), slice(None)]
            inner[axis] = slice(1, None) if by > 0 else slice(None, -1)
            part = tuple(inner)
            if np.array_equal(np.roll(a, by, axis)[part], b[part]) and not np.array_equal(a[part], b[part]):
                return f"the grid shifted by {by} block {name}"
    return "the same scales in another order" if np.array_equal(np.sort(a, None), np.sort(b, None)) else ""
