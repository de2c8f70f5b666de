"""Layers over two ranks and on one device: every bit of them.

    torchrun --nproc-per-node 2 -m benchmarks.proofs.distributed_bits           on 2 GPUs
    torchrun --nproc-per-node 2 -m benchmarks.proofs.distributed_bits --tiny    2 processes on a CPU, emulated

FSDP2 with float8 all-gather, with and without `reshard_after_forward` and
`precompute_float8_dynamic_scale_for_fsdp`, and with weights at rest (`float8_primary_weights`): blocks of LayerNorm and
two linear layers, a bias, an odd number of hidden units, so that the ranks' shards are unequal, and an odd number of
tokens. One device is given the batches of the ranks in turn; its gradients are added in the order of the ranks and
divided by their number. Outputs, losses and gradients of every step, the weights after it (at rest their masters) and
the states of delayed scaling are compared.

Tensor parallelism, in torch's styles and in f8emu's: the output of a column-parallel layer is a slice of that of one
device, and so are the weight gradients of a column-parallel and of a row-parallel layer and the input gradient of the
latter. What is a sum over ranks is left out; it is rounded otherwise than the sum of one device.

Experts (`Float8Experts`, blocks of `x + experts(x)`): by FSDP2, with and without float8 all-gather, beside one device
that is given the batches of the ranks in turn; by `ExpertParallel`, beside one device that is given the tokens of all
ranks at once, by expert and then by rank. Groups have any size, and in one step no rank has tokens for the experts of
the last. Compiled expert-parallel blocks are split at the exchange of tokens, whose numbers the host reads.

Eager layers are compared with eager ones, compiled with compiled ones: the compiler's LayerNorm has bits of its own.
Every rank has other data, and each compares its part; the counts are those of all ranks. Weights are bfloat16.

Exit status 1 if a number differs or a case fails.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import f8emu.torch as f8
from benchmarks.measure import differing
from benchmarks.ranks import DividedError, Ranks, join
from benchmarks.runner import DEVICE, Bench, Entry, attempt, draw_entries, option, say
from f8emu.spec import RecipeName
from f8emu.spec.formats import E4M3FN
from f8emu.spec.recipe import DELAYED, TENSORWISE, Cast, Recipe
from f8emu.torch.parallel.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

RANKS = 2  # with more, the sum of gradients depends on the order in which the library adds them
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
_CAST = Cast(format=E4M3FN)
E4M3 = {
    f"{r.name}_e4m3": replace(r, grad_input=replace(r.grad_input, a=_CAST), grad_weight=replace(r.grad_weight, a=_CAST))
    for r in (TENSORWISE, DELAYED)
}
"""Recipes whose gradients a GPU multiplies in one launch for all groups."""
LAYERS = ("linear", "experts")
EXPERTS = 8
MODES = ("eager", "compiled")
PARTS = ("outputs", "losses", "gradients", "weights", "states")
STEPS = 3

Trace = list[tuple[str, Tensor]]  # what one rank computes: (part, tensor), in the order of computation
Counts = dict[str, tuple[int, int]]  # part -> how many numbers differ, of how many


class Sizes(NamedTuple):
    """Of the layers."""

    dim: int
    hidden: int  # of FSDP2's blocks: odd
    wide: int  # of the layers that tensor parallelism cuts
    # Of a rank under FSDP2: odd. Under tensor parallelism a rank has as many less one, of each of two sequences.
    tokens: int


FULL = Sizes(256, 385, 512, 101)
TINY = Sizes(32, 49, 64, 17)


class Setting(NamedTuple):
    """Where the layers run."""

    sizes: Sizes
    mesh: DeviceMesh
    device: torch.device
    recipe: RecipeName
    mode: str

    @property
    def config(self) -> RecipeName | Recipe:
        return E4M3.get(self.recipe, self.recipe)

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


def blocks(setting: Setting, *, gathers: bool, rests: bool) -> nn.Sequential:
    """Two converted blocks, the same on every rank."""
    torch.manual_seed(0)
    sizes = setting.sizes
    model = nn.Sequential(*(Block(sizes.dim, sizes.hidden) for _ in range(2))).to(setting.device, torch.bfloat16)
    f8.convert_to_float8_training(
        model,
        config=setting.config,
        pad=True,
        enable_fsdp_float8_all_gather=gathers,
        float8_primary_weights=rests,
    )
    return model


def batch(setting: Setting, step: int, rank: int) -> Tensor:
    """Of a rank; magnitudes differ from rank to rank and grow from step to step."""
    x = setting.drawn(setting.sizes.tokens, setting.sizes.dim, seed=RANKS * step + rank)
    return x * (rank + 1) * 2**step


def optimizer_of(model: nn.Module, rests: bool = False) -> torch.optim.Optimizer:
    adamw = partial(f8.MasterWeights, optimizer_class=torch.optim.AdamW) if rests else torch.optim.AdamW
    return adamw(model.parameters(), lr=1e-2, foreach=False)


def data_parallel(
    setting: Setting, *, is_cut: bool, reshards: bool = True, precomputes: bool = False, rests: bool = False
) -> Trace:
    """By FSDP2, or on one device with the batches of all ranks in turn: this rank's part of what must be equal."""
    # 1. The model, its shards if it is cut.
    model = blocks(setting, gathers=is_cut, rests=rests)
    if is_cut:
        for module in (*model, model):
            fully_shard(module, mesh=setting.mesh, reshard_after_forward=reshards)
    else:
        f8.set_amax_reduction_group(model, False)
    for block in model if setting.mode == "compiled" else ():
        block.compile(fullgraph=True, dynamic=False)
    optimizer, trace, rank_here = optimizer_of(model, rests), Trace(), setting.mesh.get_local_rank()
    parameters, mine = list(model.parameters()), local if is_cut else setting.own
    for step in range(STEPS):
        # 2. One pass of all ranks; it adds two gradients in either order.
        outputs = {rank: model(batch(setting, step, rank)) for rank in ([rank_here] if is_cut else range(RANKS))}
        losses = {rank: output.float().square().mean() for rank, output in outputs.items()}
        torch.autograd.backward(list(losses.values()))
        trace += [("outputs", outputs[rank_here].detach()), ("losses", losses[rank_here].detach())]
        # 3. FSDP2 divides the sum of gradients itself.
        for parameter in () if is_cut else parameters:
            parameter.grad = grad_of(parameter) / RANKS
        trace += [("gradients", mine(grad_of(parameter)).clone()) for parameter in parameters]
        optimizer.step()
        optimizer.zero_grad()
        if precomputes:
            f8.precompute_float8_dynamic_scale_for_fsdp(model)
        values = [p.master if isinstance(p, f8.Float8Weight) else p.detach() for p in parameters]
        trace += [("weights", mine(value).clone()) for value in values]
        trace += states_of(model)
    return trace


