"""`f8emu fit`: rules of planted kernels measured and confirmed, rows that depend on M, the command line, Ctrl-C."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f8emu.conformance import shipped_golden
from f8emu.conformance.cases.tables import gemm_cases
from f8emu.conformance.compare import different
from f8emu.conformance.diagnosis import checks
from f8emu.conformance.diagnosis import fit as fitting
from f8emu.conformance.diagnosis import search as searching
from f8emu.conformance.diagnosis.alterations import ALTERATIONS
from f8emu.conformance.diagnosis.checks import RandomGemms
from f8emu.conformance.diagnosis.compute import compute
from f8emu.conformance.diagnosis.fit import Fit, Fitted, fit
from f8emu.conformance.diagnosis.observations import NoOutput, observe_probes
from f8emu.conformance.diagnosis.probes import KINDS, probes
from f8emu.conformance.diagnosis.rules import Rounding, Rules, ScaleOrder, rules_of
from f8emu.conformance.diagnosis.search import Diagnosis, Explanation, diagnosed
from f8emu.conformance.kernels.imported import INTERPRETED
from f8emu.conformance.run.result import Silent
from f8emu.conformance.run.subject import Subject, kernel_subject, load_subject, scaled_mm_kernel
from f8emu.conformance.run.verify import Result, StageResult, SubjectResult
from f8emu.report.diagnosis import diagnosis_lines, fit_lines, fit_verdict
from f8emu.spec import HOPPER, OperandError
from f8emu.verdict import Exit
from tests.conformance import command
from tests.conformance.planted_gemm import failing, spoilt, subject_of
from tests.conformance.planted_gemm import subject as planted

BY_NAME = {kind.name: kind for kind in KINDS}
FAST, PROMOTED, SQUARE = "rowwise fast", "rowwise promoted", "blockwise_1x128 x blockwise_128x128"


@pytest.fixture(autouse=True)
def _small_random_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted kernels are slow, and 16 rows and columns of each are looked at, however large it is."""
    monkeypatch.setattr(checks, "_SIZE", 16)
    for name, k in (("_K", 2048), ("_MIDDLE_K", 256), ("_LONG_K", 2176)):
        monkeypatch.setattr(checks, name, k)


def test_the_right_rules_are_the_oracle() -> None:
    oracle = load_subject("f8ref.numpy")
    for case in (case for case in gemm_cases() if case.verb == "scaled_mm"):
        output, expected = compute(case, rules_of(HOPPER, case)), oracle.gemm(case)
        assert output.dtype == expected.dtype and not different(output, expected).any(), case.id


def rules_for(kind: str) -> Rules:
    return rules_of(HOPPER, probes(BY_NAME[kind], takes_any_size=True)[0].case)


def fitted(kind: str, subject: Subject, *ms: int) -> Fitted:
    result = fit(subject, kinds=[BY_NAME[kind]], ms=ms or (1, 16))
    (kernel,) = result.kinds
    assert not kernel.error and kernel.rules is not None and not result.is_interrupted
    return kernel


@pytest.mark.parametrize(
    ("kind", "knobs", "expected"),
    [
        (FAST, {}, {}),
        # no hypothesis of the diagnosis: the order of adding shows it
        (
            PROMOTED,
            {"promote": 96, "step": 16, "to_integer": np.rint},
            {"promote_k": 96, "step_k": 16, "terms": Rounding.NEAREST, "sums": Rounding.NEAREST},
        ),
        (PROMOTED, {"promote": 32, "order": "acc*(sa*sb)"}, {"promote_k": 32, "scales": ScaleOrder.PRODUCT}),
        (
            FAST,
            {"slices": 3, "flush": True, "term_bits": 25, "sum_bits": 23},
            {"split_k": 3, "flushes_operands": True, "aligned_fraction_bits": 25, "result_fraction_bits": 23},
        ),
        (SQUARE, {"order": "fma(p*sa,sb)"}, {"scales": ScaleOrder.FMA_ROW_FIRST}),
    ],
    ids=lambda value: ", ".join(f"{k}={v}" for k, v in value.items()) or "right" if isinstance(value, dict) else value,
)
def test_rules_are_found_and_confirmed(kind: str, knobs: dict[str, Any], expected: dict[str, Any]) -> None:
    kernel = fitted(kind, planted(**knobs))
    right = rules_for(kind)
    numbers = {name: value for name, value in expected.items() if hasattr(right.model, name)}
    others = {name: value for name, value in expected.items() if name not in numbers}
    wanted = replace(right, model=replace(right.model, **numbers), **others)
    assert kernel.rules == wanted
    assert kernel.is_confirmed and kernel.random is not None
    assert kernel.random.outputs_total == 256 * 3 * (5 if kernel.kind == SQUARE else 7)
    assert kernel.follows == ("" if expected else HOPPER.name)
    assert kernel.is_batch_invariant


