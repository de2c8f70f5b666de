"""The suite sees bugs of the engine: one line of its C is wrong, and `f8emu verify` says different."""

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from f8emu.conformance import Status, Subject, load_subject, verify
from f8emu.conformance.cases.gemm import Family, Mode
from f8emu.conformance.run.extra_gemms import engine_cases
from f8emu.conformance.run.verify import stages_by_name
from f8emu.native import library
from f8emu.numpy import emulation

COMPILER = shutil.which("gcc") or shutil.which("clang")
SOURCES = Path(library.__file__).with_name("src")
if library.unavailable() or COMPILER is None or not SOURCES.is_dir():
    pytest.skip("needs the engine, its sources and a compiler", allow_module_level=True)
WIDTH = library.widths()[0].lower().replace("-", "")
"""The source of the fastest width."""
BUGS = {
    "nothing": ("gemm.c", "", ""),
    "ACC-2 subnormals normalised": ("kernel.h", "field = field < 1 ? 1 : field;", ""),
    "ACC-3 the accumulator is cut one place higher": ("kernel.h", "(2 * BIAS + 13u)", "(2 * BIAS + 12u)"),
    "ACC-5 one place more": ("kernel.h", "0xFFFFFC00", "0xFFFFFE00"),
    "ACC-3 terms of bfloat16 are cut one place higher": (
        "kernel.h",
        "of_unit = vi_all(BIAS + bits)",
        "of_unit = vi_all(BIAS + bits - 1)",
    ),
    "CHAIN-2 promotion every 256": (
        "gemm.c",
        "BLOCK_K : gemm->model->promote_k;",
        "BLOCK_K : 2 * gemm->model->promote_k;",
    ),
    "CHAIN-2 the last promotion is left out": (
        "gemm.c",
        "(end - slice) % promoted == 0 || end == slice_end",
        "(end - slice) % promoted == 0",
    ),
    "CHAIN-3 totals go on in the next slice": (
        "gemm.c",
        "if (promotion_k(gemm)) memset(space->totals, 0, bytes);",
        "if (promotion_k(gemm) && !slice) memset(space->totals, 0, bytes);",
    ),
    "SPEC-1 numbers this large are apart": ("kernel.h", "LARGEST_NARROW = 230", "LARGEST_NARROW = 256"),
    "EPI-1 -0": ("gemm.c", "(of_row * terms->scale[n]) + 0.0f", "(of_row * terms->scale[n])"),
    "EPI-2 the scale of the row first": ("gemm.c", "(x * terms->scale[n]) * of_row", "(x * of_row) * terms->scale[n]"),
    "EPI-3 a bias of one column for all": ("gemm.c", "at * gemm->bias_stride)", "column * gemm->bias_stride)"),
    "EPI-4 NaN is rounded": ("gemm.c", "if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;", ""),
    "EPI-5 squares scale one after another": (
        "kernel.h",
        "fmaf(partial[n], of_a * of_b[n], total[n])",
        "fmaf(partial[n] * of_a, of_b[n], total[n])",
    ),
    "EPI-5 rounded twice": (
        "kernel.h",
        "fmaf(partial[n] * of_a, of_b[n], total[n])",
        "partial[n] * of_a * of_b[n] + total[n]",
    ),
    "EPI-6 the scale of the column first": (
        "gemm.c",
        "(x * of_row) * terms->scale[n]",
        "(x * terms->scale[n]) * of_row",
    ),
    "a tail of rows is not written": (
        "gemm.c",
        "i < rows; i++)\n            finish",
        "i < rows - rows % 4; i++)\n            finish",
    ),
    "a tail of columns has the next column's bias": (
        "gemm.c",
        "int64_t at = column + first + n;",
        "int64_t at = column + n;",
    ),
    "squares of 128 rows begin with their panel": (
        "gemm.c",
        "factors.a_offset = row % a->rows_per_scale",
        "factors.a_offset = 0",
    ),
    "the last panel is nobody's": (
        "gemm.c",
        ") < job->panels_m * job->panels_n;)",
        ") < job->panels_m * job->panels_n - 1;)",
    ),
    "panels overlap": ("gemm.c", "i % job->panels_n * job->columns)", "i % job->panels_n * (job->columns - 1))"),
}
"""Name -> file, and what replaces what in it."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The engine with each bug. All widths are linked, and the fastest alone is run."""
    folder = tmp_path_factory.mktemp("engines")
    others = {name.lower().replace("-", "") for name in library.widths()[1:]}

    def compiled(source: Path, name: str) -> str:
        level = "-O0" if source.stem in others else "-O1"
        options = [level, "-std=gnu11", "-ffp-contract=off", "-pthread", "-fPIC", "-w"]
        subprocess.run([str(COMPILER), *options, "-c", str(source), "-o", f"{folder / name}.o"], check=True)
        return f"{folder / name}.o"

    with ThreadPoolExecutor(2) as pool:
        stems = [x.stem for x in SOURCES.glob("*.c")]
        objects = dict(zip(stems, pool.map(lambda x: compiled(SOURCES / f"{x}.c", x), stems), strict=True))

        def planted(number: int, file: str, old: str, new: str) -> str:
            text = (SOURCES / file).read_text()
            assert not old or text.count(old) == 1, f"{file} has no longer one {old!r}"
            sources = folder / str(number)
            shutil.copytree(SOURCES, sources)
            (sources / file).write_text(text.replace(old, new) if old else text)
            stem = WIDTH if file == "kernel.h" else Path(file).stem
            rest = [path for other, path in objects.items() if other != stem]
            engine = f"{folder / str(number)}.so"
            one = compiled(sources / f"{stem}.c", str(number))
            subprocess.run([str(COMPILER), "-shared", "-pthread", one, *rest, "-lm", "-o", engine], check=True)
            return engine

        return dict(zip(BUGS, pool.map(planted, range(len(BUGS)), *zip(*BUGS.values(), strict=True)), strict=True))


def test_planted_bugs_are_seen(engines: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "_threads", lambda: 3)
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)  # other tests keep the right engine
    subject = load_subject("f8emu.native")
    loaded = {}
    for name, engine in engines.items():
        monkeypatch.setenv(library.VARIABLE, engine)
        assert library.unavailable() is None
        loaded[name] = library.library()

    wanted = {(family, mode) for family in (Family.STRIDES, Family.GROUPS) for mode in Mode if not mode.is_microscaled}
    wanted.add((Family.TILES, Mode.BLOCKWISE))
    few = [case for case in engine_cases() if (case.family, case.mode) in wanted]

    def with_engine(name: str) -> Subject:
        def run(verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
            monkeypatch.setattr(library, "library", lambda: loaded[name])
            return verb(*args, **options)

        verbs = {key: partial(run, verb) for key, verb in subject.verbs.items()}
        return replace(subject, name=name, verbs=verbs, is_thread_safe=False, more_gemms=lambda: few)

    # The stage in eighths: who was seen in one is not sought in those that follow.
    (gemms,), unseen = stages_by_name(["gemms"]), list(BUGS)
    for i in range(8):
        eighth = replace(gemms, cases=lambda *of, i=i: islice(gemms.cases(*of), i, None, 8))
        result = verify([with_engine(name) for name in unseen], only=[eighth], errors=1)
        statuses = {one.name: one.stages[0].status for one in result.subjects}
        assert set(statuses.values()) <= {Status.EQUAL, Status.DIFFERENT}
        unseen = [name for name, status in statuses.items() if status is Status.EQUAL]
    assert unseen == ["nothing"]
