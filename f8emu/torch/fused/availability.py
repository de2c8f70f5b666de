"""Whether kernels or plain torch compute the casts of a tensor."""

import warnings
from functools import cache
from types import ModuleType

from torch import Tensor

from f8emu.torch.chip import has_float8_hardware


def kernels_for(x: Tensor) -> ModuleType | None:
    """`launch_plans()` where kernels run on `x`; None where plain torch does."""
    return launch_plans() if x.numel() > 0 and has_float8_hardware(x.device) else None


@cache
def launch_plans() -> ModuleType | None:
    """`f8emu.torch.fused.plans`; None, with one warning, if Triton is not installed."""
    try:
        from f8emu.torch.fused import plans
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        warnings.warn(
            "f8emu.torch: Triton is not installed, so casts to float8 run as plain torch operations: the same bits, "
            "several times slower; install it with: pip install triton",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return plans
