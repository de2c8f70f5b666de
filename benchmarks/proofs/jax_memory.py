"""Memory of the JAX feed-forward block as XLA accounts it for an H200, compiled without one.

    PYTHONPATH=.:reference JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 /tmp/jax11/bin/python -m benchmarks.proofs.jax_memory

/tmp/jax11 as `absent_h200` says. The bytes are those that `benchmarks.jax_feed_forward` records on an H200 with the
same JAX. `--dump DIR` writes XLA's buffers (`*buffer-assignment.txt`), `--blocks N` compiles several blocks.
"""

import argparse
import functools
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

if importlib.util.find_spec("torch") is None:  # the benchmark reports with it
    sys.modules |= {name: mock.MagicMock() for name in ("torch", "benchmarks.kernels", "benchmarks.report")}

from benchmarks import jax_feed_forward as feed_forward
from benchmarks.proofs.absent_h200 import absent_h200, shapes_on


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, and prints a line for each subject; exit status 1 if a recipe takes 1.001 times bfloat16 or more."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proofs.jax_memory")
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["tensorwise", "delayed", "rowwise"])
    parser.add_argument("--dump", type=Path, help="where XLA is to write what it compiles")
    given = parser.parse_args(argv)
    if given.dump:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={given.dump} --xla_dump_hlo_as_text"
    of_device = absent_h200()
    made = functools.partial(feed_forward._tensors, 8192, 4096, 14336, given.blocks)
    tensors = shapes_on(of_device, jax.eval_shape(made))
    found: dict[str, int] = {}
    layers = [f"f8emu/{name}" for name in given.recipes]
    for subject in (feed_forward.BF16, *layers):
        step, arguments = _program(subject, tensors, of_device)
        memory = f8emu.jax.jit(step).lower(*arguments).compile().memory_analysis()
        found[subject] = memory.output_size_in_bytes + memory.temp_size_in_bytes
        ratio = found[subject] / found[feed_forward.BF16]
        print(f"{subject:48}{found[subject]:12} bytes, {memory.temp_size_in_bytes:12} of temporaries {ratio:9.4f}")
    return int(max(found.values()) >= 1.001 * found[feed_forward.BF16])


def _program(subject: str, tensors: tuple[Any, ...], of_device: Any) -> tuple[Any, tuple[Any, ...]]:
    """A step, and the shapes of its arguments."""
    name = "" if subject == feed_forward.BF16 else feed_forward.recipe_of(subject)
    if not name or RECIPES[name].delayed is None:
        return feed_forward._program(subject, tensors)
    states = jax.eval_shape(lambda: [f8emu.jax.linear_delayed_state(name) for x in tensors[2:] if x.ndim == 2])
    settled = [type(s)(*(t if t is None else t._replace(initialized=None) for t in s)) for s in states]
    return feed_forward.delayed_step(subject), (shapes_on(of_device, settled), *tensors)


if __name__ == "__main__":
    sys.exit(main())
