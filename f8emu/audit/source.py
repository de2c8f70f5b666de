"""A float8 weight beside the weight that it was quantized from: which dialects give every byte, and where none does."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from f8emu.audit.blocks import VALUES, Blocks, Weight
from f8emu.audit.checkpoint import Stored
from f8emu.audit.faults import Severity
from f8emu.audit.findings import Finding, finding
from f8emu.dialects import DIALECTS, Dialect
from f8emu.dialects.arithmetic import Factors, block_amax, encode, factors_from_amax
from f8emu.dialects.rules import Block

_BAND = 1 << 20
"""Elements of the source that are held at a time, or one row of blocks."""
_FAR = 0.1
"""An error, as a share of the largest weight of a block, that no rounding to float8 makes: half a step is 1/28."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One weight against its source."""

    weight: Weight
    dialects: tuple[str, ...]
    """Those that give every byte of codes and scales; the sign of a zero is left out."""
    stored: bytes
    """The scales as they are stored."""
    nearest: str = ""
    """Without any, the one that gives the most codes."""
    expected: bytes = b""
    """The scales that it gives."""
    finding: Finding | None = None


@dataclass(slots=True, kw_only=True)
class _Candidate:
    dialect: Dialect
    factors: Factors
    scales_differ: np.ndarray
    codes_differ: np.ndarray
    """[down, across]: how many codes of a block differ."""
    code_first: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    """Block -> row, column, expected and found of its first code that differs."""


def compared(weight: Weight, blocks: Blocks, source: Stored) -> Comparison | None:
    """The dialects of a weight; None without a dialect that has its blocks.

    Raises:
        CheckpointError: a file has changed.
    """
    assert weight.block is not None
    count, rows, k = weight.matrices
    _, down, across = weight.grid
    matrix = Weight(codes=weight.codes, scale=weight.scale, block=weight.block)
    raw = blocks.raw.reshape(count, down, across)
    # 1. The scales, for which the largest magnitudes are enough.
    kept: list[list[_Candidate]] = []
    amaxes = [_amax(matrix, source, i) for i in range(count)]
    dtype = np.dtype(amaxes[0][1])
    every = [one for one in DIALECTS.values() if one.scale is not None and _has(one, weight, rows, k)]
    if not every:
        return None
    for i, (amax, _) in enumerate(amaxes):
        kept.append([_candidate(one, amax, raw[i], dtype) for one in every])
    right = [j for j in range(len(every)) if not any(of[j].scales_differ.any() for of in kept)]
    # 2. The codes: of dialects with these scales to the end, of all others a band, to find the nearest.
    for i, of in enumerate(kept):
        _count_codes(matrix, source, i, [of[j] for j in right or range(len(every))], is_sample=not right)
    fits = [j for j in right if not any(of[j].codes_differ.any() for of in kept)]
    stored = blocks.raw.tobytes()
    if fits:
        return Comparison(weight=weight, dialects=tuple(every[j].name for j in fits), stored=stored)
    wrong = {
        j: (sum(int(of[j].codes_differ.sum()) for of in kept), _scales_wrong(kept, j))
        for j in right or range(len(every))
    }
    nearest = min(wrong, key=lambda j: wrong[j])
    best = [of[nearest] for of in kept]
    if not right:
        for i, one in enumerate(best):
            one.codes_differ[:] = 0
            _count_codes(matrix, source, i, [one], is_sample=False)
    expected = b"".join(_as_stored(one, raw.dtype).tobytes() for one in best)
    found = _finding(weight, blocks, best, source)
    return Comparison(
        weight=weight, dialects=(), stored=stored, nearest=best[0].dialect.name, expected=expected, finding=found
    )


