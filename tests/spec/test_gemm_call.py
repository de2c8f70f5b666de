"""Bad calls of the GEMMs: one table, asked of every backend that takes it, and the rules of the GPU's library."""

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from f8emu.conformance.arrays import jax_arrays, torch_arrays
from f8emu.spec import (
    BLACKWELL_MMA,
    BLACKWELL_TCGEN05,
    E4M3FN,
    E5M2,
    HOPPER,
    F8Error,
    Granularity,
    OperandError,
    SpecError,
    UnsupportedError,
)
from f8emu.spec.gemm_call import (
    Shaped,
    check_library,
    group_parts,
    mm_call,
    scaled_grouped_mm_call,
    scaled_mm_call,
)

T, R = Granularity.TENSORWISE, Granularity.ROWWISE
V, S = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
M, N, K, G = 4, 6, 256, 2
F32, BF16, E4M3, E8M0 = "float32", "bfloat16", "float8_e4m3fn", "float8_e8m0fnu"
GOOD: dict[str, dict[str, Shaped]] = {
    "scaled_mm": {
        "a": Shaped((M, K), E4M3),
        "b": Shaped((K, N), E4M3),
        "scale_a": Shaped((1,), F32),
        "scale_b": Shaped((1,), F32),
    },
    "scaled_grouped_mm": {
        "a": Shaped((M, K), E4M3),
        "b": Shaped((G, K, N), E4M3),
        "scale_a": Shaped((M,), F32),
        "scale_b": Shaped((G, N), F32),
        "offs": Shaped((G,), "int32"),
    },
    "mm": {"a": Shaped((M, K), BF16), "b": Shaped((K, N), BF16)},
}
CALLS: dict[str, Callable[..., Any]] = {
    "scaled_mm": scaled_mm_call,
    "scaled_grouped_mm": scaled_grouped_mm_call,
    "mm": mm_call,
}
ROWS: dict[str, Any] = {"granularity_a": R, "granularity_b": R}
VECTORS: dict[str, Any] = {"granularity_a": V, "granularity_b": V}
BLOCKS: dict[str, Any] = {"scale_a": Shaped((M, 2), F32), "scale_b": Shaped((2, N), F32), **VECTORS}
BACKENDS = ("description", "f8ref.numpy", "f8emu.numpy", "f8ref.jax", "f8emu.jax", "f8emu.torch")
ARRAYS = {"jax": jax_arrays, "torch": torch_arrays}
NARROWING = ("f8emu.numpy", "f8ref.jax", "f8emu.jax")
SCALED, GROUPED = "scaled_mm", "scaled_grouped_mm"
OPERAND, SPEC, UNSUPPORTED = OperandError, SpecError, UnsupportedError
BAD: list[tuple[str, dict[str, Any], type[F8Error], str]] = [
    (SCALED, {"a": Shaped((M, K), "float64")}, OPERAND, "a must be float8_e4m3fn or float8_e5m2; got float64"),
    (SCALED, {"b": Shaped((K, N), BF16)}, OPERAND, "b must be float8_e4m3fn or float8_e5m2; got bfloat16"),
    (SCALED, {"b": Shaped((N, K), E4M3)}, OPERAND, "a must be [M, K] and b [K, N]; got shapes [4, 256] and [6,"),
    (SCALED, {"a": Shaped((K,), E4M3)}, OPERAND, "a must be [M, K] and b [K, N]; got shapes [256] and"),
    (SCALED, {"scale_a": Shaped((M, 1), F32)}, OPERAND, "must have shapes [1, 1] and [1, 1] for tensorwise x"),
    (SCALED, {"scale_b": Shaped((1,), "float64")}, OPERAND, "scale_b must be float32; got float64; convert it first"),
    (
        SCALED,
        {"scale_a": Shaped((M, 1), F32), "scale_b": Shaped((N, 1), F32), **ROWS},
        OPERAND,
        "must have shapes [4, 1] and [1, 6] for rowwise x rowwise; got [4, 1] and [6, 1]; scales of b are those of its",
    ),
    (
        SCALED,
        {"scale_a": Shaped((2, M), F32), "scale_b": Shaped((2, N), F32), **VECTORS},
        OPERAND,
        "must have shapes [4, 2] and [2, 6] for blockwise_1x128 x blockwise_1x128; got [2, 4] and [2, 6]",
    ),
    (SCALED, {"bias": Shaped((M,), F32)}, OPERAND, "bias must have shape [N] = [6], one value for each"),
    (SCALED, {"bias": Shaped((N,), "float64")}, OPERAND, "bias must be float32 or bfloat16 or float16; got float64"),
    (SCALED, {"out_dtype": "float64"}, SPEC, "unknown format 'float64'"),
    (SCALED, {"out_dtype": "float8_e5m2"}, UNSUPPORTED, "out_dtype must be one of float32, bfloat16, float16"),
    (SCALED, {"granularity_a": "columnwise"}, SPEC, "granularity must be one of tensorwise, rowwise"),
    (SCALED, {"granularity_a": S, "granularity_b": S}, UNSUPPORTED, "Hopper takes scales tensorwise x tensorwise, "),
    (SCALED, {"granularity_a": T, "granularity_b": R}, UNSUPPORTED, "got tensorwise x rowwise; to use a tensorwise"),
    (SCALED, {"use_fast_accum": True, **BLOCKS}, UNSUPPORTED, "Hopper has no fast accumulation beside block scales"),
    (SCALED, {"a": Shaped((M, K), "float8_e5m2"), **BLOCKS}, UNSUPPORTED, "Hopper takes block scales of float8_e4m3fn"),
    (
        SCALED,
        {"a": Shaped((M, K), "float8_e4m3fnuz")},
        OPERAND,
        "a must be float8_e4m3fn or float8_e5m2; got float8",
    ),
    (SCALED, {"split_k": 0}, SPEC, "split_k must be a static integer of at least 1, which means no split-K; got 0"),
    (SCALED, {"split_k": True}, SPEC, "got True; leave it out to take the plan's"),
    (
        SCALED,
        {"a": Shaped((M, K), "float8_e5m2"), "b": Shaped((K, N), "float8_e5m2")},
        UNSUPPORTED,
        "got float8_e5m2 x float8_e5m2; cast to one of these",
    ),
    ("mm", {"a": Shaped((M, K), F32)}, OPERAND, "a must be bfloat16; got float32; quantize or cast it first"),
    ("mm", {"b": Shaped((M, K), BF16)}, OPERAND, "a must be [M, K] and b [K, N]; got shapes [4, 256] and [4,"),
    ("mm", {"split_k": -1}, SPEC, "split_k must be a static integer of at least 1, which means no split-K; got -1"),
    (GROUPED, {"b": Shaped((G, N, K), E4M3)}, OPERAND, "divides M; got [4, 256], [2, 6, 256], [4], [2, 6]"),
    (GROUPED, {"b": Shaped((K, N), E4M3)}, OPERAND, "[M, K], [K, N], [G*M], [G*N] and [G] where offs divides K"),
    (GROUPED, {"scale_a": Shaped((M, 1), F32)}, OPERAND, "got [4, 256], [2, 256, 6], [4, 1], [2, 6], [2]"),
    (GROUPED, {"scale_b": Shaped((N,), F32)}, OPERAND, "got [4, 256], [2, 256, 6], [4], [6], [2]"),
    (GROUPED, {"offs": Shaped((3,), "int32")}, OPERAND, "got [4, 256], [2, 256, 6], [4], [2, 6], [3]"),
    (GROUPED, {"offs": Shaped((G,), "int64")}, OPERAND, "offs must be int32, the end of each group; got int64"),
    (GROUPED, {"offs": None}, OPERAND, "[4], [2, 6] and no offs; without groups it is scaled_mm"),
    (GROUPED, {"a": Shaped((G, M, K), E4M3)}, OPERAND, "absent where every group has its own a and b; got [2, 4, 256]"),
]

