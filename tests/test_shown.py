"""What Python prints of results: at most 25 lines of 120 columns, and HTML that a notebook can show; the notebooks."""

import ast
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from inspect import isroutine
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

import f8emu.jax
import f8emu.numpy
import f8emu.torch
from f8emu import DELAYED, E4M3FN, ROWWISE, DelayedScaling
from f8emu.audit import CHECKS, Audit
from f8emu.audit.findings import finding
from f8emu.capture import diff, replay
from f8emu.conformance import Fit, load_subject, shipped_golden
from f8emu.conformance.diagnosis.addition_order import Measured
from f8emu.conformance.diagnosis.fit import Fitted
from f8emu.dialects import dialect_by_name, quantize
from f8emu.report import inspect
from f8emu.rollout import Certificate, Checked, Checksums, Difference, Named, Source, TensorChecksum
from f8emu.shown import screen
from f8emu.spec import HOPPER
from tests.architecture.test_public_surface import SURFACE

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = ("bits_of_a_gemm", "is_my_kernel_right", "watch_a_training_run")
LINES, COLUMNS = 25, 120
HTML = (
    "Audit",
    "CaptureDiff",
    "Capture",
    "ConversionReport",
    "Fit",
    "Inspection",
    "Inspector",
    "Recipe",
    "Replay",
    "Result",
)
"""Results that have a page, or a few lines, in a notebook."""
VOID = ("meta", "link", "br")


class Balanced(HTMLParser):
    """Every tag is closed by its own, every id is there once."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_shown(value: object) -> None:
    lines = repr(value).splitlines()
    assert len(lines) <= LINES and all(len(line) <= COLUMNS for line in lines), repr(value)[:2000]
    assert hasattr(value, "_repr_html_") or type(value).__name__ not in HTML
    if hasattr(value, "_repr_html_"):
        html = value._repr_html_()  # type: ignore[attr-defined]
        parser = Balanced()
        parser.feed(html)
        parser.close()
        assert not parser.open and len(set(parser.ids)) == len(parser.ids) and "http" not in html


def cells(name: str) -> Iterator[tuple[ast.Module, ast.Expr | None]]:
    """The statements of each code cell, and the expression in its last line."""
    notebook = json.loads((EXAMPLES / f"{name}.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None, "strip the outputs"
            body = ast.parse("".join(cell["source"]))
            last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
            yield body, last if isinstance(last, ast.Expr) else None


def run_notebook(name: str) -> tuple[dict[str, Any], list[Any]]:
    """The names of a notebook after its last cell, and what its cells show."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shown: list[Any] = []
    for body, last in cells(name):
        exec(compile(body, name, "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), name, "eval"), names))
    return names, [value for value in shown if value is not None]


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], list[Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("notebooks"))
        return {name: run_notebook(name) for name in NOTEBOOKS}


Notebooks = dict[str, tuple[dict[str, Any], list[Any]]]


def test_the_notebooks_show_what_they_say(notebooks: Notebooks) -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)
    names, _ = notebooks["bits_of_a_gemm"]
    errors = names["errors"]
    assert errors["float32"] < errors["promoted"] / 100 < errors["fast"] / 500
    assert all(0.5 < float(np.mean(y != names["fast"])) < 1 for y in names["others"].values())
    names, _ = notebooks["is_my_kernel_right"]
    assert names["wrong"].has_difference and names["right"].is_equal
    names, shown = notebooks["watch_a_training_run"]
    assert shown[-1].is_equal and shown[-1].gemms == 8
    assert shown[-2].worst["underflow"][1] == 8, "the step of the outlier"
    for _, values in notebooks.values():
        for value in values:
            check_shown(value)


