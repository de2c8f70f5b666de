"""Golden files: the shipped one, the round trip, and every fault named with its remedy."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from f8emu.conformance import GoldenCase, read_golden, shipped_golden, write_golden
from f8emu.conformance.cases.container import decode_container, encode_container
from f8emu.conformance.cases.distributions import scaled_case
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.cases.golden import slices_of_k
from f8emu.spec import BFLOAT16, HOPPER, GoldenFileError, Granularity


def test_shipped_file_is_what_was_recorded() -> None:
    golden = shipped_golden()
    assert golden.sha256 == hashlib.sha256(golden.path.read_bytes()).hexdigest()
    assert golden.device == "NVIDIA H200"
    assert len(golden.cases) == 174
    assert sum(case.out.size for case in golden.cases) == 846_592
    assert {case.gemm.mode for case in golden.cases} == {mode for mode in Mode if not mode.is_microscaled}


def test_split_k_is_read_from_kernels_and_grids() -> None:
    """[CHAIN-3] The table of NUMERICS 3."""
    gemms = [case.gemm for case in shipped_golden().cases if case.gemm.split_k > 1]
    found = {(*gemm.output_shape, gemm.k): gemm.split_k for gemm in gemms}
    assert found == {(64, 64, 8192): 3, (16, 64, 16384): 6, (64, 64, 4096): 3}


@pytest.mark.parametrize(
    ("name", "grid", "m", "n", "slices"),
    [
        ("nvjet_sm90_qqtst_64x32_128x16_1x2_h_bz_splitK_TNT", (2, 3, 1), 64, 64, 3),
        ("nvjet_sm90_qqtst_64x16_128x16_1x1_h_bz_splitK_TNT", (1, 6, 1), 16, 64, 6),
        ("nvjet_sm90_qqtst_16x64_128x16_1x1_v_bz_splitK_TNT", (1, 6, 1), 16, 64, 6),  # only the other order divides
        ("nvjet_sm90_qqtst_64x32_128x16_1x2_h_bz_TNT", (2, 3, 1), 64, 64, 1),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", (2, 4, 1), 64, 64, 1),
    ],
)
def test_slices_of_k(name: str, grid: tuple[int, ...], m: int, n: int, slices: int) -> None:
    assert slices_of_k([(name, grid)], m, n) == slices
    with pytest.raises(ValueError, match="splitK"):  # no whole tiles
        slices_of_k([("nvjet_64x32_x_splitK_TNT", (5, 1, 1))], 64, 64)


def same(x: np.ndarray | None, y: np.ndarray | None) -> bool:
    if x is None or y is None:
        return x is y
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def test_write_and_read_give_the_same_cases(tmp_path: Path) -> None:
    golden = shipped_golden()
    path = tmp_path / "copy.safetensors"
    write_golden(path, golden.cases, golden.metadata)
    again = read_golden(path)
    assert again.metadata == golden.metadata
    assert path.stat().st_size < golden.path.stat().st_size * 1.01, "shared tensors are stored once"
    for old, new in zip(golden.cases, again.cases, strict=True):
        for name in GemmCase.__dataclass_fields__:
            x, y = getattr(old.gemm, name), getattr(new.gemm, name)
            assert same(x, y) if isinstance(x, np.ndarray) else x == y, (old.id, name)
        assert same(old.out, new.out) and old.kernels == new.kernels and old.name == new.name


def test_odd_block_scales_survive_the_padded_layout(tmp_path: Path) -> None:
    """[EPI-5] K of 5 blocks is stored padded to 8, rows of one block and a bit as 2."""
    square, vector = Granularity.BLOCKWISE_128X128, Granularity.BLOCKWISE_1X128
    gemm = scaled_case(
        "x", (square, vector), HOPPER.block_scaled_format_pairs[0], (144, 256, 640), "bits", out_dtype=BFLOAT16
    )
    out = np.zeros((144, 256), np.float32).astype("bfloat16")
    write_golden(tmp_path / "g", [GoldenCase(name="odd", gemm=gemm, out=out, kernels=())], {})
    back = read_golden(tmp_path / "g").cases[0].gemm
    assert (back.granularity_a, back.granularity_b) == (square, vector)
    assert np.array_equal(back.scale_a, gemm.scale_a) and np.array_equal(back.scale_b, gemm.scale_b)  # type: ignore[arg-type]


def test_the_container_is_the_librarys(tmp_path: Path) -> None:
    """What is written here the safetensors library reads, and the other way round."""
    safetensors = pytest.importorskip("safetensors")
    numpy_io = pytest.importorskip("safetensors.numpy")
    tensors = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.array([1, 2], np.int32),
        "e": np.zeros((0, 3), np.uint8),
    }
    path = tmp_path / "ours"
    path.write_bytes(encode_container(tensors, {"k": "v"}))
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"k": "v"}
        assert all(np.array_equal(file.get_tensor(name), x) for name, x in tensors.items())
    theirs, metadata = decode_container(numpy_io.save(tensors, {"k": "v"}))
    assert metadata == {"k": "v"}
    assert all(same(theirs[name], x) for name, x in tensors.items())


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(GoldenFileError, match="cannot read"):
            read_golden(path)
