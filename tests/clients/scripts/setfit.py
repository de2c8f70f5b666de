"""SetFit: its trainer's contrastive phase on a converted sentence transformer."""

from pathlib import Path

from tests.clients.scripts.sentence_transformers import bert
from tests.clients.watch import Watch

NEEDS = ("sentence-transformers", "transformers", "scikit-learn")


def classifier(watch: Watch, folder: Path) -> None:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from setfit import SetFitModel, Trainer, TrainingArguments

    words = ("good", "bad", "model", "answer")
    data = Dataset.from_dict({"text": [f"the {word}" for word in words] * 2, "label": [0, 1, 0, 1] * 2})
    body = watch.convert(SentenceTransformer(bert(folder), model_kwargs={"add_pooling_layer": False}))
    model = SetFitModel.from_pretrained(str(folder / "bert"))
    model.model_body = body
    args = TrainingArguments(str(folder), max_steps=6, logging_steps=1, body_learning_rate=1e-2, batch_size=16)
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    watch.losses = [
        entry["embedding_loss"] for entry in trainer.st_trainer.state.log_history if "embedding_loss" in entry
    ]
    assert len(model.predict(["the good", "the bad"])) == 2


RUNS = {"`SetFitModel`, `Trainer`": classifier}