def cut(setting: Setting, *, is_float8: bool) -> tuple[Trace, Trace]:
    """A column-parallel and a row-parallel layer: of one device, this rank's part; over the ranks."""
    sizes, traces = setting.sizes, (Trace(), Trace())
    models = (two_layers(setting), two_layers(setting))
    f8.set_amax_reduction_group(models[0], False)
    by_columns, by_rows = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel()
    if is_float8:
        by_columns = Float8ColwiseParallel(input_layouts=Shard(1))
        by_rows = Float8RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(models[1], setting.mesh, {"0": by_columns, "1": by_rows})
    runs = [[setting.run(layer) for layer in model] for model in models]
    optimizers = [optimizer_of(model) for model in models]
    for step in range(STEPS):
        x, wide_grad, wide, grad = (
            setting.drawn(2, sizes.tokens - 1, n, seed=4 * step + i) * 2**step
            for i, n in enumerate((sizes.dim, sizes.wide, sizes.wide, sizes.dim))
        )
        for is_cut, (model, run, trace) in enumerate(zip(models, runs, traces, strict=True)):
            input_of, mine = (setting.own, whole) if is_cut else (whole, setting.own)
            # 1. By columns: the input has this rank's tokens, the output its columns.
            columns = run[0](input_of(x, 1) * 1)
            columns.backward(input_of(wide_grad, 2))
            trace.append(("outputs", mine(columns.detach(), 2)))
            # 2. By rows: the input has this rank's columns, the gradient of the output its tokens, or all.
            h = input_of(wide, 2).clone().requires_grad_()
            output = run[1](h * 1) * 1  # read, so that nothing waits for it at the end
            output.backward(input_of(grad, 1) if is_float8 else grad)
            trace.append(("gradients", mine(grad_of(h), 2)))
            places = ((model[0].weight, 0), (model[0].bias, 0), (model[1].weight, 1))
            trace += [("gradients", mine(local(grad_of(p)), dim).clone()) for p, dim in places]
            optimizers[is_cut].step()
            optimizers[is_cut].zero_grad()
            trace += [("weights", mine(local(p.detach()), dim).clone()) for p, dim in places]
            trace += states_of(model)
    return traces


def two_layers(setting: Setting) -> Any:
    """dim -> wide and wide -> dim, converted, the same on every rank."""
    torch.manual_seed(0)
    sizes = setting.sizes
    layers = (nn.Linear(sizes.dim, sizes.wide), nn.Linear(sizes.wide, sizes.dim, bias=False))
    model = nn.Sequential(*layers).to(setting.device, torch.bfloat16)
    f8.convert_to_float8_training(model, config=setting.config)
    return model


