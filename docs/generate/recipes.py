"""Puts tables of the named recipes into start/which-recipe.md, from NAMED_RECIPES.

The page has a line `<!-- recipes: NAME -->` where a table belongs. mkdocs-gen-files runs this file, which gives the
site the page with those lines replaced.
"""

import re
from collections.abc import Callable
from pathlib import Path

from f8emu.spec.formats import E5M2
from f8emu.spec.gemm import Cast, Gemm
from f8emu.spec.recipe import NAMED_RECIPES, Recipe
from f8emu.spec.scaling import Granularity

PAGE = Path(__file__).parents[1] / "start" / "which-recipe.md"
MARKER = re.compile(r"^<!-- recipes: ([a-z]+) -->$", re.MULTILINE)
_SHORT = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}


def page() -> str:
    """The page with its tables."""
    return MARKER.sub(lambda marker: TABLES[marker[1]](), PAGE.read_text())


def gemms() -> str:
    """The operands and the accumulation of the three GEMMs."""
    rows = [[f"`{name}`", *(_gemm(gemm) for gemm in recipe.gemms.values())] for name, recipe in NAMED_RECIPES.items()]
    return _table(["recipe", "`output`", "`grad_input`", "`grad_weight`"], rows)


def support() -> str:
    """What a recipe can be used with."""
    columns = ["recipe", "weights as float8", "activations gathered as float8", "experts in torch"]
    rows = [
        [f"`{name}`", _bytes_of_weights(recipe), "yes" if gathers_activations(recipe) else "no", _experts(recipe)]
        for name, recipe in NAMED_RECIPES.items()
    ]
    return _table(columns, rows)


def bytes_of_weights(recipe: Recipe) -> int:
    """Bytes of an element of a weight that is stored or gathered as codes; 0 if it cannot be."""
    kinds = {cast.granularity for _, _, cast in recipe.casts("weight")}
    if any(kind.is_blockwise for kind in kinds):
        return 0
    return 1 if kinds == {Granularity.TENSORWISE} else 2  # one set of codes serves both GEMMs, or each has its own


def gathers_activations(recipe: Recipe) -> bool:
    """Whether styles of tensor parallelism gather activations as codes: both GEMMs of a tensor must read codes."""
    casts = [cast for _, _, cast in recipe.casts()]
    return not any(cast.format is None or cast.granularity.is_blockwise for cast in casts)


def has_experts(recipe: Recipe) -> bool:
    """Whether a module of experts is converted."""
    kinds = [cast.granularity for _, _, cast in recipe.casts()]
    return not any(kind.is_blockwise and not kind.is_microscaled for kind in kinds)


def _bytes_of_weights(recipe: Recipe) -> str:
    count = bytes_of_weights(recipe)
    return f"yes, {count} {'byte' if count == 1 else 'bytes'} an element" if count else "no"


def _experts(recipe: Recipe) -> str:
    if not has_experts(recipe):
        return "no"
    is_slow = any(cast.format == E5M2 for _, _, cast in recipe.casts("grad_output"))
    return "yes; E5M2 gradients run expert by expert" if is_slow else "yes"


def _gemm(gemm: Gemm) -> str:
    if gemm.is_high_precision:
        return f"{_cast(gemm.a)} x<br>{_cast(gemm.b)}"
    accumulation = "fast" if gemm.use_fast_accum else "promoted"
    accumulation = "one chain" if gemm.a.granularity.is_microscaled else accumulation
    return f"{_cast(gemm.a)} x<br>{_cast(gemm.b)},<br>{accumulation}" + ("" if gemm.split_k else ", K never split")


def _cast(cast: Cast) -> str:
    return "bfloat16" if cast.format is None else f"{_SHORT[cast.format.name]} {_words(cast.granularity)}"


def _words(granularity: Granularity) -> str:
    return granularity.value.replace("blockwise_", "")


def _table(columns: list[str], rows: list[list[str]]) -> str:
    rule = ["---"] * len(columns)
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, rule, *rows])


TABLES: dict[str, Callable[[], str]] = {"gemms": gemms, "support": support}


if __name__ == "<run_path>":  # as mkdocs-gen-files runs it
    import mkdocs_gen_files

    with mkdocs_gen_files.open("start/which-recipe.md", "w") as file:
        file.write(page())
    mkdocs_gen_files.set_edit_path("start/which-recipe.md", "start/which-recipe.md")
