"""Golden files: the shipped one, the round trip, and every fault named with its remedy."""

import hashlib
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from f8emu.conformance import GoldenCase, read_golden, shipped_golden, write_golden
from f8emu.conformance.cases.container import decode_container, encode_container
from f8emu.conformance.cases.distributions import scaled_case
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.cases.golden import slices_of_k
from f8emu.spec import BFLOAT16, HOPPER, GoldenFileError, Granularity

REMEDY = "f8emu record OUT"


@pytest.fixture(scope="module")
def blob() -> bytes:
    return shipped_golden().path.read_bytes()


def test_shipped_file_is_what_was_recorded() -> None:
    golden = shipped_golden()
    assert golden.sha256 == hashlib.sha256(golden.path.read_bytes()).hexdigest()
    assert golden.device == "NVIDIA H200"
    assert len(golden.cases) == 174
    assert sum(case.out.size for case in golden.cases) == 846_592
    assert {case.gemm.mode for case in golden.cases} == set(Mode)


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
    theirs, metadata = decode_container(numpy_io.save(tensors, {"k": "v"}), "theirs")
    assert metadata == {"k": "v"}
    assert all(same(theirs[name], x) for name, x in tensors.items())


# Faults


def broken(blob: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file with its header changed, the data as it was."""
    (length,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + blob[8 + length :]


def in_case(number: int, change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    def apply(header: dict[str, Any]) -> None:
        cases = json.loads(header["__metadata__"]["cases"])
        change(cases[number])
        header["__metadata__"]["cases"] = json.dumps(cases)

    return apply


def set_cases(text: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update(cases=text)


def empty(shape: list[int]) -> dict[str, Any]:
    """A tensor without elements."""
    return {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}


HEADER_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no cases": (lambda h: h["__metadata__"].pop("cases"), "a golden file, whose"),
    "no metadata": (lambda h: h.pop("__metadata__"), "a golden file, whose"),
    "metadata not strings": (lambda h: h["__metadata__"].update(x=1), "metadata of strings"),
    "cases not JSON": (set_cases("[{"), "found no JSON"),
    "cases nested too deep": (set_cases("[" * 100_000), "found no JSON"),
    "cases empty": (set_cases("[]"), "a case or more"),
    "cases no list": (set_cases("{}"), "to be a list"),
    "case no object": (set_cases("[3]"), "case 0: expected an object"),
    "unknown mode": (in_case(4, lambda c: c.update(mode="diagonal")), "case 4: expected 'mode' to be one of tensor"),
    "unknown dtype": (in_case(0, lambda c: c.update(a_dtype="float8_e3m4")), "'a_dtype' to be one of float8_e4m3fn"),
    "bfloat16 operand of float8 GEMM": (in_case(0, lambda c: c.update(a_dtype="bfloat16")), "'a_dtype' to be one of"),
    "float8 output": (in_case(0, lambda c: c.update(out_dtype="float8_e4m3fn")), "'out_dtype' to be one of"),
    "missing key": (in_case(7, lambda c: c.pop("use_fast_accum")), "case 7: expected 'use_fast_accum' of type bool"),
    "wrong type": (in_case(0, lambda c: c.update(M="64")), "'M' of type int"),
    "true is no size": (in_case(0, lambda c: c.update(M=True)), "'M' of type int"),
    "wrong size": (in_case(0, lambda c: c.update(M=65)), r"'a' of shape \(65, 512\); found \(64, 512\)"),
    "missing role": (in_case(0, lambda c: c["tensors"].pop("scale_b")), "a tensor for 'scale_b'; found no such role"),
    "missing tensor": (in_case(0, lambda c: c["tensors"].update(out="nowhere")), "no tensor 'nowhere'"),
    "wrong dtype": (in_case(0, lambda c: c["tensors"].update(out="002.out")), "'out' of dtype bfloat16; found float32"),
    "wrong shape": (in_case(0, lambda c: c["tensors"].update(scale_a="008.scale_a")), r"'scale_a' of shape \(1,\)"),
    "rowwise scale as column": (
        in_case(8, lambda c: c["tensors"].update(scale_b="008.scale_a")),
        r"'scale_b' of shape \(1, 96\); found \(64, 1\)",
    ),
    "kernels": (in_case(0, lambda c: c.update(kernels=[["name"]])), "'kernels' to hold"),
    "split-K grid": (in_case(120, lambda c: c["kernels"][0].__setitem__(1, [5, 1, 1])), "whole output tiles"),
    "sampled row outside": (in_case(128, lambda c: c["sampled_rows"].__setitem__(0, 8192)), "indices below 8192"),
    "sampled row twice": (in_case(128, lambda c: c["sampled_rows"].__setitem__(0, 548)), "different indices"),
    "only rows sampled": (in_case(128, lambda c: c.pop("sampled_cols")), "'sampled_cols' of type list"),
    "tensor without offsets": (lambda h: h["000.out"].pop("data_offsets"), "data_offsets of tensor '000.out'"),
    "tensor beyond the data": (lambda h: h["000.out"].update(data_offsets=[0, 10**9]), "cut short"),
    "tensor of another size": (lambda h: h["000.out"].update(shape=[64, 95]), "bytes for tensor '000.out'"),
    "tensor of an unknown dtype": (lambda h: h["000.out"].update(dtype="F9"), "of a dtype among"),
    "tensor of a dtype that no recording has": (lambda h: h["000.out"].update(dtype="I8", shape=[12288]), "among U8"),
    "tensors that overlap": (lambda h: h.update(x=h["000.out"]), "behind another"),
    "negative shape": (lambda h: h["000.out"].update(shape=[-64, -96]), "with a shape that an array can have"),
    "true in a shape": (lambda h: h["000.scale_a"].update(shape=[True]), "with a shape that an array can have"),
    "true as an offset": (lambda h: h["000.out"].update(data_offsets=[True, 10]), "data_offsets of tensor '000.out'"),
    "a shape no array has": (lambda h: h.update(x=empty([0, 10**30])), "'x' with a shape that an array can have"),
    "sizes no array has": (lambda h: h.update(x=empty([0, 2**62, 2**62])), "with a shape that an array can have"),
    "too many dimensions": (lambda h: h.update(x=empty([0] * 65)), "'x' with a shape that an array can have"),
    "an object as key": (in_case(0, lambda c: c["tensors"].update(a={})), "a tensor for 'a'; found no tensor {}"),
    "a list as key": (in_case(0, lambda c: c["tensors"].update(out=[1])), "a tensor for 'out'; found no tensor"),
}


FILE_FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda b: b"", "0 bytes"),
    "seven bytes": (lambda b: b[:7], "7 bytes"),
    "cut in the header": (lambda b: b[:1000], "cut short"),
    "cut in the data": (lambda b: b[:-1], "cut short"),
    "longer": (lambda b: b + b"x", "something appended"),
    "foreign": (lambda b: b"PK\x03\x04 a zip file, say, and no safetensors at all", "foreign"),
    "no JSON": (lambda b: struct.pack("<Q", 4) + b"nope", "a JSON header"),
    "a list": (lambda b: struct.pack("<Q", 2) + b"[]", "a JSON object"),
    "nested too deep": (lambda b: struct.pack("<Q", 100_000) + b"[" * 100_000, "a JSON header"),
    **{fault: (partial(broken, change=change), message) for fault, (change, message) in HEADER_FAULTS.items()},
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_fault_is_named_with_its_remedy(fault: str, blob: bytes, tmp_path: Path) -> None:
    spoil, message = FILE_FAULTS[fault]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(spoil(blob))
    with pytest.raises(GoldenFileError, match=message) as caught:
        read_golden(path)
    assert REMEDY in str(caught.value) and str(path) in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(GoldenFileError, match="cannot read"):
            read_golden(path)
