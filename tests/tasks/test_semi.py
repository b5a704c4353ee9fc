"""Few labels and many rows without: both methods, accumulation, saving, and what rows without are for."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits, make_moons
from torch import Tensor, nn
from torch.nn import functional

from quire.data.batch import Batch, TensorData
from quire.errors import InputError
from quire.functional.regularise import semi_supervised_loss
from quire.models.autoencoder import Autoencoder, AutoencoderConfig
from quire.models.embedding import Embedding, EmbeddingConfig
from quire.nn.images import ImageInputs
from quire.nn.views import ImageViews, RowViews, Views
from quire.options import Optim, Schedule, Train
from quire.tasks.semi import LABELLED, LABELS, STRONG, SemiSupervised, SemiSupervisedRules, Teaching
from quire.train import evaluate, fit
from quire.train.task import build_task
from tests.tasks.stepping import gradient_of_step

METHODS = ("autoencode", "consistency")


def moons(rows: int, seed: int) -> TensorData:
    points, target = make_moons(rows, noise=0.1, random_state=seed)
    return TensorData({"inputs": torch.from_numpy(points).float(), "target": torch.from_numpy(target)})


def make(
    method: str,
    data: TensorData,
    labelled: Tensor,
    *,
    weak: Views | None = None,
    strong: Views | None = None,
    **rules: Any,
) -> SemiSupervised:
    torch.manual_seed(0)
    model: Autoencoder | Embedding
    if method == "autoencode":
        model = Autoencoder(AutoencoderConfig((2,), hidden=(32,), code=8))
    else:
        model = Embedding(EmbeddingConfig((2,), hidden=(32, 32), code=8))
    teaching = Teaching(
        data.inputs[labelled],
        data.target[labelled],
        weak or RowViews(noise=0.02),
        strong or RowViews(noise=0.15),
    )
    return SemiSupervised(model, 2, SemiSupervisedRules(method, **rules), teaching=teaching)  # type: ignore[arg-type]


def hidden(data: TensorData, labelled: Tensor) -> TensorData:
    target = torch.full_like(data.target, -100)
    target[labelled] = data.target[labelled]
    return TensorData({"inputs": data.inputs, "target": target})


FEW = torch.tensor([0, 1, 2, 3, 4, 5])


# Loss ---------------------------------------------------------------------------------------------


def test_consistency_by_hand() -> None:
    data = moons(40, 0)
    task = make("consistency", data, FEW, threshold=0.6)
    batch = task.augment(hidden(data, FEW).take(torch.arange(20)))
    assert task.weigh(batch) == {"target": 20.0, "consistency": 20.0}

    def logits(x: Tensor) -> Tensor:
        return task.classifier(task.model.encoder(x))

    found = task.terms(batch)
    supervised = functional.cross_entropy(
        logits(batch.fields[LABELLED]), batch.fields[LABELS], reduction="sum"
    )
    torch.testing.assert_close(found["target"], supervised)
    guesses, answers = logits(batch.inputs).softmax(1), logits(batch.fields[STRONG]).log_softmax(1)
    wanted = sum(-answers[i, guesses[i].argmax()].item() for i in range(20) if guesses[i].max() >= 0.6)
    assert found["consistency"].item() == pytest.approx(wanted, rel=1e-5)
    assert 0 < int((guesses.amax(1) >= 0.6).sum()) < 20, "some are trusted, some are not"


def test_autoencode_is_the_loss_of_the_sheet() -> None:
    data = moons(40, 0)
    task = make("autoencode", data, FEW, weight=0.7)
    batch = hidden(data, FEW).take(torch.arange(20))
    assert task.weigh(batch) == {"target": 6, "autoencode": 40.0}
    codes = task.model.encode(batch.inputs)
    assert isinstance(task.model, Autoencoder)
    wanted = semi_supervised_loss(
        task.classifier(codes), batch.target, task.model.decode(codes), batch.inputs, weight=0.7
    )
    sums, weights = task.terms(batch), task.weigh(batch)
    found = sum(task.scales.get(name, 1.0) * sums[name] / weights[name] for name in sums)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("method", METHODS)
def test_labelled_rows_travel_beside_the_batch(method: str) -> None:
    data = moons(40, 0)
    task = make(method, data, FEW, weak=RowViews())
    rows = torch.arange(10, 30)
    batch = task.augment(hidden(data, FEW).take(rows))
    assert len(batch.fields[LABELLED]) == 20
    places = (batch.fields[LABELLED][:, None] == data.inputs[FEW]).all(2)
    assert places.sum(1).eq(1).all()
    assert torch.equal(batch.fields[LABELS], data.target[FEW][places.long().argmax(1)])
    assert torch.equal(batch.inputs, data.inputs[rows]), "nothing slight is changed here"
    assert (STRONG in batch.fields) == (method == "consistency")
    drawn = {int(i) for _ in range(9) for i in (
        task.augment(hidden(data, FEW).take(rows)).fields[LABELLED][:, None] == data.inputs[FEW]
    ).all(2).long().argmax(1)}  # fmt: skip
    assert drawn == set(range(6)), "all of them are drawn in time"


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_give_the_gradient_of_the_whole_batch(method: str) -> None:
    data = moons(40, 0)
    task = make(method, data, FEW, threshold=0.55).double()
    batch = hidden(data, FEW).take(torch.arange(23))
    batch = task.augment(batch)
    batch = batch.replace(**{k: v.double() for k, v in batch.fields.items() if v.is_floating_point()})
    whole = gradient_of_step(task, batch, 1)
    assert whole.abs().max() > 1e-3
    for parts in (2, 5):
        torch.testing.assert_close(gradient_of_step(task, batch, parts), whole, rtol=1e-10, atol=1e-12)


# Measures and predictions ---------------------------------------------------------------------------


def test_only_rows_with_a_class_are_judged() -> None:
    data = moons(60, 0)
    task = make("consistency", data, FEW)
    judged, alone = evaluate(task, hidden(data, FEW)), evaluate(task, data.subset(FEW))
    assert judged["accuracy"] == alone["accuracy"]
    assert judged["loss"] == pytest.approx(alone["loss"])
    sure = task.predict(data.inputs)["probabilities"].amax(1) >= 0.95
    assert judged["confident"] == pytest.approx(sure.float().mean().item())
    nobody = TensorData({"inputs": data.inputs, "target": torch.full((60,), -100)})
    assert evaluate(task, nobody).keys() == {"loss", "confident"}


@pytest.mark.parametrize("method", METHODS)
def test_a_trained_task_needs_no_labelled_rows_any_more(method: str) -> None:
    data = moons(60, 0)
    task = make(method, data, FEW)
    fit(task, hidden(data, FEW), epochs=2)
    again = build_task(json.loads(json.dumps(task.spec())))
    again.load_state_dict(task.state_dict())
    again.eval()
    for name, value in task.predict(data.inputs).items():
        assert torch.equal(again.predict(data.inputs)[name], value), name
    assert evaluate(again, data) == evaluate(task, data)
    fit(again, data, epochs=1)  # and it can learn from the classes of its batches alone


def test_pixels_are_scaled_once() -> None:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (6, 1, 6, 6), dtype=torch.uint8)
    model = Embedding(EmbeddingConfig((1, 6, 6), "convolutional", (5,), channels=2, code=3))
    views = ImageViews([0.0], shift=0.2)
    teaching = Teaching(pixels[:2], torch.tensor([0, 1]), views, views)
    task = SemiSupervised(model, 2, teaching=teaching, inputs=ImageInputs([100.0], [50.0]))
    wanted = task.classifier(model.encode((pixels.float() - 100) / 50)).softmax(1)
    torch.testing.assert_close(task.predict(pixels)["probabilities"], wanted)
    batch = task.augment(Batch({"inputs": pixels, "target": torch.full((6,), -100)}, torch.arange(6)))
    assert batch.inputs.dtype == torch.uint8
    assert all(value.isfinite() for value in task.terms(batch).values())


# What the rows without a label are for ----------------------------------------------------------------


@pytest.mark.slow
def test_rows_without_labels_make_a_better_classifier() -> None:
    """Digits, five labels each: with the same steps on the same labels, consistent answers to 900 digits
    without a label add to what labels alone teach."""
    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images * 15.9).to(torch.uint8)[:, None]
    data = TensorData({"inputs": pixels, "target": torch.from_numpy(bunch.target)})
    train, test = (data.subset(torch.arange(first, 1797, 2)) for first in (0, 1))
    labelled = torch.cat([(train.target == c).nonzero()[:5, 0] for c in range(10)])
    strong = ImageViews([0.0], shift=0.1, zoom=1.2, rotate=15.0, shear=0.2, cut_out=0.2)
    accuracy = []
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        model = Embedding(EmbeddingConfig((1, 8, 8), "convolutional", (32,), channels=16, code=16))
        teaching = Teaching(
            train.inputs[labelled], train.target[labelled], ImageViews([0.0], shift=0.05), strong
        )
        rules = SemiSupervisedRules(weight=weight)
        task = SemiSupervised(model, 10, rules, teaching=teaching, inputs=ImageInputs([78.0], [96.0]))
        optim = Optim(lr=3e-3, schedule=Schedule("cosine"))
        fit(task, hidden(train, labelled), epochs=40, optim=optim, train=Train(batch_size=100))
        accuracy.append(evaluate(task, test)["accuracy"])
    without, found = accuracy
    assert found > without + 0.03, accuracy


# Refusals -------------------------------------------------------------------------------------------


def test_a_class_without_a_label_is_refused() -> None:
    data = moons(40, 0)
    one_class = (data.target == 1).nonzero()[:4, 0]
    with pytest.raises(InputError, match=r"(?s)no labelled row of class number 0.*cannot be learned"):
        make("consistency", data, one_class)
    with pytest.raises(InputError, match="at least one row"):
        make("consistency", data, FEW[:0])


def test_only_an_autoencoder_gives_back_its_input() -> None:
    model = Embedding(EmbeddingConfig((2,)))
    with pytest.raises(InputError, match=r"(?s)'autoencode' with Embedding.*Autoencoder"):
        SemiSupervised(model, 2, SemiSupervisedRules("autoencode"))
    with pytest.raises(InputError, match="autoencode or consistency"):
        SemiSupervisedRules("guess")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"threshold is 1\.5"):
        SemiSupervisedRules(threshold=1.5)


def test_a_description_of_another_network_is_refused() -> None:
    task = make("consistency", moons(40, 0), FEW)
    spec = task.spec()
    spec["model"] = {"model": "mlp", "in_features": 2, "out_features": 2}
    with pytest.raises(InputError, match=r"(?s)codes by MLP.*Autoencoder or an Embedding"):
        SemiSupervised.from_spec(spec)
    assert isinstance(task.classifier, nn.Linear)
