"""Codes by comparison: losses, accumulation, references, retrieval, saving."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch.nn import functional

from quire.data.batch import TensorData
from quire.errors import InputError
from quire.functional.few_labels import pair_losses_each
from quire.models.embedding import Embedding as Network
from quire.models.embedding import EmbeddingConfig
from quire.nn.images import ImageInputs
from quire.nn.views import ImageViews, RowViews
from quire.options import Optim, Train
from quire.tasks.embedding import OTHER, Embedding, EmbeddingRules, References
from quire.train import evaluate, fit
from quire.train.task import build_task
from tests.tasks.stepping import gradient_of_step

CLASSES, FEATURES = 3, 6


def clouds(rows: int = 90, seed: int = 0, spread: float = 0.6) -> TensorData:
    """Three clouds of points in six dimensions."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.arange(rows) % CLASSES
    centres = 2 * torch.eye(CLASSES, FEATURES)
    noise = spread * torch.randn(rows, FEATURES, generator=generator)
    return TensorData({"inputs": centres[target] + noise, "target": target})


def references(data: TensorData, count: int = 12) -> References:
    rows = torch.arange(count) * 2
    return References(data.inputs[rows], data.target[rows], rows)


def make(
    loss: str = "info_nce", *, projection: int = 0, data: TensorData | None = None, **rules: Any
) -> Embedding:
    torch.manual_seed(0)
    model = Network(EmbeddingConfig((FEATURES,), hidden=(16,), code=4, projection=projection))
    views = RowViews(noise=0.1)
    return Embedding(
        model,
        CLASSES,
        references(data or clouds()),
        views,
        EmbeddingRules(loss=loss, **rules),  # type: ignore[arg-type]
    )


def hidden(data: TensorData, every: int = 3) -> TensorData:
    """Two of three rows without a class."""
    target = torch.where(torch.arange(len(data)) % (every * CLASSES) < CLASSES, data.target, -100)
    return TensorData({"inputs": data.inputs, "target": target})


# Loss ---------------------------------------------------------------------------------------------


def test_info_nce_compares_both_views_both_ways() -> None:
    task = make(projection=5, temperature=0.3).double()
    batch = task.augment(clouds().take(torch.arange(10)).replace(inputs=clouds().inputs[:10].double()))
    assert not torch.equal(batch.inputs, batch.fields[OTHER])
    one, other = task.model.compare(batch.inputs), task.model.compare(batch.fields[OTHER])
    scores = (one @ other.T / 0.3).detach()
    wanted = 0.0
    for i in range(10):
        for row in (scores[i], scores[:, i]):
            wanted += float(row.logsumexp(0) - row[i]) / 2
    assert task.terms(batch)["info_nce"].item() == pytest.approx(wanted, rel=1e-9)
    assert task.weigh(batch) == {"info_nce": 10.0}


@pytest.mark.parametrize("loss", ["siamese", "cosine", "triplet"])
def test_pairs_are_made_of_both_views_of_the_rows_with_a_class(loss: str) -> None:
    task = make(loss, margin=0.4)
    batch = task.augment(hidden(clouds()).take(torch.arange(18)))
    assert task.weigh(batch) == {loss: 6}
    kept = batch.target >= 0
    codes = task.model(torch.cat([batch.inputs[kept], batch.fields[OTHER][kept]]))
    target = batch.target[kept].repeat(2)
    wanted = pair_losses_each(codes, target, loss, 0.4).sum() / 2  # type: ignore[arg-type]
    torch.testing.assert_close(task.terms(batch)[loss], wanted)


@pytest.mark.parametrize("micro_batches", [2, 5])
@pytest.mark.parametrize("loss", ["info_nce", "siamese", "cosine", "triplet"])
def test_micro_batches_give_the_gradient_of_the_whole_batch(loss: str, micro_batches: int) -> None:
    task = make(loss, projection=3).double()
    whole = hidden(clouds()).take(torch.arange(23))
    batch = task.augment(whole.replace(inputs=whole.inputs.double()))
    together, parts = gradient_of_step(task, batch, 1), gradient_of_step(task, batch, micro_batches)
    assert together.abs().max() > 1e-3
    torch.testing.assert_close(parts, together, rtol=1e-9, atol=1e-11)
    (mean,) = (task.terms(batch)[loss] / task.weigh(batch)[loss],)
    expected = torch.autograd.grad(mean, list(task.parameters()))
    torch.testing.assert_close(together, torch.cat([g.flatten() for g in expected]), rtol=1e-9, atol=1e-11)


def test_judging_makes_the_same_views_each_time_and_leaves_the_stream_alone() -> None:
    task, data = make(compared=16), clouds()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = evaluate(task, data)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert evaluate(task, data) == first
    # Rows are compared in parts of 16, or nearly: the loss of a part of n is about log n at the start.
    assert first["loss"] < np.log(16) + 0.2


# References ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["neighbours", "linear"])
def test_classes_are_those_of_scikit_learn_on_the_same_codes(answer: str) -> None:
    data = clouds(spread=1.5)
    task = make(answer=answer, neighbours=1, data=data).eval()
    known = task.reference_inputs, task.reference_target
    codes, queries = task.embed(known[0]).detach().double(), task.embed(data.inputs).detach().double()
    peer: Any = KNeighborsClassifier(1)
    if answer == "linear":
        peer = LogisticRegression(C=1 / task.rules.penalty, tol=1e-10, max_iter=5000)
    peer.fit(codes.numpy(), known[1].numpy())
    found = task.predict(data.inputs)
    np.testing.assert_array_equal(found["class"].numpy(), peer.predict(queries.numpy()))
    if answer == "linear":
        np.testing.assert_allclose(found["probabilities"], peer.predict_proba(queries.numpy()), atol=1e-4)
    torch.testing.assert_close(found["probabilities"].sum(1), torch.ones(90))


