"""GEMMs: the verbs, which check their operands, and the two engines that compute them."""
