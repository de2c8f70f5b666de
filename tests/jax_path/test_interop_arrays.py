"""Arrays between torch, JAX and numpy: bits, who owns the memory, what cannot travel, and what a missing extra does."""

import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from f8emu import interop
from f8emu.spec import OperandError, Scales
from tests.conformance.command import python

DTYPES = (
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32 complex64 "
    "bool int8 int16 int32 uint8 uint16 uint32"
).split()
TO: dict[str, Callable[..., Any]] = {"torch": interop.to_torch, "jax": interop.to_jax, "numpy": interop.to_numpy}


def numpy_array(dtype: str, shape: tuple[int, ...] = (8, 48)) -> np.ndarray:
    """All kinds of bits, NaN payloads and subnormals among them, aligned to 64 bytes as torch and JAX have it."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype == "bool":
        return np.random.default_rng(3).integers(0, 2, shape).astype(bool)
    raw = np.random.default_rng(3).integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8)
    memory = np.zeros(raw.size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + raw.size].reshape(raw.shape)
    array[...] = raw
    return array.view(kind)


def address(x: Any) -> int:
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    return x.unsafe_buffer_pointer() if isinstance(x, jax.Array) else x.ctypes.data


def bits(x: object) -> bytes:
    return interop.to_numpy(x).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_goes_everywhere(dtype: str) -> None:
    """Each of the nine ways: copied by default, shared on demand, in both cases the same bits, shape and dtype."""
    array = numpy_array(dtype)
    for source in TO:
        x = TO[source](array)
        for target, convert in TO.items():
            for copy in (True, None):
                y = convert(x, copy=copy)
                assert str(y.dtype).removeprefix("torch.") == dtype and tuple(y.shape) == array.shape
                assert bits(y) == array.tobytes(), (source, target)
                # numpy's own memory is aligned to 16 bytes, which JAX copies
                if (source, target) != ("numpy", "jax"):
                    assert (address(y) == address(x)) is (copy is None)


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "transposed": (lambda x: x[0].t(), True),
    "batch transposed": (lambda x: x.mT, True),
    "one row": (lambda x: x[1, :1], True),
    "empty": (lambda x: x[0, :0], False),
    "0-d": (lambda x: x[0, 0, 0], True),
    "strided": (lambda x: x[0, ::2], False),
    "sliced columns": (lambda x: x[0, :, 32:96], False),
    "expanded": (lambda x: x[0, :1].expand(5, 128), False),
    "misaligned": (lambda x: x.flatten()[16:], False),
    "permuted": (lambda x: x.permute(1, 2, 0), False),
}
"""A view of a tensor [6, 64, 128], and whether JAX shares its memory."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_of_a_tensor_arrives(name: str) -> None:
    make, shares = LAYOUTS[name]
    view = make(interop.to_torch(numpy_array("float8_e4m3fn", (6, 64, 128))))
    expected = (
        view.contiguous().view(torch.uint8).numpy().tobytes() if view.ndim else bytes([int(view.view(torch.uint8))])
    )
    array = interop.to_jax(view, copy=None)
    assert array.shape == tuple(view.shape) and np.asarray(array).tobytes() == expected
    assert (address(array) == address(view)) is shares or not view.numel()
    assert bits(interop.to_torch(array)) == expected
    if not shares and view.numel():
        with pytest.raises(OperandError, match=r"to_jax: copy=False asks for shared memory, but.*pass copy=None"):
            interop.to_jax(view, copy=False)
    numpy = interop.to_numpy(view, copy=False)
    assert numpy.shape == tuple(view.shape) and numpy.tobytes() == expected
    assert address(numpy) == address(view) or not view.numel()


@pytest.mark.parametrize("order", ["C", "F"])
def test_layouts_of_numpy_and_jax(order: str) -> None:
    array = np.asarray(numpy_array("float8_e5m2", (16, 32)), order=order)  # type: ignore[call-overload]
    for view in (array, array.T, array[::2], array[:, ::-1], array[3, 4], array[:0]):
        assert bits(interop.to_torch(view)) == bits(interop.to_torch(view, copy=None)) == view.tobytes()
        assert bits(interop.to_jax(view)) == view.tobytes()
        assert interop.to_torch(view).shape == interop.to_jax(view).shape == np.shape(view)
    x = interop.to_torch(jnp.arange(12, dtype=jnp.float32).reshape(3, 4).T)
    assert x.is_contiguous() and x.tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_gradients_and_inference_tensors_are_detached() -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    with torch.inference_mode():
        inferred = torch.randn(4, 4)
        assert bits(interop.to_jax(inferred)) == bits(inferred)
    assert bits(interop.to_jax(parameter)) == bits(parameter)
    assert interop.jax_device("cpu").platform == "cpu"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float32"])
