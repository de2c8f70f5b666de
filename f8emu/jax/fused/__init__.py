"""Casts of a matrix for the GEMMs of a linear layer, from one reading of it: `casts` is what the layers call."""
