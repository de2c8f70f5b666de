"""The questions to a cast or a quantizer: values where one goes wrong, in shapes and in memory that it meets.

Values that every one must take are float32 matrices of whole blocks. What it may also refuse, by any exception, is
marked: 16-bit values, other than two dimensions, and to a quantizer partial blocks and no rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of, rng
from f8emu.conformance.cases.tables import all_codes, float32_boundaries
from f8emu.conformance.compare import show
from f8emu.spec import BFLOAT16, FLOAT16, FLOAT32, HIGH_PRECISION, Format, Granularity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """One call."""

    id: str
    family: str = ""
    """The subject of the question."""
    lying: np.ndarray
    """The array in memory; `x` is each of its columns, or every second one."""
    step: int = 1
    scale: np.ndarray | None = None
    """Float32 without dimensions, of a cast that takes one."""
    column_major: bool = False
    padding: int = 0
    """Elements between its rows."""
    offset: int = 0
    """Bytes from a boundary of 256 to the first element."""
    may_refuse: bool = False

    @property
    def x(self) -> np.ndarray:
        """The function's argument."""
        return self.lying[..., :: self.step] if self.step > 1 else self.lying

    @property
    def scale_or_1(self) -> np.ndarray:
        """The scale, 1 where there is none."""
        return np.full((), 1, np.float32) if self.scale is None else self.scale

    def describe(self, part: str, index: tuple[int, ...]) -> str:
        """The inputs that lead to a code."""
        if part == "scales":
            return ""
        return f"x={show(self.x[index])}" + ("" if self.scale is None else f" scale={show(self.scale)}")


_LYING: dict[str, dict[str, Any]] = {
    "column-major": {"column_major": True},
    "rows apart": {"padding": 5},
    "not at a boundary": {"offset": 4},
    "every second column": {"step": 2},
}
"""How x lies, in words -> fields of a question."""
_SCALES = (0.0173, 37.3, 0.25, 1.0)
_SHAPES = ((0, 16), (3, 0), (1, 1), (1, 7), (13, 1), (31, 127), (521, 263), (), (0,), (1009,), (3, 5, 7))


def cast_questions(target: Format, *, with_scale: bool) -> Iterator[Question]:
    """Every 16-bit number, as it is and as float32; where a cast of float32 changes its mind; shapes; memory."""
    scales = [np.full((), scale, np.float32) for scale in _SCALES] if with_scale else [None]
    points = float32_boundaries(target)
    with np.errstate(all="ignore"):  # of signalling NaN
        # 1. Values.
        numbers: dict[str, np.ndarray] = {}
        for source in (BFLOAT16, FLOAT16):
            numbers[f"every {source}"] = all_codes(source)
            numbers[f"every {source} as float32"] = all_codes(source).astype(np.float32)
        numbers["float32 midpoints and neighbours"] = points
        for family, values in numbers.items():
            for scale in scales:
                name = family if scale is None else f"{family} scale {scale:g}"
                refusable = values.dtype != np.float32
                yield Question(id=name, family=family, lying=_matrix(values), scale=scale, may_refuse=refusable)
        for scale in scales:  # a product, a quotient and those by a rounded inverse differ next to midpoints
            if scale is not None and np.frexp(scale)[0] != 0.5:
                x = _matrix(np.concatenate([points * scale, points / scale]))
                family = "scaled midpoints and neighbours"
                yield Question(id=f"{family}, scale {scale:g}", family=family, lying=x, scale=scale)
        # 2. Shapes and memory.
        for i, shape in enumerate(_SHAPES):
            x, scale = rng("casts", shape).choice(points, shape), scales[i % len(scales)]
            refusable = x.ndim != 2
            yield Question(id=f"shape {list(shape)}", family="shapes", lying=x, scale=scale, may_refuse=refusable)
        for source in (FLOAT32, BFLOAT16):
            for i, (name, how) in enumerate(_LYING.items()):
                x = rng("casts", name).choice(points, (37, 54)).astype(dtype_of(source))
                how = {**how, "scale": scales[i % len(scales)], "may_refuse": source != FLOAT32}
                yield Question(id=f"{source} {name}", family="memory", lying=x, **how)


