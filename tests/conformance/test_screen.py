"""What every command prints: 80 columns on a terminal, whole lines in a pipe, no name cut or folded; help; progress.

A new command is covered: the commands are those of the app.
"""

import inspect
import json
import re
import shlex
import shutil
import time
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import f8emu.report.terminal as terminal
from f8emu.capture.record import GemmRecord
from f8emu.cli import build_app, progress, screen
from f8emu.cli.paths import checked
from f8emu.conformance.diagnosis import fit as fitting
from f8emu.dialects import quantize
from f8emu.spec import RECIPES
from tests.audit.checkpoints import checkpoint, f32, fp8, normal
from tests.conformance.captures import layer, written
from tests.conformance.command import few_recorded, invoke

GROUP: Any = typer.main.get_group(build_app())
COMMANDS: dict[str, Any] = dict(GROUP.commands)
LONG = "model.layers.11.mlp.experts.127.down_proj.an_adapter.with_a_long_name"
SAMPLES = {
    "verify": "verify k.py:f --arrays numpy --golden few --stage golden --no-diagnose",
    "fit": "fit f8emu.native --m 16 --kind 'tensorwise fast'",
    "inspect": "inspect run.jsonl",
    "replay": "replay cap_wrong --oracle f8ref.numpy",
    "diff": "diff cap cap_wrong",
    "audit": "audit ck --source source --consumer vllm:h200",
    "checksums": "checksums ck --engine vllm",
    "certify": "certify ck source",
    "export": "export nothing --verify",
    "run": "run -- no-such-program",
    "recipes": "recipes",
    "doctor": "doctor",
    "record": "record nothing/out --seed 1",
    "plan": "plan --invariance --shapes weights.json",
    "vectors": "vectors OUT --scales",
}
"""A call of each command."""
REPORTING = ("verify", "audit", "certify", "inspect", "diff", "replay", "fit", "plan", "doctor")
KERNEL = "def f(a, b, *args, out_dtype, **options): return (a.astype('f4') @ b.astype('f4')).astype(out_dtype)\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel, captures, a checkpoint with faults, and a log, of layers with long names."""
    path = tmp_path_factory.mktemp("files")
    (path / "k.py").write_text(KERNEL)
    (path / "weights.json").write_text('[{"n": 4096, "k": 14336}]')
    few_recorded(path / "few", 0)
    for name in ("cap", "cap_wrong", "cap_blockwise"):
        recipe = "blockwise" if name == "cap_blockwise" else "rowwise"
        records = layer(RECIPES[recipe], LONG)
        if name == "cap_wrong":
            products = [arrays["product"] for record, arrays in records if isinstance(record, GemmRecord)]
            products[0].view("u2")[3, 5] ^= 1
        written(path / name, records, recipe)
    weights = {f"{LONG}.weight": normal(256, 256), "model.layers.0.self_attn.q_proj.weight": normal(256, 256, seed=1)}
    tensors: dict[str, Any] = {}
    for name, weight in weights.items():
        cast = quantize(weight, "transformers_block")
        tensors |= {name: cast.codes, f"{name}_scale_inv": f32(*cast.scale.tolist()) * (2 if "q_proj" in name else 1)}
    tensors[f"{LONG}.weight_scale_inv"] = tensors[f"{LONG}.weight_scale_inv"][:1]
    checkpoint(path / "ck", tensors, fp8())
    checkpoint(path / "source", weights, {})
    place = {"layer": LONG, "gemm": "grad_weight", "operand": "a", "tensor": "grad_output"}
    statistics = {"cast": "float8_e4m3fn blockwise_1x128", "sqnr": 31.4, "underflow": 0.0155, "saturation": 0, "nan": 1}
    lines = [{"schema": 1}, {"step": 1, **place, **statistics}, {"event": "nan", "step": 1, **place}]
    (path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def here(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    fit, fits = fitting.fit, dict[str, fitting.Fit]()  # one is enough to be printed twice
    monkeypatch.setattr(fitting, "fit", lambda *a, **options: fits.get("") or fits.setdefault("", fit(*a, **options)))


def printed(words: str, *options: str, columns: int | None) -> str:
    """Both streams of a call, without times, on a terminal of so many columns or in a pipe."""
    shutil.rmtree("OUT", ignore_errors=True)
    _, out, error = invoke(*shlex.split(words), *options, COLUMNS=None if columns is None else str(columns))
    return re.sub(r"\d+\.\d s\b", "SECONDS", out + error)


def require_whole(words: str, *options: str) -> None:
    """Every word is on both as it is, no line is longer than 80 but for a word that alone is, a pipe has no colours."""
    wide, narrow = printed(words, *options, columns=None), printed(words, columns=80)
    assert wide.strip() and "\x1b" not in wide + narrow and "…" not in wide + narrow
    for line in narrow.partition("To run one case again:")[0].splitlines():
        assert len(line) <= 80 or len(line.split()) == 1, line
    assert not (lost := words_in(wide) ^ words_in(narrow)), lost
    assert len(wide.splitlines()) <= len(narrow.splitlines())


def words_in(text: str) -> set[str]:
    return {word.rstrip(":") for word in text.split()}


def test_there_is_a_call_of_every_command() -> None:
    assert set(SAMPLES) == set(COMMANDS)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", SAMPLES)
def test_no_line_is_too_long_and_no_name_cut_or_folded(command: str) -> None:
    """With the reports: data with a schema, and a page."""
    if command not in REPORTING:
        require_whole(SAMPLES[command])
        return
    require_whole(SAMPLES[command], "--json", "out.json", "--html", "page.html")
    data = json.loads(Path("out.json").read_text())
    assert all(item["schema"] >= 1 for item in (data if isinstance(data, list) else [data]))
    assert Path("page.html").read_text().startswith("<!doctype html>")
    if command in ("inspect", "replay", "diff", "audit"):
        assert "error_total" not in printed(SAMPLES[command], columns=80), "no record has it: no column"
        assert re.search(rf"(^|\s){re.escape(LONG)}", printed(SAMPLES[command], columns=80))


def broken(text: str, columns: int, indent: str = "") -> list[str]:
    """Words that are broken where a line ends, as rich does."""
    return [text[i : i + columns] for i in range(0, len(text), columns)]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (terminal, "_folded", broken),
        (terminal, "_row", lambda cells, widths, *_: [" ".join(map(lambda x, n: x[: n // 2] + "…", cells, widths))]),
        (screen, "width", lambda stream=None: 100),
        (terminal, "printable", lambda text: f"\x1b[1m{text}\x1b[0m"),
    ],
    ids=["folded", "cut", "too long", "coloured"],
)
def test_faults_are_found(place: Any, name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(AssertionError):
        require_whole(SAMPLES["audit"])


@pytest.mark.usefixtures("here")
def test_diff_of_two_recipes_says_so_and_stops() -> None:
    lines = printed("diff cap cap_blockwise", columns=None).splitlines()
    assert lines[0].startswith(
        "The runs use different recipes (A rowwise, B blockwise), but they already differ before "
    )
    assert len(lines) == 5 and lines[-1].startswith("NOT EQUAL, first at step 7: ")


# Reports


@pytest.mark.usefixtures("here")
def test_a_report_to_standard_output_and_the_verdict_alone() -> None:
    status, out, error = invoke(*SAMPLES["audit"].split(), "--json", "-", "--quiet", COLUMNS=None)
    assert status == 1 and json.loads(out)["findings"] and len(error.splitlines()) == 1
    assert error.startswith("FAULTY: ") and "--quiet" in invoke("verify", "--help")[1]
    status, out, error = invoke("inspect", "run.jsonl", "--html", "-")
    assert status == 0 and out.startswith("<!doctype html>") and LONG in error
    assert "two outputs may not be one file" in invoke("inspect", "run.jsonl", "--json", "-", "--html", "-")[2]


def test_json_was_a_flag() -> None:
    status, out, error = invoke("recipes", "rowwise", "--json")
    assert (status, json.loads(out)["name"]) == (0, "rowwise") and "--json takes a path" in error
    assert "for standard output: f8emu recipes rowwise --json -" in invoke("recipes", "--json", "rowwise")[2]


# Help


def examples(command: Any) -> list[str]:
    return [part for part in (command.epilog or "").split("\n\n") if part.startswith("f8emu ")]


def choices_of(command: str, name: str) -> Iterator[str]:
    """The choices of an option in one word, as the help has them."""
    callbacks: list[Any] = [info.callback for info in build_app().registered_commands]
    (hint,) = (callback.__annotations__.get(name) for callback in callbacks if callback.__name__ == command)
    for kind in (*typing.get_args(hint), *(of for hinted in typing.get_args(hint) for of in typing.get_args(hinted))):
        if isinstance(kind, type) and issubclass(kind, Enum):
            yield f"<{'|'.join(member.value for member in kind)}>"


def parse(example: str) -> None:
    """Raise what the command would say of these words."""
    _, name, *words = shlex.split(example)
    COMMANDS[name].make_context(name, words, parent=typer.Context(GROUP))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_whole_and_its_examples_are_calls(command: str) -> None:
    text = invoke(command, "--help", COLUMNS="80")[1]
    assert max(map(len, text.splitlines())) <= 80
    words = set(re.sub(r"[│╭╮╰╯─]", " ", text).split())
    for parameter in (parameter for parameter in COMMANDS[command].params if not getattr(parameter, "hidden", False)):
        names = {name for name in parameter.opts if name.startswith("-")}
        choices = set() if parameter.metavar else set(choices_of(command, parameter.name))
        assert not (lost := ({*(parameter.help or "").split()} | names | choices) - words), lost
    lines = [line.strip() for line in text.splitlines()]
    assert examples(COMMANDS[command]) and {"--quiet", "--help"} <= words
    for example in examples(COMMANDS[command]):
        assert example in lines
        parse(example)


def test_a_wrong_example_is_found() -> None:
    for example in ("f8emu plan --shape shapes.json", "f8emu record", "f8emu fit torch --m none"):
        with pytest.raises(Exception, match=r"(?i)no such option|missing|integer"):
            parse(example)


@pytest.mark.parametrize(
    ("words", "completed"),
    [("f8emu plan --chip h", ["hopper", "h100", "h200"]), ("f8emu recipes blockwise_", ["blockwise_ue8m0"])],
)
def test_a_shell_completes(words: str, completed: list[str]) -> None:
    environment = {"_F8EMU_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert CliRunner().invoke(build_app(), prog_name="f8emu", env=environment).stdout.split() == completed


# Progress


def command() -> None:
    """It counts, and takes four intervals."""
    with progress.progress_bar() as bar:
        bar.begin("my_kernel", "formats", 9)
        bar.advance()
        time.sleep(0.2)


def test_a_pipe_has_a_line_every_30_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every command, whatever it does; none with `--quiet`."""
    assert progress.INTERVAL <= 30
    monkeypatch.setattr(progress, "INTERVAL", 0.05)
    checked(command)()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3 and set(lines) == {"f8emu command: my_kernel: formats, 1 of 9; 0 s"}
    checked(command)(quiet=True)
    assert capsys.readouterr().err == ""
    for info in build_app().registered_commands:
        assert "quiet" in inspect.signature(info.callback or command).parameters, "it goes through `checked`"
