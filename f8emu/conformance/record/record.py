"""New golden cases, recorded on a GPU: `f8emu record OUT`.

Every GEMM of `record.cases` is put to the library. What it gives is stored in the format of `golden`, with the kernels
that ran and their grids; what it refuses is stored in the metadata as `refused`. No emulation takes part.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from f8emu import __version__
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.cases.golden import GoldenCase, read_golden, write_golden
from f8emu.conformance.compare import different
from f8emu.conformance.record.cases import PlannedCase, plan
from f8emu.conformance.record.cuda import CudaLauncher, Launched, Refused
from f8emu.conformance.run.result import StageResult, Status
from f8emu.conformance.run.subject import load_subject
from f8emu.conformance.run.verify import verify as run_suite
from f8emu.spec import F8Error, GoldenFileError

_T = TypeVar("_T")

# The seed of the operands. Another seed records other operands, and other distributions for each shape.
SEED = 20261122


class Launcher(Protocol):
    """What runs a GEMM; `CudaLauncher` unless a test takes its place."""

    def metadata(self) -> dict[str, str]: ...

    def __call__(self, gemm: GemmCase) -> Launched | Refused: ...


class GoldenRecording(NamedTuple):
    """What became of a recording."""

    path: Path
    device: str
    cases: int
    outputs: int
    refused: dict[str, list[str]]  # reason -> the GEMMs that the library did not run for it
    verified: StageResult | None  # f8ref.numpy against the new file; None if that was not requested

    @property
    def has_difference(self) -> bool:
        return self.verified is not None and self.verified.status is not Status.EQUAL

    def lines(self) -> list[str]:
        found = [f"{self.path}: {self.cases} cases, {self.outputs} outputs, recorded on {self.device}"]
        if self.refused:
            total = sum(map(len, self.refused.values()))
            found += [f"{total} not recorded, listed in the file under 'refused':"]
            found += [f"  {len(gemms)}, first {gemms[0]}: {reason}" for reason, gemms in self.refused.items()]
        if self.verified is None:
            return [*found, f"not verified; to do so: f8emu verify --golden {self.path}"]
        equal = self.verified
        found += [
            f"f8ref.numpy equals {equal.cases_equal} of {self.cases} cases, "
            f"{equal.outputs_equal} of {self.outputs} outputs"
        ]
        return found + [f"  {mismatch.line()}" for mismatch in equal.mismatches]


def record(
    path: str | Path,
    *,
    seed: int = SEED,
    verify: bool = False,
    launcher: Launcher | None = None,
    cases: Sequence[PlannedCase] | None = None,
) -> GoldenRecording:
    """Runs every planned GEMM on this machine's GPU and writes a golden file.

    With `verify`, the file is then read back and f8ref.numpy compared with it; a difference is a finding about this
    chip or library, and the file stays as it is.

    Raises:
        MissingExtraError: torch is not installed.
        UnsupportedError: no CUDA GPU with float8.
        GoldenFileError: the file cannot be written, or the library ran none of the cases.
    """
    # 1. Every planned GEMM, run or refused.
    path = writable(path, GoldenFileError)
    launch = CudaLauncher() if launcher is None else launcher
    planned = plan(seed) if cases is None else cases
    golden: list[GoldenCase] = []
    refused: list[dict[str, str]] = []
    for name, gemm in tracked(planned, "recording", len(planned)):
        result = launch(gemm)
        if isinstance(result, Launched):
            golden.append(GoldenCase(name=name, gemm=gemm, out=result.out, kernels=result.kernels))
        else:
            entry = {"id": gemm.id, "name": name, "mode": gemm.mode.value}
            refused.append({**entry, "gemm": _words(gemm), "reason": result.reason})
    if not golden:
        reason = refused[0]["reason"] if refused else "-"
        raise GoldenFileError(
            f"record: the library refused all {len(planned)} cases, first: {reason}; nothing is written"
        )
    # 2. The file, which is read back before anyone trusts it.
    facts = launch.metadata()
    metadata = {**facts, "seed": str(seed), "f8emu": __version__, "refused": json.dumps(refused)}
    write_golden(path, golden, metadata)
    stored = read_golden(path)
    for case, back in zip(golden, stored.cases, strict=True):
        assert not different(back.out, case.out).any(), f"{case.id} did not survive the file"
    # 3. The oracle's word on it, where that is requested.
    verified = None
    if verify:
        found = run_suite([load_subject("f8ref.numpy")], stages=["golden"], golden=stored, errors=len(golden))
        (verified,) = found.subjects[0].stages
    by_reason: dict[str, list[str]] = {}
    for entry in refused:
        by_reason.setdefault(entry["reason"], []).append(f"{entry['id']} {entry['name']} ({entry['gemm']})")
    outputs = sum(case.out.size for case in golden)
    return GoldenRecording(path, facts["device"], len(golden), outputs, by_reason, verified)


def _words(gemm: GemmCase) -> str:
    m, n = gemm.full_size
    dtypes = f"{gemm.a.dtype.name} x {gemm.b.dtype.name} -> {gemm.out_dtype}"
    chain = "" if gemm.mode is Mode.BF16 else f", use_fast_accum={gemm.use_fast_accum}"
    return f"{m} x {n} x {gemm.k}, {dtypes}{chain}"


def writable(path: str | Path, error: type[F8Error]) -> Path:
    """A path to write to, whose directory is there; if not, the error says so."""
    path = Path(path)
    if not path.parent.is_dir():
        raise error(f"record: cannot write {path}: no directory {path.parent}; make it first")
    return path


def tracked(items: Iterable[_T], title: str, total: int) -> Iterable[_T]:
    """The items, with a bar on standard error where rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    return track(items, title, total, console=Console(stderr=True), transient=True)