def test_aligned_numpy_memory_is_shared_with_jax(dtype: str) -> None:
    array = numpy_array(dtype)
    assert address(interop.to_jax(array, copy=False)) == address(array)
    with pytest.raises(OperandError, match=r"to_jax: copy=False asks.*JAX copies numpy's array to .*multiple of 64"):
        interop.to_jax(array.reshape(-1)[1:], copy=False)


def test_a_copy_does_not_alias() -> None:
    """The hazards of sharing, in both directions: seen where sharing was asked for, gone by default."""
    x = torch.ones(64)
    shared, copied = interop.to_jax(x, copy=False), interop.to_jax(x)
    x.zero_()
    assert (float(shared[0]), float(copied[0])) == (0, 1)
    array = jnp.arange(64, dtype=jnp.float32) + 1
    shared, copied = interop.to_torch(array, copy=False), interop.to_torch(array)
    copied.zero_()
    assert float(array[0]) == 1
    shared.zero_()
    assert float(array[0]) == 0
    array = jnp.ones(64)
    interop.to_numpy(array)[...] = 0
    assert float(array[0]) == 1
    with pytest.raises(ValueError, match="read-only"):
        interop.to_numpy(array, copy=None)[...] = 0


def test_shared_memory_outlives_its_first_owner() -> None:
    """Also an owner that gives its memory away: JAX does not donate a buffer that something outside holds."""
    array = interop.to_jax(torch.full((1024,), 3.0), copy=False)
    tensor = interop.to_torch(jnp.full((1024,), 4.0), copy=False)
    donated = jnp.ones(1024)
    held = interop.to_torch(donated, copy=None)
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(donated)
    others = torch.full((4096,), 5.0), jnp.full((4096,), 6.0)
    assert len(others) == 2 and set(np.asarray(array)) == {3.0} and set(tensor.tolist()) == {4.0}
    assert float(doubled[0]) == 2 and set(held.tolist()) == {1.0}


def test_numpy_memory_that_torch_cannot_share() -> None:
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    record = np.zeros(4, [("x", np.float32), ("flag", np.int8)])["x"]
    for refused in (frozen, np.zeros(4, np.float32)[::-1], record):
        assert interop.to_torch(refused, copy=None).tolist() == [0.0] * 4
        with pytest.raises(OperandError, match=r"to_torch: copy=False asks.*read-only or has negative strides"):
            interop.to_torch(refused, copy=False)


