"""Programs of other projects on an H100, and on its CPU with torch's operators emulated: how many elements differ.

    pip download --no-deps torchao==0.18.0 torchtitan==0.2.2 torchdata==0.11.0 datasets==4.7.0 dill==0.4.0 \
        multiprocess==0.70.18 tyro==1.0.17 docstring_parser typeguard
    python -m benchmarks.proofs.programs --wheels . --json benchmarks/results/programs-h100.json

- torchao, eager and compiled: two layers under a recipe take steps with AdamW under activation checkpointing. The CPU
  begins each step with the weights of the GPU; outputs, gradients and the weights after the optimizer are compared.
- torchao serving: a model quantized by `quantize_`, per tensor and per row.
- experts: a mixture in bfloat16 through `torch.nn.functional.grouped_mm`, forward and backward.
- torchtitan: its Trainer takes steps of a Llama on the GPU. Each float8 layer's call is repeated by a copy of the layer
  on the CPU: output, grad_input and grad_weight.

`f8emu.torch.emulate(force=True)` emulates CPU tensors alone; those on the GPU are multiplied by its tensor cores.

Exit status 1 if an output or gradient differs where none should. Those of tensorwise, compiled, may: a bias, ReLU and
the amax of the next layer's input are one fusion, which keeps float32; on a GPU it is cut into kernels that hand the
amax on in bfloat16, on a CPU it is not. The optimizer is not emulated.
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import f8emu.torch as f8
from benchmarks.measure import differing
from benchmarks.runner import Bench, draw, option, say
from benchmarks.torchtitan.__main__ import install

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
DEVICES = GPU, CPU
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MODES = ("eager", "compiled")
OPTIMIZER = "weight after AdamW"
SHAPES = ((64, 128, 256), (272, 512, 1024), (1024, 4096, 512))  # tokens, K, hidden


class Comparison:
    """Counts of elements, and of those that differ, by kind of tensor."""

    def __init__(self) -> None:
        self.elements, self.differing = Counter[str](), Counter[str]()

    def add(self, kind: str, gpu: Tensor | None, cpu: Tensor | None) -> None:
        assert gpu is not None and cpu is not None, f"{kind} was computed"
        self.elements[kind] += gpu.numel()
        self.differing[kind] += differing(gpu.detach().cpu(), cpu.detach())

    @property
    def entry(self) -> dict[str, Any]:
        kinds = {kind: [self.differing[kind], count] for kind, count in self.elements.items()}
        return {"elements": sum(self.elements.values()), "differ": sum(self.differing.values()), "kinds": kinds}


def converted(recipe: str, model: nn.Module) -> nn.Module:
    from torchao.float8 import (  # pyright: ignore[reportMissingImports]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


class Pair(nn.Module):
    """Two layers, the first with a bias, under activation checkpointing."""

    def __init__(self, k: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(k, hidden), nn.ReLU(), nn.Linear(hidden, k, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


def torchao_trains(recipe: str, mode: str) -> Comparison:
    """Steps of torchao's layers on both devices."""
    comparison = Comparison()
    for seed, (tokens, k, hidden) in enumerate(SHAPES if mode == "eager" else SHAPES[1:2]):
        torch.manual_seed(seed)
        pair = Pair(k, hidden).bfloat16()
        models = [converted(recipe, copy.deepcopy(pair).to(device)) for device in DEVICES]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        calls = models if mode == "eager" else [torch.compile(model, dynamic=False) for model in models]
        parameters = list(zip(*(model.parameters() for model in models), strict=True))
        for _ in range(3):
            models[1].load_state_dict(models[0].state_dict())
            batch, gradient = torch.randn(tokens, k).bfloat16() * 3, torch.randn(tokens, k).bfloat16() * 1e-2
            inputs = [batch.detach().to(device, copy=True).requires_grad_() for device in DEVICES]
            outputs = [call(x) for call, x in zip(calls, inputs, strict=True)]
            for output in outputs:
                output.backward(gradient.to(output.device))
            comparison.add("output", *outputs)
            comparison.add("grad_input", *(x.grad for x in inputs))
            for pair in parameters:
                comparison.add("grad_bias" if pair[0].ndim == 1 else "grad_weight", *(p.grad for p in pair))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for pair in parameters:
                comparison.add(OPTIMIZER, *pair)
    return comparison


