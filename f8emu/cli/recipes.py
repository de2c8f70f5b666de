"""`f8emu recipes` lists the named recipes or explains one; `f8emu doctor` says what this machine does."""

import json
from typing import TYPE_CHECKING, Annotated

from f8emu.cli.frame import console, guarded
from f8emu.spec import RECIPE_ALIASES, RECIPES, SpecError, recipe_by_name

if TYPE_CHECKING:
    import typer


def add_to(app: "typer.Typer") -> None:
    """Add the commands."""
    import typer

    @app.command()
    def recipes(
        name: Annotated[str | None, typer.Argument(help="The recipe to explain.")] = None,
        as_toml: Annotated[bool, typer.Option("--toml", help="Print as TOML.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    ) -> None:
        """List the named recipes, or explain one."""
        raise typer.Exit(guarded(_recipes, name, as_toml, as_json))

    @app.command()
    def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
        """Show how this machine's torch, JAX and GPU behave on the known traps, and which engine would run."""
        raise typer.Exit(guarded(_doctor, as_json))


def _recipes(name: str | None, as_toml: bool, as_json: bool) -> int:
    chosen = list(RECIPES.values()) if name is None else [recipe_by_name(name)]
    if as_toml and as_json:
        raise SpecError("recipes: --toml and --json exclude each other; pass one of them")
    if as_json:
        dicts = [recipe.to_dict() for recipe in chosen]
        print(json.dumps(dicts if name is None else dicts[0], indent=2))
    elif as_toml:
        print("\n".join(recipe.to_toml() for recipe in chosen), end="")
    elif name is not None:
        print(chosen[0].explain())
    else:
        _print_recipes()
    return 0


def _print_recipes() -> None:
    from rich.table import Column, Table

    table = Table(Column("recipe", overflow="fold"), "output", "grad_input", "grad_weight", "scales")
    for recipe in RECIPES.values():
        gemms = [f"{gemm.a}\n{gemm.b}" + ("\nfast" if gemm.use_fast_accum else "") for gemm in recipe.gemms.values()]
        scales = ["delayed" if recipe.delayed else "dynamic"] + ["power of two"] * recipe.scale_rule.power_of_two
        older = [f"= {alias}" for alias, target in RECIPE_ALIASES.items() if target == recipe.name]
        table.add_row("\n".join([recipe.name, *older]), *gemms, "\n".join(scales))
        table.add_section()
    console().print(table)
    print("f8emu recipes NAME explains one; --toml and --json print the text that f8emu reads")


def _doctor(as_json: bool) -> int:
    from f8emu.doctor import run

    return run(as_json=as_json)
