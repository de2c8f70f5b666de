"""The models that are timed and trained: Llama's feed-forward and transformer blocks, a small Llama."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

ROPE_BASE = 500_000.0
"""Llama-3's."""


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
