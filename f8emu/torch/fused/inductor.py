"""Hooks by which torch.compile launches the kernels of the fused casts, and recomputes casts if that is wanted.

By default Inductor calls operators through Python. `lowering` puts the same plans into its code instead.

The partitioner recomputes only operators on its list of cheap ones. A cast that `is_recomputable` is added to it: if
its input is saved anyway, or cheap to recompute, the backward pass recomputes the codes instead of saving them.

Both hooks use internals of torch. Where one is gone, the compiler does as it does with any operator: same bits, more
host time or memory.
"""

import sys
import warnings
from functools import cache, wraps
from typing import Any

import torch

from f8emu.environment import tested

_lowerings: dict[torch._ops.OpOverload, Any] = {}


def add(overload: torch._ops.OpOverload, cast: Any) -> None:
    """Lower an operator as its `FusedCast` says."""
    _lowerings[overload] = cast


def install() -> None:
    """Install the hooks in those parts of the compiler that are loaded, before it needs them."""
    if "torch._functorch.partitioners" in sys.modules:
        _allow_recomputation()
    if "torch._inductor.lowering" in sys.modules:
        _register_lowerings()


@cache
def _allow_recomputation() -> None:
    from torch._functorch import partitioners

    default: Any = getattr(partitioners, "get_default_op_list", None)
    if default is None or not all(hasattr(default(), name) for name in ("recomputable_ops", "fusible_ops")):
        return _tell("lists of operators", "a cast's codes are saved for the backward pass and not recomputed")

    @wraps(default)
    def with_casts() -> Any:
        types = default()
        casts, reductions = set[Any](), set[Any]()
        for overload, cast in _lowerings.items():
            if cast.is_recomputable:
                casts.add(overload.overloadpacket)
            elif cast.is_reduction:
                reductions.add(overload.overloadpacket)
        types.recomputable_ops.update(casts)
        # The partitioner does not recompute a node whose results are read by operators that are not fusible, nor one
        # that reads a tensor which such an operator has read before.
        types.fusible_ops.update(casts | reductions)
        return types

    partitioners.get_default_op_list = with_casts


@cache
def _register_lowerings() -> None:
    try:
        from f8emu.torch.fused import lowering
    except (AttributeError, ImportError, TypeError) as error:
        return _tell(str(error), "casts in compiled code are calls of operators")
    for overload, cast in _lowerings.items():
        lowering.register(overload, cast)


def _tell(part: str, instead: str) -> None:
    warnings.warn(
        f"f8emu.torch: the compiler of torch {torch.__version__} lacks what f8emu uses ({part}), so {instead}: the "
        f"same bits, with more time or memory; install what f8emu was tested with ({tested()}), or a newer f8emu",
        RuntimeWarning,
        stacklevel=2,
    )
