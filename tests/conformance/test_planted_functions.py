"""Kernels that are wrong by what they remember or cannot take: put to the suite itself, with the arrays that it gives.

Each is right but for its kind, and only the cases in which its kind can show are asked.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from random import Random
from typing import Any

import numpy as np
import pytest

from f8emu.conformance import ROWWISE_VECTORS, Arg, Kernel, shipped_golden
from f8emu.conformance.cases.distributions import codes_of
from f8emu.conformance.cases.families import DENSE, size_cases, turn_cases
from f8emu.conformance.cases.gemm import Family, GemmCase
from f8emu.conformance.kernels.known import KERNELS, scaled_mm_kernel
from f8emu.conformance.run import stages
from f8emu.conformance.run.result import Silent, StageResult, Status
from f8emu.conformance.run.runner import Runner
from f8emu.conformance.run.subject import kernel_subject
from f8emu.numpy import emulation as f8
from f8emu.spec import Granularity

Array = np.ndarray
Function = Callable[..., Array]


def right(a: Array, b: Array, scale_a: Array, scale_b: Array, **options: Any) -> Array:
    """As `torch._scaled_mm` is called."""
    options["out_dtype"] = str(options["out_dtype"])
    if np.ndim(scale_a):
        options |= dict.fromkeys(("granularity_a", "granularity_b"), Granularity.ROWWISE)
    return f8.scaled_mm(a, b, scale_a, scale_b, **{"split_k": 1, **options})


def remembering(key: Callable[[Array], object], *places: int) -> Callable[[], Function]:
    """Some arguments are copied when their key is first seen, and never read again."""

    def new() -> Function:
        known: dict[object, tuple[Array, Array]] = {}

        def kernel(*operands: Array, **options: Any) -> Array:
            arguments = list(operands)
            for place in places:
                array = arguments[place]
                # The array itself is kept, so that no other gets its id.
                _, arguments[place] = known.setdefault((place, key(array), array.shape), (array, array.copy()))
            return right(*arguments, **options)

        return kernel

    return new


def address(array: Array) -> int:
    return array.ctypes.data


def with_slices(new_slices: Callable[[], Callable[[], int]]) -> Callable[[], Function]:
    """A long K is cut into as many slices as each call draws."""

    def new() -> Function:
        slices = new_slices()

        def kernel(a: Array, *rest: Any, **options: Any) -> Array:
            drawn = slices()
            return right(a, *rest, **options, split_k=drawn if a.shape[1] >= 2048 else 1)

        return kernel

    return new


def no_rows_raise() -> Function:
    def kernel(a: Array, *rest: Any, **options: Any) -> Array:
        codes_of(a).max()
        return right(a, *rest, **options)

    return kernel


def no_rows_refused() -> Function:
    """Right: what a kernel may do."""

    def kernel(a: Array, *rest: Any, **options: Any) -> Array:
        if not len(a):
            raise NotImplementedError("no rows")
        return right(a, *rest, **options)

    return kernel


def aware_of_changes() -> Function:
    """Right: what it packed is compared with what it is given."""
    known: dict[int, Array] = {}

    def kernel(a: Array, b: Array, *rest: Any, **options: Any) -> Array:
        packed = known.get(address(b))
        if packed is None or packed.shape != b.shape or packed.tobytes() != b.tobytes():
            packed = known[address(b)] = b.copy()
        return right(a, packed, *rest, **options)

    return kernel


TURNS, LONG, FEW_ROWS = "turns", "a long K", "few rows"
WRONG: dict[str, tuple[str, Callable[[], Function]]] = {
    "b packed once for each object": (TURNS, remembering(id, 1)),
    "b packed once for each address": (TURNS, remembering(address, 1)),
    "scale_a read once for each object": (TURNS, remembering(id, 2)),
    "scale_b read once for each address": (TURNS, remembering(address, 3)),
    "both scales read once for each object": (TURNS, remembering(id, 2, 3)),
    "S of 1 or 2 at random": (LONG, with_slices(lambda: partial(Random(0).randint, 1, 2))),
    "S of 2 in every third call": (LONG, with_slices(lambda: cycle((2, 1, 1)).__next__)),
    "no rows raise": (FEW_ROWS, no_rows_raise),
}
RIGHT: dict[str, tuple[str, Callable[[], Function]]] = {
    "an S of its own": (LONG, with_slices(lambda: lambda: 2)),
    "no rows refused": (FEW_ROWS, no_rows_refused),
    "packed, and compared": (TURNS, aware_of_changes),
}


GOLDEN = cache(shipped_golden)


@cache
def cases_for_functions() -> tuple[GemmCase, ...]:
    """Those with operands of one format."""
    of_one = [c for c in DENSE if c.formats[0] == c.formats[1]]
    return (*size_cases(of_one, 1 << 21), *turn_cases(of_one))


ANSWERS: dict[Any, Any] = {}
"""What the oracle answers of each case: the same for every kernel."""


def judged(kernel: Kernel, cases: Iterable[GemmCase]) -> StageResult:
    """The stage of generated GEMMs, of these cases alone."""
    subject = replace(kernel_subject(kernel, "numpy"), more_gemms=lambda: cases)
    run = Runner(GOLDEN(), 3, Silent())
    run.known = ANSWERS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "gemm_cases", tuple)
        result = run.stage(stages.STAGES["gemms"], subject)
    assert result.cases_total > 10 or result.status is Status.DIFFERENT
    return result


def met_by(kind: str) -> list[GemmCase]:
    """The cases in which a kernel of this kind can be wrong."""
    every = cases_for_functions()
    if kind == LONG:
        return [case for case in every if case.family is Family.K and case.between and case.k <= 4208][::2]
    if kind == TURNS:
        return [case for case in every if case.family is Family.TURNS]
    return [case for case in every if case.family in (Family.ROW, Family.ROWS) and case.output_shape[0] < 20]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_found(name: str) -> None:
    kind, new = WRONG[name]
    assert judged(scaled_mm_kernel(name, new()), met_by(kind)).status is Status.DIFFERENT


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_is_not_accused(name: str) -> None:
    kind, new = RIGHT[name]
    result = judged(scaled_mm_kernel(name, new()), met_by(kind))
    assert (result.cases_differing, result.outputs_differing) == (0, 0), result.mismatches


def test_a_declared_kernel_is_asked_with_one_row() -> None:
    """And with odd M, unless its declaration says that it pads."""
    seen: set[int] = set()

    def kernel(a: Array, b: Array, scale_a: Array, scale_b: Array) -> Array:
        seen.add(len(a))
        out = right(a, b, scale_a[:, None], scale_b[None], out_dtype="bfloat16")
        return out * 0 if len(a) == 1 else out

    pads = "fbgemm.groupwise", "torch._scaled_mm", "deepgemm.fp8_gemm_nt"
    assert all({KERNELS[name].multiples[0], KERNELS[name].block_multiples[0]} == {1} for name in pads)
    declared = Kernel(
        name="declared",
        function=kernel,
        arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B),
        scales=ROWWISE_VECTORS,
        b=KERNELS["torch._scaled_mm"].b,
    )
    cases = met_by(FEW_ROWS)
    assert judged(declared, cases).status is Status.DIFFERENT and {1, 3, 5} <= seen
    assert judged(replace(declared, multiples=(16, 16, 16)), cases).status is Status.EQUAL
