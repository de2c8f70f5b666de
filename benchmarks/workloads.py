"""What is timed: a model, its input, and the least that any implementation must multiply and move for one step.

The floor of a step is the time of its GEMMs alone, of its attention alone, and of its bytes at the speed of a copy.
Bytes are counted by one rule for all, an estimate from below and no proof:

- What is not a GEMM is fused into as few kernels as can be; each reads its inputs once and writes its outputs once.
- A cast is a kernel of its own: it reads the tensor once and writes each of its float8 matrices once. Layers with one
  input share its cast.
- A scale from the tensor's own amax needs one more reading before, unless a kernel of this step has produced the tensor
  (that one could take the amax along) or the block is small enough to stay on chip (blockwise scales).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType, scaled_dot_product_attention
from torch.nn.functional import scaled_mm as library_scaled_mm

from benchmarks.models import FeedForward, TransformerBlock
from benchmarks.timing import Step, alone
from f8emu.spec import HIGH_PRECISION_CAST, HOPPER, Gemm, Granularity, Recipe
from f8emu.torch import scaled_mm
from f8emu.torch.gemm.hardware import block_scales
from f8emu.torch.gemm.operators import multiply_groups

HIGH_PRECISION_GEMM = Gemm(a=HIGH_PRECISION_CAST, b=HIGH_PRECISION_CAST)
_BYTES = 2  # of a bfloat16 number

# GEMMs alone


class Shape(NamedTuple):
    """`[m, k] @ [n, k]^T`."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


def launcher(gemm: Gemm, shape: Shape, device: torch.device) -> Step:
    """A GEMM of random operands that casts nothing and allocates only its output, bfloat16.

    The library's on a GPU, f8emu's emulation elsewhere.
    """
    m, n, k = shape
    a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    if gemm.is_high_precision:
        return lambda: torch.mm(a, b.t())
    assert gemm.a.format is not None
    assert gemm.b.format is not None
    # The library wants b column-major, scales of rows beside a and of columns beside b.
    codes = a.to(getattr(torch, gemm.a.format.name)), b.to(getattr(torch, gemm.b.format.name)).t()
    of_a, of_b = gemm.scaled_gemm_granularities
    scale_a, scale_b = (torch.rand(of.scale_shape(rows, k), device=device) + 0.5 for of, rows in ((of_a, m), (of_b, n)))
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": gemm.use_fast_accum}
    if device.type != "cuda":
        return lambda: scaled_mm(*codes, scale_a, scale_b.t(), granularity_a=of_a, granularity_b=of_b, **options)
    if of_a.is_blockwise:
        kinds = {
            Granularity.BLOCKWISE_1X128: ScalingType.BlockWise1x128,
            Granularity.BLOCKWISE_128X128: ScalingType.BlockWise128x128,
        }
        laid = block_scales(scale_a, of_a), kinds[of_a], block_scales(scale_b, of_b), kinds[of_b]
        return lambda: library_scaled_mm(*codes, *laid, output_dtype=torch.bfloat16)
    scales = (scale_a, scale_b.t()) if of_a is Granularity.ROWWISE else (scale_a.reshape(()), scale_b.reshape(()))
    return lambda: torch._scaled_mm(*codes, *scales, **options)  # pyright: ignore[reportPrivateImportUsage]


# Workloads


class Layer(NamedTuple):
    """A linear layer of a workload: `tokens x k -> tokens x n`."""

    input: str  # the tensor that it reads; layers that read one tensor share its cast
    n: int
    k: int


