"""How much of the recorded hardware each rule explains: one is altered at a time, and the recording replayed.

    python -m benchmarks.proofs.evidence     all recorded cases, written to benchmarks/results/evidence.json

Recorded are the shipped GEMMs of an H200, and those of `tests/conformance/data`: epilogues and groups, which the
shipped ones do not tell apart. Every rule of a Hopper GEMM in `reference/NUMERICS.md` has an alteration. One that
changes no recorded output would mean that nothing recorded supports the rule; it is listed with 0, and the exit status
is then 1.
"""

import argparse
import importlib
import json
import multiprocessing
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import f8ref.numpy as f8
import f8ref.numpy.accumulate as accumulate_module
from f8emu.conformance.cases.golden import GoldenCase, GoldenFile, read_golden, shipped_golden
from f8emu.conformance.compare import different
from f8emu.conformance.record.record import tracked
from f8emu.spec import BFLOAT16, FLOAT32, HOPPER, AccumulationModel, Format
from f8ref.numpy.accumulate import Decoded
from f8ref.numpy.codec import ABSENT, Array

# As an attribute of `f8ref.numpy` the name is the verb.
scaled_mm_module = importlib.import_module("f8ref.numpy.scaled_mm")
DATA = Path(__file__).parents[2] / "tests" / "conformance" / "data"
RECORDED = Path(__file__).parents[1] / "results" / "evidence.json"
_VERBS = {name: getattr(f8, name) for name in ("scaled_mm", "scaled_grouped_mm", "mm")}
_CHIP = HOPPER  # what the oracle computes with; exchanged by an alteration

Patch = tuple[Any, str, Any]


def _models(**changes: object) -> list[Patch]:
    names = ("float8", "float8_fast", "block_scaled")
    return _chip(**{name: replace(getattr(HOPPER, name), **changes) for name in names})


def _bf16(**changes: object) -> list[Patch]:
    return _chip(bfloat16=replace(HOPPER.bfloat16, **changes))


def _chip(**changes: Any) -> list[Patch]:
    return [(sys.modules[__name__], "_CHIP", replace(HOPPER, **changes))]


def _accumulating(altered: Callable[[AccumulationModel, int], tuple[AccumulationModel, int]]) -> list[Patch]:
    """The model and S with which every GEMM is accumulated."""

    def accumulate(a: Any, b: Any, model: AccumulationModel, split_k: int = 1) -> Any:
        return _accumulate(a, b, *altered(model, split_k))

    return [(scaled_mm_module, "accumulate", accumulate)]


def _promoted_every(k: int) -> list[Patch]:
    return _accumulating(lambda model, split_k: (replace(model, promote_k=model.promote_k and k), split_k))


def _normalized_operand(x: Any, format: Any, model: Any) -> Decoded:
    """Subnormal operands with the exponent of their first one, as if the multiplier normalised them."""
    whole = _operand(x, format, model)
    first_one = np.frexp(whole.values)[1] - 1
    return whole._replace(exponents=np.where(whole.exponents == ABSENT, ABSENT, first_one))


def _zeros_with_exponents(x: Any, format: Format, model: Any) -> Decoded:
    """Zeros with the exponent of subnormals, as if their products counted."""
    whole = _operand(x, format, model)
    return whole._replace(exponents=np.where(whole.exponents == ABSENT, format.min_exponent, whole.exponents))


def _normalized_products(a: Decoded, b: Decoded) -> tuple[Any, Any]:
    product, exponent = _products(a, b)
    return product, np.where(np.isfinite(product) & (product != 0), np.frexp(product)[1] - 1, exponent)


def _products_without_nan(a: Decoded, b: Decoded) -> tuple[Any, Any]:
    product, exponent = _products(a, b)
    return np.where(np.isnan(product), 0, product), exponent


def _added_in_halves(terms: Any, start: Any) -> Any:
    """Each half of the terms cut to 14 significant bits before they are added."""
    halves = [part.sum(axis=0) for part in np.array_split(terms, 2)]
    units = [np.exp2(np.maximum(np.frexp(half)[1] - 14, 0)) for half in halves]
    return sum(np.trunc(half / unit) * unit for half, unit in zip(halves, units, strict=True)) + start


