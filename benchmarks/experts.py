"""Forward and backward of a mixture's experts on one GPU: bfloat16, torchao and f8emu, timed side by side.

    python -m benchmarks.experts --json OUT

Experts are `w2(silu(w1(x)) * w3(x))` on groups of rows, whose sizes are multiples of 16 but for "odd". f8emu has w1 and
w3 as one weight but for "pair". "x4" accumulates the gradients of four microbatches before the weights change, "kept"
casts the weights once for the four; times are a microbatch's. "fast" and "rowwise_fast" accumulate without promotion
in all three GEMMs, as torchao does; otherwise gradients are promoted. Gradients of "delayed" are E4M3. Speed and memory
are times bfloat16's, compiled, with as many microbatches. Subjects take turns for several rounds; bfloat16 is timed at
the begin and at the end of each.

The floor is the time of the GEMMs alone, operands ready, and of the bytes that must move, at the speed of a copy: a
cast reads its sources once and writes each of its codes once; scales of the tensor's own amax need one more reading.
The limit is the largest of the GEMMs, the bytes and the rest. Exit status 1 if f8emu or bfloat16 fails somewhere.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from benchmarks import runner
from benchmarks.measure import forget
from benchmarks.runner import BASELINE, Entry, is_wrong
from benchmarks.subjects import MODES, fast, torchao
from benchmarks.timing import back_to_back, copy_bandwidth, held_bytes, peak_bytes
from benchmarks.workloads import Experts
from f8emu.spec import DELAYED, E4M3FN, ROWWISE, ROWWISE_FAST, Cast, Recipe
from f8emu.torch import Float8Experts, float8_experts

WARMUP = 3  # steps before the first figure: compilation, and a delayed recipe's first states
ALONE = "alone"  # the mode of GEMMs without anything else
_E4M3 = Cast(format=E4M3FN)  # of gradients, since grouped GEMMs take no E5M2
_DELAYED = fast(DELAYED, a=_E4M3)
_EAGER = ("eager",)
SHAPES = {
    "llama4-scout": Experts(16, 5120, 8192, 16384),
    "deepseek-v3": Experts(8, 7168, 2048, 32768),  # the experts of one rank
    "qwen3-30b": Experts(128, 2048, 768, 65536),
    "mixtral": Experts(8, 4096, 14336, 16384),
}


class Data:
    """What the subjects of a shape share: random, with groups of half to one and a half times the mean."""

    def __init__(self, shape: Experts, device: torch.device) -> None:
        self.shape, (experts, dim, hidden, tokens) = shape, shape
        torch.manual_seed(0)
        mean = tokens // experts
        sizes = torch.randint(mean // 2, mean * 3 // 2, (experts,))
        sizes = (sizes.double() * tokens / sizes.sum() / 16).round().int() * 16
        sizes[-1] += tokens - sizes.sum()
        odd = sizes + 7 * (1 - 2 * (torch.arange(experts) % 2))
        self.ends, self.odd_ends = (of.cumsum(0).to(device, torch.int32) for of in (sizes, odd))
        draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.x, self.grad_output = draw(tokens, dim), draw(tokens, dim) * 1e-3
        self.w1, self.w3 = (draw(experts, hidden, dim) / dim**0.5 for _ in range(2))
        self.w13, self.w2 = torch.cat((self.w1, self.w3), dim=1), draw(experts, dim, hidden) / hidden**0.5


# 1 Subjects


class Mixture(nn.Module):
    """Three weights, multiplied one by one or all by `experts`."""

    def __init__(self, data: Data, mm: Any = None, experts: Any = None, **options: Any) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = map(nn.Parameter, (data.w1, data.w3, data.w2))
        self.mm, self.experts, self.options = mm, experts, options

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        if self.experts is not None:
            return self.experts(x, (self.w1, self.w3), self.w2, ends, **self.options)
        gate, up = (self.mm(x, w.transpose(-2, -1), offs=ends, **self.options) for w in (self.w1, self.w3))
        return self.mm(silu(gate) * up, self.w2.transpose(-2, -1), offs=ends, **self.options)


def _torchao(data: Data) -> nn.Module:
    mm = torchao("torchao.prototype.moe_training.fp8_grouped_mm")._to_fp8_rowwise_then_scaled_grouped_mm
    return Mixture(data, mm, pad_token_groups_for_grouped_mm=False)


def _joint(data: Data, **options: Any) -> nn.Module:
    module = Float8Experts(*data.shape[:3], device=data.x.device, dtype=torch.bfloat16, **options)
    module.gate_up_proj.data, module.down_proj.data = data.w13, data.w2
    return module


class Kind(NamedTuple):
    """What is timed under one name."""

    make: Callable[[Data], nn.Module] | None = _joint  # None is GEMMs alone
    recipe: Recipe | None = ROWWISE  # of the floor; None is bfloat16
    is_pair: bool = False  # w1 and w3 are two weights
    microbatches: int = 1
    keeps_codes: bool = False
    modes: tuple[str, ...] = MODES


_BF16 = Kind(partial(Mixture, mm=torch._grouped_mm), None, True)  # pyright: ignore[reportPrivateImportUsage]
_FAST = Kind(partial(_joint, recipe=ROWWISE_FAST), ROWWISE_FAST)
KINDS = {
    BASELINE: _BF16,
    "torchao/rowwise": Kind(_torchao, is_pair=True, modes=("compiled",)),
    "f8emu/rowwise": Kind(),
    "f8emu/rowwise_fast": _FAST,
    "f8emu/rowwise_fast, odd": _FAST._replace(modes=_EAGER),
    "f8emu/rowwise_fast, pair": Kind(
        partial(Mixture, experts=float8_experts, recipe=ROWWISE_FAST), ROWWISE_FAST, True, modes=_EAGER
    ),
    "f8emu/delayed, fast": Kind(partial(_joint, recipe=_DELAYED), _DELAYED),
    "bf16, x4": _BF16._replace(microbatches=4),
    "f8emu/rowwise_fast, kept, x4": _FAST._replace(microbatches=4, keeps_codes=True),
    "GEMMs/bf16": Kind(None, None, True, modes=(ALONE,)),
    "GEMMs/float8": Kind(None, ROWWISE_FAST, modes=(ALONE,)),
    "GEMMs/float8, pair": Kind(None, ROWWISE_FAST, True, modes=(ALONE,)),
    "bf16, again": _BF16,
}


class Subject:
    """Experts on the common weights, or GEMMs alone, after the first steps."""

    def __init__(self, entry: Entry, data: Data) -> None:
        self.kind, self.data, held = KINDS[entry["subject"]], data, held_bytes(data.x.device)
        self.ends = data.odd_ends if entry["subject"].endswith(", odd") else data.ends
        self.x = data.x.detach().requires_grad_()
        self.model: Any = nn.Module() if self.kind.make is None else self.kind.make(data)
        self.call: Callable[..., Any] = self.model
        if self.kind.make is None:
            self.call = data.shape.gemms(self.kind.recipe, self.kind.is_pair, data.ends)
        if entry["mode"] == "compiled":  # torchao's casts are not asked to be one graph
            self.call = torch.compile(self.model, fullgraph=self.kind.make is not _torchao, dynamic=False)
        self.change_weights()
        for _ in range(WARMUP):
            self.step()
        self.free()
        if self.kind.keeps_codes:
            entry["codes_bytes"] = held_bytes(data.x.device) - held

    def free(self) -> None:
        """Drops the gradients."""
        for p in (self.x, *self.model.parameters()):
            p.grad = None

    def run(self) -> Tensor:
        """A pass; its input is a new tensor, as in training: f8emu casts one tensor once, whoever reads it."""
        self.x.grad = None
        output = self.call(self.x.view_as(self.x), self.ends)
        output.backward(self.data.grad_output)
        return output

    def step(self) -> None:
        """Passes that accumulate gradients, and a change of the weights."""
        if self.kind.make is None:
            self.call()
            return
        self.free()
        for _ in range(self.kind.microbatches):
            self.run()
        self.change_weights()

    def change_weights(self) -> None:
        """What the weights' casts cost after a step of an optimizer, without the time of the optimizer."""
        for p in self.model.parameters():
            torch.autograd.graph.increment_version(p)
        if self.kind.keeps_codes:
            self.model.precompute_weights()