X = Granularity.BLOCKWISE_1X32
B200: dict[str, Any] = {"chip": BLACKWELL_TCGEN05}
OF_MX: dict[str, dict[str, Any]] = {
    SCALED: {
        **{"scale_a": Shaped((M, 8), E8M0), "scale_b": Shaped((8, N), E8M0), **B200},
        **{"granularity_a": X, "granularity_b": X, "split_k": 1},
    },
    GROUPED: {"scale_a": Shaped((M, 8), E8M0), "scale_b": Shaped((G, 8, N), E8M0), **B200},
}
"""MXFP8, beside the operands of `GOOD`."""
MX_BAD: list[tuple[str, dict[str, Any], type[F8Error], str]] = [
    *(
        (call, {"chip": chip}, UNSUPPORTED, ", which float8_e8m0fnu scales are; choose the chip B200")
        for call, chip in ((SCALED, HOPPER), (SCALED, BLACKWELL_MMA), (GROUPED, HOPPER))
    ),
    *(
        (SCALED, change, UNSUPPORTED, f"scales of blockwise_1x32 are float8_e8m0fnu, and no others are; got {rest}")
        for change, rest in (
            ({"granularity_a": T, "granularity_b": T}, "float8_e8m0fnu scales for tensorwise x tensorwise; name block"),
            (
                {"scale_a": Shaped((M, 8), F32), "scale_b": Shaped((8, N), F32)},
                "float32 scales for blockwise_1x32 x blockwise_1x32; name blockwise_1x32 for both, and view bytes",
            ),
        )
    ),
    (SCALED, {"granularity_b": T}, UNSUPPORTED, "Blackwell tcgen05 takes scales tensorwise x tensorwise, rowwise x"),
    (SCALED, {"scale_b": Shaped((8, N), F32)}, OPERAND, "scale_b must be float8_e8m0fnu; got float32; convert it"),
    (SCALED, {"scale_a": Shaped((M, 8), "uint8")}, OPERAND, "got uint8; view bytes that are codes as their dtype"),
    (
        SCALED,
        {"scale_a": Shaped((M, 2), E8M0)},
        OPERAND,
        "must have shapes [4, 8] and [8, 6] for blockwise_1x32 x blockwise_1x32; got [4, 2] and [8, 6]; scales of b",
    ),
    (
        SCALED,
        {"scale_b": Shaped((N, 8), E8M0)},
        OPERAND,
        "got [4, 8] and [6, 8]; scales of b are those of its transpose",
    ),
    (SCALED, {"use_fast_accum": True}, UNSUPPORTED, "no fast accumulation beside block scales; pass use_fast_accum=F"),
    (
        SCALED,
        {"a": Shaped((M, K), "float8_e5m2"), "b": Shaped((K, N), "float8_e5m2")},
        UNSUPPORTED,
        "Blackwell tcgen05 multiplies float8_e4m3fn x float8_e4m3fn, float8_e5m2 x float8_e4m3fn, float8_e4m3fn",
    ),
    (
        GROUPED,
        {"scale_a": Shaped((M,), E8M0)},
        OPERAND,
        "must be [M, K], [G, K, N], [M, B], [G, B, N], B = ceil(K / 32), and [G] where offs divides M; got [4, 256],",
    ),
    (GROUPED, {"scale_b": Shaped((G, N), F32)}, OPERAND, "scale_b must be float8_e8m0fnu; got float32; convert it"),
    (GROUPED, {"use_fast_accum": True}, UNSUPPORTED, "no fast accumulation beside block scales; pass use_fast_accum=F"),
]


