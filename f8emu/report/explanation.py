"""The page of `f8emu.jax.explain`."""

from typing import Any

from f8emu.conformance.compare import counted
from f8emu.report.page import Cell, Page, Row, Section, Table

_CAPTION = "On a Hopper GPU, compiled with xla_gpu_enable_triton_gemm=False"


def explanation_page(explanation: Any) -> Page:
    """A row for each dot of an `f8emu.jax.Explanation`."""
    dots = explanation.dots
    float8 = [dot for dot in dots if dot.is_float8]
    promised = sum(dot.is_promised for dot in float8)
    summary = f"{len(float8)} of {len(dots)} dots are float8 GEMMs; bits are promised of {promised}"
    if explanation.own_gemms:
        summary += f"; not listed, with the chip's bits: {counted(explanation.own_gemms, 'GEMM')} of f8emu's own layers"
    rows: list[Row] = []
    for i, dot in enumerate(dots, 1):
        gemm = f"{dot.accumulation or 'no'}{'' if dot.is_promised or not dot.is_float8 else ', not promised'}"
        words = ", ".join(dot.folded), " ".join(dot.rules), "; ".join(dot.notes)
        rows.append([f"{i} {dot.name}".rstrip(), dot.place, dot.operands, gemm, *words])
    columns = ("dot", "in", "operands", "float8 GEMM", "joins it", "rules", "note")
    table = Table(caption=_CAPTION, columns=columns, rows=rows, names=frozenset((0, 1, 2)))
    section = Section(title="Dots", blocks=[table] if rows else [])
    return Page(title="What XLA makes of each dot", verdict=Cell(text=summary), sections=[section])
