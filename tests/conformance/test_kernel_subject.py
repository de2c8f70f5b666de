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
from f8emu.conformance.kernels.contract import CONTRACT
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

def no_bias(a, b, scale_a, scale_b, *, bias, **options):
    if bias is not None:
        raise RuntimeError("a bug of one kind")
    return right(a, b, scale_a, scale_b, bias=bias, **options)

def two(a, b):
    return a

def gives_a_list(*args, **options):
    return right(*args, **options).tolist()

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
    ("name", "arrays", "text"),
    [
        ("wrong_dtype", "numpy", "gave float64[16, 48], expected float32[16, 48]; what a kernel is given"),
        ("too_large", "numpy", "TypeError: gave an output of shape [144, 112], expected [16, 48]; what"),
        ("crashes", "numpy", "RuntimeError: illegal memory access; what"),
        ("right", "torch", "it works with arrays of numpy: add --arrays numpy"),
        ("two", "numpy", "found two(a, b): too many positional arguments; what"),
        ("TWO", "numpy", "can be called with (a, b, scale_a, scale_b, bias=...); found two(a, b): too many"),
        ("by_jax", "torch", "it works with arrays of jax: add --arrays jax"),
        ("gives_a_list", "numpy", "TypeError: gave list, expected an array of numpy; what"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "fit"])
def test_first_contact(command: str, name: str, arrays: str, text: str, kernels: Any) -> None:
    """What cannot be called at all is one line and bad usage, before the suite runs; what to do is in it."""
    for framework in ("torch", "jax"):
        pytest.importorskip(framework)
    ran = CliRunner().invoke(cli.build_app(), [command, f"own_kernels:{name}", "--arrays", arrays])
    assert (ran.exit_code, ran.stdout) == (2, ""), ran.output
    assert text in ran.stderr and ran.stderr.startswith("f8emu verify own_kernels:"), ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert ("f8emu verify --contract" in ran.stderr) != ("add --arrays" in ran.stderr)


def test_the_contract_is_shown() -> None:
    ran = CliRunner().invoke(cli.build_app(), ["verify", "--contract"])
    assert (ran.exit_code, ran.stdout) == (0, CONTRACT)
    assert max(map(len, CONTRACT.splitlines())) <= 80


def test_one_wrong_kind_is_no_first_contact(kernels: Any, few: Path, tmp_path: Path) -> None:
    """A kernel that can be called is verified, whatever it raises in other cases."""
    words = ("--arrays", "numpy", "--stage", "golden", "--errors", "3")
    for name, text in (("wrong_accumulation", "expected: 0x"), ("no_bias", "raised RuntimeError: a bug of one kind")):
        status, stages, output = run(few, tmp_path / "o", f"own_kernels:{name}", *words)
        assert status == 1 and stages["golden"]["status"] == "different"
        assert text in " ".join(output.split())
        assert 0 < len(stages["golden"]["mismatches"]) <= 3


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