def misplaced(comparisons: Sequence[Comparison]) -> list[Finding]:
    """Findings of all comparisons; scales that belong to another tensor are told as that."""
    owners = {
        one.expected or one.stored: one.weight.name for one in comparisons if len(set(one.expected or one.stored)) > 1
    }
    found: list[Finding] = []
    for one in comparisons:
        if one.finding is None:
            continue
        owner = owners.get(one.stored)
        if one.finding.check == "no-dialect" and one.stored != one.expected and owner not in (None, one.weight.name):
            text = f"those of {owner}"
            found.append(finding("grid-moved", one.weight.name, "scales of this weight", text, block=one.finding.block))
        else:
            found.append(one.finding)
    return found


def _has(dialect: Dialect, weight: Weight, rows: int, k: int) -> bool:
    # A dialect has blocks of this extent: for a matrix of one block several granularities are one.
    height, width = weight.extent
    return any((min(b[0] or rows, rows), min(b[1] or k, k)) == (height, width) for b in dialect.blocks)


def _candidate(dialect: Dialect, amax: np.ndarray, raw: np.ndarray, dtype: np.dtype) -> _Candidate:
    factors = factors_from_amax(amax, dialect, dtype)
    one = _Candidate(
        dialect=dialect, factors=factors, scales_differ=np.zeros(raw.shape, bool), codes_differ=np.zeros(raw.shape, int)
    )
    ours = _as_stored(one, raw.dtype)
    bits = f"u{raw.dtype.itemsize}"
    one.scales_differ[:] = ours.view(bits) != np.ascontiguousarray(raw).view(bits)
    return one


def _as_stored(one: _Candidate, dtype: np.dtype) -> np.ndarray:
    # What decodes, in the dtype of the checkpoint: a float32 rule may be stored as bfloat16, a power of two as any.
    scale = one.factors.scale if one.dialect.stored.is_multiplier else one.factors.stored
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(scale if scale.dtype == dtype else scale.astype(np.float32).astype(dtype))


def _scales_wrong(kept: list[list[_Candidate]], j: int) -> int:
    return sum(int(of[j].scales_differ.sum()) for of in kept)


