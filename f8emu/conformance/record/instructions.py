"""Recordings of single instructions replayed: `d = dot(a, b) + c`, any recorded file against the profiles of chips.

A file is a safetensors container with tensors `CHIP.FORMAT.a` and `.b` (codes [cases, K], uint8 or uint16), `.c` and
`.d` (float32 bit patterns [cases], uint32) and, of an instruction with a float16 accumulator, `.d_float16` (uint16)
beside `.d` or in its place. CHIP is a name of `PROFILES` or one that the caller adds, FORMAT one of `FORMATS_IN_FILES`.

`f8emu record --instructions` writes `CHIP.INSTRUCTION.FORMATxFORMAT.Kn.ROLE`, which names the instruction and b's
format and may come in several K. Block scales are `.scale_a` and `.scale_b` (E8M0 bytes [cases, ceil(K / 32)]).

A public collection lost the upper halves of the float32 numbers as which it stored float16 results. Metadata
`d_float16` then says `low halves`; otherwise they are `codes`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from f8emu.conformance.arrays import jax_arrays, travelling
from f8emu.conformance.cases.container import read_container
from f8emu.conformance.cases.distributions import codes_of, dtype_of
from f8emu.conformance.cases.golden import GoldenFile
from f8emu.conformance.compare import abbreviated, hexadecimal
from f8emu.conformance.run.check import Case, Parts
from f8emu.conformance.run.oracle import exact_subject
from f8emu.conformance.run.result import Progress, Result
from f8emu.conformance.run.stages import Stage
from f8emu.conformance.run.subject import Subject, load_subject
from f8emu.conformance.run.verify import verify
from f8emu.spec.chip import Chip, Instruction, Rounding
from f8emu.spec.chips import ADA, BLACKWELL_MMA, CHIPS, HOPPER, chip_by_name
from f8emu.spec.errors import GoldenFileError, SpecError
from f8emu.spec.formats import BFLOAT16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0FNU, FLOAT16, FLOAT32, Format
from f8emu.spec.scaling import MX_BLOCK
from f8emu.strict import Fault, faults_as, require

FORMATS_IN_FILES: dict[str, Format] = {
    "E4M3": E4M3FN,
    "E5M2": E5M2,
    "bf16": BFLOAT16,
    "E4M3FNUZ": E4M3FNUZ,
    "E5M2FNUZ": E5M2FNUZ,
}
# Names of chips in files -> their profiles
PROFILES: dict[str, Chip] = {"H200": HOPPER, "L40S": ADA, "B200": BLACKWELL_MMA, **CHIPS}
SUBJECTS = ("f8ref.numpy", "f8ref.jax", "f8ref.exact")
EXACT_CASES = 100  # so many of each recording are put to f8ref.exact, which computes one scalar at a time
LONGEST_K = 4096
_CALL = "read_recordings"
_REMEDY = "give a file in the layout of f8emu.conformance.record.instructions"
_ROLES = {"a": 2, "b": 2, "c": 1, "d": 1, "d_float16": 1, "scale_a": 2, "scale_b": 2}  # role -> dimensions
_FORMAT, _ROLE = "|".join(FORMATS_IN_FILES), "|".join(_ROLES)
_KEY = re.compile(
    rf"(?P<chip>.+?)\.(?:(?P<name>(?:wg|tcgen05\.)?mma(?:\.block_scale)?|v_mfma)\.)?"
    rf"(?P<a>{_FORMAT})(?:x(?P<b>{_FORMAT}))?(?:\.K\d+)?\.(?P<role>{_ROLE})"
)
_HOPPER_FLOAT16 = replace(
    HOPPER.float8_fast, accumulator=FLOAT16, result_fraction_bits=10, rounding=Rounding.NEAREST_EVEN
)
_HOPPER_PAIRS, _BFLOAT16_PAIRS = (i.format_pairs for i in HOPPER.instructions[1:])
BESIDE_GEMMS: dict[str, tuple[Instruction, ...]] = {
    "Hopper": (
        Instruction(name="wgmma", format_pairs=_HOPPER_PAIRS, out=FLOAT16, model=_HOPPER_FLOAT16),
        Instruction(name="wgmma", format_pairs=_BFLOAT16_PAIRS, out=FLOAT32, model=HOPPER.bfloat16),
        Instruction(name="mma", format_pairs=_HOPPER_PAIRS, out=FLOAT32, model=BLACKWELL_MMA.instructions[0].model),
    )
}
"""Instructions of a chip that its profile leaves out: `mma` would take another with the same formats. A float16
accumulator of `wgmma` is as MMA-Sim 2.1.1 has it."""
_STARTS_FROM_ZERO = ("wgmma",)  # instructions that were recorded with the option to leave c out
_CODES, _LOW_HALVES = "codes", "low halves"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedInstruction:
    """One instruction of one chip, many cases."""

    chip_name: str  # the chip's name in the file
    chip: Chip  # with this instruction alone, if the file names it
    name: str  # the instruction's in the file; "" if it has none
    formats: tuple[Format, Format]
    out: Format
    a: np.ndarray
    b: np.ndarray  # typed, [cases, K]
    c: np.ndarray  # the addend in format `out`, [cases]
    d: np.ndarray  # the result in format `out`, [cases]; uint16 with `keeps_low_half`
    scales: tuple[np.ndarray, ...] = ()  # E8M0, [cases, ceil(K / 32)], of a block-scaled instruction
    keeps_low_half: bool = False
    """The file has the low half of the float16 result's float32 pattern: three bits, of a normal one."""

    @property
    def id(self) -> str:
        kept = ", low half of its float32 pattern" if self.keeps_low_half else ""
        pair = " x ".join(dict.fromkeys(format.name for format in self.formats))
        named = f"{self.chip_name} {self.name} {pair}" if self.name else f"{self.chip_name} {pair}"
        return f"{named} K={self.a.shape[1]} -> {self.out}{kept} by the profile of {self.chip}"

    def describe(self, part: str, index: tuple[int, ...]) -> str:
        a, b, c = (x[index[0]] for x in (self.a, self.b, self.c))
        scales = "".join(
            f" {abbreviated(x[index[0]], f'scale_{side}')}" for side, x in zip("ab", self.scales, strict=False)
        )
        return f"{abbreviated(a, 'a')} {abbreviated(b, 'b')} c={hexadecimal(c)}{scales}"

    def run(self, subject: Subject) -> Parts:
        result = subject.verbs["mma"](self.a, self.b, self.c, *self.scales, chip=self.chip, out_dtype=self.out)
        if self.keeps_low_half:
            result = (result.astype(np.float32).view(np.uint32) & 0xFFFF).astype(np.uint16)
        return {"": result}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingsFile:
    """A whole file."""

    path: Path
    sha256: str
    metadata: dict[str, str]
    recordings: tuple[RecordedInstruction, ...]

    def cases(self, subject: Subject, golden: GoldenFile) -> Iterator[Case]:
        for recording in self.recordings:
            if subject.name == "f8ref.exact":
                some = slice(None, None, max(1, len(recording.d) // EXACT_CASES))
                scales = tuple(scale[some] for scale in recording.scales)
                recording = replace(recording, scales=scales, **{x: getattr(recording, x)[some] for x in "abcd"})
            yield Case(id=recording.id, recorded={"": recording.d}, run=recording.run, describe=recording.describe)


def read_recordings(path: str | Path, chips: Mapping[str, str] | None = None) -> RecordingsFile:
    """A file of recorded instructions; `chips` adds names of chips in the file -> names of profiles."""
    path = Path(path)
    profiles = dict(PROFILES)
    for name, profile in (chips or {}).items():
        profiles[name] = chip_by_name(f"verify --chip {name}={profile}", profile)
    tensors, metadata, sha256 = read_container(path, _CALL, _REMEDY)
    groups: dict[str, tuple[re.Match[str], dict[str, np.ndarray]]] = {}
    with faults_as(GoldenFileError, _CALL, path, _REMEDY):
        for key, tensor in tensors.items():
            match = _KEY.fullmatch(key)
            known = f"CHIP.FORMAT.ROLE with FORMAT {', '.join(FORMATS_IN_FILES)} and ROLE {', '.join(_ROLES)}"
            if match is None:
                raise Fault(f"expected tensors called {known}; found {key!r}")
            groups.setdefault(key.removesuffix(f".{match['role']}"), (match, {}))[1][match["role"]] = tensor
        kind = metadata.get("d_float16", _CODES)
        is_kind = kind in (_CODES, _LOW_HALVES)
        require(is_kind, f"metadata 'd_float16' to be {_CODES!r} or {_LOW_HALVES!r}", repr(kind))
        recordings: list[RecordedInstruction] = []
        for where, (match, group) in groups.items():
            recordings += _recordings(where, match, group, profiles, kind)
        require(bool(recordings), "at least one recording", "no tensors")
    return RecordingsFile(path=path, sha256=sha256, metadata=metadata, recordings=tuple(recordings))


def instruction_subject(name: str) -> Subject:
    """f8ref.numpy, f8ref.jax or f8ref.exact with the verb `mma`."""
    if name not in SUBJECTS:
        raise SpecError(f"verify --recordings: subjects are {', '.join(SUBJECTS)}; got {name!r}; leave the others out")
    subject, mma = exact_subject() if name == "f8ref.exact" else load_subject(name), _exact_mma
    if name == "f8ref.jax":
        import f8ref.jax

        mma = travelling(jax_arrays("f8emu verify f8ref.jax"), f8ref.jax.mma)
    elif name == "f8ref.numpy":
        import f8ref.numpy

        mma = f8ref.numpy.mma
    return replace(subject, verbs={**subject.verbs, "mma": mma})


def replay(
    subjects: Sequence[Subject], file: RecordingsFile, *, errors: int = 20, progress: Progress | None = None
) -> Result:
    """Every recording put to every subject, each bit compared; f8ref.exact gets a sample of each."""
    chips = ", ".join(dict.fromkeys(recording.chip_name for recording in file.recordings))
    golden = GoldenFile(path=file.path, sha256=file.sha256, metadata={"device": chips, **file.metadata}, cases=())
    stage = Stage(name="instructions", title="recorded instructions", needs=("mma",), cases=file.cases, judge=None)
    return verify(subjects, only=[stage], golden=golden, errors=errors, progress=progress)


def _recordings(
    where: str, match: re.Match[str], group: Mapping[str, np.ndarray], profiles: Mapping[str, Chip], kind: str
) -> Iterator[RecordedInstruction]:
    """The float32 and the float16 results of one chip, instruction and formats; `kind` is that of the latter."""
    chip_name, name = match["chip"], match["name"] or ""
    formats = FORMATS_IN_FILES[match["a"]], FORMATS_IN_FILES[match["b"] or match["a"]]
    if chip_name not in profiles:
        raise Fault(
            f"expected chips among {', '.join(profiles)}; found {chip_name!r}; say which profile it is with "
            f"--chip {chip_name}=PROFILE, PROFILE one of {', '.join(CHIPS)}"
        )
    # 1. The roles that a recording needs, all with one number of cases.
    is_whole = {"a", "b", "c"} <= group.keys() and bool({"d", "d_float16"} & group.keys())
    require(is_whole, f"tensors {where}.a, .b, .c and .d or .d_float16", f"{', '.join(group)} alone")
    shape = group["a"].shape
    is_matrix = len(shape) == 2 and shape[0] > 0 and 1 <= shape[1] <= LONGEST_K
    require(is_matrix, f"{where}.a of [cases, K], K from 1 to {LONGEST_K}", list(shape))
    scales = [role for role in ("scale_a", "scale_b") if role in group]
    require(len(scales) != 1, f"tensors {where}.scale_a and .scale_b, or neither", f"{''.join(scales)} alone")
    blocks = shape[0], -(-shape[1] // MX_BLOCK)
    of_roles = {"a": (formats[0].bits, shape), "b": (formats[1].bits, shape), "d_float16": (16, shape[:1])}
    of_roles |= {role: (E8M0FNU.bits, blocks) for role in scales}
    for role, tensor in group.items():
        bits, sizes = of_roles.get(role, (32, shape[:1]))
        expected, actual = (f"uint{bits}", sizes), (tensor.dtype.name, tensor.shape)
        require(actual == expected, f"{where}.{role} {_text(expected)}", _text(actual))

    # 2. One recording for each type of the result; an unnamed instruction that starts from zero ignores c.
    a, b = (group[role].view(dtype_of(format)) for role, format in zip("ab", formats, strict=True))
    for role, out in (("d", FLOAT32), ("d_float16", FLOAT16)):
        if role not in group:
            continue
        chip = profiles[chip_name]
        if name:
            known = (*chip.instructions, *BESIDE_GEMMS.get(chip.name, ()))
            chip = replace(chip, instructions=tuple(i for i in known if i.name == name))
        options = {"is_microscaled": bool(scales)}
        instruction = chip.instruction(f"{_CALL}: {where}.{role}", formats, out, **options)
        c = group["c"].view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            starts_from_zero = not name and instruction.name in _STARTS_FROM_ZERO
            c = (np.zeros_like(c) if starts_from_zero else c).astype(dtype_of(out))
        is_low_half = role == "d_float16" and kind == _LOW_HALVES
        yield RecordedInstruction(
            chip_name=chip_name,
            chip=chip,
            name=name,
            formats=formats,
            out=out,
            a=a,
            b=b,
            c=c,
            d=group[role] if is_low_half else group[role].view(dtype_of(out)),
            scales=tuple(group[role].view(dtype_of(E8M0FNU)) for role in scales),
            keeps_low_half=is_low_half,
        )


def _text(array: tuple[str, tuple[int, ...]]) -> str:
    return f"{array[0]}{list(array[1])}"


def _exact_mma(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, *scales: np.ndarray, chip: Chip, out_dtype: Format
) -> np.ndarray:
    import f8ref.exact

    formats = {dtype_of(format): format for format in FORMATS_IN_FILES.values()}
    of_operands = {"a_format": formats[a.dtype], "b_format": formats[b.dtype], "out_format": out_dtype}
    cases = zip(*(codes_of(x).tolist() for x in (a, b, c, *scales)), strict=True)
    roles = ("scale_a", "scale_b")[: len(scales)]
    codes = [
        f8ref.exact.mma(*case[:3], chip=chip, **of_operands, **dict(zip(roles, case[3:], strict=True)))
        for case in cases
    ]
    return np.array(codes, f"u{out_dtype.bits // 8}").view(dtype_of(out_dtype))
