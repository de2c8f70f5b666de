"""The page of `f8emu recipes`."""

from collections.abc import Sequence

from f8emu.report.page import Page, Row, Section, Table, Text
from f8emu.spec import RECIPE_ALIASES, Recipe


def recipes_page(recipes: Sequence[Recipe]) -> Page:
    """A row for each GEMM of each recipe."""
    rows: list[Row] = []
    for recipe in recipes:
        scales = "delayed scales" if recipe.delayed else "dynamic scales"
        scales += ", powers of two" if recipe.scale_rule.power_of_two else ""
        rule = recipe.scale_rule.e8m0
        scales += f", E8M0, {rule.name}" if rule is not None else ""
        older = ", ".join(f"= {alias}" for alias, target in RECIPE_ALIASES.items() if target == recipe.name)
        for name, gemm in recipe.gemms.items():
            name = f"{name}, fast" if gemm.use_fast_accum else name
            rows.append([recipe.name, scales, older, name, str(gemm.a), str(gemm.b)])
    columns = ("recipe", "scales", "older name", "GEMM", "a", "b")
    table = Table(caption="Recipes", columns=columns, rows=rows, names=frozenset((0, 1, 2)))
    end = Text(points=["f8emu recipes NAME explains one; --toml and --json print the text that f8emu reads"])
    return Page(title="Recipes", sections=[Section(title="Recipes", blocks=[table, end])])
