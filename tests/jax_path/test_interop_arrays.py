"""Arrays between torch, JAX and numpy: who owns the memory, what cannot travel, and scaled tensors."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import f8emu.torch as f8
import f8ref.jax
import f8ref.numpy
from f8emu import interop
from f8emu.spec import E4M3FN, OperandError, Scales

DTYPES = (
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32 complex64 "
    "bool int8 int16 int32 uint8 uint16 uint32"
).split()
TO = {"torch": interop.to_torch, "jax": interop.to_jax, "numpy": interop.to_numpy}


def numpy_array(dtype: str, shape: tuple[int, ...] = (8, 48)) -> np.ndarray:
    """All kinds of bits, aligned to 64 bytes as torch and JAX have it."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype == "bool":
        return np.random.default_rng(3).integers(0, 2, shape).astype(bool)
    raw = np.random.default_rng(3).integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8)
    memory = np.zeros(raw.size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + raw.size].reshape(raw.shape)
    array[...] = raw
    return array.view(kind)


def address(x: object) -> int:
    match x:
        case torch.Tensor():
            return x.data_ptr()
        case jax.Array():
            return x.unsafe_buffer_pointer()
        case np.ndarray():
            return x.ctypes.data
    raise TypeError


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
                assert str(y.dtype).removeprefix("torch.") == dtype
                assert tuple(y.shape) == array.shape
                assert bits(y) == array.tobytes(), (source, target)
                # numpy's own memory is aligned to 16 bytes, which JAX copies
                shares = copy is None and (source, target) not in (("numpy", "jax"), ("numpy", "numpy"))
                if (source, target) != ("numpy", "jax"):
                    assert (address(y) == address(x)) is (shares or (copy is None and source == target))


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
    assert float(shared[0]) == 0
    assert float(copied[0]) == 1

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
    array = interop.to_jax(torch.full((1024,), 3.0), copy=False)
    tensor = interop.to_torch(jnp.full((1024,), 4.0), copy=False)
    others = torch.full((4096,), 5.0), jnp.full((4096,), 6.0)
    assert len(others) == 2
    assert set(np.asarray(array)) == {3.0}
    assert set(tensor.tolist()) == {4.0}


def test_donated_arrays_do_not_take_a_tensor_with_them() -> None:
    """JAX does not give away a buffer that something outside holds."""
    array = jnp.ones(1024)
    tensor = interop.to_torch(array, copy=None)
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    with_warning = double(array)
    assert float(with_warning[0]) == 2
    assert set(tensor.tolist()) == {1.0}


@pytest.mark.parametrize("order", ["C", "F"])
def test_layouts_of_numpy(order: str) -> None:
    array = np.asarray(numpy_array("float8_e5m2", (16, 32)), order=order)  # type: ignore[call-overload]
    for view in (array, array.T, array[::2], array[:, ::-1], array[3, 4], array[:0]):
        assert bits(interop.to_torch(view)) == view.tobytes()
        assert bits(interop.to_torch(view, copy=None)) == view.tobytes()
        assert bits(interop.to_jax(view)) == view.tobytes()
        assert interop.to_torch(view).shape == interop.to_jax(view).shape == np.shape(view)


