"""The models that are timed and trained, and the text: Llama's blocks, a small Llama, Python's standard library."""

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

ROPE_BASE = 500_000.0  # Llama-3's


class FeedForward(nn.Module):
    """`x + w2(silu(w1(y)) * w3(y))` with `y = norm(x)`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.w2(silu(self.w1(y)) * self.w3(y))


class Attention(nn.Module):
    """`x + wo(attention(wq(y), wk(y), wv(y)))` with `y = norm(x)`: causal, rotary, grouped queries."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, heads: int, kv_heads: int, length: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        half = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        angles = torch.outer(torch.arange(length, dtype=torch.float32), ROPE_BASE**-half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (self._heads(w(y)) for w in (self.wq, self.wk, self.wv))
        seen = scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True, enable_gqa=True)
        return x + self.wo(seen.transpose(1, 2).reshape(x.shape))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _turned(self, x: Tensor) -> Tensor:
        """Each pair (first half, second half) of a head's dimensions, turned by the angle of its position."""
        first, second = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class TransformerBlock(nn.Module):
    """Attention, then feed-forward; `x [batch, length, dim]`."""

    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int, length: int) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, kv_heads, length)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.attention(x))


class Llama(nn.Module):
    """A byte-level Llama: `tokens [batch, length + 1]` -> mean cross-entropy of each byte given those before it."""

    def __init__(self, *, layers: int, dim: int, hidden: int, heads: int, kv_heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, hidden, heads, kv_heads, length) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, -2).float(), tokens[:, 1:].flatten())


# The text: the sources of Python's standard library, as bytes, which every machine has

HELD_OUT = 10  # every tenth file is held out


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out text, uint8 [bytes]. It depends on the Python version alone."""

    training: Tensor
    held_out: Tensor
    description: dict[str, object]

    def batch(self, generator: torch.Generator, rows: int, length: int) -> Tensor:
        """Random windows of the training text, int64 [rows, length + 1]."""
        starts = torch.randint(self.training.numel() - length, (rows,), generator=generator)
        return _windows(self.training, starts, length)

    def held_out_batches(self, count: int, rows: int, length: int) -> list[Tensor]:
        """`count * rows` windows spread evenly over the held-out text, the same for everybody."""
        starts = torch.linspace(0, self.held_out.numel() - length - 1, count * rows, dtype=torch.float64).long()
        return list(_windows(self.held_out, starts, length).split(rows))


def read_corpus() -> Corpus:
    """The modules at the top of the standard library, in the order of their names, whole files held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [
        b"\n".join(f.read_bytes() for i, f in enumerate(files) if (i % HELD_OUT == 0) is out) for out in (False, True)
    ]
    training, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    description: dict[str, object] = {
        "python": platform.python_version(),
        "files": len(files),
        "training_bytes": training.numel(),
        "held_out_bytes": held_out.numel(),
        "training_sha256": hashlib.sha256(parts[0]).hexdigest(),
        "held_out_sha256": hashlib.sha256(parts[1]).hexdigest(),
    }
    return Corpus(training, held_out, description)


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts[:, None] + torch.arange(length + 1)].long()
