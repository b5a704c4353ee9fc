from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn

from quire.errors import InputError
from quire.functional import regularise
from quire.nn.activation import Arctan
from quire.nn.dropout import Dropout, monte_carlo_dropout
from quire.nn.noise import GaussianNoise, install, noisy_activations, perturbed


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Penalties ------------------------------------------------------------------------------------


def test_penalties_by_hand() -> None:
    weights = [torch.tensor([1.0, -2.0]), torch.tensor([[3.0]])]
    assert regularise.l1_penalty(weights, 0.5).item() == 3.0
    assert regularise.l2_penalty(weights, 0.5).item() == 3.5
    assert regularise.l1_penalty(iter(weights)).item() == 6.0
    assert regularise.l2_penalty(weights[0]).item() == 2.5


def test_max_norm_shortens_long_rows_only() -> None:
    weight = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    expected = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]])
    assert torch.allclose(regularise.max_norm(weight, 1.0), expected)
    kernel = torch.randn(5, 3, 2, 2)
    assert regularise.max_norm(kernel, 0.5).flatten(1).norm(dim=1).max() <= 0.5 + 1e-6


# Dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("generator", [None, seeded()])
def test_dropout_keeps_type_and_values(dtype: torch.dtype, generator: torch.Generator | None) -> None:
    torch.manual_seed(0)
    x = torch.full((2000,), 3.0, dtype=dtype)
    out = regularise.dropout(x, 0.25, True, generator)
    assert out.dtype == dtype
    assert set(out.tolist()) == {0.0, 4.0}
    assert abs((out == 0).float().mean() - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5


def test_dropout_gradient_flows_through_what_was_kept() -> None:
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    out = regularise.dropout(x, 0.5, True, seeded())
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, torch.where(out == 0, 0.0, 2.0).double())


def test_dropout_repeats_with_its_generator_and_rests_in_evaluation() -> None:
    x = torch.randn(30)
    assert torch.equal(
        regularise.dropout(x, 0.5, True, seeded(3)), regularise.dropout(x, 0.5, True, seeded(3))
    )
    assert regularise.dropout(x, 0.5, training=False) is x
    assert regularise.dropout(x, 0.0) is x
    layer = Dropout(0.5)
    assert not torch.equal(layer(x), x)
    assert torch.equal(layer.eval()(x), x)
    assert repr(layer) == "Dropout(p=0.5)"


def test_an_infinite_activation_that_is_dropped_leaves_no_nan() -> None:
    out = regularise.dropout(torch.full((20,), math.inf), 0.5, True, seeded())
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_penalties_of_many_weights_in_half_precision(dtype: torch.dtype) -> None:
    w = torch.full((100_000,), 2.0, dtype=dtype, requires_grad=True)
    assert regularise.l1_penalty([w], 0.5).item() == 100_000
    penalty = regularise.l2_penalty([w], 0.5)
    assert penalty.item() == 100_000
    penalty.backward()
    assert w.grad.dtype == dtype
    assert (w.grad == 1).all()


def test_all_masks_by_hand() -> None:
    masks, probability = regularise.dropout_masks(2, 0.25)
    table = {tuple(mask): p for mask, p in zip(masks.tolist(), probability.tolist(), strict=True)}
    assert table == pytest.approx({(0, 0): 0.0625, (1, 0): 0.1875, (0, 1): 0.1875, (1, 1): 0.5625})


def test_ensemble_reading_is_exact_for_a_linear_layer_and_not_for_a_hidden_one() -> None:
    layer, x = nn.Linear(6, 2).double(), torch.randn(6).double()
    masks, probability = regularise.dropout_masks(6, 0.3)
    average = probability @ layer(masks * x)
    scaled = x @ regularise.keep_scaled(layer.weight, 0.3).T + layer.bias
    assert torch.allclose(average, scaled, atol=1e-14)
    assert not torch.allclose(probability @ torch.tanh(layer(masks * x)), torch.tanh(scaled), atol=1e-4)


