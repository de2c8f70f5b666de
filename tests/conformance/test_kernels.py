"""Kernels as data: every known declaration on a stand-in that takes its arguments, and checks what the library checks.

The stand-ins compute with the oracle, so equal bits mean that operands, scales and options arrived where they belong.
torch's own checks of a CUDA call are asked too, on fake tensors.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import f8ref.numpy as f8
from f8emu.conformance import Arg, Kernel, ScaleLayout, load_subject
from f8emu.conformance.arrays import torch_arrays
from f8emu.conformance.cases.gemm import Family, GemmCase, NotOffered, Placement
from f8emu.conformance.cases.tables import CODE_DISTRIBUTIONS, gemm_cases
from f8emu.conformance.compare import different
from f8emu.conformance.kernels.call import question
from f8emu.conformance.kernels.faults import LeftUnwritten, WroteOutOfBounds
from f8emu.conformance.kernels.kernel import PADDED_ROWS_BY_K, ROWWISE_VECTORS, Accumulation, OperandLayout
from f8emu.conformance.kernels.known import KERNELS
from f8emu.conformance.run.subject import kernel_subject
from f8emu.spec import BFLOAT16, FLOAT32, Granularity, SpecError
from tests.conformance.command import ENVIRONMENT, ROOT

VECTOR, SQUARE = Granularity.BLOCKWISE_1X128, Granularity.BLOCKWISE_128X128
ROWWISE = Granularity.ROWWISE
NUMPY = load_subject("f8ref.numpy")
TORCH = torch_arrays("test")


def n(tensor: Any) -> Any:
    return TORCH.store(tensor) if isinstance(tensor, torch.Tensor) else tensor


def oracle(
    a: Any, b: Any, scale_a: Any, scale_b: Any, pair: tuple[Granularity, Granularity], out: Any, **options: Any
) -> torch.Tensor:
    """a [M, K], b [K, N], scales as the verbs have them."""
    arrays = (n(x) for x in (a, b, scale_a, scale_b))
    name = str(out).removeprefix("torch.")
    bias = n(options.pop("bias", None))
    return TORCH.load(
        f8.scaled_mm(*arrays, granularity_a=pair[0], granularity_b=pair[1], out_dtype=name, bias=bias, **options)
    )


def checked_by_torch(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """torch's own checks of the call on a CUDA device, which nobody here wrote."""
    with FakeTensorMode():

        def fake(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

        function(*map(fake, args), **{name: fake(x) for name, x in options.items()})


# Stand-ins, with the signatures of the libraries


def torch_scaled_mm(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum) -> torch.Tensor:
    options = {"bias": bias, "use_fast_accum": use_fast_accum}
    checked_by_torch(torch.ops.aten._scaled_mm.default, a, b, scale_a, scale_b, out_dtype=out_dtype, **options)
    granularity = ROWWISE if scale_a.ndim else Granularity.TENSORWISE
    return oracle(a, b, scale_a, scale_b, (granularity, granularity), out_dtype, **options)


def functional_scaled_mm(
    a, b, scale_a, recipe_a, scale_b, recipe_b, *, bias, output_dtype, use_fast_accum
) -> torch.Tensor:
    options, operands = {"bias": bias, "use_fast_accum": use_fast_accum}, (a, b, scale_a, recipe_a, scale_b, recipe_b)
    checked_by_torch(torch.nn.functional.scaled_mm, *operands, output_dtype=output_dtype, **options)
    words = {"TensorWise": Granularity.TENSORWISE, "RowWise": ROWWISE, "BlockWise1x128": VECTOR}
    pair = words.get(recipe_a.name, SQUARE), words.get(recipe_b.name, SQUARE)
    scales = []
    for scale, granularity, rows in ((scale_a, pair[0], len(a)), (scale_b, pair[1], b.shape[1])):
        blocks = -(-a.shape[1] // 128)
        if granularity is VECTOR:  # what f8emu.torch.gemm.hardware gives cuBLAS, which an H200 accepted [EPI-5]
            assert (scale.shape, scale.stride()) == ((rows, blocks), (1, rows))
        if granularity is SQUARE:
            padded = -(-blocks // 4) * 4
            assert (scale.shape, scale.stride()) == ((padded, -(-rows // 128)), (1, padded))
            scale = scale[:blocks].T
        scales.append(scale)
    return oracle(a, b, scales[0], scales[1].T if pair[1].is_blockwise else scales[1], pair, output_dtype, **options)


def torch_scaled_grouped_mm(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum) -> torch.Tensor:
    options = {"offs": offs, "out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
    checked_by_torch(torch.ops.aten._scaled_grouped_mm.default, a, b, scale_a, scale_b, **options)
    arrays, out = (n(x) for x in (a, b, scale_a, scale_b, offs)), str(out_dtype).removeprefix("torch.")
    return TORCH.load(f8.scaled_grouped_mm(*arrays, out_dtype=out, use_fast_accum=use_fast_accum))


def functional_scaled_grouped_mm(
    a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype, **options
) -> torch.Tensor:
    assert recipe_a.name == recipe_b.name == "RowWise"
    return torch_scaled_grouped_mm(a, b, scale_a, scale_b, out_dtype=output_dtype, **options)


def fbgemm_rowwise(XQ, WQ, x_scale, w_scale, bias=None, use_fast_accum=True) -> torch.Tensor:
    assert XQ.is_contiguous() and WQ.is_contiguous() and WQ.shape[1] == XQ.shape[1]
    assert x_scale.shape == XQ.shape[:1] and w_scale.shape == WQ.shape[:1]
    pair, options = (ROWWISE, ROWWISE), {"bias": bias, "use_fast_accum": use_fast_accum}
    return oracle(XQ, WQ.T, x_scale[:, None], w_scale[None], pair, torch.bfloat16, **options)


def fbgemm_rowwise_out(XQ, WQ, x_scale, w_scale, output, bias=None, use_fast_accum=True) -> None:
    output.copy_(fbgemm_rowwise(XQ, WQ, x_scale, w_scale, bias, use_fast_accum))


def fbgemm_tensorwise(XQ, WQ, scale, use_fast_accum=True) -> torch.Tensor:
    assert XQ.is_contiguous() and WQ.is_contiguous() and type(scale) is float
    one = np.ones((1, 1), np.float32)
    pair = (Granularity.TENSORWISE, Granularity.TENSORWISE)
    return oracle(XQ, WQ.T, one * np.float32(scale), one, pair, torch.bfloat16, use_fast_accum=True)


def fbgemm_blockwise(XQ, WQ, x_scale, w_scale, block_m=128, block_n=128, block_k=128) -> torch.Tensor:
    (m, k), rows = XQ.shape, WQ.shape[0]
    assert (block_m, block_n, block_k) == (128, 128, 128)
    assert XQ.stride(-1) == 1 and WQ.stride() == (k, 1)
    blocks = -(-k // 128)
    assert x_scale.shape == (-(-m // 128), blocks) and x_scale.stride() == (blocks, 1)
    assert w_scale.shape == (-(-rows // 128), blocks) and w_scale.stride() == (blocks, 1)
    repeated = x_scale.repeat_interleave(128, 0)[:m]
    return oracle(XQ, WQ.T, repeated, w_scale.T, (VECTOR, SQUARE), torch.bfloat16)


def fbgemm_groupwise(XQ, WQ, x_scale, w_scale) -> torch.Tensor:
    (m, k), rows = XQ.shape, WQ.shape[0]
    assert XQ.is_contiguous() and WQ.is_contiguous() and x_scale.is_contiguous() and w_scale.is_contiguous()
    assert x_scale.shape == (-(-k // 128), m) and w_scale.shape == (-(-k // 128), -(-rows // 128))
    return oracle(XQ, WQ.T, x_scale.T, w_scale, (VECTOR, SQUARE), torch.bfloat16)


def deepgemm_fp8_gemm_nt(a, b, d, c=None, recipe=None) -> None:
    (a, sfa), (b, sfb) = a, b
    (m, k), rows, blocks = a.shape, b.shape[0], -(-a.shape[1] // 128)
    side = 128 if recipe is None else recipe[1]
    assert a.stride(-1) == b.stride(-1) == d.stride(-1) == 1 and d.shape == (m, rows) and b.shape[1] == k
    assert sfa.shape == (m, blocks) and sfb.shape == (-(-rows // side), blocks) and sfb.is_contiguous()
    if side == 128:
        assert d.dtype is torch.bfloat16 and c is None
        d.copy_(oracle(a, b.T, sfa, sfb.T, (VECTOR, SQUARE), d.dtype))
    else:
        assert c is not None and d.dtype is c.dtype is torch.float32 and recipe == (1, 1, 128)
        d.copy_(c)
        d.add_(oracle(a, b.T, sfa, sfb.T, (VECTOR, VECTOR), d.dtype))


def contiguous_groups(a, b, d, m_indices) -> None:
    starts = [i for i in range(len(d)) if i == 0 or m_indices[i] != m_indices[i - 1]]
    assert m_indices.dtype is torch.int32 and not any(start % 128 for start in starts)
    for start, stop in pairwise([*starts, len(d)]):
        group = int(m_indices[start])
        deepgemm_fp8_gemm_nt((a[0][start:stop], a[1][start:stop]), (b[0][group], b[1][group]), d[start:stop])


def masked_groups(a, b, d, masked_m, expected_m) -> None:
    assert masked_m.dtype is torch.int32 and len(masked_m) == len(a[0]) == len(b[0]) == len(d) and expected_m
    for group, rows in enumerate(masked_m.tolist()):
        d[group] = torch.nan
        if rows:
            own = a[0][group, :rows], a[1][group, :rows]
            deepgemm_fp8_gemm_nt(own, (b[0][group], b[1][group]), d[group, :rows])


def inner_groups(a, b, d, ks, ks_tensor, c, recipe=(1, 1, 128)) -> None:
    assert ks == ks_tensor.tolist() and ks_tensor.dtype is torch.int32 and not any(k % 128 for k in ks)
    for group, (start, stop) in enumerate(pairwise(accumulate([0, *ks]))):
        if start == stop:
            continue
        own = []
        for (codes, scales), rows in zip((a, b), d.shape[1:], strict=True):
            assert codes.numel() == rows * sum(ks) and scales.stride() == (1, rows)
            part = codes[start * rows : stop * rows].view(rows, stop - start)
            own.append((part, scales[:, start // 128 : stop // 128].contiguous()))
        deepgemm_fp8_gemm_nt(own[0], own[1], d[group], c[group].clone(), recipe)


DEEPGEMM_GROUPS = {
    "m_grouped_fp8_gemm_nt_contiguous": contiguous_groups,
    "m_grouped_fp8_gemm_nt_masked": masked_groups,
    "k_grouped_fp8_gemm_nt_contiguous": inner_groups,
}


def torchao_gemm(a, b, a_s, b_s, block_size: int = 128, out_dtype=torch.float32) -> torch.Tensor:
    def is_column_major(x: torch.Tensor) -> bool:
        return x.stride(-2) == 1

    assert a.stride(-1) == 1 and is_column_major(b) and is_column_major(a_s) and block_size == 128
    blocks = -(-a.shape[1] // 128)
    square = b_s.shape == (blocks, -(-b.shape[1] // 128))
    assert is_column_major(b_s) if square else (b_s.shape == (blocks, b.shape[1]) and b_s.stride(-1) == 1)
    return oracle(a, b, a_s, b_s, (VECTOR, SQUARE if square else VECTOR), out_dtype)


STAND_INS: dict[str, tuple[Callable[..., Any], int]] = {
    "torch._scaled_mm": (torch_scaled_mm, 20),
    "torch.nn.functional.scaled_mm": (functional_scaled_mm, 26),
    "torch._scaled_grouped_mm": (torch_scaled_grouped_mm, 10),
    "torch.nn.functional.scaled_grouped_mm": (functional_scaled_grouped_mm, 10),
    "fbgemm.rowwise": (fbgemm_rowwise, 4),
    "fbgemm.rowwise_out": (fbgemm_rowwise_out, 4),
    "fbgemm.tensorwise": (fbgemm_tensorwise, 4),
    "fbgemm.blockwise": (fbgemm_blockwise, 2),
    "fbgemm.groupwise": (fbgemm_groupwise, 2),
    "deepgemm.fp8_gemm_nt": (deepgemm_fp8_gemm_nt, 2),
    "deepgemm.fp8_gemm_nt_1d1d": (deepgemm_fp8_gemm_nt, 2),
    "torchao.triton_1x128_128x128": (torchao_gemm, 2),
    "torchao.triton_1x128_128x1": (torchao_gemm, 2),
}
"""Name -> stand-in, and how many of CASES it must take."""
OURS = {"triton.dot", "inductor.rowwise", "jax.dot_general"}


@cache
def few_cases() -> tuple[GemmCase, ...]:
    """All modes and formats, both chainings, with and without bias; sizes that are multiples of nothing."""
    kept = []
    for case in gemm_cases():
        small = case.a.shape[0] in (5, 48) or case.mode.value in ("blockwise", "grouped_rowwise")
        named = any(word in case.id for word in ("normal", "blockwise", "grouped"))
        if (small and named and case.split_k == 1) or ("specials" in case.id and case.a.shape == (16, 80)):
            kept.append(case)
    return tuple(kept)


ANSWERS: dict[tuple[object, ...], np.ndarray] = {}
"""What the oracle gives for a case in the form that a kernel takes."""


def equal_and_offered(kernel: Kernel) -> tuple[int, int]:
    """Of the few cases: how many equal the oracle, and how many the kernel takes."""
    subject = kernel_subject(kernel)
    equal = offered = 0
    for case in few_cases():
        question = subject.question(case)
        try:
            output = subject.gemm(question)
        except NotOffered:
            continue
        offered += 1
        key = question.id, question.out_dtype, question.use_fast_accum
        if key not in ANSWERS:
            ANSWERS[key] = question.run(NUMPY.verbs)
        equal += not different(output, ANSWERS[key]).any()
    return equal, offered


def answer(kernel: Kernel, case: GemmCase) -> np.ndarray:
    """What it gives for the case, asked as it takes it."""
    subject = kernel_subject(kernel)
    return subject.gemm(subject.question(case))


def rowwise_case(rows: int) -> GemmCase:
    return next(case for case in few_cases() if case.granularity_a is ROWWISE and case.a.shape[0] == rows)


def test_every_known_kernel_is_tried() -> None:
    assert set(KERNELS) == set(STAND_INS) | OURS | {f"deepgemm.{name}" for name in DEEPGEMM_GROUPS}
    assert all(kernel.seen and kernel.arrays for kernel in KERNELS.values())


@pytest.mark.parametrize("name", STAND_INS)
def test_declaration(name: str) -> None:
    function, expected = STAND_INS[name]
    equal, offered = equal_and_offered(replace(KERNELS[name], function=function, imports=(), needs_gpu=False))
    assert (equal, offered) == (expected, expected)


@pytest.mark.parametrize("name", DEEPGEMM_GROUPS)
def test_declaration_of_groups_with_block_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the functions of the library, which our own functions call."""
    monkeypatch.setitem(
        sys.modules, "deep_gemm", SimpleNamespace(**DEEPGEMM_GROUPS, fp8_m_grouped_gemm_nt_masked=masked_groups)
    )
    assert equal_and_offered(replace(KERNELS[f"deepgemm.{name}"], needs_gpu=False)) == (2, 2)


def test_a_function_that_the_installed_version_lacks_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a library that is not installed, and by a reason that holds for every GEMM."""
    kernel = replace(KERNELS["deepgemm.k_grouped_fp8_gemm_nt_contiguous"], needs_gpu=False)
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=contiguous_groups))
    for case in few_cases()[:2]:
        with pytest.raises(NotOffered, match="deep_gemm has no attribute 'k_grouped_fp8_gemm_nt_contiguous'"):
            answer(kernel, case)


def test_absent_kernels_are_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once, with what to install; never equal, never different."""
    if torch.cuda.is_available():
        pytest.skip("here they may run")
    for name in ("fbgemm.rowwise", "deepgemm.fp8_gemm_nt", "torch._scaled_grouped_mm"):
        kernel = KERNELS[name]
        with pytest.raises(NotOffered, match=f"{name} needs a GPU, and torch has none here") as caught:
            load_subject(name, here=True).gemm(few_cases()[0])
        assert kernel.install in str(caught.value)
    missing = replace(KERNELS["fbgemm.rowwise"], needs_gpu=False)
    with pytest.raises(NotOffered, match=r"is not installed .*; pip install fbgemm-gpu-genai"):
        kernel_subject(missing).gemm(few_cases()[0])
    (tmp_path / "breaks.py").write_text("raise RuntimeError('built for another torch')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotOffered, match=r"not installed \(RuntimeError: built for another torch\); pip"):
        kernel_subject(replace(missing, imports=("breaks",))).gemm(few_cases()[0])
    with pytest.raises(SpecError, match="expected no_such:gemm to be importable"):
        kernel_subject(replace(missing, function="no_such:gemm", imports=(), install=""))


def test_triton_kernel_in_its_interpreter() -> None:
    """`tl.dot` adds in float32 there, which is exact for small integers: so are both kernels, in every mask."""
    program = """
import numpy as np, ml_dtypes, f8ref.numpy as f8
from f8emu.conformance import GemmCase, load_subject
from f8emu.conformance.cases.gemm import Mode
from f8emu.spec import FLOAT32, Granularity
kernel, r = load_subject("triton.dot", here=True), np.random.default_rng(1)
for m, n, k in ((5, 7, 300), (65, 129, 256)):
    a, b = (r.integers(-2, 3, shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((m, k), (n, k)))
    scales = r.uniform(0.1, 9, (m, 1)).astype(np.float32), r.uniform(0.1, 9, (1, n)).astype(np.float32)
    for fast in (True, False):
        case = GemmCase(id="", mode=Mode.ROWWISE, a=a, b=b, scale_a=scales[0], scale_b=scales[1], out_dtype=FLOAT32,
                        granularity_a=Granularity.ROWWISE, granularity_b=Granularity.ROWWISE, use_fast_accum=fast)
        given, expected = kernel.gemm(case), case.run(vars(f8))
        print(given.view(np.uint32).tobytes() == expected.view(np.uint32).tobytes())
print("nothing follows for the GPU" in kernel.engine)
print("nothing follows for the GPU" not in load_subject("torch:_scaled_mm", here=True).engine)
from f8emu.conformance.kernels.imported import is_interpreted
def later():
    import triton
print(is_interpreted(later))
"""
    pytest.importorskip("triton")
    environment = {**ENVIRONMENT, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert ran.stdout.split() == ["True"] * 7, ran.stderr[-2000:]
    with pytest.raises(NotOffered, match="TRITON_INTERPRET=1"):
        answer(KERNELS["triton.dot"], rowwise_case(5))


# A declaration of one's own


def own(**options: Any) -> Kernel:
    declared: dict[str, Any] = {
        "name": "own",
        "function": own_rowwise,
        "arguments": ((Arg.A, Arg.SCALE_A), (Arg.B, Arg.SCALE_B), Arg.OUT),
        "scales": ROWWISE_VECTORS,
        "arrays": "numpy",
        "out_dtypes": (FLOAT32,),
    }
    return Kernel(**{**declared, **options})


def own_rowwise(a: Any, b: Any, out: np.ndarray) -> None:
    (a, scale_a), (b, scale_b) = a, b
    scales = scale_a[:, None], scale_b[None]
    out[:] = f8.scaled_mm(a, b.T, *scales, granularity_a=ROWWISE, granularity_b=ROWWISE, out_dtype="float32")


def test_inverse_scales_are_asked_with_powers_of_two() -> None:
    def divided(a: Any, b: Any, inv_a: np.ndarray, inv_b: float, out: np.ndarray) -> None:
        scales = (np.float32(1) / inv_a).reshape(1, 1), np.full((1, 1), 1 / inv_b, np.float32)
        out[:] = f8.scaled_mm(a, b.T, *scales, out_dtype="float32", use_fast_accum=True).astype(np.float32)

    pair = Granularity.TENSORWISE, Granularity.TENSORWISE
    layouts = ScaleLayout(is_inverse=True, ndim=1), ScaleLayout(is_inverse=True, as_float=True)
    kernel = own(
        function=divided,
        arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B, Arg.OUT),
        scales={pair: layouts},
        accumulation=Accumulation.FAST,
    )
    equal, offered = equal_and_offered(kernel)
    assert equal == offered > 3
    case = next(case for case in few_cases() if case.granularity_a is Granularity.TENSORWISE)
    inverse = question(kernel, case)
    assert "scales powers of two" in inverse.id and inverse.use_fast_accum and inverse.bias is None
    with pytest.raises(NotOffered, match="only for powers of two"):
        kernel_subject(kernel).gemm(replace(inverse, scale_a=case.scale_a))


class Seen(Exception):
    """The operands of a call."""


def operands(case: GemmCase, **options: Any) -> tuple[Any, Any]:
    """a and b as a kernel that is declared so gets them."""

    def looks(a: Any, b: Any, scale: Any) -> Any:
        raise Seen(a, b)

    kernel = own(function=looks, arguments=(Arg.A, Arg.B, Arg.SCALE_A), multiples=(1, 1, 1), **options)
    with pytest.raises(Seen) as caught:
        answer(kernel, case)
    return caught.value.args[0], caught.value.args[1]


@pytest.mark.parametrize("k_first", [False, True])
@pytest.mark.parametrize("k_contiguous", [False, True])
@pytest.mark.parametrize("arrays", ["numpy", "torch", "jax"])
def test_operand_layouts(arrays: str, k_first: bool, k_contiguous: bool) -> None:
    """Shapes and strides, for each framework's arrays; a dimension of one row too."""
    case = rowwise_case(5)
    for rows in (5, 1):
        few = replace(case, b=case.b[:rows], scale_b=case.scale_b[:, :rows], bias=None)  # type: ignore[index]
        _, b = operands(few, arrays=arrays, b=OperandLayout(k_first=k_first, k_contiguous=k_contiguous))
        assert tuple(b.shape) == ((case.k, rows) if k_first else (rows, case.k))
        along_k, along_rows = (1, case.k) if k_contiguous else (rows, 1)
        strides = (along_k, along_rows) if k_first else (along_rows, along_k)
        assert arrays == "jax" or strides == (b.stride() if arrays == "torch" else b.strides)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arguments": (Arg.A, Arg.SCALE_A)}, "expected Arg.B once among its arguments; found it 0 times"),
        ({"scales": {}}, "expected the layouts of its scales"),
        ({"arrays": "jax"}, "cannot be written to"),
        ({"multiples": (16, 0, 16)}, "at least 1"),
        ({"out_dtypes": ()}, "at least one output type"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        own(**options)


# Faults


def test_writes_beside_the_output_are_found() -> None:
    """One element before it, one behind it, a whole tile: outside of the output, inside of the process."""
    case = rowwise_case(48)

    def beside(offset: int, count: int) -> Callable[..., None]:
        def kernel(a: Any, b: Any, out: np.ndarray) -> None:
            own_rowwise(a, b, out)
            memory = out
            while isinstance(memory.base, np.ndarray):
                memory = memory.base
            flat = memory.view(np.uint32).ravel()
            begin = (out.__array_interface__["data"][0] - flat.__array_interface__["data"][0]) // 4 + offset
            flat[begin : begin + count] = 0

        return kernel

    size = 48 * 16
    for offset, count, text in (
        (-1, 1, "1 before its begin, the nearest 1 elements away"),
        (size + 6, 1, "1 behind its end, the nearest 7 elements away"),
        (-16, size + 96, "16 before its begin, the nearest 1 elements away; 80 behind its end"),
    ):
        with pytest.raises(WroteOutOfBounds, match=text):
            answer(own(function=beside(offset, count)), case)


def test_reads_and_writes_beside_an_input_are_found() -> None:
    """A missing mask along K reads behind the last row: there are NaN, not zeros by luck."""
    case = rowwise_case(5)

    def past_its_end(a: np.ndarray, k: int) -> np.ndarray:
        return np.lib.stride_tricks.as_strided(a, (len(a), k), a.strides)

    def no_mask(a: Any, b: Any, out: np.ndarray) -> None:
        (a, scale_a), (b, scale_b) = a, b
        own_rowwise((past_its_end(a, 416), scale_a), (past_its_end(b, 416), scale_b), out)

    assert np.isnan(answer(own(function=no_mask, multiples=(1, 1, 1)), case)[-1]).all()

    def writes(a: Any, b: Any, out: np.ndarray) -> None:
        own_rowwise(a, b, out)
        past_its_end(b[0], 402)[-1, 401] = 0

    with pytest.raises(WroteOutOfBounds, match="outside the input b were written: 1 behind its end, the nearest 1 el"):
        answer(own(function=writes, multiples=(1, 1, 1)), case)

    def whole_rows(a: Any, b: Any, out: np.ndarray) -> None:
        own_rowwise(a, b, out)
        a[0][:2].base.view(np.uint8)[:] = 0

    placed = replace(case, placement=Placement(paddings={"a": 16}, offsets={"a": 64}))
    with pytest.raises(WroteOutOfBounds, match=r"outside the input a were written: .* 64 between its rows"):
        answer(own(function=whole_rows, a=PADDED_ROWS_BY_K, multiples=(1, 1, 1)), placed)


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_operands_lie_where_the_case_says(arrays: str) -> None:
    """Rows that are apart, at an offset from a boundary of 256 bytes; without a placement at the boundary."""
    case = rowwise_case(5)
    for placement, expected in (
        (None, (case.k, 0)),
        (Placement(paddings={"a": 16}), (case.k + 16, 0)),
        (Placement(offsets={"a": 16, "b": 64}), (case.k, 16)),
    ):
        a, _ = operands(replace(case, placement=placement), arrays=arrays, a=PADDED_ROWS_BY_K)
        pitch, address = (a.stride(0), a.data_ptr()) if arrays == "torch" else (a.strides[0], a.ctypes.data)
        assert (pitch, address % 256) == expected


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_outputs_never_written_are_found(arrays: str, dtype: Any) -> None:
    def lazy(a: Any, b: Any, out: Any) -> None:
        out[:] = 0
        out[3:, 5] = previous

    case = rowwise_case(48)
    previous: Any = 0
    kernel = own(function=lazy, arrays=arrays, out_dtypes=(dtype,))
    assert answer(kernel, case).shape == (48, 16)  # all written, and a NaN is no poison
    previous = float("nan")
    assert np.isnan(answer(kernel, case)[3:, 5].astype(np.float32)).all()

    def idle(a: Any, b: Any, out: Any) -> None:
        out[:47] = 0

    with pytest.raises(LeftUnwritten, match=r"16 of 768 outputs were never written, the first at \[47, 0\]"):
        answer(replace(kernel, function=idle), case)


def test_example_and_the_gemms_for_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten lines declare a kernel of block scales; every distribution of codes, and what a wrong scale would give."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    subject = load_subject("own_kernel:BLOCKWISE", here=True)
    drawn = [case for case in subject.more_gemms() if not case.id.startswith("probe ")]
    cases = [subject.question(case) for case in drawn if case.a.shape == (128, 128)]
    assert len(cases) == len(CODE_DISTRIBUTIONS)
    for case in cases:
        expected = case.run(NUMPY.verbs)
        assert not different(subject.gemm(case), expected).any()
        assert case.scale_a is not None
        turned = replace(case, scale_a=case.scale_a[::-1])
        assert different(subject.gemm(turned), expected).any() or "special" in case.id


def test_grouped_gemms_for_kernels_alone() -> None:
    """Sizes of groups in place of their ends."""

    def stacked(XQ, WQ, x_scale, w_scale, M_sizes) -> torch.Tensor:
        ends = np.cumsum(n(M_sizes), dtype=np.int32)
        arrays = n(XQ), n(WQ).swapaxes(1, 2), n(x_scale), n(w_scale)
        return TORCH.load(f8.scaled_grouped_mm(*arrays, ends, use_fast_accum=True))

    arguments = (Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B, Arg.GROUP_SIZES)
    kernel = Kernel(
        name="stacked", function=stacked, arguments=arguments, accumulation=Accumulation.FAST, arrays="torch"
    )
    subject = kernel_subject(kernel)
    cases = list(subject.more_gemms())
    assert {case.distribution for case in cases} == set(CODE_DISTRIBUTIONS)
    for case in cases[:3]:
        stacked_case = subject.question(case)
        assert stacked_case.use_fast_accum
        assert not different(subject.gemm(stacked_case), stacked_case.run(NUMPY.verbs)).any()


def test_a_16_bit_output_hides_no_order_of_scales() -> None:
    """Random GEMMs show it in one output of 10^5: the probes of the diagnosis are asked too."""

    def one_product(a: Any, b: Any, out: np.ndarray) -> None:
        (a, scale_a), (b, scale_b) = a, b
        ones = np.ones((len(a), 1), np.float32), np.ones((1, len(b)), np.float32)
        acc = f8.scaled_mm(a, b.T, *ones, granularity_a=ROWWISE, granularity_b=ROWWISE, out_dtype="float32")
        with np.errstate(over="ignore", invalid="ignore"):
            out[:] = (acc * (scale_a[:, None] * scale_b[None])).astype(out.dtype)  # not [EPI-2]

    def wrong_probes(kernel: Kernel) -> list[str]:
        subject = kernel_subject(kernel)
        cases = [subject.question(case) for case in subject.more_gemms() if case.family is Family.PROBES]
        assert len(cases) > 10
        return [case.id for case in cases if different(subject.gemm(case), case.run(NUMPY.verbs)).any()]

    kernel = own(function=one_product, out_dtypes=(BFLOAT16,))
    equal, offered = equal_and_offered(kernel)
    assert equal == offered > 3
    wrong = wrong_probes(kernel)
    assert wrong and all("scales beside a tie" in name for name in wrong) and not wrong_probes(own())