def _matrix(values: np.ndarray) -> np.ndarray:
    return np.resize(values, (-(-values.size // 256), 256))


_MAGNITUDES = (1e-39, 3e-38, 1e-14, 1e-13, 1e-11, 1e-9, 1e-7, 1e-6, 1e-5, 3e-3, 1.0, 700.0, 1e6, 1e30)
_SHAPES_OF_BLOCKS = ((1, 1), (1, 128), (2, 129), (130, 131), (3, 5001), (2, 8192), (640, 256), (0, 128))


def quantize_questions(granularity: Granularity, target: Format) -> Iterator[Question]:
    """Blocks of many magnitudes: random, zero, huge, tiny, at powers of two, with NaN and infinity; shapes; memory."""
    height, width = 128 if granularity is Granularity.BLOCKWISE_128X128 else 16, granularity.block[1] or 128
    for source in HIGH_PRECISION:
        r = rng("quantizers", source.name)
        normal = r.standard_normal((height, 256)).astype(np.float32)
        matrices = [*_blocks(normal, r, source, target, width)]
        if source != FLOAT16:
            matrices += [("shapes", f"shape {list(shape)}", r.standard_normal(shape)) for shape in _SHAPES_OF_BLOCKS]
            wide = np.resize(normal, (height, 512))
            matrices += [("memory", name, wide if name == "every second column" else normal) for name in _LYING]
        for family, name, x in matrices:
            is_whole = all(n and n % (side or 1) == 0 for n, side in zip(x.shape, granularity.block, strict=True))
            with np.errstate(all="ignore"):
                yield Question(
                    id=f"{source} {name}",
                    family=family,
                    lying=x.astype(dtype_of(source)),
                    may_refuse=source != FLOAT32 or not is_whole,
                    **_LYING.get(name, {}),
                )


def _blocks(
    normal: np.ndarray, r: np.random.Generator, source: Format, target: Format, width: int
) -> Iterator[tuple[str, str, np.ndarray]]:
    # (family, name, float32 matrix) of the values of blocks.
    height = len(normal)
    # 1. One magnitude in the whole matrix, then one in each row.
    for magnitude in _MAGNITUDES:
        yield "magnitudes", f"of magnitude {magnitude:g}", normal * np.float32(magnitude)
    rows = np.exp2(r.uniform(-60, 60, (height, 1))).astype(np.float32)
    yield "magnitudes", "of a magnitude in each row", normal * rows
    tiny = np.geomspace(1e-15, 1e-2, height, dtype=np.float32)[:, None]
    yield "magnitudes", "of tiny rows", normal * tiny
    unit = np.clip(normal / 4, -1, 1)
    largest = {FLOAT32: float(np.finfo(np.float32).max), BFLOAT16: 3.3e38, FLOAT16: 65504.0}[source]
    yield "magnitudes", "near the largest number", unit * np.float32(largest)
    # 2. Largest magnitudes where a logarithm rounds: 448 * 2^k and its neighbours.
    unit[:, ::width] = 1.0
    powers = np.exp2(np.arange(height, dtype=np.float32) * 3 % 40 - 20)[:, None]
    for by in (-1, 0, 1):
        top = (np.float32(target.max).view(np.int32) + np.int32(by)).view(np.float32)
        yield "powers of two", f"up to {target.max:g} times a power of two, {by:+d}", unit * top * powers
    # 3. What a product and a quotient give another code.
    points = float32_boundaries(target)
    x = r.choice(points[np.abs(points) < target.max], normal.shape)
    x[:, ::width] = target.max
    yield "midpoints", "midpoints of codes and their neighbours, scaled", x * r.uniform(1, 2, (height, 1))
    # 4. Zeros, special numbers, values that become zero.
    yield "zeros", "all zero", np.zeros_like(normal)
    sparse = normal.copy()
    sparse[3:6] = 0
    sparse[6:9] = -0.0
    sparse[9:, 1:] *= np.float32(1e-9)
    yield "zeros", "rows of zeros, and values that become zero", sparse
    for name, value in (("NaN", np.nan), ("infinity", np.inf), ("-infinity", -np.inf)):
        x = normal.copy()
        x[5, 7] = value
        yield "NaN and infinity", f"one {name}", x
