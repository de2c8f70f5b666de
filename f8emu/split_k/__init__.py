"""The split-K of a library's GEMMs, S: planned, or asked of the library."""