def results(folder: Path, of_notebooks: Notebooks) -> Iterator[object]:
    """One instance, as large as they come, of what the public functions return."""
    # 1. Of the suite and the commands.
    golden = shipped_golden()
    yield from (golden, golden.cases[0], golden.cases[-1].gemm, load_subject("f8ref.numpy"))
    wrong = of_notebooks["is_my_kernel_right"][0]["wrong"]
    stage = wrong.subjects[0].stages[0]
    yield from (wrong, wrong.subjects[0], stage, stage.mismatches[0], stage.places[0])
    tensor = TensorChecksum(
        key="tp0", rank=0, name="x" * 90, shape=(1,), dtype="F32", sha256="0" * 64, engine_digest=""
    )
    source = Source(path="model", dtype="BF16", sha256="0" * 64, hashed="every byte")
    held: dict[str, Any] = {
        "engine": "vllm",
        "engine_versions": "0.33",
        "dialect": "",
        "kernel": "cutlass",
        "digests": "sha256",
    }
    yield Checksums(**held, tensor_parallel=1, source=source, tensors=(tensor,) * 99)
    file = Named(role="trainer", path="model", kind="checkpoint", sha256="0" * 64)
    parts = [Difference(part="weights", place="x" * 90, cause="", seen="y" * 200)] * 99
    setting = {
        "recipe": None,
        "recipe_hash": None,
        "source_dtype": "BF16",
        "batch": [1],
        "layout": {"tensor_parallel": 1},
    }
    yield Certificate(files=(file,), setting=setting, differences=tuple(parts))
    yield Checked(path="certificate.json", says="CERTIFIED", changed=("weights",) * 99)
    faults = [finding(check, f"model.layers.{i}.weight", "1" * 200, "2" * 200) for i, check in enumerate(CHECKS)]
    yield from (Audit(path="model", format="fp8", findings=faults * 10), faults[0])
    fitted = Fitted(kind="rowwise", measured=[Measured("order of adding", "x" * 150, "y" * 90)] * 40)
    yield from (Fit(subject="x", engine="y", kinds=[fitted] * 10), fitted)
    # 2. Of training.
    model = nn.Sequential(*[nn.Linear(16 * i, 16 * i + 16) for i in range(1, 33)])
    yield (plan := f8emu.torch.plan_conversion(model))
    yield plan.entries[0]
    for recipe, path in ((ROWWISE, "a"), (DELAYED, "b")):
        converted = f8emu.torch.convert_to_float8_training(
            nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 48)), config=recipe
        )
        settings: f8emu.torch.InspectOptions = {
            "path": str(folder / f"{path}.jsonl"),
            "what_if": ["tensorwise", "blockwise"],
        }
        with (
            f8emu.torch.inspect(converted, settings) as inspector,
            f8emu.torch.capture(converted, folder / path) as seen,
        ):
            x = torch.full((16, 16), 3.0)
            x[0, 0] = torch.nan if path == "a" else 1.0
            converted(x).sum().backward()
            seen.step()
            inspector.step()
        yield from (inspector, seen, inspector.config, inspect(folder / f"{path}.jsonl"), replay(folder / path))
    yield (parted := diff(folder / "a", folder / "b"))
    yield parted.divergences[0]
    with f8emu.torch.emulate() as emulation:
        yield emulation
    # 3. Of numpy and JAX.
    x, weight = np.ones((64, 256), np.float32), np.ones((32, 256), np.float32)
    yield f8emu.numpy.linear(ROWWISE, x, weight, np.ones((64, 32), np.float32))
    yield f8emu.numpy.grouped_linear(ROWWISE, x, np.stack([weight] * 4), np.array([8, 16, 32, 64], np.int32))
    yield f8emu.numpy.scale_from_amax(f8emu.numpy.amax(x), E4M3FN)
    yield from (quantize(x, "vllm_group"), dialect_by_name("vllm_group"), ROWWISE, HOPPER, E4M3FN)
    yield from (f8emu.jax.dot_general("rowwise"), f8emu.jax.delayed_dot_general("delayed"))
    yield (explanation := f8emu.jax.explain(lambda a, b: a @ b)(x, weight.T))
    yield from (explanation.dots[0], f8emu.jax.linear_delayed_state("delayed"))
    yield f8emu.jax.initial_delayed_state(DelayedScaling())
    yield f8emu.jax.capture(folder / "jax")


def returned() -> set[str]:
    """The classes of f8emu that public functions return, by their annotations; enums print their names."""
    kinds: set[str] = set()
    for package in (*SURFACE, "f8emu.conformance"):
        for function in vars(import_module(package)).values():
            if isroutine(function):
                try:
                    hint = get_type_hints(function).get("return")
                except NameError:  # a type of torch, which is loaded late
                    continue
                hints: list[Any] = [hint, *get_args(hint)]
                kinds |= {kind.__name__ for kind in hints if isinstance(kind, type) and kind.__module__[:2] == "f8"}
    return kinds


def test_every_public_result_fits_a_screen(tmp_path: Path, notebooks: Notebooks) -> None:
    kinds: set[str] = set()
    for value in results(tmp_path, notebooks):
        check_shown(value)
        kinds.add(type(value).__name__)
    assert returned() - kinds <= {"Granularity", "Overflow", "Float8Experts", "DelayedScalingState"}
    assert set(HTML) <= kinds


@pytest.mark.parametrize("columns", [80, 120])
def test_a_repr_is_folded_between_its_elements(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shape and no number is cut, and nothing is left out."""
    monkeypatch.setenv("COLUMNS", str(columns))
    x, weight = np.ones((64, 256), np.float32), np.ones((32, 256), np.float32)
    trace = f8emu.numpy.linear(ROWWISE, x, weight, np.ones((64, 32), np.float32))
    lines = repr(trace).splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= columns
    assert all(line.endswith((",", "(", ")")) and line.count("[") == line.count("]") for line in lines), repr(trace)
    assert repr(trace).count("codes=float8_e4m3fn[256, ") == 2 and repr(trace).count("=float32[") == 4 + 3 * 6
    state = repr(f8emu.jax.linear_delayed_state("delayed"))
    assert state.count("Array(0., dtype=float32)") == state.count("Array(1., dtype=float32)") == 3, state
    lines = screen(["word " * 40, "x" * 300]).splitlines()
    assert max(map(len, lines)) <= columns and "".join("".join(lines).split()) == "word" * 40 + "x" * 300