def arrays_of(operands: dict[str, Any]) -> dict[str, Any]:
    """Zeros for what is described; offs that are right for `GOOD`."""
    arrays = {name: x for name, x in operands.items() if not isinstance(x, Shaped)}
    for name, x in operands.items():
        if isinstance(x, Shaped):
            arrays[name] = np.zeros(x.shape, getattr(ml_dtypes, x.dtype, None) or x.dtype)
    if arrays.get("offs") is not None:
        arrays["offs"][-1:] = M
    return arrays


def verb(backend: str, call: str) -> Callable[..., Any]:
    """A GEMM of a backend, with the operands of `GOOD`: described, or as arrays of numpy."""
    if backend == "description":
        return CALLS[call]
    framework = backend.rpartition(".")[2]
    module = pytest.importorskip(backend)
    load = {
        "numpy": lambda: np.asarray,
        "jax": lambda: jax_arrays("test").load,
        "torch": lambda: torch_arrays("test").load,
    }
    to_array = load[framework]()

    def run(**operands: Any) -> Any:
        arrays = {name: to_array(x) if isinstance(x, np.ndarray) else x for name, x in arrays_of(operands).items()}
        if framework == "torch":  # whose b is column-major
            arrays["b"] = arrays["b"].mT.contiguous().mT if arrays["b"].ndim > 1 else arrays["b"]
            arrays = {"out_dtype": BF16, **arrays}
        gemm = functools.partial(getattr(module, call), **arrays)
        return importlib.import_module("jax").eval_shape(gemm) if framework == "jax" else gemm()

    return run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("call", "change", "kind", "message"), BAD, ids=[f"{c}: {m[:40]}" for c, _, _, m in BAD])
