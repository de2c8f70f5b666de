"""The launches of the Triton kernels: grids, tile sizes and warps. Importing this module needs Triton.

A plan says how a kernel is launched on matrices of one size. Plans are made once per signature; eager code calls them,
and `inductor` writes calls of them into compiled code. A plan takes the tensors in the order of its kernel's arguments,
all contiguous and allocated by the caller. For a tensor that the kernel does not use any tensor may be passed: its
pointer is never dereferenced.
"""

import hashlib
import struct
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from f8emu.spec.errors import UnsupportedError
from f8emu.spec.formats import E4M3FN, format_by_name
from f8emu.torch.device import compares_pairs
from f8emu.torch.fused.arguments import AMAX_TILE, amax_tiles, new_zeros
from f8emu.torch.fused.delayed import UNCALLED, chosen_inv_scale, is_known_set, tell_owner
from f8emu.torch.fused.kernels import blocks as block_kernels
from f8emu.torch.fused.kernels import casts as cast_kernels
from f8emu.torch.fused.kernels import delayed as delayed_kernels
from f8emu.torch.fused.kernels import scales as scale_kernels
from f8emu.torch.launch_sequence import Launch, note_condition, note_effect, note_launch

# The fastest on an H200 in bfloat16 at [8192, 4096] and [8192, 14336].
AMAX_BLOCK = 16384
AMAX_WARPS = 8
ROW_AMAX_TILE = (4, 1024)
ROW_AMAX_WARPS = 8
ROW_COL_AMAX_WARPS = 4
SCALES_BLOCK = 256
SCALES_WARPS = 4
CAST_TILE = (64, 128)
CAST_WARPS = 4
TRANSPOSE_TILE = (128, 128)
TRANSPOSE_WARPS = 8
ROWS_ELEMENTS = 8192
"""Elements that a program of `cast_rows` keeps in registers, unless one row is longer."""
ROWS_ELEMENTS_PER_WARP = 1024
ROWS_LONGEST = 16384
"""The longest row that stays in registers."""
LONG_ROWS_BLOCK = 8192
LONG_ROWS_WARPS = 8
BLOCK = 128
VECTORS_STRIP = 64
VECTORS_WARPS = 4
SQUARES_STRIP = 64
SQUARES_WARPS = 8


