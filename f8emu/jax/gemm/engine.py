"""Which engine computes a GEMM: the device's tensor cores, or the emulation of a chip's.

An eager call asks the device of its operands. A trace does not know where it will run: it holds both engines, and JAX
lowers the one of the backend (`jax.lax.platform_dependent`). A vmapped GEMM is one GEMM after another.
"""

import functools
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.custom_batching import sequential_vmap

from f8emu.jax.compiling import Options, compiler_options, eager_options, is_eager
from f8emu.jax.fused.choice import capability_of, cuda_devices, is_device_of
from f8emu.jax.gemm import emulation, hardware, partition, planned
from f8emu.jax.lowering import refuse_lowering
from f8emu.spec.chip import Chip
from f8emu.spec.chips import CHIPS, HOPPER, chip_by_name
from f8emu.spec.errors import OperandError, UnsupportedError
from f8emu.spec.formats import FORMATS, Format
from f8emu.spec.scaling import Granularity


class Engine(Enum):
    """What computes a GEMM."""

    AUTO = "auto"
    """HARDWARE on a GPU that is the chip whose bits are asked for, otherwise EMULATED."""
    HARDWARE = "hardware"
    EMULATED = "emulated"


_PROGRAMS: dict[tuple[Any, ...], Callable[..., jax.Array]] = {}
"""Compiled programs of eager calls with arrays on several devices."""
_NAMES = tuple(engine.value for engine in Engine)
_FLOAT8_CAPABILITY = (8, 9)
"""From which on CUDA devices multiply float8."""


def check_engine(call: str, engine: str) -> None:
    """Raise OperandError for an unknown engine."""
    if engine not in _NAMES:
        raise OperandError(f"{call}: engine must be one of {', '.join(_NAMES)}; got {engine!r}")


def engine_of(device: Any = None, engine: str = "auto", *, chip: Chip | str = HOPPER) -> str:
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
    if engine != Engine.EMULATED.value and is_device_of(chip, device):
        return f"cuBLASLt on {device.device_kind}"
    if engine == Engine.HARDWARE.value:
        raise UnsupportedError(_no_hardware("engine_of", str(device), chip))
    by = "f8emu.native" if device.platform == "cpu" and emulation.is_available() else "f8ref.jax"
    found = f"emulated by {by} on {device.platform}"
    return found if chip == HOPPER else f"{chip} {found}"