def torchao_serves(granularity: str) -> Comparison:
    """A model that torchao quantized, in inference."""
    from torchao.quantization import (  # pyright: ignore[reportMissingImports]
        Float8DynamicActivationFloat8WeightConfig,
        PerRow,
        PerTensor,
        quantize_,
    )

    comparison = Comparison()
    for seed, (tokens, k, hidden) in enumerate(SHAPES):
        torch.manual_seed(seed)
        model = Pair(k, hidden).bfloat16()
        batch = torch.randn(tokens, k).bfloat16()
        outputs: list[Tensor] = []
        for device in DEVICES:
            served = copy.deepcopy(model).to(device)
            each = {"per tensor": PerTensor, "per row": PerRow}[granularity]()
            quantize_(served, Float8DynamicActivationFloat8WeightConfig(granularity=each))
            with torch.no_grad():
                outputs.append(served(batch.to(device)))
        comparison.add("output", *outputs)
    return comparison


def experts_train() -> Comparison:
    """Two grouped GEMMs of a mixture, the tokens sorted by expert."""
    comparison = Comparison()
    for seed, (tokens, k, hidden) in enumerate(SHAPES):
        torch.manual_seed(seed)
        ends = torch.tensor([tokens // 8, tokens // 8, tokens // 2, tokens], dtype=torch.int32)
        leaves = [torch.randn(tokens, k), torch.randn(4, hidden, k) / k**0.5, torch.randn(4, k, hidden) / hidden**0.5]
        tensors = [[t.bfloat16().to(device).requires_grad_() for t in leaves] for device in DEVICES]
        gradient = torch.randn(tokens, k).bfloat16()
        outputs: list[Tensor] = []
        for x, up, down in tensors:
            offs = ends.to(x.device)
            inner = torch.nn.functional.grouped_mm(x, up.transpose(-2, -1), offs=offs)
            outputs.append(torch.nn.functional.grouped_mm(inner.relu(), down.transpose(-2, -1), offs=offs))
            outputs[-1].backward(gradient.to(x.device))
        comparison.add("output", *outputs)
        for kind, p, q in zip(("grad_input", "grad_weight", "grad_weight"), *tensors, strict=True):
            comparison.add(kind, p.grad, q.grad)
    return comparison


class Repeated:
    """Repeats on the CPU each call of a model's float8 layers, while the model trains on the GPU."""

    def __init__(self, model: nn.Module) -> None:
        self.comparison = Comparison()
        self.waiting: dict[nn.Module, tuple[nn.Module, Tensor, Tensor]] = {}  # copy, its input and output
        self.gradients: list[tuple[Tensor, Tensor | None]] = []
        self.layers = [layer for layer in model.modules() if type(layer).__name__ == "Float8Linear"]
        for layer in self.layers:
            layer.register_forward_hook(self.forward)
            layer.register_full_backward_hook(self.backward)
            layer.get_parameter("weight").register_post_accumulate_grad_hook(self.accumulated)

    def forward(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        hooks = layer._forward_hooks, layer._backward_hooks
        layer._forward_hooks, layer._backward_hooks = type(hooks[0])(), type(hooks[1])()
        copied = copy.deepcopy(layer).to(CPU)
        layer._forward_hooks, layer._backward_hooks = hooks
        x = inputs[0].detach().to(CPU).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):  # torchtitan trains so on one GPU
            repeated = copied(x)
        self.comparison.add("output", output, repeated)
        self.waiting[layer] = copied, x, repeated

    def backward(self, layer: nn.Module, grad_input: Any, grad_output: Any) -> None:
        copied, x, repeated = self.waiting.pop(layer)
        repeated.backward(grad_output[0].to(CPU))
        self.comparison.add("grad_input", grad_input[0], x.grad)
        self.gradients.append((layer.get_parameter("weight"), copied.get_parameter("weight").grad))

    def accumulated(self, weight: Tensor) -> None:
        """Before gradients are clipped."""
        assert weight.grad is not None, "it has just been accumulated"
        weight.accumulated = weight.grad.clone()  # pyright: ignore[reportAttributeAccessIssue]

    def step(self, *_: Any) -> None:
        """Compare the weights' gradients, which the backward pass has accumulated."""
        for weight, gradient in self.gradients:
            self.comparison.add("grad_weight", weight.accumulated, gradient)  # pyright: ignore[reportAttributeAccessIssue]
        self.gradients.clear()


def torchtitan_trains(recipe: str) -> Comparison:
    """Steps of torchtitan's Trainer on a small Llama, every float8 layer repeated on the CPU."""
    from benchmarks.torchtitan import worker

    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 29512 + len(recipe))):
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"] = "localhost"
    worker.datasets_if_broken()
    worker.tensorboard_if_missing()
    from torchtitan.config import ConfigManager  # pyright: ignore[reportMissingImports]
    from torchtitan.train import Trainer  # pyright: ignore[reportMissingImports]

    import benchmarks.torchtitan.synthetic as synthetic

    synthetic.register(layers=2)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "job.config_file": Path(synthetic.__file__).with_name("llama3_8b.toml"),
            "job.dump_folder": folder,
            "model.flavor": "debugmodel",
            "training.steps": 20,
            "training.seq_len": 256,
            "activation_checkpoint.mode": "none",
        }
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        words += ["--compile.no-enable", "--model.converters", "quantize.linear.float8"]
        words += [] if recipe == "tensorwise" else ["--quantize.linear.float8.recipe_name", recipe]
        trainer = Trainer(ConfigManager().parse_args(words))
        repeated = Repeated(trainer.model_parts[0])
        hook = register_optimizer_step_pre_hook(repeated.step)
        try:
            trainer.train()
        finally:
            hook.remove()
            trainer.close()
    assert repeated.layers, "torchao converted the model"
    return repeated.comparison