# 2 The script


def add_comparisons(entries: Sequence[Entry], shape: Experts, bytes_per_second: float) -> None:
    """Adds times bfloat16's with as many microbatches, compiled if that was timed, and the floor with the limit."""
    timed = [(KINDS[entry["subject"]], entry) for entry in entries if "ms" in entry]
    alone = {(kind.recipe is None, kind.is_pair): e["ms"] for kind, e in timed if kind.make is None}
    for kind, entry in timed:
        of = [e for k, e in timed if k.make is _BF16.make and k.microbatches == kind.microbatches]
        for reference in sorted(of, key=lambda e: e["mode"])[:1]:
            entry["speed"] = reference["ms"] / entry["ms"]
            if entry.get("peak_bytes") and reference.get("peak_bytes"):
                entry["memory"] = entry["peak_bytes"] / reference["peak_bytes"]
        gemms_ms = alone.get((kind.recipe is None, kind.is_pair))
        if gemms_ms and kind.make not in (None, _torchao):
            casts = 1 / kind.microbatches if kind.keeps_codes else 1.0  # of the weights, a pass
            parts = {
                "GEMMs": gemms_ms,
                "bytes": 1e3 * shape.bytes_moved(kind.recipe, kind.is_pair, casts) / bytes_per_second,
            }
            entry |= {"gemms_ms": gemms_ms, "bytes_ms": parts["bytes"], "floor_ms": sum(parts.values())}
            parts["the rest"] = entry["ms"] - entry["floor_ms"]
            entry |= {"fraction_of_floor": entry["floor_ms"] / entry["ms"], "limit": max(parts, key=lambda p: parts[p])}


