"""Capture in JAX: what is written replays bit by bit, and equals what torch captures of the same layers."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import f8emu.jax as f8
from f8emu.capture import GemmRecord, diff, replay
from f8emu.capture.read import read_capture
from f8emu.spec import recipe_by_name

ARRAYS = {"x": (24, 48), "w": (80, 48), "grad": (24, 80)}


def draw(step: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(step)
    return {name: generator.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in ARRAYS.items()}


def run(path: Path, count: int, **options: Any) -> f8.Capture:
    """A layer with a kernel [K, N], jitted, forward and backward."""
    capturing = f8.capture(path, **options)
    multiply = capturing.named("up", f8.dot_general("rowwise"))

    @jax.jit
    def step(arrays: dict[str, jax.Array]) -> Any:
        output, pull = jax.vjp(lambda x, w: multiply(x, w.T, (((1,), (0,)), ((), ()))), arrays["x"], arrays["w"])
        return output, pull(arrays["grad"])

    for number in range(1, count + 1):
        jax.block_until_ready(step(draw(number)))
        capturing.step()
    return capturing


def test_a_jax_capture_equals_that_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from f8emu.torch import capture, convert_to_float8_training

    capturing = run(tmp_path / "jax", 3, ring=2)
    assert not capturing.written
    capturing.write("the loss jumped")
    capturing.close()
    assert capturing.is_done and len(capturing.written) == 2 and not capturing.left_out
    assert {step.header.reason for step in read_capture(tmp_path / "jax")} == {"the loss jumped"}
    replayed = replay(read_capture(tmp_path / "jax"))
    assert replayed.is_equal and not replayed.not_replayed and replayed.gemms == 6, [
        finding.line() for finding in replayed.findings
    ]

    layers = torch.nn.ModuleDict({"up": torch.nn.Linear(48, 80, bias=False)}).bfloat16()
    convert_to_float8_training(layers, config=recipe_by_name("rowwise"))
    of_torch = capture(layers, tmp_path / "torch", steps=(2, 3))
    for number in (1, 2, 3):
        arrays = {name: torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for name, x in draw(number).items()}
        layers["up"].weight.data = arrays["w"]
        layers["up"](arrays["x"].requires_grad_()).backward(arrays["grad"])
        of_torch.step()
    assert of_torch.is_done
    parts = diff(read_capture(tmp_path / "torch"), read_capture(tmp_path / "jax"))
    assert parts.is_equal and parts.stages == 2 * (3 + 3 * 5), [finding.line() for finding in parts.divergences]
    assert "framework: torch / jax" in parts.context


def test_only_what_has_a_name_is_shown(tmp_path: Path) -> None:
    plain = f8.dot_general("rowwise")
    for multiply, shown in ((plain, 0), (f8.capture(tmp_path).named("up", plain), 3)):
        program = jax.make_jaxpr(lambda x, m=multiply: m(x, x, (((1,), (0,)), ((), ()))))(jnp.ones((16, 16)))
        assert str(program).count("debug_callback[") == shown


def test_a_chip_without_a_plan_is_captured_without_a_split(tmp_path: Path) -> None:
    """On Hopper S of this product would be 3; emulated it is 1, and so it is recorded."""
    with f8.capture(tmp_path) as capturing:
        multiply = capturing.named("up", f8.dot_general(replace(recipe_by_name("tensorwise"), chip="Ada")))
        x, w = (np.random.default_rng(i).standard_normal((16, 8192)).astype(ml_dtypes.bfloat16) for i in (0, 1))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*no split-K")
            multiply(x, w, (((1,), (1,)), ((), ())))
        capturing.step()
    (step,) = read_capture(tmp_path)
    (record,) = (one.record for one in step.records if isinstance(one.record, GemmRecord))
    assert (record.split_k, record.split_k_source, record.chip) == (1, "unknown", "Ada")
    replayed = replay([step])
    assert replayed.is_equal and not replayed.not_replayed, [one.line() for one in replayed.findings]


def test_a_ring_without_tensors_looks_at_them_all_the_same(tmp_path: Path) -> None:
    """An input that is not finite, before any product is. An exception has the ring written too."""
    with f8.capture(tmp_path, ring=1, tensors=False) as capturing:
        up = capturing.named("up", f8.dot_general("tensorwise"))
        assert up.tap is not None
        up.tap.tensor("input", jnp.full((2, 2), jnp.nan))
        capturing.step()
        assert capturing.is_done
    with pytest.raises(ZeroDivisionError), f8.capture(tmp_path / "ring", ring=1) as capturing:
        up = capturing.named("up", f8.dot_general("tensorwise"))
        assert up.tap is not None
        for number in range(2):
            up.tap.tensor("input", jnp.full((2, 2), float(number)))
            capturing.step()
        up.tap.tensor("input", jnp.ones((2, 2)))
        raise ZeroDivisionError
    steps = read_capture(tmp_path / "ring")
    assert [(step.header.step, step.is_complete) for step in steps] == [(2, True), (3, False)]