class Attention(NamedTuple):
    """A causal attention of `heads` queries on `kv_heads` keys and values."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and what one forward and backward pass of it must do."""

    title: str
    build: Callable[[], nn.Module]
    tokens: int
    dim: int
    out_dim: int
    layers: tuple[Layer, ...]
    # Numbers that all but GEMMs, casts and attention read and write, each in as few passes as can be.
    moved: int = 0
    # Whether inputs and output gradients of the layers come from kernels of this step.
    is_produced: bool = True
    attention: Attention | None = None

    def bytes_moved(self, recipe: Recipe | None) -> int:
        """Bytes that all but GEMMs and attention move; recipe None is bfloat16."""
        # What is not a cast is the same in every recipe.
        total = _BYTES * self.moved
        if recipe is None:
            return total
        for k in {layer.input: layer.k for layer in self.layers}.values():
            total += _cast_bytes(recipe, "input", self.tokens * k, self.is_produced)
        for layer in self.layers:
            total += _cast_bytes(recipe, "grad_output", self.tokens * layer.n, self.is_produced)
            total += _cast_bytes(recipe, "weight", layer.n * layer.k, is_produced=False)
        return total

    def gemms(self, recipe: Recipe | None) -> list[tuple[Gemm, Shape]]:
        """The three GEMMs of every layer."""
        found: list[tuple[Gemm, Shape]] = []
        gemms = [HIGH_PRECISION_GEMM] * 3 if recipe is None else list(recipe.gemms.values())
        for layer in self.layers:
            m, n, k = self.tokens, layer.n, layer.k
            found += zip(gemms, (Shape(m, n, k), Shape(m, k, n), Shape(n, k, m)), strict=True)
        return found

    def input(self, device: torch.device) -> Tensor:
        return self._drawn(self.dim, device)

    def grad_output(self, device: torch.device) -> Tensor:
        return self._drawn(self.out_dim, device) * 1e-3

    def _drawn(self, size: int, device: torch.device) -> Tensor:
        shape = (self.tokens, size) if self.attention is None else (1, self.tokens, size)
        return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _cast_bytes(recipe: Recipe, tensor: str, size: int, is_produced: bool) -> int:
    casts = [cast for _, _, cast in recipe.casts(tensor) if not cast.is_high_precision]
    if not casts:
        return 0
    has_own_amax = recipe.delayed is None and not all(cast.granularity.is_blockwise for cast in casts)
    readings = 1 + (has_own_amax and not is_produced)
    return size * (_BYTES * readings + len(casts))


def linear(tokens: int, k: int, n: int) -> Workload:
    """One layer `k -> n`; its input and output gradient come from elsewhere."""
    return Workload(
        title=f"one linear layer, {k} -> {n}",
        build=lambda: nn.Sequential(nn.Linear(k, n, bias=False)),  # a module swap needs a parent
        tokens=tokens,
        dim=k,
        out_dim=n,
        layers=(Layer("x", n, k),),
        is_produced=False,
    )


def feed_forward(tokens: int, dim: int, hidden: int) -> Workload:
    """Forward: norm (2 of tokens x dim), silu and product (3 of tokens x hidden), residual (3).
    Backward: gradients of silu and product (5), of norm and residual, summed over w1 and w3 (5).
    """
    return Workload(
        title=f"Llama's feed-forward block, {dim} -> {hidden} -> {dim}",
        build=lambda: FeedForward(dim, hidden),
        tokens=tokens,
        dim=dim,
        out_dim=dim,
        layers=(Layer("y", hidden, dim), Layer("y", hidden, dim), Layer("h", dim, hidden)),
        moved=tokens * (10 * dim + 8 * hidden),
    )


def feed_forwards(tokens: int, dim: int, hidden: int, blocks: int) -> Workload:
    """Feed-forward blocks, one after the other."""
    block = feed_forward(tokens, dim, hidden)
    return replace(
        block,
        title=f"{blocks} feed-forward blocks, {dim} -> {hidden} -> {dim}",
        build=lambda: nn.Sequential(*(FeedForward(dim, hidden) for _ in range(blocks))),
        layers=tuple(layer._replace(input=f"{layer.input}{i}") for i in range(blocks) for layer in block.layers),
        moved=blocks * block.moved,
    )


