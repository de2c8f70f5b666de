"""A Llama of 1B parameters under tensor and sequence parallelism: bfloat16, torchao's float8 styles and f8emu's.

    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --json OUT    on 2 GPUs
    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --tiny        2 processes on a CPU, emulated

Every layer is cut over all ranks, and between the layers every rank has a part of the sequence. Weights are bfloat16;
a step is forward, backward and fused AdamW; every block is compiled; the embedding, the norms and the head stay in
bfloat16. Subjects have the same first weights and the same tokens. They take turns, a few steps each, the first right
after compilation; the figure is the median over rounds. Tokens per second are those of all ranks together. Peak memory
is that of rank 0 in a subject's turn, its weights and optimizer states included, those of the other subjects not.

A subject that fails alike on all ranks costs its row; torchao's is then shown as absent, with the reason. After one
that fails on some ranks only, the collectives no longer match: what was measured is recorded, and the run ends.

Exit status 1 if bfloat16 or f8emu fails, or a loss is not finite.
"""

import gc
import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import cross_entropy

from benchmarks import runner
from benchmarks.measure import graphs_compiled
from benchmarks.ranks import DividedError, Ranks, join, leave, together
from benchmarks.subjects import converted, torchao_float8
from benchmarks.timing import back_to_back, synchronize
from examples.train_llama import FLOAT8_STYLES, STYLES, Llama, Size, initialize, parallelize_tensors

SUBJECTS = (runner.BASELINE, "torchao/tensorwise", "f8emu/tensorwise", "f8emu/delayed", "f8emu/rowwise")
HEAD = "output"
"""The one linear layer that stays in bfloat16, as in torchtitan."""
WARMUP = 4
"""Steps before the first figure: compilation, and a delayed recipe's first states."""
LR = 3e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is trained, and where."""

    ranks: Ranks
    size: Size
    batch: int
    length: int


@dataclass(slots=True, kw_only=True)
class Subject:
    """A model in training."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: Run
    resident: int
    """Bytes between two steps."""
    launched: list[DTensor] = field(default_factory=list)
    """Losses that are not read yet: reading waits for the device."""
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    ms: list[float] = field(default_factory=list)

    def step(self) -> None:
        """Forward, backward and optimizer, on the tokens of the step; nothing waits for the device."""
        tokens = tokens_of(len(self.losses) + len(self.launched), self.run)
        with tp.loss_parallel():
            logits = self.model(tokens[:, :-1])
            loss: Any = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.launched.append(loss.detach())

    def turn(self, steps: int) -> runner.Entry:
        """Times `steps` steps, after one that is not timed; the figures of all turns so far."""
        device, before = self.run.ranks.device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        self.ms.append(back_to_back(self.step, steps, device).ms)
        if device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(device) - before + self.resident)
        self.losses += [loss.to_local().item() for loss in self.launched]
        self.launched.clear()
        found = runner.spread(self.ms)
        tokens = self.run.batch * self.run.length
        found |= {"tokens_per_second": 1e3 * tokens / found["ms"], "losses": list(self.losses)}
        return found | ({"peak_bytes": self.peak} if self.peak else {})


