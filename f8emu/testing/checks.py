"""The suite's stages as assertions, with the report's diagnosis as their message."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from f8emu.conformance.cases.golden import shipped_golden
from f8emu.conformance.casts.contracts import Wanted
from f8emu.conformance.casts.subject import called_function
from f8emu.conformance.casts.verify import verify_called
from f8emu.conformance.diagnosis.search import diagnosed
from f8emu.conformance.kernels.kernel import Kernel
from f8emu.conformance.kernels.known import scaled_mm_kernel
from f8emu.conformance.run.result import Result
from f8emu.conformance.run.stages import StageName
from f8emu.conformance.run.subject import load_subject, name_of
from f8emu.conformance.run.verify import stages_by_name, stages_with, verify
from f8emu.environment import printable
from f8emu.report.diagnosis import diagnosis_lines
from f8emu.report.verify import mismatch_lines, stage_lines, verdict
from f8emu.spec.errors import SpecError
from f8emu.spec.formats import Format, Overflow, float8_format, overflow_by_name
from f8emu.spec.names import ArraysName, Float8Name, GranularityName, OverflowName
from f8emu.spec.scaling import Granularity, granularity_by_name
from f8emu.testing.arguments import count, names

_QUICK = ("golden",)
_THOROUGH = ("golden", "gemms", "live")


def check_gemm(
    kernel: Kernel | Callable[..., Any],
    *,
    arrays: ArraysName = "torch",
    thorough: bool = False,
    stages: Sequence[StageName] | StageName = (),
    cases: Sequence[str] | str = (),
    errors: int = 3,
    diagnose: bool = True,
) -> None:
    """Assert that a float8 GEMM kernel has the bits of a Hopper GPU: `f8emu verify` as an assertion.

    The kernel runs in this process. What it refuses with NotImplementedError is not offered; a check that compared
    nothing fails. By default it is put to the recorded GEMMs, which takes a second or two on a CPU. They show a rule
    that is wrong. What goes wrong at some sizes, layouts, addresses or later calls, or in the sign of a zero, is among
    the 3,000 GEMMs of `thorough`, which takes a minute.

    Args:
        kernel: a function that is called as `torch._scaled_mm` is (`f8emu verify --contract`), or a `Kernel`, the
            declaration of one that is called otherwise.
        arrays: the framework whose arrays the kernel takes: torch (on the GPU if there is one), numpy or jax.
        thorough: whether the generated GEMMs run too, and on a GPU the large ones.
        stages: the stages to run in place of these: golden, gemms, live; a string is one.
        cases: the names of cases to run alone, as a report has them, with `*` for any text; without a diagnosis.
        errors: how many differing cases the message shows, one output of each.
        diagnose: whether the message says what a wrong kernel computes instead, which takes seconds.

    Raises:
        AssertionError: a bit differs, the kernel fails, or nothing was compared.
        SpecError: unknown arrays, stages or cases, or `errors` that is no integer of at least 0.
        MissingExtraError: torch or jax is needed and not installed.
    """
    __tracebackhide__ = True
    count("check_gemm", "errors", errors)
    asked, cases = names("check_gemm", "stages", stages), names("check_gemm", "cases", cases)
    subject, golden = load_subject(kernel, arrays=arrays), shipped_golden()
    named = stages_by_name(asked or (_THOROUGH if thorough or cases else _QUICK))
    only = stages_with(cases, named, [subject], golden) if cases else named
    with np.errstate(all="ignore"):  # numpy would warn of what the kernel is asked on purpose
        result = verify([subject], only=only, golden=golden, errors=errors)
        result, diagnoses = diagnosed(result, [subject] if diagnose and not cases else [])
    lines = [line for name, kinds in diagnoses.items() for line in diagnosis_lines(name, kinds)]
    _require_equal(result, lines, errors)


def check_cast(
    function: Callable[..., Any],
    *,
    arrays: ArraysName = "torch",
    format: Format | Float8Name | None = None,
    overflow: Overflow | OverflowName | None = None,
    cases: Sequence[str] | str = (),
    errors: int = 3,
    diagnose: bool = True,
) -> None:
    """Assert that `x -> codes`, or `x, scale -> codes`, casts to float8: `f8emu verify --kind cast` as an assertion.

    Every case runs, which takes a second. Codes may be bytes, whose format is then named. Without `overflow` a cast may
    saturate or not, as long as it always does the same. Other arguments are those of `check_gemm`.

    Raises:
        AssertionError: a code differs, the function fails or is no cast, or nothing was compared.
        SpecError: unknown arrays, cases or `overflow`, a format that is not float8, or `errors` below 0.
        MissingExtraError: torch or jax is needed and not installed.
    """
    __tracebackhide__ = True
    policy = None if overflow is None else overflow_by_name("check_cast", overflow)
    wanted = Wanted(None if format is None else float8_format("check_cast", format), policy)
    _check_function(function, "cast", wanted, arrays, cases, errors, diagnose)


def check_quantizer(
    function: Callable[..., Any],
    *,
    arrays: ArraysName = "torch",
    format: Format | Float8Name | None = None,
    granularity: Granularity | GranularityName | None = None,
    cases: Sequence[str] | str = (),
    errors: int = 3,
    diagnose: bool = True,
) -> None:
    """Assert that `x -> codes, scales` follows f8emu's rule or a dialect: `f8emu verify --kind quantize`.

    Every case runs, which takes a second or two. `granularity` is which elements share a scale, if their shape does not
    tell. Other arguments and errors are those of `check_cast`.

    Raises:
        AssertionError: a code or a scale differs, the function fails or is no quantizer, or nothing was compared.
        SpecError: unknown arrays or granularity, or a format that is not float8.
        MissingExtraError: torch or jax is needed and not installed.
    """
    __tracebackhide__ = True
    shared = None if granularity is None else granularity_by_name("check_quantizer", granularity)
    wanted = Wanted(None if format is None else float8_format("check_quantizer", format), None, shared)
    _check_function(function, "quantize", wanted, arrays, cases, errors, diagnose)


def _check_function(
    function: Callable[..., Any],
    kind: str,
    wanted: Wanted,
    arrays: str,
    cases: Sequence[str] | str,
    errors: int,
    diagnose: bool,
) -> None:
    __tracebackhide__ = True
    call = "check_cast" if kind == "cast" else "check_quantizer"
    count(call, "errors", errors)
    name, cases = name_of(function), names(call, "cases", cases)
    known, ask = called_function(name, scaled_mm_kernel(name, function), kind, arrays, is_command=False)
    try:
        verified = verify_called(known, ask, wanted, errors=errors, cases=cases, diagnose=diagnose)
    except SpecError as failure:  # of the first call
        raise AssertionError(str(failure)) from None
    diagnosis = verified.diagnosis
    _require_equal(verified.result, [f"{name}: {diagnosis.headline}"] if diagnosis else [], errors)


def _require_equal(result: Result, diagnosis: Sequence[str], errors: int) -> None:
    __tracebackhide__ = True
    if result.is_interrupted:  # the suite has caught it, to report what was finished
        raise KeyboardInterrupt
    end = verdict(result)
    if end.is_equal:
        return
    (subject,) = result.subjects
    lines = [end.line, *diagnosis, *mismatch_lines(subject, errors, "errors="), *stage_lines(subject)]
    first = next((mismatch for stage in subject.stages for mismatch in stage.mismatches), None)
    lines += [f"this case again: cases=[{printable(first.case)!r}]"] if first else []
    raise AssertionError("\n".join(lines))
