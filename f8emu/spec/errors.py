"""The errors a caller of f8emu can meet.

Every message states the call, what was expected, what was observed and the remedy.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager


class F8Error(Exception):
    """The base class of every error that f8emu raises on purpose."""


class SpecError(F8Error, ValueError):
    """A recipe, format, granularity or option that does not exist or contradicts itself."""


class OperandError(F8Error, ValueError):
    """An operand with the wrong dtype, shape, layout, size or scale."""


class UnsupportedError(F8Error, NotImplementedError):
    """A valid request that this chip, engine, device or installed version cannot honour."""


class GoldenFileError(F8Error, ValueError):
    """A golden file that is missing, truncated, foreign or inconsistent."""


class MissingExtraError(F8Error, ImportError):
    """An optional dependency (torch, JAX, a library that an integration is for) is not installed."""

    def __init__(self, call: str, package: str, extra: str = "") -> None:
        target = f"'f8emu[{extra}]'" if extra else package
        super().__init__(
            f"{call} needs the package '{package}', which is not installed; install it with: pip install {target}"
        )
        self.name = package


@contextmanager
def required_by(call: str, extra: str = "") -> Generator[None, None, None]:
    """A MissingExtraError if the block imports a package that is not installed; `extra` of f8emu installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or sys.modules.get(package):  # the package is there, without this module
            raise
        raise MissingExtraError(call, package, extra) from error


def did_you_mean(name: str, known: Iterable[str], before: str = "") -> str:
    """` (did you mean ...?)` for a message about an unknown name, with `before` put before the nearest known one."""
    from difflib import get_close_matches  # few programs need it: it takes no time at their start

    return "".join(f" (did you mean {before}{close}?)" for close in get_close_matches(name, known, 1))


def warn_of_old_name(old: str, new: str) -> None:
    """Warn, at the line outside of f8emu that uses it, that a name is old."""
    frame, level = sys._getframe(1), 2  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("f8emu"):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{old} is an older name; write {new}", DeprecationWarning, stacklevel=level)


def require_arguments(call: str, name: str, function: Callable[..., object], arguments: str) -> None:
    """Raise SpecError for a function that cannot be called with `arguments`, the names of them."""
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except TypeError:
        raise SpecError(
            f"{call}: {name} must take ({arguments}); got {function!r}; write {name}=lambda {arguments}: ..."
        ) from None
    except ValueError:  # of a builtin without a signature
        return
