"""What kernels are for, by their names; without torch, since the results pages group recorded kernels in this way."""

import re
from collections.abc import Sequence
from typing import Any

# Kind -> what the names of its kernels have in them; the first that does counts.
KINDS = {
    "collectives": "nccl",
    "GEMMs": "nvjet|cutlass|gemm|cublas",
    "attention": "sdpa|fmha|flash|cudnn",
    "casts and amaxes": "^(cast|groups|row|tensor|col|scales|transpose)[a-z_]*_kernel|cast_pair|amax|transpose_codes",
    "optimizer and gradient norm": "multi_tensor_apply",
    "FSDP2's copies": "chunk_cat|split_with_sizes",
}


def kinds(kernels: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of a step by kind of kernel; what is fused with a cast counts as a cast."""
    totals = dict.fromkeys([*KINDS, "other"], 0.0)
    for entry in kernels:
        totals[next((kind for kind, names in KINDS.items() if re.search(names, entry["name"])), "other")] += entry["us"]
    return totals
