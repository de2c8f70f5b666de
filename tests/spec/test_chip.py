"""What a chip multiplies and how it adds, against the literals of the measured rules (reference/NUMERICS.md)."""

from dataclasses import replace
from itertools import product

import pytest

from f8emu.audit.formats import consumers_of
from f8emu.spec.chip import AccumulationModel, Evidence
from f8emu.spec.chips import CHIPS, HOPPER, chip_by_name
from f8emu.spec.errors import SpecError, UnsupportedError
from f8emu.spec.formats import BFLOAT16, E4M3FN, E4M3FNUZ, E5M2, FLOAT16, FLOAT32
from f8emu.spec.recipe import BLOCKWISE, ROWWISE
from f8emu.spec.scaling import Granularity
from f8emu.spec.serialize import recipe_from_json, recipe_from_toml

T, R = Granularity.TENSORWISE, Granularity.ROWWISE
V, S = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128

# step [ACC-1], aligned bits [ACC-3], result bits [ACC-5], promotion [CHAIN-2], slice multiple [CHAIN-3] [BF16-2]
MEASURED = {
    "float8": (32, 13, 13, 128, 128),
    "float8_fast": (32, 13, 13, None, 128),
    "block_scaled": (32, 13, 13, None, 128),
    "bfloat16": (16, 25, 23, None, 64),
}
MODELS = [(chip.name, name, getattr(chip, name)) for chip in CHIPS.values() for name in MEASURED]


def numbers(model: AccumulationModel) -> tuple[int | None, ...]:
    bits = model.aligned_fraction_bits, model.result_fraction_bits
    return model.step_k, *bits, model.promote_k, model.split_k_multiple


def test_the_models_of_hopper_equal_the_measured_rules() -> None:
    assert {name: numbers(getattr(HOPPER, name)) for name in MEASURED} == MEASURED


@pytest.mark.parametrize(("chip", "name", "model"), MODELS, ids=lambda x: x if isinstance(x, str) else "")
def test_steps_tile_what_they_are_chained_over(chip: str, name: str, model: AccumulationModel) -> None:
    """A promotion never ends inside a step, a split-K slice never inside a promotion."""
    assert (model.promote_k or model.step_k) % model.step_k == 0
    assert model.split_k_multiple % (model.promote_k or model.step_k) == 0


def test_what_hopper_multiplies() -> None:
    assert HOPPER.capability == (9, 0)
    assert HOPPER.operand_formats == (E4M3FN, E5M2)
    assert HOPPER.format_pairs == ((E4M3FN, E4M3FN), (E5M2, E4M3FN), (E4M3FN, E5M2))
    assert HOPPER.granularity_pairs == ((T, T), (R, R), (V, V), (V, S), (S, V))
    assert (HOPPER.size_multiple, HOPPER.vector_multiple) == (16, 4)
    for pair in ((T, T), (R, R)):
        assert HOPPER.accumulation(pair, use_fast_accum=True) is HOPPER.float8_fast
        assert HOPPER.accumulation(pair) is HOPPER.float8
    assert HOPPER.accumulation(None) is HOPPER.bfloat16


def test_slices_of_block_scaled_gemms() -> None:
    """[CHAIN-3] Multiples of 512 beside 128x128 scales, of 128 otherwise; a slice never ends inside a block."""
    assert HOPPER.accumulation((V, V)) == HOPPER.block_scaled
    for pair in ((V, S), (S, V)):
        assert HOPPER.accumulation(pair) == replace(HOPPER.block_scaled, split_k_multiple=512)
    for chip in CHIPS.values():
        for pair in ((V, V), (V, S), (S, V)):
            assert chip.accumulation(pair).split_k_multiple % 128 == 0


def test_every_scaled_gemm_that_hopper_has_and_no_other() -> None:
    """[EPI-5], SPEC-1's last sentence: one list of refusals, asked for every combination."""
    formats = (E4M3FN, E5M2, E4M3FNUZ)
    calls = product(product(formats, formats), product(Granularity, Granularity), (True, False))
    taken = {call for call in calls if HOPPER.refusal(call[0], call[1], use_fast_accum=call[2]) is None}
    dense = product(((E4M3FN, E4M3FN), (E5M2, E4M3FN), (E4M3FN, E5M2)), ((T, T), (R, R)), (True, False))
    assert taken == {*dense, *(((E4M3FN, E4M3FN), pair, False) for pair in ((V, V), (V, S), (S, V)))}


def test_a_profile_says_what_it_stands_on() -> None:
    evidence = {name: chip.evidence.value for name, chip in CHIPS.items()}
    assumed = "instructions recorded, GEMMs around them assumed"
    agrees = "instructions agree with a model validated on silicon, GEMMs around them assumed"
    assert evidence == {
        "Hopper": "recorded",
        "H100": "recorded",
        "Ada": assumed,
        "Blackwell mma.sync": assumed,
        **dict.fromkeys(("Blackwell tcgen05", "RTX Blackwell", "CDNA3"), agrees),
    }
    assert list(map(str, CHIPS.values())) == list(CHIPS)
    assert [chip.with_evidence for chip in CHIPS.values()] == [
        *("Hopper", "H100", f"Ada ({assumed})", f"Blackwell mma.sync ({assumed})"),
        *(f"{name} ({agrees})" for name in ("Blackwell tcgen05", "RTX Blackwell", "CDNA3")),
    ]
    guessed = replace(CHIPS["CDNA3"], evidence=Evidence.LITERATURE)
    refusal = guessed.refusal((E4M3FN, E4M3FN), (T, T))
    assert refusal is not None and refusal.startswith("CDNA3 (unverified) multiplies float8_e4m3fnuz x")