class Mixture(nn.Sequential):
    """Blocks of experts, each added to its input."""

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        for block in self:
            x = x + block(x, offs)
        return x


def chosen(setting: Setting, step: int, rank: int) -> Tensor:
    """The expert of each token of a rank, sorted; in the second step only the first half of the experts."""
    generator = torch.Generator().manual_seed(1000 + RANKS * step + rank)
    top = EXPERTS // 2 if step == 1 else EXPERTS
    return torch.randint(top, (setting.sizes.tokens,), generator=generator).sort().values.to(setting.device)


def ends(experts: Tensor) -> Tensor:
    return torch.bincount(experts, minlength=EXPERTS).cumsum(0).int()


def experts(setting: Setting, *, is_cut: bool, is_parallel: bool, gathers: bool = False) -> Trace:
    """By `ExpertParallel` or FSDP2, or what one device has in its place: this rank's part of what must be equal."""
    # 1. The model, its shards if it is cut.
    torch.manual_seed(0)
    sizes, rank_here = setting.sizes, setting.mesh.get_local_rank()
    blocks = [f8.Float8Experts(EXPERTS, sizes.dim, sizes.wide, recipe=setting.config) for _ in range(2)]
    model = Mixture(*blocks).to(setting.device, torch.bfloat16)
    if not is_cut:
        f8.set_amax_reduction_group(model, False)
    elif is_parallel:
        parallelize_module(model, setting.mesh, {"*": f8.ExpertParallel()})
    else:
        if gathers:
            f8.convert_to_float8_training(model, config=setting.config, enable_fsdp_float8_all_gather=True)
        for module in (*model, model):
            fully_shard(module, mesh=setting.mesh)
    for block in model if setting.mode == "compiled" else ():
        block.compile(fullgraph=not is_parallel, dynamic=is_parallel)
    optimizer, trace = optimizer_of(model), Trace()
    parameters, mine = list(model.parameters()), local if is_cut else setting.own
    for step in range(STEPS):
        # 2. One pass of all ranks: of one device in turn, or at once.
        ranks = [rank_here] if is_cut else range(RANKS)
        tokens = {rank: batch(setting, step, rank).requires_grad_() for rank in ranks}
        of_tokens = {rank: chosen(setting, step, rank) for rank in ranks}
        if is_parallel and not is_cut:
            by_rank = torch.cat(list(of_tokens.values()))
            order = by_rank.argsort(stable=True)
            together = model(torch.cat(list(tokens.values()))[order], ends(by_rank))
            outputs = dict(enumerate(together[order.argsort()].split(sizes.tokens)))
        else:
            outputs = {rank: model(x, ends(of_tokens[rank])) for rank, x in tokens.items()}
        torch.autograd.backward([output.float().square().mean() for output in outputs.values()])
        trace += [("outputs", outputs[rank_here].detach()), ("gradients", grad_of(tokens[rank_here]))]
        # 3. FSDP2 divides the sum of gradients itself.
        for parameter in () if is_cut or is_parallel else parameters:
            parameter.grad = grad_of(parameter) / RANKS
        trace += [("gradients", mine(grad_of(parameter)).clone()) for parameter in parameters]
        optimizer.step()
        optimizer.zero_grad()
        trace += [("weights", mine(parameter.detach()).clone()) for parameter in parameters]
        trace += states_of(model)
    return trace


def whole(x: Tensor, dim: int) -> Tensor:
    """All of what is not cut, or is cut already."""
    return x


def grad_of(x: Tensor) -> Tensor:
    assert x.grad is not None, "every tensor of these models has a gradient"
    return x.grad


def local(x: Tensor) -> Tensor:
    """The plain tensor that this rank holds."""
    shard = x.to_local() if isinstance(x, DTensor) else x
    return getattr(shard, "plain", shard)


def states_of(model: nn.Module) -> Trace:
    return [("states", state) for _, state in sorted(f8.delayed_state_dict(model).items())]


def compared(observed: Trace, expected: Trace) -> Counts:
    """For each part how many numbers differ as bit patterns, and of how many."""
    counts = {part: (0, 0) for part in PARTS}
    for (part, a), (other, b) in zip(observed, expected, strict=True):
        assert part == other and a.shape == b.shape and a.dtype == b.dtype, f"{part} {a.shape}, {other} {b.shape}"
        counts[part] = (counts[part][0] + differing(a, b), counts[part][1] + a.numel())
    return counts


