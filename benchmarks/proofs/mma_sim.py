"""Single instructions by our rules and by MMA-Sim, a model that its authors compared with the chips: every bit.

    python -m benchmarks.proofs.mma_sim --json benchmarks/results/mma_sim-cpu.json

MMA-Sim (arXiv 2511.10909) is a package that constraints/stacks.txt pins (`make install`). A case is `dot(a, b) + c` of
one instruction, by f8ref.numpy, by f8emu.numpy and by MMA-Sim. Operands are drawn over all codes, over the finite ones,
from a normal distribution, sparse, and so that they cancel; bfloat16 also so that the exponent of zero shows [BF16-1].
c is zero, near the dot product, of any exponent, and any code; E8M0 scales are all bytes. Two NaN are equal, whatever
their bits; +0 and -0 are not.

Left out, and counted, are cases that our rules do not model: `left_out` has them. Float8 `mma` of a chip without it is
compared as the two instructions of float16 that [CHIP-1..3] say; MMA-Sim does not say which K each takes. Exit status 1
if an output differs.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import distributions
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import f8emu.numpy
import f8ref.numpy
from benchmarks.runner import Bench, Entry, draw_entries, option, say
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.compare import different
from f8emu.interop.arrays import to_numpy, to_torch
from f8emu.spec.chip import Chip, Instruction, Rounding
from f8emu.spec.chips import ADA, BLACKWELL_MMA, BLACKWELL_TCGEN05, CDNA3, HOPPER, RTX_BLACKWELL
from f8emu.spec.formats import BFLOAT16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0FNU, FLOAT16, FLOAT32, Format

STACKS = Path(sys.prefix, "stacks")
BENCH = Bench("benchmarks.proofs.mma_sim", __doc__, option("cases", 24000, "of every instruction and pair of formats"))
Array = np.ndarray[Any, Any]
Cases = tuple[Array, ...]
"""a and b [cases, K], c [cases], and E8M0 scales [cases, 1] of a block-scaled instruction."""
_NAMES = {E4M3FN: "e4m3", E5M2: "e5m2", E4M3FNUZ: "fp8", E5M2FNUZ: "bf8"}
_NAMES |= {BFLOAT16: "bf16", FLOAT32: "f32", FLOAT16: "f16"}


def mmasim(module: str) -> Any:
    """A module of MMA-Sim. The folder does not stay on the path: other packages do other things beside torchao."""
    sys.path.append(str(STACKS))
    try:
        return import_module(f"mmasim.{module}")
    finally:
        sys.path.remove(str(STACKS))


def version() -> str:
    """Of MMA-Sim."""
    return next(iter(distributions(name="mmasim", path=[*sys.path, str(STACKS)]))).version


# 1 Instructions


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """An instruction of a chip for one pair of formats, and MMA-Sim's function of vectors."""

    chip: Chip
    name: str
    formats: tuple[Format, Format]
    out: Format
    k: int
    dpa: Callable[..., torch.Tensor]

    def theirs(self, cases: Cases) -> Array:
        """MMA-Sim's results."""
        a, b, c, *scales = (to_torch(x) for x in cases)
        if "float16" not in self.name:
            return to_numpy(self.dpa(a, b, c, *scales))
        # [CHIP-1..3] Two instructions of float16, to whose sum c is added.
        order = torch.tensor(self.chip.instruction("mma_sim", self.formats, self.out).model.order)
        d = torch.zeros_like(c)
        for part in order.split(16):
            d = self.dpa(a[:, part].half(), b[:, part].half(), d)
        return to_numpy((c.float() + d.float()).to(c.dtype))


_WGMMA_FLOAT16 = Instruction(
    name="wgmma",
    format_pairs=HOPPER.instructions[0].format_pairs,
    out=FLOAT16,
    model=replace(HOPPER.float8_fast, accumulator=FLOAT16, result_fraction_bits=10, rounding=Rounding.NEAREST_EVEN),
)
"""[CHIP-4] of [ACC-1..5]. The profile's instruction with a float16 accumulator is `mma`."""
_TCGEN05, _MX = BLACKWELL_TCGEN05, "kind::mxf8f6f4.block32.{d}.{a}.{b}"
_WITH_FLOAT16 = replace(HOPPER, instructions=(_WGMMA_FLOAT16, *HOPPER.instructions))

