"""A kernel by its name, and what one that is called as `torch._scaled_mm` must do."""

import traceback

from f8emu.conformance.kernels.imported import attribute
from f8emu.conformance.kernels.kernel import Kernel
from f8emu.conformance.kernels.known import KERNELS, scaled_mm_kernel
from f8emu.spec import F8Error, SpecError

CONTRACT = """\
function(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum) -> output

a         [M, K] of float8_e4m3fn or float8_e5m2, row-major
b         [K, N] of either, column-major: a transposed [N, K]. One of a and b at
          least is float8_e4m3fn. M is any number; N and K are multiples of 16.
          There may be gaps between rows: the strides tell. One row may have any
          stride. Where M is 0 the output is empty, [0, N]. a and b may be one
          array, and so may scale_a and scale_b.
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

Each call computes from what its arrays hold then: they may be those of an
earlier call, or lie where those lay, with other contents. Asked the same again
a kernel gives the same bits. a and b begin at multiples of 16 bytes, scales at
any of their elements, and so does a bias that is not on a GPU.

Arrays are torch's, on the GPU if there is one; --arrays numpy or jax selects
another framework. Inputs are read only, and so is the memory around them.
NotImplementedError is "not offered". So are a RuntimeError that names
CUBLAS_STATUS_NOT_SUPPORTED and, if rows lie apart or an array does not begin at
a multiple of 256 bytes, a ValueError and a RuntimeError that names strides,
contiguity, alignment, or CUBLAS_STATUS_INVALID_VALUE. A refusal is no pass. Any
other exception is the error of its case, also where M is 0.
A kernel runs in a process of its own. What ends that process, such as sys.exit,
os._exit or a crash, is the error of one case, and so is no output within
--timeout seconds. What it prints is not shown. A process that it forks ends
where the call returns. --here runs it in the suite's process, for a debugger,
and promises none of this.

Its name is package.module:function or path/to/file.py:function.

A kernel that is called in another way, has block scales or multiplies groups is
declared as data, an f8emu.conformance.Kernel, and named in the same way. A
checkout of f8emu has an example of both, examples/own_kernel.py, and the rules
of the expected bits, reference/NUMERICS.md.
Rows behind the last group are zeros, unless a Kernel declares that it leaves
them as they are.

No finite suite finds everything. This one calls a kernel some thousand times,
in one thread, with K up to 65,552: it does not see what is wrong for a longer
K, from a later call on, or in a second thread.
"""
"""The contract of a kernel that is called like `torch._scaled_mm`, as `f8emu verify --contract` prints it."""


def load_kernel(path: str) -> Kernel:
    """A known kernel, or what a user names: a `Kernel`, or a function that is called as `torch._scaled_mm` is."""
    if path in KERNELS:
        return KERNELS[path]
    try:
        target = attribute(path)
        if callable(target) or isinstance(target, Kernel):
            return target if isinstance(target, Kernel) else scaled_mm_kernel(path, target)
        fault = f"{path} is not callable, and not a Kernel"
    except F8Error:
        raise  # says what to install, or to declare
    except (ImportError, AttributeError, ValueError) as error:
        fault = str(error)
    except Exception as error:  # the module's own
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}:{place.lineno}"
        raise SpecError(f"f8emu verify {path}: its import raised {type(error).__name__}: {error} ({where})") from None
    raise SpecError(
        f"f8emu verify {path}: expected package.module:function or path/to/file.py:function, or a Kernel there; "
        f"{fault}. Run it where the module can be imported, or set PYTHONPATH"
    )
