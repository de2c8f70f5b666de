"""Kernels with E8M0 scales: what they are given, right ones, and wrong ones, which are found and named."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f8emu.conformance import MXFP8, MXFP8_SWIZZLED, ROWWISE_VECTORS, Arg, Kernel, ScaleLayout, shipped_golden
from f8emu.conformance.cases.microscaled import as_scales, mx_cases, mx_grouped_cases, near
from f8emu.conformance.compare import different
from f8emu.conformance.diagnosis.alterations import ALTERATIONS
from f8emu.conformance.diagnosis.compute import Memory, compute
from f8emu.conformance.diagnosis.fit import fit
from f8emu.conformance.diagnosis.probes import MX_KINDS, probes
from f8emu.conformance.diagnosis.rules import rules_of
from f8emu.conformance.diagnosis.search import Diagnosis, diagnose
from f8emu.conformance.run.result import Silent
from f8emu.conformance.run.runner import Runner
from f8emu.conformance.run.stages import STAGES
from f8emu.conformance.run.subject import NotOffered, Subject, kernel_subject, load_subject
from f8emu.spec import SpecError
from f8emu.spec.gemm_call import GroupKind
from tests.conformance import planted_mxfp8 as planted
from tests.conformance.command import invoke

MEMORY, RUNNER = Memory(), Runner(shipped_golden(), 5, Silent())
JUDGE = load_subject("f8ref.numpy")
NAMED: dict[Callable[..., np.ndarray], str] = {
    planted.swizzled_read_as_rows: "swizzled scales read as rows",
    planted.rows_read_as_swizzled: "scales read as swizzled",
    planted.neighbouring_block: "scale_a of block g - 1 round about",
    planted.neighbouring_row: "scale_a of row m xor 1",
    planted.scales_exchanged: "scales swapped",
    planted.scaled_after_each_block: "scales after each block",
    planted.product_in_a_byte: "product of scales saturated",
    planted.zeros_left_out: "zeros without an exponent",
    planted.nan_as_power: "byte 255 as 2^128",
    planted.zero_byte_as_zero: "byte 0 as zero",
    planted.dequantized: "float64 throughout",
    planted.steps_in_float32: "steps in float32",
    planted.padding_read: "padding of scales read",
    planted.backwards: "K backwards",
    planted.one_tiling: "one tiling for all groups",
}
"""Wrong kernels, and the one alteration that gives every bit of each."""


def judged(subject: Subject, most: float = 1 << 18) -> Any:
    """The stage of generated GEMMs, of those that have up to so many products."""
    stage = STAGES["gemms"]
    few = replace(
        stage,
        cases=lambda subject, golden: (
            case
            for case in stage.cases(subject, golden)
            if max(prod((*gemm.output_shape, gemm.k)) for gemm in case.gemms.values()) <= most
        ),
    )
    return RUNNER.stage(few, subject)


@pytest.mark.parametrize(
    ("function", "cases", "outputs"),
    [(planted.right, 59, 362_112), (planted.swizzled, 59, 362_112), (planted.grouped, 5, 34_128)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_right_kernel_passes_and_says_what_was_compared(function: Any, cases: int, outputs: int) -> None:
    """Written apart from the oracle: their agreement is evidence for both."""
    result = judged(kernel_subject(planted.kernel(function)), most=float("inf"))
    assert (result.cases_equal, result.cases_total) == (cases, cases), result.mismatches
    assert result.outputs_equal == result.outputs_total == outputs


@cache
def diagnosis_of(function: Callable[..., np.ndarray]) -> Diagnosis:
    (diagnosis,) = diagnose(kernel_subject(planted.kernel(function)), kinds=MX_KINDS, memory=MEMORY)
    return diagnosis


@pytest.mark.parametrize("function", NAMED, ids=lambda function: function.__name__)
def test_a_wrong_kernel_is_found_and_named(function: Callable[..., np.ndarray]) -> None:
    result = judged(kernel_subject(planted.kernel(function)), 1 << (21 if function is planted.one_tiling else 18))
    assert result.cases_equal < result.cases_total and result.outputs_equal < result.outputs_total
    best = diagnosis_of(function).best
    assert best is not None and best.is_complete and best.alterations == (NAMED[function],)
    assert "[MX-" in best.sentence, "it names the rule"


def test_every_alteration_of_mxfp8_shows_on_a_probe() -> None:
    kinds = [kind for kind in MX_KINDS if not kind.with_bias]
    silent = {step.name: step for step in ALTERATIONS if "MX-" in step.detail}
    assert len(silent) >= 13
    for kind in kinds:
        for probe in probes(kind, takes_any_size=True):
            case = next(probe.cases())
            right = rules_of(case.chip, case)
            output = JUDGE.gemm(case)
            expected = output if probe.at is None else output[np.ix_(*probe.at)]
            assert not different(compute(case, right, at=probe.at, memory=MEMORY), expected).any(), "the oracle again"
            for name, step in list(silent.items()):
                changed = step.change(right)
                if changed != right and different(compute(case, changed, at=probe.at, memory=MEMORY), expected).any():
                    del silent[name]
    assert not silent


# What a kernel is given


def seen(scales: Any, case: Any, arrays: Any = "numpy", **fields: Any) -> list[Any]:
    """The scales that a kernel gets for a case."""
    calls: list[list[Any]] = []

    def run(*arguments: Any) -> Any:
        calls.append(list(arguments[2:4]))
        raise NotImplementedError

    offs = (Arg.OFFS,) if case.group_kind else ()
    fields = {"multiples": (1, 1, 1), **fields}
    kernel = Kernel(
        name="x",
        function=run,
        arguments=(*planted.OPERANDS, *offs),
        scales=scales,
        chip="B200",
        arrays=arrays,
        **fields,
    )
    subject = kernel_subject(kernel)
    with pytest.raises(NotOffered):
        subject.gemm(replace(subject.question(case), out_dtype=kernel.out_dtypes[0]))
    return calls[0]


def address(row: int, block: int, blocks: int) -> int:
    """cuBLASLt's: tiles of 128 x 4, one row of tiles after the other; 32 rows of 4 x 4 in a tile."""
    tile = row // 128 * -(-blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row // 32 % 4 * 4 + block % 4


