"""The split-K of a library's GEMMs, S: from a plan, or from the library itself."""
