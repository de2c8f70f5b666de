"""Single matrix instructions recorded on this machine's GPU: `f8emu record OUT --instructions`.

`matrix.cu`, compiled at run time, executes each; `read_recordings` reads the file. An instruction that adds up small
integers wrongly is refused: its operands are then not where the hardware looks for them, and its bits no evidence.
"""

import ctypes
import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from f8emu import __version__
from f8emu.conformance.cases.container import write_container
from f8emu.conformance.cases.distributions import codes_of, dtype_of, rng
from f8emu.conformance.compare import different
from f8emu.conformance.record.cuda import CudaLauncher, Refused
from f8emu.conformance.record.instructions import (
    BESIDE_GEMMS,
    FORMATS_IN_FILES,
    instruction_subject,
    read_recordings,
)
from f8emu.conformance.record.record import SEED, tracked, writable
from f8emu.spec.chip import Chip, Instruction
from f8emu.spec.chips import ADA, BLACKWELL_MMA, BLACKWELL_TCGEN05, HOPPER, RTX_BLACKWELL
from f8emu.spec.errors import GoldenFileError, UnsupportedError
from f8emu.spec.formats import BFLOAT16, E5M2, FLOAT16, Format
from f8emu.spec.scaling import MX_BLOCK

CASES = 2048  # of each pair of formats and K; every kind has the same share
KINDS = ("bits", "normal", "sparse", "cancellation", "subnormals", "large", "tiny", "integers")
_PROFILES = {8: (ADA,), 9: (HOPPER,), 10: (BLACKWELL_MMA, BLACKWELL_TCGEN05), 12: (RTX_BLACKWELL,)}  # by capability
_NAMES = {format: name for name, format in FORMATS_IN_FILES.items()}
_LARGE_C = np.array([np.inf, -np.inf, np.nan, 65504, -65504, 65519, 3.4e38, -3.4e38], np.float32)


class Single(NamedTuple):
    """One instruction with one pair of formats."""

    chip: Chip
    instruction: Instruction
    formats: tuple[Format, Format]

    def __str__(self) -> str:
        return f"{self.instruction.name} {' x '.join(_NAMES[f] for f in self.formats)} -> {self.instruction.out}"

    @property
    def k(self) -> int:
        """K of one instruction: 32 bytes."""
        return 256 // self.formats[0].bits

    @property
    def threads(self) -> int:
        """A warpgroup, or a warp."""
        return 128 if self.instruction.name.startswith(("wgmma", "tcgen05")) else 32

    def source(self) -> str:
        """CUDA C++ that includes nothing."""
        name, is_scaled, out = self.instruction.name, self.instruction.is_microscaled, self.instruction.out
        a, b = (_NAMES[format].lower() for format in self.formats)
        types, scales, is_float8 = f"{out.name[0]}{out.bits}.{a}.{b}", "block_scale.scale_vec::1X", a != "bf16"
        kind, tail, descriptor = "MMA", ", {%8}, {%10,%10}, {%9}, {%10,%10}" if is_scaled else "", 0
        if name.startswith("tcgen05"):
            of_float8 = f"mxf8f6f4.{scales}" if is_scaled else "f8f6f4"
            kind, tail = "TCGEN05", ", [%4], [%5]" if is_scaled else ""
            ptx = f"tcgen05.mma.cta_group::1.kind::{of_float8 if is_float8 else 'f16'}"
            # [PTX ISA, instruction descriptor] float32 or E8M0, formats of A and B, N = 16, M = 128
            code_a, code_b = (int(format in (E5M2, BFLOAT16)) for format in self.formats)
            descriptor = 1 << 23 if is_scaled else int(out != FLOAT16) << 4
            descriptor |= code_a << 7 | code_b << 10 | 16 // 8 << 17 | 128 // 16 << 24
        elif name == "wgmma":
            kind, ptx = "WGMMA", f"wgmma.mma_async.sync.aligned.m64n8k{self.k}.{types}"
            tail = "" if is_float8 else ", 0"  # b is not transposed
        else:
            new = f"kind::{f'mxf8f6f4.{scales}' if is_scaled else 'f8f6f4'}."
            new = new if is_float8 and self.chip == RTX_BLACKWELL else ""
            ptx = f"mma.sync.aligned.{new}m16n8k{self.k}.row.col.{types}.{types[:3]}{'.ue8m0' if is_scaled else ''}"
        macros = {"KIND": kind, "IS_HALF": int(out == FLOAT16), "IS_SCALED": int(is_scaled), "IDESC": f"{descriptor}u"}
        registers = " {%0,%1}" if out == FLOAT16 else " {%0,%1,%2,%3}"
        macros |= {"PTX": json.dumps(ptx), "TAIL": json.dumps(tail), "X": json.dumps(registers)}
        lines = [f"#define {macro} {value}" for macro, value in macros.items()]
        return "\n".join([*lines, Path(__file__).with_name("matrix.cu").read_text(encoding="utf-8")])