def cases_of_experts(setting: Setting) -> Iterator[tuple[str, Callable[[], Counts]]]:
    """(name, call) of a recipe and a mode."""

    def beside_one(is_parallel: bool, **how: bool) -> Counts:
        traces = [experts(setting, is_cut=is_cut, is_parallel=is_parallel, **how) for is_cut in (True, False)]
        return compared(*traces)

    yield "experts, FSDP2", partial(beside_one, False)
    if not setting.recipe.startswith("delayed"):  # those are gathered as they are
        yield "experts, FSDP2, float8 gather", partial(beside_one, False, gathers=True)
    yield "experts, expert parallel", partial(beside_one, True)


def cases_of_linear(setting: Setting) -> Iterator[tuple[str, Callable[[], Counts]]]:
    """(name, call) of a recipe and a mode."""
    expected: dict[bool, Trace] = {}  # of one device, by the first case that needs it

    def fsdp(rests: bool = False, **how: bool) -> Counts:
        if rests not in expected:
            expected[rests] = data_parallel(setting, is_cut=False, rests=rests)
        return compared(data_parallel(setting, is_cut=True, rests=rests, **how), expected[rests])

    def parallel(is_float8: bool) -> Counts:
        of_one, of_ranks = cut(setting, is_float8=is_float8)
        return compared(of_ranks, of_one)

    for reshards in (True, False):
        for precomputes in (False, True):
            name = f"FSDP2{', reshard' if reshards else ''}{', precompute' if precomputes else ''}"
            yield name, partial(fsdp, reshards=reshards, precomputes=precomputes)
    for reshards in (True, False):
        yield f"FSDP2, at rest{', reshard' if reshards else ''}", partial(fsdp, rests=True, reshards=reshards)
    yield "tensor parallel, torch's styles", partial(parallel, False)
    # A product in high precision has no codes to gather.
    if setting.recipe != "rowwise_with_gw_hp":
        yield "tensor parallel, f8emu's styles", partial(parallel, True)


def summed(counts: Counts, ranks: Ranks) -> dict[str, list[int]]:
    """Over all ranks."""
    total = torch.tensor(list(counts.values()))
    dist.all_reduce(total, group=ranks.control)
    return {part: row for part, row in zip(counts, total.tolist(), strict=True) if row[1]}


BENCH = Bench(
    "benchmarks.proofs.distributed_bits",
    __doc__,
    option("layers", LAYERS, choices=LAYERS),
    option("recipes", (*RECIPES, *E4M3), choices=(*RECIPES, *E4M3), help="those with E4M3 gradients are of experts"),
    option("modes", MODES, choices=MODES),
    option("tiny", False, "small layers: for tests"),
    DEVICE,
)


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    arguments, report = run.arguments, run.report
    ranks = join(arguments.device, report)
    if ranks.mesh.size() != RANKS:
        raise SystemExit(
            f"{BENCH.module}: {RANKS} ranks are expected, since the sum of more gradients depends on their order; got "
            f"{ranks.mesh.size()}; run it with torchrun --nproc-per-node {RANKS}"
        )
    sizes, entries = TINY if arguments.tiny else FULL, list[Entry]()
    report |= {"steps": STEPS, "sizes": sizes._asdict(), "cases": entries}
    is_divided = False
    try:
        for recipe, mode in product(arguments.recipes, arguments.modes):
            setting = Setting(sizes, ranks.mesh, ranks.device, recipe, mode)
            of_linear = cases_of_linear(setting) if "linear" in arguments.layers and recipe not in E4M3 else ()
            of_experts = cases_of_experts(setting) if "experts" in arguments.layers else ()
            for name, call in (*of_linear, *of_experts):
                entry: Entry = {"recipe": recipe, "mode": mode, "case": name}
                entries.append(entry)
                start = time.perf_counter()
                with attempt(entry):
                    entry["differing"] = summed(ranks.together(call), ranks)
                entry["seconds"] = round(time.perf_counter() - start, 2)
                if ranks.is_first:
                    say(json.dumps(entry))
    except DividedError as error:
        entries[-1]["failed"], is_divided = str(error), True
    is_equal = all("failed" not in e and not any(wrong for wrong, _ in e["differing"].values()) for e in entries)
    if ranks.is_first:
        shown = [
            {**e, "case": f"{e['recipe']}, {e['case']}"}
            | {part: "{} of {}".format(*counts) for part, counts in e.get("differing", {}).items()}
            for e in entries
        ]
        draw_entries(f"numbers that differ, {report['device']}", shown, ": ".join([*PARTS, ""]), of="case")
        run.record()
    ranks.leave(is_divided=is_divided)
    return int(not is_equal)


if __name__ == "__main__":
    sys.exit(main())
