"""The Results pages, the README's speed table and a plot, from the JSON files of `benchmarks/results`.

    python docs/generate/results.py readme            prints the README's speed table
    python docs/generate/results.py readme --write    puts it between the README's <!-- speed --> markers
    python docs/generate/results.py readme --check    exit status 1 if the README has another
    python docs/generate/results.py svg [--check]     writes two figures, or tells whether one is stale
    python docs/generate/results.py pages FOLDER      the pages as the site has them, to look at

The pages of `docs/results` are prose with a line `<!-- result: NAME -->` where a table or a plot belongs.
mkdocs-gen-files runs this file (`main`), which gives the site each page with those lines replaced, and the JSON files
as `results/data`. So the pages are edited as pages, and the repository holds no generated ones.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # benchmarks.kernel_kinds

import results_clients
import results_experts
import results_jax
import results_proofs
import results_torch
from results_index import index
from results_records import RESULTS, ROOT, names

from f8emu.report.svg import style

PAGES = ("index", "gemms", "torch", "jax", "distributed", "proofs", "clients")
TEMPLATES = ROOT / "docs" / "results"
FIGURES = ROOT / "docs" / "figures"
README = ROOT / "README.md"
BLOCKS: dict[str, Callable[[], str]] = {
    "index": index,
    **results_torch.BLOCKS,
    **results_experts.BLOCKS,
    **results_jax.BLOCKS,
    **results_proofs.BLOCKS,
    **results_clients.BLOCKS,
}
MARKER = re.compile(r"^<!-- result: ([a-z0-9-]+) -->$", re.MULTILINE)
_README_BLOCK = re.compile(r"(<!-- speed -->\n)(.*?)(<!-- /?speed -->)", re.DOTALL)


def page(name: str) -> str:
    """One page with its tables and plots."""
    return MARKER.sub(lambda found: BLOCKS[found[1]](), (TEMPLATES / f"{name}.md").read_text())


def readme_block(text: str) -> str | None:
    """What a README has between its markers, without the blank lines around it; None if it has no markers."""
    found = _README_BLOCK.search(text)
    return found and found[2].strip("\n")


def readme_with_block(text: str) -> str:
    """The README with the generated table between its markers."""
    return _README_BLOCK.sub(lambda found: f"{found[1]}\n{results_torch.readme()}\n\n{found[3]}", text)


def plots() -> dict[Path, str]:
    """The figures that other pages include, as files."""
    chart, title = results_proofs.outliers_plot()
    return {FIGURES / "outliers.svg": chart.html(title, css=style()) + "\n"}


def main() -> None:
    """Gives mkdocs the pages and the recorded files; mkdocs-gen-files calls this during a build."""
    import mkdocs_gen_files  # pyright: ignore[reportMissingImports]  here: tests and command line need no mkdocs

    for name in PAGES:
        with mkdocs_gen_files.open(f"results/{name}.md", "w") as file:
            file.write(page(name))
        mkdocs_gen_files.set_edit_path(f"results/{name}.md", f"results/{name}.md")
    for name in names():
        with mkdocs_gen_files.open(f"results/data/{name}.json", "w") as file:
            file.write((RESULTS / f"{name}.json").read_text())


def command_line(argv: list[str] | None = None) -> int:
    """Runs one of the commands above and gives the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, writes in (("readme", True), ("svg", False)):
        options = commands.add_parser(name).add_mutually_exclusive_group()
        options.add_argument("--check", action="store_true", help="change nothing; exit status 1 if it is stale")
        if writes:
            options.add_argument("--write", action="store_true", help="between the README's markers")
    commands.add_parser("pages").add_argument("folder", type=Path)
    given = parser.parse_args(argv)
    if given.command == "pages":
        given.folder.mkdir(parents=True, exist_ok=True)
        for name in PAGES:
            (given.folder / f"{name}.md").write_text(page(name))
        return 0
    if given.command == "svg":
        for path, text in plots().items():
            if not given.check:
                path.write_text(text)
        return max(_fresh(path, path.exists() and path.read_text() == text) for path, text in plots().items())
    if given.write:
        README.write_text(readme_with_block(README.read_text()))
    if given.check or given.write:
        return _fresh(README, readme_block(README.read_text()) == results_torch.readme())
    print(results_torch.readme())
    return 0


def _fresh(path: Path, is_fresh: bool) -> int:
    if not is_fresh:
        print(f"{path.relative_to(ROOT)} is not what docs/generate/results.py gives", file=sys.stderr)
    return int(not is_fresh)


if __name__ == "__main__":
    sys.exit(command_line())
elif __name__ == "<run_path>":  # mkdocs-gen-files runs the file by runpy.run_path
    main()
