"""Layers over two ranks and on one device: every bit of them.

    torchrun --nproc-per-node 2 -m benchmarks.proofs.distributed_bits           on 2 GPUs
    torchrun --nproc-per-node 2 -m benchmarks.proofs.distributed_bits --tiny    2 processes on a CPU, emulated

FSDP2 with float8 all-gather, with and without `reshard_after_forward` and
`precompute_float8_dynamic_scale_for_fsdp`: blocks of LayerNorm and two linear layers, a bias, an odd number of hidden
units, so that the ranks' shards are unequal, and an odd number of tokens. One device is given the batches of the ranks
in turn; its gradients are added in the order of the ranks and divided by their number. Outputs, losses and gradients of
every step, the weights after it and the states of delayed scaling are compared.

Tensor parallelism, in torch's styles and in f8emu's: the output of a column-parallel layer is a slice of that of one
device, and so are the weight gradients of a column-parallel and of a row-parallel layer and the input gradient of the
latter. What is a sum over ranks is left out; it is rounded otherwise than the sum of one device.

Eager layers are compared with eager ones, compiled with compiled ones: the compiler's LayerNorm has bits of its own.
Every rank has other data, and each compares its part; the counts are those of all ranks. Weights are bfloat16.

Exit status 1 if a number differs or a case fails.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import f8emu.torch as f8
from benchmarks.ranks import DividedError, Ranks, join, leave, together
from benchmarks.runner import DEVICE, Bench, Entry, draw_entries, option, say
from f8emu.torch.parallel.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

RANKS = 2
"""With more, the sum of gradients depends on the order in which the library adds them."""
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
MODES = ("eager", "compiled")
PARTS = ("outputs", "losses", "gradients", "weights", "states")
STEPS = 3

Trace = list[tuple[str, Tensor]]
"""What one rank computes: (part, tensor), in the order of computation."""


class Sizes(NamedTuple):
    """Of the layers."""

    dim: int
    hidden: int
    """Of FSDP2's blocks: odd."""
    wide: int
    """Of the layers that tensor parallelism cuts."""
    tokens: int
    """Of a rank under FSDP2: odd. Under tensor parallelism a rank has as many less one, of each of two sequences."""


FULL = Sizes(256, 385, 512, 101)
TINY = Sizes(32, 49, 64, 17)


