"""An H200 that JAX compiles for where there is none.

    python -m venv /tmp/jax11 && /tmp/jax11/bin/pip install 'jax[cuda12]==0.11.2' flax==0.12.12 optax==0.2.8
    PYTHONPATH=.:reference JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 /tmp/jax11/bin/python -m benchmarks.proofs.jax_memory
    PYTHONPATH=.:reference JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 /tmp/jax11/bin/python -m benchmarks.proofs.jax_programs

Python is 3.12 or newer. `h200.txtpb` is what XLA asks of the device. What it would measure there, which algorithm of a
library is the fastest, stays at its default.
"""

import importlib
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

H200 = Path(__file__).with_name("h200.txtpb")


def absent_h200() -> jax.sharding.SingleDeviceSharding:
    """Where the arguments of a program lie that is compiled for it."""
    gpu_info: Any = importlib.import_module("jax._src.pallas.triton.gpu_info")  # of JAX 0.11
    gpu_info.get_gpu_info = lambda: gpu_info.get_gpu_info_from_version(gpu_info.GpuVersion.H200)
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200.read_text(), topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def shapes_on(sharding: Any, tree: Any) -> Any:
    """The arrays of a tree as shapes that lie there."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
