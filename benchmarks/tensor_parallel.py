"""A Llama of 1B parameters under tensor and sequence parallelism: bfloat16, torchao's float8 styles and f8emu's.

    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --json OUT    on 2 GPUs
    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --tiny        2 processes on a CPU, emulated

Every layer is cut over all ranks, and between the layers every rank has a part of the sequence. Weights are bfloat16;
a step is forward, backward and fused AdamW; every block is compiled; the embedding, the norms and the head stay in
bfloat16. Subjects have the same first weights and the same tokens. They take turns, a few steps each; the figure is the
median over rounds. Tokens per second are those of all ranks together. Peak memory is that of rank 0 in a subject's
turn, its weights and optimizer states included, those of the other subjects not.

A subject that fails alike on all ranks costs its row. After one that fails on some ranks only, the collectives no
longer match: what was measured is recorded, and the run ends.

Exit status 1 if bfloat16 or f8emu fails, or a loss is not finite.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import cross_entropy

from benchmarks import runner
from benchmarks.ranks import DividedError, Ranks, join
from benchmarks.runner import Entry
from benchmarks.subjects import converted, torchao
from benchmarks.timing import back_to_back, held_bytes, synchronize
from examples.train_llama import FLOAT8_STYLES, STYLES, Llama, Size, initialize, parallelize_tensors

SUBJECTS = (runner.BASELINE, "torchao/tensorwise", "f8emu/tensorwise", "f8emu/delayed", "f8emu/rowwise")
HEAD = "output"  # the one linear layer that stays in bfloat16, as in torchtitan
WARMUP = 4  # steps before the first figure: compilation, and a delayed recipe's first states
# Whether it is tiny -> the model, and the length of a sequence.
SIZES = {False: (Size(2048, 16, 32, 8, 8192, 32768), 4096), True: (Size(64, 2, 4, 2, 128, 256), 32)}


class Task(NamedTuple):
    """What is trained, and where."""

    ranks: Ranks
    size: Size
    batch: int
    length: int

    def tokens(self, step: int) -> Tensor:
        """Tokens [B, S + 1], the same on every rank; the smaller the more frequent, so there is something to learn."""
        device = self.ranks.device
        generator = torch.Generator(device).manual_seed(step)
        drawn = torch.rand(self.batch, self.length + 1, generator=generator, device=device)
        return (drawn**4 * self.size.vocabulary).long()


@dataclass(slots=True, kw_only=True)
class Subject:
    """A model in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    resident: int = 0  # bytes between two steps
    # Losses that are not read yet: reading waits for the device.
    launched: list[DTensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0

    def step(self) -> None:
        """Forward, backward and optimizer, on the tokens of the step; nothing waits for the device."""
        tokens = self.task.tokens(len(self.losses) + len(self.launched))
        with tp.loss_parallel():
            logits = self.model(tokens[:, :-1])
            loss: Any = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.launched.append(loss.detach())

    def turn(self, steps: int) -> float:
        """Milliseconds of each of `steps` steps, after one that is not timed."""
        device, others = self.task.ranks.device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            others = held_bytes(device) - self.resident
        ms = back_to_back(self.step, steps, device).ms
        if device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(device) - others)
        self.losses += [loss.to_local().item() for loss in self.launched]
        self.launched.clear()
        return ms


def build(name: str, task: Task) -> Subject:
    """A subject with the weights that all have, after the steps that compile it.

    Raises:
        AbsentError: its library is not installed.
    """
    ranks = task.ranks
    before = held_bytes(ranks.device)
    # 1. The layers of the recipe, cut over the ranks. The logits stay cut along the vocabulary.
    with torch.device("meta"):
        model = Llama(task.size).to(torch.bfloat16)
    model.to_empty(device=ranks.device)
    converted(name, model, left_out=(HEAD,))
    head = tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    styles: tuple[Any, Any, Any] = STYLES if name == runner.BASELINE else FLOAT8_STYLES
    if name.startswith("torchao/"):
        module = torchao("torchao.float8.float8_tensor_parallel")
        styles = module.Float8ColwiseParallel, module.Float8RowwiseParallel, module.PrepareFloat8ModuleInput
    parallelize_tensors(model, ranks.mesh, styles, head)
    # 2. A plain tensor: of one that waits for its collective, a compiled block returns a gradient of the wrong kind.
    model.tok_embeddings.register_forward_hook(lambda _, inputs, output: output.clone())
    for block in model.layers:
        block.compile(fullgraph=True, dynamic=False)
    initialize(model, ranks.mesh)
    # 3. The steps that compile it.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    subject = Subject(model=model, optimizer=optimizer, task=task)
    for _ in range(WARMUP):
        subject.step()
    subject.resident = held_bytes(ranks.device) - before
    synchronize(ranks.device)
    return subject


BENCH = runner.Bench(
    "benchmarks.tensor_parallel",
    __doc__,
    runner.option("subjects", SUBJECTS, choices=SUBJECTS),
    runner.option("batch", 8, "sequences of 4,096 tokens"),
    *runner.turns_of(3, 5),
    runner.option("tiny", False, "two tiny blocks, one step: for tests"),
    runner.DEVICE,
)
_COLUMNS = "tokens_per_second:.0f speed:.3f ms:.2f peak_bytes:GiB memory:.3f losses last_loss_less_bf16:+.4f"


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    arguments, report = run.arguments, run.report
    ranks = join(arguments.device, report)
    size, length = SIZES[arguments.tiny]
    batch, rounds, steps = (2, 1, 1) if arguments.tiny else (arguments.batch, arguments.rounds, arguments.steps)
    task = Task(ranks, size, batch, length)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Llama(size).parameters())
    report |= {"model": size._asdict(), "parameters": parameters, "batch": batch, "tokens": batch * length}
    report |= {"rounds": rounds, "steps": steps}
    entries: list[Entry] = [{"subject": name} for name in arguments.subjects]
    subjects: dict[str, Subject] = {}

    def prepare(entry: Entry) -> Subject:
        return subjects.setdefault(entry["subject"], ranks.together(lambda: build(entry["subject"], task)))

    # 1. Ranks agree after every turn whether it failed; a run that is divided keeps what it has.
    try:
        runner.race(entries, prepare, lambda subject: ranks.together(lambda: subject.turn(steps)), rounds)
    except DividedError as error:
        report["divided"] = str(error)
        for entry in (e for e in entries if not e.keys() & {"ms", "absent", "failed"}):
            entry["failed"] = str(error)
    # 2. Figures of all ranks together; memory and losses are those of rank 0.
    for entry in (e for e in entries if "ms" in e):
        subject = subjects[entry["subject"]]
        entry |= {"tokens_per_second": 1e3 * batch * length / entry["ms"], "losses": subject.losses}
        entry |= {"peak_bytes": subject.peak} if subject.peak else {}
    runner.add_ratios(entries, {"memory": "peak_bytes"})
    if ranks.is_first:
        title = f"Llama of {parameters / 1e6:.0f} M parameters, {batch * length} tokens, {report['device']}"
        runner.draw_entries(f"{title}; speed and memory: times bf16's", entries, _COLUMNS)
        run.record(subjects=entries)
    ranks.leave(is_divided="divided" in report)
    return int(any(map(runner.is_wrong, entries)))


if __name__ == "__main__":
    sys.exit(main())