# Chip, name, class of MMA-Sim, its architecture, its shape with formats d, a and b, and the formats of d
_BOTH, _ONE = (FLOAT32, FLOAT16), (FLOAT32,)
_FAMILIES: tuple[tuple[Chip, str, str, str, str, tuple[Format, ...]], ...] = (
    (_WITH_FLOAT16, "wgmma", "WGMMA", "Hopper", "m64n8k32.{d}.{a}.{b}", _BOTH),
    (HOPPER, "wgmma", "WGMMA", "Hopper", "m64n8k16.{d}.bf16.bf16", _ONE),
    (HOPPER, "mma of float16, twice", "MMA", "Hopper", "m16n8k16.{d}.f16.f16.{d}", (FLOAT16,)),
    (ADA, "mma", "MMA", "Ada Lovelace", "m16n8k32.{d}.{a}.{b}.{d}", _BOTH),
    (ADA, "mma", "MMA", "Ada Lovelace", "m16n8k8.{d}.bf16.bf16.{d}", _ONE),
    (BLACKWELL_MMA, "mma of float16, twice", "MMA", "Blackwell", "m16n8k16.{d}.f16.f16.{d}", _BOTH),
    (BLACKWELL_MMA, "mma", "MMA", "Blackwell", "m16n8k16.{d}.bf16.bf16.{d}", _ONE),
    (_TCGEN05, "tcgen05.mma", "TCGen05MMA", "Blackwell", "m64n8k32.kind::f8f6f4.{d}.{a}.{b}", _BOTH),
    (_TCGEN05, "tcgen05.mma", "TCGen05MMA", "Blackwell", "m64n8k16.kind::f16.{d}.bf16.bf16", _ONE),
    (_TCGEN05, "tcgen05.mma.block_scale", "TCGen05MMABlockScale", "Blackwell", f"m128n8k32.{_MX}.ue8m0", _ONE),
    (RTX_BLACKWELL, "mma", "MMA", "RTX Blackwell", "m16n8k32.kind::f8f6f4.{d}.{a}.{b}.{d}", _BOTH),
    (RTX_BLACKWELL, "mma", "MMA", "RTX Blackwell", "m16n8k16.{d}.bf16.bf16.{d}", _ONE),
    (RTX_BLACKWELL, "mma.block_scale", "MMABlockScale", "RTX Blackwell", f"m16n8k32.{_MX}.{{d}}.ue8m0", _ONE),
    (CDNA3, "v_mfma", "MFMA", "CDNA3", "{d}_16x16x32_{a}_{b}", _ONE),
    (CDNA3, "v_mfma", "MFMA", "CDNA3", "{d}_32x32x8_bf16", _ONE),
)


def instructions() -> Iterator[Compared]:
    """All that both know."""
    for chip, name, kind, architecture, shape, outs in _FAMILIES:
        module = mmasim("amd.sim" if chip == CDNA3 else "nv_ptx.sim")
        formats = (BFLOAT16,) if "bf16" in shape else chip.operand_formats
        for out, pair in product(outs, product(formats, formats)):
            letters = dict(zip("dab", (_NAMES[format] for format in (out, *pair)), strict=True))
            theirs = getattr(module, kind)(architecture, shape.format(**letters))
            k = 32 if ".f16.f16" in shape else theirs.k
            yield Compared(chip=chip, name=name, formats=pair, out=out, k=k, dpa=theirs.dpa)


# 2 Cases

_OPERANDS, _ADDENDS = ("codes", "finite", "normal", "sparse", "cancelling"), ("zero", "near", "any", "codes")


def draw(of: Compared, count: int, seed: int) -> Cases:
    """Every kind of operands with every kind of c."""
    rng, parts = np.random.default_rng(seed), list[Cases]()
    kinds = (*_OPERANDS, "tiny") if BFLOAT16 in of.formats else _OPERANDS
    n = count // (len(kinds) * len(_ADDENDS))
    for kind, addend in product(kinds, _ADDENDS):
        a, b = (_operand(rng, kind, format, (n, of.k)) for format in of.formats)
        if kind == "cancelling":  # all but the last product of each half
            half = of.k // 2
            a[:, half:-1], b[:, half:-1] = a[:, : half - 1], (-b[:, : half - 1].astype(np.float32)).astype(b.dtype)
        elif kind == "tiny":  # beside a power of two, whose last place shows whether the others are cut to nothing
            a, b = np.abs(a), np.abs(b)
            a[:, 0], b[:, 0] = rng.choice([-1.0, 1.0], n) * 2.0**-70, np.exp2(rng.integers(-80, -59, n))
        with np.errstate(all="ignore"):
            products = np.nan_to_num(a.astype(np.float64) * b.astype(np.float64), posinf=1, neginf=1)
            dot, largest = products.sum(axis=1), np.frexp(np.abs(products).max(axis=1))[1]
            scales = _scales(rng, largest) if "block_scale" in of.name else ()
            for scale in scales:
                dot *= scale.astype(np.float64)[:, 0]
            parts.append((a, b, _addend(rng, addend, of.out, np.nan_to_num(dot, nan=1)), *scales))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _operand(rng: np.random.Generator, kind: str, format: Format, shape: tuple[int, int]) -> Array:
    codes = _codes(rng, format, shape)
    if kind == "codes":
        return codes
    if kind == "normal":
        return (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 5, (shape[0], 1)))).astype(codes.dtype)
    if format == BFLOAT16:  # of which any two codes would seldom meet in one sum; tiny products are about 2^-158
        low, high, spread = (-81, -77, 1) if kind == "tiny" else (-80, 46, 14)
        exponents = rng.integers(low, high, (shape[0], 1)) + rng.integers(-spread, spread + 1, shape)
        codes = (rng.standard_normal(shape) * np.exp2(exponents)).astype(codes.dtype)
    codes[~np.isfinite(codes.astype(np.float32))] = 0
    if kind == "sparse":
        codes[rng.random(shape) < 0.8] = 0
    return codes


