"""`f8emu record --instructions` with the oracle in the place of a GPU, and its CUDA source as a compiler takes it."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import f8ref.numpy as oracle
from f8emu.conformance.cases.container import decode_container
from f8emu.conformance.cases.distributions import codes_of, dtype_of
from f8emu.conformance.record import single as module
from f8emu.conformance.record.cuda import Refused
from f8emu.conformance.record.instructions import read_recordings
from f8emu.conformance.record.single import KINDS, GpuInstructions, Single, record_instructions, singles
from f8emu.spec import CHIPS, GoldenFileError
from f8emu.spec.formats import E8M0FNU
from tests.conformance.command import invoke

CAPABILITIES = {(8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}


class Fake(GpuInstructions):
    """f8ref.numpy in the place of a GPU; what it gives may be spoilt."""

    def __init__(self, capability: tuple[int, int], spoil: Callable[[Single, np.ndarray], object] = lambda *_: None):
        self.capability, self.spoil = capability, spoil

    def metadata(self) -> dict[str, str]:
        return {"device": "fake"}

    def __call__(self, single: Single, cases: dict[str, np.ndarray]) -> np.ndarray | Refused:
        if single.instruction.name == "wgmma" and "E5M2 x E5M2" in str(single):
            return Refused("not today")
        out = single.instruction.out
        a, b = (cases[side].view(dtype_of(f)) for side, f in zip("ab", single.formats, strict=True))
        scales = (cases[role].view(dtype_of(E8M0FNU)) for role in ("scale_a", "scale_b") if role in cases)
        with np.errstate(all="ignore"):
            c = cases["c"].view(np.float32).astype(dtype_of(out))
        chip = replace(single.chip, instructions=(single.instruction,))
        d = codes_of(oracle.mma(a, b, c, *scales, chip=chip, out_dtype=out)).astype(np.uint32)
        self.spoil(single, d)
        return d


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CASES", 8 * len(KINDS))


@pytest.mark.parametrize("capability", CAPABILITIES, ids=CAPABILITIES.get)
def test_what_was_recorded_is_read_back_and_equal(capability: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    result = record_instructions(path, check=True, gpu=Fake(capability))
    planned = {str(single) for single in singles(capability)}
    assert not result.has_difference and set(result.outputs) == {x for x in planned if "wgmma E5M2 x E5M2" not in x}
    lines = result.lines()
    assert max(len(line) for line in lines if "not recorded" not in line) <= 80 or len(str(path)) > 20
    names = {name.split(" ")[0] for name in planned}
    assert ("wgmma" in names) == (capability == (9, 0)) and ("tcgen05.mma.block_scale" in names) == (
        capability[0] == 10
    )
    file = read_recordings(path)
    scaled = [recording for recording in file.recordings if recording.scales]
    assert bool(scaled) == (capability[0] >= 10) and {r.a.shape[1] for r in scaled} <= {32, 64}
    assert file.metadata["kinds"].split(", ") == list(KINDS)
    status, out, _ = invoke("verify", "f8ref.numpy", "f8ref.exact", "--recordings", str(path))
    assert status == 0 and f"outputs in {2 * len(file.recordings)} cases" in out


def test_a_planted_fault_is_found_where_it_is(tmp_path: Path) -> None:
    name = "mma.block_scale E4M3 x E5M2 -> float32"

    def spoil(single: Single, d: np.ndarray) -> None:
        if str(single) == name:
            d[[3, 8 * KINDS.index("tiny")]] ^= 1

    path = tmp_path / "spoilt.safetensors"
    result = record_instructions(path, check=True, gpu=Fake((12, 0), spoil))
    assert result.has_difference and [x for x, (_, differ) in result.outputs.items() if differ] == [name]
    assert any(line == "  differ: 2 bits, 2 tiny" for line in result.lines())
    status, out, _ = invoke("verify", "f8ref.numpy", "--recordings", str(path))
    assert status == 1 and "RTX Blackwell mma.block_scale float8_e4m3fn x float8_e5m2 K=64" in out
    assert record_instructions(path, gpu=Fake((12, 0), spoil)).lines()[-1].startswith("not compared")


def test_a_kernel_that_cannot_add_integers_is_refused(tmp_path: Path) -> None:
    def spoil(single: Single, d: np.ndarray) -> None:
        if single.instruction.name == "mma":
            d[:] = np.roll(d, 1)

    result = record_instructions(tmp_path / "x", gpu=Fake((9, 0), spoil))
    assert {name.split(" ")[0] for name in result.outputs} == {"wgmma"}
    assert sum("added up wrongly" in reason for reason in result.refused.values()) == 2 * 9
    with pytest.raises(GoldenFileError, match="no instruction is known of its compute capability"):
        record_instructions(tmp_path / "y", gpu=Fake((7, 5)))


def test_the_seed_decides_the_cases(tmp_path: Path) -> None:
    blobs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        record_instructions(tmp_path / name, seed=seed, gpu=Fake((8, 9)))
        blobs.append(decode_container((tmp_path / name).read_bytes())[0])
    same, other = (all(np.array_equal(blobs[0][key], blob[key]) for key in blobs[0]) for blob in blobs[1:])
    assert same and not other


def test_cases_that_decide_the_exponent_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """[BF16-1], [MX-3] That a bfloat16 zero has one, and a block-scaled one, is seen in the kind `tiny`."""
    monkeypatch.undo()
    for chip, index in ((CHIPS["Hopper"], 2), (CHIPS["RTX Blackwell"], 3)):
        right = chip.instructions[index]
        changed = replace(right, model=replace(right.model, zero_exponent=None))
        pair = right.format_pairs[0]
        cases = module.drawn(pair, 32, "test", is_microscaled=right.is_microscaled)
        first, second = (Fake((9, 0))(Single(chip, i, pair), cases) for i in (right, changed))
        assert isinstance(first, np.ndarray) and isinstance(second, np.ndarray)
        assert {KINDS[i * len(KINDS) // len(first)] for i in np.flatnonzero(first != second)} == {"tiny"}, chip


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("capability", CAPABILITIES, ids=CAPABILITIES.get)
def test_the_source_compiles(capability: tuple[int, int], tmp_path: Path) -> None:
    """ptxas takes every instruction of a capability; the formats of b stand for those of a."""
    kinds = {(s.instruction, s.chip.name): s for s in singles(capability)}
    for i, single in enumerate(kinds.values()):
        (tmp_path / f"{i}.cu").write_text(single.source())
        words = ["nvcc", "-cubin", f"-arch={CAPABILITIES[capability]}", "-o", f"{tmp_path}/x", f"{tmp_path}/{i}.cu"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (str(single), done.stderr)


def test_the_command() -> None:
    status, _, error = invoke("record", "x", "--instructions", "--only", "bf16")
    assert status == 2 and "--instructions goes with --seed and --check alone" in error
    status, _, error = invoke("record", "x", "--instructions")
    assert status != 0 and "needs a CUDA GPU with float8" in error