def test_swizzled_scales_lie_where_cublaslt_reads_them_among_poison() -> None:
    case = next(case for case in mx_cases() if case.output_shape == (129, 48))
    scale_a, scale_b = seen(MXFP8_SWIZZLED, case)
    for lying, scale in ((scale_a, case.scales[0]), (scale_b, case.scales[1].T)):
        codes, (rows, blocks) = lying.view(np.uint8), scale.shape
        assert codes.shape == (-(-rows // 128) * 128 * -(-blocks // 4) * 4,)
        places = [address(row, block, blocks) for row in range(rows) for block in range(blocks)]
        assert np.array_equal(codes[places], scale.view(np.uint8).ravel())
        assert (np.delete(codes, places) == 255).all(), "what is beyond the operand is NaN"


@pytest.mark.parametrize("arrays", ["torch", "jax"])
def test_a_framework_gets_scales_of_its_own_type(arrays: str) -> None:
    case = next(mx_cases())
    for scales, shape in ((MXFP8, (1, 1)), (MXFP8_SWIZZLED, (512,))):
        scale_a, _ = seen(scales, case, arrays)
        assert "float8_e8m0fnu" in str(scale_a.dtype) and tuple(scale_a.shape) == shape


def test_groups_restart_the_tiling() -> None:
    shapes = {
        GroupKind.ROWS: ((128 + 128 + 256 + 128) * 8, (5, 128 * 8)),
        GroupKind.INNER: (128 * (4 + 8 + 8), 256 * (4 + 8 + 8)),
        GroupKind.BATCH: ((3, 128 * 8), (3, 128 * 8)),
    }
    for kind, multiple in {GroupKind.ROWS: 1, GroupKind.INNER: 32, GroupKind.BATCH: 1}.items():
        case = next(mx_grouped_cases({kind: multiple}))
        tiles = seen(MXFP8_SWIZZLED, case, group_multiples={kind: multiple})
        for lying, wanted in zip(tiles, shapes[kind], strict=True):
            assert lying.shape == (wanted if isinstance(wanted, tuple) else (wanted,))
        plain = seen(MXFP8, case, group_multiples={kind: multiple})
        assert plain[0].shape == case.scales[0].shape and plain[1].shape == case.scales[1].swapaxes(-1, -2).shape


def test_operands_that_a_kernel_pads_have_scales_of_one_and_tiles_of_their_own() -> None:
    case = next(case for case in mx_cases() if case.output_shape == (5, 48))
    scale_a, scale_b = seen(MXFP8, case, multiples=(16, 64, 128))
    assert (scale_a.shape, scale_b.shape) == ((16, 16), (64, 16))
    assert (scale_a.view(np.uint8)[5:] == 127).all() and (scale_a.view(np.uint8)[:, 13:] == 127).all()
    wider = {pair: (ScaleLayout(k_multiple=4), ScaleLayout(k_first=True)) for pair in MXFP8}
    scale_a, scale_b = seen(wider, case)
    assert (scale_a.view(np.uint8)[:, 13:] == 255).all() and scale_b.shape == (13, 48)


def test_neighbours_have_other_scales() -> None:
    codes = near(300, 20).view(np.uint8)
    for rows, blocks in ((1, 0), (0, 1), (0, 4), (8, 0), (32, 0), (128, 0)):
        assert (codes[rows:, blocks:] != codes[: 300 - rows, : 20 - blocks]).all(), (rows, blocks)
    assert as_scales(np.array([0, 255])).dtype.name == "float8_e8m0fnu"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scales": MXFP8}, "pass chip='B200'"),
        ({"scales": ROWWISE_VECTORS, "chip": "B200"}, "Hopper beside other scales"),
        ({"scales": {**MXFP8, **ROWWISE_VECTORS}, "chip": "B200"}, "declare two kernels"),
        ({"scales": MXFP8, "chip": "L4"}, "no GEMM with E8M0 scales"),
    ],
)
def test_a_declaration_that_no_chip_has_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Kernel(name="x", function=planted.right, arguments=planted.OPERANDS, **fields)