def _codes(rng: np.random.Generator, format: Format, shape: tuple[int, ...]) -> Array:
    dtype = dtype_of(format)
    return rng.integers(0, 1 << format.bits, shape, dtype=f"u{dtype.itemsize}").view(dtype)


def _addend(rng: np.random.Generator, kind: str, format: Format, dot: Array) -> Array:
    """c for dot products."""
    if kind == "codes":
        return _codes(rng, format, dot.shape)
    sign = rng.choice([-1.0, 1.0], dot.shape)
    exponents = rng.integers(format.min_exponent - format.fraction_bits, format.max_exponent + 1, dot.shape)
    any_one = rng.uniform(1, 2, dot.shape) * np.exp2(exponents)
    near = dot * rng.uniform(0.5, 2, dot.shape) * np.exp2(rng.integers(-30, 31, dot.shape))
    return (sign * {"zero": 0, "any": any_one, "near": near}[kind]).astype(dtype_of(format))


def _scales(rng: np.random.Generator, largest: Array) -> tuple[Array, Array]:
    """Of a third each: any two bytes; a product of both next to 1; products up to 2^-134, where zeros count [MX-3].

    `largest` is the logarithm of the largest product before.
    """
    n = len(largest)
    kind, a, b = np.arange(n) % 3, *rng.integers(0, 256, (2, n))
    log2 = np.where(kind == 1, rng.integers(-20, 21, n), -134 - largest - rng.integers(0, 10, n))
    a = np.where(kind == 2, a % 64, a)
    b = np.where(kind == 0, b, np.clip(2 * E8M0FNU.bias + log2 - a, 0, 254))
    of_a, of_b = (x.astype(np.uint8)[:, None].view(dtype_of(E8M0FNU)) for x in (a, b))
    return of_a, of_b


# 3 Comparison


def left_out(of: Compared, cases: Cases) -> Array:
    """Which cases are not compared.

    - CDNA3, bfloat16: a product beyond float32, infinite in MMA-Sim.
    - CDNA3, float8: c, or the sum of the first step, is NaN or infinite beside a product of 2^25 or more. MMA-Sim drops
      it as an accumulator beyond reach [CHIP-6]: it takes its exponent for -1.
    """
    a, b = (x.astype(np.float64) for x in cases[:2])
    c, products = cases[2].astype(np.float64), np.abs(a * b)
    result = np.zeros(len(c), bool)
    if of.chip.name == CDNA3.name and of.formats == (BFLOAT16, BFLOAT16):
        result |= ((products >= 2.0**128) & np.isfinite(products)).any(axis=1)
    elif of.chip.name == CDNA3.name:
        is_lost = ~np.isfinite(c) | np.isnan(products[:, :16]).any(axis=1)
        result |= is_lost & (products >= 2.0**25).any(axis=1)
    return result


def compare(of: Compared, count: int, seed: int) -> Entry:
    """How many outputs were compared, differ, and were left out. The sign of CDNA3's zeros is left out [CHIP-6]."""
    with np.errstate(all="ignore"):
        cases = draw(of, count, seed)
        theirs, is_out = of.theirs(cases), left_out(of, cases)
        is_negative_zero = (of.chip.name == CDNA3.name) & (theirs == 0) & np.signbit(theirs)
        theirs = np.where(is_negative_zero, np.abs(theirs), theirs)
        both = (mma(*cases, chip=of.chip, out_dtype=of.out) for mma in (f8ref.numpy.mma, f8emu.numpy.mma))
        is_different = np.logical_or.reduce([different(ours, theirs) for ours in both]) & ~is_out
        is_out |= is_negative_zero
    if is_different.any():
        i = is_different.argmax()
        operands = "; ".join(str(x[i].tolist()) for x in (*cases, theirs))
        say(f"{of.chip}, {of.name}, {of.formats}: the operands and MMA-Sim's result {operands}")
    counts = {"outputs": (~is_out).sum(), "differ": is_different.sum(), "left_out": is_out.sum()}
    return {key: int(value) for key, value in counts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv, device="cpu")
    entries = dict[tuple[str, ...], Entry]()
    for seed, of in enumerate(instructions()):
        key = of.chip.name, of.name, "bfloat16" if BFLOAT16 in of.formats else "float8", of.out.name
        kind = dict(zip(("chip", "name", "operands", "out"), key, strict=True))
        entry = entries.setdefault(key, kind | {"pairs": 0, "outputs": 0, "differ": 0, "left_out": 0})
        for count, value in {"pairs": 1, **compare(of, run.arguments.cases, seed)}.items():
            entry[count] += value
    columns = "name: operands: out: pairs: outputs:, differ:, left_out:,"
    draw_entries(f"instructions, by MMA-Sim {version()}", list(entries.values()), columns, of="chip")
    totals = {key: sum(entry[key] for entry in entries.values()) for key in ("outputs", "differ", "left_out")}
    run.report["versions"]["mmasim"] = version()
    run.record(**totals, instructions=list(entries.values()))
    return int(totals["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