def build(name: str, run: Run) -> Subject:
    """A subject with the weights that all have, after the steps that compile it.

    Raises:
        AbsentError: its library is not installed.
    """
    before = torch.cuda.memory_allocated(run.ranks.device) if run.ranks.device.type == "cuda" else 0
    with torch.device("meta"):
        model = Llama(run.size).to(torch.bfloat16)
    model.to_empty(device=run.ranks.device)
    converted(name, model, left_out=(HEAD,))
    # The logits stay cut along the vocabulary.
    head = tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_tensors(model, run.ranks.mesh, styles_of(name), head)
    # A plain tensor: of one that waits for its collective, a compiled block returns a gradient of the wrong kind.
    model.tok_embeddings.register_forward_hook(lambda _, inputs, output: output.clone())
    for block in model.layers:
        block.compile(fullgraph=True, dynamic=False)
    initialize(model, run.ranks.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    subject = Subject(name=name, model=model, optimizer=optimizer, run=run, resident=0)
    for _ in range(WARMUP):
        subject.step()
    if run.ranks.device.type == "cuda":
        subject.resident = torch.cuda.memory_allocated(run.ranks.device) - before
    return subject


def styles_of(name: str) -> tuple[Any, Any, Any]:
    """Column-parallel, row-parallel, and that of a module's input.

    Raises:
        AbsentError: torchao is not installed.
    """
    if name == runner.BASELINE:
        return STYLES
    if name.startswith("f8emu/"):
        return FLOAT8_STYLES
    torchao_float8()
    module: Any = importlib.import_module("torchao.float8.float8_tensor_parallel")
    return module.Float8ColwiseParallel, module.Float8RowwiseParallel, module.PrepareFloat8ModuleInput


def tokens_of(step: int, run: Run) -> Tensor:
    """Tokens [B, S + 1], the same on every rank; the smaller the more frequent, so that there is something to learn."""
    generator = torch.Generator(run.ranks.device).manual_seed(step)
    drawn = torch.rand(run.batch, run.length + 1, generator=generator, device=run.ranks.device)
    return (drawn**4 * run.size.vocabulary).long()


def measure(entries: list[runner.Entry], run: Run, rounds: int, steps: int) -> None:
    """Fills in the entries, after every turn: figures, or why there are none.

    Raises:
        DividedError: the run cannot go on.
    """
    ready: list[tuple[Subject, runner.Entry]] = []

    def turn(subject: Subject, entry: runner.Entry) -> None:
        compiled = graphs_compiled()
        if (figures := _attempt(entry, lambda: subject.turn(steps), run)) is not None:
            entry |= figures
            if graphs_compiled() != compiled:
                entry["compiled_while_timed"] = True

    for entry in entries:
        start = time.perf_counter()
        subject = _attempt(entry, lambda name=entry["subject"]: build(name, run), run)
        if subject is None:
            continue
        synchronize(run.ranks.device)  # all ranks have launched the same, so none waits for ever
        entry["warmup_s"] = round(time.perf_counter() - start, 1)
        ready.append((subject, entry))
        gc.collect()
        turn(subject, entry)
    # A full collection walks through the compiled code of all subjects, in the turn of one.
    gc.collect()
    gc.freeze()
    for _ in range(rounds - 1):
        for subject, entry in ready:
            if not entry.keys() & {"absent", "failed"}:
                turn(subject, entry)
    gc.unfreeze()


def _attempt(entry: runner.Entry, call: Callable[[], Any], run: Run) -> Any:
    """What `call` gives, or None, with the reason in the entry."""
    try:
        return together(call, run.ranks)
    except runner.AbsentError as error:
        entry["absent"] = str(error)
    except RuntimeError as error:
        entry["absent" if entry["subject"].startswith("torchao/") else "failed"] = str(error)
    except DividedError as error:
        entry["failed"] = str(error)
        raise
    return None


def _status(entries: Sequence[runner.Entry]) -> int:
    own = [e for e in entries if not e["subject"].startswith("torchao/")]
    return int(any("failed" in e or "ms" not in e or not all(map(math.isfinite, e["losses"])) for e in own))


SIZES = {False: (Size(2048, 16, 32, 8, 8192, 32768), 4096), True: (Size(64, 2, 4, 2, 128, 256), 32)}
"""Whether it is tiny -> the model, and the length of a sequence."""
BENCH = runner.Bench(
    "benchmarks.tensor_parallel",
    "A Llama under tensor parallelism, in float8.",
    runner.option("subjects", SUBJECTS, choices=SUBJECTS),
    runner.option("batch", 8, "sequences of 4,096 tokens"),
    *runner.turns_of(3, 5),
    runner.option("tiny", False, "two tiny blocks, one step: for tests"),
    runner.DEVICE,
)
_COLUMNS: runner.Columns = {
    "tokens/s": "tokens_per_second:.0f",
    "speed": "speed:.3f",
    "step ms": "ms:.2f",
    "peak GiB": runner.scaled("peak_bytes", 2**30, ".2f"),
    "memory": "memory:.3f",
    "loss 1, last": lambda e: f"{e['losses'][0]:.4f} {e['losses'][-1]:.4f}" if "losses" in e else "-",
    "less bf16's": "last_loss_less_bf16:+.4f",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs on every rank; rank 0 prints and records. The exit status."""
    bench = BENCH.parse(argv)
    arguments, report = bench.arguments, bench.report
    ranks = join(arguments.device)
    size, length = SIZES[arguments.tiny]
    batch, rounds, steps = (2, 1, 1) if arguments.tiny else (arguments.batch, arguments.rounds, arguments.steps)
    run = Run(ranks=ranks, size=size, batch=batch, length=length)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Llama(size).parameters())
    ranks.command(report)
    report |= {"model": size._asdict(), "parameters": parameters, "batch": batch, "tokens": batch * length}
    report |= {"rounds": rounds, "steps": steps}
    entries: list[runner.Entry] = [{"subject": name} for name in arguments.subjects]
    is_divided = False
    try:
        measure(entries, run, rounds, steps)
    except DividedError:
        is_divided = True
    runner.add_ratios(entries, {"memory": "peak_bytes"})
    if ranks.is_first:
        title = f"Llama of {parameters / 1e6:.0f} M parameters, {batch * length} tokens, {report['device']}"
        runner.draw_entries(f"{title}; speed and memory: times bf16's", entries, _COLUMNS)
        bench.record(subjects=entries)
    leave(ranks, is_divided=is_divided)
    return _status(entries)


if __name__ == "__main__":
    sys.exit(main())
