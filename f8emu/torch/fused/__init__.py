"""Casts to float8 that read a matrix once: Triton kernels, and plain torch with the same bits."""
