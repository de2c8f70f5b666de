"""Draws the figures of docs/concepts from the code: `python docs/generate/figures.py`, with `--check` only compares.

Each figure is a plain SVG of 400 units that a page includes inline, so that `currentColor` is the colour of its text.
As an image, as in the README, it has a colour for light and one for dark.
Every number in a figure comes from `f8emu.spec` or `f8ref`, so a change of the rules makes a figure stale.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from fractions import Fraction
from html import escape
from math import log2
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from f8emu.report.svg import ALONE
from f8emu.spec import CHIPS, E4M3FN, E5M2, FLOAT8, FLOAT32, H100, HOPPER, Chip, Granularity
from f8emu.spec.swizzle import TILE_BLOCKS, TILE_ROWS, SwizzledGroup
from f8emu.split_k.plan import planned_gemm, split_k
from f8ref import exact
from f8ref import numpy as f8
from f8ref.exact.accumulate import k_slices
from f8ref.exact.number import exponent_of

FIGURES = Path(__file__).parents[1] / "figures"
WIDTH = 400
ACCENT = "#e8590c"
"""Reads on white and on black."""


class Drawing:
    """Shapes on a sheet of `WIDTH` units; y grows downwards."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.shapes: list[str] = []
        self.bottom = 0.0

    def _add(self, tag: str, bottom: float, content: str = "", **attributes: object) -> None:
        self.bottom = max(self.bottom, bottom)
        given = {key.replace("_", "-"): value for key, value in attributes.items() if value is not None}
        listed = " ".join(
            f'{key}="{f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float | int) else value}"'
            for key, value in given.items()
        )
        self.shapes.append(f"<{tag} {listed}>{content}</{tag}>" if content else f"<{tag} {listed}/>")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 11,
        anchor: str | None = None,
        mono: bool = False,
        bold: bool = False,
        faint: bool = False,
        color: str | None = None,
    ) -> None:
        """Words whose base line is at y."""
        self._add(
            "text",
            y + 4,
            escape(words),
            x=x,
            y=y,
            font_size=None if size == 11 else size,
            text_anchor=anchor,
            font_family="monospace" if mono else None,
            font_weight="bold" if bold else None,
            opacity=0.65 if faint else None,
            fill=color,
        )

    def rect(
        self, x: float, y: float, width: float, height: float, *, fill: float = 0, color: str = "currentColor"
    ) -> None:
        """An outlined box, filled with that opacity."""
        self._add(
            "rect",
            y + height,
            x=x,
            y=y,
            width=width,
            height=height,
            fill=color if fill else "none",
            fill_opacity=fill or None,
            stroke=color,
            stroke_width=0.8,
        )

    def line(
        self,
        points: Iterable[tuple[float, float]],
        *,
        width: float = 1,
        faint: bool = False,
        dash: str | None = None,
        color: str = "currentColor",
    ) -> None:
        """A line through points (x, y)."""
        given = list(points)
        path = "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in given)
        self._add(
            "path",
            max(y for _, y in given),
            d=path,
            fill="none",
            stroke=color,
            stroke_width=width,
            stroke_dasharray=dash,
            opacity=0.45 if faint else None,
        )

    def ticks(self, places: Iterable[tuple[float, float, float]], *, faint: bool = False, width: float = 0.7) -> None:
        """Vertical lines (x, top, bottom), as one path."""
        given = list(places)
        path = "".join(f"M{x:.2f} {top:.2f}V{bottom:.2f}" for x, top, bottom in given)
        self._add(
            "path", max(g[2] for g in given), d=path, stroke="currentColor", stroke_width=width,
            opacity=0.45 if faint else None,
        )  # fmt: skip

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line with a head: horizontal or vertical."""
        self.line([(x, y), (to_x, to_y)])
        if x == to_x:
            self.line([(x - 3, to_y - 5), (x, to_y), (x + 3, to_y - 5)])
        else:
            self.line([(to_x - 5, to_y - 3), (to_x, to_y), (to_x - 5, to_y + 3)])

    def grid(self, x: float, y: float, width: float, height: float, down: int, across: int) -> None:
        """The lines between tiles, as many down and across."""
        for i in range(1, down):
            self.line([(x, y + height * i / down), (x + width, y + height * i / down)], width=0.6, faint=True)
        for i in range(1, across):
            self.line([(x + width * i / across, y), (x + width * i / across, y + height)], width=0.6, faint=True)

    def svg(self) -> str:
        """The file."""
        height = self.bottom + 4
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
            f'aria-label="{escape(self.label)}" font-family="sans-serif" font-size="11" fill="currentColor" '
            'style="display:block;width:100%;max-width:44rem;margin:0 auto">'
        )
        return "\n".join([f"{head}<style>{ALONE}</style>", *self.shapes, "</svg>", ""])


def formats() -> Drawing:
    """The bits of the float8 formats, and every positive value on a logarithmic axis."""
    drawing = Drawing("The four float8 formats: their bits, and every positive value on a logarithmic axis")
    low, high = -18, 16

    def place(value: float) -> float:
        return 10 + (log2(value) - low) / (high - low) * 380

    y = 0
    for fmt in FLOAT8:
        drawing.text(10, y + 14, fmt.name, mono=True, bold=True)
        bits = "S" + "E" * fmt.exponent_bits + "F" * fmt.fraction_bits
        for i, bit in enumerate(bits):
            x = 270 + 15 * i
            drawing.rect(x, y + 3, 15, 15, fill={"S": 0.3, "E": 0.15, "F": 0}[bit])
            drawing.text(x + 7.5, y + 14, bit, mono=True, anchor="middle", size=10)
        values = [float(exact.decode(code, fmt).value) for code in range(1, fmt.max_code + 1)]
        axis = y + 44
        drawing.ticks(((place(v), axis - 12, axis) for v in values if v >= fmt.smallest_normal), width=0.6)
        drawing.ticks(((place(v), axis - 7, axis) for v in values if v < fmt.smallest_normal), width=0.9)
        drawing.line([(10, axis), (390, axis)], faint=True)
        nans = ", ".join(f"0x{code:02x}" for code in range(256) if exact.decode(code, fmt).is_nan)
        nans = nans if nans.count(",") < 2 else f"{nans.count(',') + 1} codes"
        infinities = "yes" if fmt.has_infinity else "none"
        drawing.text(10, axis + 14, f"max {fmt.max:g}; infinity: {infinities}; NaN: {nans}", size=10)
        y += 78
    for exponent in range(-16, 17, 8):
        words = "1" if exponent == 0 else f"2^{exponent}"
        anchor = "end" if exponent == 16 else "middle"
        drawing.text(place(2.0**exponent), y + 2, words, size=10, anchor=anchor, faint=True)
    return drawing


def spacing() -> Drawing:
    """The values from 0 to 2, and where a cast takes a number."""
    number = 1.35
    drawing = Drawing("The values of E4M3 and E5M2 from 0 to 2, and where a cast takes the number 1.35")

    def place(value: float) -> float:
        return 12 + value / 2 * 376

    for y, fmt in ((52, E4M3FN), (104, E5M2)):
        values = [float(exact.decode(code, fmt).value) for code in range(fmt.max_code + 1)]
        drawing.line([(12, y), (388, y)], faint=True)
        drawing.ticks(((place(v), y - 12, y) for v in values if v <= 2), width=0.8)
        nearest = float(np.asarray(f8.cast(np.float32(number), fmt), np.float32))
        drawing.line([(place(nearest), y - 15), (place(nearest), y + 3)], width=2.5, color=ACCENT)
        label = f"{number:g} becomes {nearest:g}"
        drawing.text(place(nearest), y + 14, label, anchor="middle", size=10, color=ACCENT)
        drawing.text(12, y + 14, fmt.name, mono=True, size=10, bold=True)
    drawing.line([(place(number), 14), (place(number), 108)], dash="3 3", color=ACCENT)
    drawing.text(place(number), 10, f"{number:g}", anchor="middle", size=10, color=ACCENT)
    anchors: dict[float, str | None] = {0: None, 0.5: "middle", 1: "middle", 2: "end"}
    for value, anchor in anchors.items():
        drawing.text(place(value), 134, f"{value:g}", anchor=anchor, size=10, faint=True)
    return drawing


def scales() -> Drawing:
    """What shares a scale: the granularities on one operand."""
    rows, k = 256, 512
    drawing = Drawing(f"An operand of {rows} rows by {k} of K: which elements share a scale at each granularity")
    width, height = 180, 90
    for i, granularity in enumerate(Granularity):
        x, y = 10 + 200 * (i % 2), 22 + 140 * (i // 2)
        drawing.text(x, y - 8, granularity.value, mono=True, bold=True, size=10.5)
        block_rows, block_k = granularity.block
        # Rows of one are drawn 16 high: 256 lines would be a grey box.
        tile_rows, tile_k = 16 if block_rows == 1 else block_rows or rows, block_k or k
        drawing.rect(x, y, width, height)
        drawing.grid(x, y, width, height, rows // tile_rows, k // tile_k)
        tile = width * tile_k / k, height * tile_rows / rows
        at = (1 if k > tile_k else 0, min(5, rows // tile_rows - 1) if rows > tile_rows else 0)
        drawing.rect(x + at[0] * tile[0], y + at[1] * tile[1], *tile, fill=0.55, color=ACCENT)
        shape = granularity.scale_shape(rows, k)
        count = shape[0] * shape[1]
        drawing.text(x, y + height + 14, f"scales [{shape[0]}, {shape[1]}]: {count:,}", size=10)
    return drawing


def swizzled() -> Drawing:
    """A tile of scales, 128 rows by 4 blocks, and its bytes: 32 lines of 16."""
    drawing = Drawing("Scales of 128 rows by 4 blocks, and the same as 512 bytes: row 1 of each 32 rows in one line")
    rows, size, top, left, right = 32, 11, 30, 66, 214
    drawing.text(left, 12, "scales [128, 4]", bold=True, size=10.5)
    drawing.text(right, 12, "512 bytes, 16 a line", bold=True, size=10.5)
    shown = (0, 1, 2, 31)
    places = [(row, top + size * (i + (row == 31))) for i, row in enumerate(shown)]
    for quarter in range(TILE_ROWS // rows):
        for row, y in places:
            y += quarter * 6 * size
            number, opacity = quarter * rows + row, 0.15 + 0.2 * quarter
            drawing.text(left - 6, y + 9, f"row {number}", anchor="end", size=9.5, faint=row != 1)
            for block in range(TILE_BLOCKS):
                drawing.rect(left + block * size, y, size, size, fill=opacity if row == 1 else 0.04, color=ACCENT)
    for row, y in places:
        drawing.text(right - 6, y + 9, f"byte {row * 16}", anchor="end", size=9.5, faint=row != 1)
        for at in range(16):
            group = SwizzledGroup(slice(0, TILE_ROWS), slice(0, TILE_BLOCKS), 0)
            number, block = next(
                (r, b) for r in range(TILE_ROWS) for b in range(TILE_BLOCKS) if group.offsets(r, b) == row * 16 + at
            )
            assert number % rows == row and block == at % 4
            opacity = 0.15 + 0.2 * (number // rows)
            drawing.rect(right + at * size, y, size, size, fill=opacity if row == 1 else 0.04, color=ACCENT)
    for quarter in range(TILE_ROWS // rows):
        x = right + (quarter * 4 + 2) * size
        drawing.text(x, top - 5, f"row {1 + rows * quarter}", anchor="middle", size=9.5, color=ACCENT)
    return drawing


STEP_A = (16.0, 15.0, 0.1171875, -3.5, 0.4375)
STEP_B = (9.0, 8.0, 1.125, 0.8125, 0.05859375)
STEP_START = 5.638671875
"""The accumulator before the step of the page: 14 significant bits."""


def accumulation_step() -> Drawing:
    """One step: terms aligned to the largest exponent, cut, added, normalised."""
    model = HOPPER.float8_fast
    bits = model.aligned_fraction_bits
    a, b = (np.array([x], ml_dtypes.float8_e4m3fn) for x in (STEP_A, STEP_B))
    found = f8.mma(a, b, np.array([STEP_START], np.float32))
    codes = zip(a[0].view(np.uint8).tolist(), b[0].view(np.uint8).tolist(), strict=True)
    products = [exact.product(*pair, E4M3FN, E4M3FN) for pair in codes]
    start = exact.finite(Fraction(STEP_START))
    e_max = max(*(p.exponent for p in products), int(log2(STEP_START)))
    unit = Fraction(2) ** (e_max - bits)
    terms = [("accumulator", start.value)]
    terms += [(f"{x:.8g} x {y:.8g}", p.number.value) for x, y, p in zip(STEP_A, STEP_B, products, strict=True)]
    cut = [int(abs(value) / unit) * unit * (1 if value > 0 else -1) for _, value in terms]
    total = sum(cut, Fraction(0))
    result = exact.tensor_core_step(start, products, model).value
    assert float(result) == float(found[0]), "the figure has the oracle's bits"

    first, last = e_max + 1, e_max - bits - 6
    drawing = Drawing("One tensor-core step: five products and the accumulator, their bits aligned, cut and added")
    left, cell, row = 122, 12.6, 17

    def place(exponent: int) -> float:
        return left + (first - exponent) * cell

    def bits_of(y: float, value: Fraction, lowest: int) -> None:
        magnitude = abs(value)
        leading = max(exponent_of(magnitude), lowest) if magnitude else lowest
        for exponent in range(min(leading, first), last - 1, -1):
            bit = int(magnitude / Fraction(2) ** exponent) % 2
            if not magnitude % Fraction(2) ** (exponent + 1) and exponent < lowest:
                break
            is_cut = exponent < lowest
            drawing.text(
                place(exponent) + cell / 2, y, str(bit), mono=True, anchor="middle", size=10.5,
                color=ACCENT if is_cut else None,
            )  # fmt: skip

    y = 26.0
    for exponent in (e_max, 0, e_max - bits):
        words = "1" if exponent == 0 else f"2^{exponent}"
        drawing.text(place(exponent) + cell / 2, 10, words, anchor="middle", size=10, faint=True)
    top = y - 12
    for (name, value), kept in zip(terms, cut, strict=True):
        drawing.text(2, y, name, size=9.5)
        drawing.text(left - 5, y, "-" if value < 0 else "+", mono=True, anchor="middle")
        bits_of(y, value, e_max - bits)
        assert abs(kept) <= abs(value)
        y += row
    edge = place(e_max - bits) + cell
    drawing.line([(edge, top), (edge, y - row + 6)], dash="3 2", color=ACCENT)
    drawing.text(edge + 14, 10, "cut [ACC-3]", size=9.5, color=ACCENT)
    drawing.line([(left, y - 10), (WIDTH - 4, y - 10)])
    y += 6
    drawing.text(2, y, "sum [ACC-4]", size=9.5)
    result_unit = exponent_of(abs(total)) - model.result_fraction_bits
    bits_of(y, total, result_unit)
    y += row
    drawing.text(2, y, "result [ACC-5]", size=9.5, bold=True)
    bits_of(y, result, result_unit)
    y += 22
    true = sum((value for _, value in terms), Fraction(0))
    drawing.text(2, y, f"result {float(result):.10g}; exact sum {float(true):.10g}", size=10)
    return drawing


def accumulation_chain() -> Drawing:
    """Fast and promoted accumulation over three times 128 of K."""
    drawing = Drawing("Fast accumulation chains all steps; without it a partial of every 128 products is promoted")
    slow, fast = HOPPER.float8, HOPPER.float8_fast
    promote = slow.promote_k or 0
    k = 3 * promote
    for top, model, name in ((0, fast, "use_fast_accum=True"), (122, slow, "use_fast_accum=False")):
        drawing.text(8, top + 12, name, mono=True, bold=True)
        step = 384 / (k // model.step_k)
        for i in range(k // model.step_k):
            x = 8 + i * step
            drawing.rect(x, top + 22, step, 18, fill=0.12)
            drawing.text(x + step / 2, top + 35, str(model.step_k), anchor="middle", size=10)
        length = model.promote_k or k
        width = 384 * length / k
        for i in range(k // length):
            x = 8 + i * width
            drawing.arrow(x + 4, top + 50, x + width - 6, top + 50)
            if model.promote_k:
                drawing.arrow(x + width - 8, top + 54, x + width - 8, top + 76)
        bits = model.result_fraction_bits
        drawing.text(10, top + 65, f"{bits} fraction bits", size=10)
        if model.promote_k:
            drawing.rect(8, top + 80, 384, 18, fill=0.3)
            words = f"total: float32, {FLOAT32.fraction_bits} fraction bits, every {promote} of K"
            drawing.text(200, top + 93, words, anchor="middle", size=10)
        else:
            drawing.text(10, top + 80, f"one chain over all of K, here {k}", size=10)
    return drawing


SPLIT_SHAPE = planned_gemm(m=64, n=64, k=8192, gemm="tensorwise", accumulation="fast", out_dtype="bfloat16")


def split_k_slices() -> Drawing:
    """The slices of K of one GEMM, and how they are added."""
    gemm = SPLIT_SHAPE
    places: Any = range(gemm.k)  # where each product is, in its place
    slices: Any = k_slices(places, HOPPER.float8_fast, split_k(gemm).split_k)
    drawing = Drawing(f"K of {gemm.k} in {len(slices)} slices, each with a chain of its own, added in order")
    drawing.text(8, 12, f"M {gemm.m}, N {gemm.n}, K {gemm.k}: S = {len(slices)}", bold=True)
    for i, part in enumerate(slices):
        size = len(part)
        x, width = 8 + 384 * part[0] / gemm.k, 384 * size / gemm.k
        drawing.rect(x, 22, width, 22, fill=(0.3, 0.12)[i % 2])
        drawing.text(x + width / 2, 37, f"{size:,}", anchor="middle")
        drawing.text(x + width / 2, 60, f"chain {i + 1}, from 0", anchor="middle", size=10)
        drawing.arrow(x + width / 2, 66, x + width / 2, 84)
        drawing.rect(x + width / 2 - 36, 88, 72, 20, color=ACCENT, fill=0.15)
        drawing.text(x + width / 2, 102, f"float32 r{i + 1}", anchor="middle", size=10)
    words = "r1"
    for i in range(1, len(slices)):
        words = f"({words} + r{i + 1})" if i < len(slices) - 1 else f"{words} + r{i + 1}"
    drawing.text(200, 130, f"result = {words}, each + rounded to float32", anchor="middle")
    return drawing


def plan_by_rows() -> Drawing:
    """S over M of one N and K."""
    n, k, last = 512, 16384, 1024
    drawing = Drawing(f"S over M for N {n} and K {k}: it changes with M, except for rowwise scales")
    kinds = (
        ("bfloat16", "bfloat16", "", "bfloat16", None, 0),
        ("tensorwise", "tensorwise", "fast", "bfloat16", "7 3", -5),
        ("1x128 by 128x128", "blockwise_1x128_128x128", "", "float32", "2 2", 12),
        ("rowwise", "rowwise", "fast", "bfloat16", None, -5),
    )

    def slices(m: int, gemm: str, accumulation: str, out: str) -> int:
        return split_k(planned_gemm(m=m, n=n, k=k, gemm=gemm, accumulation=accumulation, out_dtype=out)).split_k

    rows = [2**i for i in range(6)] + list(range(64, last + 1, 32))
    drawn = [[slices(m, *kind[1:4]) for m in rows] for kind in kinds]
    highest = max(map(max, drawn))

    def place(m: float, s: float) -> tuple[float, float]:
        return 30 + log2(m) / log2(last) * 360, 16 + (highest - s) / (highest - 1) * 150

    for s in range(1, highest + 1, 2):
        drawing.line([place(1, s), place(last, s)], width=0.5, faint=True)
        drawing.text(22, place(1, s)[1] + 4, str(s), anchor="end", size=10)
    for m in (2**i for i in range(0, 11, 2)):
        drawing.text(place(m, 1)[0], 184, str(m), anchor="end" if m == last else "middle", size=10)
    drawing.text(30, 198, f"M (rows of the output); N = {n}, K = {k}", size=10)
    drawing.text(8, 10, "S", bold=True)
    for (name, _, _, _, dash, shift), values in zip(kinds, drawn, strict=True):
        points = [place(1, values[0])]
        for m, before, value in zip(rows[1:], values, values[1:], strict=False):
            if value != before:
                points += [place(m, before), place(m, value)]
        points.append(place(last, values[-1]))
        is_flat = len(points) == 2
        drawing.line(points, width=2.2 if is_flat else 1.6, dash=dash, color=ACCENT if is_flat else "currentColor")
        x, y = points[0]
        label_y = y + (shift or 13)
        drawing.text(x + 6, label_y, name, size=10, color=ACCENT if is_flat else None)
    return drawing


def chips() -> Drawing:
    """How each profile adds: products a step, bits of alignment and of the accumulator."""
    drawing = Drawing("The profiles of chips: products a step, fraction bits kept when aligning and in the accumulator")
    cell, left, y = 8.0, 132, 0.0
    for chip in (chip for chip in CHIPS.values() if chip is not H100):  # it adds as Hopper does
        model = chip.float8_fast
        drawing.text(8, y + 13, chip.name, bold=True)
        drawing.text(392, y + 13, chip.evidence.name.lower().replace("_", " "), anchor="end", size=10, faint=True)
        for row, (label, bits) in enumerate(_bits_of(chip)):
            top = y + 20 + 15 * row
            drawing.text(8, top + 9, label, size=10)
            drawing.rect(left, top, cell * bits, 10, fill=0.35 if row == 0 else 0.12)
            drawing.text(left + cell * bits + 5, top + 9, str(bits), size=10)
        drawing.text(8, y + 62, _chaining(model.step_k, model.promote_k), size=10)
        y += 76
    return drawing


def _bits_of(chip: Chip) -> list[tuple[str, int]]:
    model = chip.float8_fast
    return [("products, aligned to", model.aligned_fraction_bits), ("accumulator", model.result_fraction_bits)]


def _chaining(step_k: int, promote_k: int | None) -> str:
    return f"{step_k} products a step" + (f"; steps start from zero every {promote_k}" if promote_k else "; one chain")


DRAWN: dict[str, Callable[[], Drawing]] = {
    "formats": formats,
    "spacing": spacing,
    "scales": scales,
    "swizzled": swizzled,
    "accumulation-step": accumulation_step,
    "accumulation-chain": accumulation_chain,
    "split-k": split_k_slices,
    "plan-by-rows": plan_by_rows,
    "chips": chips,
}
"""File name without its ending -> how it is drawn."""


def stale(folder: Path = FIGURES) -> list[str]:
    """The files that are missing or differ from what the code draws."""
    drawn = {f"{name}.svg": draw().svg() for name, draw in DRAWN.items()}
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}
    return sorted(name for name, text in drawn.items() if there.get(name) != text)


def main() -> int:
    """Draw all figures, or with `--check` name the stale ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a figure is stale")
    if parser.parse_args().check:
        names = stale()
        for name in names:
            print(f"stale: docs/figures/{name}; run python docs/generate/figures.py")
        return 1 if names else 0
    FIGURES.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        (FIGURES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
