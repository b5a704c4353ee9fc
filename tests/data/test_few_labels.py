"""Which rows keep their label, and rows that never had one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from quire.data.batch import TensorData
from quire.data.few_labels import NO_LABEL, choose_labelled, hide_labels, with_unlabelled
from quire.data.images import load_images
from quire.data.images.stream import ImageStream
from quire.errors import InputError
from quire.nn.heads import IGNORE
from quire.options import Images

TARGET = torch.tensor([0] * 60 + [1] * 30 + [2] * 9 + [3])[torch.randperm(100)]


@pytest.mark.parametrize("count", [4, 5, 10, 33, 50, 99, 100])
def test_each_class_has_its_share_and_at_least_one(count: int) -> None:
    rows = choose_labelled(TARGET, 4, count, seed=1)
    assert len(rows) == count
    assert torch.equal(rows, rows.unique()), "ascending, none twice"
    found = torch.bincount(TARGET[rows], minlength=4)
    assert found.min() >= 1
    share = torch.bincount(TARGET) * count / 100
    # Where a rare class takes more than its share, others give up a little.
    assert ((found - share).abs() <= 1 + (found > share).sum()).all(), found
    if count == 50:
        assert found.tolist()[:2] == [30, 15]


def test_the_seed_decides_which() -> None:
    one, again, other = (choose_labelled(TARGET, 4, 20, seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(choose_labelled(TARGET, 4, None, seed=1), torch.arange(100))


def test_more_labels_than_rows_and_fewer_than_classes_are_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)--labels 101 of 100 training rows.*at most 100.*None"):
        choose_labelled(TARGET, 4, 101, 0)
    with pytest.raises(InputError, match=r"(?s)--labels 3 for 4 classes.*class without a label.*4 or more"):
        choose_labelled(TARGET, 4, 3, 0)


def test_hidden_labels_are_those_that_losses_ignore() -> None:
    assert NO_LABEL == IGNORE
    data = TensorData({"inputs": torch.arange(100.0), "target": TARGET})
    rows = choose_labelled(TARGET, 4, 10, 0)
    hidden = hide_labels(data, rows)
    assert torch.equal(hidden.inputs, data.inputs)
    assert torch.equal(hidden.target[rows], TARGET[rows])
    assert int((hidden.target == IGNORE).sum()) == 90
    assert not hidden.complete
    assert data.complete, "the data that was given stays as it is"


def test_labels_of_images_that_are_decoded_while_training_are_hidden_too(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(12):
            pixels = np.full((6, 6), 20 * i + (name == "b"), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i:02d}.png")
    data = load_images(tmp_path, Images(memory=1e-9))
    assert isinstance(data.train, ImageStream)
    rows = choose_labelled(data.train.target, 2, 4, 0)
    hidden = hide_labels(data.train, rows)
    batch = hidden.take(torch.arange(len(hidden)))
    assert (batch.target >= 0).nonzero()[:, 0].tolist() == rows.tolist()
    assert torch.equal(batch.inputs, data.train.take(torch.arange(len(hidden))).inputs)
    assert not batch.complete
    with pytest.raises(InputError, match=r"(?s)--unlabelled.*--images.memory"):
        with_unlabelled(hidden, hidden)


def test_rows_without_labels_come_after_those_with() -> None:
    data = TensorData({"inputs": torch.zeros(3, 2), "target": torch.tensor([1, NO_LABEL, 0])})
    more = TensorData({"inputs": torch.ones(2, 2)})
    both = with_unlabelled(data, more)
    assert both.inputs[:, 0].tolist() == [0, 0, 0, 1, 1]
    assert both.target.tolist() == [1, NO_LABEL, 0, NO_LABEL, NO_LABEL]
