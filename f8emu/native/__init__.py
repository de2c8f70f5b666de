"""The engine: emulated GEMMs in C, on the threads and vectors of a CPU."""
