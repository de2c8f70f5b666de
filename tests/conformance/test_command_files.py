"""What commands read and write: no input is harmed, nothing is left behind, no pipe is waited for; bounds."""

import hashlib
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from f8emu.cli import build_app
from f8emu.cli.paths import use_of
from f8emu.conformance.run import runner
from tests.audit.checkpoints import checkpoint, codes, f32, fp8, normal
from tests.conformance.command import few_recorded, invoke

STEP = "cap/step-00000001-rank-00000"
KERNEL = """
def f(a, b, *args, out_dtype, **options): return (a.astype("f4") @ b.astype("f4")).astype(out_dtype)
def broken(*args, **options): raise RuntimeError("no")
"""


def parameters() -> Iterator[tuple[str, Any, Any]]:
    """Its name, its type, and what typer knows of it, of each parameter of each command."""
    for command in build_app().registered_commands:
        function: Any = command.callback
        for name, hint in function.__annotations__.items():
            options = [option for option in getattr(hint, "__metadata__", ()) if hasattr(option, "param_decls")]
            default = (function.__wrapped__.__kwdefaults__ or {}).get(name)
            yield f"{function.__name__} {name}", hint, (options or [default])[0]


def test_every_path_and_every_number_is_declared() -> None:
    """So that a new option cannot go past the guard: what is done with a path, from where to where a number goes."""
    paths, numbers = [], []
    for name, hint, option in parameters():
        kind = str(typing.get_args(hint)[:1] or hint)
        if "Path" in kind:
            assert use_of(hint) is not None, name
            paths.append(name)
        elif re.search(r"\b(int|float)\b", kind):
            assert option.max is not None and (option.min is not None or "float" in kind), name
            numbers.append(name)
    assert len(paths) >= 24 and len(numbers) >= 12


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel, checkpoints, a capture, a log and lists; links to them; a pipe and links in a circle."""
    monkeypatch.chdir(tmp_path)
    for name in ("k.py", "helper.py", "log.jsonl", "shapes.json", "victim.txt", f"{STEP}/index.json", "hub/blob"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(KERNEL if name == "k.py" else "[]\n")
    for name in ("ck", "source"):
        tensors = (
            {"l.weight": codes(), "l.weight_scale_inv": f32([1e-4])} if name == "ck" else {"l.weight": normal(144, 144)}
        )
        checkpoint(Path(name), tensors, fp8() if name == "ck" else {})
    Path("source/config.json").write_text("{}")
    links = {
        "k.json": "k.py",
        "ck2": "ck",
        "conf": "ck/config.json",
        "out": "victim.txt",
        "loop": "loop",
        "dangling": "no",
    }
    for link, target in {**links, "hub/snap/model.safetensors": "../blob"}.items():
        Path(link).parent.mkdir(exist_ok=True)
        Path(link).symlink_to(target)
    os.link("ck/config.json", "hard")
    os.mkfifo("pipe")
    Path("folder").mkdir()
    return tmp_path


def state(folder: Path) -> dict[str, str]:
    """Every file and its content."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" not in path.parts:
            is_file = path.is_file() and not path.is_symlink()
            hashes[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
    return hashes


REPLACED = "may not replace what is"
REFUSED = {
    "verify k.py:f --json": {
        **dict.fromkeys(("k.py", "./k.py", "folder/../k.py", "helper.py"), "does not replace a module of Python"),
        **dict.fromkeys(("k.json", "out", "loop", "dangling"), "it is a link"),
        **dict.fromkeys(("pipe", "/dev/null", "/dev/zero"), "it is a pipe or a device"),
        "folder": "Is a directory; give the path of a file",
        "no/x.json": "give a path in a directory that exists",
        "k.py/x": "cannot write k.py/x",
        "a.json --html a.json": "two outputs may not be one file",
        "a.json --html folder/../a.json": "two outputs may not be one file",
        "a.json --golden nothing": "nothing: No such file or directory; check the path",
        "a.json --golden pipe": "not a regular file; check the path",
        "a.json --stage nothing": "unknown stage",
        "shapes.json --golden shapes.json": REPLACED,
    },
    "verify k.py:nothing --json a.json --html": {"a.html": "has no attribute 'nothing'"},
    "fit k.py:f --json": {"k.py": "a module of Python", "pipe": "a pipe or a device"},
    "fit k.py:f --m": {"99999999999999999999": "--m", "0": "--m"},
    "replay cap --json": {f"{STEP}/index.json": REPLACED, f"{STEP}/0.safetensors": REPLACED, "a.json": "read_capture"},
    "replay": {"nothing": "check the path", "loop": "Too many levels", "pipe": "cannot read pipe"},
    "diff cap ck --json": {"ck/model.safetensors": REPLACED, "conf": REPLACED, f"cap/../{STEP}/index.json": REPLACED},
    "plan --shapes shapes.json --json": {"shapes.json": REPLACED, "pipe": "a pipe or a device"},
    "plan --shapes": {
        "pipe": "not a regular file",
        "loop": "Too many levels",
        "nothing --json a.json": "check the path",
    },
    "plan --invariance --rows": {"1000000000": "--rows"},
    "record": {
        "k.py": "a module of Python",
        "pipe": "a pipe",
        "x --seed -1": "--seed",
        "x --plans pipe": "cannot read",
    },
    "inspect log.jsonl --html": {"log.jsonl": REPLACED, "out": "a link", "a.html": "line 1"},
    "inspect": {"pipe": "not a regular file", "nothing --json a.json": "check the path", "log.jsonl --top 0": "--top"},
    "audit ck --json": {
        **dict.fromkeys(
            ("ck/config.json", "ck2/model.safetensors", "conf", "hard", "ck/hf_quant_config.json"), REPLACED
        ),
        "a.json --html a.json": "two outputs",
        "a.json --source nothing --html a.html": "nothing: No such file or directory; check the path",
        "a.json --consumer nobody": "--consumer",
    },
    "audit hub/snap --json": {"hub/blob": REPLACED},
    "audit ck/model.safetensors --json": {"ck/config.json": REPLACED},
    "audit": {"loop": "Too many levels", "pipe": "not a regular file", "dangling": "check the path"},
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_refusal_says_why_and_harms_nothing(command: str, here: Path) -> None:
    before = state(here)
    for rest, why in REFUSED[command].items():
        status, out, error = invoke(*command.split(), *rest.split(), COLUMNS="1000")
        assert (status, out) == (2, "") and why in " ".join(error.split()), (rest, error)
        assert "Traceback" not in error and state(here) == before, rest


def test_reports_replace_reports_alone(here: Path) -> None:
    for _ in range(2):  # the second time it is there
        assert invoke("audit", "ck", "--json", "ck/report.json" if _ else "a.json", "--html", "a.html")[0] == 0
    assert (here / "a.html").read_text().startswith("<!doctype") and not [*here.glob(".f8emu*")]


def test_a_kernel_without_an_output_does_not_end_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "FRAMEWORKS", {})
    golden = few_recorded(here / "few.safetensors", 1).path
    options = ("--arrays", "numpy", "--golden", golden, "--stage", "golden", "--no-diagnose")
    status, out, _ = invoke("verify", "k.py:broken", "k.py:f", "k.py:nothing", *options, COLUMNS="1000")
    assert status == 1 and "RuntimeError: no" in out and "has no attribute 'nothing'" in out and "outputs" in out
    status, out, error = invoke("verify", "k.py:broken", *options, COLUMNS="1000")
    assert status == 2 and not out and "RuntimeError: no" in error