def test_containers_keep_their_types() -> None:
    scales = Scales(torch.ones(2, 1), torch.full((2, 1), 0.5))
    tree = {"w": [torch.zeros(2, dtype=torch.float8_e5m2), None], "s": scales, "n": (np.ones(3, np.float32),)}
    arrays = interop.to_jax(tree)
    assert isinstance(arrays["s"], Scales)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(arrays))
    assert jax.tree.structure(arrays) == jax.tree.structure(interop.to_numpy(tree))
    assert arrays["w"][1] is None
    assert isinstance(interop.to_torch(arrays)["n"][0], torch.Tensor)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a number": (lambda: interop.to_jax(1.0), r"to_jax: x must be an array.*got float; make an array"),
    "a list of them": (lambda: interop.to_torch([[1.0]]), r"to_torch: x must be an array.*got float"),
    "64 bits": (lambda: interop.to_jax(np.zeros(2)), r"to_jax: JAX narrows 64-bit types.*float64.*jax_enable_x64"),
    "int64": (lambda: interop.to_jax(torch.zeros(2).long()), r"to_jax: JAX narrows 64-bit.*torch.int64.*32-bit"),
    "packed": (
        lambda: interop.to_numpy(torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)),
        r"to_numpy: an array must have a dtype.*got torch.float4_e2m1fn_x2",
    ),
    "strings": (
        lambda: interop.to_torch(np.array(["a"])),
        r"to_torch: an array must have a dtype that.*got <U1; convert",
    ),
    "objects": (lambda: interop.to_jax(np.array([None])), r"to_jax: an array must have a dtype.*got object"),
    "four bits": (lambda: interop.to_torch(jnp.zeros(2, jnp.int4)), r"to_torch: .*got int4; convert it first$"),
    "a key": (lambda: interop.to_torch(jax.random.key(0)), r"to_torch: .*got key<fry>; .*key_data"),
    "no memory": (
        lambda: interop.to_jax(torch.empty(2, device="meta")),
        r"to_jax: the tensor must have strided memory; got.*meta",
    ),
    "wrapped": (
        lambda: interop.to_jax(TwoTensor(torch.ones(2), torch.ones(2))),
        r"to_jax: .*got a TwoTensor, which wraps others; of a DTensor give full_",
    ),
    "nested": (
        lambda: interop.to_jax(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
        r"to_jax: the tensor must have one size along each axis; got a nested tensor; give its parts",
    ),
    "masked": (
        lambda: interop.to_numpy(np.ma.array([1.0], mask=[True])),
        r"to_numpy: .*no masked arrays.*got a MaskedArray; give x.filled",
    ),
    "a scalar, shared": (lambda: interop.to_jax(np.float32(2), copy=False), r"to_jax: copy=False asks"),
    "sparse": (lambda: interop.to_numpy(torch.eye(2).to_sparse()), r"to_numpy: .*strided memory; got layout.*to_dense"),
    "traced": (lambda: jax.jit(interop.to_torch)(jnp.ones(2)), r"to_torch: the array must have values.*pure_callback"),
    "traced, numpy": (lambda: jax.vmap(interop.to_numpy)(jnp.ones(2)), r"to_numpy: the array must have values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_travel(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(OperandError, match=message):
        call()


def test_64_bits_travel_where_jax_has_them() -> None:
    with jax.enable_x64(True):
        for dtype in (torch.float64, torch.int64):
            x = torch.tensor([1, 2**52 + 1], dtype=dtype)
            assert interop.to_jax(x).dtype.itemsize == 8
            assert interop.to_torch(interop.to_jax(x)).tolist() == x.tolist()


def run_without(blocked: tuple[str, ...], code: str) -> list[str]:
    """The lines that `code` prints in a fresh interpreter that cannot import the blocked packages."""
    done = python(textwrap.dedent(code), blocked=blocked)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_sharded_array_is_gathered() -> None:
    """In a process of its own: the number of JAX's CPU devices is chosen when it starts."""
    code = """
        import jax; jax.config.update("jax_num_cpu_devices", 4)
        import jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from f8emu import interop
        from f8emu.spec import OperandError
        x = jnp.arange(32, dtype=jnp.float32).reshape(8, 4).astype(jnp.float8_e4m3fn)
        x = jax.device_put(x, NamedSharding(jax.make_mesh((4,), ("x",)), P("x")))
        for convert in (interop.to_torch, interop.to_numpy):
            y = convert(x)
            assert interop.to_numpy(y).astype(np.float32).tolist() == np.asarray(x).astype(np.float32).tolist()
            try:
                convert(x, copy=False)
            except OperandError as error:
                print(error)
        """
    lines = run_without((), code)
    assert len(lines) == 2
    assert all("copy=False asks for shared memory, but the array is spread over 4 devices" in line for line in lines)


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
    assert run_without(("jax", "jaxlib"), code) == ["tensor(16., dtype=torch.bfloat16)"]
    monkeypatch.setenv("F8EMU_NATIVE_LIBRARY", "/nowhere")
    warning, error = run_without(("jax", "jaxlib"), code)
    assert "F8EMU_NATIVE_LIBRARY names /nowhere, which is not there" in warning
    assert error == (
        "f8emu.torch.scaled_mm (engine 'emulated') needs the package 'jax', which is not installed; "
        "install it with: pip install 'f8emu[jax]'"
    )


def test_without_torch_the_package_says_so() -> None:
    """And without the blocker nothing is missing, so that these tests could fail."""
    code = """
        from f8emu.spec import MissingExtraError
        from f8emu import interop
        for load in (lambda: __import__("f8emu.torch"), lambda: interop.to_torch(None)):
            try:
                load()
            except MissingExtraError as error:
                print(error)
        """
    remedy = "needs the package 'torch', which is not installed; install it with: pip install 'f8emu[torch]'"
    assert run_without(("torch",), code) == [f"f8emu.torch {remedy}", f"interop.to_torch {remedy}"]
    assert run_without((), code) == []
