"""Tiny models and data for clients: made here, since there is no network."""

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 64
WORDS = ("the", "a", "model", "learns", "from", "tokens", "user", "assistant", "good", "bad", "answer", "question")


def mlp(width: int = 32, classes: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, classes))


def rows(count: int = 32, width: int = 32, classes: int = 16) -> tuple[Tensor, Tensor]:
    """Inputs and their labels, which the largest of the first features is."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(1))
    return x, x[:, :classes].argmax(1)


def llama_config(**options: Any) -> Any:
    from transformers import LlamaConfig

    size = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return LlamaConfig(**{**size, **heads, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **options})


def llama(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(llama_config(**options))
    return model.to(dtype)


def tokenizer() -> Any:
    """Words to numbers, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(("<pad>", "<s>", "</s>", "<unk>", *WORDS))}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **names)
