"""What torchtitan's Trainer is given: Llama 3 on random tokens, and a logger that keeps its metrics."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader  # pyright: ignore[reportMissingImports]
from torchtitan.components.metrics import BaseLogger, MetricsProcessor  # pyright: ignore[reportMissingImports]
from torchtitan.models import llama3  # pyright: ignore[reportMissingImports]
from torchtitan.protocols.train_spec import register_train_spec  # pyright: ignore[reportMissingImports]

MODEL = "llama3_synthetic"  # `model.name` in the TOML files


class RandomTokens(BaseDataLoader):
    """Skewed random tokens, the same for every variant, another stream on every rank."""

    def __init__(self, vocabulary: int, batch: int, length: int, rank: int) -> None:
        self.shape = batch, length + 1
        self.vocabulary = vocabulary
        self.generator = torch.Generator().manual_seed(1000 + rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = (torch.rand(self.shape, generator=self.generator) ** 4 * self.vocabulary).long()
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """It has no state."""


class Recorder(BaseLogger):
    """torchtitan's metrics of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.steps.append({name: float(value) for name, value in metrics.items()})


def register(layers: int) -> Recorder:
    """Makes `MODEL` known to torchtitan, with that many layers, and gives what will hold its metrics."""
    recorder = Recorder()

    def metrics(job_config: Any, parallel_dims: Any, model_args: Any = None, tag: str | None = None) -> Any:
        processor = MetricsProcessor(job_config, parallel_dims, tag)
        processor.logger = recorder
        return processor

    def tokens(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> RandomTokens:
        training, flavor = job_config.training, llama3.llama3_args[job_config.model.flavor]
        return RandomTokens(flavor.vocab_size, training.local_batch_size, training.seq_len, dp_rank)

    for flavor in llama3.llama3_args.values():
        flavor.n_layers = layers
    spec = dataclasses.replace(
        llama3.get_train_spec(),
        build_dataloader_fn=tokens,
        build_tokenizer_fn=None,
        build_metrics_processor_fn=metrics,
        build_validator_fn=None,
        state_dict_adapter=None,
    )
    register_train_spec(MODEL, spec)
    return recorder
