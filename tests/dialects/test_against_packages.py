"""Dialects against the packages that they describe: every byte of codes and scales, on a CPU; and what the packages
write, under the audit.

The packages run once, in a process of their own (packages.py). `make install` puts them beside the other packages, into
the folder `stacks` of the environment. A missing package is a failure: what was not compared may not count as compared.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import f8emu.numpy as f8
from f8emu.dialects import DIALECTS, Dialect, dequantize, quantize
from f8emu.dialects.arithmetic import block_amax
from f8emu.dialects.rules import COLUMN, Arithmetic, Block, CodeRule, Division, PowerOfTwo
from f8emu.spec import E4M3FN, E5M2, E8M0Rule, Granularity, ScaleRule
from tests.audit.written import assert_clean

HERE = Path(__file__).parent
COMPARED = {name: dialect for name, dialect in DIALECTS.items() if dialect.is_compared}
Array = NDArray[Any]
Corner = Callable[[Array, str, Array], Array]
"""(amax of each block, dtype of the matrix, stored scales) -> in which blocks the caveat says that bytes differ."""


def mxfp8_corner(amax: Array, dtype: str, _: Array) -> Array:
    of_float16 = ~(amax >= 2.0**-14) | (amax >= 1.75 * 2.0**15)
    return of_float16 if dtype == "float16" else amax >= 1.75 * 2.0**127


CORNERS: dict[str, Corner] = {
    **dict.fromkeys(("torchao_mx_floor", "torchao_mx_ceil", "torchao_mx_even"), lambda amax, *_: np.isnan(amax)),
    **dict.fromkeys(("qwix", "qwix_eager_tensor"), lambda amax, *_: np.isnan(amax)),
    "qwix_mxfp8": lambda amax, *_: ~np.isfinite(amax),
    "torchao_mx_rceil": lambda amax, _, scale: scale.view(np.uint8) == 0,
    "compressed_tensors_mxfp8": mxfp8_corner,
}
OF_XLA = ("flax_linen", "qwix", "qwix_eager_tensor")
"""Their caveat: the codes of float16 have another rule."""


def load(name: str) -> Any:
    sys.path.insert(0, str(HERE))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(HERE))


TABLES = {(dtype, table): x for dtype in load("tables").DTYPES for table, x in load("tables").tables(dtype).items()}


def bytes_of_packages(folder: Path) -> dict[str, Array]:
    """`TABLE/DTYPE/DIALECT/BLOCK/codes` and `/scale` -> bytes of the package; its checkpoints go into the folder."""
    out = folder / "out.npz"
    blocks = {name: [block for block in dialect.blocks if block != COLUMN] for name, dialect in COMPARED.items()}
    paths = [str(HERE), *sys.path, str(Path(sys.prefix, "stacks"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_NUMPY_RANK_PROMOTION": "allow"}
    command = [sys.executable, str(HERE / "packages.py"), str(out), json.dumps(blocks), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (
        f"packages.py failed; `make install` brings the packages of other stacks:\n{done.stderr}"
    )
    with np.load(out) as found:
        return dict(found)


def differing(mine: Array, theirs: Array) -> Array:
    """Which elements differ in their bytes; the NaNs of a dtype count as one."""
    theirs = np.ascontiguousarray(theirs).view(mine.dtype).reshape(mine.shape)
    apart = mine.view(f"u{mine.itemsize}") != theirs.view(f"u{mine.itemsize}")
    apart[apart] = ~(np.isnan(mine[apart].astype(np.float32)) & np.isnan(theirs[apart].astype(np.float32)))
    return apart


def of_elements(of_blocks: Array, shape: tuple[int, ...], block: Block) -> Array:
    rows, k = block[0] or shape[0], block[1] or shape[1]
    return of_blocks.repeat(rows, 0).repeat(k, 1)[: shape[0], : shape[1]]


def differences(dialect: Dialect, packages: dict[str, Array]) -> tuple[int, int, int]:
    """How many (codes, scales) differ from the package of the dialect's name, and how many in its corner."""
    codes_apart = scales_apart = in_corner = 0
    for key, theirs in packages.items():
        table, dtype, name, block_text, what = key.split("/")
        if name != dialect.name or what != "codes":
            continue
        block, x = next(b for b in dialect.blocks if str(b) == block_text), TABLES[dtype, table]
        mine = quantize(x, dialect, block=block)
        if name == "modelopt_fake":  # the package keeps values alone
            values = dequantize(mine.codes, mine.scale, dialect, block=block, out_dtype=dtype)
            codes_apart += differing(values, theirs).sum()
            continue
        corner = CORNERS.get(name, lambda amax, *_: np.zeros(amax.shape, bool))(block_amax(x, block), dtype, mine.scale)
        scales = differing(mine.scale, packages[key.removesuffix("codes") + "scale"])
        codes = differing(mine.codes, theirs)
        elements = of_elements(corner, x.shape, block)
        codes_apart += int(codes[~elements].sum())
        scales_apart += int(scales[~corner].sum())
        in_corner += int(codes[elements].sum() + scales[corner].sum())
    return codes_apart, scales_apart, in_corner


