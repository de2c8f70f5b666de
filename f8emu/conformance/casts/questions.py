"""What is put to a cast or a quantizer: values where one goes wrong, in shapes and in memory that it meets.

Values that every one must take are float32 matrices of whole blocks. What it may also refuse, by any exception, is
marked: 16-bit values, other than two dimensions, and to a quantizer partial blocks and no rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from f8emu.conformance.cases.distributions import dtype_of, rng
from f8emu.conformance.cases.tables import all_codes, float32_boundaries
from f8emu.spec import BFLOAT16, FLOAT16, FLOAT32, HIGH_PRECISION, Format, Granularity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """One call."""

    id: str
    family: str = ""
    """What it asks about."""
    lying: np.ndarray
    """What lies in memory; `x` is each of its columns, or every second one."""
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
        """What the function is given."""
        return self.lying[..., :: self.step] if self.step > 1 else self.lying


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
    scales = [np.full((), one, np.float32) for one in _SCALES] if with_scale else [None]
    points = float32_boundaries(target)
    every: list[tuple[str, np.ndarray]] = []
    for source in (BFLOAT16, FLOAT16):
        codes = all_codes(source).reshape(256, 256)
        with np.errstate(invalid="ignore"):  # of signalling NaN
            every += [(f"every {source}", codes), (f"every {source} as float32", codes.astype(np.float32))]
    every.append(("float32 midpoints and neighbours", np.resize(points, (-(-points.size // 64), 64))))
    for name, x in every:
        for scale in scales:
            of = "" if scale is None else f" scale {scale:g}"
            yield Question(id=name + of, family=name, lying=x, scale=scale, may_refuse=x.dtype != np.float32)
    for scale in scales:  # a product, a quotient and those by a rounded inverse differ next to midpoints
        if scale is not None and np.frexp(scale)[0] != 0.5:
            with np.errstate(all="ignore"):
                x = np.concatenate([points * scale, points / scale])
            family = "scaled midpoints and neighbours"
            x = np.resize(x, (-(-x.size // 64), 64))
            yield Question(id=f"{family}, scale {scale:g}", family=family, lying=x, scale=scale)
    for i, shape in enumerate(_SHAPES):
        x = rng("casts", shape).choice(points, shape)
        how: dict[str, Any] = {"family": "shapes", "scale": scales[i % len(scales)], "may_refuse": x.ndim != 2}
        yield Question(id=f"shape {list(shape)}", lying=x, **how)
    for source in (FLOAT32, BFLOAT16):
        for i, (name, how) in enumerate(_LYING.items()):
            with np.errstate(all="ignore"):  # of signalling NaN
                x = rng("casts", name).choice(points, (37, 54)).astype(dtype_of(source))
            how = {**how, "family": "memory", "scale": scales[i % len(scales)], "may_refuse": source != FLOAT32}
            yield Question(id=f"{source} {name}", lying=x, **how)


_MAGNITUDES = (1e-7, 1e-5, 3e-3, 1.0, 700.0, 1e6, 1e30)
_TINY = (1e-39, 3e-38, 1e-14, 1e-13, 1e-11, 1e-9, 1e-6)
_SHAPES_OF_BLOCKS = ((1, 1), (1, 128), (2, 129), (130, 131), (3, 5001), (2, 8192), (640, 256), (0, 128))


def quantize_questions(granularity: Granularity, target: Format) -> Iterator[Question]:
    """Blocks of many magnitudes: random, zero, huge, tiny, at powers of two, with NaN and infinity; shapes; memory."""
    for source in HIGH_PRECISION:
        dtype, r = dtype_of(source), rng("quantizers", source.name)

        def question(family: str, name: str, x: np.ndarray, dtype=dtype, source=source, **how: Any) -> Question:
            with np.errstate(all="ignore"):
                how = {"may_refuse": source != FLOAT32, **how}
                return Question(id=f"{source} {name}", family=family, lying=x.astype(dtype), **how)

        # 1. One magnitude in the whole matrix, then one in each row.
        height = 128 if granularity is Granularity.BLOCKWISE_128X128 else 16
        normal = r.standard_normal((height, 256)).astype(np.float32)
        unit = np.clip(normal / 4, -1, 1)
        for magnitude in (*_MAGNITUDES, *_TINY):
            yield question("magnitudes", f"of magnitude {magnitude:g}", normal * np.float32(magnitude))
        rows = np.exp2(r.uniform(-60, 60, (height, 1))).astype(np.float32)
        yield question("magnitudes", "of a magnitude in each row", normal * rows)
        yield question(
            "magnitudes", "of tiny rows", normal * np.geomspace(1e-15, 1e-2, height, dtype=np.float32)[:, None]
        )
        # 2. Largest magnitudes where a logarithm rounds: 448 * 2^k and its neighbours.
        for by in (-1, 0, 1):
            x = unit.copy()
            x[:, ::128] = 1.0
            top = np.float32(target.max).view(np.int32) + np.int32(by)
            powers = np.exp2(np.arange(height, dtype=np.float32) * 3 % 40 - 20)[:, None]
            yield question(
                "powers of two",
                f"up to {target.max:g} times a power of two, {by:+d}",
                x * top.view(np.float32) * powers,
            )
        # 3. Zeros, huge numbers, special ones; values that become zero.
        sparse = normal.copy()
        sparse[3:6] = 0
        sparse[6:9] = -0.0
        sparse[9:, 1:] *= np.float32(1e-9)
        huge = np.float32(np.finfo(np.float32).max if source == FLOAT32 else 3.3e38 if source == BFLOAT16 else 65504)
        yield question("zeros", "all zero", np.zeros_like(normal))
        yield question("zeros", "rows of zeros, and values that become zero", sparse)
        yield question("magnitudes", "near the largest number", unit * huge)
        for name, value in (("NaN", np.nan), ("infinity", np.inf), ("-infinity", -np.inf)):
            x = normal.copy()
            x[5, 7] = value
            yield question("NaN and infinity", f"one {name}", x)
        # 4. Shapes and memory.
        if source == FLOAT16:
            continue
        for shape in _SHAPES_OF_BLOCKS:
            x = r.standard_normal(shape)
            is_block = all(n % (side or 1) == 0 for n, side in zip(shape, granularity.block, strict=True))
            yield question(
                "shapes", f"shape {list(shape)}", x, may_refuse=source != FLOAT32 or not is_block or 0 in shape
            )
        for name, how in _LYING.items():
            yield question("memory", name, np.resize(normal, (height, 512)) if "step" in how else normal, **how)
