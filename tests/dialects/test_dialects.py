"""Dialects without the packages: known facts, torch's own operations, the three libraries, refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import f8emu.numpy
from f8emu.dialects import (
    DIALECTS,
    Dialect,
    DialectName,
    arithmetic,
    dequantize,
    dialect_by_name,
    quantize,
    zero_block_scale,
)
from f8emu.dialects.rules import GROUP, ROW, SQUARE, TENSOR, Block
from f8emu.spec import F8Error, Granularity, OperandError, ScaleRule, SpecError, UnsupportedError

BF16 = np.dtype(ml_dtypes.bfloat16)
GRANULARITIES = {one.block: one for one in Granularity}
RULES = {name: one for name, one in DIALECTS.items() if one.scale is not None}


def bits(x: Any) -> NDArray[Any]:
    return np.asarray(x).view(f"u{np.asarray(x).itemsize}")


def stored(amax: NDArray[Any], dialect: Dialect, dtype: Any) -> NDArray[Any]:
    return arithmetic.factors_from_amax(amax, dialect, np.dtype(dtype)).stored


def normal(shape: tuple[int, int], dtype: Any = BF16) -> NDArray[Any]:
    random = np.random.default_rng(3)
    return (random.standard_normal(shape) * np.exp2(random.integers(-9, 9, shape))).astype(dtype)


# 1 Known facts


def test_zero_blocks() -> None:
    """The fingerprints, as public threads and sources have them."""
    known = {
        0.0: "vllm_tensor sglang_tensor torchao_inference modelopt_qtensor",
        1.0: "transformer_engine_current transformers_block transformers_block_ue8m0 qwix modelopt_tensor flax_linen",
        2.2321429e-15: "torchao_blockwise fbgemm_triton fbgemm_torch sglang_weight_tensor",
        2.2321428e-13: "vllm_group",
        2.0**-33: "vllm_group_ue8m0 vllm_group_ue8m0_packed",
        2.2321428e-07: "deep_gemm_block deepseek_group vllm_weight_block",
        2.0**-22: "deep_gemm_block_ue8m0 deepseek_group_ue8m0 vllm_weight_block_ue8m0 sglang_weight_block_ue8m0",
        4.3596542e-06: "vllm_token vllm_weight_channel fbgemm_cuda vllm_native_cuda",
        2.0**-7: "compressed_tensors_channel",
        2.0**-127: "torchao_mx_floor torchao_mx_rceil transformer_engine_mxfp8 modelopt_mxfp8",
        1e-12: "transformers_activation",
        448e12: "torchao_tensorwise",
    }
    for scale, names in known.items():
        assert [zero_block_scale(dialect_by_name(name)) for name in names.split()] == pytest.approx(
            [scale] * len(names.split()), rel=2e-7
        )
    assert zero_block_scale("compressed_tensors_block", "float16") == 2.0**-10
    assert zero_block_scale("compressed_tensors_block", "float32") == 2.0**-23


def test_codes_of_zero_blocks_and_nans() -> None:
    x = np.array([[0.0, -0.0, 0.0, 0.0], [1.0, np.nan, 2.0, -4.0]], BF16)
    codes: dict[DialectName, tuple[list[int], Any]] = {
        "vllm_tensor": ([0x7E] * 4, TENSOR),
        "torchao_inference": ([0x7F] * 4, ROW),
        "vllm_token": ([0, 0x80, 0, 0], ROW),
        "transformers_block": ([0, 0x80, 0, 0], TENSOR),
    }
    for name, (expected, block) in codes.items():
        assert bits(quantize(x[:1], name, block=block).codes).tolist() == [expected]
    of_nan: dict[DialectName, int] = {
        "vllm_token": 0x7E,
        "vllm_group": 0xFE,
        "torchao_inference": 0x7F,
        "modelopt_channel": 0x7F,
    }
    for name, expected in of_nan.items():
        assert bits(quantize(x[1:], name).codes)[0, 1] == expected


def test_mx_rules_over_the_mantissas_of_bfloat16() -> None:
    """How many of the 128 give another power of two than rounding amax / 448 up."""
    amax = np.arange(0x3F80, 0x4000, dtype=np.uint16).view(BF16).astype(np.float32)
    scales = {name: bits(stored(amax, dialect, BF16)) for name, dialect in RULES.items() if "mx" in name}
    reference = scales["torchao_mx_rceil"]
    apart = {name: int((of != reference).sum()) for name, of in scales.items() if of.dtype == np.uint8}
    assert apart == {
        "transformer_engine_mxfp8": 0,
        "modelopt_mxfp8": 0,
        "torchao_mx_rceil": 0,
        "torchao_mx_floor": 31,
        "torchao_mx_ceil": 96,
        "torchao_mx_even": 23,
        "compressed_tensors_mxfp8": 1,
    }


def test_powers_of_two_by_bits_and_by_log2() -> None:
    """They part for an amax one unit above 448 * 2^k: sglang#29954."""
    amax = np.nextafter(np.float32(448 * 2.0**-20), np.float32(1)).reshape(1, 1)
    assert stored(amax, DIALECTS["deepseek_group_ue8m0"], np.float32) == 2.0**-20
    assert stored(amax, DIALECTS["deep_gemm_block_ue8m0"], np.float32) == 2.0**-19


