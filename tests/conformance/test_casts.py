"""Casts and quantizers as subjects: wrong ones are found and named, right ones are equal, dialects are named."""

import json
from pathlib import Path

import numpy as np
import pytest

from f8emu.conformance.cases.tables import float32_boundaries
from f8emu.conformance.casts import questions
from f8emu.conformance.casts.alterations import cast_alterations, scale_alterations
from f8emu.conformance.casts.contracts import Wanted
from f8emu.conformance.casts.diagnosis import diagnose_cast, diagnose_quantizer
from f8emu.conformance.casts.rules import CastRule, QuantizerRule, own_dialects
from f8emu.conformance.casts.verify import Verified, verify_function
from f8emu.conformance.compare import different
from f8emu.spec import E4M3FN, E5M2, E5M2FNUZ, FLOAT32, Overflow, SpecError
from tests.conformance.command import invoke

ANY, NONFINITE, SATURATE = Wanted(), Wanted(overflow=Overflow.NONFINITE), Wanted(overflow=Overflow.SATURATE)

WRONG_CASTS = {
    "via_float16": "it rounds twice, through float16",
    "via_bfloat16": "it rounds twice, through bfloat16",
    "ties_away": "it rounds to nearest, ties away from zero",
    "truncated": "it rounds toward zero",
    "flushed": "it flushes subnormals to zero",
    "carry_lost": "it loses the carry into the next binade",
    "top_lost": "it gives 0x7e (448) for the top binade, not 0x78 (256)",
    "infinity_to_zero": "it gives 0x00 (0) for infinity, not 0x7e (448)",
    "nan_of_zero": "it gives NaN (0x80) for negative values that become zero",
    "by_inverse": "it computes x * (1 / scale), with a rounded inverse",
    "subnormals_twice": "it rounds twice, through bfloat16; and it does so among subnormals only",
}
WRONG_QUANTIZERS = {
    "floor_1e4": "it keeps amax at least 0.0001",
    "to_416": "it scales amax to 416 instead of 448",
    "late_power": "it rounds the stored scale up to a power of two, after the codes were made",
    "narrow_scale": "it rounds the stored scale to bfloat16, after the codes were made",
    "reciprocal": "it returns the reciprocal of the scale, which is multiplied, instead of the scale that decodes",
    "quotient": "it computes codes as x / s, rounded to float32",
    "half_codes": "it rounds twice, through float16",
    "mx_reciprocal": "it returns the reciprocal of the scale, which is multiplied, instead of the scale that decodes",
    "vllm_unsigned": "as dialect vllm_token, but it loses the sign of negative zero",
}
RIGHT = {
    "by_ml_dtypes": "a non-saturating cast to float8_e4m3fnuz",
    "padded": "a saturating cast to float8_e4m3fn",
    "in_float64": "a saturating cast to float8_e5m2",
    "divided": "a saturating cast to float8_e4m3fn, x / scale",
}
QUANTIZERS = {
    "right_rows": "f8emu's rule, rowwise to float8_e4m3fn",
    "own_5": "f8emu's rule, blockwise_1x128 to float8_e5m2",
    "vllm_token": "as dialect vllm_token, vllm_weight_channel, rowwise to float8_e4m3fn",
    "deepseek_ue8m0": "as dialect sglang_weight_block_ue8m0, deep_gemm_block_ue8m0, blockwise_128x128 to float8_e4m3fn",
    "mx_rceil": "f8emu's rule, blockwise_1x32 to float8_e4m3fn",
    "mx_floor_5": "as dialect f8emu, floor, blockwise_1x32 to float8_e5m2",
    "te_current": "as dialect transformer_engine_delayed, transformer_engine_current, tensorwise to float8_e4m3fn",
}


def verified(name: str, kind: str, wanted: Wanted = ANY, arrays: str = "numpy") -> Verified:
    return verify_function(f"tests.conformance.planted_casts:{name}", kind, wanted, arrays=arrays, here=True)


def assert_named(verified: Verified, headline: str) -> None:
    assert verified.result.has_difference and verified.diagnosis is not None
    assert (verified.diagnosis.headline, verified.diagnosis.is_complete) == (headline, True)


@pytest.mark.parametrize("name", WRONG_CASTS)
def test_a_wrong_cast_is_named(name: str) -> None:
    assert_named(verified(name, "cast"), WRONG_CASTS[name])


@pytest.mark.parametrize("name", WRONG_QUANTIZERS)
def test_a_wrong_quantizer_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "vllm_unsigned":  # which meets 16 bits for all
        monkeypatch.setattr(questions, "HIGH_PRECISION", [FLOAT32])
    assert_named(verified(name, "quantize"), WRONG_QUANTIZERS[name])


def test_every_alteration_of_a_cast_is_found_again() -> None:
    x = float32_boundaries(E5M2FNUZ)
    right, ones = CastRule(format=E5M2FNUZ), np.ones_like(x)
    expected = right.cast(x)
    for step in cast_alterations(E5M2FNUZ, right.overflow):
        codes = step.of(right).cast(x).view(expected.dtype)
        if different(codes, expected).any():
            diagnosis = diagnose_cast(x, ones, codes, right)
            assert diagnosis.is_complete and len(diagnosis.alterations) == 1, (step, diagnosis)


