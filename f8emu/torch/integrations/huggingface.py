"""Hugging Face's Trainer: the state of delayed scaling in its checkpoints.

The Trainer's checkpoints are safetensors files, which hold no state of delayed scaling. A callback therefore writes it
into the checkpoint's `trainer_state.json`, the one file that is read from whatever path a run is resumed.
"""

import base64
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from f8emu.spec.errors import required_by
from f8emu.spec.exports import public
from f8emu.torch.layer.delayed_update import DelayedScalingState

with required_by("f8emu.torch.integrations.huggingface"):
    from safetensors.torch import load, save
    from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState


class DelayedScalingCallback(TrainerCallback, ExportableState):
    """Saves the state of delayed scaling with every checkpoint, and loads it when a run is resumed.

    Use it as `Trainer(model, ..., callbacks=[DelayedScalingCallback()])`. It also loads the state of the best model, if
    the Trainer loads that. For a recipe without delayed scaling it does nothing.

    Exactness: a resumed run has the bits of an uninterrupted one, as far as the Trainer's own state allows.
    """

    def __init__(self) -> None:
        self._scaling: DelayedScalingState | None = None

    def state(self) -> dict[str, Any]:
        """The tensors of `delayed_state_dict` as text, which the Trainer writes into `trainer_state.json`."""
        tensors = {} if self._scaling is None else self._scaling.state_dict()
        return {"args": {}, "attributes": {"delayed": base64.b64encode(save(tensors)).decode() if tensors else ""}}

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Expect checkpoints that hold weights alone: no warning about a missing state.
        self._follow(kwargs.get("model"))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The Trainer has loaded the weights of a resumed run.
        self._follow(kwargs.get("model"))
        if state.global_step > 0:
            self._load(state, "the checkpoint that the run was resumed from")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The Trainer has loaded the weights of the best checkpoint.
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            path = Path(state.best_model_checkpoint) / "trainer_state.json"
            self._load(TrainerState.load_from_json(str(path)), state.best_model_checkpoint)

    def _follow(self, model: nn.Module | None) -> None:
        if model is not None and (self._scaling is None or self._scaling.model is not model):
            self._scaling = DelayedScalingState(model)

    def _load(self, state: TrainerState, origin: str) -> None:
        if self._scaling is None or not self._scaling.state_dict():
            return
        callbacks: Any = state.stateful_callbacks
        saved = callbacks.setdefault(type(self).__name__, self.state())["attributes"].get("delayed")
        if not saved:
            warnings.warn(
                f"DelayedScalingCallback: {origin} has no state of delayed scaling, so scaling starts anew; it was "
                "written by a Trainer without this callback",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._scaling.load_state_dict(load(base64.b64decode(saved)))


__all__, __dir__ = public(__name__)
