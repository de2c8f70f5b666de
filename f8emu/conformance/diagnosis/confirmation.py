"""Random GEMMs that confirm or refute rules: none of them took part in finding these."""

from collections.abc import Iterator

import numpy as np

from f8emu.conformance.diagnosis.asked import NoAnswer, ask_one
from f8emu.conformance.diagnosis.probe import Kind
from f8emu.conformance.diagnosis.reading import Part
from f8emu.conformance.diagnosis.rules import Rules
from f8emu.conformance.distributions import rng
from f8emu.conformance.gemm import GemmCase
from f8emu.conformance.gemm_cases import scaled_case
from f8emu.conformance.subject import Subject
from f8emu.spec import BFLOAT16, FLOAT16, FLOAT32, HOPPER, Format

_DISTRIBUTIONS = ("normal", "bits", "same", "cancellation", "subnormals")
_SIZE = 128
_LOOKED_AT = 16
"""Rows and columns of each that are compared: the subject runs all, the rules a sample."""


def confirmed(subject: Subject, kind: Kind, rules: Rules) -> tuple[int, int] | str:
    """(outputs that the rules give bit for bit, all outputs), or what the subject failed with."""
    equal = total = 0
    for number, distribution in enumerate(_DISTRIBUTIONS):
        for case, at in _cases(kind, number, distribution):
            one = ask_one(subject, case, at)
            if not isinstance(one, NoAnswer):
                equal += one.outputs_equal(rules)
                total += one.size
                break
            if not one.is_refusal:
                return one.reason
    return equal, total


def _cases(kind: Kind, number: int, distribution: str) -> Iterator[tuple[GemmCase, Part]]:
    """One GEMM in each output type; the first that the subject offers counts."""
    types: tuple[Format, ...] = (BFLOAT16, FLOAT16) if kind.with_bias else (FLOAT32, BFLOAT16, FLOAT16)
    lengths = (384, 1152) if kind.pair[0].is_blockwise else (1168, 1040)
    name = f"confirmation {kind.name} {distribution}"
    for out_dtype in types:
        case = scaled_case(
            name,
            kind.pair,
            HOPPER.format_pairs[0],
            (_SIZE, _SIZE, lengths[number % 2]),
            distribution,
            with_bias=kind.with_bias,
            out_dtype=out_dtype,
            use_fast_accum=kind.use_fast_accum,
        )
        r = rng(name)
        yield case, (places(r, _SIZE), places(r, _SIZE))


def places(r: np.random.Generator, size: int, count: int = _LOOKED_AT) -> np.ndarray:
    """Some rows or columns, in order."""
    return np.sort(r.choice(size, min(count, size), replace=False))
