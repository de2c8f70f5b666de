"""x-transformers: a decoder with rotary positions, GLU and grouped heads, trained and sampled."""

from pathlib import Path

import torch

from tests.clients.watch import Watch


def decoder(watch: Watch, folder: Path) -> None:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True, ff_glu=True, attn_kv_heads=1)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers))
    watch.convert(model)
    tokens = torch.randint(0, 64, (4, 17))
    watch.fit(torch.optim.AdamW(model.parameters(), lr=1e-3), lambda: model(tokens))
    assert model.generate(tokens[:, :4], 4, temperature=0.0).shape == (4, 4)


def encoder(watch: Watch, folder: Path) -> None:
    from x_transformers import Encoder, ViTransformerWrapper

    torch.manual_seed(0)
    layers = Encoder(dim=32, depth=2, heads=2, attn_dim_head=16, use_scalenorm=True)
    model = watch.convert(ViTransformerWrapper(image_size=16, patch_size=4, num_classes=16, attn_layers=layers))
    images, labels = torch.randn(8, 3, 16, 16), torch.arange(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch.fit(optimizer, lambda: torch.nn.functional.cross_entropy(model(images), labels))


RUNS = {"a decoder (rotary, GLU, grouped heads), `generate`": decoder, "a ViT encoder": encoder}
