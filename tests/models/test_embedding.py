"""Embeddings: unit vectors of the encoder's codes, compared through a projection."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from quire.errors import InputError
from quire.models.embedding import Embedding, EmbeddingConfig, unit


@pytest.mark.parametrize("shape", [(7,), (1, 8, 8), (3, 9, 13)])
def test_embeddings_are_codes_of_length_one(shape: tuple[int, ...]) -> None:
    kind = "dense" if len(shape) == 1 else "convolutional"
    model = Embedding(EmbeddingConfig(shape, kind, (6,), channels=4, code=5, projection=3))  # type: ignore[arg-type]
    x = torch.randn(4, *shape)
    codes, found = model.encode(x), model(x)
    assert found.shape == (4, 5)
    torch.testing.assert_close(found, codes / codes.square().sum(1, keepdim=True).sqrt())
    first, _, last = model.projection  # type: ignore[misc]
    by_hand = functional.linear(
        functional.linear(codes, first.weight, first.bias).relu(), last.weight, last.bias
    )
    torch.testing.assert_close(model.compare(x), by_hand / by_hand.norm(dim=1, keepdim=True))


def test_without_a_projection_embeddings_themselves_are_compared() -> None:
    model = Embedding(EmbeddingConfig((7,), code=5))
    x = torch.randn(4, 7)
    assert torch.equal(model.compare(x), model(x))


def test_half_precision_is_made_a_unit_in_full() -> None:
    found = unit(torch.randn(5, 9).bfloat16())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.norm(dim=1), torch.ones(5))
    assert torch.equal(unit(torch.zeros(2, 3)), torch.zeros(2, 3)), "and no division by 0"


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)projection is -1.*>= 0"):
        EmbeddingConfig((7,), projection=-1)
    with pytest.raises(InputError, match="code"):
        EmbeddingConfig((7,), code=0)