def singles(capability: tuple[int, int]) -> tuple[Single, ...]:
    """The instructions of a GPU of this compute capability: those of its profiles, and those that no GEMM uses."""
    profiles = _PROFILES.get(capability[0], ())
    known = ((chip, i) for chip in profiles for i in (*chip.instructions, *BESIDE_GEMMS.get(chip.name, ())))
    return tuple(Single(chip, i, pair) for chip, i in known for pair in i.format_pairs)


class GpuInstructions:
    """Runs single instructions on the current CUDA device."""

    def __init__(self) -> None:
        self.launcher = CudaLauncher()
        import torch

        self.capability = torch.cuda.get_device_capability()
        if not hasattr(torch.cuda, "_compile_kernel"):
            why = (
                f"needs torch.cuda._compile_kernel, which torch {torch.__version__} has not; torch 2.11 to 2.13 have it"
            )
            raise UnsupportedError(f"record --instructions: {why}")
        # torch asks for NVRTC by name, which the loader may find neither in the wheel nor, later, its other half.
        for name in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):
            for library in Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"):
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    def metadata(self) -> dict[str, str]:
        return self.launcher.metadata()

    def __call__(self, single: Single, cases: dict[str, np.ndarray]) -> np.ndarray | Refused:
        """The codes of d, [cases] uint32, of two runs with the same bits; or why there are none."""
        import torch

        count, k = cases["a"].shape
        arch = "{}{}".format(*self.capability) + ("a" if self.capability >= (9, 0) else "")
        with np.errstate(over="ignore", invalid="ignore"):  # c in the format of the accumulator, in 32 bits
            c = codes_of(cases["c"].view(np.float32).astype(dtype_of(single.instruction.out))).astype(np.int32)
        no_scales = np.zeros(1, np.uint8)
        arrays = [cases["a"], cases["b"], c, *(cases.get(f"scale_{side}", no_scales) for side in "ab")]
        try:
            kernel = torch.cuda._compile_kernel(single.source(), "instruction", compute_capability=arch)
            operands = [torch.from_numpy(array.view(np.uint8)).cuda() for array in arrays]
            results = torch.zeros((2, count), dtype=torch.int32, device="cuda")
            for d in results:  # a block takes eight cases
                kernel((count // 8, 1, 1), (single.threads, 1, 1), [*operands, d, k * cases["a"].itemsize])
            first, second = results.cpu().numpy().view(np.uint32)
        except (RuntimeError, OSError) as error:
            advice = "; no header is read: set CUDA_HOME to any directory" if "CUDA_HOME" in str(error) else ""
            return Refused(" ".join(str(error).split())[:300] + advice)
        return first if (first == second).all() else Refused("two runs gave different bits")


def drawn(formats: tuple[Format, Format], k: int, *key: object, is_microscaled: bool) -> dict[str, np.ndarray]:
    """Codes a and b [CASES, K], c [CASES] in float32 bits, and E8M0 scales [CASES, K / 32]: as a file has them."""
    parts = [_drawn(kind, formats, k, rng(kind, k, *key)) for kind in KINDS]
    roles = ("a", "b", "c", "scale_a", "scale_b") if is_microscaled else ("a", "b", "c")
    return {role: np.concatenate([part[role] for part in parts]) for role in roles}


def _drawn(kind: str, formats: tuple[Format, Format], k: int, r: np.random.Generator) -> dict[str, np.ndarray]:
    shape = rows, _ = CASES // len(KINDS), k
    a, b = (_operand(kind, side, format, shape, r) for side, format in enumerate(formats))
    # 1. c: zeros of both signs, values of any magnitude, subnormal in float32 and in float16, any bits
    magnitudes = [0, *(np.exp2(r.integers(low, high, rows)) for low, high in ((-30, 20), (-149, -126), (-24, -14)))]
    values = [(r.choice([-1.0, 1.0], rows) * r.uniform(1, 2, rows) * x).astype(np.float32) for x in magnitudes]
    bits = np.choose(r.integers(0, 5, rows), [*(x.view(np.uint32) for x in values), r.integers(0, 1 << 32, rows)])
    c = bits.astype(np.uint32)
    if kind == "large":
        c = r.choice(_LARGE_C, rows).view(np.uint32)
    elif kind == "integers":
        c = r.integers(-8, 9, rows).astype(np.float32).view(np.uint32)
    elif kind == "tiny":
        c[r.random(rows) < 0.75] = 0
    # 2. Scales: every byte; or near 1; or so that products are about 2^-145, where a zero's exponent shows [MX-3]
    blocks = rows, -(-k // MX_BLOCK)
    scale_a, scale_b = r.integers(0, 256, (2, *blocks))
    if kind == "tiny":
        scale_a = r.integers(52, 78, blocks)
        scale_b = 254 - scale_a + r.integers(-150, -138, blocks)
    elif kind not in ("bits", "subnormals", "large"):
        low, high = (126, 130) if kind == "integers" else (115, 140)
        scale_a, scale_b = r.integers(low, high, (2, *blocks))
    scales = {"scale_a": scale_a.astype(np.uint8), "scale_b": scale_b.astype(np.uint8)}
    return {"a": a, "b": b, "c": c, **scales}


def _operand(kind: str, side: int, format: Format, shape: tuple[int, int], r: np.random.Generator) -> np.ndarray:
    # Codes of one operand; `side` is 1 for b.
    codes = r.integers(0, 1 << format.bits, shape).astype(f"u{format.bits // 8}")
    if kind == "subnormals":
        return codes & np.array(format.sign_mask | format.fraction_mask, codes.dtype)
    if kind == "bits":  # every eighth row with NaN and infinity too; bfloat16 within 32 binades, sums being finite
        if format == BFLOAT16:
            codes = (codes & 0x807F) | (r.integers(111, 143, shape) << 7).astype(np.uint16)
        is_finite = (codes & format.magnitude_mask) <= format.max_code
        is_kept = is_finite | (np.arange(len(codes)) % 8 == 0)[:, None]
        return np.where(is_kept, codes, codes & np.array(format.fraction_mask, codes.dtype))
    x = r.standard_normal(shape) * np.exp2(r.integers(-3, 4, (len(codes), 1)))
    if kind == "sparse":
        x *= r.random(shape) < 0.15
    elif kind == "cancellation":  # each pair of products cancels, but for the last bit of some
        x[:, 1::2] = x[:, ::2] * (-1) ** side * (1 + r.choice([0, 0, 2.0**-format.fraction_bits], x[:, ::2].shape))
    elif kind == "large":  # sums overflow float16
        x = np.sign(x) * r.uniform(0.5, 1, shape) * min(format.max, 2.0**14)
    elif kind == "integers":
        x = np.trunc(r.uniform(-3, 3, shape))
    elif kind == "tiny":
        # A power of two below 2^-124 and terms below 2^-150, of which a zero's exponent decides what is left [MX-3];
        # under float8 the scales make them so small.
        low, first = r.integers(-9, r.choice([-4, 1], (len(codes), 1)), shape), np.zeros(len(codes))
        if format == BFLOAT16:  # a: 2^-61
            low = r.integers(-172, r.choice([-158, -150], (len(codes), 1)), shape) + 61 if side else -61
            first = r.integers(-149, -124, len(codes)) + 61 if side else -61
        x = np.sign(x) * r.uniform(1, 2, shape) * np.exp2(np.float64(low)) * (r.random(shape) < 0.7)
        x[:, 0] = r.choice([-1, 1], len(codes)) * np.exp2(np.float64(first))
    return codes_of(x.astype(np.float32).astype(dtype_of(format)))


def _adds_integers(cases: dict[str, np.ndarray], d: np.ndarray, single: Single) -> bool:
    # Whether the last kind of cases has the sums that any instruction gives.
    some = slice(-(CASES // len(KINDS)), None)
    a, b = (
        cases[role][some].view(dtype_of(f)).astype(np.float64) for role, f in zip("ab", single.formats, strict=True)
    )
    if "scale_a" in cases:
        total = cases["scale_a"][some].astype(int) + cases["scale_b"][some] - 254
        a = a * np.exp2(np.repeat(total, MX_BLOCK, axis=1))
    sums = (a * b).sum(axis=1) + cases["c"][some].view(np.float32)
    return np.array_equal(_typed(d[some], single.instruction.out).astype(np.float64), sums)


def _typed(d: np.ndarray, out: Format) -> np.ndarray:
    return d.astype(f"u{out.bits // 8}").view(dtype_of(out))


class InstructionsRecording(NamedTuple):
    """The outcome of a recording."""

    path: Path
    device: str
    outputs: dict[str, list[int]]  # instruction -> outputs, those that differ
    refused: dict[str, str]  # instruction -> reason
    kinds: dict[str, Counter[str]] | None  # instruction -> kinds of cases that differ; None: not compared

    @property
    def has_difference(self) -> bool:
        return any(differ for _, differ in self.outputs.values())

    def lines(self) -> list[str]:
        total = sum(count for count, _ in self.outputs.values())
        lines = [f"{self.path}: {len(self.outputs)} instructions, {total} outputs, recorded on {self.device}"]
        lines += [f"not recorded: {name}: {reason}" for name, reason in self.refused.items()]
        if self.kinds is None:
            return [*lines, f"not compared; to do so: f8emu verify --recordings {self.path}"]
        lines += [f"{'instruction':<50}{'cases':>7}{'equal':>10}{'differ':>9}"]
        for name, (count, differ) in self.outputs.items():
            lines.append(f"{name:<50}{count:>7}{count - differ:>10}{differ:>9}")
            if differ:
                lines.append("  differ: " + ", ".join(f"{n} {kind}" for kind, n in self.kinds[name].most_common()))
        return lines


def record_instructions(
    path: str | Path, *, seed: int = SEED, check: bool = False, gpu: GpuInstructions | None = None
) -> InstructionsRecording:
    """Runs every instruction of this machine's GPU, one and two in a row, and writes a file of recordings.

    With `check`, the file is read back and f8ref.numpy's `mma` compared with it.
    """
    path, run = writable(path, GoldenFileError), GpuInstructions() if gpu is None else gpu
    facts = run.metadata()
    tensors, refused, outputs = dict[str, np.ndarray](), dict[str, str](), dict[str, list[int]]()
    planned = [(single, repeats * single.k) for single in singles(run.capability) for repeats in (1, 2)]
    for single, k in tracked(planned, "recording", len(planned)):
        pair, is_scaled = "x".join(_NAMES[format] for format in single.formats), single.instruction.is_microscaled
        where = f"{single.chip.name}.{single.instruction.name}.{pair}.K{k}"
        # Both accumulators have the same operands: the file has them once.
        cases = drawn(single.formats, k, seed, where, is_microscaled=is_scaled)
        d = run(single, cases)
        if not isinstance(d, Refused) and not _adds_integers(cases, d, single):
            d = Refused("small integers are added up wrongly: the kernel does not fit this chip")
        if isinstance(d, Refused):
            refused[f"{single}, K={k}"] = d.reason
            continue
        role = "d_float16" if single.instruction.out == FLOAT16 else "d"
        stored = {**cases, role: codes_of(_typed(d, single.instruction.out))}
        tensors |= {f"{where}.{name}": array for name, array in stored.items()}
        outputs.setdefault(str(single), [0, 0])[0] += len(d)
    if not tensors:
        why = next(iter(refused.values()), "no instruction is known of its compute capability")
        raise GoldenFileError(f"record: no instruction was recorded, first: {why}; nothing is written")
    metadata = {**facts, "seed": str(seed), "f8emu": __version__, "kinds": ", ".join(KINDS)}
    write_container(path, tensors, {**metadata, "refused": json.dumps(refused)})
    kinds = dict[str, Counter[str]]()
    for recording in read_recordings(path).recordings if check else ():
        instruction = next(i for i in recording.chip.instructions if i.out == recording.out)
        name = str(Single(recording.chip, instruction, recording.formats))
        wrong = different(recording.run(instruction_subject("f8ref.numpy"))[""], recording.d)
        outputs[name][1] += int(wrong.sum())
        kinds.setdefault(name, Counter()).update(KINDS[i * len(KINDS) // CASES] for i in np.flatnonzero(wrong))
    return InstructionsRecording(path, facts["device"], outputs, refused, kinds if check else None)
