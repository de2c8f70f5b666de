"""Which engine computes a GEMM: the device's tensor cores, or the emulation of a chip's.

An eager call asks the device of its operands. A trace does not know where it will run: it holds both engines, and JAX
lowers the one of the backend (`jax.lax.platform_dependent`). A vmapped GEMM is one GEMM after another.
"""

from __future__ import annotations  # short signatures in `help`

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.custom_batching import sequential_vmap

from f8emu.jax.compiling import (
    EXCESS_PRECISION,
    FLOAT8_CAPABILITY,
    capability_of,
    compiled,
    compiler_options,
    cuda_devices,
    is_device_of,
    is_eager,
    known_excess_precision,
    refuse_lowering,
)
from f8emu.jax.gemm import emulation, hardware
from f8emu.jax.gemm.call import EngineCall, in_parts
from f8emu.spec.chip import Chip
from f8emu.spec.chips import CHIPS, HOPPER, chip_by_name
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.names import ChipName, EngineName

AUTO, HARDWARE, EMULATED = ENGINES = ("auto", "hardware", "emulated")
"""The engines of a GEMM; "auto": the hardware on a GPU that is the requested chip, else the emulation."""


def check_engine(call: str, engine: str) -> None:
    """Raise OperandError for an unknown engine."""
    if engine not in ENGINES:
        raise OperandError(f"{call}: engine must be one of {', '.join(ENGINES)}; got {engine!r}")


def engine_of(device: Any = None, engine: EngineName = "auto", *, chip: Chip | ChipName = HOPPER) -> str:
    """The engine that computes a GEMM of arrays on `device`, in words for a report; None is JAX's default device, a
    name the first device of that platform.

    Raises:
        OperandError: an unknown engine.
        SpecError: an unknown chip.
        UnsupportedError: "hardware" on a device that is not that chip.
    """
    check_engine("engine_of", engine)
    chip = chip_by_name("engine_of", chip)
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    if engine != EMULATED and is_device_of(chip, device):
        return f"cuBLASLt on {device.device_kind}"
    if engine == HARDWARE:
        raise UnsupportedError(_no_hardware("engine_of", device, chip))
    by = "f8emu.native" if device.platform == "cpu" and emulation.is_available() else "f8ref.jax"
    words = f"emulated by {by} on {device.platform}"
    return words if chip == HOPPER else f"{chip} {words}"


def multiply(call: EngineCall, operands: tuple[Any, ...]) -> jax.Array:
    """The product by the engine of the device, or of the backend that the trace is lowered for."""
    check_engine(call.gemm.call, call.engine)
    if call.is_microscaled:
        if call.engine == HARDWARE:
            raise UnsupportedError(
                f"{call.gemm.call}: f8emu.jax calls no library for E8M0 scales; got engine='hardware'; take "
                "jax.nn.scaled_matmul on such a GPU, or engine='emulated'"
            )
        call = call._replace(engine=EMULATED)
    # 1. A trace does not know where it will run: both engines, and under vmap one GEMM after another.
    if not is_eager(operands):
        traced = functools.partial(_traced, call, known_excess_precision())
        return (sequential_vmap(traced) if any(isinstance(x, Tracer) for x in operands) else traced)(*operands)
    # 2. Arrays on several devices: a program that XLA partitions.
    operands = tuple(map(jnp.asarray, operands))  # numpy's, kept for a backward pass
    if any(len(x.devices()) > 1 for x in operands):
        return _program(call)(*operands)
    # 3. One device: its own library if that has the chip's bits, else the emulation.
    (device,) = operands[0].devices()
    if call.engine != EMULATED and is_device_of(call.gemm.chip, device):
        if call.has_own_split:
            raise UnsupportedError(_own_split(call))
        return hardware.multiply(call, *operands)
    if call.engine == HARDWARE:
        raise UnsupportedError(_no_hardware(call.gemm.call, device, call.gemm.chip))
    if call.engine == AUTO and capability_of(device) >= FLOAT8_CAPABILITY:
        warn_of_idle_gpu(call.gemm.chip)
    return emulation.multiply(call, *operands)


@functools.lru_cache(maxsize=4096)
def _program(call: EngineCall) -> Callable[..., jax.Array]:
    """The program of an eager call with arrays on several devices, each of which computes a part."""
    options = compiler_options()
    return compiled(functools.partial(_traced, call, options[EXCESS_PRECISION]), compiler_options=options)


def _traced(call: EngineCall, excess_precision: bool | None, *operands: Any) -> jax.Array:
    """Both engines, of which JAX lowers one."""
    verb, chip = call.gemm.call, call.gemm.chip

    def emulated(*operands: Any) -> jax.Array:
        return in_parts(emulation.multiply, call, operands, is_emulated=True)

    def on_cuda(*operands: Any) -> jax.Array:
        if chip.capability is None or not all(is_device_of(chip, device) for device in cuda_devices()):
            is_idle = jax.default_backend() == "gpu" and max(map(capability_of, cuda_devices())) >= FLOAT8_CAPABILITY
            if is_idle and call.engine != HARDWARE:
                warn_of_idle_gpu(chip)
            return elsewhere(*operands)
        if call.has_own_split:
            operands = (refuse_lowering(operands[0], _own_split(call)), *operands[1:])
        if excess_precision is None:
            operands = hardware.refuse_unknown_options(verb, operands)
        multiply = functools.partial(hardware.multiply, excess_precision=bool(excess_precision))
        return in_parts(multiply, call, operands, is_emulated=False)

    def elsewhere(*operands: Any) -> jax.Array:
        if call.engine == HARDWARE:
            refusal = _no_hardware(verb, None, chip)
            operands = (refuse_lowering(operands[0], refusal), *operands[1:])
        return emulated(*operands)

    if call.engine == EMULATED:
        return emulated(*operands)
    return lax.platform_dependent(*operands, cuda=on_cuda, default=elsewhere)


def _own_split(call: EngineCall) -> str:
    verb = call.gemm.call
    return f"{verb}: on hardware the library chooses split_k; got a value; leave it out, or pass engine='emulated'"


def _no_hardware(call: str, device: Any, chip: Chip) -> str:
    if chip.capability is None:
        wanted = f"a device whose library has the bits of {chip}, and JAX has no such device"
    else:
        major, minor = chip.capability
        wanted = f"a CUDA device of compute capability {major}.{minor}, {chip}"
    place = "another device" if device is None else str(device)
    profiles = [] if device is None else [c.name for c in CHIPS.values() if c != chip and is_device_of(c, device)]
    return (
        f"{call}: engine='hardware' needs {wanted}; got {place}; run it on one, "
        + "".join(f"or take the device's own chip={name!r} here or in the recipe, " for name in profiles)
        + f"or pass engine='emulated' for the bits of {chip} on any device"
    )


@functools.cache
def warn_of_idle_gpu(chip: Chip) -> None:
    """Warn that a GPU that could multiply stands idle, which costs time."""
    warnings.warn(
        f"f8emu.jax: the GPU is not {chip}, whose bits were requested, so GEMMs are emulated, which is slow; for the "
        f"GPU's own bits and speed pass its profile, chip= one of {', '.join(CHIPS)}. This appears once per chip",
        RuntimeWarning,
        stacklevel=2,
    )
