"""FSDP2 with float8 all-gather: the scales of all weights at once."""

from torch import nn

from f8emu.torch.layer.float8_linear import Float8Linear
from f8emu.torch.weights.scales import LocalWeight, global_scales, local_tensor
from f8emu.torch.weights.sharded_weight import GatherState, ShardedWeight


def precompute_float8_dynamic_scale_for_fsdp(model: nn.Module) -> None:
    """Compute the scales of all weights that FSDP2 gathers as float8, with one all-reduce for the model.

    Call it after the optimizer's step, on all ranks. Without it every weight has its own all-reduce in every
    forward pass. The scales hold until the weight changes: any write to it, also by `load_state_dict`, discards them.

    The call does nothing for weights that are gathered in high precision, for weights under delayed scaling (their
    scales come from the update of its state), and before the first forward pass.

    Exactness: codes and scales are the same with and without it.
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
