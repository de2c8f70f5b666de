"""The bytes that an engine holds, against fusion and sharding by hand; and faults, each of which moves its own keys."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from f8emu.dialects import quantize
from f8emu.dialects.arithmetic import DTYPES, decode
from f8emu.native import library
from f8emu.rollout import Checksums, Outcome, expected_checksums
from f8emu.rollout.hashing import SglangGpuHash, products_of_blocks, sum_of_tiles, sum_of_tiles_by_numpy
from f8emu.spec.errors import OperandError, SpecError, UnsupportedError
from tests.rollout.models import BLOCKS, CHANNELS, LAYER, TENSORS, VOCABULARY, Arrays, in_float8, weights, write

SQUARE, ROW, TENSOR = (128, 128), (1, None), (None, None)
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def sha(x: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


def shown(checksums: Checksums, name: str, rank: int = 0) -> str:
    (tensor,) = [tensor for tensor in checksums.tensors if tensor.name == name and tensor.rank == rank]
    return tensor.sha256


def _by_kernel(path: Path, engine: Any, kernel: Any) -> Checksums:
    return expected_checksums(path, engine=engine, kernel=kernel)


def fused(tensors: Arrays, rank: int, tp: int, suffix: str = "", unit: int = 1) -> np.ndarray[Any, Any]:
    """q, k and v of a rank, by hand: 4 heads of 128, 2 of keys, which two ranks share at tp 4."""
    q, k, v = (tensors[f"{LAYER}.self_attn.{name}.weight{suffix}"] for name in QKV)
    heads, kv, first = 4 // tp * 128 // unit, max(2 // tp, 1) * 128 // unit, (rank // 2 if tp == 4 else rank)
    return np.concatenate([q[rank * heads :][:heads], k[first * kv :][:kv], v[first * kv :][:kv]])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_blocks_are_fused_and_sharded(tmp_path: Path, engine: Any, tp: int) -> None:
    tensors = in_float8(weights(), "deep_gemm_block", "_scale_inv")
    expected = expected_checksums(write(tmp_path, tensors, BLOCKS), engine=engine, tensor_parallel=tp)
    assert not expected.not_predicted and expected.source.dtype == "BF16, F8_E4M3"
    for rank in range(tp):
        assert shown(expected, f"{LAYER}.self_attn.qkv_proj.weight", rank) == sha(fused(tensors, rank, tp))
        scale = sha(fused(tensors, rank, tp, "_scale_inv", 128))
        assert shown(expected, f"{LAYER}.self_attn.qkv_proj.weight_scale_inv", rank) == scale
        down, k = tensors[f"{LAYER}.mlp.down_proj.weight"], 512 // tp
        assert shown(expected, f"{LAYER}.mlp.down_proj.weight", rank) == sha(down[:, rank * k : rank * k + k])
        # 100 words of a vocabulary are padded to 128.
        padded = np.zeros((128, 512), ml_dtypes.bfloat16)
        padded[:VOCABULARY] = tensors["lm_head.weight"]
        assert shown(expected, "lm_head.weight", rank) == sha(padded[rank * 128 // tp :][: 128 // tp])
        assert shown(expected, "model.norm.weight", rank) == sha(tensors["model.norm.weight"])


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_are_stacked(tmp_path: Path, tp: int) -> None:
    tensors = in_float8(weights(experts=True), "deep_gemm_block", "_scale_inv")
    expected = expected_checksums(write(tmp_path, tensors, BLOCKS), engine="vllm", tensor_parallel=tp)
    of = lambda expert, name: tensors[f"{LAYER}.mlp.experts.{expert}.{name}.weight"]  # noqa: E731
    stem = f"{LAYER}.mlp.experts.routed_experts"
    for rank in range(tp):
        mine = slice(rank * 512 // tp, (rank + 1) * 512 // tp)
        w13 = np.stack([np.concatenate([of(e, name)[mine] for name in GATE_UP]) for e in range(2)])
        assert shown(expected, f"{stem}.w13_weight", rank) == sha(w13)
        assert shown(expected, f"{stem}.w2_weight", rank) == sha(
            np.stack([of(e, "down_proj")[:, mine] for e in range(2)])
        )
    names = {tensor.name for tensor in expected_checksums(tmp_path, engine="sglang").tensors}
    assert f"{LAYER}.mlp.experts.w13_weight_scale_inv" in names


def test_rows_are_turned(tmp_path: Path) -> None:
    tensors = in_float8(weights(), "compressed_tensors_channel", "_scale")
    write(tmp_path, tensors, CHANNELS)
    for engine in ("vllm", "sglang"):
        expected = expected_checksums(tmp_path, engine=engine, tensor_parallel=2)
        for rank in range(2):
            assert shown(expected, f"{LAYER}.self_attn.qkv_proj.weight", rank) == sha(fused(tensors, rank, 2).T)
            scale = fused(tensors, rank, 2, "_scale")
            assert shown(expected, f"{LAYER}.self_attn.qkv_proj.weight_scale", rank) == sha(scale)
    # vLLM's Cutlass kernel pads to 16: codes with 0, scales with 1.
    odd = {name: x[:500] if ".mlp." in name and "down" not in name else x for name, x in weights().items()}
    odd[f"{LAYER}.mlp.down_proj.weight"] = odd[f"{LAYER}.mlp.down_proj.weight"][:, :500]
    tensors = in_float8(odd, "compressed_tensors_channel", "_scale")
    expected = expected_checksums(write(tmp_path, tensors, CHANNELS), engine="vllm", tensor_parallel=2)
    codes = np.zeros((512, 512), np.uint8)
    halves = [tensors[f"{LAYER}.mlp.{name}.weight"][250:].view(np.uint8) for name in GATE_UP]
    codes[:, :500] = np.concatenate(halves).T
    assert shown(expected, f"{LAYER}.mlp.gate_up_proj.weight", 1) == sha(codes)
    scales = [tensors[f"{LAYER}.mlp.{name}.weight_scale"][250:] for name in GATE_UP]
    ones = np.ones((12, 1), np.float32)
    assert shown(expected, f"{LAYER}.mlp.gate_up_proj.weight_scale", 1) == sha(np.concatenate([*scales, ones]))


def test_fbgemms_bound_of_activations_is_a_tensor_of_vllm(tmp_path: Path) -> None:
    tensors = in_float8(weights(), "fbgemm_cuda", "_scale")
    method = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"], "activation_scale_ub": 1200.5}
    expected = expected_checksums(write(tmp_path, tensors, method), engine="vllm")
    assert not expected.not_predicted
    stem = f"{LAYER}.self_attn.o_proj"
    assert shown(expected, f"{stem}.weight") == sha(tensors[f"{stem}.weight"].T)
    assert shown(expected, f"{stem}.input_scale_ub") == sha(np.array(1200.5, np.float32))
    assert expected_checksums(tmp_path, engine="sglang").not_predicted


Q, V, OUT = (f"{LAYER}.self_attn.{name}_proj" for name in "qvo")
MISFIT = "its parts do not fit together"
MISSHAPEN: dict[str, tuple[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]], str]] = {
    "no row": (f"{Q}.weight", lambda w: w[:0], MISFIT),
    "a number": (f"{Q}.weight", lambda w: np.asarray(w[0, 0]), MISFIT),
    "three dimensions": (f"{V}.weight", lambda w: w[None], MISFIT),
    "another K": (f"{V}.weight", lambda w: w[:, :256].copy(), MISFIT),
    "a bias that is a number": (f"{OUT}.bias", lambda w: np.ones((), np.float32), MISFIT),
    "a vector": (f"{OUT}.weight", lambda w: w[0], "is no matrix"),
    "a scale of integers": (f"{Q}.input_scale", lambda w: np.ones(1, np.int32), "input_scale cannot be read"),
    "no scale": (f"{Q}.input_scale", lambda w: np.ones(0, np.float32), "input_scale cannot be read"),
}


@pytest.mark.parametrize("case", MISSHAPEN)
@pytest.mark.parametrize("dialect", [None, "torchao_tensorwise"])
def test_what_is_of_no_shape_that_an_engine_loads_is_not_predicted(case: str, dialect: Any, tmp_path: Path) -> None:
    name, change, why = MISSHAPEN[case]
    static = {"quant_method": "fp8", "activation_scheme": "static"}
    tensors = weights() if dialect else in_float8(weights(), "compressed_tensors_tensor", "_scale")
    changed = tensors | {name: change(tensors[name.rpartition(".")[0] + ".weight"])}
    path = write(tmp_path, changed, None if dialect else static | {"modules_to_not_convert": ["lm_head"]})
    expected = expected_checksums(path, engine="vllm", dialect=dialect)
    if "scale" not in case or not dialect:
        (lone,) = expected.not_predicted
        assert lone[0].startswith(f"{LAYER}.self_attn.") and why in lone[1], lone


def test_experts_of_several_shapes_are_not_predicted(tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.experts.1.up_proj.weight"
    tensors = weights(experts=True)
    path = write(tmp_path, tensors | {name: tensors[name][:256].copy()})
    expected = expected_checksums(path, engine="vllm", dialect="torchao_rowwise")
    assert expected.not_predicted == (
        (f"{LAYER}.mlp.experts.routed_experts.w13_weight", "its experts have several shapes"),
    )


def test_experts_that_vllm_gives_to_marlin_are_not_predicted(tmp_path: Path) -> None:
    """Seen on an H200: of compressed-tensors, one scale a tensor beside one dynamic scale of activations."""
    tensors = in_float8(weights(experts=True), "compressed_tensors_tensor", "_scale")
    inputs = {"strategy": "tensor", "dynamic": True}
    group = {"weights": {"strategy": "tensor"}, "input_activations": inputs, "targets": ["Linear"]}
    method = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    left = {"ignore": ["lm_head", f"{LAYER}.mlp.gate"]}
    expected = expected_checksums(write(tmp_path, tensors, method | left), engine="vllm")
    assert [name.rpartition("experts.")[2] for name, _ in expected.not_predicted] == ["w13_weight", "w2_weight"]
    assert all("Marlin" in why for _, why in expected.not_predicted)
    group["input_activations"] = inputs | {"dynamic": False}
    assert not expected_checksums(write(tmp_path, tensors, method | left), engine="vllm").not_predicted


def test_one_scale_a_tensor_becomes_the_largest_or_one_a_row(tmp_path: Path) -> None:
    tensors = in_float8(weights(), "torchao_inference", "_scale")
    for name in list(tensors):
        if name.endswith("_scale"):
            codes, scale = quantize(weights()[name.removesuffix("_scale")], "torchao_inference", block=TENSOR)
            tensors[name.removesuffix("_scale")], tensors[name] = codes, scale.astype(np.float32)
    write(tmp_path, tensors, TENSORS)
    scales = [tensors[f"{LAYER}.mlp.{name}.weight_scale"].item() for name in GATE_UP]
    largest = np.float32(max(scales))
    # By hand: to float16 by the scale in float16, then to float8 by the inverse of the largest.
    halves: list[np.ndarray[Any, Any]] = []
    for name, scale in zip(GATE_UP, scales, strict=True):
        code = tensors[f"{LAYER}.mlp.{name}.weight"].astype(np.float16)
        value = (code.astype(np.float32) * np.float32(np.float16(scale))).astype(np.float16)
        halves.append(
            (value.astype(np.float32) * (np.float32(1) / largest)).clip(-448, 448).astype(DTYPES["float8_e4m3fn"])
        )
    again, name = np.concatenate(halves).T, f"{LAYER}.mlp.gate_up_proj.weight"
    for engine, kernel in (("vllm", "cutlass"), ("sglang", "triton")):
        expected = _by_kernel(tmp_path, engine, kernel)
        assert shown(expected, name) == sha(again) and shown(expected, f"{name}_scale") == sha(np.asarray(largest))
    expected = expected_checksums(tmp_path, engine="sglang")
    kept = np.concatenate([tensors[f"{LAYER}.mlp.{name}.weight"] for name in GATE_UP])
    assert shown(expected, name) == sha(kept.T)
    assert shown(expected, f"{name}_scale") == sha(np.repeat(np.asarray(scales, np.float32), 512)[:, None])


@pytest.mark.parametrize(
    ("dialect", "block"), [("vllm_weight_block", SQUARE), ("vllm_weight_channel", ROW), ("vllm_weight_tensor", TENSOR)]
)
def test_vllm_quantizes_what_it_fused(tmp_path: Path, dialect: Any, block: Any) -> None:
    # A float32 source is rounded to the dtype of the engine first.
    source = weights(dtype="float32")
    options: Any = {"engine": "vllm", "dialect": dialect, "tensor_parallel": 2}
    expected = expected_checksums(write(tmp_path, source), device="cpu", **options)
    assert not expected.not_predicted
    # On a GPU vLLM compiles the cast of blocks.
    on_gpu = expected_checksums(tmp_path, **options)
    assert (on_gpu.not_predicted != ()) is (dialect == "vllm_weight_block")
    narrow = {name: x.astype(ml_dtypes.bfloat16) for name, x in source.items()}
    whole = np.concatenate([narrow[f"{LAYER}.mlp.{name}.weight"] for name in GATE_UP])
    codes, scale = quantize(whole, dialect, block=block)
    mine = np.concatenate([codes[256:512], codes[768:]])
    name = f"{LAYER}.mlp.gate_up_proj.weight"
    assert shown(expected, name, 1) == sha(mine if block == SQUARE else mine.T)
    if block == TENSOR:
        assert shown(expected, f"{name}_scale", 1) == sha(scale)
    # A trainer that casts float32 has other codes.
    trainers = expected_checksums(tmp_path, engine="vllm", dialect="torchao_blockwise", tensor_parallel=2)
    codes = [quantize(source[f"{LAYER}.mlp.{part}.weight"], "torchao_blockwise", block=SQUARE)[0] for part in GATE_UP]
    assert shown(trainers, name, 1) == sha(np.concatenate([half[256:] for half in codes]))


def test_deepgemm_has_vllm_quantize_again(tmp_path: Path) -> None:
    tensors = in_float8(weights(), "deep_gemm_block", "_scale_inv")
    write(tmp_path, tensors, BLOCKS)
    expected, kept = (_by_kernel(tmp_path, "vllm", kernel) for kernel in ("deepgemm", "triton"))
    name = f"{LAYER}.self_attn.o_proj.weight"
    values = decode(tensors[name], tensors[f"{name}_scale_inv"], SQUARE, np.dtype(np.float32))
    codes, scale = quantize(values, "vllm_weight_block_ue8m0")
    assert shown(expected, name) == sha(codes) != shown(kept, name) == sha(tensors[name])
    assert shown(expected, f"{name}_scale_inv") == sha(scale)
    for kernel in ("deepgemm-blackwell", "marlin"):
        left = _by_kernel(tmp_path, "vllm", kernel)
        assert {name for name, _ in left.not_predicted} == {
            f"{LAYER}.{module}.weight"
            for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        }
        # Nor are their scales, which the server shows, and which are no fault.
        wrong = left.compare(kept.engine_json())
        assert {x.key for x in wrong} == {x.key for x in kept.tensors if "_proj" in x.name} and len(wrong) == 8
        assert {x.outcome for x in wrong} == {Outcome.NOT_PREDICTED}


def test_sglang_hashes_products_of_blocks(tmp_path: Path) -> None:
    tensors = in_float8(weights(), "deep_gemm_block", "_scale_inv")
    expected = expected_checksums(write(tmp_path, tensors, BLOCKS), engine="sglang", device="cpu")
    name = f"{LAYER}.mlp.down_proj.weight"
    scale = tensors[f"{name}_scale_inv"].repeat(128, 0).repeat(128, 1)
    products = (tensors[name].astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
    digests = {tensor.name: tensor.engine_digest for tensor in expected.tensors}
    assert digests[name] == sha(products)[:16] and digests[f"{name}_scale_inv"] == ""
    gpu, whole = expected_checksums(tmp_path, engine="sglang"), SglangGpuHash(products.nbytes)
    whole.update(products)
    assert {tensor.name: tensor.engine_digest for tensor in gpu.tensors}[name] == whole.hexdigest()
    assert "one unit in the last place" in gpu.notes[0]


def _gpu_hash(data: bytes) -> str:
    """SGLang's Triton kernel in integers, a word at a time."""
    mask = (1 << 32) - 1

    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B & mask
        x = (x ^ x >> 13) * 0xC2B2AE35 & mask
        return x ^ x >> 16

    words = np.frombuffer(data + b"\0" * (-len(data) % 4), "<u4").tolist()
    seeds, total = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & mask), 0
    for tile in range(0, len(words), 8192):
        h = [0, 0]
        for i in range(tile, min(tile + 8192, len(words))):
            for half, (factor, turn) in enumerate(((0x27D4EB2D, 15), (0x165667B1, 13))):
                position = (i * factor + seeds[half]) & mask ^ (i << turn | i >> 32 - turn) & mask
                h[half] = (h[half] + mixed(words[i] ^ position)) & mask
        high, low = (mixed(half ^ 4 * len(words)) for half in h)
        total = (total + (high << 32 | low)) & (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = (total ^ total >> shift) * factor & (1 << 64) - 1
    return f"{total ^ total >> 31:016x}"


@pytest.mark.parametrize("size", [0, 1, 4, 7, 4 * 8192 - 1, 4 * 8192, 4 * 8192 + 5, 100_000])
def test_the_hash_of_a_gpu_in_parts(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    for step in (1000, 12_345, 4 * 8192, 50_001, max(size, 1)):
        tensor = SglangGpuHash(size)
        for at in range(0, size, step):
            tensor.update(data[at : at + step])
        assert tensor.hexdigest() == _gpu_hash(data.tobytes()) == tensor.hexdigest()


@pytest.mark.parametrize("words", [0, 1, 33, 8191, 8192, 3 * 8192 + 17])
@pytest.mark.parametrize("first", [0, 4 * 8192, 2**34 - 4 * 8192, 2**40 + 4 * 8192])
def test_the_hash_of_a_gpu_on_every_width(words: int, first: int) -> None:
    """Also where an index and a size have more than 32 bits, and where words are not aligned."""
    data = np.random.default_rng(words).integers(0, 256, 4 * words + 3, np.uint8)[3:]
    for nbytes in (4 * words, first + 4 * words):
        of_numpy = sum_of_tiles_by_numpy(data, first, nbytes)
        assert {width for width in library.widths() if sum_of_tiles(data, first, nbytes, width) != of_numpy} == set()


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (300, 200), (129, 1024)])
def test_products_of_blocks(shape: tuple[int, int]) -> None:
    """Every code, and scales that are no numbers; rows are part of a larger matrix. A NaN may have either sign."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (shape[0], shape[1] + 5), np.uint8)[:, 3:-2]
    scale = rng.standard_normal((-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
    for number in (1.0, 1e-38, np.inf, np.nan):
        scale[-1, 0] = number
        products, expected = products_of_blocks(codes, scale), decode(codes, scale, SQUARE, DTYPES["bfloat16"])
        is_nan = np.isnan(expected)
        assert np.array_equal(np.isnan(products), is_nan)
        assert np.array_equal(products[~is_nan].view(np.uint16), expected[~is_nan].view(np.uint16))


def test_what_sglang_hashes_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    test_the_hash_of_a_gpu_in_parts(100_000)
    test_products_of_blocks((300, 200))


# Faults: each moves the keys of what it touches, and no other.


def _swapped(tensors: Arrays) -> None:
    for part in (*GATE_UP, "down_proj"):
        for suffix in ("", "_scale_inv"):
            a, b = (f"{LAYER}.mlp.experts.{i}.{part}.weight{suffix}" for i in range(2))
            tensors[a], tensors[b] = tensors[b], tensors[a]


def _one_ulp(tensors: Arrays) -> None:
    scale = tensors[f"{LAYER}.self_attn.k_proj.weight_scale_inv"]
    scale[1, 2] = np.nextafter(scale[1, 2], np.float32(1))


def _stale(tensors: Arrays) -> None:  # heads of the second of two ranks
    tensors[f"{LAYER}.self_attn.q_proj.weight"].view(np.uint8)[300, 7] ^= 1


def _floor(tensors: Arrays) -> None:  # one of zeros: its scale is the floor's
    tensors[f"{LAYER}.self_attn.o_proj.weight_scale_inv"][0, 0] = 1e-12


STEM, ATTENTION = f"{LAYER}.mlp.experts.routed_experts", f"{LAYER}.self_attn"


@pytest.mark.parametrize(
    ("fault", "keys"),
    [
        (
            _swapped,
            [(r, f"{STEM}.{w}{s}") for r in (0, 1) for w in ("w13", "w2") for s in ("_weight", "_weight_scale_inv")],
        ),
        (_one_ulp, [(1, f"{ATTENTION}.qkv_proj.weight_scale_inv")]),
        (_stale, [(1, f"{ATTENTION}.qkv_proj.weight")]),
        (_floor, [(0, f"{ATTENTION}.o_proj.weight_scale_inv")]),
    ],
)
def test_a_fault_moves_the_keys_that_it_touches(tmp_path: Path, fault: Callable[[Arrays], None], keys: Any) -> None:
    tensors = in_float8(weights(experts=True), "deep_gemm_block", "_scale_inv")
    expected = expected_checksums(write(tmp_path, tensors, BLOCKS), engine="vllm", tensor_parallel=2)
    fault(tensors)
    served = expected_checksums(write(tmp_path, tensors, BLOCKS), engine="vllm", tensor_parallel=2)
    moved = expected.compare(served.engine_json())
    assert sorted(tensor.key for tensor in moved) == sorted(f"dp0:pp0:pcp0:tp{rank}:{name}" for rank, name in keys)


def test_another_dtype_of_the_source_moves_codes(tmp_path: Path) -> None:
    wide = weights(dtype="float32")
    narrow = {name: x.astype(ml_dtypes.bfloat16) for name, x in wide.items()}
    expected, served = (
        expected_checksums(write(tmp_path / name, x), engine="vllm", dialect="torchao_rowwise_float")
        for name, x in (("wide", wide), ("narrow", narrow))
    )
    moved = {tensor.key.rpartition(":")[2] for tensor in expected.compare(served.engine_json())}
    modules = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert moved == {f"{LAYER}.{module}.{name}" for module in modules for name in ("weight", "weight_scale")}


def test_what_follows_from_no_checkpoint_is_named(tmp_path: Path) -> None:
    tensors = weights(experts=True)
    tensors["model.vision.patch.weight"] = tensors["model.norm.weight"]
    del tensors[f"{LAYER}.mlp.experts.1.up_proj.weight"]
    expected = expected_checksums(write(tmp_path, tensors), engine="vllm", dialect="vllm_weight_block_cuda")
    reasons = dict(expected.not_predicted)
    assert reasons["model.vision.patch.weight"] == "no rule knows this module"
    assert "not IEEE" in reasons[f"{LAYER}.self_attn.o_proj.weight"]
    assert "lacks a part" in dict(expected_checksums(tmp_path, engine="vllm").not_predicted)[f"{STEM}.w13_weight"]
    sglang = expected_checksums(tmp_path, engine="sglang", dialect="sglang_weight_tensor")
    left = dict(sglang.not_predicted)
    assert "not IEEE" in left[f"{LAYER}.self_attn.o_proj.weight"] and f"{LAYER}.mlp.gate.weight" not in left


def test_marlin_packs_whatever_the_scales_are_of(tmp_path: Path) -> None:
    tensors = in_float8(weights(), "compressed_tensors_channel", "_scale")
    write(tmp_path / "channel", tensors, CHANNELS)
    write(tmp_path / "source", weights())
    options: Any
    for folder, options in (("channel", {}), ("source", {"dialect": "vllm_weight_tensor"})):
        for engine in ("vllm", "sglang"):
            expected = expected_checksums(tmp_path / folder, engine=engine, kernel="marlin", **options)
            assert len(expected.not_predicted) == 4 and {why[:12] for _, why in expected.not_predicted} == {
                "Marlin packs"
            }
            assert not any("_proj" in tensor.name for tensor in expected.tensors)


def test_engines_take_no_router_or_head_in_float8(tmp_path: Path) -> None:
    # vLLM quantizes the router of Qwen3-MoE.
    tensors = in_float8(weights(experts=True), "deep_gemm_block", "_scale_inv")
    gate, head = f"{LAYER}.mlp.gate.weight", "lm_head.weight"
    for name in (gate, head):
        tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensors[name], "deep_gemm_block")
    write(tmp_path, tensors, BLOCKS)
    engines: Any = (("vllm", {head}), ("sglang", {gate, head}))
    for engine, left in engines:
        assert {name for name, _ in expected_checksums(tmp_path, engine=engine).not_predicted} == left


@pytest.mark.parametrize(("words", "kept"), [(64, [16, 16, 16, 16]), (33, [16, 16, 1, 0])])
def test_a_rank_may_have_no_padding_or_nothing_else(tmp_path: Path, words: int, kept: list[int]) -> None:
    tensors = weights()
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:words]
    tensors["lm_head.bias"] = tensors["model.norm.weight"][:words]
    for engine in ("vllm", "sglang"):
        expected = expected_checksums(write(tmp_path, tensors), engine=engine, tensor_parallel=4)
        for name in ("lm_head.weight", "lm_head.bias"):
            whole = np.pad(tensors[name], [(0, 64 - words), *[(0, 0)] * (tensors[name].ndim - 1)])
            for rank, rows in enumerate(kept):
                mine = whole[16 * rank :][:16]
                assert shown(expected, name, rank) == sha(mine) and not mine[rows:].any()


def test_a_module_is_predicted_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    # q alone has a bias; up is a scale alone.
    tensors = in_float8(weights(), "deep_gemm_block", "_scale_inv")
    tensors[f"{LAYER}.self_attn.q_proj.bias"] = tensors["model.norm.weight"]
    del tensors[f"{LAYER}.mlp.up_proj.weight"]
    expected = expected_checksums(write(tmp_path, tensors, BLOCKS), engine="vllm")
    assert dict(expected.not_predicted) == {
        f"{LAYER}.self_attn.qkv_proj.weight": f"the checkpoint lacks {LAYER}.self_attn.k_proj.bias",
        f"{LAYER}.mlp.gate_up_proj.weight": f"the checkpoint lacks {LAYER}.mlp.up_proj.weight",
    }
    assert not any("qkv_proj" in tensor.name or "gate_up_proj" in tensor.name for tensor in expected.tensors)


def test_a_router_that_the_configuration_does_not_name_is_read_as_float8(tmp_path: Path) -> None:
    # vLLM 0.33.0 copies it into codes beside a scale that nobody wrote; SGLang keeps it.
    tensors = in_float8(weights(experts=True), "deep_gemm_block", "_scale_inv")
    write(tmp_path, tensors, {**BLOCKS, "modules_to_not_convert": ["lm_head"]})
    left = dict(expected_checksums(tmp_path, engine="vllm").not_predicted)
    assert "config.json does not leave" in left.pop(f"{LAYER}.mlp.gate.weight") and not left
    assert not expected_checksums(tmp_path, engine="sglang").not_predicted


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    tensors = in_float8(weights(), "deep_gemm_block", "_scale_inv")
    write(tmp_path, tensors, BLOCKS)
    with pytest.raises(OperandError, match="float8 already"):
        expected_checksums(tmp_path, engine="vllm", dialect="vllm_weight_block")
    wrong: Any
    for wrong in ({"engine": "trt"}, {"kernel": "cublas"}, {"device": "tpu"}, {"dtype": "BF16"}):
        with pytest.raises(SpecError, match="must be one of"):
            expected_checksums(tmp_path, **{"engine": "vllm", **wrong})
    for ranks in (0, -1):
        with pytest.raises(SpecError, match="at least 1"):
            expected_checksums(tmp_path, engine="vllm", tensor_parallel=ranks)
    with pytest.raises(UnsupportedError, match="--tp"):
        expected_checksums(tmp_path, engine="vllm", tensor_parallel=3)
    (tmp_path / "config.json").write_text('{"architectures": ["GPTBigCodeForCausalLM"]}')
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM"):
        expected_checksums(tmp_path, engine="vllm")