def test_monte_carlo_dropout_is_the_average_over_masks() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Dropout(0.3), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    net(torch.randn(20, 4).double())
    net.eval()
    x = torch.randn(1, 4).double()
    masks, probability = regularise.dropout_masks(4, 0.3)
    outputs = torch.cat([net[1:](mask * x / 0.7) for mask in masks]).squeeze(1)
    mean = probability @ outputs
    std = (probability @ (outputs - mean).square()).sqrt()
    before = copy.deepcopy(net.state_dict())
    seen = monte_carlo_dropout(net, x, 2000)
    assert abs(seen.mean.item() - mean.item()) < 4 * seen.standard_error.item()
    assert seen.std.item() == pytest.approx(std.item(), rel=0.1)
    assert not any(layer.training for layer in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("samples", [2, 5])
def test_monte_carlo_counts_every_sample(samples: int) -> None:
    net, x = nn.Sequential(Dropout(0.5), nn.Linear(6, 3)).double(), torch.randn(2, 6).double()
    torch.manual_seed(3)
    seen = monte_carlo_dropout(net, x, samples)
    torch.manual_seed(3)
    with torch.no_grad():
        each = torch.stack([net.train()(x) for _ in range(samples)])
    torch.testing.assert_close(seen.mean, each.mean(0))
    torch.testing.assert_close(seen.std, each.std(0))
    torch.testing.assert_close(seen.standard_error, each.std(0) / samples**0.5)


def test_monte_carlo_spread_is_that_of_the_samples() -> None:
    net, x = (
        nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 2)).double(),
        torch.randn(4, 3).double(),
    )
    torch.manual_seed(1)
    samples = torch.stack([net(x) for _ in range(5)])
    torch.manual_seed(1)
    seen = monte_carlo_dropout(net, x, 5)
    assert torch.allclose(seen.mean, samples.mean(0))
    assert torch.allclose(seen.std, samples.std(0))


# Noise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_has_its_standard_deviation_and_type(dtype: torch.dtype) -> None:
    out = regularise.gaussian_noise(torch.zeros(20_000, dtype=dtype), 0.5, seeded())
    assert out.dtype == dtype
    assert out.float().std().item() == pytest.approx(0.5, rel=0.03)
    assert abs(out.float().mean().item()) < 4 * 0.5 / 20_000**0.5


def test_noise_layer_rests_in_evaluation() -> None:
    layer, x = GaussianNoise(0.3), torch.randn(5)
    assert not torch.equal(layer(x), x)
    assert torch.equal(layer.eval()(x), x)
    assert repr(layer) == "GaussianNoise(std=0.3)"


def test_noise_on_activations_comes_and_goes() -> None:
    net = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), Arctan(), nn.Linear(4, 2), nn.Softmax(-1)
    )
    x = torch.randn(6, 3)
    clean = net(x)
    handle = install(net, 0.2)
    assert len(handle.handles) == 2  # not on the distribution that softmax gives
    noisy = net(x)
    assert not torch.equal(noisy, clean)
    assert torch.allclose(noisy.sum(1), torch.ones(6))
    assert torch.equal(net.eval()(x), clean)
    handle.remove()
    handle.remove()  # twice is harmless
    assert torch.equal(net.train()(x), clean)
    with noisy_activations(net, 0.2, seeded(1)):
        first = net(x)
    with noisy_activations(net, 0.2, seeded(1)):
        assert torch.equal(net(x), first)
    assert torch.equal(net(x), clean)


def test_perturbed_weights_are_restored_bit_for_bit_also_after_an_error() -> None:
    net = nn.Linear(3, 2)
    before = copy.deepcopy(net.state_dict())
    x = torch.randn(4, 3)
    with perturbed(net.parameters(), 0.1, seeded()):
        moved = net.weight.detach().clone()
        net(x)
    assert not torch.equal(moved, before["weight"])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    with pytest.raises(RuntimeError, match="stop"), perturbed(net.parameters(), 0.1):
        raise RuntimeError("stop")
    assert torch.equal(net.weight, before["weight"])


def test_the_gradient_under_weight_noise_is_that_of_the_moved_weights() -> None:
    w = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    with perturbed([w], 0.5, seeded()):
        moved = w.item()
        (w**2).backward()
    assert w.grad is not None
    assert moved != 2.0
    assert w.grad.item() == pytest.approx(2 * moved)