BENCH = runner.Bench(
    "benchmarks.experts",
    __doc__,
    runner.option("shapes", tuple(SHAPES), choices=SHAPES),
    runner.option("subjects", tuple(KINDS), choices=KINDS, metavar="SUBJECT"),
    runner.option("mode", "both", choices=(*MODES, "both")),
    runner.option("tiny", False, "tiny experts: for tests"),
    *runner.turns_of(5, 10),
    runner.DEVICE,
)
_COLUMNS = "ms:.3f bounds speed:.3f peak_bytes:GiB memory:.3f codes_bytes:GiB gemms_ms:.3f bytes_ms:.3f "
_COLUMNS += "fraction_of_floor:.1% limit:"


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv)
    arguments, device, shapes = run.arguments, run.device, list[Entry]()
    runner.compile_without_limits()
    bandwidth = copy_bandwidth(device)
    run.announce(f", copy {bandwidth / 1e12:.3f} TB/s")
    run.report |= {"rounds": arguments.rounds, "steps": arguments.steps, "copy_bytes_per_second": round(bandwidth)}
    for name in ("tiny",) if arguments.tiny else arguments.shapes:
        shape = SHAPES.get(name, Experts(2, 16, 32, 64))
        entries = measure(shape, device, arguments)
        add_comparisons(entries, shape, bandwidth)
        shapes.append({"name": name, **shape._asdict(), "subjects": entries})
        runner.draw_entries(f"{name}, {shape}, forward + backward; speed: times bf16 compiled", entries, _COLUMNS)
        run.record(shapes=shapes)
        forget()
    return int(any(is_wrong(e) for shape in shapes for e in shape["subjects"]))


def measure(shape: Experts, device: torch.device, arguments: Any) -> list[Entry]:
    """One entry for each subject and mode: figures, or why there are none."""
    data = Data(shape, device)
    entries = [
        Entry(subject=name, mode=mode, microbatches=KINDS[name].microbatches)
        for name in sorted(arguments.subjects, key=[*KINDS].index)
        for mode in KINDS[name].modes
        if mode == ALONE or arguments.mode in (mode, "both")
    ]

    def turn(subject: Subject) -> float:
        passes = subject.kind.microbatches
        timed = back_to_back(subject.step, max(1, arguments.steps // passes), device)
        subject.free()
        return timed.ms / passes

    for entry, subject in runner.race(entries, lambda entry: Subject(entry, data), turn, arguments.rounds):
        if subject.kind.make is None:
            continue
        with runner.attempt(entry):
            subject.step()  # what is there before a step has the gradients of the step before it
            entry["peak_bytes"] = peak_bytes(subject.step, device)
            results = [subject.run(), *(p.grad for p in (subject.x, *subject.model.parameters()))]
            entry["is_finite"] = all(x is not None and bool(x.isfinite().all()) for x in results)
            subject.free()
    return entries


if __name__ == "__main__":
    sys.exit(main())