# 2 The production path


@pytest.mark.parametrize("name", DIALECTS)
def test_scale_rule(name: DialectName) -> None:
    """It gives the dialect's bytes, or there is none; then torchao's default rule gives others."""
    dialect = DIALECTS[name]
    blocks = [block for block in dialect.blocks if block in GRANULARITIES]
    try:
        rule = dialect.scale_rule
    except UnsupportedError as error:
        assert name in str(error) and "f8emu.dialects.quantize" in str(error)
        rule = None
    near = bits(np.float32(448.0) * np.exp2(np.arange(-60, 60, 7, dtype=np.float32)))[:, None] + np.arange(-16, 17)
    every = np.arange(0x7F80, dtype=np.uint16).view(BF16).astype(np.float32)
    amax = np.concatenate([every, near.astype(np.uint32).view(np.float32).ravel()])
    amax = amax[amax < 2.0**100]
    if rule is not None:
        found = f8emu.numpy.scale_from_amax(amax, "float8_e4m3fn", rule)
        theirs = found.inv_scale if dialect.stored.is_multiplier else found.scale
        mine = stored(amax, dialect, np.float32).astype(np.float32)
        assert (bits(mine) == bits(theirs.astype(np.float32))).all()
        for block in blocks:
            x = normal((160, 300), np.float32)
            scales = f8emu.numpy.scale_from_amax(f8emu.numpy.amax(x, GRANULARITIES[block]), "float8_e4m3fn", rule)
            codes = f8emu.numpy.quantize(x, scales.inv_scale, "float8_e4m3fn", GRANULARITIES[block])
            assert (bits(codes) == bits(quantize(x, dialect, block=block).codes)).all()
    elif dialect.scale is not None and not dialect.stored.is_multiplier:
        default = f8emu.numpy.scale_from_amax(amax, "float8_e4m3fn", ScaleRule()).scale
        assert (stored(amax, dialect, np.float32).astype(np.float32) != default).any()