def scaled_mm(
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array,
    scale_b: jax.Array,
    granularities: tuple[Granularity, Granularity],
    *,
    bias: jax.Array | None,
    out_dtype: Format,
    use_fast_accum: bool,
    engine: str,
    split_k: int | None,
    options: Options | None,
    powers_of_two: bool = False,
    transposed: bool = False,
    sharded_k: str = partition.GATHER,
    chip: Chip = HOPPER,
) -> jax.Array:
    """A checked `scaled_mm`, [N, M] with `transposed`; `options` are those of the program that is traced."""
    formats = FORMATS[a.dtype.name], FORMATS[b.dtype.name]
    chain = {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
    layout = partition.layout_of(
        granularities, has_bias=bias is not None, transposed=transposed, sharded_k=_way(sharded_k, split_k)
    )

    def slices(a: jax.Array, b: jax.Array) -> int:
        if split_k is not None:
            return split_k
        return planned.scaled_mm_split_k(a, b, formats, granularities, **chain, chip=chip)

    def on_hardware(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any) -> jax.Array:
        return hardware.scaled_mm(
            a,
            b,
            scale_a,
            scale_b,
            granularities,
            bias=bias,
            **chain,
            split_k=slices(a, b),
            options=options,
            powers_of_two=powers_of_two,
            transposed=transposed,
        )

    def emulated(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any) -> jax.Array:
        return emulation.scaled_mm(
            a,
            b,
            scale_a,
            scale_b,
            granularities,
            bias=bias,
            **chain,
            split_k=slices(a, b),
            chip=chip,
            transposed=transposed,
        )

    is_given = split_k is not None and not granularities[0].is_blockwise
    operands = (a, b, scale_a, scale_b, bias)
    key = (granularities, out_dtype, use_fast_accum, split_k, powers_of_two)
    return _choose("scaled_mm", engine, operands, on_hardware, emulated, layout, options, is_given, key, chip)


def scaled_grouped_mm(
    *operands: jax.Array,
    out_dtype: Format,
    use_fast_accum: bool,
    engine: str,
    options: Options | None,
    chip: Chip = HOPPER,
) -> jax.Array:
    """A checked `scaled_grouped_mm`."""
    chain = {"out_dtype": out_dtype, "use_fast_accum": use_fast_accum}
    on_hardware = functools.partial(hardware.scaled_grouped_mm, **chain, options=options)
    emulated = functools.partial(emulation.scaled_grouped_mm, **chain, chip=chip)
    layout = partition.GROUPED
    key = (out_dtype, use_fast_accum)
    return _choose("scaled_grouped_mm", engine, operands, on_hardware, emulated, layout, options, False, key, chip)


def mm(
    a: jax.Array,
    b: jax.Array,
    *,
    out_dtype: Format,
    engine: str,
    split_k: int | None,
    layout: str,
    options: Options | None,
    transposed: bool = False,
    sharded_k: str = partition.GATHER,
    chip: Chip = HOPPER,
) -> jax.Array:
    """A checked `mm`; `layout` is that of the plan."""
    parts = partition.layout_of(None, has_bias=False, transposed=transposed, sharded_k=_way(sharded_k, split_k))

    def on_hardware(a: Any, b: Any) -> jax.Array:
        return hardware.mm(a, b, out_dtype=out_dtype, options=options, transposed=transposed)

    def emulated(a: Any, b: Any) -> jax.Array:
        slices = planned.mm_split_k(a, b, layout, out_dtype=out_dtype, chip=chip) if split_k is None else split_k
        return emulation.mm(a, b, out_dtype=out_dtype, split_k=slices, chip=chip, transposed=transposed)

    key = (out_dtype, split_k, layout)
    return _choose("mm", engine, (a, b), on_hardware, emulated, parts, options, split_k is not None, key, chip)


def _way(sharded_k: str, split_k: int | None) -> str:
    """Slices that the caller counts are those of the whole of K."""
    return sharded_k if split_k is None else partition.GATHER


def _choose(
    call: str,
    engine: str,
    operands: tuple[Any, ...],
    on_hardware: Callable[..., jax.Array],
    emulated: Callable[..., jax.Array],
    layout: partition.Layout,
    options: Options | None,
    has_split_k: bool,
    key: tuple[Any, ...],
    chip: Chip,
) -> jax.Array:
    """The product by the engine of the device, or of the backend that the trace is lowered for.

    `key` tells apart what the functions compute, with the call, the engine and the layout.
    """
    check_engine(call, engine)
    wants_hardware = engine == Engine.HARDWARE.value
    given_split_k = (
        f"{call}: on hardware the library chooses split_k; got a value; leave it out, or pass engine='emulated'"
    )

    def on_cuda(*operands: Any) -> jax.Array:
        if chip.capability is None or not all(is_device_of(chip, device) for device in cuda_devices()):
            multiplies = (
                jax.default_backend() == "gpu" and max(map(capability_of, cuda_devices())) >= _FLOAT8_CAPABILITY
            )
            if multiplies and not wants_hardware:
                warn_of_idle_gpu(chip)
            return elsewhere(*operands)
        if has_split_k:
            operands = (refuse_lowering(operands[0], given_split_k), *operands[1:])
        if options is None:
            operands = hardware.refuse_unknown_options(call, operands)
        return partition.in_parts(on_hardware, operands, layout, is_emulated=False)

    def elsewhere(*operands: Any) -> jax.Array:
        if wants_hardware:
            operands = (refuse_lowering(operands[0], _no_hardware(call, "another device", chip)), *operands[1:])
        return partition.in_parts(emulated, operands, layout, is_emulated=True)

    def either(*operands: Any) -> jax.Array:
        if engine == Engine.EMULATED.value:
            return partition.in_parts(emulated, operands, layout, is_emulated=True)
        return lax.platform_dependent(*operands, cuda=on_cuda, default=elsewhere)

    if is_eager(operands):
        operands = tuple(None if x is None else jnp.asarray(x) for x in operands)  # numpy's, kept for a backward pass
        device = next(iter(operands[0].devices()))
        if any(len(x.devices()) > 1 for x in operands if x is not None):
            options = eager_options()  # of the program, in which each device computes a part
            program = _PROGRAMS.setdefault(
                (call, engine, layout, chip, *key), jax.jit(lambda *x: either(*x), compiler_options=compiler_options())
            )
            return program(*operands)
        if engine == Engine.EMULATED.value or not is_device_of(chip, device):
            if wants_hardware:
                raise UnsupportedError(_no_hardware(call, str(device), chip))
            if engine == Engine.AUTO.value and capability_of(device) >= _FLOAT8_CAPABILITY:
                warn_of_idle_gpu(chip)
            return emulated(*operands)
        if has_split_k:
            raise UnsupportedError(given_split_k)
        return on_hardware(*operands)
    if any(isinstance(x, Tracer) for x in operands):
        return sequential_vmap(either)(*operands)
    return either(*operands)


def _no_hardware(call: str, found: str, chip: Chip) -> str:
    if chip.capability is None:
        wanted = f"a device whose library has the bits of {chip}, and JAX has no such device"
    else:
        major, minor = chip.capability
        wanted = f"a CUDA device of compute capability {major}.{minor}, {chip}"
    return (
        f"{call}: engine='hardware' needs {wanted}; got {found}; run it on one, or pass engine='emulated' for the bits "
        f"of {chip} on any device, or pass the device's own profile: chip= one of {', '.join(CHIPS)}"
    )


@functools.cache
def warn_of_idle_gpu(chip: Chip) -> None:
    """A GPU that could multiply stands idle: that costs time, and must be seen."""
    warnings.warn(
        f"f8emu.jax: the GPU is not {chip}, whose bits were requested, so GEMMs are emulated, which is slow; for the "
        f"GPU's own bits and speed pass its profile, chip= one of {', '.join(CHIPS)}. This appears once per chip",
        RuntimeWarning,
        stacklevel=2,
    )
