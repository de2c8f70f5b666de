"""Memory of the JAX feed-forward block as XLA accounts it for an H200, compiled without one.

    python -m venv /tmp/jax11 && /tmp/jax11/bin/pip install 'jax[cuda12]==0.11.2'      python 3.12, no other package
    PYTHONPATH=.:reference JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 /tmp/jax11/bin/python -m benchmarks.proofs.jax_memory

The bytes are those that `benchmarks.jax_feed_forward` records on an H200 with the same JAX: `h200.txtpb` is what XLA
asks of the device. `--dump DIR` writes XLA's buffers (`*buffer-assignment.txt`), `--blocks N` compiles several blocks.
"""

import argparse
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import f8emu.jax
from f8emu.spec import RECIPES

H200 = Path(__file__).with_name("h200.txtpb")
if importlib.util.find_spec("torch") is None:  # the benchmark reports with it
    sys.modules |= {name: mock.MagicMock() for name in ("torch", "benchmarks.kernels", "benchmarks.report")}

from benchmarks import jax_feed_forward as feed_forward  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, and prints a line for each subject; exit status 1 if a recipe takes 1.001 times bfloat16 or more."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proofs.jax_memory")
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["tensorwise", "delayed", "rowwise"])
    parser.add_argument("--dump", type=Path, help="where XLA is to write what it compiles")
    given = parser.parse_args(argv)
    if given.dump:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={given.dump} --xla_dump_hlo_as_text"
    of_device = jax.sharding.SingleDeviceSharding(_absent_h200())
    made = functools.partial(feed_forward._tensors, 8192, 4096, 14336, given.blocks)
    tensors = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of_device), jax.eval_shape(made))
    found: dict[str, int] = {}
    for subject in (feed_forward.BF16, *(f"f8emu/{name}" for name in given.recipes)):
        step, arguments = _program(subject, tensors, of_device)
        memory = f8emu.jax.jit(step).lower(*arguments).compile().memory_analysis()
        found[subject] = memory.output_size_in_bytes + memory.temp_size_in_bytes
        ratio = found[subject] / found[feed_forward.BF16]
        print(f"{subject:20}{found[subject]:12} bytes, {memory.temp_size_in_bytes:12} of temporaries {ratio:9.4f}")
    return int(max(found.values()) >= 1.001 * found[feed_forward.BF16])


def _absent_h200() -> Any:
    """A device that can be compiled for."""
    from jax.experimental import topologies

    gpu_info: Any = importlib.import_module("jax._src.pallas.triton.gpu_info")  # of JAX 0.11
    gpu_info.get_gpu_info = lambda: gpu_info.get_gpu_info_from_version(gpu_info.GpuVersion.H200)
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200.read_text(), topology="1x1x1")
    return topology.devices[0]


def _program(subject: str, tensors: tuple[Any, ...], of_device: Any) -> tuple[Any, tuple[Any, ...]]:
    """A step, and the shapes of its arguments."""
    name = subject.rpartition("/")[2]
    if subject == feed_forward.BF16 or RECIPES[name].delayed is None:
        return feed_forward._program(subject, tensors)
    states = jax.eval_shape(lambda: [f8emu.jax.linear_delayed_state(name) for x in tensors[2:] if x.ndim == 2])
    settled = [type(s)(*(t if t is None else t._replace(initialized=None) for t in s)) for s in states]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of_device), settled)
    return feed_forward._delayed_step(name), (shapes, *tensors)


if __name__ == "__main__":
    sys.exit(main())
