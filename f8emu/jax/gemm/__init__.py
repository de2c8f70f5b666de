"""GEMMs: the checks of their operands, and the two engines that compute them."""
