"""Between numpy arrays of ml_dtypes and the arrays of a framework, without a change of bits.

Neither torch nor JAX is imported before a function that needs it is called.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from f8emu import interop
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.spec import Format, SpecError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """How arrays travel to one framework and back."""

    name: str
    version: str
    device: str
    """The device as a report names it: `cpu`, `NVIDIA H200`."""
    on_gpu: bool
    load: Callable[[np.ndarray], Any]
    """Copies where it must: the framework never writes into the suite's arrays. Keeps which dimension is contiguous."""
    store: Callable[[Any], np.ndarray]
    address: Callable[[Any], int]
    """The address of the first element of a writable array."""
    array_type: type
    dtype: Callable[[Format], Any]
    """The framework's own dtype of a format."""


def numpy_arrays(call: str) -> Framework:
    """numpy, as it is."""
    return Framework(
        name="numpy",
        version=np.__version__,
        device="cpu",
        on_gpu=False,
        load=lambda array: array,
        store=np.asarray,
        address=lambda array: array.ctypes.data,
        array_type=np.ndarray,
        dtype=dtype_of,
    )


def jax_arrays(call: str) -> Framework:
    """JAX, on its default device; raises MissingExtraError where it is not installed."""
    jax = interop.require_jax(call)
    from jax.experimental.layout import Format as Placement
    from jax.experimental.layout import Layout

    device = jax.devices()[0]
    on_gpu, on_device = device.platform == "gpu", jax.sharding.SingleDeviceSharding(device)

    def load(array: np.ndarray) -> Any:
        # The device is given as an array that comes from torch has it: to XLA it is part of the program, and both
        # subjects then share what is compiled. So is the layout, which is one on a CPU, and chooses kernels on a GPU.
        order = tuple(int(axis) for axis in np.argsort([-stride for stride in array.strides], kind="stable"))
        if on_gpu and order != tuple(range(array.ndim)):
            return jax.device_put(array, Placement(Layout(major_to_minor=order), on_device))
        return jax.device_put(array if on_gpu else np.asarray(array, order="C"), on_device)

    return Framework(
        name="jax",
        version=jax.__version__,
        device=device.device_kind if on_gpu else device.platform,
        on_gpu=on_gpu,
        load=load,
        store=np.asarray,
        address=lambda array: array.unsafe_buffer_pointer(),
        array_type=jax.Array,
        dtype=lambda fmt: getattr(jax.numpy, fmt.name),
    )


def torch_arrays(call: str) -> Framework:
    """torch, on its CUDA device where there is one; raises MissingExtraError where it is not installed."""
    torch = interop.require_torch(call)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")

    def load(array: np.ndarray) -> "torch.Tensor":
        if array.ndim >= 2 and not array.flags.c_contiguous and array.swapaxes(-1, -2).flags.c_contiguous:
            return load(array.swapaxes(-1, -2)).mT  # column-major stays column-major
        return interop.to_torch(array, device)

    return Framework(
        name="torch",
        version=torch.__version__,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        on_gpu=on_gpu,
        load=load,
        store=lambda tensor: np.asarray(interop.to_numpy(tensor, copy=None), order="C"),
        address=lambda tensor: tensor.data_ptr(),
        array_type=torch.Tensor,
        dtype=lambda fmt: getattr(torch, fmt.name),
    )


FRAMEWORKS: dict[str, Callable[[str], Framework]] = {
    "torch": torch_arrays,
    "numpy": numpy_arrays,
    "jax": jax_arrays,
}
"""Name -> framework; the argument is the call that an error names."""


def framework_of(arrays: str) -> Callable[[str], Framework]:
    """The framework of that name; raises SpecError for another name."""
    if arrays not in FRAMEWORKS:
        raise SpecError(f"arrays must be one of {', '.join(FRAMEWORKS)}; got {arrays!r}")
    return FRAMEWORKS[arrays]


def travelling(framework: Framework, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a framework's arrays as a function of numpy arrays."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _mapped((args, kwargs), np.ndarray, framework.load)
        return _mapped(function(*args, **kwargs), framework.array_type, framework.store)

    return call


def _mapped(value: Any, leaf: type, function: Callable[[Any], Any]) -> Any:
    # `function` of every `leaf` in dicts and (named) tuples; everything else as it is.
    if isinstance(value, leaf):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(item, leaf, function) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [_mapped(item, leaf, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
