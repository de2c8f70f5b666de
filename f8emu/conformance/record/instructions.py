"""Recordings of single instructions replayed: `d = dot(a, b) + c`, any recorded file against the profiles of chips.

A file is a safetensors container with tensors `CHIP.FORMAT.a` and `.b` (codes [cases, K], uint8 or uint16), `.c` and
`.d` (float32 bit patterns [cases], uint32) and, of an instruction with a float16 accumulator, `.d_float16` (uint16)
beside `.d` or in its place. CHIP is a name of `PROFILES` or one that the caller adds, FORMAT one of `FORMATS_IN_FILES`.

A public collection lost the upper halves of the float32 numbers as which it stored float16 results: there `.d_float16`
is the lower halves. Metadata `d_float16` says what it is, `codes` or `low halves`. Without it the operands tell: it is
low halves if bits are zero that are zero in these, and most are nowhere near the sums as codes.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from f8emu.conformance.arrays import jax_arrays, travelling
from f8emu.conformance.cases.container import LARGEST_FILE, decode_container
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.golden import GoldenFile
from f8emu.conformance.compare import abbreviated, hexadecimal
from f8emu.conformance.run.check import Case, Parts
from f8emu.conformance.run.oracle import exact_subject
from f8emu.conformance.run.result import Progress, Result
from f8emu.conformance.run.stages import Stage
from f8emu.conformance.run.subject import Subject, load_subject
from f8emu.conformance.run.verify import verify
from f8emu.spec import (
    ADA,
    BFLOAT16,
    BLACKWELL_MMA,
    CHIPS,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FLOAT16,
    FLOAT32,
    HOPPER,
    Chip,
    Format,
    GoldenFileError,
    SpecError,
)
from f8emu.untrusted import read_regular

FORMATS_IN_FILES: dict[str, Format] = {
    "E4M3": E4M3FN,
    "E5M2": E5M2,
    "bf16": BFLOAT16,
    "E4M3FNUZ": E4M3FNUZ,
    "E5M2FNUZ": E5M2FNUZ,
}
PROFILES: dict[str, Chip] = {"H200": HOPPER, "L40S": ADA, "B200": BLACKWELL_MMA, **CHIPS}
"""Names of chips in files -> their profiles."""
SUBJECTS = ("f8ref.numpy", "f8ref.jax", "f8ref.exact")
EXACT_CASES = 100
"""So many of each recording are put to f8ref.exact, which computes one scalar at a time."""
LONGEST_K = 4096
_CALL = "read_recordings"
_REMEDY = "give a file in the layout of f8emu.conformance.record.instructions"
_ROLES = {"a": 2, "b": 2, "c": 1, "d": 1, "d_float16": 1}
"""Role -> dimensions."""
_STARTS_FROM_ZERO = ("wgmma",)
"""Instructions that were recorded with the option to leave c out."""
_ZEROS_IN_LOW_HALF = 0x1FFF
_CODES, _LOW_HALVES = "codes", "low halves"
_NEAR = 2.0**-8
"""The tolerance, as a share of the sum of absolute products: what is cut from a result, with float16's rounding, is
less."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedInstruction:
    """One instruction of one chip, many cases."""

    chip_name: str
    """The chip's name in the file."""
    chip: Chip
    format: Format
    out: Format
    a: np.ndarray
    b: np.ndarray
    """Typed, [cases, K]."""
    c: np.ndarray
    """The addend in format `out`, [cases]."""
    d: np.ndarray
    """The result in format `out`, [cases]; uint16 with `keeps_low_half`."""
    keeps_low_half: bool = False
    """The file has the low half of the float16 result's float32 pattern: three bits, of a normal one."""

    @property
    def id(self) -> str:
        kept = ", low half of its float32 pattern" if self.keeps_low_half else ""
        return f"{self.chip_name} {self.format} K={self.a.shape[1]} -> {self.out}{kept} by the profile of {self.chip}"

    def part(self, cases: slice) -> "RecordedInstruction":
        """Some of the cases."""
        return replace(self, a=self.a[cases], b=self.b[cases], c=self.c[cases], d=self.d[cases])

    def describe(self, part: str, index: tuple[int, ...]) -> str:
        """The operands of one case, as hex."""
        a, b, c = (x[index[0]] for x in (self.a, self.b, self.c))
        return f"{abbreviated(a, 'a')} {abbreviated(b, 'b')} c={hexadecimal(c)}"

    def run(self, subject: Subject) -> Parts:
        """What a subject's `mma` gives, in the form of `d`."""
        found = subject.verbs["mma"](self.a, self.b, self.c, chip=self.chip, out_dtype=self.out)
        if self.keeps_low_half:
            found = (found.astype(np.float32).view(np.uint32) & 0xFFFF).astype(np.uint16)
        return {"": found}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingsFile:
    """A whole file."""

    path: Path
    sha256: str
    metadata: dict[str, str]
    recordings: tuple[RecordedInstruction, ...]

    def cases(self, subject: Subject, golden: GoldenFile) -> Iterator[Case]:
        """What is put to a subject of the stage that replays it."""
        for recording in self.recordings:
            if subject.name == "f8ref.exact":
                recording = recording.part(slice(None, None, max(1, len(recording.d) // EXACT_CASES)))
            one = {"run": recording.run, "describe": recording.describe}
            yield Case(id=recording.id, recorded={"": recording.d}, **one)


def read_recordings(path: str | Path, chips: Mapping[str, str] | None = None) -> RecordingsFile:
    """A file of recorded instructions; `chips` adds names of chips in the file -> names of profiles.

    Raises:
        GoldenFileError: missing, huge, cut short, foreign or inconsistent; the message says where and what to do.
        SpecError: a name in `chips` that is no profile.
    """
    path = Path(path)
    profiles = dict(PROFILES)
    for name, profile in (chips or {}).items():
        if profile not in CHIPS:
            known = ", ".join(CHIPS)
            raise SpecError(f"verify --chip {name}={profile}: expected PROFILE to be one of {known}; got {profile!r}")
        profiles[name] = CHIPS[profile]
    try:
        blob = read_regular(path, LARGEST_FILE)
    except OSError as error:
        raise GoldenFileError(f"{_CALL}: cannot read {path}: {error.strerror}; {_REMEDY}") from None
    tensors, metadata = decode_container(blob, str(path), call=_CALL, remedy=_REMEDY)
    groups: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for key, tensor in tensors.items():
        chip, _, rest = key.partition(".")
        name, _, role = rest.partition(".")
        if role not in _ROLES or name not in FORMATS_IN_FILES:
            known = f"CHIP.FORMAT.ROLE with FORMAT {', '.join(FORMATS_IN_FILES)} and ROLE {', '.join(_ROLES)}"
            raise _fault(path, f"tensors called {known}", repr(key[:80]))
        groups.setdefault((chip, name), {})[role] = tensor
    said = metadata.get("d_float16")
    if said not in (None, _CODES, _LOW_HALVES):
        raise _fault(path, f"metadata 'd_float16' to be {_CODES!r} or {_LOW_HALVES!r}", repr(said)[:80])
    found = [r for (chip, name), group in groups.items() for r in _recordings(path, chip, name, group, profiles, said)]
    if not found:
        raise _fault(path, "at least one recording", "no tensors")
    return RecordingsFile(
        path=path, sha256=hashlib.sha256(blob).hexdigest(), metadata=metadata, recordings=tuple(found)
    )


def instruction_subject(name: str) -> Subject:
    """f8ref.numpy, f8ref.jax or f8ref.exact with the verb `mma`.

    Raises:
        SpecError: another name.
        MissingExtraError: jax is needed and not installed.
    """
    if name not in SUBJECTS:
        raise SpecError(f"verify --recordings: subjects are {', '.join(SUBJECTS)}; got {name!r}; leave the others out")
    if name == "f8ref.exact":
        subject, mma = exact_subject(), _exact_mma
    elif name == "f8ref.jax":
        import f8ref.jax

        subject, mma = load_subject(name), travelling(jax_arrays("f8emu verify f8ref.jax"), f8ref.jax.mma)
    else:
        import f8ref.numpy

        subject, mma = load_subject(name), f8ref.numpy.mma
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
    path: Path,
    chip_name: str,
    name: str,
    group: Mapping[str, np.ndarray],
    profiles: Mapping[str, Chip],
    said: str | None,
) -> Iterator[RecordedInstruction]:
    """The float32 and the float16 results of one chip and format; `said` of the latter by the metadata."""
    where, format = f"{chip_name}.{name}", FORMATS_IN_FILES[name]
    if chip_name not in profiles:
        raise GoldenFileError(
            f"{_CALL}: {path}: expected chips among {', '.join(profiles)}; found {chip_name!r}; say which "
            f"profile it is with --chip {chip_name}=PROFILE, PROFILE one of {', '.join(CHIPS)}"
        )
    # 1. The roles that a recording needs, all with one number of cases.
    missing = [role for role in ("a", "b", "c") if role not in group]
    if missing or not ({"d", "d_float16"} & group.keys()):
        raise _fault(path, f"tensors {where}.a, .b, .c and .d or .d_float16", f"{', '.join(group)} alone")
    cases, k = group["a"].shape if group["a"].ndim == 2 else (0, 0)
    if not (cases and 1 <= k <= LONGEST_K):
        raise _fault(path, f"{where}.a of [cases, K], K from 1 to {LONGEST_K}", str(list(group["a"].shape)))
    for role, tensor in group.items():
        bits = {"a": format.bits, "b": format.bits, "d_float16": 16}.get(role, 32)
        shape = (cases, k)[: _ROLES[role]]
        if tensor.dtype != f"u{bits // 8}" or tensor.shape != shape:
            expected, observed = f"uint{bits}{list(shape)}", f"{tensor.dtype}{list(tensor.shape)}"
            raise _fault(path, f"{where}.{role} {expected}", observed)

    # 2. One recording for each type of the result; an instruction that starts from zero ignores c.
    chip = profiles[chip_name]
    a, b = (group[role].view(dtype_of(format)) for role in "ab")
    c = group["c"].view(np.float32)
    for role, out in (("d", FLOAT32), ("d_float16", FLOAT16)):
        if role not in group:
            continue
        instruction = chip.instruction(f"{_CALL}: {where}.{role}", (format, format), out)
        start = np.zeros_like(c) if instruction.name in _STARTS_FROM_ZERO else c
        is_low_half = role == "d_float16" and said != _CODES
        is_low_half = is_low_half and (said is not None or _are_low_halves(group[role], a, b, start))
        with np.errstate(over="ignore"):
            start = start.astype(dtype_of(out))
        d = group[role] if is_low_half else group[role].view(dtype_of(out))
        yield RecordedInstruction(
            chip_name=chip_name, chip=chip, format=format, out=out, a=a, b=b, c=start, d=d, keeps_low_half=is_low_half
        )


def _are_low_halves(halves: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> bool:
    """Whether float16 results can only be lower halves of float32 numbers: bits 0 to 12 of these are zeros.

    So are those of float16 codes that are powers of two or zeros. Then most of them must be near `dot(a, b) + c`.
    """
    if (halves & _ZEROS_IN_LOW_HALF).any():
        return False
    with np.errstate(invalid="ignore", over="ignore"):
        products = a.astype(np.float64) * b.astype(np.float64)
        sums = products.sum(axis=1) + c.astype(np.float64)
        size = np.abs(products).sum(axis=1) + np.abs(c.astype(np.float64))
        near = np.abs(halves.view(np.float16).astype(np.float64) - sums) <= _NEAR * size
    return 2 * int(np.count_nonzero(near)) < len(halves)


def _exact_mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, *, chip: Chip, out_dtype: Format) -> np.ndarray:
    import f8ref.exact

    options: dict[str, Any] = {"chip": chip, "out_format": out_dtype}
    formats = {dtype_of(format): format for format in FORMATS_IN_FILES.values()}
    options |= {"a_format": formats[a.dtype], "b_format": formats[b.dtype]}
    code_dtype = np.dtype(f"u{out_dtype.bits // 8}")
    operands = (x.view(f"u{x.dtype.itemsize}").tolist() for x in (a, b, c))
    found = [f8ref.exact.mma(*case, **options) for case in zip(*operands, strict=True)]
    return np.array(found, code_dtype).view(dtype_of(out_dtype))


def _fault(path: Path, expected: str, observed: str) -> GoldenFileError:
    return GoldenFileError(f"{_CALL}: {path}: expected {expected}; found {observed}; {_REMEDY}")
