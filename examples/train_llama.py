"""Train a Llama in float8 on one device or many: FSDP2, tensor parallelism, checkpoints. Copy it and change it.

    python examples/train_llama.py --float8.recipe_name delayed
    torchrun --nproc-per-node 8 examples/train_llama.py --model.size 8B --training.seq_len 8192 --training.compile \
        --float8.recipe_name rowwise --float8.enable_fsdp_float8_all_gather \
        --float8.precompute_float8_dynamic_scale_for_fsdp --checkpoint.folder checkpoints

Runs on a CPU, emulated, and on Hopper GPUs. Without a recipe it computes in bfloat16. The weights and the data of a
step are the same on every number of devices. A run with `--checkpoint.folder` resumes from the newest checkpoint.
"""

import argparse
import os
import shutil
import sysconfig
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import f8emu.torch as f8
import f8emu.torch.parallel.tensor_parallel as float8_tp
from f8emu.torch.parallel.checkpoints import export_safetensors


class Size(NamedTuple):
    """Of a model."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 128256


SIZES = {
    "debug": Size(dim=64, layers=2, heads=4, kv_heads=2, hidden=128, vocabulary=256),
    "1B": Size(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192),
    "8B": Size(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336),
}
PEAK_FLOPS = 989e12  # of an H100 or H200 in bfloat16, dense: the MFU of every recipe is counted against it
ATTENTION = [getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default for kind in ("flash", "cudnn")]
STYLES = tp.ColwiseParallel, tp.RowwiseParallel, tp.PrepareModuleInput
FLOAT8_STYLES = float8_tp.Float8ColwiseParallel, float8_tp.Float8RowwiseParallel, float8_tp.PrepareFloat8ModuleInput
SOURCES = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


class Attention(nn.Module):
    """Causal, with rotary positions and grouped keys."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.dim // size.heads
        self.wq, self.wo = (nn.Linear(size.dim, size.dim, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(size.dim, size.kv_heads * self.head_dim, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        # [B, S, heads * head_dim] -> [B, heads, S, head_dim]; under tensor parallelism the heads of this rank.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(-2))


def rotate(x: Tensor, theta: float = 500000.0) -> Tensor:
    """Rotary position embedding of x [..., S, head_dim], computed in float32."""
    a, b = x.float().chunk(2, dim=-1)
    positions, pairs = (torch.arange(count, device=x.device, dtype=torch.float32) for count in a.shape[-2:])
    angles = positions[:, None] * theta ** -(pairs / len(pairs))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(size.dim, size.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward; `checkpointing` is what the backward pass recomputes."""

    def __init__(self, size: Size, checkpointing: str) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(size.dim, eps=1e-5), nn.RMSNorm(size.dim, eps=1e-5)
        self.attention, self.feed_forward, self.checkpointing = Attention(size), FeedForward(size), checkpointing

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing == "none":
            return self.compute(x)
        keep = partial(create_selective_checkpoint_contexts, f8.float8_checkpoint_policy(also=ATTENTION))
        options: dict[str, Any] = {"context_fn": keep} if self.checkpointing == "selective" else {}
        return checkpoint(self.compute, x, use_reentrant=False, **options)

    def compute(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """tokens [B, S] -> logits [B, S, vocabulary]."""

    def __init__(self, size: Size, checkpointing: str = "none") -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(size.vocabulary, size.dim)
        self.layers = nn.Sequential(*(Block(size, checkpointing) for _ in range(size.layers)))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.output = nn.Linear(size.dim, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.norm(self.layers(self.tok_embeddings(tokens))))


def build(options: argparse.Namespace, mesh: DeviceMesh) -> Llama:
    """The model, converted, then parallelized, compiled and sharded; its weights are made last, shard by shard."""
    with torch.device("meta"):
        model = Llama(SIZES[options.size], options.checkpointing)
    if options.recipe is not None:
        kept = [name for name in options.filter_fqns.split(",") if name]
        float8 = {"config": options.recipe, "enable_fsdp_float8_all_gather": options.all_gather}
        f8.convert_to_float8_training(model, module_filter_fn=lambda _, fqn: not any(x in fqn for x in kept), **float8)
    if mesh["tp"].size() > 1:
        styles = FLOAT8_STYLES if options.recipe in ("tensorwise", "rowwise", "delayed") else STYLES
        head = tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_tensors(model, mesh["tp"], styles, head)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        if options.compile:
            block.forward = torch.compile(block.forward, fullgraph=True)
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    initialize(model, mesh)
    return model


def parallelize_tensors(model: Llama, mesh: DeviceMesh, styles: Any, head: tp.ParallelStyle) -> None:
    """Tensor and sequence parallelism: between the blocks every rank has a part of the sequence."""
    colwise, rowwise, gather = styles
    whole, sequence = Replicate(), Shard(1)
    embeddings = tp.RowwiseParallel(input_layouts=whole, output_layouts=sequence)
    plan: dict[str, tp.ParallelStyle] = {"tok_embeddings": embeddings, "output": head}
    plan |= {name: tp.SequenceParallel() for name in ("norm", "layers.*.attention_norm", "layers.*.ffn_norm")}
    for part, columns, row in (("attention", ("wq", "wk", "wv"), "wo"), ("feed_forward", ("w1", "w3"), "w2")):
        plan[f"layers.*.{part}"] = gather(input_layouts=sequence, desired_input_layouts=whole)
        plan |= {f"layers.*.{part}.{name}": colwise() for name in columns}
        plan[f"layers.*.{part}.{row}"] = rowwise(output_layouts=sequence)
    tp.parallelize_module(model, mesh, plan)


@torch.no_grad()
def initialize(model: Llama, mesh: DeviceMesh) -> None:
    """Normal weights; every rank draws each whole tensor and keeps its shard, so that they are the same on any mesh."""
    generator = torch.Generator(mesh.device_type).manual_seed(0)
    parameters: Any = model.parameters()
    for parameter in parameters:
        whole = torch.ones(parameter.shape, device=mesh.device_type)
        if parameter.ndim == 2:
            whole.normal_(std=0.02, generator=generator)
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))


def batch_of(step: int, options: argparse.Namespace, mesh: DeviceMesh) -> Tensor:
    """Tokens [B, S + 1] of this rank, its rows of the step's global batch: Python's own sources, a token a byte."""
    generator = torch.Generator().manual_seed(step)
    rows, length = options.batch_size * mesh["dp"].size(), options.seq_len + 1
    if options.dataset == "synthetic":
        tokens = (torch.rand(rows, length, generator=generator) ** 4 * SIZES[options.size].vocabulary).long()
    else:
        starts = torch.randint(len(SOURCES) - length, (rows,), generator=generator).tolist()
        tokens = torch.tensor([list(SOURCES[start : start + length]) for start in starts])
    return tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].to(mesh.device_type)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = states.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "float8": f8.DelayedScalingState(model)}


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A checkpoint, which has its name once it is complete: a kill leaves the one before."""
    state = state_of(model, optimizer)
    unfinished = folder / f"unfinished-{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
    dist.barrier()
    state_dict_saver.save(state, checkpoint_id=unfinished)
    if dist.get_rank() == 0:  # save has returned, so every rank has written its part
        unfinished.rename(folder / f"step-{step}")
    dist.barrier()


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest complete checkpoint, of any number of ranks, and give its step; 0 without one."""
    step = max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)
    if step:
        state = state_of(model, optimizer)
        state_dict_loader.load(state, checkpoint_id=folder / f"step-{step}")
        states.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step


def train(options: argparse.Namespace, mesh: DeviceMesh) -> None:
    model, size, is_cuda = build(options, mesh), SIZES[options.size], mesh.device_type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=is_cuda)
    first = 0 if options.folder is None else resume(options.folder, model, optimizer)
    count = sum(parameter.numel() for parameter in model.parameters())
    say = partial(print, flush=True) if dist.get_rank() == 0 else lambda line: None
    say(f"{options.size}: {count / 1e6:.1f} M parameters, from step {first}")
    # Forward and backward: 6 for each weight that is multiplied, and attention's products as if it were not causal.
    flops = 6 * (count - size.vocabulary * size.dim) + 12 * size.layers * size.dim * options.seq_len
    for step in range(first + 1, options.steps + 1):
        start = time.perf_counter()
        tokens = batch_of(step, options, mesh)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        if options.precompute:
            f8.precompute_float8_dynamic_scale_for_fsdp(model)
        optimizer.zero_grad()
        mean = loss.detach() / mesh["dp"].size()
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        losses = f"loss {mean.item():.4f}  gradient {norm.full_tensor().item():.3f}"  # waits for the device
        speed = tokens[:, 1:].numel() / mesh["tp"].size() / (time.perf_counter() - start)
        most = torch.cuda.max_memory_reserved() if is_cuda else 1024 * getrusage(RUSAGE_SELF).ru_maxrss
        mfu = f"{100 * speed * flops / PEAK_FLOPS:.1f} %" if is_cuda else "-"
        used = f"memory {most / 2**30:.2f} GiB  {speed:.0f} tokens/s/device  MFU {mfu}"
        say(f"step {step}/{options.steps}  {losses}  {used}")
        if options.folder is not None and (step % options.interval == 0 or step == options.steps):
            save(options.folder, step, model, optimizer)
    if options.export is not None:
        export_safetensors(model, options.export)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Llama in float8.")
    add = parser.add_argument
    add("--model.size", dest="size", choices=SIZES, default="debug")
    add("--training.steps", dest="steps", type=int, default=10)
    add("--training.batch_size", dest="batch_size", type=int, default=2, help="sequences of each data-parallel rank")
    add("--training.seq_len", dest="seq_len", type=int, default=64)
    add("--training.dataset", dest="dataset", choices=("stdlib", "synthetic"), default="stdlib")
    add("--training.compile", dest="compile", action="store_true", help="each block")
    add("--optimizer.lr", dest="lr", type=float, default=3e-4)
    add("--float8.enable_float8_linear", dest="enable", action="store_true", help="as recipe_name tensorwise")
    add("--float8.recipe_name", dest="recipe", help="one of f8emu.RECIPES; none computes in bfloat16")
    add("--float8.enable_fsdp_float8_all_gather", dest="all_gather", action="store_true")
    add("--float8.precompute_float8_dynamic_scale_for_fsdp", dest="precompute", action="store_true")
    add("--float8.filter_fqns", dest="filter_fqns", default="output", help="names to leave out, with commas between")
    add("--parallel.data_parallel", dest="data_parallel", type=int, help="ranks that share weights; all by default")
    add("--parallel.tensor_parallel", dest="tensor_parallel", type=int, default=1, help="ranks that share a layer")
    add("--parallel.timeout", dest="timeout", type=float, default=300, help="seconds until a lost rank ends the others")
    add("--activation_checkpoint.mode", dest="checkpointing", choices=("none", "selective", "full"), default="none")
    add("--checkpoint.folder", dest="folder", type=Path)
    add("--checkpoint.interval", dest="interval", type=int, default=500)
    add("--checkpoint.export", dest="export", type=Path, help="a safetensors file of the trained model in bfloat16")
    options = parser.parse_args()
    options.recipe = options.recipe or ("tensorwise" if options.enable else None)
    if (options.precompute and not options.all_gather) or (options.all_gather and options.recipe is None):
        parser.error("precomputed scales are for the float8 all-gather, and that is for a recipe")
    return options


def main() -> None:
    options, kind = parse(), "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone: dict[str, Any] = {"init_method": "tcp://localhost:0", "rank": 0, "world_size": 1}
    dist.init_process_group(timeout=timedelta(seconds=options.timeout), **({} if "RANK" in os.environ else alone))
    try:
        data = options.data_parallel or dist.get_world_size() // options.tensor_parallel
        train(options, init_device_mesh(kind, (data, options.tensor_parallel), mesh_dim_names=("dp", "tp")))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
