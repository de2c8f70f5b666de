"""Writes reference/dialects.md: the table of dialects and the scales of blocks of zeros, from DIALECTS."""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from results_records import inline

from f8emu.dialects import DIALECTS, Dialect, dequantize, quantize, zero_block_scale
from f8emu.dialects.rules import Block
from f8emu.report.charts import matrix

_HEAD = """# Dialects of other stacks

What [`f8emu.dialects`](api/f8emu.dialects.md) knows of the quantizers of other stacks.
[Dialects](../concepts/dialects.md) explains them. `s` decodes, `value = code * s`; `t` is multiplied while quantizing;
`fl` rounds to float32. *compared*: every byte of the package on a CPU, or of its kernels on a GPU for finite x.
*read*: from the source.
"""
_AGREEMENT = """## Who agrees with whom

A bfloat16 matrix [128, 512] of a normal distribution with outliers, quantized and read back as float32. Dialects of one
line of a list give every bit alike; the first of them stands for all in the matrix.
"""
_ZERO_BLOCKS = """## Zero blocks

The stored scale of a block of zeros in bfloat16. compressed-tensors gives 2^-10 in float16 and 2^-23 in float32.

| scale | dialects |
|---|---|"""


def page() -> str:
    """The page in markdown."""
    parts = _HEAD, *_standing(), *_dialects(), _AGREEMENT, *_agreement(), _ZERO_BLOCKS, *_zero_blocks()
    return "\n".join(parts) + "\n"


def _standing() -> Iterator[str]:
    """How many dialects were compared, and with what."""
    counts = Counter((dialect.is_compared, bool(dialect.gpu)) for dialect in DIALECTS.values())
    stacks = len({dialect.stack for dialect in DIALECTS.values()})
    of_both, of_cpu, of_gpu = counts[True, True], counts[True, False], counts[False, True]
    yield (
        f"Of the {len(DIALECTS)} dialects of {stacks} stacks, {of_both + of_cpu} are compared on a CPU, "
        f"{of_both} of them on a GPU too, and {of_gpu} on a GPU alone; {counts[False, False]} were read."
    )
    yield ""


def _dialects() -> Iterator[str]:
    stacks = dict.fromkeys(one.stack for one in DIALECTS.values())
    for stack in stacks:
        yield from (f"## {stack}", "", "| dialect | rule | blocks | stored | |", "|---|---|---|---|---|")
        for one in DIALECTS.values():
            if one.stack == stack:
                yield f"| `{one.name}` | {_rule(one)} | {_blocks(one.blocks)} | {_stored(one)} | {_notes(one)} |"
        yield ""


def _rule(one: Dialect) -> str:
    return one.formula.replace("*", "\\*").replace("; code", ";<br>code")


def _blocks(blocks: tuple[Block, ...]) -> str:
    named = {(None, None): "tensor", (1, None): "row"}
    return ", ".join(named.get(block, f"{block[0]}x{block[1]}") for block in blocks)


def _stored(one: Dialect) -> str:
    dtype = "x's dtype" if one.stored.dtype == "input" else one.stored.dtype
    names = "".join(f", `{name}`" for name in one.stored.names)
    layout = f"; {one.stored.layout}" if one.stored.layout else ""
    return f"{'t' if one.stored.is_multiplier else 's'}, {dtype}{names}{layout}"


def _notes(one: Dialect) -> str:
    bounds = f"Scales within {one.scale_ulps} ulps." if one.scale_ulps else ""
    codes = f"Codes within {one.code_steps} step." if one.code_steps else ""
    text = " ".join(part for part in (f"{one.standing}, {one.source}.", one.caveat, bounds, codes) if part)
    return text.replace("*", "\\*").replace("_", "\\_")


def _agreement() -> Iterator[str]:
    # A matrix for each usual block: the share of values that two dialects read back with the same bits.
    x = np.random.default_rng(0).standard_normal((128, 512)).astype(np.float32)
    x[::16, ::64] *= 100  # outliers
    for block, title in (((1, 128), "1x128"), ((128, 128), "128x128"), ((1, None), "row"), ((None, None), "tensor")):
        groups: dict[bytes, list[str]] = {}
        for name, dialect in DIALECTS.items():
            if dialect.scale is not None and block in dialect.blocks:
                codes, scale = quantize(x.astype(ml_dtypes.bfloat16), name, block=block)
                values = dequantize(codes, scale, name, block=block, out_dtype="float32")
                groups.setdefault(values.tobytes(), []).append(name)
        names = {members[0]: np.frombuffer(values, np.uint32) for values, members in groups.items()}
        shares = {(a, b): float(np.mean(names[a] == names[b])) for a in names for b in names}
        alt = f"Blocks {title}: the percentage of values with the same bits; orange is all of them"
        yield from (f"### {title}", "", inline(matrix([*names], shares), alt), "")
        alike = [members for members in groups.values() if len(members) > 1]
        yield from (f"- {', '.join(f'`{name}`' for name in members)}" for members in alike)
        yield ""


def _zero_blocks() -> Iterator[str]:
    found: dict[float, list[str]] = {}
    for name, one in DIALECTS.items():
        if one.scale is not None:
            found.setdefault(zero_block_scale(name), []).append(f"`{name}`")
    for scale, names in sorted(found.items()):
        fraction, exponent = math.frexp(scale)
        shown = f"2^{exponent - 1}" if fraction == 0.5 and scale != 1 else f"{scale:.4g}"
        yield f"| {shown} | {', '.join(names)} |"


if __name__ == "<run_path>":  # as mkdocs-gen-files runs it
    import mkdocs_gen_files

    with mkdocs_gen_files.open("reference/dialects.md", "w") as file:
        file.write(page())
