"""Anyone's own kernel as a subject: `package.module:function`, called as torch._scaled_mm is."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from f8emu import cli
from f8emu.conformance import load_subject, shipped_golden, write_golden
from f8emu.spec import SpecError

KERNELS = '''
import numpy as np
import f8ref.numpy as f8

SEEN, ROWS = [], set()

def right(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
    """The oracle in the argument layout of torch._scaled_mm."""
    ROWS.add(a.shape[0])
    SEEN.append((type(a).__module__.split(".")[0], np.ndim(scale_a), str(out_dtype)))
    rowwise = {} if np.ndim(scale_a) == 0 else {"granularity_a": R, "granularity_b": R}
    return f8.scaled_mm(
        a, b, scale_a, scale_b, bias=bias, out_dtype=str(out_dtype), use_fast_accum=use_fast_accum, **rowwise
    )

from f8emu.spec import Granularity
R = Granularity.ROWWISE

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
    golden = shipped_golden()
    write_golden(path, [golden.cases[i] for i in (0, 2, 8, 9, 120, 129, 156, 168, 171)], golden.metadata)
    return path


def run(few: Path, json_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Without a diagnosis of what is wrong: test_fit.py and test_diagnosis.py have some."""
    words = ["verify", *arguments, "--golden", str(few), "--json", str(json_path), "--no-diagnose"]
    result = CliRunner().invoke(cli.build_app(), words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    stages = json.loads(json_path.read_text())["subjects"][0]["stages"] if json_path.exists() else []
    return result.exit_code, {stage["stage"]: stage for stage in stages}, result.output


def test_right_kernel(kernels: Any, few: Path, tmp_path: Path) -> None:
    status, stages, output = run(few, tmp_path / "o", "own_kernels:right", "--arrays", "numpy")
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
    assert stages["gemms"]["cases_total"] > 60
    assert set(kernels.SEEN) >= {("numpy", 0, "bfloat16"), ("numpy", 2, "bfloat16"), ("numpy", 0, "float32")}
    assert {5, 16} < kernels.ROWS, "M is what was asked for: bits may depend on it"
    assert "not offered" in output and "own_kernels:right on numpy" in output


def test_kernel_with_jax_arrays(kernels: Any, few: Path, tmp_path: Path) -> None:
    """A jax.Array is no numpy array: the kernel was given what it was promised."""
    pytest.importorskip("jax")
    kernels.right.__globals__["f8"] = JaxOracle()
    status, stages, output = run(few, tmp_path / "o", "own_kernels:right", "--arrays", "jax", "--stage", "golden")
    assert (status, stages["golden"]["status"]) == (0, "equal"), output
    assert {kind for kind, _, _ in kernels.SEEN} == {"jaxlib"}


class JaxOracle:
    """f8ref.numpy for a kernel of JAX arrays."""

    def scaled_mm(self, *args: Any, bias: Any, out_dtype: str, **options: Any) -> Any:
        import jax.numpy as jnp

        import f8ref.numpy as f8

        name = out_dtype.split("'")[1].split(".")[-1] if "'" in out_dtype else out_dtype
        bias = None if bias is None else np.asarray(bias)
        return jnp.asarray(f8.scaled_mm(*map(np.asarray, args), bias=bias, out_dtype=name, **options))


def test_not_implemented_is_not_offered(kernels: Any, few: Path, tmp_path: Path) -> None:
    status, stages, output = run(
        few, tmp_path / "o", "own_kernels:tensorwise_only", "--arrays", "numpy", "--stage", "golden"
    )
    assert status == 0, output
    assert (stages["golden"]["cases_equal"], stages["golden"]["cases_not_offered"]) == (2, 7)
    assert "no rowwise scales yet" in stages["golden"]["reason"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wrong_dtype", "gave float64[64, 96], expected bfloat16[64, 96]"),
        ("too_large", "raised TypeError: gave an output of shape [192, 160], expected [64, 96]"),
        ("crashes", "raised RuntimeError: illegal memory access"),
        ("wrong_accumulation", "  expected: 0x"),
    ],
)
def test_wrong_kernels(name: str, text: str, kernels: Any, few: Path, tmp_path: Path) -> None:
    status, stages, output = run(
        few, tmp_path / "o", f"own_kernels:{name}", "--arrays", "numpy", "--stage", "golden", "--errors", "3"
    )
    assert status == 1
    assert stages["golden"]["status"] == "different"
    assert text in output
    assert len(stages["golden"]["mismatches"]) == 3
    assert "the first 3:" in output


def test_torch_on_a_cpu_is_not_the_hardware(few: Path, tmp_path: Path) -> None:
    """torch's own CPU `_scaled_mm`, given as a kernel: other bits, and the suite says so."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("here it is the hardware")
    status, stages, output = run(few, tmp_path / "o", "torch:_scaled_mm", "--stage", "golden")
    assert status == 1
    assert 0 < stages["golden"]["outputs_equal"] < stages["golden"]["outputs_total"]
    assert f"torch {torch.__version__}, cpu" in output


def test_kernel_in_the_current_directory(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel_of_mine.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    status, _, output = run(few, tmp_path / "o", "kernel_of_mine:right", "--arrays", "numpy", "--stage", "golden")
    assert status == 0, output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("own_kernels:missing", "no attribute 'missing'"),
        ("own_kernels:constant", "not callable"),
        ("own_kernels:", "package.module:function"),
        (":f", "package.module:function"),
    ],
)
def test_no_such_kernel(name: str, message: str, kernels: Any) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        load_subject(name, arrays="numpy")
    assert "PYTHONPATH" in str(caught.value)