def transformer_block(tokens: int, dim: int, hidden: int) -> Workload:
    """The feed-forward block, and before it, forward: norm (2 of tokens x dim), rotary (2, and 2 of tokens x kv_dim),
    residual (3). Backward: rotary the same, norm and residual, summed over q, k and v (6).
    """
    heads, kv_heads = 32, 8
    kv_dim = kv_heads * (dim // heads)
    below = feed_forward(tokens, dim, hidden)
    return replace(
        below,
        title=f"Llama's transformer block, {dim}, {heads} heads on {kv_heads}, {hidden}",
        build=lambda: TransformerBlock(dim, hidden, heads, kv_heads, tokens),
        layers=(*(Layer("z", n, dim) for n in (dim, kv_dim, kv_dim)), Layer("attention", dim, dim), *below.layers),
        moved=below.moved + tokens * (15 * dim + 4 * kv_dim),
        attention=Attention(heads, kv_heads, dim // heads),
    )


class Experts(NamedTuple):
    """A mixture's experts on groups of `tokens` rows; w1 and w3 are one weight, or a pair."""

    experts: int
    dim: int
    hidden: int
    tokens: int

    def gemms(self, recipe: Recipe | None, is_pair: bool, ends: Tensor) -> Step:
        """The grouped GEMMs of a pass, of random operands, by f8emu's operator: the library's on a GPU."""
        experts, dim, hidden, tokens = self
        dtype, found = torch.bfloat16 if recipe is None else torch.float8_e4m3fn, list[tuple[Any, ...]]()

        def draw(*size: int) -> Tensor:
            return torch.randn(size, device=ends.device, dtype=torch.bfloat16).to(dtype)

        def other(*size: int) -> Tensor:  # bfloat16 is multiplied as it lies, float8 needs the summed size innermost
            return draw(*size) if recipe is None else draw(*size[:-2], size[-1], size[-2]).mT

        for n, k in [(hidden, dim)] * 2 + [(dim, hidden)] if is_pair else [(2 * hidden, dim), (dim, hidden)]:
            for name, a, b, sizes in (
                ("output", draw(tokens, k), draw(experts, n, k).mT, (tokens, (experts, n))),
                ("grad_input", draw(tokens, n), other(experts, n, k), (tokens, (experts, k))),
                ("grad_weight", other(tokens, n).t(), other(tokens, k), (experts * n, experts * k)),
            ):
                scales = [None if recipe is None else torch.ones(size, device=ends.device) for size in sizes]
                fast = recipe is not None and recipe.gemms[name].use_fast_accum
                found.append((a, b, *scales, ends, torch.bfloat16, fast, "auto", HOPPER.name))
        return lambda: [multiply_groups(*arguments) for arguments in found]

    def bytes_moved(self, recipe: Recipe | None, is_pair: bool, weight_casts: float = 1.0) -> int:
        """Bytes that all but GEMMs move, with `weight_casts` casts of each weight a pass.

        bfloat16: silu and product (3 of tokens x hidden), their gradients (5), the sum of the input's two gradients (3
        of tokens x dim). In float8 the casts compute silu and product, whose operands come from GEMMs.
        """
        experts, dim, hidden, tokens = self
        total = _BYTES * 3 * tokens * dim * is_pair
        if recipe is None:
            return total + _BYTES * 8 * tokens * hidden
        read = _BYTES * (2 if recipe.delayed is None else 1)
        # 1. Input and output gradient; hidden from two tensors; two gradients, and hidden^T, from three.
        total += 2 * tokens * dim * (read + 2) + tokens * hidden * (2 * read + 1 + 3 * read + 5)
        # 2. Three weights.
        return total + round(weight_casts * 3 * experts * dim * hidden * (read + 2))


# Floors


class Floor:
    """Floors of workloads; every GEMM is timed once, however many layers and recipes have it."""

    def __init__(self, device: torch.device, bytes_per_second: float) -> None:
        self.device = device
        self.bytes_per_second = bytes_per_second
        self.gemms_ms: dict[tuple[Gemm, Shape], float] = {}

    def __call__(self, workload: Workload, recipe: Recipe | None) -> Mapping[str, float]:
        """Milliseconds of the GEMMs, the attention, the bytes, and their sum, `floor_ms`."""
        for gemm in workload.gemms(recipe):
            if gemm not in self.gemms_ms:
                self.gemms_ms[gemm] = alone(launcher(*gemm, self.device), self.device)
        found = {"gemms_ms": sum(self.gemms_ms[gemm] for gemm in workload.gemms(recipe))}
        found["attention_ms"] = self._attention_ms(workload.tokens, workload.attention) if workload.attention else 0.0
        found["bytes_ms"] = 1e3 * workload.bytes_moved(recipe) / self.bytes_per_second
        return {**found, "floor_ms": sum(found.values())}

    def _attention_ms(self, tokens: int, attention: Attention) -> float:
        """Forward and backward pass of `scaled_dot_product_attention` on the workload's heads."""
        heads, kv_heads, head_dim = attention
        q, k, v = (
            torch.randn(1, count, tokens, head_dim, device=self.device, dtype=torch.bfloat16, requires_grad=True)
            for count in (heads, kv_heads, kv_heads)
        )

        def step() -> None:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, (q, k, v), out)

        return alone(step, self.device)
