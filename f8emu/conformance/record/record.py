"""New evidence, recorded on a GPU: `f8emu record OUT`, and S of more shapes, `f8emu record OUT --plans IN.json`.

Golden cases: every GEMM of `record.cases` is put to the library. What it gives is stored in the format of `golden`,
with the kernels that ran and their grids; what it refuses is stored in the metadata as `refused`. No emulation takes
part.

Plans: the library runs each shape once, and S is one with which `f8ref.numpy` gives the same bits: the predicted one if
it is among them, otherwise the smallest. Several are if they cut K into slices of the same length. In most GEMMs others
are too: a bfloat16 output hides almost every difference, and promoted partials of like magnitude are added exactly. So
the operands are made to show S: the magnitude changes from block to block, and the second half of K takes back the
first, so that what is left of a sum is what was cut and rounded away on the way.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from f8emu import __version__
from f8emu.conformance.cases.distributions import dtype_of
from f8emu.conformance.cases.gemm import GemmCase, Mode
from f8emu.conformance.cases.golden import GoldenCase, read_golden, write_golden
from f8emu.conformance.compare import different
from f8emu.conformance.record.cases import PlannedCase, plan
from f8emu.conformance.record.cuda import CudaLauncher, Launched, Refused
from f8emu.conformance.run.result import StageResult, Status
from f8emu.conformance.run.subject import load_subject
from f8emu.conformance.run.verify import verify as run_suite
from f8emu.environment import write_beside
from f8emu.spec import HOPPER, F8Error, GoldenFileError, SpecError
from f8emu.spec.scaling import BLOCK
from f8emu.split_k.gemm import PlannedGemm, Source
from f8emu.split_k.plan import CHIP, PLANS, plan_from_json, plan_to_json, shipped_plan
from f8emu.split_k.trees import SplitPlan

_T = TypeVar("_T")

# The seed of the operands. Another seed records other operands, and other distributions for each shape.
SEED = 20261122


class GoldenRecording(NamedTuple):
    """The outcome of a recording."""

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
        lines = [f"{self.path}: {self.cases} cases, {self.outputs} outputs, recorded on {self.device}"]
        if self.refused:
            total = sum(map(len, self.refused.values()))
            lines += [f"{total} not recorded, listed in the file under 'refused':"]
            lines += [f"  {len(gemms)}, first {gemms[0]}: {reason}" for reason, gemms in self.refused.items()]
        if self.verified is None:
            return [*lines, f"not verified; to do so: f8emu verify --golden {self.path}"]
        equal = self.verified
        outputs = f"{equal.outputs_equal} of {self.outputs} outputs"
        lines += [f"f8ref.numpy equals {equal.cases_equal} of {self.cases} cases, {outputs}"]
        return lines + [f"  {mismatch.line()}" for mismatch in equal.mismatches]


def record(
    path: str | Path,
    *,
    seed: int = SEED,
    only: str | None = None,
    verify: bool = False,
    launcher: CudaLauncher | None = None,
    cases: Sequence[PlannedCase] | None = None,
) -> GoldenRecording:
    """Runs every planned GEMM on this machine's GPU, or those of the section `only`, and writes a golden file.

    With `verify`, the file is then read back and f8ref.numpy compared with it; a difference is a finding about this
    chip or library, and the file stays as it is.
    """
    # 1. Every planned GEMM, run or refused.
    path = writable(path, GoldenFileError)
    launch = CudaLauncher() if launcher is None else launcher
    planned = plan(seed, only) if cases is None else cases
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
        judged = run_suite([load_subject("f8ref.numpy")], stages=["golden"], golden=stored, errors=len(golden))
        (verified,) = judged.subjects[0].stages
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


# Plans

COLUMNS = 16  # how many columns of b differ; the others repeat them
_MAX_SLICES = 64
_PLAN_SEED = 20261121


class PlanRecording(NamedTuple):
    """The outcome for the shapes that were requested."""

    path: Path
    plan: SplitPlan
    found: int
    predicted: int  # how many of the shapes found the shipped plan also predicts, if it is of the same library and chip
    predicted_right: int
    not_found: dict[str, list[str]]  # reason -> shapes

    def lines(self) -> list[str]:
        lines = [f"{self.path}: {self.found} shapes recorded on {self.plan.chip}, {self.plan.library}"]
        if self.predicted:
            lines += [f"the shipped rule predicts {self.predicted_right} of {self.predicted} of them"]
        for reason, shapes in self.not_found.items():
            lines += [f"{len(shapes)} not recorded, first {shapes[0]}: {reason}"]
        return lines


def record_plans(path: str | Path, gemms: Sequence[PlannedGemm], runner: CudaLauncher | None = None) -> PlanRecording:
    """Finds S of each GEMM on this machine's GPU and writes a plan file; one that is there already is added to."""
    # 1. The plan of this library and chip, with what an earlier run recorded.
    path = writable(path, SpecError)
    run = CudaLauncher() if runner is None else runner
    facts = run.metadata()
    known = SplitPlan(library=f"cuBLAS {facts['cublas']}", chip=facts["device"], torch=facts["torch"], recorded={})
    if path.exists():
        old = plan_from_json(path.read_text(encoding="utf-8"), str(path))
        if (old.library, old.chip) != (known.library, known.chip):
            raise SpecError(
                f"record: {path} holds shapes of {old.library} on {old.chip}; this is {known.library} on {known.chip}; "
                "write to another file"
            )
        known = replace(known, recorded=old.recorded)
    shipped = shipped_plan(known.chip if known.chip in PLANS else CHIP)
    is_shipped = (known.library, known.chip) == (shipped.library, shipped.chip)
    # 2. S of each shape; what the shipped plan predicts for the same library is a test of its rules.
    recorded = dict(known.recorded)
    not_found: dict[str, list[str]] = {}
    count, guesses = 0, list[bool]()
    for gemm in tracked(gemms, "recording", len(gemms)):
        guess = shipped.predicted(gemm)
        result = _split_k(gemm, run, guess.split_k)
        if isinstance(result, Refused):
            not_found.setdefault(result.reason, []).append(f"{gemm.m} x {gemm.n} x {gemm.k} {gemm.table}")
            continue
        count += 1
        if is_shipped and guess.source is Source.PREDICTED:
            guesses.append(guess.split_k == result)
        recorded[gemm.table, gemm.rows, gemm.n, gemm.k] = result
    known = replace(known, recorded=recorded)
    write_beside(path, plan_to_json(known).encode())
    return PlanRecording(path, known, count, len(guesses), sum(guesses), not_found)


