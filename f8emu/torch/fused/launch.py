"""Launches of Triton kernels on matrices of one size: what `plans` makes plans with.

A `LaunchPlan` takes the tensors in the order of its kernel's arguments, all contiguous and allocated by the caller. For
a tensor that the kernel does not use any tensor may be passed: its pointer is never dereferenced.
"""

import hashlib
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from f8emu.spec.errors import UnsupportedError
from f8emu.torch.torch_internals import current_stream, launch_kernel

GROUP_TILE = 64  # rows of a tile of a matrix whose groups of rows are cast apart (`grouped`)
GROUP_PLANES = 5  # of a table of such tiles, see `grouped_kernels`
GROUP_MULTIPLE = 16  # of the rows of a group in transposed codes
AMAX_TILE = 128  # rows and columns of a tile of which `row_col_amax` finds the amaxes at once

# How every kernel is compiled, also by Inductor. Where no `tl.fma` says so, the compiler may still round a product and
# a sum once. The casts' bits do not depend on it, the last bits of float64 sums of the statistics do.
COMPILER_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}

# Launches a kernel on a device by its index, on the current stream, with pointers to tensors.
_Launch = Callable[[int, list[int]], None]


@dataclass(slots=True, eq=False)
class LaunchPlan:
    """One launch of a kernel: everything except its tensors."""

    kernel: Any
    programs: int
    sizes: tuple[int, ...]  # the integer arguments, which follow the tensors
    constants: dict[str, Any]  # the `tl.constexpr` arguments, in the order of the kernel's
    warps: int
    # The plan for a first tensor that does not begin at a word of 32 bits, if the kernel reads such words.
    otherwise: "LaunchPlan | None" = None
    stages: int | None = None  # the steps of a loop that are loaded ahead; None: Triton's default
    name: str = ""  # the expression that makes this plan, in the names of `plans`; compiled code contains it
    _launches: dict[Any, _Launch] = field(default_factory=dict, repr=False)

    def __call__(self, *tensors: Tensor) -> None:
        # On the device of the tensors, even if it is not torch's current device.
        x = tensors[0]
        if self.otherwise is not None and x.data_ptr() & 3:
            self.otherwise(*tensors)
        elif not x.is_cuda:  # in Triton's interpreter
            self._first_launch(tensors)
        elif (index := x.get_device()) == torch.cuda.current_device():
            self._launch(index, tensors)
        else:
            with torch.cuda.device(index):
                self._launch(index, tensors)

    def bound(self, index: int, *dtypes: torch.dtype) -> Callable[..., None]:
        """The same call for compiled code, where device and dtypes are known and the device is torch's current one."""
        key = (index, *dtypes, *(True,) * len(dtypes))

        def call(*tensors: Tensor) -> None:
            pointers = [x.data_ptr() for x in tensors]
            low = 0
            for pointer in pointers:
                low |= pointer
            launch = self._launches.get(key)
            if launch is None or low & 15:
                self(*tensors)
            else:
                launch(index, pointers)

        return call

    def _launch(self, index: int, tensors: tuple[Tensor, ...]) -> None:
        # Triton looks the compiled kernel up by all of its arguments, which takes longer than the launch. The key here
        # is what a plan does not fix: device, dtypes, and whether each pointer is a multiple of 16.
        pointers = [x.data_ptr() for x in tensors]
        key = (index, *[x.dtype for x in tensors], *[pointer & 15 == 0 for pointer in pointers])
        launch = self._launches.get(key)
        if launch is None:
            launch = _launch_of(self._first_launch(tensors), self)
            if launch is not None:
                self._launches[key] = launch
        else:
            launch(index, pointers)

    def _first_launch(self, tensors: tuple[Tensor, ...]) -> Any:
        options = {"num_warps": self.warps, **COMPILER_OPTIONS}
        if self.stages is not None:
            options["num_stages"] = self.stages
        launch = self.kernel[(self.programs,)]
        return _with_scratch(launch, *tensors, *self.sizes, **self.constants, **options)


