"""The split-K of a library, as data [PLAN-1..7]: the `split_k` that a GEMM's bits depend on.

cuBLAS chooses S from M, N, K, the layout and the types, by a heuristic that depends on its version and on the chip
[CHAIN-3]. Recorded shapes are looked up. For other shapes S is predicted by decision trees. The trees were fitted to
the heuristic's answers for other shapes, so that all recorded rows test them. Everything is in `data/`: for each chip
and library one file, and a second one that is read when it is needed, with the trees that only a bare bfloat16 `mm` in
tn, nn or tt asks.
"""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from importlib.resources import files

from f8emu.spec.chip import Chip
from f8emu.spec.chips import H100, HOPPER
from f8emu.split_k.gemm import UNKNOWN, one_of
from f8emu.split_k.gemm import PlannedGemm as PlannedGemm
from f8emu.split_k.gemm import Source as Source
from f8emu.split_k.gemm import Split as Split
from f8emu.split_k.tables import plan_from_json
from f8emu.split_k.trees import Plan

LIBRARY = "cuBLAS 13.1.0.3"
CHIP = HOPPER.plan
PLANS = {HOPPER.plan: "h200_cublas_13_1_0_3_split_k", H100.plan: "h100_cublas_13_1_0_3_split_k"}
"""GPU -> the name of its file."""


def split_k(gemm: PlannedGemm, *, library: str = LIBRARY, chip: str = CHIP) -> Split:
    """The number of slices S into which `library` cuts K on `chip`, and how well S is known.

    Exactness: recorded shapes as measured; the others as accurate as `reference/NUMERICS.md` 10 says.

    Raises:
        SpecError: the plan file of this installation is damaged.
    """
    return shipped_plan(chip).split_k(gemm) if library == LIBRARY and chip in PLANS else UNKNOWN


def is_planned(caller: str, chip: Chip) -> bool:
    """Whether there is a plan for the GEMMs of `chip`; if not, S is 1 of unknown source, and a warning says so once."""
    if not chip.plan:
        warn_without_plan(caller, str(chip))
    return bool(chip.plan)


def plans_of(chips: Iterable[Chip]) -> str:
    """The plans of some chips, in words for a report."""
    return " and ".join(sorted({f"{LIBRARY} on {chip.plan}" for chip in chips if chip.plan})) or "none"


@cache
def warn_without_plan(caller: str, chip: str) -> None:
    """Warn that S of a chip's GEMMs is not known."""
    warnings.warn(
        f"{caller}: there is no split-K plan for {chip}; its GEMMs are emulated without split-K. Pass split_k if you "
        "know it. This warning appears once",
        stacklevel=3,
    )


@cache
def shipped_plan(chip: str = CHIP) -> Plan:
    """The plan for a chip that f8emu comes with, read once.

    Raises:
        SpecError: a chip without one, or the file is damaged.
    """
    one_of("chip", chip, tuple(PLANS))
    return replace(_read(PLANS[chip]), more_rules=lambda: _read(f"{PLANS[chip]}_mm").rules)


@cache
def _read(name: str) -> Plan:
    return plan_from_json((files("f8emu.split_k") / "data" / f"{name}.json").read_text(encoding="utf-8"), name)
