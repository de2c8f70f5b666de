"""Reprs are short, so that help() of a function that has one as a default is; equality, hashes and pickles stay.

And the kinds of errors: what a caller may catch them as, and the text of a missing extra.
"""

import importlib
import pickle
import sys
from dataclasses import replace

import pytest

import f8emu
from f8emu.spec.chips import CDNA3, HOPPER
from f8emu.spec.errors import (
    F8Error,
    GoldenFileError,
    MissingExtraError,
    OperandError,
    SpecError,
    UnsupportedError,
    required_by,
)
from f8emu.spec.formats import BFLOAT16, E4M3FN, FORMATS
from f8emu.spec.recipe import RECIPES
from f8emu.spec.scaling import AmaxHistoryReduction, DelayedScaling, ScaleRule


def test_what_a_repr_says() -> None:
    assert [repr(f) for f in FORMATS.values()] == list(FORMATS)
    assert repr(replace(BFLOAT16, name="mine")) == "Format(name='mine', exponent_bits=8, fraction_bits=7, bias=127)"
    assert repr(replace(E4M3FN, bias=8)).startswith("Format(name='float8_e4m3fn', "), "no known format"
    assert repr(ScaleRule()) == "ScaleRule()"
    assert repr(ScaleRule(power_of_two=True)) == "ScaleRule(power_of_two=True)"
    recent = DelayedScaling(reduction=AmaxHistoryReduction.MOST_RECENT)
    assert repr(recent) == "DelayedScaling(reduction=AmaxHistoryReduction.MOST_RECENT)"
    assert repr(f8emu.ROWWISE) == "Recipe('rowwise')"
    mine = replace(f8emu.ROWWISE, scale_rule=ScaleRule())
    assert repr(mine) == f"Recipe('rowwise ({mine.content_hash[:12]})')"
    assert repr(f8emu.ROWWISE.output) == ("Gemm(float8_e4m3fn rowwise @ float8_e4m3fn rowwise, use_fast_accum=True)")
    assert repr(f8emu.TENSORWISE.grad_input.a) == "Cast(float8_e5m2 tensorwise)"
    assert repr(HOPPER.float8) == (
        "AccumulationModel(step_k=32, aligned_fraction_bits=13, result_fraction_bits=13, promote_k=128, "
        "split_k_multiple=128)"
    )
    assert "floored=FlooredSum(interleaved=2" in repr(CDNA3.float8)
    assert repr(HOPPER.instructions[2]) == "Instruction('mma', bfloat16 x bfloat16 -> float32)"


@pytest.mark.parametrize("data", [E4M3FN, ScaleRule(), HOPPER, HOPPER.float8, *RECIPES.values()], ids=repr)
def test_what_a_repr_leaves_out_still_counts(data: object) -> None:
    again = pickle.loads(pickle.dumps(data))
    assert again == data and hash(again) == hash(data)
    assert len(repr(data)) < 130


def test_an_error_is_also_of_its_builtin_kind() -> None:
    kinds = (SpecError, OperandError, GoldenFileError, UnsupportedError, MissingExtraError)
    builtin = (ValueError, ValueError, ValueError, NotImplementedError, ImportError)
    assert [kind.__mro__[1:3] for kind in kinds] == [(F8Error, base) for base in builtin]


def test_missing_extra_names_the_remedy() -> None:
    assert str(MissingExtraError("f8emu.torch.scaled_mm", "jax", "jax")) == (
        "f8emu.torch.scaled_mm needs the package 'jax', which is not installed; "
        "install it with: pip install 'f8emu[jax]'"
    )


ADAPTERS = {
    "f8emu.jax.hosts.equinox": "equinox",
    "f8emu.jax.hosts.flax_linen": "flax",
    "f8emu.jax.hosts.flax_nnx": "flax",
    "f8emu.jax.hosts.qwix": "qwix",
    "f8emu.torch.integrations.huggingface": "transformers",
    "f8emu.torch.integrations.torchtitan": "torchtitan",
}


@pytest.mark.parametrize(("adapter", "package"), ADAPTERS.items())
def test_an_adapter_names_the_package_that_it_lacks(
    adapter: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(adapter.rsplit(".", 2)[0])
    for name in [name for name in sys.modules if name == adapter or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=f"^{adapter} needs .*; install it with: pip install {package}$"):
        importlib.import_module(adapter)


def test_an_installed_package_without_a_module_is_not_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"ml_dtypes\.nowhere"), required_by("a call"):
        importlib.import_module("ml_dtypes.nowhere")
