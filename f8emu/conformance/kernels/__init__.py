"""Other people's kernels: how they are declared and called, which are known, what may go wrong in one."""
