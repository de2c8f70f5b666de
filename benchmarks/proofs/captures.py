"""A step of training captured on a GPU in every recipe, and computed again elsewhere, every bit.

    python -m benchmarks.proofs.captures --write FOLDER             on a GPU: a capture for each case, about a minute
    python -m benchmarks.proofs.captures FOLDER --json OUT          anywhere: scales, codes and products again

Byte-level Llama blocks that read the README, some compiled; the third of four steps of AdamW is captured. The last case
has K = 6144 and 16 rows, where cuBLAS cuts K. Exit status 1 if a bit differs.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.models import TransformerBlock
from benchmarks.runner import DEVICE, Bench, Entry, draw_entries, option, say
from f8emu.capture.read import read_capture
from f8emu.capture.replaying import KINDS, replay
from f8emu.spec import RecipeName
from f8emu.torch import capture, convert_to_float8_training

SMALL = {"dim": 64, "hidden": 176, "heads": 2, "kv_heads": 1, "length": 24}
LONG_K = {"dim": 128, "hidden": 6144, "heads": 2, "kv_heads": 2, "length": 16}
BATCH, STEP, STEPS = 3, 3, 4
TEXT = Path(__file__).parents[2] / "README.md"


class Case(NamedTuple):
    """One training run."""

    recipe: RecipeName
    compiled: bool = False
    size: dict[str, int] = SMALL


CASES = {
    "tensorwise": Case("tensorwise"),
    "rowwise-compiled": Case("rowwise", compiled=True),
    "delayed-compiled": Case("delayed", compiled=True),
    "rowwise_with_gw_hp": Case("rowwise_with_gw_hp"),
    "blockwise": Case("blockwise"),
    "long-k": Case("tensorwise", compiled=True, size=LONG_K),
}


def write(case: Case, folder: Path, device: torch.device) -> None:
    """Trains, and captures step `STEP` into `folder`."""
    torch.manual_seed(0)
    torch.compiler.reset()
    dim, length = case.size["dim"], case.size["length"]
    with device:
        block = TransformerBlock(**case.size)
        model = nn.Sequential(nn.Embedding(256, dim), block, nn.Linear(dim, 256, bias=False)).to(torch.bfloat16)
    convert_to_float8_training(model, config=case.recipe)
    if case.compiled:
        block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = 1 if case.size is LONG_K else BATCH
    text = torch.tensor(list(TEXT.read_bytes()[: STEPS * batch * (length + 1)]), device=device)
    with capture(model, folder, steps=[STEP]):
        for tokens in text.view(STEPS, batch, length + 1):
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def replayed(folder: Path) -> Entry:
    """What a replay of one capture found."""
    result = replay(read_capture(folder))
    stages = {kind: asdict(count) for kind, count in result.counts.items()}
    return {"capture": folder.name, "is_equal": result.is_equal, "oracles": result.oracles, "stages": stages}


BENCH = Bench(
    "benchmarks.proofs.captures",
    __doc__,
    ("folder", {"type": Path}),
    option("write", False, "train and capture; otherwise replay what is there"),
    option("cases", tuple(CASES), choices=CASES),
    DEVICE,
)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv, device="cpu")
    folder, cases = run.arguments.folder, [name for name in CASES if name in run.arguments.cases]
    if run.arguments.write:
        for name in cases:
            write(CASES[name], folder / name, torch.device(run.arguments.device))
            say(f"{name}: step {STEP} captured")
        return 0
    results = [replayed(folder / name) for name in cases]
    of_stage = "{elements_equal:,} of {elements:,}"
    shown = [{**e, **{kind: of_stage.format(**e["stages"][kind]) for kind in KINDS}} for e in results]
    draw_entries("captured, and computed again here", shown, ": ".join([*KINDS, "is_equal:"]), of="capture")
    header = read_capture(folder / cases[0])[0].header
    run.record(captured_on=header.device, captured_with=dict(header.versions), captures=results)
    return int(not all(result["is_equal"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
