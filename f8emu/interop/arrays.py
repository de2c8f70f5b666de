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
"""What all three libraries have. Fewer than 8 bits are packed in one library and spread in another."""


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
    return _mapped("to_jax", x, lambda leaf: _array_to_jax(jax, leaf, copy))


def to_torch(x: Any, device: "torch.device | str | None" = None, *, copy: bool | None = True) -> Any:
    """JAX and numpy arrays as tensors on `device` (None: where they are), in the same containers.

    Waits until an array is computed. Tensors are contiguous, except under `copy=False`.

    Args:
        x: as for `to_jax`.
        device: where the tensors go.
        copy: as for `to_jax`.

    Exactness: no bit changes; NaN payloads and subnormals included.

    Raises:
        MissingExtraError: torch is not installed.
        OperandError: neither an array nor a container; a traced or masked array; a dtype that torch lacks; memory that
            cannot be shared under `copy=False`.
    """
    torch = require_torch("interop.to_torch")
    return _mapped("to_torch", x, lambda leaf: _array_to_torch(torch, leaf, device, copy))


def to_numpy(x: Any, *, copy: bool | None = True) -> Any:
    """Tensors and JAX arrays as numpy arrays, in the same containers; dtypes that numpy lacks are those of ml_dtypes.

    Waits until an array is computed. Arrays are C-contiguous and, if copied, writable.

    Args:
        x: as for `to_jax`.
        copy: as for `to_jax`.

    Exactness: no bit changes; NaN payloads and subnormals included.

    Raises:
        OperandError: as for `to_torch`; a distributed, wrapped or nested tensor.
    """
    return _mapped("to_numpy", x, lambda leaf: _array_to_numpy(leaf, copy))


def _array_to_jax(jax: Any, x: Any, copy: bool | None) -> Any:
    # An array of JAX needs no conversion, and a dtype that JAX would narrow has none.
    library = library_of(x)
    if library == "jax":
        return jax.numpy.array(x, copy=True) if copy else x
    dtype = _name(x)
    if dtype in _NARROWED and not jax.config.jax_enable_x64:
        raise OperandError(
            f"to_jax: JAX narrows 64-bit types to 32 bits; got {x.dtype}; convert it to a 32-bit type first, or set "
            "jax_enable_x64"
        )
    if library == "numpy":
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
    return _tensor_to_jax(jax, x, copy)


def _tensor_to_jax(jax: Any, tensor: "torch.Tensor", copy: bool | None) -> Any:
    torch = require_torch("interop.to_jax")
    # 1. DLPack shares memory that JAX would lay out in the same way, on the same device.
    source = _plain("to_jax", tensor)
    device = jax_device(source.device)
    is_shared = (source.device.type == "cpu") == (device.platform == "cpu")
    is_compact = source.is_contiguous() or (source.ndim >= 2 and source.mT.is_contiguous())
    is_shared = is_shared and is_compact and source.data_ptr() % _ALIGNMENT == 0
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
        source = source.clone(memory_format=torch.contiguous_format)
    return jax.numpy.from_dlpack(source)


def _array_to_torch(torch: Any, x: Any, device: Any, copy: bool | None) -> "torch.Tensor":
    library = library_of(x)
    if library == "torch":
        source = x.detach()
    elif library == "numpy":
        source = _numpy_to_torch(torch, x, copy)
    else:
        _require_values("to_torch", x)
        x = _gathered("to_torch", x, copy) if len(x.devices()) > 1 else x
        source = torch.from_dlpack(x.block_until_ready())
    if copy is False and device is not None:
        wanted, found = torch.device(device), source.device
        if found.type != wanted.type or wanted.index not in (None, found.index):
            raise _not_shared("to_torch", f"the array is on {found}, the tensor would be on {wanted}")
    placed = source if device is None else source.to(device)
    if copy and placed is source and library != "numpy":
        return placed.clone(memory_format=torch.contiguous_format)
    return placed if copy is False else placed.contiguous()


def _numpy_to_torch(torch: Any, array: "np.ndarray", copy: bool | None) -> "torch.Tensor":
    """Copied into memory of torch's own, which is aligned for whoever shares it next."""
    import numpy as np

    # torch takes writable memory whose strides are whole elements; float8 goes as integers of its width.
    array, dtype = np.asarray(array), getattr(torch, _name(array))
    is_shared = array.flags.writeable
    is_shared = is_shared and all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
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


