"""Layers of f8emu.jax on two GPUs: the bits of the oracle and of one GPU, and what travels between them.

    python -m benchmarks.proofs.jax_sharding --json OUT
    XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu python -m benchmarks.proofs.jax_sharding

The second command runs the emulation on two virtual devices. First the cases of `tests/jax_path/sharded.py` on two
devices, against `f8ref.numpy`; then larger layers, two devices against one, with the collectives and GEMM calls of the
compiled programs. Where codes are gathered along K, bits must be equal; where products are added, the differing ones
are counted. Exit status 1 if something that should be exact differs, or does not run.
"""

import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import f8emu.jax as f8
from benchmarks.runner import Bench, say
from f8emu.spec import recipe_by_name
from tests.jax_path import sharded

DATA, MODEL = "data", "model"
COLUMN, ROW = (P(DATA), P(None, MODEL), P(DATA, MODEL)), (P(DATA, MODEL), P(MODEL), P(DATA))
FSDP = (P(DATA), P(DATA), P(DATA))
BY_DATA, BY_MODEL = (2, 1), (1, 2)
EVEN, BLOCKS = (96, 160, 64), (256, 256, 256)
_COLLECTIVE = re.compile(r"= (\S.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_GEMM = re.compile(r'custom_call_target="(__cublas\S*|__cudnn\S*|triton\S*)"')
BENCH = Bench("benchmarks.proofs.jax_sharding", __doc__)


def main(argv: Sequence[str] | None = None) -> int:
    is_gpu = jax.default_backend() == "gpu"
    run = BENCH.parse(argv, device="cuda" if is_gpu else "cpu")
    if len(jax.devices()) != 2:
        raise SystemExit(f"{BENCH.module}: two devices are needed; JAX sees {len(jax.devices())}")
    report = run.report
    report |= {"device": f"{report['device']} x 2", "engine": f8.engine_of(), "cases": []}
    for name, case in _cases(is_gpu).items():
        entry = _run(name, case)
        report["cases"].append(entry)
        say(f"{entry['verdict']:8}{name:58}{entry['seconds']:5.1f} s  {entry.get('differing', '')}")
        for line in (*entry.get("program", ()), entry.get("why", "")):
            say(f"{'':12}{line}") if line else None
        run.record()
    wrong = [entry["case"] for entry in report["cases"] if entry["verdict"] != "equal"]
    say(f"{len(report['cases'])} cases, {len(wrong)} wrong: {', '.join(wrong)}" if wrong else "all as they should be")
    return int(bool(wrong))


def _run(name: str, case: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    start = time.perf_counter()
    entry: dict[str, Any] = {"case": name, "verdict": "equal"}
    try:
        entry |= case() or {}
    except AssertionError as error:
        entry |= {"verdict": "differs", "why": str(error)[:300]}
    except Exception:  # the others go on
        entry |= {"verdict": "failed", "why": traceback.format_exc(limit=-3)}
    return entry | {"seconds": round(time.perf_counter() - start, 2)}


def _cases(is_gpu: bool) -> dict[str, Callable[[], Any]]:
    """Against the oracle, where one axis of two devices serves as data or as model; then two devices against one."""
    by_xla, by_hand = partial(sharded.by_xla, jit=f8.jit), sharded.by_hand
    fsdp: dict[str, Any] = {"shape": BY_DATA, "specs": FSDP, "parts": {"grad_weight": 2}, "gathered": 2}
    column: dict[str, Any] = {"shape": BY_MODEL, "specs": COLUMN, "parts": {"grad_input": 2}}
    row: dict[str, Any] = {"shape": BY_MODEL, "specs": ROW, "parts": {"output": 2}}
    cases: dict[str, Callable[[], Any]] = {
        "jit, FSDP, tensorwise": partial(by_xla, "tensorwise", **fsdp),
        "jit, FSDP, rowwise": partial(by_xla, "rowwise", **fsdp, sizes=EVEN),
        "jit, FSDP, delayed": partial(by_xla, "delayed", **fsdp, sizes=EVEN),
        "jit, FSDP, blockwise": partial(by_xla, "blockwise", **fsdp, sizes=BLOCKS),
        "jit, FSDP, tensorwise, K gathered": partial(by_xla, "tensorwise", BY_DATA, FSDP, sizes=EVEN),
        "jit, row, tensorwise": partial(by_xla, "tensorwise", **row, sizes=EVEN),
        "jit, column, rowwise": partial(by_xla, "rowwise", **column),
        "jit, column, tensorwise, explicit axes": partial(by_xla, "tensorwise", **column, explicit=True),
        "shard_map, FSDP, tensorwise": partial(by_hand, "tensorwise", **fsdp, sizes=EVEN),
        "shard_map, FSDP, delayed": partial(by_hand, "delayed", **fsdp),
        "shard_map, FSDP, blockwise": partial(by_hand, "blockwise", **fsdp, sizes=BLOCKS),
        "shard_map, row, rowwise": partial(by_hand, "rowwise", **row, sizes=EVEN, outside=False),
        "shard_map, FSDP, three steps of delayed": sharded.training,
    }
    layers = (("FSDP", BY_DATA, FSDP, "tensorwise"), ("row", BY_MODEL, ROW, "rowwise"))
    pairs = [(*layer, way) for layer in layers for way in ("sum", "gather")]
    pairs.append(("column", BY_MODEL, COLUMN, "delayed", "gather"))
    sizes = (4096, 2048, 1024) if is_gpu else (64, 96, 32)
    for kind, *layer, name, way in pairs:
        case = partial(_two_against_one, sizes, *layer, name, way)
        cases[f"two against one, {kind}, {name}, {way}"] = case
    return cases


def _two_against_one(
    sizes: tuple[int, int, int], shape: tuple[int, int], specs: tuple[P, P, P], name: str, way: str
) -> dict[str, Any]:
    """Differing bits of output and gradients, and what the program of two devices calls."""
    arrays, recipe = sharded.tensors(*sizes), recipe_by_name(name)
    step = partial(sharded.step, sharded.layer(recipe, sharded_k=way))
    state, mesh = sharded.state_of(recipe), sharded.mesh_of(*shape)
    alone = f8.jit(step)(*(jax.device_put(x, jax.devices()[0]) for x in arrays), state)
    program = f8.jit(
        step, out_shardings=tuple(NamedSharding(mesh, spec) for spec in (specs[2], specs[0], specs[1], P()))
    )
    operands = (*sharded.placed(mesh, arrays, specs), state)
    compiled = program.lower(*operands).compile()
    two = compiled(*operands)
    differing = {
        part: [int((np.asarray(a).view(np.uint16) != np.asarray(b).view(np.uint16)).sum()), int(b.size)]
        for part, a, b in zip(sharded.NAMES, alone, two, strict=False)
    }
    assert way == "sum" or not any(count for count, _ in differing.values()), str(differing)
    return {"differing": differing, "program": _calls(compiled.as_text())}


def _calls(text: str) -> list[str]:
    """Collectives and library calls of a compiled program, in its order."""
    calls: list[str] = []
    for line in text.splitlines():
        if hit := _COLLECTIVE.search(line):
            calls.append(f"{hit[2]} {re.sub(r'{[^}]*}', '', hit[1])}")
        elif gemm := _GEMM.search(line):
            calls.append(gemm[1])
    return calls


if __name__ == "__main__":
    sys.exit(main())