# 3 torch's operations, as the sources of the stacks write them


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_text_of_torch(device: str) -> None:
    """Dialects that are a few lines of torch, written with torch; on CUDA the same text is another dialect."""
    torch: Any = pytest.importorskip("torch")

    def ceil_to_ue8m0(x: Any) -> Any:
        integers = x.abs().float().view(torch.int)
        exponent = ((integers >> 23) & 0xFF) + (integers & 0x7FFFFF).bool().int()
        return (exponent.clamp(1, 254) << 23).view(torch.float)

    def deep_gemm(x: Any, amax: Any) -> Any:
        sf = amax.float().clamp(1e-4) / 448.0
        return x * (1.0 / sf), sf

    def deep_gemm_up(x: Any, amax: Any) -> Any:
        sf = ceil_to_ue8m0(amax.float().clamp(1e-4) / 448.0)
        return x * (1.0 / sf), sf

    def deepseek(x: Any, amax: Any) -> Any:
        s = torch.exp2(torch.ceil(torch.log2(amax.float().clamp(1e-4) / 448.0)))
        return x.float() / s, s

    def native(x: Any, amax: Any) -> Any:
        scale = (amax.float() / 448.0).clamp(min=1.0 / (448.0 * 512.0))
        return (x.float() * scale.reciprocal()).clamp(-448.0, 448.0), scale

    def native_group(x: Any, amax: Any) -> Any:
        scale = (amax.float() / 448.0).clamp(min=1.0 / (448.0 * 512.0))
        return (x.float() / scale).clamp(-448.0, 448.0), scale

    def input_to_float8(x: Any, amax: Any) -> Any:
        scale = 448.0 / amax.float().clamp(min=1e-12)
        return (x.float() * scale).clamp(-448.0, 448.0), scale.reciprocal()

    def autofp8(x: Any, amax: Any) -> Any:
        scale = 448.0 / amax.clamp(min=1e-12)
        return (x * scale).clamp(-448.0, 448.0), scale.float().reciprocal()

    def fbgemm(x: Any, amax: Any) -> Any:
        scale = 448.0 / amax.clamp(min=1e-12).to(torch.float32)
        scale[scale == float("inf")] = 1.0
        return x * scale, 1 / scale

    texts: dict[str, tuple[Callable[[Any, Any], Any], Block]] = {
        "deep_gemm_block": (deep_gemm, GROUP),
        "vllm_weight_block": (deep_gemm, SQUARE),
        "deep_gemm_block_ue8m0": (deep_gemm_up, SQUARE),
        "deepseek_group_ue8m0": (deepseek, GROUP),
        "vllm_native": (native, ROW),
        "vllm_native_group": (native_group, GROUP),
        "sglang_weight_tensor": (input_to_float8, TENSOR),
        "fbgemm_torch": (fbgemm, SQUARE),
        "autofp8_tensor": (autofp8, TENSOR),
    }
    x = normal((256, 384), np.float32)
    x[:128, :128], x[128] = 0.0, 1e-6
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.from_numpy(x).to(device, dtype)
        for name, (text, (rows, k)) in texts.items():
            name = f"{name}_cuda" if device == "cuda" and f"{name}_cuda" in DIALECTS else name
            blocks = tensor.view(256 // (rows or 256), rows or 256, 384 // (k or 384), k or 384)
            values, scale = text(blocks, blocks.abs().amax((1, 3), keepdim=True))
            made = quantize(tensor, dialect_by_name(name), block=(rows, k))
            apart = made.scale != scale[:, 0, :, 0]
            if name == "fbgemm_torch" and dtype != torch.float32:  # its caveat: zeros in 16 bits
                assert apart[0, 0]
                apart[0, 0] = False
            assert not apart.any(), name
            codes = values.to(torch.float8_e4m3fn).view(256, 384)
            assert torch.equal(made.codes.view(torch.uint8), codes.view(torch.uint8)), name


def test_under_a_compiler_of_torch() -> None:
    """Its graph ends before, and goes on behind; where it may not end, the reason is said."""
    torch: Any = pytest.importorskip("torch")

    def run(x: Any) -> Any:
        codes, scale = quantize(x * 2, "torchao_rowwise")
        return dequantize(codes, scale, "torchao_rowwise", out_dtype="float32") + 1

    x = torch.from_numpy(normal((4, 64), np.float32))
    assert torch.equal(torch.compile(run, backend="eager")(x), run(x))
    torch.compiler.reset()
    with pytest.raises(Exception, match="it computes on the host; leave fullgraph out"):
        torch.compile(run, backend="eager", fullgraph=True)(x)


# 4 Blocks, bands and libraries


@pytest.mark.parametrize("block", [TENSOR, ROW, GROUP, SQUARE, (128, 1), (1, 32)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (129, 257), (256, 128), (0, 5), (4, 0)])
def test_partial_blocks(shape: tuple[int, int], block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    """As loops over blocks give them, in bands of any size."""
    dialect = replace(DIALECTS["torchao_blockwise"], blocks=(block,))
    x = normal(shape)
    rows, k = block[0] or max(shape[0], 1), block[1] or max(shape[1], 1)
    grid = (-(-shape[0] // rows), -(-shape[1] // k))
    codes, scale = np.zeros(shape, np.uint8), np.zeros(grid, np.float32)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * k, (j + 1) * k)
            amax = np.max(np.abs(x[part].astype(np.float64)))
            t = np.float32(448 / max(amax, 1e-12))
            scale[i, j] = 1 / t
            codes[part] = bits(f8emu.numpy.cast(x[part].astype(np.float32) * t, "float8_e4m3fn"))
    for band in (1, 200, 1 << 19):
        monkeypatch.setattr(arithmetic, "_BAND", band)
        made = quantize(x, dialect)
        assert (bits(made.codes) == codes).all() and (made.scale == scale).all() and made.scale.shape == grid
        values = dequantize(made.codes, made.scale, dialect, out_dtype="float32")
        expected = f8emu.numpy.decode(made.codes) * scale.repeat(rows, 0).repeat(k, 1)[: shape[0], : shape[1]]
        assert (values == expected).all()


def test_the_cast_is_the_oracles() -> None:
    """Every bfloat16, and float32 next to every midpoint of two codes."""
    x = np.arange(1 << 16, dtype=np.uint16).view(BF16).astype(np.float32)
    x = np.concatenate([(bits(x) + np.uint32(step)).view(np.float32) for step in (0, 1, 0xFFFF)])
    scale = np.ones((1, 1), np.float32)
    made = quantize(
        x.reshape(1, -1), replace(DIALECTS["vllm_static"], code=DIALECTS["torchao_inference"].code), scale=scale
    )
    assert (bits(made.codes)[0] == bits(f8emu.numpy.cast(x, "float8_e4m3fn"))).all()


NAMES = "vllm_group torchao_rowwise compressed_tensors_block transformers_block_ue8m0 modelopt_qtensor"


@pytest.mark.parametrize("name", NAMES.split())
def test_libraries_agree(name: DialectName) -> None:
    torch: Any = pytest.importorskip("torch")
    jax: Any = pytest.importorskip("jax")
    from f8emu import interop

    x = normal((130, 200))
    mine = quantize(x, name)
    back = dequantize(mine.codes, mine.scale, name, out_dtype="bfloat16")
    tensor = interop.to_torch(x)
    of_torch = quantize(tensor.t().contiguous().t(), name)  # strides of a transpose
    compiled = jax.jit(lambda x: quantize(x, name))
    for made in (of_torch, quantize(interop.to_jax(x), name), compiled(interop.to_jax(x))):
        assert type(made.codes) in (torch.Tensor, type(interop.to_jax(x))), "arrays of x's library"
        again = dequantize(made.codes, made.scale, name, out_dtype="bfloat16")
        for theirs, ours in ((made.codes, mine.codes), (made.scale, mine.scale), (again, back)):
            array = interop.to_numpy(theirs)
            assert array.dtype == ours.dtype and (bits(array) == bits(ours)).all()
    assert torch.equal(tensor, interop.to_torch(x)), "x is only read"


def test_given_scales() -> None:
    x = normal((4, 256))
    for name in ("vllm_static", "vllm_group", "torchao_rowwise_float"):
        block = DIALECTS[name].blocks[0] if DIALECTS[name].scale else GROUP
        of = "vllm_group" if name == "vllm_static" else name
        made = quantize(x, of)
        again = quantize(x, name, block=block, scale=made.scale)
        assert (bits(made.codes) == bits(again.codes)).all() and again.scale is made.scale


def test_fused_shards() -> None:
    """Decoding rounds the scale to float16, as vLLM does before it fuses shards; others do not."""
    codes = np.array([[0x38, 0x7E]], np.uint8).view(ml_dtypes.float8_e4m3fn)
    scale = np.full((1, 1), 1.0 + 2.0**-11 + 2.0**-13, np.float32)
    assert dequantize(codes, scale, "vllm_fused_shards", out_dtype="float16").tolist() == [[1.0009765625, 448.5]]
    tiny = np.full((1, 1), 2.0**-26, np.float32)
    assert dequantize(codes, tiny, "vllm_fused_shards", out_dtype="float16").tolist() == [[0.0, 0.0]]
    assert dequantize(codes, tiny, "vllm_static", out_dtype="float16")[0, 1] == 448 * 2.0**-26


# 5 Refusals, and the table

X = np.ones((2, 128), np.float32)
REFUSED: dict[str, tuple[type[F8Error], str, Callable[[], object]]] = {
    "name": (SpecError, "unknown dialect 'vllm'", lambda: quantize(X, "vllm")),  # pyright: ignore[reportArgumentType]
    "block": (SpecError, "block must be one that vllm_group has", lambda: quantize(X, "vllm_group", block=(1, 64))),
    "dtype": (OperandError, "x must be a matrix", lambda: quantize(X.astype(np.float64), "vllm_group")),
    "rank": (OperandError, "got float32 [128]", lambda: quantize(X[0], "vllm_group")),
    "list": (OperandError, "got list", lambda: quantize([[1.0]], "vllm_group")),
    "given": (OperandError, "must be given scale", lambda: quantize(X, "vllm_static")),
    "grid": (OperandError, "scale must be [2, 1]", lambda: quantize(X, "vllm_group", scale=X)),
    "codes": (OperandError, "codes must be a matrix", lambda: dequantize(X, X, "vllm_group", out_dtype="float32")),
    "zero": (OperandError, "they are given", lambda: zero_block_scale("vllm_static")),
    "out": (SpecError, "out_dtype must be", lambda: zero_block_scale("vllm_group", "float64")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    kind, text, call = REFUSED[case]
    with pytest.raises(kind) as raised:
        call()
    assert text in str(raised.value) and ";" in str(raised.value)


def test_the_table() -> None:
    assert all(name == dialect.name and dialect_by_name(dialect) is dialect for name, dialect in DIALECTS.items())
    assert len(
        {
            (dialect.stack, dialect.formula, dialect.blocks, dialect.stored, dialect.source)
            for dialect in DIALECTS.values()
        }
    ) == len(DIALECTS)
    for dialect in DIALECTS.values():
        assert hash(dialect) == hash(replace(dialect)) and dialect.blocks and dialect.source and dialect.formula
        assert ("==" in dialect.version) or not dialect.is_compared, "a compared package has a version that pip knows"
        assert bool(dialect.scale_ulps or dialect.code_steps) <= bool(dialect.caveat), "a bound has a reason"


def test_those_said_to_have_run_on_a_gpu_did() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    recorded = json.loads((results / "dialects_on_gpu-h100.json").read_text())
    found: dict[str, list[dict[str, Any]]] = {}
    for case in recorded["cases"]:
        if case["verdict"] != "not run":
            found.setdefault(case["dialect"], []).append(case)
    agreeing = {name for name, cases in found.items() if {case["verdict"] for case in cases} <= {"equal", "within"}}
    # Of TransformerEngine the scales alone were computed there.
    whole = {name for name in agreeing if any(case["codes"] for case in found[name])}
    assert {name for name, dialect in DIALECTS.items() if dialect.gpu} == whole, (
        f"on an H100: {' '.join(sorted(whole))}"
    )
    for name in DIALECTS.keys() & whole:
        exact = [case for case in found[name] if case["verdict"] == "equal"]
        assert exact or DIALECTS[name].code_steps, f"{name} claims exactness; its kernels were never equal"
