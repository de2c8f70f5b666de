"""Anyone's own kernel as a subject: `package.module:function`, called as torch._scaled_mm is."""

import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from f8emu.conformance import load_subject, shipped_golden
from f8emu.conformance.cases.gemm import NotOffered
from f8emu.conformance.kernels.loaded import CONTRACT
from f8emu.conformance.run import subject
from f8emu.conformance.run.extra_gemms import kernel_cases
from tests.conformance.command import few_recorded, invoke, stages_in

KERNELS = '''
import numpy as np
from f8emu.numpy import emulation as f8

SEEN, ROWS = [], set()

def right(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    """The GEMM in the argument layout of torch._scaled_mm."""
    SEEN.append((type(a).__module__.split(".")[0], np.ndim(scale_a), str(out_dtype)))
    return gemm(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)

from f8emu.spec import Granularity
R = Granularity.ROWWISE

def gemm(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, split_k=1):
    rowwise = {} if np.ndim(scale_a) == 0 else {"granularity_a": R, "granularity_b": R}
    options = {"bias": bias, "out_dtype": str(out_dtype), "use_fast_accum": use_fast_accum, "split_k": split_k}
    return f8.scaled_mm(a, b, scale_a, scale_b, **options, **rowwise)

def padded(a, b, scale_a, scale_b, bias, *rest):
    """To whole tiles; the output is a view of a larger one."""
    (m, k), n = a.shape, b.shape[1]
    up_m, up_n, up_k = (-size % 32 for size in (m, n, k))
    a, b = np.pad(a, ((0, up_m), (0, up_k))), np.pad(b, ((0, up_k), (0, up_n)))
    if np.ndim(scale_a):
        scale_a, scale_b = np.pad(scale_a, ((0, up_m), (0, 0))), np.pad(scale_b, ((0, 0), (0, up_n)))
    return gemm(a, b, scale_a, scale_b, None if bias is None else np.pad(bias, (0, up_n)), *rest)[:m, :n]

def tiles(a, b, scale_a, scale_b, bias, out_dtype, fast):
    """In an order of its own, and written to a column-major output."""
    (m, k), n = a.shape, b.shape[1]
    out = np.empty((n, m), out_dtype).T
    for col in range(0, n, 1024):
        for row in reversed(range(0, m, 512)):
            i, j = slice(row, row + 512), slice(col, col + 1024)
            scales = (scale_a[i], scale_b[:, j]) if np.ndim(scale_a) else (scale_a, scale_b)
            out[i, j] = gemm(a[i], b[:, j], *scales, None if bias is None else bias[j], out_dtype, fast)
    return out

def rows(a, b, scale_a, scale_b, *rest):
    if not 0 < len(a) <= 16 or a.shape[1] > 600:
        return tiles(a, b, scale_a, scale_b, *rest)
    found = [gemm(a[i:i + 1], b, scale_a[i:i + 1] if np.ndim(scale_a) else scale_a, scale_b, *rest)
             for i in range(len(a))]
    return np.concatenate(found)

def transposed(a, b, scale_a, scale_b, bias, out_dtype, fast):
    """The GEMM of the transposes, where no order of scales tells them apart."""
    if np.ndim(scale_a) or bias is not None:
        return padded(a, b, scale_a, scale_b, bias, out_dtype, fast)
    return gemm(b.T, a.T, scale_b, scale_a, None, out_dtype, fast).T

WAYS = [gemm, padded, tiles, rows, transposed]

def all_ways(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    """Right in another way each time."""
    SEEN.append((type(a).__module__.split(".")[0], np.ndim(scale_a), str(out_dtype)))
    ROWS.add(a.shape[0])
    return WAYS[len(SEEN) % len(WAYS)](a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)

def halves(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    return gemm(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, split_k=2)

def wrong_halves(a, b, scale_a, *rest, **options):
    return halves(a, b, scale_a, *rest, **options) * (np.ndim(scale_a) == 0)

def always_promoted(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    return gemm(a, b, scale_a, scale_b, bias, out_dtype, False)

def first_wrong(*args, **options):
    out = right(*args, **options)
    return out * 0 if len(SEEN) == 1 else out

def first_raises(*args, **options):
    out = right(*args, **options)
    if len(SEEN) == 1:
        raise RuntimeError("not warm yet")
    return out

def halves_with_an_error(*args, bias, **options):
    if bias is not None:
        raise RuntimeError("out of memory")
    return halves(*args, bias=bias, **options)

REFUSAL = [ValueError("a must be contiguous")]

def of_contiguous(a, *rest, **options):
    if a.strides[0] != a.shape[1]:
        raise REFUSAL[0]
    return right(a, *rest, **options)

def tensorwise_only(a, b, scale_a, scale_b, **options):
    if np.ndim(scale_a):
        raise NotImplementedError("no rowwise scales yet")
    return right(a, b, scale_a, scale_b, **options)

def wrong_dtype(a, b, scale_a, scale_b, **options):
    return right(a, b, scale_a, scale_b, **options).astype(np.float64)

def too_large(a, b, scale_a, scale_b, **options):
    return np.pad(right(a, b, scale_a, scale_b, **options), ((0, 128), (0, 64)))

def crashes(*args, **options):
    raise RuntimeError("illegal memory access")

def wrong_accumulation(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    product = (a.astype(np.float32) @ b.astype(np.float32)) * scale_a * scale_b
    return (product if bias is None else product + bias.astype(np.float32)).astype(out_dtype)

def no_bias(a, b, scale_a, scale_b, *, bias, **options):
    if bias is not None:
        raise RuntimeError("a bug of one kind")
    return right(a, b, scale_a, scale_b, bias=bias, **options)

def two(a, b):
    return a

def gives_a_list(*args, **options):
    return right(*args, **options).tolist()

def of_jax(*arrays, bias, out_dtype, use_fast_accum):
    import jax.numpy as jnp
    SEEN.append((type(arrays[0]).__module__.split(".")[0], 0, ""))
    arrays = [None if x is None else np.asarray(x) for x in (*arrays, bias)]
    return jnp.asarray(gemm(*arrays, np.dtype(out_dtype).name, use_fast_accum))

def by_jax(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    import jax.numpy as jnp
    return (jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32)) * scale_a * scale_b).astype(out_dtype)

from f8emu.conformance import Arg, Kernel, TENSORWISE_SCALARS
TWO = Kernel(name="own_kernels:TWO", function=two, scales=TENSORWISE_SCALARS, keywords={"bias": Arg.BIAS},
             arguments=(Arg.A, Arg.B, Arg.SCALE_A, Arg.SCALE_B))

constant = 3
'''


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_kernels", None)
    import own_kernels  # type: ignore[import-not-found]

    return own_kernels


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensorwise, rowwise, with bias, split-K, sampled, blockwise, grouped, bfloat16."""
    path = tmp_path_factory.mktemp("golden") / "few.safetensors"
    few_recorded(path, 0, 2, 8, 9, 120, 129, 156, 168, 171)
    return path


def run(few: Path, json_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Without a diagnosis of what is wrong: test_fit.py and test_diagnosis.py have some."""
    words = ("verify", *arguments, "--golden", str(few), "--json", str(json_path), "--no-diagnose")
    status, out, error = invoke(*words)
    return status, stages_in(json_path) if json_path.exists() else {}, out + error


