"""skorch: a scikit-learn estimator, its checkpoint and its pickle."""

import copy
import pickle
from pathlib import Path

import numpy as np
import torch

from tests.clients.models import mlp, rows
from tests.clients.watch import Watch

NEEDS = ("scikit-learn",)


def classifier(watch: Watch, folder: Path) -> None:
    from skorch import NeuralNetClassifier

    model = watch.convert(mlp())
    x, labels = (tensor.numpy() for tensor in rows())
    options = {"criterion": torch.nn.CrossEntropyLoss, "optimizer": torch.optim.AdamW, "verbose": 0, "lr": 1e-2}
    options |= {"train_split": None, "batch_size": 32}
    net = NeuralNetClassifier(model, max_epochs=3, **options)
    net.fit(x, labels)
    assert net.module_ is model
    files = {f"f_{part}": str(folder / part) for part in ("params", "optimizer")}
    net.save_params(**files)
    other = NeuralNetClassifier(Watch(watch.recipe).convert(mlp()), max_epochs=3, **options).initialize()
    other.load_params(**files)
    for one in (net, other):
        one.partial_fit(x, labels)
    watch.losses = net.history[:, "train_loss"]
    watch.resumed(net.module_, other.module_)
    for twin in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert np.array_equal(twin.predict_proba(x), net.predict_proba(x))


RUNS = {"`NeuralNetClassifier`, resumed, pickled": classifier}
