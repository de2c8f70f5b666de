"""SpeechBrain: its Brain around its transformer encoder."""

from pathlib import Path
from typing import Any

import torch

from tests.clients.watch import Watch


def brain(watch: Watch, folder: Path) -> None:
    import speechbrain as sb
    from speechbrain.lobes.models.transformer.Transformer import TransformerEncoder

    torch.manual_seed(0)
    encoder = TransformerEncoder(num_layers=2, nhead=2, d_ffn=64, d_model=32)
    model = watch.convert(torch.nn.ModuleDict({"encoder": encoder, "head": sb.nnet.linear.Linear(16, input_size=32)}))
    x, labels = torch.randn(4, 8, 32), torch.randint(0, 16, (4, 8))

    class Own(sb.Brain):
        def compute_forward(self, batch: Any, stage: Any) -> torch.Tensor:
            return self.modules.head(self.modules.encoder(x)[0])

        def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Any) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(predictions.flatten(0, 1), labels.flatten())

        def on_fit_batch_end(self, batch: Any, outputs: Any, loss: torch.Tensor, should_step: bool) -> None:
            watch.losses.append(loss.item())

    own = Own(dict(model), opt_class=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    own.fit(range(4), [0], progressbar=False)


RUNS = {"`Brain`, `TransformerEncoder`": brain}