def test_predictions_name_the_nearest_references() -> None:
    data = clouds()
    task = make(data=data).eval()
    found = task.predict(data.inputs[:7])
    assert found["code"].shape == (7, 4)
    codes = task.embed(data.inputs).detach()
    for i in range(7):
        likeness = codes[task.reference_rows] @ codes[i]
        order = likeness.argsort(descending=True)[:5]
        assert found["neighbour"][i].tolist() == task.reference_rows[order].tolist()
        assert found["neighbour_class"][i].tolist() == data.target[task.reference_rows[order]].tolist()
        torch.testing.assert_close(found["likeness"][i], likeness[order])
    assert found["neighbour"][0, 0] == 0, "row 0 is a reference, and itself its nearest"


def test_retrieval_is_judged_without_the_row_itself() -> None:
    data = clouds(30)
    task = make(data=data, neighbours=3).eval()
    found = evaluate(task, data)
    codes = task.embed(data.inputs).detach()
    first, among = 0, 0
    for i in range(30):
        others = [r for r in task.reference_rows.tolist() if r != i]
        ranked = sorted(others, key=lambda r: -float(codes[r] @ codes[i]))[:3]
        right = [int(data.target[r] == data.target[i]) for r in ranked]
        first, among = first + right[0], among + sum(right)
    assert found["precision_at_1"] == pytest.approx(first / 30)
    assert found["precision_at_k"] == pytest.approx(among / 90)


def test_rows_without_a_class_are_not_asked_and_where_none_has_one_nothing_is_measured() -> None:
    data = clouds()
    task = make(data=data).eval()
    some, all_of_them = (
        evaluate(task, hidden(data)),
        evaluate(task, data.subset((hidden(data).target >= 0).nonzero()[:, 0])),
    )
    assert some["accuracy"] == all_of_them["accuracy"]
    assert some["precision_at_k"] == all_of_them["precision_at_k"]
    nobody = TensorData({"inputs": data.inputs, "target": torch.full((90,), -100)})
    assert evaluate(task, nobody).keys() == {"loss"}


def test_codes_of_references_follow_the_weights() -> None:
    data = clouds()
    task = make("siamese", data=data, answer="linear").eval()
    before = task.known()
    assert task.known() is before, "kept while nothing changes"
    fit(task, data, epochs=3, optim=Optim(lr=0.01))
    after = task.known()
    assert not torch.allclose(after.codes, before.codes, atol=1e-3)
    torch.testing.assert_close(after.codes, task.embed(task.reference_inputs).detach())
    other = make("siamese", data=data, answer="linear").eval()
    other.known()
    other.load_state_dict(task.state_dict())
    torch.testing.assert_close(other.known().codes, after.codes)
    torch.testing.assert_close(other.known().weight, after.weight)
    copied = copy.deepcopy(make("siamese", data=data).eval())
    copied.known()
    copied.load_state_dict(task.state_dict())
    torch.testing.assert_close(copied.known().codes, after.codes)


# Training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["siamese", "cosine", "triplet"])
def test_pairs_bring_classes_together(loss: str) -> None:
    data, test = clouds(spread=1.2), clouds(60, seed=1, spread=1.2)
    task = make(loss, data=data)
    before = evaluate(task, test)
    fit(task, data, epochs=40, optim=Optim(lr=5e-3), train=Train(batch_size=45))
    after = evaluate(task, test)
    assert after["precision_at_k"] > before["precision_at_k"] + 0.1
    assert after["loss"] < before["loss"]


def test_views_alone_bring_rows_back_to_themselves() -> None:
    data = clouds()
    task = make(projection=4)
    before = evaluate(task, data)
    fit(task, hidden(data), epochs=20, optim=Optim(lr=5e-3), train=Train(batch_size=30, micro_batches=3))
    after = evaluate(task, data)
    assert after["loss"] < before["loss"] - 0.3


def test_images_of_bytes_are_scaled_and_described() -> None:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (8, 1, 6, 6), dtype=torch.uint8)
    known = References(pixels[:4], torch.tensor([0, 1, 0, 1]), torch.arange(4))
    model = Network(EmbeddingConfig((1, 6, 6), "convolutional", (5,), channels=2, code=3))
    views = ImageViews([0.0], shift=0.2)
    task = Embedding(model, 2, known, views, inputs=ImageInputs([100.0], [50.0])).eval()
    wanted = functional.normalize(model.encode((pixels.float() - 100) / 50), dim=1)
    torch.testing.assert_close(task.predict(pixels)["code"], wanted)
    again = build_task(json.loads(json.dumps(task.spec())))
    again.load_state_dict(task.state_dict())
    again.eval()
    for name, value in task.predict(pixels).items():
        assert torch.equal(again.predict(pixels)[name], value), name
    data = TensorData({"inputs": pixels, "target": torch.arange(8) % 2})
    assert evaluate(again, data) == evaluate(task, data)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"loss": "info"}, "did you mean 'info_nce'"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"margin": -1.0}, "margin is -1.0"),
        ({"neighbours": 0}, "neighbours"),
        ({"answer": "vote"}, "neighbours or linear"),
    ],
)
def test_wrong_rules_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        EmbeddingRules(**wrong)


def test_a_single_reference_is_refused() -> None:
    known = References(torch.zeros(1, FEATURES), torch.zeros(1).long(), torch.zeros(1).long())
    with pytest.raises(InputError, match="at least 2 rows"):
        Embedding(Network(EmbeddingConfig((FEATURES,))), 2, known, RowViews())
