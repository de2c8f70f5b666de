"""Delayed scaling in other libraries: every step updates the scales, and checkpoints keep them.

With accelerate and Lightning that is what the examples show, which tests/test_examples.py runs.
"""

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import f8emu.torch as f8
from f8emu.torch import Outcome
from tests.torch_path import delayed
from tests.torch_path.states import assert_same_state, assert_updated, state_of

# What these libraries and torch say of themselves; warnings of f8emu stay errors.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{category}")
    for category in ("DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning")
]
STEPS = 6
HALF = 3
make = functools.partial(delayed.make, dtype=torch.float32)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 32, generator=generator) * 2.0**step for step in range(STEPS)]


def train(model: nn.Module) -> None:
    optimizer = AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
    for x in batches():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_state_may_come_before_the_weights() -> None:
    """torch.distributed.checkpoint loads entries in the order of their names; weights come without metadata there."""
    model, resumed = make(), make()
    train(model)
    weights = dict(model.state_dict())
    f8.load_delayed_state_dict(resumed, f8.delayed_state_dict(model))
    resumed.load_state_dict(weights)
    assert_same_state(state_of(resumed), state_of(model))
    resumed(batches()[0])
    with pytest.warns(RuntimeWarning, match="scaling starts anew"):
        resumed.load_state_dict(weights)  # other weights than the state is of, for all that is known
    assert_updated(resumed, 0)


def test_a_state_dict_refers_to_the_state_as_to_the_weights() -> None:
    """It may be filled in place before it is loaded."""
    model = make()
    taken = model.state_dict()
    train(model)
    before = state_of(model)
    model.load_state_dict(taken)
    assert_same_state(state_of(model), before)


class Net(nn.Module):
    """A model as the Trainer wants it: the loss first, and an argument that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make()

    def forward(self, x: Tensor, return_loss: bool = True) -> dict[str, Tensor]:
        return {"loss": self.layers(x).square().mean()}


def trainer(model: nn.Module, directory: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from f8emu.torch.integrations.huggingface import DelayedScalingCallback

    callbacks = [DelayedScalingCallback()] if options.pop("callback", True) else []
    rows = [{"x": row} for batch in batches() for row in batch]
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    settings: dict[str, Any] = (
        {"per_device_train_batch_size": 16, "max_steps": STEPS, "save_steps": HALF} | quiet | options
    )
    args = TrainingArguments(str(directory), **settings)
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows[:16], callbacks=callbacks)  # type: ignore[arg-type]


def test_hugging_face_trainer(tmp_path: Path) -> None:
    """With its default optimizer (fused AdamW) and its own checkpoints."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, resumed, alone = Net(), Net(), Net()
    trainer(model, tmp_path).train()
    assert_updated(model, STEPS)
    # A checkpoint that was moved; with the callback nothing is said of it, and nothing is lost.
    half = str((tmp_path / f"checkpoint-{HALF}").rename(tmp_path / "elsewhere"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trainer(resumed, tmp_path).train(resume_from_checkpoint=half)
    assert_same_state(state_of(resumed), state_of(model))
    with pytest.warns(RuntimeWarning, match=r"callbacks=\[f8emu\.torch\.integrations\.huggingface\.DelayedScaling"):
        trainer(alone, tmp_path / "alone", callback=False).train(resume_from_checkpoint=half)
    assert_updated(alone, STEPS - HALF)


def test_hugging_face_trainer_with_its_best_model(tmp_path: Path) -> None:
    """The best is the first checkpoint, where the loss is largest: at the end the state is that of its step."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, half = Net(), Net()
    best: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": HALF, "learning_rate": 0.01}
    best["lr_scheduler_type"] = "constant"
    trainer(half, tmp_path / "half", max_steps=HALF, **best).train()
    best |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer(model, tmp_path / "all", **best).train()
    assert_updated(model, HALF)
    assert_same_state(state_of(model), state_of(half))


def test_peft(tmp_path: Path) -> None:
    """Converted before or after, the same bits; adapters stay in high precision; loading them leaves scales alone."""
    peft = pytest.importorskip("peft")

    def build(is_before: bool) -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
        if is_before:
            f8.convert_to_float8_training(model, config="delayed")
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["0", "2"]))
        report = f8.plan_conversion(model, config="delayed")
        adapters = [entry for entry in report.entries if ".lora_" in entry.fqn]
        assert {entry.outcome for entry in adapters} == {Outcome.ADAPTER} and len(adapters) == 4
        assert adapters[0].reason == "its rank is not a multiple of 16"
        assert len(report.names(Outcome.ALREADY if is_before else Outcome.CONVERTED)) == 2
        if not is_before:
            f8.convert_to_float8_training(model, config="delayed")
            padded = f8.plan_conversion(model, config="delayed", pad=True)
            assert padded.names(Outcome.ADAPTER) == tuple(entry.fqn for entry in adapters)
        return model

    before, after = build(True), build(False)
    for model in (before, after):
        kinds = {name.split(".")[-1]: type(module) for name, module in model.named_modules()}
        assert kinds["base_layer"] is f8.Float8Linear and kinds["default"] is nn.Linear
        train(model)
    assert_same_state(state_of(before), state_of(after))
    before.save_pretrained(tmp_path)  # type: ignore[operator]
    kept = f8.delayed_state_dict(before)
    before.load_adapter(tmp_path, "default")  # type: ignore[operator]
    assert_same_state(f8.delayed_state_dict(before), kept)
