"""Kernels of other libraries: how they are declared and called, which ones are known, what can go wrong."""