def test_fit_says_that_it_measures_no_such_kernel() -> None:
    result = fit(kernel_subject(planted.kernel(planted.right)))
    assert not result.kinds and "nothing to fit: no GEMM is offered: no probes measure" in repr(result)


def test_an_rtx_chip_is_judged_as_itself() -> None:
    subject = kernel_subject(planted.kernel(planted.right, chip="RTX 5090"))
    question = subject.question(next(mx_cases()))
    result = judged(subject, 1 << 14)
    assert question.chip.name == "RTX Blackwell" and 0 < result.cases_equal == result.cases_total


def test_the_command_reports_in_80_columns_and_as_json(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(
        "from tests.conformance import planted_mxfp8 as planted\nKERNEL = planted.kernel(planted.neighbouring_block)\n"
    )
    code, out, _ = invoke(
        "verify", f"{path}:KERNEL", "--errors", 2, "--json", tmp_path / "out.json", "--here", COLUMNS="80"
    )
    assert code == 1
    lines = out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("f8emu verify")) <= 80
    assert any("it gives block g the scale_a of block g - 1" in line for line in lines)
    report = json.loads((tmp_path / "out.json").read_text())
    (subject,) = report["subjects"]
    assert subject["diagnosis"][0]["best"]["alterations"] == ["scale_a of block g - 1 round about"]