def test_every_alteration_of_scales_is_found_again() -> None:
    r = np.random.default_rng(0)
    x = (r.standard_normal((48, 256)) * np.geomspace(1e-14, 1e4, 48)[:, None]).astype(np.float32)
    x[3] = 0
    block = (1, 256)
    right = QuantizerRule.of(own_dialects(E4M3FN, block)[0])
    for step in scale_alterations(E4M3FN, largest=416, least=1e-6):
        parts = step.of(right).parts(x, block)
        if all(not different(parts[name], part).any() for name, part in right.parts(x, block).items()):
            continue
        diagnosis = diagnose_quantizer([(x, parts["codes"], parts["scales"])], block, [right])
        assert diagnosis.is_complete and len(diagnosis.alterations) == 1, (step, diagnosis)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_cast_is_equal_and_its_contract_is_told(name: str) -> None:
    right = verified(name, "cast")
    assert right.result.is_equal and right.diagnosis is None
    assert right.follows == RIGHT[name]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_right_quantizer_is_equal_and_its_dialect_is_named(name: str) -> None:
    right = verified(name, "quantize")
    assert right.result.is_equal and right.diagnosis is None
    assert right.follows == QUANTIZERS[name]


def test_either_contract_of_overflow_can_be_asked_for() -> None:
    assert_named(verified("by_ml_dtypes", "cast", SATURATE), "it does not saturate")
    assert_named(verified("in_float64", "cast", NONFINITE), "it saturates")


def test_bytes_are_codes_of_the_format_that_is_named() -> None:
    assert verified("ours", "cast", Wanted(format=E5M2)).follows == "a saturating cast to float8_e5m2"
    with pytest.raises(SpecError, match="bytes whose format --format names, are expected; got uint8"):
        verified("ours", "cast")
    with pytest.raises(SpecError, match="got float8_e4m3fn, and --format is float8_e5m2"):
        verified("padded", "cast", Wanted(format=E5M2))


def test_casts_of_torch_are_equal_and_one_that_reads_strides_of_its_own_is_found() -> None:
    pytest.importorskip("torch")
    for name in ("by_torch", "ours_of_torch"):
        assert verified(name, "cast", arrays="torch").result.is_equal
    name = "tests.conformance.planted_casts:reads_its_own_strides"
    wrong = verify_function(name, "cast", arrays="torch", diagnose=False)
    (stage,) = wrong.result.subjects[0].stages
    differing = {name for name, tally in stage.tallies["inputs"].items() if tally.cases_differing}
    assert differing == {"memory"}


def test_a_cast_of_jax_is_equal_and_what_it_refuses_is_no_pass() -> None:
    pytest.importorskip("jax")
    right = verified("ours_of_jax", "cast", arrays="jax")
    (stage,) = right.result.subjects[0].stages
    assert (right.result.is_equal, stage.cases_equal, stage.cases_not_offered) == (True, 4, 20)


def test_a_cast_that_leaves_a_tail_unwritten_is_found_by_its_values() -> None:
    wrong = verified("unwritten_tail", "cast")
    assert wrong.diagnosis is not None and wrong.diagnosis.contradictions > 10_000
    assert wrong.diagnosis.headline.startswith("NOT EXPLAINED: 10,700 values have several codes, by place")


def test_a_cast_that_changes_its_input_is_at_fault() -> None:
    wrong = verified("changes_x", "cast")
    (stage,) = wrong.result.subjects[0].stages
    assert wrong.result.has_difference and wrong.diagnosis is None
    assert any("ChangedInput" in mismatch.error for mismatch in stage.mismatches)


def test_the_command_tells_all_of_it(tmp_path: Path) -> None:
    here = "tests.conformance.planted_casts:"
    common = ("--arrays", "numpy", "--errors", "1", "--json", tmp_path / "out.json", "--html", tmp_path / "out.html")
    status, out, _ = invoke("verify", f"{here}quotient", "--kind", "quantize", *common, COLUMNS="300")
    assert status == 1 and "it computes codes as x / s, rounded to float32" in out
    assert "x=0x" in out and "differ" in out and "--kind quantize --case" in out
    (subject,) = json.loads((tmp_path / "out.json").read_text())["subjects"]
    assert subject["follows"].startswith("f8emu's rule") and subject["function"]["complete"]
    assert "it computes codes as x / s" in (tmp_path / "out.html").read_text()
    status, out, _ = invoke("verify", f"{here}padded", "--kind", "cast", "--arrays", "numpy", COLUMNS="300")
    assert status == 0 and out.startswith("equal: every bit of") and "a saturating cast to float8_e4m3fn" in out
    for kind, words in (("cast", "codes     x's shape"), ("quantize", "function(x) -> codes, scales")):
        assert words in invoke("verify", "--contract", "--kind", kind)[1]
    assert invoke("verify", "--kind", "cast")[0] == 2
    assert invoke("verify", f"{here}padded", "--overflow", "saturate")[0] == 2
