"""Delayed scaling of a whole model: the update once a step, and its state for checkpoints.

The update launches a few kernels, independent of the number of layers.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor, nn

from f8emu.spec.errors import OperandError
from f8emu.spec.formats import E4M3FN, Format
from f8emu.spec.recipe import TENSORS, Recipe
from f8emu.spec.scaling import AmaxHistoryReduction
from f8emu.torch.fused import operators as fused
from f8emu.torch.training.delayed import DelayedBuffers

_UPDATES_BETWEEN_READS = 64
"""On an accelerator, the counts of skipped amaxes are read once in this many updates: reading waits for the device."""


def sync_float8_amax_and_scale_history(model: nn.Module, fp8_layers: Iterable[nn.Module] | None = None) -> None:
    """Update the state of delayed scaling in all layers of `model`, once a step, after the backward pass.

    An amax that is zero or not finite leaves the scale unchanged; such updates are counted, and one warning is given.

    Exactness: every state is that of `f8ref.numpy.update_delayed_state`.

    Args:
        model: the converted model; nothing happens where no layer has delayed scaling.
        fp8_layers: its float8 layers; None searches `model` for them.
    """
    groups: dict[tuple[Recipe, torch.device], list[DelayedBuffers]] = {}
    for _, buffers in _states(nn.ModuleList(fp8_layers) if fp8_layers is not None else model):
        groups.setdefault((buffers.recipe, buffers.inv_scale.device), []).append(buffers)
    for (recipe, _), group in groups.items():
        _update(group, recipe)


def delayed_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of delayed scaling of all layers, for checkpoint formats that drop the metadata of a state dict.

    Returns:
        "layer.field" -> a copy of that buffer.
    """
    return {
        f"{fqn}.{name}" if fqn else name: value.detach().clone()
        for fqn, buffers in _states(model)
        for name, value in buffers.state().items()
    }


def load_delayed_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what `delayed_state_dict` returned; call it after `load_state_dict`, which resets the state.

    Raises:
        OperandError: missing or unknown keys (no layer has changed then), or the state of another recipe.
    """
    states = dict(_states(model))
    wanted = {f"{fqn}.{name}" if fqn else name for fqn, buffers in states.items() for name in buffers.state()}
    if wanted != set(state):
        missing, unknown = sorted(wanted - set(state)), sorted(set(state) - wanted)
        raise OperandError(
            f"load_delayed_state_dict: the keys must be those of delayed_state_dict(model); missing {missing[:5]}, "
            f"unknown {unknown[:5]}; load the state of the same model, converted in the same way"
        )
    for fqn, buffers in states.items():
        buffers.load(
            "load_delayed_state_dict", {name: state[f"{fqn}.{name}" if fqn else name] for name in buffers.state()}
        )


def _states(model: nn.Module) -> Iterator[tuple[str, DelayedBuffers]]:
    """(name of the layer, its state), each state once."""
    for name, module in model.named_modules():
        if isinstance(module, DelayedBuffers):
            yield name.rpartition(".")[0], module


def _formats(recipe: Recipe) -> tuple[Format | None, ...]:
    """The float8 format of every tensor; None where it stays in high precision."""
    found = ({cast.format for _, _, cast in recipe.casts(tensor)} - {None} for tensor in TENSORS)
    return tuple(next(iter(formats), None) for formats in found)


@torch.no_grad()
def _update(group: list[DelayedBuffers], recipe: Recipe) -> None:
    """Update layers of one recipe on one device; the tensors below are [layers, 3] or [layers, 3, history_length]."""
    delayed, formats = recipe.delayed, _formats(recipe)
    assert delayed is not None, "only such a recipe has a state"
    # 1. Usable amaxes.
    amax = torch.cat([amax for buffers in group for amax in buffers.amaxes]).view(len(group), 3)
    is_usable = amax.isfinite() & (amax > 0)
    # 2. Shift the histories by one.
    newest = torch.where(is_usable, amax, torch.zeros_like(amax))
    old = torch.stack([buffers.amax_history for buffers in group])
    history = torch.cat([newest.unsqueeze(2), old[:, :, :-1]], dim=2)
    reference = newest if delayed.reduction is AmaxHistoryReduction.MOST_RECENT else history.amax(dim=2)
    # 3. The scales of the next step; a tensor without a usable amax keeps its scale.
    rule = (recipe.scale_rule.power_of_two, recipe.scale_rule.amax_floor, delayed.margin)
    widths = [(format or E4M3FN, len(list(same))) for format, same in groupby(formats)]
    columns = reference.split([width for _, width in widths], dim=1)
    found = [fused.scales(x, format.name, *rule) for x, (format, _) in zip(columns, widths, strict=True)]
    new_inv_scale, new_scale = (torch.cat(new, dim=1) for new in zip(*found, strict=True))
    old_scale = torch.cat([scale for buffers in group for scale in buffers.scales]).view(len(group), 3)
    inv_scale = torch.where(is_usable, new_inv_scale, torch.stack([buffers.inv_scale for buffers in group]))
    scale = torch.where(is_usable, new_scale, old_scale).view(-1, 1, 1)
    initialized = is_usable | torch.stack([buffers.initialized for buffers in group])
    was_skipped = ~is_usable
    for i, format in enumerate(formats):
        if format is None:
            was_skipped[:, i] = False
    skipped = torch.stack([buffers.skipped for buffers in group]) + was_skipped
    # 4. Write everything back to the buffers and reset the amaxes.
    for name, values in (
        ("amax_history", history),
        ("inv_scale", inv_scale),
        ("initialized", initialized),
        ("skipped", skipped),
    ):
        torch._foreach_copy_([getattr(buffers, name) for buffers in group], list(values.unbind(0)))  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_copy_([scale for buffers in group for scale in buffers.scales], list(scale.unbind(0)))  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_zero_([amax for buffers in group for amax in buffers.amaxes])  # pyright: ignore[reportPrivateImportUsage]
    for buffers in group:
        buffers.updates += 1
    _read(group, formats, initialized, skipped)


def _read(
    group: list[DelayedBuffers], formats: tuple[Format | None, ...], initialized: Tensor, skipped: Tensor
) -> None:
    """Read what the host must know: whether the casts can use the scales, and whether amaxes were skipped."""
    wanted = [format is not None for format in formats]
    is_waiting = any(
        is_cast and not known for b in group for is_cast, known in zip(wanted, b.is_initialized, strict=True)
    )
    if not (is_waiting or skipped.device.type == "cpu" or group[0].updates % _UPDATES_BETWEEN_READS == 0):
        return
    found = torch.stack([initialized, skipped > 0]).tolist()
    for buffers, (first, second, third), were_skipped in zip(group, *found, strict=True):
        buffers.is_initialized = (first, second, third)
        if any(were_skipped) and not any(b.has_reported for b in group):
            names = " and ".join(name for name, was in zip(TENSORS, were_skipped, strict=True) if was)
            warnings.warn(
                f"sync_float8_amax_and_scale_history: the amax of {names} of a layer was zero, or not finite, in this "
                "or an earlier step; its scale stays as it was. Such updates are counted in the layer's "
                "delayed.skipped, and not reported again",
                RuntimeWarning,
                stacklevel=4,
            )
            buffers.has_reported = True