def test_an_h100_adds_as_hopper_and_splits_by_a_plan_of_its_own() -> None:
    assert replace(CHIPS["H100"], name=HOPPER.name, plan=HOPPER.plan) == HOPPER
    assert {name: chip.plan for name, chip in CHIPS.items() if chip.plan} == {
        "Hopper": "NVIDIA H200",
        "H100": "NVIDIA H100 80GB HBM3",
    }


def test_instructions_of_the_public_recordings() -> None:
    """NUMERICS 9: steps, aligned bits, result bits, what is added when."""
    ada = CHIPS["Ada"]
    assert numbers(ada.instruction("test", (E5M2, E5M2), FLOAT32).model)[:4] == (16, 13, 13, None)
    assert numbers(ada.instruction("test", (BFLOAT16, BFLOAT16), FLOAT32).model)[:3] == (8, 24, 23)
    for name in ("Hopper", "Blackwell mma.sync"):
        model = CHIPS[name].instruction("test", (E4M3FN, E4M3FN), FLOAT16).model
        assert (model.step_k, model.aligned_fraction_bits, model.promote_k, model.operand) == (16, 25, 32, FLOAT16)
        assert model.order[:16] == (0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29)
        assert sorted(model.order) == list(range(32)) and model.accumulator == FLOAT16
    with pytest.raises(UnsupportedError, match=r"test: the profile of Hopper has .* got bfloat16 x bfloat16 -> "):
        HOPPER.instruction("test", (BFLOAT16, BFLOAT16), FLOAT16)


def test_a_chip_is_named_or_given() -> None:
    assert chip_by_name("test", "Ada") is chip_by_name("test", CHIPS["Ada"]) is CHIPS["Ada"]
    for unknown in ("volta", "NVIDIA", replace(HOPPER, size_multiple=8), 7):
        with pytest.raises(SpecError, match="test: chip must be one of 'Hopper', 'H100', 'Ada', "):
            chip_by_name("test", unknown)  # pyright: ignore[reportArgumentType]


def test_names_that_people_say() -> None:
    """In any case, with hyphens or without, as the driver says them; a recipe keeps the profile's name and its hash."""
    names = {"H200": "Hopper", "hopper": "Hopper", "NVIDIA H100 80GB HBM3": "H100", "sm_90": "Hopper", "l40s": "Ada"}
    names |= {
        "RTX 5090": "RTX Blackwell",
        "sm_120": "RTX Blackwell",
        "nvidia b200": "Blackwell tcgen05",
        "blackwell-tcgen05": "Blackwell tcgen05",
        "mi300x": "CDNA3",
    }
    assert {name: chip_by_name("test", name).name for name in names} == names
    assert replace(ROWWISE, chip="h200").content_hash == ROWWISE.content_hash
    with pytest.raises(SpecError, match="test: of GH200 no split-K plan was recorded; chip='Hopper' has the bits"):
        chip_by_name("test", "GH200")
    assert consumers_of("vllm:H200") == consumers_of("vllm:gh200") == ["vllm:sm90"]
    with pytest.raises(SpecError, match=r"name a GPU \(Hopper: H100, H200, .*GH200; Blackwell: .*B200"):
        consumers_of("vllm:L40S")


def test_a_recipe_has_a_chip() -> None:
    ada = replace(ROWWISE, name="mine", chip="Ada")
    assert recipe_from_toml(ada.to_toml()) == recipe_from_json(ada.to_json()) == ada != ROWWISE
    assert 'chip = "Ada"' in ada.to_toml() and "chip" not in ROWWISE.to_toml()
    assert ada.content_hash != ROWWISE.content_hash and replace(ada, chip="Hopper") == ROWWISE
    assert "chip: Ada, instructions recorded, GEMMs around them assumed" in ada.explain()
    assert ada.label == f"mine ({ada.content_hash[:12]}) on Ada"
    explained = replace(ROWWISE, name="mine", chip="Blackwell tcgen05").explain()
    assert "chip: Blackwell tcgen05, instructions agree with a model" in explained and "every 128" not in explained
    with pytest.raises(SpecError, match="Recipe 'blockwise': chip must be one of"):
        replace(BLOCKWISE, chip="Volta")
    with pytest.raises(SpecError, match=r"Recipe 'blockwise': output: Ada takes scales .*; or choose another chip"):
        replace(BLOCKWISE, chip="Ada")
    with pytest.raises(SpecError, match=r"Recipe 'rowwise': output: CDNA3 multiplies"):
        replace(ROWWISE, chip="CDNA3")
