"""Linear layers as cases: the table, their traces, and how torch, JAX and the engine run them."""
