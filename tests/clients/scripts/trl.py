"""TRL: supervised fine-tuning, DPO and GRPO of a tiny Llama, by the trainers' defaults, and SFT resumed."""

from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

from f8emu.torch import convert_to_float8_training
from f8emu.torch.integrations.huggingface import DelayedScalingCallback
from tests.clients.models import llama, tokenizer
from tests.clients.watch import Watch

NEEDS = ("transformers", "accelerate", "datasets")
REMARK = "The trainers multiply by the weight of `lm_head` themselves: leave it out, as is the default. "
REMARK += "The first margin and KL are 0 with a float8 [reference](../guides/rl.md)."
ARGS = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": [], "logging_steps": 1}
ARGS |= {"use_cpu": True, "bf16": False, "disable_tqdm": True, "lr_scheduler_type": "constant", "save_steps": 2}
ROWS = [{"prompt": "question the", "chosen": "a good answer", "rejected": "a bad answer"}] * 16


def trainer_of(watch: Watch, model: Any, kind: str, folder: Path, rows: Any, **options: Any) -> Any:
    import trl
    from datasets import Dataset

    args = getattr(trl, kind.replace("Trainer", "Config"))(str(folder), **(ARGS | options.pop("args", {})))
    data, callbacks = Dataset.from_list(rows), [DelayedScalingCallback()]
    return getattr(trl, kind)(
        model, args=args, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks, **options
    )


def saved_llama(folder: Path) -> Any:
    """It knows where it came from: from there the trainers load the reference model."""
    llama().save_pretrained(folder / "model")
    return LlamaForCausalLM.from_pretrained(folder / "model")


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def sft(watch: Watch, folder: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "the question"}, {"role": "assistant", "content": "a"}]}] * 16
    model = watch.convert(llama())
    trainer = trainer_of(watch, model, "SFTTrainer", folder, rows)
    trainer.train()
    watch.losses = losses_of(trainer)
    other = Watch(watch.recipe).convert(llama())
    trainer_of(watch, other, "SFTTrainer", folder, rows).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    watch.resumed(model, other)


def dpo(watch: Watch, folder: Path) -> None:
    """Policy and reference multiply alike, so that the first margin is 0."""
    reference, model = (watch.convert(saved_llama(folder)) for _ in range(2))
    trainer = trainer_of(watch, model, "DPOTrainer", folder, ROWS, ref_model=reference)
    trainer.train()
    watch.losses = losses_of(trainer)
    assert trainer.state.log_history[0]["rewards/margins"] == 0


def grpo(watch: Watch, folder: Path) -> None:
    """Rewards rise: the loss of GRPO is 0 where the policy is that of the rollouts, and so is the first KL."""
    model = watch.convert(saved_llama(folder))
    rows = [{"prompt": "the question"}] * 16
    size = {"num_generations": 8, "max_completion_length": 8, "max_steps": 6, "beta": 0.04}
    size |= {"per_device_train_batch_size": 16}

    def reward(completions: list[str], **rest: Any) -> list[float]:
        return [float(text.split().count("good")) for text in completions]

    trainer = trainer_of(watch, model, "GRPOTrainer", folder, rows, args=size, reward_funcs=reward)
    convert_to_float8_training(trainer.ref_model, config=watch.recipe)
    trainer.train()
    watch.losses = [-entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert trainer.state.log_history[0]["kl"] == 0


RUNS = {"`SFTTrainer`, resumed": sft, "`DPOTrainer`": dpo, "`GRPOTrainer`": grpo}
