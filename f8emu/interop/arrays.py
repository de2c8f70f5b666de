"""Arrays of torch, JAX and numpy (with ml_dtypes) into each other: same dtype, shape and bits.

| from, to | way | shares memory (`copy=None`) |
|---|---|---|
| torch, JAX | DLPack, both ways | same device; compact and aligned to 64 bytes towards JAX |
| torch, numpy | the integers of the dtype's width: numpy's DLPack knows no float8 | CPU; towards torch writable |
| JAX, numpy | JAX's own | CPU; aligned to 64 bytes towards JAX; read-only towards numpy |

Shared memory breaks a promise: JAX takes its arrays for immutable, but the tensor beside one can be written, in either
direction. Therefore all functions copy by default. Who shares must not write to a tensor before the computation of JAX
that reads it is done, and must not let JAX use an array whose tensor was written.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from f8emu.interop.frameworks import jax_device, library_of, require_jax, require_torch
from f8emu.spec.errors import OperandError

if TYPE_CHECKING:
    import numpy as np
    import torch

_ALIGNMENT = 64
"""Bytes; XLA on the CPU copies whatever is aligned to less, and some of its versions refuse it."""
_NARROWED = ("float64", "int64", "uint64", "complex128")
"""JAX makes 32 bits of them, unless `jax_enable_x64` is set."""
_OF_ML_DTYPES = (
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu bfloat16"  # numpy has them not
).split()
_DTYPES = frozenset(
    [*"bool int8 int16 int32 uint8 uint16 uint32 float16 float32 complex64".split(), *_NARROWED, *_OF_ML_DTYPES]
)
"""The dtypes that all three libraries have. Fewer than 8 bits are packed in one library and spread in another."""


def to_jax(x: Any, *, copy: bool | None = True) -> Any:
    """Tensors and numpy arrays as JAX arrays, in the same containers; gradients are detached.

    A tensor arrives on its own GPU if JAX sees it, else on the CPU; a numpy array on JAX's default device.

    Args:
        x: an array of any of the three libraries, None, or a dict, list, tuple or NamedTuple of such: codes with their
            `Scales` are a scaled tensor. Other mappings (OrderedDict, FrozenDict) come back as dicts.
        copy: True always copies, None shares memory if both sides allow it, False raises if they do not.

    Exactness: no bit changes; NaN payloads and subnormals included.

    Raises:
        MissingExtraError: jax is not installed.
        OperandError: neither an array nor a container; a dtype that JAX lacks, or would narrow to 32 bits; a
            distributed, wrapped or nested tensor; a masked array; memory that cannot be shared under `copy=False`.
    """
    jax = require_jax("interop.to_jax")
    return _mapped("to_jax", x, lambda leaf, library: _to_jax(jax, leaf, library, copy))


def to_torch(x: Any, device: "torch.device | str | None" = None, *, copy: bool | None = True) -> Any:
    """JAX and numpy arrays as tensors on `device` (None: where they are), in the same containers.

    Waits until an array is computed. Tensors are contiguous, except under `copy=False`. Arguments and exactness are
    those of `to_jax`.

    Raises:
        MissingExtraError: torch is not installed.
        OperandError: neither an array nor a container; a traced or masked array; a dtype that torch lacks; memory that
            cannot be shared under `copy=False`.
    """
    torch = require_torch("interop.to_torch")
    return _mapped("to_torch", x, lambda leaf, library: _to_torch(torch, leaf, library, device, copy))


def to_numpy(x: Any, *, copy: bool | None = True) -> Any:
    """Tensors and JAX arrays as numpy arrays, in the same containers; dtypes that numpy lacks are those of ml_dtypes.

    Waits until an array is computed. Arrays are C-contiguous and, if copied, writable. Arguments and exactness are
    those of `to_jax`.

    Raises:
        OperandError: as for `to_torch`; a distributed, wrapped or nested tensor.
    """
    return _mapped("to_numpy", x, lambda leaf, library: _to_numpy(leaf, library, copy))


# 1 Containers, and what cannot travel


def _mapped(call: str, x: Any, function: Callable[[Any, str], Any]) -> Any:
    # An array, before containers: a tensor is no sequence here.
    library = library_of(x)
    if library is not None:
        if refusal := _refusal(call, x, library):
            raise OperandError(f"{call}: {refusal}")
        return function(x, library)
    if x is None:
        return None
    if isinstance(x, Mapping):
        return {key: _mapped(call, value, function) for key, value in x.items()}
    if isinstance(x, list):
        return [_mapped(call, value, function) for value in x]
    if isinstance(x, tuple):
        values = [_mapped(call, value, function) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    raise OperandError(
        f"{call}: x must be an array of torch, JAX or numpy, or dicts, lists and tuples of them; got "
        f"{type(x).__name__}; make an array of it, or pass the one that it holds"
    )


def _refusal(call: str, x: Any, library: str) -> str:
    kind, dtype = type(x).__name__, _name(x)
    if dtype not in _DTYPES:
        remedy = "give jax.random.key_data of it" if dtype.startswith("key<") else "convert it first"
        return f"an array must have a dtype that torch, JAX and numpy have; got {x.dtype}; {remedy}"
    if library == "numpy" and hasattr(x, "mask"):
        return f"torch and JAX have no masked arrays; got a {kind}; give x.filled(value), or x.data and x.mask"
    if library == call.removeprefix("to_"):
        return ""
    if library == "jax":
        if isinstance(x, require_jax(f"interop.{call}").core.Tracer):
            remedy = "call it outside, or in a jax.pure_callback"
            return f"the array must have values; got {x} of a function that JAX traces (jit, grad, vmap); {remedy}"
        if not x.is_fully_addressable:
            remedy = "gather it first, with jax.experimental.multihost_utils.process_allgather"
            return f"all of the array must be on devices of this process; got {x.sharding}; {remedy}"
    if library == "torch":
        torch = require_torch(f"interop.{call}")
        if x.is_nested:
            remedy = "give its parts, list(tensor.unbind()), or torch.nested.to_padded_tensor"
            return f"the tensor must have one size along each axis; got a nested tensor; {remedy}"
        if torch.utils._python_dispatch.is_traceable_wrapper_subclass(x):
            remedy = "of a DTensor give full_tensor() or to_local(), of another class the plain tensor"
            return f"the tensor must hold its values itself; got a {kind}, which wraps others; {remedy}"
        if x.is_meta or x.layout is not torch.strided:
            held = "no memory (device meta)" if x.is_meta else f"layout {x.layout}"
            return f"the tensor must have strided memory; got {held}; give it values, or to_dense()"
    return ""


def _name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _not_shared(call: str, why: str) -> OperandError:
    return OperandError(f"{call}: copy=False asks for shared memory, but {why}; pass copy=None or copy=True")


# 2 To JAX


def _to_jax(jax: Any, x: Any, library: str, copy: bool | None) -> Any:
    if library == "jax":
        return jax.numpy.array(x, copy=True) if copy else x
    dtype = _name(x)
    if dtype in _NARROWED and not jax.config.jax_enable_x64:
        remedy = "convert it to a 32-bit type first, or set jax_enable_x64"
        raise OperandError(f"to_jax: JAX narrows 64-bit types to 32 bits; got {x.dtype}; {remedy}")
    if library == "torch":
        return _tensor_to_jax(jax, _plain(x), copy)
    import numpy as np

    if copy is False and isinstance(x, np.generic):
        raise _not_shared("to_jax", f"a numpy scalar ({dtype}) has no memory that others may read")
    x = np.asarray(x)
    array = jax.numpy.array(x, copy=True) if copy else jax.device_put(x, may_alias=True)
    if copy is False and (array.device.platform != "cpu" or array.unsafe_buffer_pointer() != x.ctypes.data):
        raise _not_shared(
            "to_jax",
            f"JAX copies numpy's array to {array.device}; it shares memory on the CPU that is row-major and at a "
            f"multiple of {_ALIGNMENT} bytes",
        )
    return array


def _tensor_to_jax(jax: Any, source: "torch.Tensor", copy: bool | None) -> Any:
    # 1. DLPack shares memory that JAX would lay out in the same way, on the same device.
    device = jax_device(source.device)
    is_near = (source.device.type == "cpu") == (device.platform == "cpu")
    is_compact = source.is_contiguous() or (source.ndim >= 2 and source.mT.is_contiguous())
    is_shared = is_near and is_compact and source.data_ptr() % _ALIGNMENT == 0
    if copy is False and not is_shared:
        raise _not_shared(
            "to_jax",
            f"the tensor on {source.device} has strides {tuple(source.stride())} and address 0x{source.data_ptr():x}, "
            f"the array would be on {device}; needed are one device, row-major or transposed memory, and an address "
            f"that is a multiple of {_ALIGNMENT}",
        )
    # 2. Otherwise into memory of torch's own, which is aligned.
    if source.device.type == "cuda" and device.platform == "cpu":
        source = source.contiguous().cpu()
    elif copy or not is_shared:
        source = source.clone(memory_format=require_torch("interop.to_jax").contiguous_format)
    # JAX's first use of several GPUs leaves another one the current device; torch exports from the current one alone.
    with require_torch("interop.to_jax").cuda.device_of(source):
        return jax.numpy.from_dlpack(source)


def _plain(tensor: "torch.Tensor") -> "torch.Tensor":
    return tensor.detach().resolve_conj().resolve_neg()


# 3 To torch


def _to_torch(torch: Any, x: Any, library: str, device: Any, copy: bool | None) -> "torch.Tensor":
    # 1. A tensor where the array is, which shares its memory if it may.
    if library == "torch":
        source = x.detach()
    elif library == "numpy":
        source = _numpy_to_torch(torch, x, copy)
    else:
        source = torch.from_dlpack(_gathered("to_torch", x, copy).block_until_ready())
    if copy is False and device is not None:
        wanted, place = torch.device(device), source.device
        if place.type != wanted.type or wanted.index not in (None, place.index):
            raise _not_shared("to_torch", f"the array is on {place}, the tensor would be on {wanted}")
    # 2. On the device, and copied unless that was a copy.
    placed = source if device is None else source.to(device)
    if copy and placed is source and library != "numpy":
        return placed.clone(memory_format=torch.contiguous_format)
    return placed if copy is False else placed.contiguous()


def _numpy_to_torch(torch: Any, array: "np.ndarray", copy: bool | None) -> "torch.Tensor":
    # Copied into memory of torch's own, which is aligned for whoever shares it next.
    import numpy as np

    # torch takes writable memory whose strides are whole elements; float8 goes as integers of its width.
    array, dtype = np.asarray(array), getattr(torch, _name(array))
    is_whole = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    is_shared = array.flags.writeable and is_whole
    if copy is False and not is_shared:
        raise _not_shared(
            "to_torch",
            f"numpy's array is read-only or has negative strides, or strides {array.strides} that its {array.itemsize} "
            "bytes an element do not divide",
        )
    integers = array.view(f"u{array.dtype.itemsize}") if _name(array) in _OF_ML_DTYPES else array
    if copy is not True and is_shared:
        return torch.from_numpy(integers).view(dtype)
    tensor = torch.empty(array.shape, dtype=dtype)
    np.copyto(_tensor_to_numpy(tensor).view(integers.dtype), integers)
    return tensor


def _gathered(call: str, array: Any, copy: bool | None) -> Any:
    if len(array.devices()) == 1:
        return array
    if copy is False:
        raise _not_shared(call, f"the array is spread over {len(array.devices())} devices")
    first = min(array.devices(), key=lambda device: device.id)
    return require_jax(f"interop.{call}").device_put(array, first)


# 4 To numpy


def _to_numpy(x: Any, library: str, copy: bool | None) -> "np.ndarray":
    import numpy as np

    platforms = {"torch": lambda: {x.device.type}, "jax": lambda: {device.platform for device in x.devices()}}
    is_near = library == "numpy" or platforms[library]() == {"cpu"}
    if copy is False and not is_near:
        raise _not_shared("to_numpy", f"the array is on {x.device if library == 'torch' else x.devices()}")
    if library == "torch":
        array = _tensor_to_numpy(_plain(x).cpu())
        copy = copy and is_near
    else:
        array = np.asarray(_gathered("to_numpy", x, copy) if library == "jax" else x)
    return np.array(array, order="C", copy=True) if copy else array


def _tensor_to_numpy(tensor: "torch.Tensor") -> "np.ndarray":
    import ml_dtypes

    name = _name(tensor)
    if name not in _OF_ML_DTYPES:
        return tensor.numpy()
    torch = require_torch("interop.to_numpy")
    integers = {1: torch.uint8, 2: torch.int16}[tensor.dtype.itemsize]
    return tensor.view(integers).numpy().view(getattr(ml_dtypes, name))