class Setting(NamedTuple):
    """Where the layers run."""

    sizes: Sizes
    mesh: DeviceMesh
    device: torch.device
    recipe: str
    mode: str

    def run(self, layer: nn.Module) -> Any:
        """The layer, compiled if that is the mode."""
        return torch.compile(layer, fullgraph=True, dynamic=False) if self.mode == "compiled" else layer

    def drawn(self, *shape: int, seed: int) -> Tensor:
        """Random numbers of various magnitudes, the same on every rank and device."""
        generator = torch.Generator().manual_seed(seed)
        exponents = torch.randint(-4, 4, shape, generator=generator)
        return (torch.randn(shape, generator=generator) * torch.exp2(exponents)).to(self.device, torch.bfloat16)

    def own(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a tensor of one device."""
        return torch.chunk(x, RANKS, dim)[self.mesh.get_local_rank()]


class Block(nn.Module):
    """`x + w2(relu(w1(norm(x))))`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(torch.relu(self.w1(self.norm(x))))


def blocks(setting: Setting, *, gathers: bool) -> nn.Sequential:
    """Two converted blocks, the same on every rank."""
    torch.manual_seed(0)
    sizes = setting.sizes
    model = nn.Sequential(*(Block(sizes.dim, sizes.hidden) for _ in range(2))).to(setting.device, torch.bfloat16)
    f8.convert_to_float8_training(model, config=setting.recipe, pad=True, enable_fsdp_float8_all_gather=gathers)
    return model


def compile_blocks(model: nn.Sequential, setting: Setting) -> None:
    for block in model if setting.mode == "compiled" else ():
        block.compile(fullgraph=True, dynamic=False)


def batch(setting: Setting, step: int, rank: int) -> Tensor:
    """Of a rank; magnitudes differ from rank to rank and grow from step to step."""
    x = setting.drawn(setting.sizes.tokens, setting.sizes.dim, seed=RANKS * step + rank)
    return x * (rank + 1) * 2**step


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def one_device(setting: Setting) -> Trace:
    """The batches of all ranks in turn; this rank's part of what FSDP2 must compute."""
    model = blocks(setting, gathers=False)
    compile_blocks(model, setting)
    f8.set_amax_reduction_group(model, False)
    optimizer, found = optimizer_of(model), Trace()
    parameters = list(model.parameters())
    for step in range(STEPS):
        outputs = [model(batch(setting, step, rank)) for rank in range(RANKS)]
        losses = [output.float().square().mean() for output in outputs]
        torch.autograd.backward(losses)  # one pass of all ranks; it adds two gradients in either order
        own = setting.mesh.get_local_rank()
        found += [("outputs", outputs[own].detach()), ("losses", losses[own].detach())]
        for parameter in parameters:
            parameter.grad = grad_of(parameter) / RANKS
        found += [("gradients", setting.own(grad_of(parameter)).clone()) for parameter in parameters]
        optimizer.step()
        optimizer.zero_grad()
        found += [("weights", setting.own(parameter.detach()).clone()) for parameter in parameters]
        found += states_of(model)
    return found


def sharded(setting: Setting, *, reshards: bool, precomputes: bool) -> Trace:
    """The same over the ranks, by FSDP2."""
    model = blocks(setting, gathers=True)
    for block in model:
        fully_shard(block, mesh=setting.mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=setting.mesh, reshard_after_forward=reshards)
    compile_blocks(model, setting)
    optimizer, found = optimizer_of(model), Trace()
    parameters = list(model.parameters())
    for step in range(STEPS):
        output = model(batch(setting, step, setting.mesh.get_local_rank()))
        loss = output.float().square().mean()
        loss.backward()
        found += [("outputs", output.detach()), ("losses", loss.detach())]
        found += [("gradients", local(grad_of(parameter)).clone()) for parameter in parameters]
        optimizer.step()
        optimizer.zero_grad()
        if precomputes:
            f8.precompute_float8_dynamic_scale_for_fsdp(model)
        found += [("weights", local(parameter.detach()).clone()) for parameter in parameters]
        found += states_of(model)
    return found


def cut(setting: Setting, *, is_float8: bool) -> tuple[Trace, Trace]:
    """A column-parallel and a row-parallel layer: of one device, this rank's part; over the ranks."""
    sizes, mesh, traces = setting.sizes, setting.mesh, (Trace(), Trace())
    models = (two_layers(setting), two_layers(setting))
    f8.set_amax_reduction_group(models[0], False)
    sequence = Shard(1)
    styles: dict[str, ParallelStyle] = {"0": ColwiseParallel(input_layouts=sequence), "1": RowwiseParallel()}
    if is_float8:
        styles = {
            "0": Float8ColwiseParallel(input_layouts=sequence),
            "1": Float8RowwiseParallel(output_layouts=sequence),
        }
    parallelize_module(models[1], mesh, styles)
    runs = [[setting.run(layer) for layer in model] for model in models]
    optimizers = [optimizer_of(model) for model in models]
    shape = (2, sizes.tokens - 1)
    for step in range(STEPS):
        x, wide_grad, wide, grad = (
            setting.drawn(*shape, n, seed=4 * step + i) * 2**step
            for i, n in enumerate((sizes.dim, sizes.wide, sizes.wide, sizes.dim))
        )
        for is_cut, (model, run, found) in enumerate(zip(models, runs, traces, strict=True)):
            # 1. By columns: the input has this rank's tokens, the output its columns.
            columns = run[0]((setting.own(x, 1) if is_cut else x) * 1)
            columns.backward(setting.own(wide_grad, 2) if is_cut else wide_grad)
            found.append(("outputs", columns.detach() if is_cut else setting.own(columns.detach(), 2)))
            # 2. By rows: the input has this rank's columns, the gradient of the output its tokens, or all.
            h = (setting.own(wide, 2) if is_cut else wide).clone().requires_grad_()
            output = run[1](h * 1) * 1  # read, so that nothing waits for it at the end
            output.backward(setting.own(grad, 1) if is_cut and is_float8 else grad)
            found.append(("gradients", grad_of(h) if is_cut else setting.own(grad_of(h), 2)))
            places = ((model[0].weight, 0), (model[0].bias, 0), (model[1].weight, 1))
            own = [
                (local(grad_of(p)), local(p.detach())) if is_cut else (setting.own(grad_of(p), d), setting.own(p, d))
                for p, d in places
            ]
            found += [("gradients", own_grad.clone()) for own_grad, _ in own]
            optimizers[is_cut].step()
            optimizers[is_cut].zero_grad()
            found += [("weights", weight.detach().clone()) for _, weight in own]
            found += states_of(model)
    return traces


def two_layers(setting: Setting) -> Any:
    """dim -> wide and wide -> dim, converted, the same on every rank."""
    torch.manual_seed(0)
    sizes = setting.sizes
    layers = (nn.Linear(sizes.dim, sizes.wide), nn.Linear(sizes.wide, sizes.dim, bias=False))
    model = nn.Sequential(*layers).to(setting.device, torch.bfloat16)
    f8.convert_to_float8_training(model, config=setting.recipe)
    return model


def grad_of(x: Tensor) -> Tensor:
    assert x.grad is not None, "every tensor of these models has a gradient"
    return x.grad


def local(x: Tensor) -> Tensor:
    """The plain tensor that this rank holds."""
    own = x.to_local() if isinstance(x, DTensor) else x
    return getattr(own, "plain", own)


def states_of(model: nn.Module) -> Trace:
    return [("states", state) for _, state in sorted(f8.delayed_state_dict(model).items())]


def compared(observed: Trace, expected: Trace) -> dict[str, tuple[int, int]]:
    """For each part how many numbers differ as bit patterns, and of how many."""
    counts = {part: (0, 0) for part in PARTS}
    for (part, a), (other, b) in zip(observed, expected, strict=True):
        assert part == other and a.shape == b.shape and a.dtype == b.dtype, f"{part} {a.shape}, {other} {b.shape}"
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        wrong = int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())
        counts[part] = (counts[part][0] + wrong, counts[part][1] + a.numel())
    return counts


