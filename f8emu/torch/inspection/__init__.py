"""Statistics of a training run: what casts lose, where a GEMM's error comes from, which layer overflowed first."""
