"""The losses of two players against PyTorch's and explicit logarithms, distances against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import InputError
from quire.functional.adversarial import (
    discriminator_loss,
    discriminator_value,
    minimax_generator_loss,
    non_saturating_generator_loss,
    optimal_discriminator,
    random_directions,
    sliced_wasserstein,
    value_at_optimum,
)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def distributions(*shape: int) -> Tensor:
    return random(*shape).softmax(-1)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_discriminators_loss_is_binary_cross_entropy_of_data_and_samples(reduction: str) -> None:
    real, fake = (4 * random(7)).requires_grad_(), (4 * random(5)).requires_grad_()
    loss = discriminator_loss(real, fake, reduction=reduction)
    entropy = functional.binary_cross_entropy_with_logits
    wanted = entropy(real, torch.ones_like(real), reduction=reduction)
    wanted = wanted + entropy(fake, torch.zeros_like(fake), reduction=reduction)
    torch.testing.assert_close(loss, wanted)
    for got, peer in zip(
        torch.autograd.grad(loss, [real, fake]), torch.autograd.grad(wanted, [real, fake]), strict=True
    ):
        torch.testing.assert_close(got, peer)


def test_both_generator_losses_are_their_logarithms() -> None:
    fake = 3 * random(9)
    d = [1 / (1 + math.exp(-a)) for a in fake.tolist()]
    minimax = minimax_generator_loss(fake, reduction="sum")
    assert minimax.item() == pytest.approx(sum(math.log(1 - p) for p in d), rel=1e-12)
    better = non_saturating_generator_loss(fake, reduction="sum")
    assert better.item() == pytest.approx(-sum(math.log(p) for p in d), rel=1e-12)
    assert non_saturating_generator_loss(fake).item() == pytest.approx(better.item() / 9, rel=1e-12)


def test_the_slope_fades_for_one_and_stays_for_the_other() -> None:
    fake = torch.tensor([-10.0, 0.0, 10.0], dtype=torch.float64, requires_grad=True)
    (minimax,) = torch.autograd.grad(minimax_generator_loss(fake, reduction="sum"), fake)
    (better,) = torch.autograd.grad(non_saturating_generator_loss(fake, reduction="sum"), fake)
    torch.testing.assert_close(minimax, -fake.sigmoid())
    torch.testing.assert_close(better, fake.sigmoid() - 1)
    assert minimax[0].abs() < 1e-4 < 0.99 < better[0].abs()
    assert minimax[1] == better[1] == -0.5


def test_no_logit_is_too_large() -> None:
    sure = torch.tensor([1e4, -1e4])
    assert discriminator_loss(sure, sure, reduction="sum") == 2e4
    assert minimax_generator_loss(sure, reduction="sum") == -1e4
    assert non_saturating_generator_loss(sure, reduction="sum") == 1e4


def test_half_precision_is_added_up_in_float32() -> None:
    fake = torch.zeros(3000, dtype=torch.bfloat16)
    for loss in (
        discriminator_loss(fake, fake, reduction="sum") / 2,
        non_saturating_generator_loss(fake) * 3000,
    ):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(3000 * math.log(2), rel=1e-5)


def test_an_unknown_reduction_is_named() -> None:
    with pytest.raises(InputError, match=r"(?s)unknown reduction 'total'.*one of mean, sum"):
        minimax_generator_loss(torch.zeros(1), reduction="total")


def test_the_optimal_discriminator_of_three_outcomes_by_hand() -> None:
    data, model = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.25, 0.0, 0.75, 0.0])
    torch.testing.assert_close(optimal_discriminator(data, model), torch.tensor([2 / 3, 1.0, 0.0, 0.5]))
    assert optimal_discriminator(data * torch.nan, model).isnan().all()


def test_no_discriminator_does_better_than_the_optimal_one() -> None:
    data, model = distributions(4, 6), distributions(4, 6)
    best = discriminator_value(data, model, optimal_discriminator(data, model))
    torch.testing.assert_close(best, value_at_optimum(data, model))
    for other in torch.rand(200, 4, 6, dtype=torch.float64):
        assert (discriminator_value(data, model, other) < best).all()


def test_the_value_runs_from_minus_log_4_to_0() -> None:
    data = distributions(5)
    assert value_at_optimum(data, data).item() == pytest.approx(-math.log(4))
    assert value_at_optimum(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item() == pytest.approx(0)


def test_the_value_of_the_game_is_minus_the_discriminators_loss() -> None:
    """On rows that stand for the outcomes in the right numbers."""
    data, model = torch.tensor([1, 2, 5]), torch.tensor([4, 3, 1])
    logits = random(3)
    loss = discriminator_loss(logits.repeat_interleave(data), logits.repeat_interleave(model))
    value = discriminator_value(data / 8, model / 8, logits.sigmoid())
    torch.testing.assert_close(value, -loss)


def test_sliced_wasserstein_is_the_best_of_all_pairings() -> None:
    x, y, directions = random(5, 3), random(5, 3), random(4, 3)
    total = 0.0
    for one in directions:
        a, b = x @ one, y @ one
        total += min(
            (a - b[list(order)]).square().mean().item() for order in itertools.permutations(range(5))
        )
    assert sliced_wasserstein(x, y, directions).item() == pytest.approx(math.sqrt(total / 4), rel=1e-12)


def test_sliced_wasserstein_of_a_shift_and_of_the_mean() -> None:
    x, shift = random(50, 3), torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)
    assert sliced_wasserstein(x, (x + shift).flip(0)).item() == pytest.approx(5 / math.sqrt(3), rel=1e-12)
    mean = x.mean(0).expand_as(x)
    assert sliced_wasserstein(x, mean).item() == pytest.approx(x.var(0, correction=0).mean().sqrt().item())


def test_sliced_wasserstein_wants_as_many_samples_as_rows() -> None:
    with pytest.raises(InputError, match=r"(?s)rows \(3, 2\) and \(4, 2\).*draw as many samples"):
        sliced_wasserstein(random(3, 2), random(4, 2))


def test_directions_are_unit_vectors_and_always_the_same() -> None:
    directions = random_directions(7, 20)
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(20))
    assert torch.equal(directions, random_directions(7, 20))
    assert not torch.equal(directions, random_directions(7, 20, seed=1))