class Plan:
    """One launch of a kernel: everything except its tensors."""

    __slots__ = ("_launches", "constants", "kernel", "name", "programs", "sizes", "warps")

    def __init__(
        self, kernel: Any, programs: int, sizes: tuple[int, ...], constants: dict[str, Any], warps: int
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.sizes = sizes
        """The integer arguments, which follow the tensors."""
        self.constants = constants
        """The `tl.constexpr` arguments, in the order of the kernel's."""
        self.warps = warps
        self.name = ""
        """The expression that makes this plan, in the names of this module; compiled code contains it."""
        self._launches: dict[Any, Launch] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the device of the tensors, even if it is not torch's current device."""
        x = tensors[0]
        if not x.is_cuda:  # in Triton's interpreter
            note_effect()
            self._first_launch(tensors)
            return
        index = x.get_device()
        if index == torch.cuda.current_device():
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
            launch = self._launches[key] = _launch_of(self._first_launch(tensors), self)
        else:
            launch(index, pointers)
        note_launch(launch, tensors)

    def _first_launch(self, tensors: tuple[Tensor, ...]) -> Any:
        return self.kernel[(self.programs,)](*tensors, *self.sizes, **self.constants, num_warps=self.warps)


class PairsPlan(Plan):
    """A plan that reads two numbers of 16 bits as one word, and another one for a tensor that begins amid a word."""

    __slots__ = ("otherwise",)

    def __init__(self, *plan: Any) -> None:
        super().__init__(*plan[:-1])
        self.otherwise: Plan = plan[-1]

    def __call__(self, *tensors: Tensor) -> None:
        if tensors[0].data_ptr() & 3:
            self.otherwise(*tensors)
        else:
            super().__call__(*tensors)


class DelayedPlan(Plan):
    """A cast by the inv_scale of a state: until that is known to be set, it is chosen on the device."""

    __slots__ = ("rule",)

    def __init__(self, *plan: Any) -> None:
        super().__init__(*plan[:-1])
        self.rule: tuple[str, bool, float, int] = plan[-1]

    def __call__(self, *tensors: Tensor) -> None:
        x, inv_scale, *rest = tensors
        super().__call__(x, self._chosen(x, inv_scale), *rest)

    def bound(self, index: int, *dtypes: torch.dtype) -> Callable[..., None]:
        plain = super().bound(index, *dtypes)

        def call(*tensors: Tensor) -> None:
            tell_owner(tensors[1])
            if is_known_set(tensors[1]):
                plain(*tensors)
            else:
                self(*tensors)

        return call

    def _chosen(self, x: Tensor, inv_scale: Tensor) -> Tensor:
        is_set = is_known_set(inv_scale)
        note_condition(is_known_set, inv_scale, was=is_set)
        if is_set:
            return inv_scale
        own = new_zeros(x, 1, 1)
        m, n = self.sizes[:2]
        tensor_amax(m * n)(x, own)
        return chosen_inv_scale(own, inv_scale, *self.rule)


def _launch_of(compiled: Any, plan: Plan) -> Launch:
    """A function that launches a compiled kernel on pointers: by torch's launcher for Inductor's kernels, or Triton's.

    Torch's launcher takes the kernel's arguments without its constants, with one letter per argument for its type. It
    does not call the hooks that Triton calls around a launch.
    """
    metadata, programs = compiled.metadata, plan.programs
    scratch = [getattr(metadata, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    fast = getattr(getattr(torch._C, "_StaticCudaLauncher", None), "_launch_kernel", None)
    is_special = metadata.num_ctas != 1 or any(scratch) or getattr(metadata, "launch_cooperative_grid", False)
    if fast is None or is_special or getattr(metadata, "launch_pdl", False):
        runner = compiled[(programs, 1, 1)]
        rest = (*plan.sizes, *plan.constants.values())
        return lambda index, pointers: runner(*pointers, *rest)
    kinds = list(compiled.src.signature.values())[len(plan.kernel.arg_names) - len(plan.sizes) - len(plan.constants) :]
    letters = {"i32": "i", "i64": "l"}  # Triton makes an integer that is 1 a constant, like those that follow
    taken = [(size, letters[kind]) for size, kind in zip(plan.sizes, kinds, strict=False) if kind != "constexpr"]
    nones = (None,) * sum(size is not None for size in scratch)
    sizes = (*[size for size, _ in taken], *nones)
    count = len(plan.kernel.arg_names) - len(plan.sizes) - len(plan.constants)
    types = "O" * count + "".join(letter for _, letter in taken) + "O" * len(nones)
    function, warps, shared = compiled.function, metadata.num_warps, metadata.shared
    stream_of = torch._C._cuda_getCurrentRawStream

    def launch(index: int, pointers: list[int]) -> None:
        fast(function, programs, 1, 1, warps, shared, types, (*pointers, *sizes), stream_of(index))

    return launch


def planned(make: Callable[..., Plan]) -> Callable[..., Plan]:
    """A decorator: makes each plan once per signature, and names it."""

    @lru_cache(maxsize=4096)
    def made(*args: Any) -> Plan:
        plan = make(*args)
        plan.name = f"{make.__name__}({', '.join(map(repr, args))})"
        return plan

    return wraps(make)(made)


@planned
def tensor_amax(count: int) -> Plan:
    """Tensors x, amax: `amax` is updated by the amax of the `count` elements of `x`."""
    kernel = scale_kernels.tensor_amax_kernel
    return Plan(kernel, blocks(count, AMAX_BLOCK), (count,), {"BLOCK": AMAX_BLOCK}, AMAX_WARPS)


@planned
def row_amax(m: int, n: int) -> Plan:
    """Tensors x [m, n], amax: the amaxes of the rows."""
    bm, bn = ROW_AMAX_TILE
    constants = {"TILES_N": blocks(n, bn), "BM": bm, "BN": bn}
    return Plan(scale_kernels.row_amax_kernel, blocks(m, bm), (m, n), constants, ROW_AMAX_WARPS)


@planned
def row_col_amax(m: int, n: int, has_pairs: bool, tiled: bool) -> Plan:
    """Tensors x [m, n], amaxes [m + n]: updated by those of the rows, then of the columns.

    With `tiled`, amaxes [tiles_n * m + tiles_m * n]: those of every tile.
    """
    tiles_m, tiles_n = amax_tiles(m, n)
    constants = {"TILED": tiled, "BM": AMAX_TILE, "BN": AMAX_TILE}
    plan = tiles_m * tiles_n, (m, n, tiles_n), constants, ROW_COL_AMAX_WARPS
    if has_pairs:
        return PairsPlan(scale_kernels.row_col_amax_of_pairs_kernel, *plan, row_col_amax(m, n, False, tiled))
    return Plan(scale_kernels.row_col_amax_kernel, *plan)


def has_pairs(dtype: torch.dtype, n: int, device: torch.device) -> bool:
    """Whether rows of `n` numbers can be read as pairs of 16-bit numbers, and the GPU compares both at once."""
    return dtype.itemsize == 2 and n % 2 == 0 and compares_pairs(device)


@planned
def scales(fmt: str, power_of_two: bool, amax_floor: float, margin: int, count: int) -> Plan:
    """Tensors amax, inv_scale, scale, of `count` elements each."""
    constants = rule_constants(fmt, power_of_two, amax_floor, margin) | {"BLOCK": SCALES_BLOCK}
    return Plan(scale_kernels.scales_kernel, blocks(count, SCALES_BLOCK), (count,), constants, SCALES_WARPS)


@planned
def cast_pair(
    m: int, n: int, fmt: str, power_of_two: bool, amax_floor: float, rows: int | None, cols: int | None
) -> Plan:
    """Tensors x [m, n], row source, codes and scale, column source, codes and scale.

    `rows` and `cols`: how many amaxes of the tensor the source holds, of which the largest counts; 0 is a vector of one
    value a row, an amax where scales are powers of two, otherwise an inv_scale; -t are t vectors of amaxes; None leaves
    the operand out.
    """
    bm, bn = CAST_TILE
    tiles_n = blocks(n, bn)
    constants = {
        **rule_constants(fmt, power_of_two, amax_floor),
        **codes_constants(fmt),
        "ROWS": rows is not None,
        "COLS": cols is not None,
        "ROW_BLOCK": 1 << (rows - 1).bit_length() if rows is not None and rows > 0 else 0,
        "COL_BLOCK": 1 << (cols - 1).bit_length() if cols is not None and cols > 0 else 0,
        "ROW_TILED": rows is not None and rows < 0,
        "COL_TILED": cols is not None and cols < 0,
        "BM": bm,
        "BN": bn,
    }
    sizes = (m, n, tiles_n, abs(rows or 0), abs(cols or 0))
    return Plan(cast_kernels.cast_pair_kernel, blocks(m, bm) * tiles_n, sizes, constants, CAST_WARPS)


@planned
def cast_pair_given(m: int, n: int, fmt: str, rows: bool, cols: bool) -> Plan:
    """Tensors x [m, n], inv_scale, row codes, column codes, and any tensor three times."""
    return Plan(cast_kernels.cast_pair_given_kernel, *_given(m, n, fmt, rows, cols, False), CAST_WARPS)


@planned
def cast_pair_delayed(
    m: int, n: int, fmt: str, rows: bool, cols: bool, keep: bool, power_of_two: bool, amax_floor: float, margin: int
) -> Plan:
    """Tensors x [m, n], the state's inv_scale, row codes, column codes, the state's amax, scale, used inv_scale.

    The last is written if the argument `keep` is true.
    """
    programs, sizes, constants = _given(m, n, fmt, rows, cols, True)
    constants["KEEP"] = keep
    rule = (fmt, power_of_two, amax_floor, margin)
    return DelayedPlan(cast_kernels.cast_pair_given_kernel, programs, sizes, constants, CAST_WARPS, rule)


def _given(m: int, n: int, fmt: str, rows: bool, cols: bool, amax: bool) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    bm, bn = CAST_TILE
    tiles_n = blocks(n, bn)
    constants = {**codes_constants(fmt), "ROWS": rows, "COLS": cols, "AMAX": amax}
    constants |= {"KEEP": False, "BM": bm, "BN": bn}
    return blocks(m, bm) * tiles_n, (m, n, tiles_n), constants


@planned
def update_delayed(
    layers: int,
    length: int,
    fmts: str,
    power_of_two: bool,
    amax_floor: float,
    margin: int,
    is_most_recent: bool,
) -> Plan:
    """Tensors taken [3 * layers], table of addresses, report: one program for each tensor."""
    names = fmts.split(",")
    rules = [rule_constants(fmt or E4M3FN.name, power_of_two, amax_floor, margin) for fmt in names]
    constants = {
        **{f"QUOTIENT_{i}": rule["QUOTIENT"] for i, rule in enumerate(rules)},
        **{f"AT_FLOOR_{i}": rule["AT_FLOOR"] for i, rule in enumerate(rules)},
        **{f"IS_CAST_{i}": bool(fmt) for i, fmt in enumerate(names)},
        "FLOOR": rules[0]["FLOOR"],
        "POWER_OF_TWO": power_of_two,
        "MOST_RECENT": is_most_recent,
        "UNCALLED": UNCALLED,
        "BLOCK_H": 1 << (length - 1).bit_length(),
    }
    return Plan(delayed_kernels.update_delayed_kernel, 3 * layers, (length,), constants, 1)


@planned
def cast_rows(m: int, n: int, fmt: str, power_of_two: bool, amax_floor: float) -> Plan:
    """Tensors x [m, n], codes, scale and amax of the rows, each by its own amax."""
    constants = rule_constants(fmt, power_of_two, amax_floor) | {"DTYPE": codes_constants(fmt)["DTYPE"]}
    if n > ROWS_LONGEST:
        constants = {"TILES_N": blocks(n, LONG_ROWS_BLOCK), **constants, "BN": LONG_ROWS_BLOCK}
        return Plan(cast_kernels.cast_long_rows_kernel, m, (n,), constants, LONG_ROWS_WARPS)
    bn = 1 << (n - 1).bit_length()
    bm = max(1, ROWS_ELEMENTS // bn)
    warps = bm * bn // ROWS_ELEMENTS_PER_WARP
    return Plan(cast_kernels.cast_rows_kernel, blocks(m, bm), (m, n), {**constants, "BM": bm, "BN": bn}, warps)


@planned
def cast_columns(m: int, n: int, fmt: str) -> Plan:
    """Tensors x [m, n], inv_scale of the columns, codes [m, n]."""
    bm, bn = CAST_TILE
    tiles_n = blocks(n, bn)
    constants = {**codes_constants(fmt), "BM": bm, "BN": bn}
    return Plan(cast_kernels.cast_columns_kernel, blocks(m, bm) * tiles_n, (m, n, tiles_n), constants, CAST_WARPS)


@planned
def transpose_codes(m: int, n: int) -> Plan:
    """Tensors codes [m, n] and out [n, m]."""
    bm, bn = TRANSPOSE_TILE
    tiles_n = blocks(n, bn)
    constants = {"BM": bm, "BN": bn}
    kernel = cast_kernels.transpose_codes_kernel
    return Plan(kernel, blocks(m, bm) * tiles_n, (m, n, tiles_n), constants, TRANSPOSE_WARPS)


@planned
def cast_vectors(m: int, n: int, fmt: str, power_of_two: bool, amax_floor: float, rows: bool, cols: bool) -> Plan:
    """Tensors x [m, n], row codes, scale and inv_scale, column codes, scale and inv_scale: in vectors of 128."""
    constants = _block_constants(fmt, power_of_two, amax_floor, rows, cols) | {"STRIP": VECTORS_STRIP}
    tiles_m, tiles_n = blocks(m, BLOCK), blocks(n, BLOCK)
    sizes = (m, n, tiles_m, tiles_n)
    return Plan(block_kernels.cast_vectors_kernel, tiles_m * tiles_n, sizes, constants, VECTORS_WARPS)


@planned
def cast_squares(m: int, n: int, fmt: str, power_of_two: bool, amax_floor: float, rows: bool, cols: bool) -> Plan:
    """Tensors x [m, n], row codes and scale, column codes and scale: in squares of 128 by 128."""
    constants = _block_constants(fmt, power_of_two, amax_floor, rows, cols) | {"STRIP": SQUARES_STRIP}
    tiles_m, tiles_n = blocks(m, BLOCK), blocks(n, BLOCK)
    sizes = (m, n, tiles_m, tiles_n)
    return Plan(block_kernels.cast_squares_kernel, tiles_m * tiles_n, sizes, constants, SQUARES_WARPS)


@cache
def sources_digest() -> str:
    """The digest of the files that compiled code relies on: a cache of compiled code may outlive them."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def require_sources(digest: str) -> None:
    """Raise UnsupportedError in compiled code that another version of these files made."""
    if digest != sources_digest():
        raise UnsupportedError(
            "f8emu.torch: torch's cache holds code that was compiled with another version of f8emu, whose casts it "
            "would call wrongly; delete the cache (TORCHINDUCTOR_CACHE_DIR, by default /tmp/torchinductor_<user>), or "
            "set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        )


@cache
def rule_constants(fmt: str, power_of_two: bool, amax_floor: float, margin: int = 0) -> dict[str, Any]:
    """The scale rule as constants of the kernels: `FLOOR` is the largest float32 not above the rule's floor."""
    below = _float32(amax_floor)
    if below > amax_floor:
        below = _float32(below - below * 2.0**-24)
    limit = format_by_name(fmt).max * 2.0**-margin
    return {
        "QUOTIENT": limit,
        "FLOOR": below,
        "AT_FLOOR": _float32(limit / amax_floor),
        "POWER_OF_TWO": power_of_two,
    }


def codes_constants(fmt: str) -> dict[str, Any]:
    """The format of codes as the kernels' constants."""
    return {"LIMIT": format_by_name(fmt).max, "DTYPE": cast_kernels.DTYPES[fmt]}


def _block_constants(fmt: str, power_of_two: bool, amax_floor: float, rows: bool, cols: bool) -> dict[str, Any]:
    rule = rule_constants(fmt, power_of_two, amax_floor)
    return {**rule, "DTYPE": codes_constants(fmt)["DTYPE"], "ROWS": rows, "COLS": cols}


def _float32(value: float) -> float:
    """The float32 nearest to `value`."""
    return struct.unpack("f", struct.pack("f", value))[0]


def blocks(size: int, block: int) -> int:
    """The number of blocks that cover `size`: ceil(size / block)."""
    return -(-size // block)
