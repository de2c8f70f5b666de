"""Writes the pages of the API reference: one for each room, with every public name of it.

The source is read by griffe and never imported, so that the site is built without torch and JAX. An object that two
rooms have is described on the page of the first, and the other page links to it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import griffe

ROOT = Path(__file__).parents[2]
PAGES: dict[str, tuple[str, ...]] = {
    "f8emu.spec": ("f8emu.spec",),
    "f8emu": ("f8emu",),
    "f8emu.numpy": ("f8emu.numpy",),
    "f8emu.torch": (
        "f8emu.torch",
        "f8emu.torch.parallel.checkpoints",
        "f8emu.torch.serving.export",
        "f8emu.torch.integrations.huggingface",
        "f8emu.torch.integrations.torchtitan",
    ),
    "f8emu.jax": ("f8emu.jax",),
    "f8emu.jax.hosts": (
        "f8emu.jax.hosts",
        "f8emu.jax.hosts.einsum",
        "f8emu.jax.hosts.equinox",
        "f8emu.jax.hosts.flax_linen",
        "f8emu.jax.hosts.flax_nnx",
        "f8emu.jax.hosts.qwix",
    ),
    "f8emu.interop": ("f8emu.interop",),
    "f8emu.dialects": ("f8emu.dialects",),
    "f8emu.audit": ("f8emu.audit",),
    "f8emu.rollout": ("f8emu.rollout",),
    "f8emu.conformance": ("f8emu.conformance",),
    "f8emu.report": ("f8emu.report",),
    "f8emu.testing": ("f8emu.testing",),
    "f8emu.capture": ("f8emu.capture",),
    "f8emu.doctor": ("f8emu.doctor",),
    "f8ref": ("f8ref", "f8ref.numpy", "f8ref.jax", "f8ref.exact"),
}
"""Page -> its rooms, in the order in which objects get their place."""
SINGLE_NAMES: dict[str, tuple[str, ...]] = {
    "f8emu.split_k": (
        "f8emu.split_k.plan.planned_gemm",
        "f8emu.split_k.plan.split_k",
        "f8emu.split_k.invariance.invariance",
        "f8emu.split_k.invariance.Invariance",
    )
}
"""Page of a package whose other names are internal -> its public ones."""
_WHOLE = ("Capture",)
"""Classes that are shown with what they inherit."""


class Name(NamedTuple):
    """A public name: where users import it from, and the object."""

    path: str
    """As in an import; the anchor on its page."""
    rendered: str
    """The path that mkdocstrings is given: the same, unless a module of this name hides the object from griffe."""
    target: griffe.Object

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def load() -> griffe.ModulesCollection:
    """The two packages, read from their source."""
    loader = griffe.GriffeLoader(search_paths=[ROOT, ROOT / "reference"], allow_inspection=False)
    for package in ("f8emu", "f8ref"):
        loader.load(package)
    return loader.modules_collection


def public_names(packages: griffe.ModulesCollection, room: str) -> list[Name]:
    """What a room exports as `from ... import name as name`, and what it defines and documents itself."""
    module = packages[room]
    found: list[Name] = []
    for name, source in _exports(module).items():
        path = f"{room}.{name}"
        target = packages[source]
        target = target.final_target if target.is_alias else target
        found.append(Name(path, source if module[name].is_module else path, target))
    for name, member in module.members.items():
        if not (name.startswith("_") or member.is_alias or member.is_module) and member.docstring:
            found.append(Name(f"{room}.{name}", f"{room}.{name}", member))
    return found


def _exports(module: griffe.Module) -> dict[str, str]:
    """Name -> where it comes from."""
    assert isinstance(module.filepath, Path)  # a list is a namespace package's
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(module.filepath.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if alias.name == alias.asname:
                found.setdefault(alias.name, f"{node.module}.{alias.name}")
    return found


def pages() -> dict[str, str]:
    """Path below docs/ -> the page in markdown."""
    packages = load()
    described: dict[str, str] = {}
    written = {page: "\n".join(_page(page, packages, described)) for page in PAGES}
    index = ["# API", "", "Each page has the public names of a package. Other names may change without notice.", ""]
    index += ["| package | what it has |", "|---|---|"]
    for page, rooms in PAGES.items():
        index += [f"| [`{room}`]({page}.md#{room}) | {_summary(packages[room])} |" for room in rooms]
    for page, names in SINGLE_NAMES.items():
        index.append(f"| [`{page}`]({page}.md#{page}) | {_summary(packages[page])} |")
        written[page] = "\n".join(_single_names(page, packages, names))
    texts = {"index": "\n".join(index) + "\n", **written}
    return {f"reference/api/{page}.md": text for page, text in texts.items()}


def _page(page: str, packages: griffe.ModulesCollection, described: dict[str, str]) -> Iterator[str]:
    for depth, room in enumerate(PAGES[page]):
        names = public_names(packages, room)
        yield from (f"{'##' if depth else '#'} {room} {{: #{room} }}", "", _text(packages[room]), "")
        if names:
            yield from ("| name | what it is |", "|---|---|")
        mine = [name for name in names if described.setdefault(name.target.path, name.path) == name.path]
        for name in names:
            anchor = "" if name in mine else f"[](){{#{name.path}}}"
            yield f"| {anchor}[`{name.name}`][{described[name.target.path]}] | {_summary(name.target)} |"
        yield ""
        for name in mine:
            if name.rendered != name.path:
                yield from (f"[](){{#{name.path}}}", "")
            level = 3 if len(PAGES[page]) > 1 else 2
            whole = ", inherited_members: true" if name.name in _WHOLE else ""
            yield from (f"::: {name.rendered}", f"    options: {{heading_level: {level}{whole}}}", "")


def _single_names(page: str, packages: griffe.ModulesCollection, names: tuple[str, ...]) -> Iterator[str]:
    yield from (f"# {page} {{: #{page} }}", "", _text(packages[page]), "", "| name | what it is |", "|---|---|")
    for name in names:
        target = packages[name]
        target = target.final_target if target.is_alias else target
        yield f"| [`{name.removeprefix(page + '.')}`][{name}] | {_summary(target)} |"
    yield ""
    for name in names:
        yield from (f"::: {name}", "    options: {heading_level: 2}", "")


def _text(module: griffe.Object) -> str:
    return module.docstring.value if module.docstring else ""


def _summary(target: griffe.Object) -> str:
    """The first sentence, on one line of a table."""
    if isinstance(target, griffe.Attribute) and not target.docstring:
        return f"A `{str(target.value).partition('(')[0]}`."
    paragraph = " ".join(_text(target).split("\n\n")[0].split())
    end = paragraph.find(". ")
    return (paragraph if end < 0 else paragraph[: end + 1]).replace("|", "\\|")


if __name__ == "<run_path>":  # as mkdocs-gen-files runs it
    import mkdocs_gen_files

    for path, text in pages().items():
        with mkdocs_gen_files.open(path, "w") as file:
            file.write(text)