def just_above_a_power(x: Array) -> Array:
    """Whose float32 logarithm may be that of the power of two below."""
    with np.errstate(all="ignore"):
        above = x / np.exp2(np.round(np.log2(x))) - 1
    return (above > 0) & (above < 2.0**-16)


def twice(mask: Array) -> tuple[Array, Array]:
    return mask, mask


MX_RULES: dict[str, tuple[E8M0Rule, Callable[[Array, Array, float], tuple[Array, Array]]]] = {
    # Where scales differ, and where codes do, of (amax in float64, byte, largest value).
    **{
        f"torchao_mx_{rule.value}": (rule, lambda amax, byte, _: (byte < 0, (byte == 0) | (byte == 255)))
        for rule in (E8M0Rule.FLOOR, E8M0Rule.CEIL, E8M0Rule.EVEN)
    },
    "torchao_mx_rceil": (
        E8M0Rule.RCEIL,  # log2; a factor of 1 where the byte is 0
        lambda amax, byte, most: (just_above_a_power(amax / most), (byte == 0) | just_above_a_power(amax / most)),
    ),
    "modelopt_mxfp8": (
        E8M0Rule.RCEIL,  # log2; a NaN block has the byte 0
        lambda amax, byte, most: twice(np.isnan(amax) | just_above_a_power(amax / most)),
    ),
    "compressed_tensors_mxfp8": (
        E8M0Rule.RCEIL,  # from 1.75 * 2^k on, where it is above that here; no NaN, and none but byte 255 at the end
        lambda amax, byte, _: twice(~(amax < 1.75 * 2.0**127) | (np.frexp(amax)[0] == 0.875)),
    ),
}
"""Rule of f8emu's own casts -> where the package is known to differ."""


def mx_differences(packages: dict[str, Array]) -> tuple[dict[str, tuple[int, int]], set[str]]:
    """(scales, codes) of f8emu's own MX casts that differ beyond what is known, and who has known differences."""
    apart, with_known = dict[str, tuple[int, int]](), set[str]()
    for key, codes in packages.items():
        table, dtype, name, kind, *what = key.split("/") if key.count("/") == 4 else ("", "", "", "")
        if name not in MX_RULES or what != ["codes"] or dtype == "float16":
            continue
        (rule, known), x = MX_RULES[name], TABLES[dtype, table]
        target = E5M2 if kind == "e5m2" else E4M3FN
        amax = f8.amax(x, Granularity.BLOCKWISE_1X32)
        inv_scale, scale = f8.scale_from_amax(amax, target, ScaleRule(e8m0=rule))
        mine = f8.quantize(x, inv_scale, target, Granularity.BLOCKWISE_1X32)
        byte = scale.view(np.uint8).astype(int)
        with np.errstate(all="ignore"):
            of_scales, of_codes = known(amax.astype(np.float64), byte, target.max)
        scales_apart = byte != packages[key.removesuffix("codes") + "scale"].reshape(byte.shape)
        codes_apart = differing(mine, codes)
        beyond = int(scales_apart[~of_scales].sum()), int(codes_apart[~of_elements(of_codes, x.shape, (1, 32))].sum())
        if any(beyond):
            apart[key] = beyond
        if scales_apart.any() or codes_apart.any():
            with_known.add(name)
    return apart, with_known


