"""FSDP2 with float8 all-gather: the scales of all weights at once, and gathers that begin earlier."""

from itertools import pairwise

from torch import nn

from f8emu.torch.training.float8_linear import Float8Linear
from f8emu.torch.training.sharded_weight import GatherState, ShardedWeight
from f8emu.torch.training.torch_internals import fsdp_state
from f8emu.torch.training.weight_scales import LocalWeight, global_scales, local_tensor


def precompute_float8_dynamic_scale_for_fsdp(model: nn.Module) -> None:
    """Find the scales of all weights that FSDP2 gathers as float8, with one all-reduce for the model.

    Call it after the optimizer's step, on all ranks. Without it every weight has an all-reduce of its own in every
    forward pass. What it found holds until the weight changes: a write to it, also by `load_state_dict`, forgets it.

    Nothing happens for weights that are gathered in high precision, under delayed scaling, whose scales are part of its
    update, and before the first forward pass.

    Exactness: codes and scales are the same with it and without.
    """
    found: dict[int, tuple[GatherState, LocalWeight]] = {}
    for layer in model.modules():
        if not isinstance(layer, Float8Linear):
            continue
        weight = local_tensor(layer.weight)
        is_delayed = layer.recipe.delayed is not None and "weight" in layer.recipe.delayed.tensors
        if isinstance(weight, ShardedWeight) and weight.state.shard is not None and not is_delayed:
            local = LocalWeight(weight.plain.detach(), weight.recipe, weight.state.shard)
            found[id(weight.state)] = weight.state, local
    weights = [weight for _, weight in found.values()]
    for (state, _), scales in zip(found.values(), global_scales(weights), strict=True):
        state.precomputed = scales


def prefetch_in_forward(model: nn.Module) -> None:
    """Let every module that `fully_shard` wrapped begin the gather of the next one before it computes itself.

    Without it FSDP2 begins a gather when the host gets to the module. Float8 blocks compute so fast that the host may
    be late: after a step that waited for its loss, and in small models. It takes the memory of one more module.

    The next one is the next in `model.modules()`, so they must run in the order in which they were registered. Nothing
    happens where one of them was told by `set_modules_to_forward_prefetch` what to prefetch.

    Exactness: no bit changes.
    """
    from torch.distributed.fsdp import FSDPModule

    wrapped = [module for module in model.modules() if module is not model and isinstance(module, FSDPModule)]
    of_states = {id(fsdp_state(module)): module for module in wrapped}
    if any(fsdp_state(module)._states_to_forward_prefetch for module in wrapped):
        return
    for module, following in pairwise(of_states.values()):
        module.set_modules_to_forward_prefetch([following])
