"""Finding and loading the engine, and what is said where there is none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from f8emu.native import library


def report_of(**variables: str) -> str:
    """What a fresh process says of its engine."""
    code = "from f8emu.native import library as x; print(x.unavailable(), x.widths(), x.library() is None)"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout


def test_widths_run_here_and_end_with_the_portable_one() -> None:
    if (problem := library.unavailable()) is not None:
        pytest.skip(problem)
    assert library.library() is not None
    assert library.widths()[-1] == "portable"


def test_the_numbers_of_the_interface_are_equal() -> None:
    """If not, all that needs the engine would be skipped."""
    header = Path(library.__file__).with_name("src") / "engine.h"
    if not header.is_file():
        pytest.skip("needs the engine's sources")
    assert f"enum {{ F8_ABI = {library.ABI} }};" in header.read_text()


def test_the_variable_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, str(tmp_path / "engine.so"))
    assert library.path() == str(tmp_path / "engine.so")
    monkeypatch.setenv(library.VARIABLE, "")
    assert Path(library.path()).name == library.NAME


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    file = str(tmp_path / "engine.so")
    assert report_of(**{library.VARIABLE: file}) == (
        f"{library.VARIABLE} names {file}, which is not there; unset it, or build the engine there () True\n"
    )


def test_a_damaged_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.so"
    file.write_bytes(b"\x7fELF")
    message = report_of(**{library.VARIABLE: str(file)})
    assert message.startswith("the engine does not load on ") and message.endswith(" () True\n")
    assert "damaged or of another machine" in message and "gcc or clang" in message


@pytest.mark.parametrize("abi", ["", "int f8_abi(void) { return 99; }"], ids=["older", "newer"])
def test_another_version(abi: str, tmp_path: Path) -> None:
    """Its structs are others: it is not called, and numpy computes."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    source, engine = tmp_path / "engine.c", tmp_path / "engine.so"
    source.write_text(f'const char *f8_width_name(int i) {{ return i ? 0 : "AVX"; }} {abi}')
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", engine], check=True)
    message = report_of(**{library.VARIABLE: str(engine)})
    assert message.endswith(" () True\n") and f"is number {99 if abi else 1}, not {library.ABI}" in message


def test_another_library(tmp_path: Path) -> None:
    file = "libm.so.6" if sys.platform == "linux" else "/usr/lib/libSystem.B.dylib"
    copy = tmp_path / "engine.so"
    folders = ("/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/lib64", "/")
    source = next((path for folder in folders if (path := Path(folder) / file).is_file()), None)
    if source is None:
        pytest.skip("no library to take for the engine")
    copy.write_bytes(source.read_bytes())
    assert "f8_width_name" in report_of(**{library.VARIABLE: str(copy)})