def test_a_bad_call_is_refused(
    call: str, change: dict[str, Any], kind: type[F8Error], message: str, backend: str
) -> None:
    """By the description alone, and by the verbs of every backend."""
    operands = GOOD[call] | change
    is_wide = any(isinstance(x, Shaped) and x.dtype in ("float64", "int64") for x in change.values())
    if is_wide and backend in NARROWING:
        pytest.skip("it takes 64 bits where 32 bits hold them")
    with pytest.raises(F8Error) as caught:
        verb(backend, call)(**operands)
    assert type(caught.value) is kind
    if "out_dtype" not in change or backend in ("description", "f8ref.numpy"):  # others name the dtypes of theirs
        assert message in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("call", "change", "kind", "message"), MX_BAD, ids=[f"{c}: {m[:40]}" for c, _, _, m in MX_BAD])
def test_a_bad_call_of_mxfp8_is_refused(
    call: str, change: dict[str, Any], kind: type[F8Error], message: str, backend: str
) -> None:
    operands = GOOD[call] | OF_MX[call]
    if backend != "f8emu.torch":  # whose sizes are those of the library
        out = verb(backend, call)(**operands)
        assert (out.out_shape if backend == "description" else out.shape) == (M, N)
    with pytest.raises(kind, match=re.escape(message)):
        verb(backend, call)(**operands | change)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", GOOD)
def test_what_is_refused_above_is_all_that_is_wrong_there(call: str, backend: str) -> None:
    operands = GOOD[call]
    if backend == "description":
        gemm = CALLS[call](**operands)
        assert gemm.sizes == (M, N, K) and gemm.call == call and gemm.chip == HOPPER
    elif backend != "f8emu.torch":  # whose sizes are those of the library
        by_name = {"granularity_a": "tensorwise", "granularity_b": "tensorwise"} if call == SCALED else {}
        assert verb(backend, call)(**operands, **by_name).shape == (M, N)


def test_a_call_knows_how_the_chip_adds() -> None:
    blocks = {"scale_a": Shaped((M, 2), F32), "scale_b": Shaped((2, 1), F32), "granularity_b": S}
    calls = [
        scaled_mm_call(**GOOD[SCALED]),  # type: ignore[arg-type]
        scaled_mm_call(**GOOD[SCALED], use_fast_accum=True),  # type: ignore[arg-type]
        scaled_mm_call(**{**GOOD[SCALED], **blocks}),
        mm_call(**GOOD["mm"]),  # type: ignore[arg-type]
    ]
    assert calls[2].granularities == (V, S)
    assert [call.model for call in calls] == [
        *(HOPPER.float8, HOPPER.float8_fast, HOPPER.accumulation((V, S)), HOPPER.bfloat16)
    ]


LIBRARY: list[tuple[tuple[int, int, int], dict[str, Any], type[F8Error], str]] = [
    ((0, 16, 16), {}, OPERAND, "empty operands, M, N, K = 0, 16, 16; skip the GEMM"),
    ((4, 16, 72), {}, OPERAND, "K and N must be multiples of 16; got K = 72, N = 16; pad the operands"),
    ((4, 8, 16), {}, OPERAND, "K and N must be multiples of 16; got K = 16, N = 8"),
    ((6, 16, 256), VECTORS, OPERAND, "with 1x128 scales of a, M must be a multiple of 4; got 6; pad a and"),
    ((4, 16, 256), {**VECTORS, "bias": BF16}, UNSUPPORTED, "a bias with blockwise scales is not modelled"),
    ((4, 16, 16), {"bias": F32, "out_dtype": F32}, UNSUPPORTED, "the hardware adds no bias to a float32 output"),
    ((4, 16, 16), {"bias": "float16"}, OPERAND, "bias must be of out_dtype bfloat16; got float16; convert it"),
]