# Early stopping -------------------------------------------------------------------------------


def test_early_stopping_by_hand() -> None:
    stopping = regularise.EarlyStopping(patience=2)
    assert [stopping.update(value) for value in (3.0, 2.0, 2.0, 2.5)] == [False, False, False, True]
    assert stopping.best == 2.0
    assert (stopping.best_update, stopping.waited) == (1, 2)
    assert not stopping.improved


def test_an_accuracy_improves_upwards() -> None:
    stopping = regularise.EarlyStopping(patience=1, min_delta=0.01, higher_is_better=True)
    assert not stopping.update(0.90)
    assert stopping.improved
    assert stopping.update(0.905)
    assert stopping.best == 0.90


def test_without_patience_it_only_remembers() -> None:
    stopping = regularise.EarlyStopping(None)
    assert not any(stopping.update(value) for value in (1.0, 2.0, 3.0, 4.0))
    assert stopping.best == 1.0


def test_values_that_are_no_number_never_improve() -> None:
    stopping = regularise.EarlyStopping(patience=3)
    assert [stopping.update(v) for v in (math.nan, math.nan, 1.0, math.nan)] == [False, False, False, False]
    assert stopping.best == 1.0


def test_its_state_is_plain_and_resumes() -> None:
    first = regularise.EarlyStopping(patience=3)
    for value in (2.0, 1.0, 1.5):
        first.update(value)
    second = regularise.EarlyStopping(patience=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.update(value) for value in (1.2, 1.3)] == [False, True]


# Ensembles, shared and frozen parts -----------------------------------------------------------


def test_bootstrap_repeats_with_its_generator() -> None:
    rows = regularise.bootstrap(20, 3, seeded(5))
    assert rows.shape == (3, 20)
    assert torch.equal(rows, regularise.bootstrap(20, 3, seeded(5)))
    assert rows.min() >= 0
    assert rows.max() < 20


def test_ensemble_variance_at_its_ends() -> None:
    assert regularise.ensemble_variance(4.0, 0.0, 4) == 1.0
    assert regularise.ensemble_variance(4.0, 1.0, 4) == 4.0
    assert regularise.ensemble_variance(4.0, -1 / 3, 4) == pytest.approx(0.0)


def test_multi_task_by_hand() -> None:
    parts = {"a": torch.tensor(2.0), "b": torch.tensor(5.0)}
    assert regularise.multi_task_loss(parts).item() == 7.0
    assert regularise.multi_task_loss(parts, {"b": 0.1}).item() == 2.5


def test_freeze_leaves_parts_that_were_frozen_before_frozen() -> None:
    body = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    body[0].requires_grad_(False)
    handle = regularise.freeze(body)
    assert not any(parameter.requires_grad for parameter in body.parameters())
    handle.remove()
    assert [parameter.requires_grad for parameter in body.parameters()] == [False, False, True, True]


def test_a_frozen_body_can_be_copied() -> None:
    body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    regularise.freeze(body)
    twin = copy.deepcopy(body).train()
    twin(torch.randn(8, 2))
    assert torch.equal(twin[1].running_mean, torch.zeros(3))


# Self- and semi-supervised --------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "hidden"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_random_mask_hides_the_same_share_of_each_row(rate: float, hidden: int) -> None:
    mask = regularise.random_mask((5, 3, 8), rate, seeded())
    assert mask.dtype == torch.bool
    assert (mask.sum(-1) == hidden).all()


def test_masked_reconstruction_by_hand() -> None:
    prediction, x = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, False, True]])
    assert regularise.masked_reconstruction_loss(prediction, x, mask).item() == 5.0
    assert regularise.masked_reconstruction_loss(prediction, x, ~mask & mask).item() == 0.0


def test_masked_reconstruction_does_not_look_at_what_was_seen() -> None:
    prediction = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    x, mask = torch.tensor([0.0, math.nan, 0.0]), torch.tensor([True, False, True])
    loss = regularise.masked_reconstruction_loss(prediction, x, mask)
    loss.backward()
    assert loss.item() == 5.0
    assert prediction.grad.tolist() == [1.0, 0.0, 3.0]


