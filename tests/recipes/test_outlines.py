"""Shapes of inputs, by name and of a run; what is made of them is tested with the commands that use them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from quire.data.text import TextPreparation
from quire.data.text.tokenisers import Bytes
from quire.errors import InputError
from quire.models import BUILDERS
from quire.recipes.outlines import USUAL, Shape, by_name, empty, of_run, read_shape


def test_a_family_by_its_example_or_by_its_defaults() -> None:
    _, example = by_name("seq2seq", [], 3)
    assert example is not None
    assert [(part.shape[0], part.dtype) for part in example] == [(3, torch.int64)] * 2
    model, given = by_name("gpt", [Shape((16,))], 2, {"vocab_size": 11, "layers": 1, "heads": 1, "width": 4})
    assert given is not None
    assert [(tuple(part.shape), part.dtype) for part in given] == [((2, 16), torch.int64)]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_network_has_no_input_of_its_own() -> None:
    assert by_name("resnet20", [], 1)[1] is None
    assert set(USUAL) <= set(BUILDERS)


def test_a_type_that_is_written_counts() -> None:
    inputs = empty([Shape((7,)), Shape((7,), "float64"), Shape((1, 8, 8))], nn.Embedding(5, 2), 4)
    assert [part.dtype for part in inputs] == [torch.int64, torch.float64, torch.float32]
    assert [tuple(part.shape) for part in inputs] == [(4, 7), (4, 7), (4, 1, 8, 8)]


def test_a_task_without_a_single_network_is_refused() -> None:
    with pytest.raises(InputError, match="a run of 'gan' has no single network"):
        of_run(SimpleNamespace(), SimpleNamespace(), 2, "gan")


def test_pairs_are_two_texts() -> None:
    preparation = TextPreparation("pairs", Bytes(), 9, Bytes(), 5)
    _, inputs = of_run(SimpleNamespace(model=nn.Embedding(300, 2)), preparation, 4)
    assert [(tuple(part.shape), part.dtype) for part in inputs] == [
        ((4, 9), torch.int64),
        ((4, 5), torch.int64),
    ]


@pytest.mark.parametrize(
    "text", ["3,-1", "a", "3,,4", "1,2,3,4,5,6,7", "4:complex64", "9" * 12, "99999999,99999999"]
)
def test_no_shape(text: str) -> None:
    with pytest.raises(InputError, match=f"the input {text}"):
        read_shape(text, "the input")
