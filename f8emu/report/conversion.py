"""The plan of a conversion as a page: which share of the parameters float8 multiplies, and at which predicted speed."""

from math import prod
from typing import Any

from f8emu.report.charts import bars
from f8emu.report.page import Cell, Page, Plot, Plots, Section, Table, percent

_OTHER = "no linear layer"


def conversion_page(plan: Any) -> Page:
    """Shares of the parameters, predicted speeds of experts, then every layer of a `f8emu.torch.ConversionReport`."""
    # 1. Parameters by what becomes of them; a shared weight counts under its first name, as in the report.
    sizes: dict[str, int] = {}
    for name, layers in (("", plan.entries), (_OTHER, plan.others)):
        for layer in layers:
            outcome = name or str(layer.outcome.value)
            sizes[outcome] = sizes.get(outcome, 0) + prod(layer.shape)
    shares = {name: min(size / max(plan.parameters, 1), 1.0) for name, size in sizes.items()}
    alt = f"Float8 GEMMs multiply {percent(plan.share)} of {plan.parameters:,} parameters."
    plots = [_plot("Share of the parameters", alt, shares, form=".1%")] if shares else []
    speeds = {entry.fqn: entry.speed for entry in plan.entries if entry.speed is not None}
    if speeds:
        alt = "The predicted speed of each module of experts in float8, times that of bfloat16."
        plots.append(_plot("Predicted speed of experts", alt, speeds, line=(1.0, "bfloat16")))
    # 2. Every layer.
    rows = [[e.fqn, str(list(e.shape)), str(e.outcome.value), e.reason] for e in plan.entries]
    rows += [[other.fqn, str(list(other.shape)), _OTHER, other.reason] for other in plan.others]
    table = Table(caption="Layers", columns=("name", "shape", "outcome", "why"), rows=rows)
    section = Section(title="Conversion", blocks=[Plots(plots=plots), table])
    return Page(title="Conversion", verdict=Cell(text=plan.summary), sections=[section])


def _plot(
    title: str, alt: str, values: dict[str, float], line: tuple[float, str] | None = None, form: str = ".2f"
) -> Plot:
    chart = bars([*values], {title: [*values.values()]}, line=line, form=form)
    return Plot(svg=chart.html(alt), title=title, alt=alt)
