"""Pair losses against PyTorch's and explicit loops, guessed labels by hand, neighbours and softmax regression
against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor
from torch.nn import functional

from quire.errors import InputError
from quire.functional.few_labels import (
    contrastive_margin,
    nearest_codes,
    neighbour_votes,
    pair_losses_each,
    pair_masks,
    pseudo_label,
    softmax_regression,
)
from quire.functional.losses import cosine_embedding, triplet_margin


def units(*shape: int) -> Tensor:
    return functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


# Single pairs -----------------------------------------------------------------------------------


def test_a_pair_by_hand() -> None:
    first = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    second = torch.tensor([[3.0, 4.0], [0.3, 0.4], [4.0, 5.0]])
    together = contrastive_margin(first, second, torch.ones(3), reduction="none")
    torch.testing.assert_close(together, torch.tensor([25.0, 0.25, 25.0]))
    apart = contrastive_margin(first, second, -torch.ones(3), margin=2.0, reduction="none")
    torch.testing.assert_close(apart, torch.tensor([0.0, 1.5**2, 0.0]))


def test_a_column_of_targets_is_refused() -> None:
    """It would be compared with every pair."""
    with pytest.raises(InputError, match=r"shapes \(3,\) and \(3, 1\)"):
        contrastive_margin(torch.zeros(3, 2), torch.zeros(3, 2), torch.ones(3, 1))


def test_equal_codes_that_should_be_apart_have_a_finite_gradient() -> None:
    code = torch.zeros(1, 3, requires_grad=True)
    loss = contrastive_margin(code, torch.zeros(1, 3), -torch.ones(1))
    loss.backward()
    assert loss.item() == pytest.approx(1.0, abs=1e-3)
    assert code.grad is not None
    assert code.grad.isfinite().all()


def test_gradients_of_pairs_are_those_of_finite_differences() -> None:
    first, second = torch.randn(2, 6, 4, dtype=torch.float64).unbind()
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda a, b: contrastive_margin(a, b, signs, margin=4.0),
        (first.requires_grad_(), second.requires_grad_()),
    )


# All pairs of a batch -----------------------------------------------------------------------------


TARGET = torch.tensor([0, 1, 0, 2, -100, 1, 0, 3])
"""Class 2 and 3 have one row each, and one row has no class."""


def test_which_pairs_belong_together() -> None:
    together, apart = pair_masks(TARGET)
    for i, a in enumerate(TARGET.tolist()):
        for j, b in enumerate(TARGET.tolist()):
            assert together[i, j] == (i != j and a == b and a >= 0)
            assert apart[i, j] == (a != b and a >= 0 and b >= 0)


@pytest.mark.parametrize("kind", ["siamese", "cosine"])
def test_the_loss_of_a_code_is_the_mean_over_its_pairs(kind: str) -> None:
    codes = units(8, 5)
    margin = 1.2 if kind == "siamese" else 0.1
    found = pair_losses_each(codes, TARGET, kind, margin)  # type: ignore[arg-type]
    for i in range(8):
        parts: dict[int, list[float]] = {1: [], -1: []}
        for j in range(8):
            if i == j or TARGET[i] < 0 or TARGET[j] < 0:
                continue
            sign = 1 if TARGET[i] == TARGET[j] else -1
            pair = codes[i : i + 1], codes[j : j + 1], torch.tensor([float(sign)], dtype=torch.float64)
            if kind == "siamese":
                distance = float((codes[i] - codes[j]).norm())
                value = distance**2 if sign > 0 else max(0.0, margin - distance) ** 2
            else:
                value = cosine_embedding(*pair, margin=margin).item()
            parts[sign].append(value)
        wanted = sum(sum(values) / len(values) for values in parts.values() if values)
        assert found[i].item() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("margin", [0.0, 0.3, 1.5])
def test_the_loss_of_a_code_is_the_mean_over_all_its_triplets(margin: float) -> None:
    codes = units(8, 5)
    found = pair_losses_each(codes, TARGET, "triplet", margin)
    together, apart = pair_masks(TARGET)
    for i in range(8):
        triplets = [(j, n) for j in range(8) for n in range(8) if together[i, j] and apart[i, n]]
        if not triplets:
            assert found[i] == 0
            continue
        each = [
            max(0.0, float((codes[i] - codes[j]).norm() - (codes[i] - codes[n]).norm()) + margin)
            for j, n in triplets
        ]
        assert found[i].item() == pytest.approx(sum(each) / len(each), abs=1e-9)
        if margin:  # PyTorch's own adds 1e-6 to every difference
            near, far = (torch.stack([codes[p[k]] for p in triplets]) for k in (0, 1))
            torches = triplet_margin(codes[i].expand_as(near), near, far, margin=margin)
            assert found[i].item() == pytest.approx(torches.item(), abs=1e-5)


def test_a_single_triplet_by_hand() -> None:
    """(1, 0) with its partner (0, 1), √2 away, and a stranger (−1, 0), 2 away."""
    codes = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    found = pair_losses_each(codes, torch.tensor([0, 0, 1]), "triplet", 1.0)
    assert found.tolist() == pytest.approx([math.sqrt(2) - 2 + 1, 1.0, 0.0])


@pytest.mark.parametrize(("kind", "margin"), [("siamese", 1.2), ("cosine", 0.1), ("triplet", 0.4)])
def test_gradients_over_all_pairs_are_those_of_finite_differences(kind: str, margin: float) -> None:
    raw = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: pair_losses_each(functional.normalize(x, dim=1), TARGET, kind, margin),  # type: ignore[arg-type]
        (raw,),
    )


@pytest.mark.parametrize("kind", ["siamese", "cosine", "triplet"])
def test_rows_without_a_class_lose_nothing_and_codes_that_coincide_stay_finite(kind: str) -> None:
    codes = torch.ones(6, 4).div(2).requires_grad_()
    unknown = pair_losses_each(codes, torch.full((6,), -100), kind, 0.5)  # type: ignore[arg-type]
    assert torch.equal(unknown, torch.zeros(6))
    loss = pair_losses_each(codes, torch.tensor([0, 0, 1, 1, 2, -100]), kind, 0.5).sum()  # type: ignore[arg-type]
    loss.backward()
    assert loss > 0
    assert codes.grad is not None
    assert codes.grad.isfinite().all()


def test_an_unknown_loss_of_pairs_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'siamese'"):
        pair_losses_each(units(3, 2), torch.zeros(3).long(), "siamesse", 1.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"\(N, K\) and \(N,\)"):
        pair_losses_each(units(3, 2), torch.zeros(4).long(), "siamese", 1.0)


# Guessed labels -----------------------------------------------------------------------------------


def test_only_answers_that_are_trusted_become_labels() -> None:
    sure = torch.log(torch.tensor([[0.97, 0.02, 0.01], [0.5, 0.4, 0.1], [0.1, 0.05, 0.85]]))
    logits = torch.tensor([[1.0, 2.0, 3.0], [9.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    each = pseudo_label(logits, sure, threshold=0.8, reduction="none")
    first = -1.0 + math.log(math.e + math.e**2 + math.e**3)
    torch.testing.assert_close(each, torch.tensor([first, 0.0, math.log(3)]))
    mean = pseudo_label(logits, sure, threshold=0.8)
    assert mean.item() == pytest.approx((first + math.log(3)) / 3), "over all rows"


def test_no_gradient_reaches_the_answer_that_is_trusted() -> None:
    sure, logits = (5 * torch.randn(20, 3)).requires_grad_(), torch.randn(20, 3, requires_grad=True)
    pseudo_label(logits, sure, threshold=0.6).backward()
    assert sure.grad is None
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0


# Neighbours ---------------------------------------------------------------------------------------


def test_neighbours_are_those_of_scikit_learn() -> None:
    queries, references = units(30, 6), units(50, 6)
    classes = torch.arange(50) % 4
    likeness, places = nearest_codes(queries, references, 7)
    peer = KNeighborsClassifier(7, metric="euclidean", algorithm="brute").fit(
        references.numpy(), classes.numpy()
    )
    distances, wanted = peer.kneighbors(queries.numpy())
    np.testing.assert_array_equal(places.numpy(), wanted)
    np.testing.assert_allclose(np.sqrt(2 - 2 * likeness.numpy()), distances, atol=1e-9)
    # At a high temperature every neighbour has one vote, as scikit-learn's have.
    votes = neighbour_votes(likeness, classes[places], 4, temperature=1e9, doubt=0.0)
    np.testing.assert_allclose(votes.numpy(), peer.predict_proba(queries.numpy()), atol=1e-8)


def test_nearer_neighbours_vote_louder() -> None:
    likeness, classes = torch.tensor([[0.9, 0.8, 0.8]]), torch.tensor([[2, 0, 0]])
    votes = neighbour_votes(likeness, classes, 4, temperature=0.1, doubt=0.1)
    loud, quiet = math.exp(9), math.exp(8)
    total = loud + 2 * quiet
    wanted = [0.9 * share + 0.025 for share in (2 * quiet / total, 0.0, loud / total, 0.0)]
    torch.testing.assert_close(votes, torch.tensor([wanted]))
    assert votes.argmax() == 2, "e > 2: one at 0.9 outvotes two at 0.8"


def test_more_neighbours_than_references_are_refused() -> None:
    with pytest.raises(InputError, match=r"(?s)6 neighbours among 5 references.*from 1 to 5"):
        nearest_codes(units(2, 3), units(5, 3), 6)


@pytest.mark.parametrize("penalty", [0.03, 1.0])
def test_softmax_regression_is_that_of_scikit_learn(penalty: float) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(60, 5, generator=generator)
    target = torch.randint(0, 3, (60,), generator=generator)
    weight, bias = softmax_regression(codes, target, 3, penalty=penalty)
    peer = LogisticRegression(C=1 / penalty, tol=1e-10, max_iter=5000).fit(
        codes.double().numpy(), target.numpy()
    )
    ours = (codes @ weight.T + bias).softmax(1).numpy()
    np.testing.assert_allclose(ours, peer.predict_proba(codes.double().numpy()), atol=1e-5)
    assert weight.dtype == codes.dtype
    assert not weight.requires_grad


def test_softmax_regression_works_where_no_gradient_is_wanted() -> None:
    with torch.no_grad():
        weight, _ = softmax_regression(units(12, 3), torch.arange(12) % 3, 3, penalty=0.1)
    assert weight.abs().sum() > 0