def _split_k(gemm: PlannedGemm, run: CudaLauncher, guess: int) -> int | Refused:
    # One row is compared, which does not depend on M, N and the layout: a list of many shapes has few of them.
    kind = PlannedGemm(replace(gemm.call, sizes=(1, COLUMNS, gemm.k)))
    out = run.planned(gemm, *revealing_operands(kind))
    if isinstance(out, Refused):
        return out
    # S that cut K differently, the likeliest first, then ascending.
    multiple, lengths = HOPPER.accumulation(gemm.granularities).split_k_multiple, set[int]()
    for split_k in (guess, *range(1, _MAX_SLICES + 1)):
        length = -(-gemm.k // (split_k * multiple))
        if length not in lengths and not different(_row(kind, split_k), out).any():
            return split_k
        lengths.add(length)
    return Refused("no split-K gives these bits")


@lru_cache(maxsize=4096)
def _row(kind: PlannedGemm, split_k: int) -> np.ndarray:
    return emulated(kind, *revealing_operands(kind), split_k)


def emulated(gemm: PlannedGemm, a_K: np.ndarray, b_CK: np.ndarray, split_k: int) -> np.ndarray:
    """One row as `f8ref.numpy` computes it, [C]."""
    import f8ref.numpy as oracle

    out_dtype, pair = gemm.call.out, gemm.granularities
    if pair is None:
        return oracle.mm(a_K[None], b_CK.T, out_dtype=out_dtype, split_k=split_k)[0]
    return oracle.scaled_mm(
        a_K[None],
        b_CK.T,
        np.ones(pair[0].scale_shape(1, gemm.k), np.float32),
        np.ones(pair[1].scale_shape(len(b_CK), gemm.k), np.float32).T,
        granularity_a=pair[0],
        granularity_b=pair[1],
        out_dtype=out_dtype,
        use_fast_accum=gemm.call.use_fast_accum,
        split_k=split_k,
    )[0]


@lru_cache(maxsize=64)
def revealing_operands(gemm: PlannedGemm) -> tuple[np.ndarray, np.ndarray]:
    """A row of a, [K], and `COLUMNS` columns of b, [C, K], whose dot products are zero but for what is rounded away."""
    rng = np.random.default_rng(_PLAN_SEED)
    half = gemm.k // (2 * BLOCK) * BLOCK
    # 1. Blocks of one magnitude each. Under promotion one product a block, so that what is promoted is exact, and S
    # shows in the roundings of the float32 total alone.
    magnitude = np.repeat(np.exp2(rng.integers(-6, 8, size=half // BLOCK)), BLOCK)
    if gemm.granularities is not None and not gemm.call.use_fast_accum:
        magnitude[np.arange(half) % BLOCK != 0] = 0
    first_a = rng.uniform(1, 2, half) * magnitude
    first_b = rng.uniform(1, 2, (COLUMNS, half)) * magnitude * rng.choice([-1, 1], (COLUMNS, half))
    # 2. The same blocks again, in another order and with the other sign.
    order = rng.permutation(half // BLOCK)[:, None] * BLOCK + np.arange(BLOCK)
    a_K, b_CK = np.zeros(gemm.k), np.zeros((COLUMNS, gemm.k))
    a_K[: 2 * half] = np.concatenate([first_a, -first_a[order.ravel()]])
    b_CK[:, : 2 * half] = np.concatenate([first_b, first_b[:, order.ravel()]], axis=1)
    a_format, b_format = gemm.call.formats
    return a_K.astype(dtype_of(a_format)), b_CK.astype(dtype_of(b_format))