def _array_to_numpy(x: Any, copy: bool | None) -> "np.ndarray":
    import numpy as np

    library = library_of(x)
    if library == "torch":
        source = _plain("to_numpy", x)
        if copy is False and source.device.type != "cpu":
            raise _not_shared("to_numpy", f"the tensor is on {source.device}")
        array = _tensor_to_numpy(source.cpu())
        copy = copy and source.device.type == "cpu"
    elif library == "jax":
        _require_values("to_numpy", x)
        if copy is False and {device.platform for device in x.devices()} != {"cpu"}:
            raise _not_shared("to_numpy", f"the array is on {x.devices()}")
        if len(x.devices()) > 1:
            x = _gathered("to_numpy", x, copy)
        array = np.asarray(x)
    else:
        array = np.asarray(x)
    return np.array(array, order="C", copy=True) if copy else array


def _tensor_to_numpy(tensor: "torch.Tensor") -> "np.ndarray":
    """The memory of a CPU tensor, whatever its strides."""
    import ml_dtypes

    name = _name(tensor)
    if name not in _OF_ML_DTYPES:
        return tensor.numpy()
    torch = require_torch("interop.to_numpy")
    integers = {1: torch.uint8, 2: torch.int16}[tensor.dtype.itemsize]
    return tensor.view(integers).numpy().view(getattr(ml_dtypes, name))


def _mapped(call: str, x: Any, function: Callable[[Any], Any]) -> Any:
    """`function` of every array in the containers; None stays."""
    # An array, before containers: a tensor is no sequence here.
    library = library_of(x)
    if library is not None:
        if _name(x) not in _DTYPES:
            remedy = "give jax.random.key_data of it" if _name(x).startswith("key<") else "convert it first"
            raise OperandError(
                f"{call}: an array must have a dtype that torch, JAX and numpy have; got {x.dtype}; {remedy}"
            )
        if library == "numpy" and hasattr(x, "mask"):
            raise OperandError(
                f"{call}: torch and JAX have no masked arrays, and the mask would be lost; got a {type(x).__name__}; "
                "give x.filled(value), or x.data and x.mask"
            )
        return function(x)
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


def _plain(call: str, tensor: "torch.Tensor") -> "torch.Tensor":
    """The tensor without its gradient, if it has values of its own in strided memory."""
    torch = require_torch(f"interop.{call}")
    kind = type(tensor).__name__
    if tensor.is_nested:
        raise OperandError(
            f"{call}: the tensor must have one size along each axis; got a nested tensor; give its parts, "
            "list(tensor.unbind()), or torch.nested.to_padded_tensor"
        )
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        raise OperandError(
            f"{call}: the tensor must hold its values itself; got a {kind}, which wraps others; of a DTensor give "
            "full_tensor() or to_local(), of another class the plain tensor that it stands for"
        )
    if tensor.is_meta or tensor.layout is not torch.strided:
        held = "no memory (device meta)" if tensor.is_meta else f"layout {tensor.layout}"
        raise OperandError(f"{call}: the tensor must have strided memory; got {held}; give it values, or to_dense()")
    return tensor.detach().resolve_conj().resolve_neg()


def _require_values(call: str, array: Any) -> None:
    jax = require_jax(f"interop.{call}")
    if isinstance(array, jax.core.Tracer):
        raise OperandError(
            f"{call}: the array must have values; got {array} of a function that JAX traces (jit, grad, vmap); call it "
            "outside, or in a jax.pure_callback"
        )
    if not array.is_fully_addressable:
        raise OperandError(
            f"{call}: all of the array must be on devices of this process; got {array.sharding}; gather it first, with "
            "jax.experimental.multihost_utils.process_allgather"
        )


def _gathered(call: str, array: Any, copy: bool | None) -> Any:
    jax = require_jax(f"interop.{call}")
    if copy is False:
        raise _not_shared(call, f"the array is spread over {len(array.devices())} devices")
    return jax.device_put(array, min(array.devices(), key=lambda device: device.id))


def _name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _not_shared(call: str, why: str) -> OperandError:
    return OperandError(f"{call}: copy=False asks for shared memory, but {why}; pass copy=None or copy=True")
