"""Tensors to JAX and back: bits, sharing of memory, and what happens where an extra is missing."""

import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from f8emu import interop
from f8emu.spec import MissingExtraError, OperandError

DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int32,
]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the dtype with all kinds of codes, NaN payloads and subnormals among them."""
    width = dtype.itemsize
    raw = np.random.default_rng(7).integers(0, 256, (*shape[:-1], shape[-1] * width), np.uint8)
    return torch.from_numpy(raw).view(dtype).clone()  # numpy aligns to 16 bytes, torch to 64


def raw(x: torch.Tensor) -> np.ndarray:
    return np.frombuffer(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), np.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_travel_both_ways_without_a_copy(dtype) -> None:
    x = random_bits(dtype, (64, 48))
    array = interop.to_jax(x, copy=None)
    assert array.shape == (64, 48)
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    assert np.asarray(array).tobytes() == raw(x).tobytes()
    back = interop.to_torch(array, copy=False)
    assert back.dtype is dtype
    assert back.data_ptr() == x.data_ptr()
    assert raw(back).tobytes() == raw(x).tobytes()


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("transposed", True),
        ("batch transposed", True),
        ("one row", True),
        ("empty", False),
        ("0-d", True),
        ("strided", False),
        ("sliced columns", False),
        ("expanded", False),
        ("misaligned", False),
        ("permuted", False),
    ],
)
def test_any_layout_arrives(name, shares) -> None:
    x = random_bits(torch.float8_e4m3fn, (6, 64, 128))
    views = {
        "transposed": x[0].t(),
        "batch transposed": x.mT,
        "one row": x[1, :1],
        "empty": x[0, :0],
        "0-d": x[0, 0, 0],
        "strided": x[0, ::2],
        "sliced columns": x[0, :, 32:96],
        "expanded": x[0, :1].expand(5, 128),
        "misaligned": x.flatten()[16:],
        "permuted": x.permute(1, 2, 0),
    }
    view = views[name]
    array = interop.to_jax(view, copy=None)
    assert array.shape == tuple(view.shape)
    assert np.asarray(array).tobytes() == raw(view).tobytes()
    assert (array.unsafe_buffer_pointer() == view.data_ptr()) is shares or view.numel() == 0
    assert raw(interop.to_torch(array)).tobytes() == raw(view).tobytes()
    if not shares and view.numel():
        with pytest.raises(OperandError, match=r"to_jax: copy=False asks for shared memory, but.*pass copy=None"):
            interop.to_jax(view, copy=False)
    numpy = interop.to_numpy(view, copy=False)
    assert numpy.shape == tuple(view.shape)
    assert numpy.tobytes() == raw(view).tobytes()
    assert numpy.ctypes.data == view.data_ptr() or view.numel() == 0


def test_gradients_and_inference_tensors_are_detached() -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    np.testing.assert_array_equal(np.asarray(interop.to_jax(parameter)), parameter.detach().numpy())
    with torch.inference_mode():
        x = torch.randn(4, 4)
        np.testing.assert_array_equal(np.asarray(interop.to_jax(x)), x.numpy())


def test_a_transposed_jax_array_becomes_a_row_major_tensor() -> None:
    x = interop.to_torch(jnp.arange(12, dtype=jnp.float32).reshape(3, 4).T)
    assert x.is_contiguous()
    assert x.tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_what_jax_would_narrow_is_refused(dtype) -> None:
    with pytest.raises(OperandError, match=f"to_jax: JAX narrows 64-bit types.*got {dtype}.*32-bit"):
        interop.to_jax(torch.zeros(2, dtype=dtype))


def test_device_of_the_cpu_is_the_cpu() -> None:
    assert interop.jax_device("cpu").platform == "cpu"


def run_without(blocked: tuple[str, ...], code: str) -> str:
    """Output of `code` in a fresh interpreter that cannot import the blocked packages."""
    blocker = f"""
        import sys
        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {blocked!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Blocker())
        sys.path[:0] = {sys.path!r}
    """
    script = textwrap.dedent(blocker) + textwrap.dedent(code)
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_jax_the_engine_emulates_and_without_both_an_error_names_the_remedies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Casts and scales need neither."""
    code = """
        import warnings, torch, f8emu.torch as f8
        from f8emu.spec import MissingExtraError
        x = torch.ones(16, 16)
        codes = f8.quantize(x, torch.ones(1, 1), "float8_e4m3fn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                print(f8.scaled_mm(codes, codes.t(), torch.ones(()), torch.ones(()), out_dtype=torch.bfloat16)[0, 0])
        except MissingExtraError as error:
            print(seen[0].message)
            print(error)
        """
    assert run_without(("jax", "jaxlib"), code) == "tensor(16., dtype=torch.bfloat16)\n"
    monkeypatch.setenv("F8EMU_NATIVE_LIBRARY", "/nowhere")
    warning, error = run_without(("jax", "jaxlib"), code).splitlines()
    assert "F8EMU_NATIVE_LIBRARY names /nowhere, which is not there" in warning
    assert error == (
        "f8emu.torch.scaled_mm (engine 'emulated') needs the package 'jax', which is not installed; "
        "install it with: pip install 'f8emu[jax]'"
    )


def test_without_torch_the_package_says_so() -> None:
    out = run_without(
        ("torch",),
        """
        from f8emu.spec import MissingExtraError
        from f8emu import interop
        for load in (lambda: __import__("f8emu.torch"), lambda: interop.to_torch(None)):
            try:
                load()
            except MissingExtraError as error:
                print(error)
        """,
    )
    remedy = "needs the package 'torch', which is not installed; install it with: pip install 'f8emu[torch]'\n"
    assert out == f"f8emu.torch {remedy}interop.to_torch {remedy}"


def test_the_meaning_of_the_blocker() -> None:
    """A check that the two tests above could fail: without the blocker nothing is missing."""
    out = run_without((), "from f8emu import interop; print(interop.require_jax('x').__name__)")
    assert out == "jax\n"
    with pytest.raises(MissingExtraError, match=r"pip install"):
        raise MissingExtraError("x", "jax", "jax")