def _converted_toward_zero(x: np.ndarray, format: Format) -> Array:
    return _code_before(x, format, lambda converted: np.abs(converted) > np.abs(x))


def _converted_with_saturation(x: np.ndarray, format: Format) -> Array:
    return _code_before(x, format, lambda converted: np.isinf(converted) & np.isfinite(x))


def _code_before(x: np.ndarray, format: Format, where: Callable[[np.ndarray], np.ndarray]) -> Array:
    converted = _convert(x, format)
    if format == FLOAT32:
        return converted
    return (converted.view(np.uint16) - where(converted.astype(np.float32)).astype(np.uint16)).view(converted.dtype)


def _bias_on_bfloat16(result: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return _convert(result, BFLOAT16).astype(np.float32) + bias


def _exact_by_row(acc: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray) -> np.ndarray:
    return (acc * scale_b).astype(np.float64) * scale_a  # 48 bits: float64 holds the product


def _bias_fused(result: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """A fused multiply-add: the product with the last scale is not rounded before the bias is added."""
    return scaled_mm_module.rounded_sum(result, bias) if result.dtype == np.float64 else result + bias


def _converted_from_exact(x: np.ndarray, format: Format) -> Array:
    return _convert(x.astype(np.float32), format)


def _two_roundings(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    return (x * y).astype(np.float32) + z


_operand, _accumulate = scaled_mm_module.operand, scaled_mm_module.accumulate
_products, _convert = accumulate_module.products, scaled_mm_module.convert
_a_then_b, _b_then_a = scaled_mm_module.scaled_in_groups, scaled_mm_module.scaled_by_row
_SPLIT = "CHAIN-3, BF16-2"
# Alteration -> the rules that it breaks, and the parts of the oracle that it exchanges.
ALTERATIONS: dict[str, tuple[str, list[Patch]]] = {
    "subnormal operands normalised": ("OP-1", [(scaled_mm_module, "operand", _normalized_operand)]),
    "zeros take part in the largest exponent": ("OP-2", [(scaled_mm_module, "operand", _zeros_with_exponents)]),
    "products normalised": ("OP-2", [(accumulate_module, "products", _normalized_products)]),
    "steps of 16": ("ACC-1", _models(step_k=16)),
    "steps of 64": ("ACC-1", _models(step_k=64)),
    "the accumulator takes no part in the largest exponent": (
        "ACC-2",
        [(accumulate_module, "exponents_of", lambda accumulator, format: np.full(accumulator.shape, ABSENT))],
    ),
    "terms cut to 12 fraction bits": ("ACC-3", _models(aligned_fraction_bits=12)),
    "terms cut to 14 fraction bits": ("ACC-3", _models(aligned_fraction_bits=14)),
    "terms cut toward minus infinity": ("ACC-3", [(accumulate_module, "cut", np.floor)]),
    "terms added in two halves of 14 bits": ("ACC-4", [(accumulate_module, "added", _added_in_halves)]),
    "results cut to 12 fraction bits": ("ACC-5", _models(result_fraction_bits=12)),
    "results cut to 14 fraction bits": ("ACC-5", _models(result_fraction_bits=14)),
    "fast accumulation promoted every 128": ("CHAIN-1", _chip(float8_fast=replace(HOPPER.float8_fast, promote_k=128))),
    "promotion every 96": ("CHAIN-2", _promoted_every(96)),
    "promotion every 256": ("CHAIN-2", _promoted_every(256)),
    "split-K ignored": (_SPLIT, _accumulating(lambda model, split_k: (model, 1))),
    "split-K slices rounded up to 32": (
        _SPLIT,
        _accumulating(lambda model, split_k: (replace(model, split_k_multiple=32), split_k)),
    ),
    "tensorwise: -0 kept": (
        "EPI-1",
        [(scaled_mm_module, "scaled_by_tensor", lambda acc, scale_a, scale_b: acc * (scale_a * scale_b))],
    ),
    "tensorwise: one scale after the other": ("EPI-1", [(scaled_mm_module, "scaled_by_tensor", _a_then_b)]),
    "rowwise: the scales of rows first": ("EPI-2", [(scaled_mm_module, "scaled_by_row", _a_then_b)]),
    "the bias added to a result rounded to bfloat16": ("EPI-3", [(scaled_mm_module, "with_bias", _bias_on_bfloat16)]),
    "rowwise: the bias in a fused multiply-add": (
        "EPI-3",
        [
            (scaled_mm_module, "scaled_by_row", _exact_by_row),
            (scaled_mm_module, "with_bias", _bias_fused),
            (scaled_mm_module, "convert", _converted_from_exact),
        ],
    ),
    "output cut toward zero": ("EPI-4", [(scaled_mm_module, "convert", _converted_toward_zero)]),
    "output saturates": ("EPI-4", [(scaled_mm_module, "convert", _converted_with_saturation)]),
    "groups: the scales of columns first": ("EPI-6", [(scaled_mm_module, "scaled_in_groups", _b_then_a)]),
    "NaN terms count as 0": ("SPEC-1", [(accumulate_module, "products", _products_without_nan)]),
    "blockwise product rounded before its sum": ("EPI-5", [(scaled_mm_module, "fma", _two_roundings)]),
    "bfloat16: steps of 8": ("BF16-1", _bf16(step_k=8)),
    "bfloat16: steps of 32": ("BF16-1", _bf16(step_k=32)),
    "bfloat16: terms cut to 24 fraction bits": ("BF16-1", _bf16(aligned_fraction_bits=24)),
    "bfloat16: terms cut to 26 fraction bits": ("BF16-1", _bf16(aligned_fraction_bits=26)),
}


@contextmanager
def altered(patches: list[Patch]) -> Iterator[None]:
    """The oracle with some of its parts exchanged."""
    with ExitStack() as stack:
        for patched in patches:
            stack.enter_context(patch.object(*patched))
        yield


def recordings() -> list[GoldenFile]:
    """The shipped one, and those of the tests."""
    return [shipped_golden(), *(read_golden(path) for path in sorted(DATA.glob("[eg]*.safetensors")))]


def changed(recorded: Sequence[GoldenCase]) -> tuple[int, int]:
    """Recorded cases, and outputs, that differ from what the oracle gives now."""
    verbs = {name: partial(verb, chip=_CHIP) for name, verb in _VERBS.items()}
    cases = outputs = 0
    for case in recorded:
        count = int(different(case.gemm.run(verbs), case.out).sum())
        cases, outputs = cases + bool(count), outputs + count
    return cases, outputs


def replayed(name: str) -> dict[str, object]:
    """What an alteration changes, or `none`."""
    rules, patches = ALTERATIONS.get(name, ("", []))
    with altered(patches):
        cases, outputs = changed([case for golden in recordings() for case in golden.cases])
    return {"rules": rules, "alteration": name, "cases": cases, "outputs": outputs}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RECORDED)
    options = parser.parse_args(arguments)
    files = recordings()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        names = ["none", *ALTERATIONS]
        rows = list(tracked(pool.map(replayed, names), "replaying", len(names)))
    for row in rows:
        print(f"{row['cases']:4d} cases {row['outputs']:8d} outputs change: {row['rules']:16} {row['alteration']}")
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.proofs.evidence", *(arguments or sys.argv[1:])]),
        "golden": [f"{len(golden.cases)} cases recorded on {golden.device}" for golden in files],
        "machine": platform.processor() or platform.machine(),
        "numpy": np.__version__,
        "alterations": rows,
    }
    options.json.write_text(json.dumps(record, indent=2) + "\n")
    is_changed = [bool(row["outputs"]) for row in rows]
    return int(is_changed != [False] + [True] * len(ALTERATIONS))


if __name__ == "__main__":
    sys.exit(main())