def test_a_hidden_pixel_hides_all_its_channels() -> None:
    x, mask = torch.zeros(2, 3, 4, 4), torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    mask[:, :, 1:3] = True
    prediction = torch.where(mask, torch.tensor([1.0, 2.0, 3.0])[:, None, None], 9.0)
    whole = regularise.masked_reconstruction_loss(prediction, x, mask)
    assert whole.item() == pytest.approx((1 + 4 + 9) / 3)
    assert whole == regularise.masked_reconstruction_loss(prediction, x, mask.expand_as(x))
    with pytest.raises(InputError, match=r"shapes \(2, 3, 4, 4\) and \(3, 4, 4\)"):
        regularise.masked_reconstruction_loss(prediction, x[0], mask)


def test_masked_reconstruction_of_many_numbers_in_half_precision() -> None:
    many = torch.full((80_000,), 2.0, dtype=torch.float16)
    assert regularise.masked_reconstruction_loss(many, many * 0, many > 0).item() == 4.0


def test_semi_supervised_learning_uses_unlabelled_rows() -> None:
    """The code's gradient on a row without a label comes from its reconstruction alone."""
    z = torch.randn(4, 3).double().requires_grad_()
    x, target = torch.randn(4, 3).double(), torch.tensor([0, 2, -100, -100])
    value = regularise.semi_supervised_loss(z, target, z, x, weight=2.0)
    (gradient,) = torch.autograd.grad(value, z)
    assert torch.allclose(gradient[2:], 2.0 * 2 * (z - x)[2:] / 12)
    assert not torch.allclose(gradient[:2], 2.0 * 2 * (z - x)[:2] / 12)


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    generator, x = torch.Generator("cuda").manual_seed(0), torch.ones(1000, device="cuda")
    assert set(regularise.dropout(x, 0.5, True, generator).tolist()) == {0.0, 2.0}
    assert regularise.gaussian_noise(x, 0.1, generator).device.type == "cuda"
    assert (regularise.random_mask((5, 8), 0.5, generator, "cuda").sum(1) == 4).all()
    with perturbed([x], 0.1, generator):
        assert not (x == 1).all()
    assert (x == 1).all()


# Messages -------------------------------------------------------------------------------------


def test_messages() -> None:
    with pytest.raises(InputError, match=r"drop rate 1\.5\n  expected: a number in \[0, 1\)"):
        regularise.dropout(torch.ones(2), 1.5)
    with pytest.raises(InputError, match=r"drop rate 1\.0\n  expected: a number in \[0, 1\)"):
        regularise.dropout(torch.zeros(2), 1.0)
    assert regularise.random_mask((2, 3), 1.0).all()
    with pytest.raises(InputError, match="drop rate -1"):
        Dropout(-1)
    with pytest.raises(InputError, match="all masks of 40 units"):
        regularise.dropout_masks(40, 0.5)
    with pytest.raises(InputError, match=r"noise with standard deviation -0\.1"):
        GaussianNoise(-0.1)
    with pytest.raises(InputError, match="noise on the activations of a Linear without activation layers"):
        install(nn.Linear(2, 2), 0.1)
    with pytest.raises(InputError, match="a Linear without dropout layers"):
        monte_carlo_dropout(nn.Linear(2, 2), torch.ones(2))
    with pytest.raises(InputError, match="1 samples"):
        monte_carlo_dropout(nn.Dropout(0.1), torch.ones(2), 1)
    with pytest.raises(InputError, match="patience is 0"):
        regularise.EarlyStopping(0)
    with pytest.raises(InputError, match="min_delta is nan"):
        regularise.EarlyStopping(1, math.nan)
    with pytest.raises(InputError, match=r"a pairwise correlation of -0\.9 between 3 members"):
        regularise.ensemble_variance(1.0, -0.9, 3)
    with pytest.raises(InputError, match=r"weights for \['c'\] and losses for \['a'\]"):
        regularise.multi_task_loss({"a": torch.ones(())}, {"c": 1.0})
    with pytest.raises(InputError, match="0 resamples of 5 rows"):
        regularise.bootstrap(5, 0)
    with pytest.raises(InputError, match="no parameters"):
        regularise.l1_penalty([])
