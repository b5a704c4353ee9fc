"""The digits MLP from arrays to a fitted model, beside the peers; and fifty bagged nets at once."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.bench.case import SUBJECTS, Bar, Case, Place, peer
from quire.data.batch import TensorData
from quire.estimators import BaggingEnsemble, MLPClassifier
from quire.nn.heads import Categorical
from quire.options import Optim, Train
from quire.tasks.supervised import Supervised
from quire.train import fit

HIDDEN, BATCH, LR = 128, 64, 1e-3
Array = np.ndarray[Any, Any]


class Digits(NamedTuple):
    train: Array
    test: Array
    train_labels: Array
    test_labels: Array


def digits() -> Digits:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    x, y = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    scaler = StandardScaler().fit(train)
    near, far = (scaler.transform(part).astype(np.float32) for part in (train, test))
    return Digits(near, far, train_labels.astype(np.int64), test_labels.astype(np.int64))


class Net(nn.Module):
    """As a user would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(64, HIDDEN), nn.Linear(HIDDEN, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.relu(self.hidden(x)))


@SUBJECTS.register("digits")
def digits_mlp(place: Place) -> Iterator[Case]:
    """The digits MLP, a whole fit: estimator and trainer beside scikit-learn, skorch and Lightning."""
    if place.on_gpu:
        return
    data, epochs = digits(), place.size(20, 1)
    steps = float(epochs * -(-len(data.train) // BATCH))

    def accuracy(model: Any) -> float:
        if isinstance(model, nn.Module):
            with torch.no_grad():
                predicted = model(torch.from_numpy(data.test)).argmax(1).numpy()
        else:
            predicted = model.predict(data.test)
        return float((predicted == data.test_labels).mean())

    contestants = {
        "estimator": lambda: MLPClassifier(
            (HIDDEN,), batch_size=BATCH, learning_rate_init=LR, max_iter=epochs, n_iter_no_change=epochs,
        ).fit(data.train, data.train_labels),
        "trainer": lambda: trained(data, epochs),
        "raw loop": lambda: raw_net(
            torch.from_numpy(data.train), torch.from_numpy(data.train_labels), epochs, 0
        ),
        "scikit-learn": lambda: scikit_learn(data, epochs),
        "skorch": peer("skorch", lambda: skorch(data, epochs)),
        "lightning": peer("lightning", lambda: lightning(data, epochs)),
    }  # fmt: skip
    yield Case(
        f"digits MLP 64-{HIDDEN}-10, batch {BATCH}, {epochs} epochs", contestants, amount=steps, unit="step",
        result=accuracy, result_name="test accuracy",
        bars=(
            Bar("time", at_most=0.5, rival="scikit-learn"),
            Bar("time", at_most=0.25, rival="skorch"),
        ),
    )  # fmt: skip
    yield Case(
        "the general trainer beside a raw loop with fused Adam, the same network",
        {"trainer": contestants["trainer"], "raw loop": contestants["raw loop"]},
        amount=steps, unit="step", bars=(Bar("time", at_most=1.1, rival="raw loop"),),
    )  # fmt: skip
    members = place.size(50, 3)
    yield Case(
        f"{members} bagged nets, {epochs} epochs",
        {
            "quire": lambda: BaggingEnsemble(
                n_estimators=members, hidden_layer_sizes=(HIDDEN,), batch_size=BATCH, learning_rate_init=LR,
                max_iter=epochs, n_iter_no_change=epochs,
            ).fit(data.train, data.train_labels),
            "as many raw loops": lambda: bagged_loops(data, epochs, members),
        },
        whole=True, unit="fit", bars=(Bar("time", at_most=0.2, rival="as many raw loops"),),
    )  # fmt: skip


def trained(data: Digits, epochs: int) -> nn.Module:
    model = Net()
    rows = TensorData({"inputs": torch.from_numpy(data.train), "target": torch.from_numpy(data.train_labels)})
    fit(
        Supervised(model, Categorical(10)), rows, epochs=epochs, optim=Optim(lr=LR),
        train=Train(batch_size=BATCH),
    )  # fmt: skip
    return model


def raw_net(inputs: Tensor, labels: Tensor, epochs: int, seed: int) -> nn.Module:
    """As fast as a short loop gets: fused Adam, and rows gathered once an epoch."""
    torch.manual_seed(seed)
    model = Net()
    optimiser = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
    for _ in range(epochs):
        order = torch.randperm(len(inputs))
        for x, y in zip(inputs[order].split(BATCH), labels[order].split(BATCH), strict=True):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimiser.step()
    return model


def scikit_learn(data: Digits, epochs: int) -> object:
    from sklearn.neural_network import MLPClassifier as Peer

    model = Peer(
        (HIDDEN,), alpha=0.0, batch_size=BATCH, learning_rate_init=LR, max_iter=epochs,
        n_iter_no_change=epochs, tol=0.0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.fit(data.train, data.train_labels)


def skorch(data: Digits, epochs: int) -> object:
    from skorch import NeuralNetClassifier  # type: ignore[import-untyped,unused-ignore]

    model = NeuralNetClassifier(
        Net, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam, optimizer__fused=True, lr=LR,
        max_epochs=epochs, batch_size=BATCH, iterator_train__shuffle=True, train_split=None, verbose=0,
    )  # fmt: skip
    return model.fit(data.train, data.train_labels)


def lightning(data: Digits, epochs: int) -> nn.Module:
    import lightning as L  # type: ignore[import-not-found,unused-ignore]

    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(L.LightningModule):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.net.parameters(), lr=LR, fused=True)

    rows = torch.utils.data.TensorDataset(torch.from_numpy(data.train), torch.from_numpy(data.train_labels))
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, loader)
    return module.net


def bagged_loops(data: Digits, epochs: int, members: int) -> Callable[[Tensor], Tensor]:
    """Each on its own draw of the rows."""
    inputs, labels = torch.from_numpy(data.train), torch.from_numpy(data.train_labels)
    generator = torch.Generator().manual_seed(0)
    models = []
    for member in range(members):
        rows = torch.randint(len(inputs), (len(inputs),), generator=generator)
        models.append(raw_net(inputs[rows], labels[rows], epochs, member))
    return lambda x: torch.stack([model(x).softmax(1) for model in models]).mean(0)
