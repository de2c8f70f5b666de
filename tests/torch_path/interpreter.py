"""Kernels where there is no GPU: in Triton's interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from f8emu.torch.chip import has_float8_hardware
from f8emu.torch.fused import availability
from f8emu.torch.fused.delayed import mark_set

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ON_GPU = pytest.mark.gpu if not INTERPRETED else pytest.mark.filterwarnings("error")
"""Marks tests that need a GPU or the interpreter."""


def convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Bits of `source` to bits of `target`, rounded to the nearest, ties to even; a NaN becomes 0x7f in float8.

    For the interpreter's `_convert_float`, which does not round to float8 and loses subnormal bfloat16.
    """
    dtypes = {
        "fp8e4nv": ml_dtypes.float8_e4m3fn,
        "fp8e5": ml_dtypes.float8_e5m2,
        "bf16": ml_dtypes.bfloat16,
        "fp16": np.float16,
        "fp32": np.float32,
    }
    floats = np.ascontiguousarray(values).view(dtypes[source.name])
    bits = floats.astype(dtypes[target.name]).view(f"u{target.primitive_bitwidth // 8}")
    return np.where(np.isnan(floats), np.uint8(0x7F), bits) if target.primitive_bitwidth == 8 else bits


def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """`convert`, and Triton's language is patched once for the functions of a module, not at each call of one.

    The kernel's own patches are enough for those that it calls; half of all the work was to find nothing left to patch.
    What Triton makes anew in each operation is made once: numpy's type of each of its types, types and sizes of blocks.
    """
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    import triton.runtime.interpreter as interpreter  # pyright: ignore[reportMissingImports]

    patched = set[str]()
    get_np_dtype, new_block, new_tensor = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__
    dtypes = dict[str, Any]()
    blocks = dict[tuple[Any, ...], dict[str, Any]]()
    sizes = dict[tuple[int, ...], tuple[Any, Any]]()

    def dtype_of(type: Any) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = get_np_dtype(type)
        return dtypes[name]

    def block_of(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            new_block(self, element, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def tensor_of(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in sizes:
            new_tensor(self, handle, type)
            sizes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = sizes[key]

    def splat(self: Any, type: Any, scalar: Any) -> Any:
        # Triton takes the dtype of a comparison's operands for that of its result, and from 3.9 no such mask.
        found = np.full(type.shape, scalar.data.reshape(-1)[0], scalar.data.dtype)
        return interpreter.TensorHandle(found, scalar.dtype.scalar)

    def call(function: Any, *args: Any, **options: Any) -> Any:
        if function.fn.__module__ not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(function.fn.__module__)
        return function.rewrite()(*args, **options)

    def patch_tensor(tensor: Any, scope: Any) -> None:  # Triton 3.6: int() of an array of rank 1, an error in numpy 2.4
        patch_of_triton(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    patch_of_triton = interpreter._patch_lang_tensor
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter, "_get_np_dtype", dtype_of)
    monkeypatch.setattr(tl.block_type, "__init__", block_of)
    monkeypatch.setattr(tl.tensor, "__init__", tensor_of)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", splat)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


def prepare_silu(monkeypatch: pytest.MonkeyPatch) -> None:
    """SiLU's arithmetic that the interpreter lacks: `exp`, an approximate reciprocal, a fused multiply-add."""
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    import triton.runtime.interpreter as interpreter  # pyright: ignore[reportMissingImports]

    from f8emu.torch.fused import silu_kernels

    def elementwise(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            return tl.core.tensor(interpreter.TensorHandle(function(x.handle.data), tl.float32), x.type)

        return call

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(exact.astype(np.float32), tl.float32)

    def exp(x: np.ndarray) -> np.ndarray:
        return torch.exp(torch.from_numpy(np.ascontiguousarray(x))).numpy()

    monkeypatch.setattr(silu_kernels, "exp", elementwise(exp))
    monkeypatch.setattr(silu_kernels, "approximate_reciprocal", elementwise(lambda x: np.float32(1) / x))
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)


class Kernels:
    """Calls operators on the device, with kernels or without; results come back, and numbers that are written to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if INTERPRETED:
            prepare(monkeypatch)
            prepare_silu(monkeypatch)
        self._run = False
        monkeypatch.setattr(
            availability, "has_float8_hardware", lambda x: self._run and (INTERPRETED or has_float8_hardware(x))
        )

    def __call__(self, operator: Any, *args: Any, run: bool = True, is_set: bool = False) -> tuple[Tensor, ...]:
        """`run` its kernels; states of delayed scaling are known to be set or not."""
        moved = [a.to(DEVICE, copy=a.numel() == 1) if isinstance(a, Tensor) else a for a in args]
        for x in moved:
            if is_set and isinstance(x, Tensor) and x.numel() == 1:
                mark_set(x, True)
        self._run = run
        try:
            with np.errstate(all="ignore"):
                outcome = operator(*moved)
        finally:
            self._run = False
        for before, after in zip(args, moved, strict=True):
            if isinstance(before, Tensor) and before.numel() == 1:
                before.copy_(after)
        return tuple(y.cpu() for y in ((outcome,) if isinstance(outcome, Tensor) else outcome))


def run_interpreted(*files: str) -> None:
    """Run the tests of files in a process with the interpreter; some of each must have run, and all passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rp", "-p", "no:cacheprovider", *files]
    outer = ("PYTEST_", "TRITON_")  # settings of the run that this one is in
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environment["TRITON_INTERPRET"] = "1"
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-4000:]
    for file in files:
        assert f"PASSED {file}::" in run.stdout, run.stdout[-4000:]