def test_rows_that_depend_on_m() -> None:
    few, many = (planted(slices=slices).verbs["scaled_mm"] for slices in (4, 1))

    def kernel(a: np.ndarray, *args: Any, **options: Any) -> np.ndarray:
        return (few if a.shape[0] <= 16 else many)(a, *args, **options)

    rows = fitted(FAST, subject_of(kernel), 1, 16, 17, 64)
    assert rows.is_batch_invariant is False
    assert {size.name: (size.is_same, size.split_k) for size in rows.sizes} == {
        "M = 64": (True, 1), "M = 17": (True, 1), "M = 16": (False, 4), "M = 1": (False, 4),
        "N = 288": (True, 2), "N = 2064": (True, 1), "K = 2176": (True, 1),
    }  # fmt: skip
    assert not rows.missed, "another split of K is told apart from what is wrong"
    assert f"{FAST}: bits of a row DEPEND on M (other bits at 1, 16)" in fit_lines(rows)


def test_bits_that_are_random_are_not_put_down_to_m() -> None:
    """S is 1 or 2, by chance at every call."""
    kernels, chance = [planted(slices=slices).verbs["scaled_mm"] for slices in (1, 2)], np.random.default_rng(0)
    kernel = fitted(FAST, subject_of(lambda *args, **options: kernels[chance.integers(2)](*args, **options)), 1, 16, 17)
    assert kernel.is_random and kernel.is_batch_invariant is None and not kernel.is_confirmed and not kernel.missed
    lines = [*fit_lines(kernel), fit_verdict(Fit(subject="x", engine="y", kinds=[kernel])).line]
    assert any("bits are RANDOM: the same GEMM, asked again, gave other bits" in line for line in lines), lines
    assert "bits are random: rowwise fast" in lines[-1] and not any("on M" in line for line in lines), lines


SPOILT: dict[str, tuple[Callable[[np.ndarray, np.ndarray], None], list[str]]] = {
    "right": (lambda a, out: None, []),
    "rows from 128": (
        lambda a, out: out[128:].fill(0),
        ["M = 256", "M = 129", "M = 4112", "M = 1040", "M = 513", "M = 257", "K = 2176"],
    ),
    "the last tile of rows": (lambda a, out: out[250:].fill(0) if len(a) == 256 else None, ["M = 256"]),
    "rows from 256": (lambda a, out: out[256:].fill(0), ["M = 4112", "M = 1040", "M = 513", "M = 257"]),
    "rows from 4096": (lambda a, out: out[4096:].fill(0), ["M = 4112"]),
    "columns from 2048": (lambda a, out: out[:, 2048:].fill(0), ["N = 2064"]),
    "a long K, rows from 64": (lambda a, out: out[64:].fill(0) if a.shape[1] > 2048 else None, ["K = 2176"]),
    "one row": (lambda a, out: out[:1].fill(0) if len(a) == 1 else None, ["M = 1"]),
    "columns from 128": (lambda a, out: out[:, 128:].fill(0), ["N = 288", "N = 2064"]),
    "a long K": (lambda a, out: out[:, :1].fill(0) if a.shape[1] > 2048 else None, ["K = 2176"]),
}