PROGRAMS: dict[str, Callable[[], Comparison]] = {
    **{f"torchao {r}, {m}": partial(torchao_trains, r, m) for r, m in product(RECIPES, MODES)},
    **{f"torchao serving, {g}": partial(torchao_serves, g) for g in ("per tensor", "per row")},
    "experts in bfloat16": experts_train,
    **{f"torchtitan {r}": partial(torchtitan_trains, r) for r in RECIPES},
}
MAY_DIFFER = "torchao tensorwise, compiled"

BENCH = Bench(
    "benchmarks.proofs.programs",
    __doc__,
    option("programs", tuple(PROGRAMS), choices=PROGRAMS, metavar="PROGRAM"),
    option("wheels", Path, "a folder of wheels to install first"),
    option("jobs", 6, "programs at once"),
    option("limit", 240.0, "seconds that a program may take"),
    option("here", False, "run the one program in this process"),
)


def run_apart(name: str, limit: float) -> dict[str, Any]:
    """A program in a process of its own: what it counted, or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        command = [
            sys.executable,
            "-m",
            "benchmarks.proofs.programs",
            "--here",
            "--programs",
            name,
            "--json",
            str(file),
        ]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return {"program": name, "failed": f"more than {limit:.0f} s"}
        if file.is_file():
            return json.loads(file.read_text())["programs"][0]
        return {"program": name, "failed": run.stderr.strip().splitlines()[-1:], "log": run.stderr[-3000:]}


def main(argv: Sequence[str] | None = None) -> int:
    run = BENCH.parse(argv, device=str(GPU))
    arguments = run.arguments
    if arguments.here:
        (name,) = arguments.programs
        with f8.emulate("H100", bf16=True, force=True):
            entry = {"program": name, **PROGRAMS[name]().entry}
        run.record(programs=[entry])
        return 0
    with tempfile.TemporaryDirectory() as site, ThreadPoolExecutor(arguments.jobs) as pool:
        if arguments.wheels is not None:
            install(arguments.wheels, Path(site))
            run.report["wheels"] = sorted(wheel.name for wheel in arguments.wheels.glob("*.whl"))
            os.environ["PYTHONPATH"] = os.pathsep.join((site, os.environ.get("PYTHONPATH", "")))
        entries = list(pool.map(lambda name: run_apart(name, arguments.limit), arguments.programs))
    rows = [
        [e["program"], *(str(e.get(key, "FAILED")) for key in ("elements", "differ")), kinds_of(e)] for e in entries
    ]
    draw(f"{run.report['device']}, and its CPU emulating an H100", ["program", "elements", "differ", "where"], rows)
    for entry in entries:
        if "log" in entry:
            say(f"{entry['program']}: {entry.pop('log')}")
    run.record(programs=entries)
    return int(any(is_wrong(entry) for entry in entries))


def is_wrong(entry: Mapping[str, Any]) -> bool:
    """A failure, or a difference that nothing explains."""
    differ = sum(part for kind, (part, _) in entry.get("kinds", {}).items() if kind != OPTIMIZER)
    return "failed" in entry or (differ > 0 and entry["program"] != MAY_DIFFER)


def kinds_of(entry: Mapping[str, Any]) -> str:
    """The kinds of tensors that differ."""
    kinds = entry.get("kinds", {})
    return ", ".join(f"{kind} {differ} of {count}" for kind, (differ, count) in kinds.items() if differ)


if __name__ == "__main__":
    sys.exit(main())