def _bands(weight: Weight, source: Stored, matrix: int) -> "Sequence[tuple[int, int]]":
    # First row and number of rows: whole blocks, unless a block is the whole matrix.
    _, rows, k = weight.matrices
    height, _ = weight.extent
    most = max(1, _BAND // k)
    step = most if height == rows else max(height, most // height * height)
    return [(row, min(step, rows - row)) for row in range(0, rows, step)]


def _read(stored: Stored, weight: Weight, matrix: int, row: int, count: int) -> np.ndarray:
    _, rows, k = weight.matrices
    begin = (matrix * rows + row) * k
    (part,) = stored.parts(count * k, None, begin=begin, end=begin + count * k)
    return part.reshape(count, k)


def _amax(weight: Weight, source: Stored, matrix: int) -> tuple[np.ndarray, np.dtype]:
    _, down, across = weight.grid
    height, width = weight.extent
    amax = np.zeros((down, across), np.float32)
    dtype = np.dtype(np.float32)
    for row, count in _bands(weight, source, matrix):
        x = _read(source, weight, matrix, row, count)
        dtype = x.dtype
        found = block_amax(x, (min(height, count), width))
        target = amax[row // height : row // height + len(found)]
        np.maximum(target, found, out=target)
    return amax, dtype


def _count_codes(weight: Weight, source: Stored, matrix: int, of: Sequence[_Candidate], *, is_sample: bool) -> None:
    height, width = weight.extent
    _, _, k = weight.matrices
    starts = np.arange(0, k, width)
    for row, count in _bands(weight, source, matrix)[: 1 if is_sample else None]:
        x = _read(source, weight, matrix, row, count)
        found = _read(weight.codes, weight, matrix, row, count).view(np.uint8)
        block: Block = (min(height, count), width)
        at = slice(row // height, row // height + -(-count // height))
        made: dict[object, np.ndarray] = {}
        for one in of:
            # Dialects with the same rule for codes and the same factors give the same codes.
            part = Factors(*(None if grid is None else grid[at] for grid in one.factors))  # pyright: ignore[reportArgumentType]
            t = b"" if part.multiplier is None else part.multiplier.tobytes()
            key = (one.dialect.code, part.scale.tobytes(), t)
            if key not in made:
                made[key] = encode(x, part, one.dialect, block).view(np.uint8)
            differs = made[key] != found
            differs &= ((made[key] | found) & 0x7F) != 0
            if not differs.any():
                continue
            of_columns = np.add.reduceat(differs, starts, axis=1, dtype=np.int64)
            of_blocks = np.add.reduceat(of_columns, np.arange(0, count, height), axis=0)
            one.codes_differ[at] += of_blocks
            r, c = (int(i) for i in np.argwhere(differs)[0])
            index = (row + r) // height * one.codes_differ.shape[1] + c // width
            one.code_first.setdefault(index, (row + r, c, int(made[key][r, c]), int(found[r, c])))


def _finding(weight: Weight, blocks: Blocks, best: Sequence[_Candidate], source: Stored) -> Finding:
    # 1. The first block that differs, of the first matrix in which one does.
    name = best[0].dialect.name
    scales = np.stack([one.scales_differ for one in best])
    wrong = (scales | (np.stack([one.codes_differ for one in best]) > 0)).reshape(-1)
    first = int(wrong.argmax())
    place = {"block": weight.place(first), "blocks": int(wrong.sum())}
    ours = np.concatenate([_as_stored(one, blocks.raw.dtype).reshape(-1) for one in best])
    # 2. Scales that moved: the codes say which they should be.
    codes = sum(int(one.codes_differ.sum()) for one in best)
    if (
        len(best) == 1
        and codes == 0
        and (moved := _moved(ours.reshape(weight.grid[1:]), blocks.raw.reshape(weight.grid[1:])))
    ):
        return finding("grid-moved", weight.name, f"the order of blocks ({name})", moved, **place)
    # 3. What is there, and what the nearest dialect gives.
    matrix, index = divmod(first, weight.grid[1] * weight.grid[2])
    texts = [f"scale {float(array[first]):.9g}" for array in (ours, blocks.raw)]
    code = best[matrix].code_first.get(index)
    if code is not None:
        texts = [f"{text}, code [{code[0]}, {code[1]}] {code[i]:#04x}" for i, text in zip((2, 3), texts, strict=True)]
    texts[1] += f"; {int(scales.sum())} scales and {codes} codes differ in all"
    is_far = abs(float(blocks.scale[first]) / float(ours[first].astype(np.float32)) - 1) > _FAR if ours[first] else True
    if code is not None:
        values = [float(VALUES[one & 0x7F]) * (-1 if one & 0x80 else 1) for one in code[2:]]
        is_far |= not abs(values[0] - values[1]) <= _FAR * 448
    severity = Severity.ERROR if is_far else Severity.WARNING
    return finding(
        "no-dialect", weight.name, f"by {name}, the nearest: {texts[0]}", texts[1], severity=severity, **place
    )


def _moved(ours: np.ndarray, stored: np.ndarray) -> str:
    # How the stored grid came from ours, both [down, across].
    a, b = ours.astype(np.float32), stored.astype(np.float32)
    if np.array_equal(b.reshape(-1), a.T.reshape(-1)):
        return "the transposed grid"
    for axis, name in ((0, "down"), (1, "across")):
        if a.shape[axis] < 2:
            continue
        for by in (1, -1):
            rolled = np.roll(a, by, axis)
            inner = [slice(None), slice(None)]
            inner[axis] = slice(1, None) if by > 0 else slice(None, -1)
            part = tuple(inner)
            if np.array_equal(rolled[part], b[part]) and not np.array_equal(a[part], b[part]):
                return f"the grid shifted by {by} block{'s' * (abs(by) > 1)} {name}"
        if np.array_equal(np.flip(a, axis), b):
            return f"the grid reversed {name}"
    return "the same scales in another order" if np.array_equal(np.sort(a, None), np.sort(b, None)) else ""
