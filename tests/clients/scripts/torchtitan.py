"""torchtitan 0.3: debug configurations of its language models, built with the converter and trained."""

import importlib
from functools import partial
from pathlib import Path

import torch

from tests.clients.watch import Watch

REMARK = "Attention is torchtitan's own over SDPA in place of FlexAttention, which has no gradients on a CPU."
RECIPES = ("rowwise", "delayed")
MODELS = ("llama3", "qwen3")


def fit(watch: Watch, folder: Path, *, name: str) -> None:
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from f8emu.torch.integrations.torchtitan import Float8Converter

    registry = importlib.import_module(f"torchtitan.models.{name}").model_registry
    converter = Float8Converter.Config(recipe_name=watch.recipe, filter_fqns=["lm_head"])
    spec = registry("debugmodel", attn_backend="flex", converters=[converter])
    torch.manual_seed(0)
    model = spec.model.build()
    model.init_states()
    for module in list(model.modules()):
        if hasattr(module, "inner_attention"):
            module.inner_attention = ScaledDotProductAttention.Config().build()
    watch.follow(model)
    tokens = torch.randint(0, 2048, (1, 33))
    head = torch.nn.functional.cross_entropy
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch.fit(optimizer, lambda: head(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()), 3)


RUNS = {f"`{name}`": partial(fit, name=name) for name in MODELS}