def _with_scratch(launch: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Launch a kernel that may make tensor maps, in torch's memory; an allocator of Triton is one thread's."""
    import triton  # pyright: ignore[reportMissingImports]

    def allocated() -> Any:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
        return launch(*args, **options)

    return copy_context().run(allocated)


def _launch_of(compiled: Any, plan: LaunchPlan) -> _Launch | None:
    # Torch's launcher for Inductor's kernels, or else Triton's, launches a compiled kernel on pointers. None where
    # Triton tells of a kernel in other words than those of 3.6 to 3.9: each launch is then like the first.
    try:
        return _launch_on_pointers(compiled, plan)
    except (AttributeError, KeyError):
        return None


def _launch_on_pointers(compiled: Any, plan: LaunchPlan) -> _Launch:
    # Torch's launcher takes the kernel's arguments without its constants, with one letter per argument for its type. It
    # does not call the hooks that Triton calls around a launch.
    metadata, programs = compiled.metadata, plan.programs
    sizes_of_scratch = [getattr(metadata, name) for name in metadata._fields if name.endswith("_scratch_size")]
    scratch = [size for size in sizes_of_scratch if size is not None]
    is_special = metadata.num_ctas != 1 or any(scratch) or getattr(metadata, "launch_cooperative_grid", False)
    if launch_kernel is None or is_special or getattr(metadata, "launch_pdl", False):
        runner = compiled[(programs, 1, 1)]
        rest = (*plan.sizes, *plan.constants.values())
        return lambda index, pointers: _with_scratch(runner, *pointers, *rest)
    count = len(plan.kernel.arg_names) - len(plan.sizes) - len(plan.constants)
    kinds = list(compiled.src.signature.values())[count:]
    letters = {"i32": "i", "i64": "l"}  # Triton makes an integer that is 1 a constant, like those that follow
    taken = [(size, letters[kind]) for size, kind in zip(plan.sizes, kinds, strict=False) if kind != "constexpr"]
    nones = (None,) * len(scratch)
    sizes = (*[size for size, _ in taken], *nones)
    types = "O" * count + "".join(letter for _, letter in taken) + "O" * len(nones)
    function, warps, shared = compiled.function, metadata.num_warps, metadata.shared

    def launch(index: int, pointers: list[int]) -> None:
        launch_kernel(function, programs, 1, 1, warps, shared, types, (*pointers, *sizes), current_stream(index))

    return launch


def blocks(size: int, block: int) -> int:
    """The number of blocks that cover `size`: ceil(size / block)."""
    return -(-size // block)


def amax_tiles(m: int, n: int) -> tuple[int, int]:
    """How many tiles there are along the rows, and along the columns, of a matrix [m, n]."""
    return blocks(m, AMAX_TILE), blocks(n, AMAX_TILE)


def padded_rows(rows: int, groups: int) -> int:
    """The rows of transposed codes: at least those of all groups, each padded to a multiple of 16."""
    return blocks(rows, GROUP_MULTIPLE) * GROUP_MULTIPLE + GROUP_MULTIPLE * groups


def tile_count(rows: int, groups: int) -> int:
    """How many tiles the table of a matrix of groups has place for."""
    return blocks(padded_rows(rows, groups), GROUP_TILE) + groups


def planned(make: Callable[..., LaunchPlan]) -> Callable[..., LaunchPlan]:
    """A decorator: makes each plan once per signature, and names it."""

    @lru_cache(maxsize=4096)
    def made(*args: Any) -> LaunchPlan:
        plan = make(*args)
        plan.name = f"{make.__name__}({', '.join(map(repr, args))})"
        return plan

    return wraps(make)(made)


@cache
def sources_digest() -> str:
    """The digest of the files that compiled code relies on: a cache of compiled code may outlive them."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def require_sources(digest: str) -> None:
    """Raise UnsupportedError in compiled code that another version of these files made."""
    if digest != sources_digest():
        raise UnsupportedError(
            "f8emu.torch: torch's cache holds code that was compiled with another version of f8emu, whose casts it "
            "would call wrongly; delete the cache (TORCHINDUCTOR_CACHE_DIR, by default /tmp/torchinductor_<user>), or "
            "set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        )
