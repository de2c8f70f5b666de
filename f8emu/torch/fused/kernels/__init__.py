"""The Triton kernels of the fused casts."""