def swizzles_differ(packages: dict[str, Array]) -> list[str]:
    """The shapes whose swizzled bytes are not torchao's; it ends groups with zeros that nobody reads."""
    tables, apart = load("tables"), list[str]()
    groups = [("rows", tables.GROUPED, 0), ("K", tables.GROUPED, 1)]
    for key, shape, axis in [*((str(shape), shape, None) for shape in tables.SWIZZLED), *groups]:
        ends = None if axis is None else tables.GROUP_ENDS[axis]
        mine = f8.swizzle_scales(tables.scales_to_swizzle(shape), ends=ends, axis=axis or 0)
        theirs = packages[f"swizzled/{key}"].ravel()
        if not (np.array_equal(mine, theirs[: mine.size]) and not theirs[mine.size :].any()):
            apart.append(key)
    return apart


def planted(name: str, *, of_codes: dict[str, Any] | None = None, **of_scale: Any) -> Dialect:
    """A dialect with other fields in its two forms."""
    dialect = COMPARED[name]
    assert dialect.scale is not None
    code, scale = replace(dialect.code, **(of_codes or {})), replace(dialect.scale, **of_scale)
    return replace(dialect, code=code, scale=scale)


PLANTED = (
    planted("transformers_block", division=Division.MULTIPLIER),
    planted("transformers_block", small_amax=None),
    planted("transformers_block_ue8m0", power_of_two=PowerOfTwo.UP),
    planted("modelopt_channel", division=Division.RECIPROCAL),
    planted("modelopt_channel", of_codes={"rule": CodeRule.INVERSE}),
    planted("modelopt_tensor", of_codes={"arithmetic": Arithmetic.FLOAT32}),
    planted("compressed_tensors_block", of_codes={"arithmetic": Arithmetic.FLOAT32}),
    planted("compressed_tensors_block", arithmetic=Arithmetic.FLOAT32),
    planted("compressed_tensors_mxfp8", carry=0x7FFFFF),
    planted("torchao_rowwise", power_of_two=PowerOfTwo.DOWN),
    planted("torchao_rowwise_float", amax_floor=0.0),
    planted("torchao_mx_even", carry=0),
    planted("torchao_mx_rceil", power_of_two=PowerOfTwo.UP),
    planted("qwix", division=Division.QUOTIENT),
    planted("qwix_mxfp8", power_of_two=PowerOfTwo.UP_LOG2),
    planted("flax_linen", nan_amax=None),
)
"""Other rules, which the tables must tell from those of the packages."""


def test_every_byte_and_no_finding(tmp_path: Path) -> None:
    """One test, so that one process alone imports the packages."""
    packages = bytes_of_packages(tmp_path)
    of_mx = {key: packages.pop(key) for key in list(packages) if "/e5m2/" in key or key.startswith("swizzled/")}
    apart, with_corners = dict[str, tuple[int, int]](), set[str]()
    for name, dialect in COMPARED.items():
        assert any(f"/{name}/" in key for key in packages), f"{name} says it is compared; packages.py does not"
        results = packages
        if name in OF_XLA:
            narrow = {key: value for key, value in packages.items() if f"/float16/{name}/" in key}
            by_inverse = replace(dialect, code=replace(dialect.code, rule=CodeRule.INVERSE))
            assert differences(by_inverse, narrow)[:2] == (0, 0) and differences(dialect, narrow)[0] > 0
            results = {key: value for key, value in packages.items() if key not in narrow}
        codes, scales, in_corner = differences(dialect, results)
        if codes or scales:
            apart[name] = codes, scales
        if in_corner:
            with_corners.add(name)
    assert apart == {}, "(codes, scales) that differ"
    assert with_corners == CORNERS.keys(), "a corner is what the tables show, and no more"
    assert [dialect for dialect in PLANTED if sum(differences(dialect, packages)[:2]) == 0] == []
    mx_apart, with_known = mx_differences(packages | of_mx)
    assert mx_apart == {}, "(scales, codes) of f8emu's own casts that differ where none is known to"
    assert with_known == MX_RULES.keys(), "what is known is what the tables show, and no more"
    assert swizzles_differ(of_mx) == []
    assert_clean(tmp_path)


def test_compared_versions_are_installed() -> None:
    """What `make install` pins is what the dialects name."""
    constraints = HERE.parents[1] / "constraints"
    pinned = {line for name in ("cpu.txt", "stacks.txt") for line in (constraints / name).read_text().split("\n")}
    assert {dialect.version for dialect in COMPARED.values()} <= pinned