def cases(setting: Setting) -> Iterator[tuple[str, Any]]:
    """(name, call) of a recipe and a mode; a call gives counts."""
    expected: list[Trace] = []  # of one device, by the first case that needs it

    def fsdp(reshards: bool, precomputes: bool) -> dict[str, tuple[int, int]]:
        if not expected:
            expected.append(one_device(setting))
        return compared(sharded(setting, reshards=reshards, precomputes=precomputes), expected[0])

    def parallel(is_float8: bool) -> dict[str, tuple[int, int]]:
        of_one, of_ranks = cut(setting, is_float8=is_float8)
        return compared(of_ranks, of_one)

    for reshards in (True, False):
        for precomputes in (False, True):
            name = f"FSDP2{', reshard' if reshards else ''}{', precompute' if precomputes else ''}"
            yield name, lambda r=reshards, p=precomputes: fsdp(r, p)
    yield "tensor parallel, torch's styles", lambda: parallel(False)
    # A product in high precision has no codes to gather.
    if setting.recipe != "rowwise_with_gw_hp":
        yield "tensor parallel, f8emu's styles", lambda: parallel(True)


def summed(counts: dict[str, tuple[int, int]], ranks: Ranks) -> dict[str, list[int]]:
    """Over all ranks."""
    total = torch.tensor(list(counts.values()))
    dist.all_reduce(total, group=ranks.control)
    return {part: row for part, row in zip(counts, total.tolist(), strict=True) if row[1]}


BENCH = Bench(
    "benchmarks.proofs.distributed_bits",
    "Layers over two ranks and on one device, bit for bit.",
    option("recipes", RECIPES, choices=RECIPES),
    option("modes", MODES, choices=MODES),
    option("tiny", False, "small layers: for tests"),
    DEVICE,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs on every rank; rank 0 prints and records. The exit status."""
    bench = BENCH.parse(argv)
    arguments, report = bench.arguments, bench.report
    ranks = join(arguments.device)
    if ranks.mesh.size() != RANKS:
        raise SystemExit(
            f"benchmarks.proofs.distributed_bits: {RANKS} ranks are expected, since the sum of more gradients depends "
            f"on their order; got {ranks.mesh.size()}; run it with torchrun --nproc-per-node {RANKS}"
        )
    ranks.command(report)
    sizes, entries = TINY if arguments.tiny else FULL, list[Entry]()
    report |= {"steps": STEPS, "sizes": sizes._asdict(), "cases": entries}
    is_divided = False
    for recipe in arguments.recipes:
        for mode in arguments.modes:
            setting = Setting(sizes, ranks.mesh, ranks.device, recipe, mode)
            for name, call in cases(setting):
                if is_divided:
                    break
                entry: Entry = {"recipe": recipe, "mode": mode, "case": name}
                entries.append(entry)
                start = time.perf_counter()
                try:
                    entry["differing"] = summed(together(call, ranks), ranks)
                except RuntimeError as error:
                    entry["failed"] = str(error)
                except DividedError as error:
                    entry["failed"], is_divided = str(error), True
                entry["seconds"] = round(time.perf_counter() - start, 2)
                if ranks.is_first:
                    say(json.dumps(entry))
    is_equal = all("failed" not in e and not any(wrong for wrong, _ in e["differing"].values()) for e in entries)
    if ranks.is_first:
        _draw(report)
        bench.record()
    leave(ranks, is_divided=is_divided)
    return int(not is_equal)


def _draw(report: dict[str, Any]) -> None:
    def column(part: str) -> Callable[[Entry], str]:
        return lambda e: "{} of {}".format(*e["differing"][part]) if part in e["differing"] else "-"

    cases = report["cases"]
    shown = [{**e, "case": f"{e['recipe']}, {e['case']}"} for e in cases]
    draw_entries(f"numbers that differ, {report['device']}", shown, {part: column(part) for part in PARTS}, of="case")
    counts = [count for e in cases for count in e.get("differing", {}).values()]
    wrong, total = sum(wrong for wrong, _ in counts), sum(total for _, total in counts)
    say(f"{len(cases)} cases, {wrong} of {total} numbers differ")


if __name__ == "__main__":
    sys.exit(main())
