"""The GEMMs: what a caller may ask for, and the two engines that compute it."""
