"""The first call of your own kernel, before a whole run: whether it can be called at all, and if not, what to do."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from f8emu.conformance.arrays import FRAMEWORKS
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import GemmCase
from f8emu.conformance.cases.gemm_cases import gemm_cases
from f8emu.conformance.compare import said_by, shape_fault
from f8emu.conformance.kernels import faults
from f8emu.conformance.kernels.imported import REMEDY
from f8emu.conformance.run import subject as subjects
from f8emu.conformance.run.subject import FirstCall, NotOffered, Subject
from f8emu.spec import F8Error, SpecError

_LARGEST = 1 << 20
"""Products in a GEMM that is called first."""
_TRIES = 6
"""Kinds of GEMM, each of which fails, before the kernel is given up."""
_OWN = 24
"""GEMMs for this kernel alone of which kinds are taken."""


class _Tried(NamedTuple):
    is_made: bool
    """A GEMM had an output, none is offered, or the kernel has a fault that the suite reports."""
    tried: int = 0
    error: str = ""
    """The first one."""
    first: FirstCall | None = None


def load_and_call(name: str, *, arrays: str, timeout: float | None) -> Subject:
    """`load_subject`, and the first call of your own kernel: one GEMM of each kind until a GEMM has an output.

    Raises:
        SpecError: as `load_subject`, or every call fails: the message has the first error, and the arrays with which
            calls work.
        MissingExtraError: as `load_subject`.
    """
    load = partial(subjects.load_subject, name, timeout=timeout)
    subject = load(arrays=arrays)
    if name in subjects.SUBJECTS or ":" not in name:
        return subject
    found = _tried(subject)
    if found.is_made:
        return replace(subject, first_call=found.first)
    others = (other for other in FRAMEWORKS if other != arrays)
    works = next((other for other in others if _works(subject, partial(load, arrays=other))), "")
    remedy = f"it works with arrays of {works}: add --arrays {works}" if works else REMEDY
    raise SpecError(
        f"f8emu verify {subject.name}: expected an output from a first call ({subject.engine}); each of {found.tried} "
        f"kinds of GEMM failed, the first: {found.error}; {remedy}"
    )


def _works(subject: Subject, load_other: Callable[[], Subject]) -> bool:
    try:
        other = load_other()
    except F8Error:  # not installed, or not for this kernel
        return False
    return other.engine != subject.engine and _tried(other).is_made


def _tried(subject: Subject) -> _Tried:
    error, tried = "", 0
    first: FirstCall | None = None
    for gemm in _kinds(subject):
        try:
            output = np.array(subject.gemm(gemm))  # its own memory: a later call may change the kernel's
            first = first or FirstCall(gemm, output)
            fault = shape_fault(output, np.empty(gemm.output_shape, dtype_of(gemm.out_dtype)))
        except NotOffered:
            continue
        except Exception as raised:  # of the kernel, which may raise anything
            first = first or FirstCall(gemm, raised)
            if getattr(faults, type(raised).__name__, None) is type(raised):
                return _Tried(True, first=first)
            fault = said_by(raised)
        if not fault:
            return _Tried(True, first=first)
        error, tried = error or fault, tried + 1
        if tried == _TRIES:
            break
    return _Tried(not tried, tried, error)


def _kinds(subject: Subject) -> Iterator[GemmCase]:
    """One small GEMM of each kind, with ordinary numbers, in the form that the subject accepts."""
    seen: set[object] = set()
    for gemm in chain(gemm_cases(), islice(subject.more_gemms(), _OWN)):
        if not subject.takes(gemm) or gemm.a.size * gemm.output_shape[1] > _LARGEST:
            continue
        asked = subject.question(gemm)
        granularities = asked.granularity_a, asked.granularity_b
        options = asked.out_dtype, asked.use_fast_accum, asked.bias is None
        kind = asked.mode, granularities, asked.a.dtype, asked.b.dtype, options
        if kind not in seen and gemm.distribution in ("", "normal"):
            seen.add(kind)
            yield asked