@pytest.mark.parametrize(("spoil", "missed"), SPOILT.values(), ids=SPOILT)
def test_sizes_at_which_rules_do_not_hold(
    spoil: Callable[[np.ndarray, np.ndarray], None], missed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_K", 160)
    monkeypatch.setattr(checks, "MS", (1, 16, 129, 256))
    sizes = list(checks.at_sizes(spoilt(spoil), BY_NAME[FAST], rules_for(FAST)))
    assert [size.name for size in sizes if size.misses] == missed
    whole = Fitted(kind=FAST, random=RandomGemms(outputs_equal=9, outputs_total=9), sizes=sizes)
    assert whole.is_confirmed == (not missed)
    verdict = fit_verdict(Fit(subject="x", engine="y", kinds=[whole])).line
    assert ("1 of 1" in verdict) == (not missed) and all(name in verdict for name in missed), verdict
    assert verdict.endswith("; looked up to M = 4112, N = 2064, K = 2176, one dimension at a time")
    assert INTERPRETED in fit_verdict(Fit(subject="x", engine=f"y, {INTERPRETED}", kinds=[whole])).line


def test_a_size_that_did_not_run_shows_nothing() -> None:
    """Refused by our own library, which is no failure, or padded to more rows."""
    refuses = command.raising(OperandError("M must be a multiple of 4"))
    for takes_any_size in (False, True):
        subject = replace(subject_of(refuses), takes_any_size=takes_any_size)
        sizes = list(checks.at_sizes(subject, BY_NAME[FAST], rules_for(FAST), (1,)))
        assert all("multiple of 4" in size.reason and size.has_failed == takes_any_size for size in sizes), sizes
    kernel = replace(scaled_mm_kernel("x", lambda *operands, **options: operands[0]), multiples=(16, 16, 16))
    *refused, _, _, _ = checks.at_sizes(kernel_subject(kernel, "numpy"), BY_NAME[FAST], rules_for(FAST), (1, 17))
    assert [size.reason for size in refused] == ["x takes it padded to 32 rows", "x takes it padded to 16 rows"]


def test_random_gemms_ask_formats_outputs_and_twice() -> None:
    """A fault in one output type or in one pair of formats, of the order of calls, of a buffer that is used again."""
    verb, outputs = load_subject("f8ref.numpy").verbs["scaled_mm"], dict[Any, np.ndarray]()

    def confirmed(change: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> RandomGemms:
        def kernel(a: np.ndarray, b: np.ndarray, *args: Any, **options: Any) -> np.ndarray:
            return change(a, b, verb(a, b, *args, **options).copy())

        subject = subject_of(kernel)
        return checks.on_random_gemms(subject, BY_NAME[FAST], rules_for(FAST))

    def reused(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
        buffer = outputs.setdefault((out.shape, out.dtype), out)
        buffer[:] = out
        return buffer

    right = confirmed(lambda a, b, out: out)
    assert right.outputs_equal == right.outputs_total > 0 and not right.unsteady and right.left is None
    assert "wrote to its output" in confirmed(reused).unsteady
    calls = iter(range(100))
    late = confirmed(lambda a, b, out: out if next(calls) < 21 else -out)
    assert late.outputs_equal == late.outputs_total and late.unsteady.endswith("it gave other bits")
    left = confirmed(lambda a, b, out: -out if b.dtype.name == "float8_e5m2" else out).left
    assert left is not None and left.names == ("operands: float8_e4m3fn x float8_e5m2",), left
    left = confirmed(lambda a, b, out: -out if out.dtype == np.float16 else out).left
    assert left is not None and left.names == ("output: float16",), left


def test_a_kernel_that_fails_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one of the random GEMMs, or with one number of rows: that is no GEMM which is not offered."""
    verb = planted().verbs["scaled_mm"]

    def kernel(a: np.ndarray, *args: Any, **options: Any) -> np.ndarray:
        if a.shape[1] == 1168 or a.shape[0] == 7:
            raise RuntimeError("illegal memory access")
        return verb(a, *args, **options)

    subject = subject_of(kernel)
    result = fit(subject, kinds=[BY_NAME[PROMOTED]])
    (kind,) = result.kinds
    assert "illegal memory access" in kind.error and not kind.is_confirmed and not result.is_confirmed
    assert kind.rules == rules_for(PROMOTED)
    monkeypatch.setattr(fitting, "on_random_gemms", lambda *args: RandomGemms(outputs_equal=1280, outputs_total=1280))
    monkeypatch.setattr(fitting, "_of_probes", lambda rules, *args: (rules, []))
    result = fit(subject, kinds=[BY_NAME[PROMOTED]], ms=(7, 16))
    (kind,) = result.kinds
    assert kind.holds_on_random and not kind.is_confirmed and kind.is_batch_invariant is False
    assert any("M = 7: FAILED: " in line and "illegal memory access" in line for line in fit_lines(kind))


def test_probes_on_which_a_kernel_raises_are_left_out() -> None:
    """Measured without them, and told."""
    subject, _ = failing(lambda _, k: k == 240, RuntimeError("compilation failed"), promote=64)
    (kind,) = fit(subject, kinds=[BY_NAME[PROMOTED]], ms=(16,)).kinds
    assert kind.is_confirmed and kind.rules is not None and kind.rules.model.promote_k == 64
    assert "probes failed, first: " in kind.left_out
    assert next(fit_lines(kind)) == f"{PROMOTED}: left out: {kind.left_out}"


@pytest.mark.parametrize("share", [0, 0.4])
def test_what_a_few_outputs_show_is_undecided(share: float) -> None:
    """Of a kernel with a share of wrong signs: no option gives nine of ten outputs of its probes."""
    noise = np.random.default_rng(0)
    verb = planted().verbs["scaled_mm"]

    def kernel(*args: Any, **options: Any) -> np.ndarray:
        output = verb(*args, **options)
        return np.where(noise.random(output.shape) < share, -output, output)

    answer, right = observe_probes(subject_of(kernel), BY_NAME[FAST]), rules_for(FAST)
    assert not isinstance(answer, NoOutput)
    _, measured = fitting._of_probes(right, right, answer[0], Silent(), "x")
    assert {row.value.startswith("undecided; best: ") for row in measured} == {share > 0}, measured


def test_ctrl_c_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "on_random_gemms", command.raising(KeyboardInterrupt()))
    result = fit(planted(promote=64), kinds=[BY_NAME[PROMOTED], BY_NAME[FAST]])
    assert result.is_interrupted and [kind.kind for kind in result.kinds] == [PROMOTED]
    assert result.kinds[0].rules is not None and result.kinds[0].rules.model.promote_k == 64
    assert not result.is_confirmed


KERNEL = """
import os
import numpy as np

def exact(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    if bias is not None or np.ndim(scale_a) != 0 or out_dtype != np.float32:
        raise NotImplementedError("tensorwise to float32")
    with np.errstate(all="ignore"):
        acc = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
        return acc * (scale_a * scale_b) + np.float32(0)

def far(a, *args, **options):
    output = exact(a, *args, **options)
    output[128:] = 0
    return output

def exits(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    raise SystemExit(0)

def leaves(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    os._exit(3)

def none(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    raise NotImplementedError("nothing")
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fit_kernels.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def invoke(*arguments: object, columns: str = "120") -> tuple[int, str]:
    status, *texts = command.invoke(*arguments, COLUMNS=columns)
    return status, "".join(texts)


def test_command_line(kernels: Path) -> None:
    out = kernels / "fit.json"
    options = ("--arrays", "numpy", "--kind", "tensorwise fast", "--m", "1", "--m", "32", "--json", str(out))
    status, text = invoke("fit", "fit_kernels:exact", *options)
    assert status == 0, text
    assert "nothing is lost" in text and "confirmed on random GEMMs, 1,792/1,792 outputs equal" in text
    assert "do not depend on M (1, 32)" in text
    (kind,) = json.loads(out.read_text())["kinds"]
    assert kind["rules"]["adder"] == "exact" and kind["in_words"][0].startswith("order of adding: nothing is lost")
    assert kind["batch_invariant"] is True
    assert kind["outputs_equal"] == kind["outputs_total"] == 1792
    narrow = invoke("fit", "fit_kernels:exact", *options, columns="50")[1]
    assert max(map(len, narrow.splitlines())) <= 50
    status, text = invoke("fit", "fit_kernels:leaves", *options, "--timeout", "60")
    assert status == 1 and "its process exited with status 3" in text
    status, text = invoke("fit", "fit_kernels:exits", *options)
    assert status == 1 and "raised SystemExit" in text and "0 of 1 kinds of GEMM confirmed" in text
    status, text = invoke("fit", "fit_kernels:far", *options[:-2], "--m", "129")
    assert status == Exit.INCOMPLETE == 3, text
    assert "M = 129: the bits of the largest M; " in text and "MISSES THE RULES, no split explains it" in text
    missed = "0 of 1 kinds of GEMM confirmed at every size tried; MISS THE RULES at another size: tensorwise fast (M ="
    assert missed in " ".join(text.split())
    text = " ".join(text.split())
    assert "confirmed on random GEMMs, 1,792/1,792 outputs equal; NOT at M = 129" in text
    assert "unconfirmed rules: `f8emu verify fit_kernels:far --arrays numpy --errors 1` gives" in text
    words = " ".join(invoke("fit", "--help")[1].replace("│", " ").split())
    assert "; 3 random GEMMs confirm the rules" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit_kernels:none", "--arrays", "numpy"), "nothing to fit: no GEMM is offered: nothing"),
        (("fit_kernels:exact", "--kind", "fast"), "known kinds are tensorwise fast"),
        (("no_such_subject",), "unknown subject"),
    ],
)
def test_nothing_to_fit(arguments: tuple[str, ...], message: str, kernels: Path) -> None:
    status, text = invoke("fit", *arguments)
    assert status == 2 and message in text


def test_verify_diagnoses_what_differs(kernels: Path) -> None:
    out, few = kernels / "report.json", kernels / "few.safetensors"
    command.few_recorded(few, 2)
    options = ("--arrays", "numpy", "--golden", few, "--stage", "golden", "--json", out)
    status, text = invoke("verify", "fit_kernels:exact", *options)
    assert status == 1
    assert "all 2 kinds of GEMM: explained: exact accumulation" in text
    kinds = json.loads(out.read_text())["subjects"][0]["diagnosis"]
    assert {kind["kind"]: kind["best"]["alterations"] for kind in kinds} == {
        "tensorwise fast": ["exact accumulation"],
        "tensorwise promoted": ["exact accumulation"],
    }
    status, text = invoke("verify", "fit_kernels:exact", *options, "--no-diagnose")
    assert status == 1 and "explained" not in text
    status, text = invoke("verify", "f8ref.numpy", "--golden", str(few), "--stage", "golden")
    assert status == 0 and "diagnosed" not in text


def test_a_diagnosis_that_fails_loses_no_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one subject; and what the lines say of right kernels, and of kinds that nothing explains."""
    stage = StageResult(stage="gemms", title="x", oracle="x", cases_total=1)
    subjects = [replace(planted(), name=name) for name in ("failing", "right", "odd")]
    judged = [SubjectResult(name=subject.name, engine="x", stages=[stage]) for subject in subjects]
    result = Result(golden=shipped_golden(), subjects=judged)
    right_rules = rules_for(FAST)

    def explanation(equal: int) -> Explanation:
        return Explanation(
            steps=ALTERATIONS[equal:][:1], rules=right_rules, right=right_rules, outputs_equal=equal, outputs_total=9
        )

    right = {"outputs_equal": 9}
    odd = {"outputs_equal": 5, "best": explanation(7), "tried": tuple(map(explanation, (7, 6, 5)))}

    def diagnose(subject: Subject, **options: Any) -> tuple[Diagnosis, ...]:
        if subject.name == "failing":
            raise MemoryError("no room")
        known: dict[str, Any] = right if subject.name == "right" else odd
        return tuple(Diagnosis(kind=kind.name, cases=1, outputs_total=9, **known) for kind in KINDS)

    monkeypatch.setattr(searching, "diagnose", diagnose)
    same, diagnoses = diagnosed(result, subjects)
    assert same is result and list(diagnoses) == ["failing", "right", "odd"]
    assert diagnoses["failing"][0].error == "MemoryError: no room" and not diagnoses["failing"][0].is_right
    lines = {name: list(diagnosis_lines(name, diagnoses[name]))[1:] for name in diagnoses}
    assert lines["failing"] == ["  all kinds: not diagnosed: MemoryError: no room"]
    assert "the probes do not show it" in lines["right"][-1] and len(lines["right"]) == 2
    assert len(lines["odd"]) == 1 and f"{7 * len(KINDS)}/{9 * len(KINDS)} outputs equal" in lines["odd"][0]
    assert not any("do not show" in line for line in lines["odd"])
