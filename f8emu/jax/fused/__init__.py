"""Casts of a matrix for the GEMMs of a linear layer, in one pass over the matrix. The layers call `casts`."""
