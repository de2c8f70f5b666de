"""schedulefree: its AdamW, with the averages for evaluation, saved and resumed."""

from pathlib import Path

import torch

from tests.clients.models import mlp, rows
from tests.clients.watch import Watch


def adamw(watch: Watch, folder: Path) -> None:
    from schedulefree import AdamWScheduleFree

    x, labels = rows()

    def run(watch: Watch, steps: int, saved: dict | None = None) -> tuple[torch.nn.Module, AdamWScheduleFree]:
        model = watch.convert(mlp())
        optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=2)
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        optimizer.train()
        watch.fit(optimizer, lambda: torch.nn.functional.cross_entropy(model(x), labels), steps)
        return model, optimizer

    model, optimizer = run(Watch(watch.recipe), 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "saved")
    whole, its_optimizer = run(watch, 6)
    resumed, _ = run(Watch(watch.recipe), 3, torch.load(folder / "saved"))
    watch.resumed(whole, resumed)
    trained = whole[0].weight.detach().clone()
    its_optimizer.eval()
    assert not torch.equal(trained, whole[0].weight), "the average"


RUNS = {"`AdamWScheduleFree`, resumed": adamw}
