"""What the rooms below a float8 layer know of it. `Float8Linear`, defined above them, is the one class of this kind."""

from typing import TYPE_CHECKING

from f8emu.spec.recipe import Recipe
from f8emu.torch.torch_internals import Linear

if TYPE_CHECKING:
    from f8emu.torch.delayed.state import DelayedBuffers
    from f8emu.torch.delayed.update import UpdateGroup
    from f8emu.torch.layer.taps import Tap


class Float8Layer(Linear):
    """A linear layer that computes under a recipe."""

    recipe: Recipe
    engine: str
    delayed: "DelayedBuffers | None"
    """The state of delayed scaling; None under dynamic scaling."""
    update_group: "UpdateGroup | None"
    """The layers whose scales are updated with this one's; None under dynamic scaling."""
    tap: "Tap | None" = None
    """Where observers watch the layer (`layer.taps`); None without observers."""

    def update_with(self, group: "UpdateGroup | None") -> None:
        """Update the scales together with those of the other layers of `group`."""
        raise NotImplementedError