@pytest.mark.parametrize(("sizes", "options", "kind", "message"), LIBRARY, ids=[row[3][:40] for row in LIBRARY])
def test_the_library_refuses_more(
    sizes: tuple[int, int, int], options: dict[str, Any], kind: type[F8Error], message: str
) -> None:
    """As `torch._scaled_mm` on CUDA, and therefore both engines of f8emu.torch; the oracle takes any size."""
    m, n, k = sizes
    bias = Shaped((n,), options["bias"]) if "bias" in options else None
    pair = (V, V) if "granularity_a" in options else (T, T)
    scales = Shaped(pair[0].scale_shape(m, k), F32), Shaped(pair[1].scale_shape(n, k)[::-1], F32)
    options = {name: x for name, x in options.items() if name != "bias"}
    gemm = scaled_mm_call(Shaped((m, k), E4M3), Shaped((k, n), E4M3), *scales, bias, **options)
    with pytest.raises(F8Error) as caught:
        check_library(gemm, bias)
    assert type(caught.value) is kind and f"scaled_mm: {message}" in str(caught.value)


def test_the_library_of_mxfp8() -> None:
    """K need not be a multiple of 32; a bias is taken; groups divide M or K."""
    shapes: dict[str, tuple[int, ...]] = {"a": (4, 48), "b": (48, 16), "scale_a": (4, 2), "scale_b": (2, 16)}
    of = {name: Shaped(shape, E4M3 if name in "ab" else E8M0) for name, shape in shapes.items()}
    bias = Shaped((16,), BF16)
    check_library(scaled_mm_call(**of, bias=bias, **B200), bias)  # type: ignore[arg-type]
    with pytest.raises(OperandError, match="bias must be of out_dtype float16; got bfloat16"):
        check_library(scaled_mm_call(**of, bias=bias, out_dtype="float16", **B200), bias)  # type: ignore[arg-type]
    for batched_a in (False, True):
        for batched_b in (False, True):
            stacked = {"a": batched_a, "scale_a": batched_a, "b": batched_b, "scale_b": batched_b}
            grouped: Any = {name: Shaped((G,) * stacked[name] + x.shape, x.dtype) for name, x in of.items()}
            ends = None if batched_a and batched_b else Shaped((G,), "int32")
            gemm = scaled_grouped_mm_call(**grouped, offs=ends, **B200)
            if not batched_a:
                check_library(gemm)
                continue
            with pytest.raises(UnsupportedError, match="torch has E8M0 scales where offs divides M or K alone; here "):
                check_library(gemm)


def test_groups_of_k_have_whole_blocks() -> None:
    """The last may end with K, and empty ones follow it."""
    of = Shaped((M, 80), E4M3), Shaped((80, N), E4M3), Shaped((M, 3), E8M0), Shaped((3, N), E8M0)
    gemm = scaled_grouped_mm_call(*of, Shaped((4,), "int32"), **B200)
    blocks = [part.scale_a[1] for part in group_parts(gemm, [32, 32, 80, 80])]
    assert blocks == [slice(0, 1), slice(1, 1), slice(1, 3), slice(3, 3)]
    assert [part.scale_b[0] for part in group_parts(gemm, [32, 32, 80, 80])] == blocks
    for ends, run in (([32, 48, 64, 80], "32 to 48"), ([0, 0, 79, 79], "0 to 79")):
        with pytest.raises(OperandError, match=f"must end at multiples of 32; got one of {run}; pad it with zeros"):
            group_parts(gemm, ends)


def test_the_library_s_groups() -> None:
    good: Any = GOOD[GROUPED]
    other = scaled_grouped_mm_call(**{**good, "a": Shaped((M, K), E5M2.name)})
    with pytest.raises(OperandError, match=f"a must be {E4M3FN}; got {E5M2}"):
        check_library(other)
    with pytest.raises(UnsupportedError, match="out_dtype must be bfloat16; got float32"):
        check_library(scaled_grouped_mm_call(**good, out_dtype=F32))
    for ends in ([3, 2], [M + 1, M], [-1, M], [2, M + 1]):
        with pytest.raises(OperandError, match=re.escape(f"offs must rise to at most the {M} of M; got {ends}; give")):
            group_parts(scaled_grouped_mm_call(**good), ends)
    first, second = group_parts(scaled_grouped_mm_call(**good), [0, M])
    assert (first.gemm.sizes, second.gemm.sizes) == ((0, N, K), (M, N, K))
    assert second.a == second.out == (slice(0, M), slice(None)) and second.b == (1, slice(None), slice(None))