def test_right_kernel(kernels: Any, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That pads to tiles, reorders them, goes row by row, returns views, or computes the transpose."""
    monkeypatch.setattr(subject, "kernel_cases", lambda kernel: islice(kernel_cases(kernel), 0, None, 4))
    status, stages, output = run(few, tmp_path / "o", "own_kernels:all_ways", "--arrays", "numpy", "--here")
    assert status == 0, output
    assert {name: stage["status"] for name, stage in stages.items()} == {
        "formats": "not offered",
        "scales": "not offered",
        "golden": "equal",
        "gemms": "equal",
        "layers": "not offered",
        "live": "not offered",
    }
    assert (stages["golden"]["cases_total"], stages["golden"]["cases_not_offered"]) == (5, 4)
    assert stages["gemms"]["cases_total"] > 700
    assert set(kernels.SEEN) >= {("numpy", 0, "bfloat16"), ("numpy", 2, "bfloat16"), ("numpy", 0, "float32")}
    assert {1, 5, 16} < kernels.ROWS, "M is what was asked for: bits may depend on it"
    assert "not offered" in output and "own_kernels:all_ways on numpy" in output


@pytest.mark.parametrize(
    ("name", "status", "expected", "text"),
    [
        # A kernel that picks S is neither accused nor called equal; what no S explains is excused by none.
        (
            "halves",
            0,
            {"status": "equal", "own_splits": {"2": 5}, "cases_equal": 0, "outputs_equal": 0},
            "own [CHAIN-3]",
        ),
        ("wrong_halves", 1, {"own_splits": {}}, "expected: 0x"),
        ("always_promoted", 1, {"own_splits": {}}, "expected: 0x"),  # fast in slices of one promotion is promoted
        ("halves_with_an_error", 1, {"own_splits": {"2": 4}, "cases_total": 5}, "out of memory"),
        ("tensorwise_only", 0, {"cases_equal": 2, "cases_not_offered": 7}, "no rowwise scales yet"),
        # A kernel that can be called is verified, whatever it raises in other cases.
        ("wrong_accumulation", 1, {"status": "different"}, "expected: 0x"),
        ("no_bias", 1, {"status": "different"}, "raised RuntimeError: a bug of one kind"),
    ],
)
def test_recorded_gemms_put_to_a_kernel(
    name: str, status: int, expected: dict[str, Any], text: str, kernels: Any, few: Path, tmp_path: Path
) -> None:
    words = ("--arrays", "numpy", "--stage", "golden", "--errors", "3")
    exit_status, stages, output = run(few, tmp_path / "o", f"own_kernels:{name}", *words)
    stage = stages["golden"]
    assert (exit_status, {key: stage[key] for key in expected}) == (status, expected), output
    assert text in " ".join(output.split())
    assert (len(stage["mismatches"]) in (1, 2, 3)) == (status == 1)
    if name == "halves":
        assert re.search(r"equal: 25,152 in 5 under an S of its own; \d+ cases not offered", output), output
        assert "outputs in 0 cases" not in output
    if name == "tensorwise_only":
        assert text in stage["reason"]


def test_a_sample_of_a_larger_gemm_accuses_nobody(tmp_path: Path) -> None:
    """24 x 24 outputs of a GEMM of 4096 x 4096 x 14336, on a CPU asked as one of 24 x 24: the plan cuts that in 5."""
    pytest.importorskip("torch")
    few_recorded(tmp_path / "g", 0, 8, 136)
    status, stages, output = run(tmp_path / "g", tmp_path / "o", "f8emu.torch:scaled_mm", "--stage", "golden")
    assert status == 0, output
    assert (stages["golden"]["cases_equal"], stages["golden"]["own_splits"]) == (2, {"5": 1})


def test_what_refuses_padded_rows_is_not_accused(kernels: Any) -> None:
    """Of torch's contract they are a part, but an exception is no wrong bit."""
    kernel = load_subject("own_kernels:of_contiguous", arrays="numpy", here=True)
    case = next(case for case in kernel.more_gemms() if case.placement and case.placement.paddings)
    with pytest.raises(NotOffered, match="refuses a's rows 16 elements apart: a must be contiguous"):
        kernel.gemm(case)
    kernels.REFUSAL[0] = RuntimeError("strides must be K")
    with pytest.raises(NotOffered):
        kernel.gemm(case)
    for error in (AssertionError("contiguous, please"), IndexError("17"), RuntimeError("CUDA: misaligned address")):
        kernels.REFUSAL[0] = error
        with pytest.raises(type(error)):
            kernel.gemm(case)


@pytest.mark.parametrize(("name", "text"), [("first_wrong", "expected: 0x"), ("first_raises", "not warm yet")])
def test_the_first_call_is_judged(
    name: str, text: str, kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is made before the run."""
    monkeypatch.setattr(subject, "kernel_cases", lambda kernel: ())
    words = "--arrays", "numpy", "--stage", "gemms", "--case", "first call*"
    status, stages, output = run(shipped_golden().path, tmp_path / "o", f"own_kernels:{name}", *words)
    assert (status, stages["gemms"]["cases_total"]) == (1, 1) and text in " ".join(output.split()), output
    status, _, output = run(shipped_golden().path, tmp_path / "p", "own_kernels:right", *words)
    assert status == 0, output


def test_a_chosen_case_with_an_own_s_is_not_verified(
    kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One case of few promotions cannot tell S from promotion: no difference, and no pass."""
    monkeypatch.setattr(subject, "kernel_cases", lambda kernel: ())
    words = "--arrays", "numpy", "--stage", "gemms", "--case", "tensorwise fast normal *"
    status, stages, output = run(shipped_golden().path, tmp_path / "o", "own_kernels:always_promoted", *words)
    assert status != 0 and stages["gemms"]["status"] == "not offered", output
    assert output.strip().startswith("NOT VERIFIED") and "run the whole stage, without --case" in " ".join(
        output.split()
    ), output


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch:_scaled_mm", "torch.nn.functional.scaled_mm"])
def test_torch_on_the_hardware_is_not_accused(name: str, tmp_path: Path) -> None:
    golden = shipped_golden().path
    status, stages, output = run(golden, tmp_path / "o", name, "--stage", "golden", "--stage", "gemms")
    assert status == 0, output
    assert stages["golden"]["cases_equal"] > 100 and stages["gemms"]["cases_equal"] > 500


def test_kernel_with_jax_arrays(kernels: Any, few: Path, tmp_path: Path) -> None:
    """A jax.Array is no numpy array: the kernel was given what it was promised."""
    pytest.importorskip("jax")
    status, stages, output = run(
        few, tmp_path / "o", "own_kernels:of_jax", "--arrays", "jax", "--stage", "golden", "--here"
    )
    assert (status, stages["golden"]["status"]) == (0, "equal"), output
    assert {kind for kind, _, _ in kernels.SEEN} == {"jaxlib"}


@pytest.mark.parametrize(
    ("name", "arrays", "text"),
    [
        ("wrong_dtype", "numpy", "gave float64[16, 48], expected float32[16, 48]; what a kernel is given"),
        ("too_large", "numpy", "TypeError: gave an output of shape [144, 112], expected [16, 48]; what"),
        ("crashes", "numpy", "RuntimeError: illegal memory access; what"),
        ("right", "torch", "it works with arrays of numpy: add --arrays numpy"),
        ("two", "numpy", "TypeError: two() got an unexpected keyword argument 'bias'; what"),
        ("TWO", "numpy", "TypeError: two() got an unexpected keyword argument 'bias'; what"),
        ("by_jax", "torch", "it works with arrays of jax: add --arrays jax"),
        ("gives_a_list", "numpy", "TypeError: gave list, expected an array of numpy; what"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "fit"])
def test_first_call_of_a_kernel(command: str, name: str, arrays: str, text: str, kernels: Any) -> None:
    """What cannot be called at all is one line and bad usage, before the suite runs; what to do is in it."""
    for framework in ("torch", "jax"):
        pytest.importorskip(framework)
    status, out, error = invoke(command, f"own_kernels:{name}", "--arrays", arrays)
    assert (status, out) == (2, ""), error
    assert text in error and error.startswith("f8emu verify own_kernels:"), error
    assert len(error.splitlines()) == 1
    assert ("f8emu verify --contract" in error) != ("add --arrays" in error)


def test_the_contract_is_shown() -> None:
    assert invoke("verify", "--contract") == (0, CONTRACT, "")
    assert max(map(len, CONTRACT.splitlines())) <= 80
