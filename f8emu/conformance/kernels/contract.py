"""The contract of a kernel that is called as `torch._scaled_mm` is: what it is given, returns, and may do.

`f8emu verify --contract` shows it.
"""

REMEDY = "what a kernel is given and returns: f8emu verify --contract"
"""Ends an error about a kernel that cannot be called."""

CONTRACT = """\
function(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum) -> output

a         [M, K] of float8_e4m3fn or float8_e5m2, row-major
b         [K, N] of either, column-major: a transposed [N, K]. One of a and b at
          least is float8_e4m3fn. M is any number; N and K are multiples of 16.
          There may be gaps between rows: the strides tell.
scale_a, scale_b
          float32 of any value, and they decode: value = code * scale
          tensorwise: one element each, without dimensions
          rowwise: [M, 1] and [1, N]
bias      [N] of out_dtype, or None; None if out_dtype is float32
out_dtype float32, bfloat16 or float16: a dtype of the arrays' framework
use_fast_accum
          True: the tensor core adds all of K in its own accumulator.
          False: it promotes to float32 every 128 of K.
output    [M, N] of out_dtype: a new array, which no later call changes

Arrays are torch's, on the GPU if there is one; --arrays numpy or jax selects
another framework. Inputs are read only, and so is the memory around them.
NotImplementedError is "not offered": such a case never counts as equal. So are
a RuntimeError that names CUBLAS_STATUS_NOT_SUPPORTED and, if rows lie apart or
an operand does not begin at a multiple of 256 bytes, a ValueError and a
RuntimeError that names strides, contiguity, alignment, or
CUBLAS_STATUS_INVALID_VALUE. Any other exception is the error of its case.
sys.exit, os._exit and fork are faults.
--isolate runs the kernel in its own process, for one that crashes or hangs.

Its name is package.module:function or path/to/file.py:function.

A kernel that is called in another way, has block scales or multiplies groups is
declared as data, an f8emu.conformance.Kernel, and named in the same way. Both
are in examples/own_kernel.py. The expected bits: reference/NUMERICS.md.
"""
