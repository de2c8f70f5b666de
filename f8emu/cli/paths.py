"""Paths that a command reads and writes: their types say which, and `checked` looks at all before the command runs.

No output replaces an input of the run, what belongs to one, or another output, through whatever link or spelling.
"""

import errno
import inspect
import os
import tempfile
from collections.abc import Callable
from enum import Enum
from fnmatch import fnmatchcase
from functools import wraps
from importlib.machinery import all_suffixes
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from f8emu.cli.frame import guarded, unwritable
from f8emu.cli.progress import reported
from f8emu.cli.screen import STDOUT, settings
from f8emu.spec import SpecError
from f8emu.strict import read_regular

_READ_BY_NAME = ("*.safetensors", "*.index.json", "index.json", "*config.json", "params.json", "f8emu_manifest.json")
"""Files that readers of a directory look for: a new one would change what is read."""
_DONE = {"verify": "verified", "fit": "fitted", "diff": "compared", "plan": "planned", "certify": "certified"}


class Use(Enum):
    """The use that a command makes of a path."""

    READ = "a file or a directory that is read"
    WRITE = "a file that is written when all is done"
    REPORT = "the same, for people or programs; - is standard output"
    MAKE = "a directory that is made; its maker refuses one that is there"


Input = Annotated[Path, Use.READ]
InputOrNone = Annotated[Path | None, Use.READ]
InputsOrNone = Annotated[tuple[Path, Path] | None, Use.READ]
Output = Annotated[Path, Use.WRITE]
ReportOrNone = Annotated[Path | None, Use.REPORT]
New = Annotated[Path, Use.MAKE]
NewOrNone = Annotated[Path | None, Use.MAKE]


def checked(command: Any) -> Callable[..., None]:
    """The command with `--quiet`, which looks at its paths before it runs, and says what it does while it runs."""
    import typer

    quiet = Annotated[bool, typer.Option("--quiet", help="Print the verdict or the result alone, and no progress.")]
    uses = {name: use for name, hint in command.__annotations__.items() if (use := use_of(hint))}

    @wraps(command)
    def run(*, quiet: bool = False, **values: Any) -> None:
        paths = [(use, path) for name, use in uses.items() for path in _each(values[name])]
        is_report = (Use.REPORT, STDOUT) in paths
        with settings(quiet=quiet, is_report=is_report), reported(command.__name__):
            if status := guarded(_check, command.__name__, paths):
                raise typer.Exit(status)
            command(**values)

    asked = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=quiet)
    signature = inspect.signature(command)
    # A line of the source is no line of the help.
    run.__doc__ = "\n\n".join(" ".join(text.split()) for text in (command.__doc__ or "").split("\n\n"))
    run.__annotations__ = {**command.__annotations__, "quiet": quiet}
    parameters = [*signature.parameters.values(), asked]
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    return run


def _each(value: Path | tuple[Path, ...] | None) -> tuple[Path, ...]:
    # The paths of one option.
    return value if isinstance(value, tuple) else () if value is None else (value,)


def use_of(hint: Any) -> Use | None:
    """The use in a parameter's type, or None."""
    return next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Use)), None)


def text_of(command: str, path: Path) -> str:
    """A text file, or a SpecError that names the command."""
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{command}: cannot read {path}: {error}; check the path: it must be a JSON file") from None


def _check(command: str, paths: list[tuple[Use, Path]]) -> int:
    inputs = [path for use, path in paths if use is Use.READ]
    outputs = [path for use, path in paths if use in (Use.WRITE, Use.REPORT)]
    for i, out in enumerate(outputs):
        if (Use.REPORT, out) in paths and out == STDOUT and outputs.count(out) == 1:
            continue
        _require_place(command, out)
        if out.exists() and not out.is_file():
            why = "it is a pipe or a device; give the path of a file"
        elif any(_belongs(out, path) for path in inputs):
            done = _DONE.get(command, f"{command}ed")
            why = f"a report may not replace what is {done}, or be read with it; give another path"
        elif any(_is_same(out, other) for other in outputs[:i]):
            why = "two outputs may not be one file; give each a path of its own"
        elif out.is_symlink():
            why = "it is a link; give the path of the file itself"
        elif out.suffix in all_suffixes() and out.exists():
            why = "a report does not replace a module of Python, a kernel's for instance; give another path"
        else:
            continue
        raise SpecError(f"{command}: cannot write {out}: {why}")
    return 0


def _require_place(command: str, out: Path) -> None:
    # A report can be written there.
    try:
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise unwritable(command, out, error) from None


def _is_same(a: Path, b: Path) -> bool:
    # One file, through links and other spellings, and hard links.
    return os.path.realpath(a) == os.path.realpath(b) or (a.exists() and b.exists() and a.samefile(b))


def _belongs(out: Path, other: Path) -> bool:
    # It is an input, or one that is a directory has it, by a name of its own or through a link, or would read it.
    if _is_same(out, other):
        return True
    places = os.path.realpath(out), os.path.join(os.path.realpath(out.parent), out.name)
    is_read, is_shard = (any(fnmatchcase(path.name, pattern) for pattern in _READ_BY_NAME) for path in (out, other))
    if any(Path(place).is_relative_to(os.path.realpath(other.parent if is_shard else other)) for place in places):
        return is_read or (other.is_dir() and out.exists())
    files = (Path(at, name) for at, _, names in os.walk(other) for name in names)
    return out.exists() and any(_is_same(out, file) for file in islice(files, 100_000))  # / has millions