def test_numpy_memory_that_torch_cannot_share() -> None:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    record = np.zeros(4, [("x", np.float32), ("flag", np.int8)])["x"]
    for refused in (array, np.zeros(4, np.float32)[::-1], record):
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


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise_1x128"])
def test_a_scaled_tensor_multiplies_to_the_same_bits(granularity: str) -> None:
    """Codes and scales from torch give JAX's GEMM the bits of torch's, and numpy the same values."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 16)[:, None]
    w = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    of_b = "blockwise_128x128" if granularity.startswith("blockwise") else granularity
    pair: list[tuple[torch.Tensor, Scales]] = []
    for values, own in ((x, granularity), (w, of_b)):
        scales = f8.scale_from_amax(f8.amax(values, own), E4M3FN)
        pair.append((f8.quantize(values, scales.inv_scale, E4M3FN, own), scales))
    (a, of_x), (b, of_w) = pair
    options: dict[str, Any] = {"granularity_a": granularity, "granularity_b": of_b, "out_dtype": "float32"}
    product = f8.scaled_mm(a, b.t(), of_x.scale, of_w.scale.t(), **options)
    (a_jax, jax_x), (b_jax, jax_w) = interop.to_jax(pair)
    assert bits(f8ref.jax.scaled_mm(a_jax, b_jax.T, jax_x.scale, jax_w.scale.T, **options)) == bits(product)
    codes, numpy_scales = interop.to_numpy(pair[0])
    assert bits(f8ref.numpy.dequantize(codes, numpy_scales.scale, granularity)) == bits(
        f8.dequantize(a, of_x.scale, granularity)
    )


def meta() -> torch.Tensor:
    return torch.empty(2, device="meta")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a number": (lambda: interop.to_jax(1.0), r"to_jax: x must be an array.*got float; make an array"),
    "a list of them": (lambda: interop.to_torch([[1.0]]), r"to_torch: x must be an array.*got float"),
    "64 bits": (lambda: interop.to_jax(np.zeros(2)), r"to_jax: JAX narrows 64-bit types.*float64.*jax_enable_x64"),
    "strings": (
        lambda: interop.to_torch(np.array(["a"])),
        r"to_torch: an array must have a dtype that.*got <U1; convert",
    ),
    "objects": (lambda: interop.to_jax(np.array([None])), r"to_jax: an array must have a dtype.*got object"),
    "four bits": (lambda: interop.to_torch(jnp.zeros(2, jnp.int4)), r"to_torch: .*got int4; convert it first$"),
    "a key": (lambda: interop.to_torch(jax.random.key(0)), r"to_torch: .*got key<fry>; .*key_data"),
    "no memory": (lambda: interop.to_jax(meta()), r"to_jax: the tensor must have strided memory; got.*meta"),
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


def test_packed_four_bit_floats_are_refused() -> None:
    x = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for convert in TO.values():
        with pytest.raises(OperandError, match=r"to_\w+: an array must have a dtype.*got torch.float4_e2m1fn_x2"):
            convert(x)


def test_wrapped_tensors_are_refused_by_name() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(32, 32))
    f8.convert_to_float8_training(layer, config="rowwise")
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(OperandError, match=r"to_jax: .*got a TwoTensor, which wraps others; of a DTensor give full_"):
        interop.to_jax(TwoTensor(torch.ones(2), torch.ones(2)))
    assert interop.to_jax(layer[0].weight).shape == (32, 32)


def test_64_bits_travel_where_jax_has_them() -> None:
    with jax.enable_x64(True):
        for dtype in (torch.float64, torch.int64):
            x = torch.tensor([1, 2**52 + 1], dtype=dtype)
            assert interop.to_jax(x).dtype.itemsize == 8
            assert interop.to_torch(interop.to_jax(x)).tolist() == x.tolist()


def test_a_sharded_array_is_gathered() -> None:
    """In a process of its own: the number of JAX's CPU devices is chosen when it starts."""
    code = """
import jax; jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from f8emu import interop
from f8emu.spec import OperandError
mesh = jax.make_mesh((4,), ("x",))
x = jnp.arange(32, dtype=jnp.float32).reshape(8, 4).astype(jnp.float8_e4m3fn)
x = jax.device_put(x, NamedSharding(mesh, P("x")))
for convert in (interop.to_torch, interop.to_numpy):
    y = convert(x)
    assert interop.to_numpy(y).astype(np.float32).tolist() == np.asarray(x).astype(np.float32).tolist()
    try:
        convert(x, copy=False)
    except OperandError as error:
        print(error)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("copy=False asks for shared memory, but the array is spread over 4 devices" in line for line in lines)
