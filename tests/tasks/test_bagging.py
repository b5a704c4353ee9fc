"""The bagging task: exact over micro-batches, saved and built again, honest out of bag."""

from __future__ import annotations

import pytest
import torch

from quire.data.batch import Batch, TensorData
from quire.errors import InputError
from quire.models.ensemble import EnsembleConfig, MLPEnsemble
from quire.nn.heads import Bernoulli, Categorical, Gaussian, Head, Heteroscedastic
from quire.options import Optim
from quire.tasks.bagging import Bagging, bootstrap_counts, moments
from quire.train import fit
from quire.train.sums import add_up
from quire.train.task import build_task

MEMBERS = 4


def make(head: Head) -> Bagging:
    torch.manual_seed(0)
    return Bagging(MLPEnsemble(EnsembleConfig(MEMBERS, 3, head.outputs_needed, (6,))), head).double()


def batch(head: Head, rows: int = 10) -> Batch:
    torch.manual_seed(1)
    y = (
        torch.randint(head.dim, (rows,))
        if isinstance(head, Categorical)
        else torch.randn(rows, head.dim).double()
    )
    x = torch.randn(rows, 3, dtype=torch.float64)
    counts = bootstrap_counts(rows, MEMBERS, 0).double()
    return Batch({"inputs": x, "target": y, "counts": counts}, torch.arange(rows))


HEADS = [Categorical(3), Gaussian(2), Gaussian(1, loss="nll"), Heteroscedastic(2)]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: repr(head))
def test_sums_and_weights_add_up_over_micro_batches(head: Head) -> None:
    task, whole = make(head), batch(head)
    parts = whole.split(3)
    assert add_up(task.weigh(part) for part in parts) == task.weigh(whole)
    total = sum(task.terms(part)["members"] for part in parts)
    torch.testing.assert_close(total, task.terms(whole)["members"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: repr(head))
def test_loss_by_an_explicit_loop(head: Head) -> None:
    task, rows = make(head), batch(head)
    total = torch.zeros((), dtype=torch.float64)
    for m in range(MEMBERS):
        raw = task.model.member(m)(rows.inputs)
        for n in range(len(rows)):
            loss = head.loss_each(raw[n : n + 1], rows.target[n : n + 1])[0]
            total = total + rows.fields["counts"][n, m] * loss
    torch.testing.assert_close(task.terms(rows)["members"].detach(), total.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("head", [Categorical(3), Gaussian(2)], ids=lambda head: repr(head))
def test_explicit_gradients_are_those_of_autograd(head: Head) -> None:
    task, rows = make(head), batch(head)
    if isinstance(head, Gaussian):
        head.fit_target(rows.target * 3 + 1)
    task.terms(rows)["members"].div(10).backward()
    expected = {name: p.grad.clone() for name, p in task.model.named_parameters()}
    task.zero_grad()
    explicit = task.explicit()
    assert explicit is not None
    sums = explicit.gradients(rows, {"members": 0.1})
    torch.testing.assert_close(sums["members"], task.terms(rows)["members"].detach(), rtol=1e-10, atol=0)
    for name, parameter in task.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)


def test_what_autograd_must_do() -> None:
    for head in (Categorical(3, label_smoothing=0.1), Gaussian(1, loss="nll"), Heteroscedastic(1)):
        assert make(head).explicit() is None
    rows = batch(Categorical(3))
    ignored = rows.replace(target=torch.full_like(rows.target, -100))
    explicit = make(Categorical(3)).explicit()
    assert explicit is not None
    assert explicit.gradients(ignored, {"members": 0.1}) is None


@pytest.mark.parametrize("head", HEADS, ids=lambda head: repr(head))
def test_saved_and_built_again(head: Head) -> None:
    task, rows = make(head), batch(head)
    again = build_task(task.spec()).double()
    again.load_state_dict(task.state_dict())
    for name, column in task.predict(rows.inputs, "interval").items():
        torch.testing.assert_close(again.predict(rows.inputs, "interval")[name], column)


def test_mixture_of_numbers_by_hand() -> None:
    # Two members that say 1 ± 1 and 3 ± 1 make 2 with variance 1 + 1 (noise and spread).
    task = Bagging(MLPEnsemble(EnsembleConfig(2, 1, 1, ())), Gaussian(1)).double()
    for weight, bias in zip(task.model.weights, task.model.biases, strict=True):
        torch.nn.init.zeros_(weight)
        bias.data = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    answer = task.predict(torch.zeros(1, 1, dtype=torch.float64), "interval", level=0.6826894921)
    assert answer["value"].item() == pytest.approx(2)
    assert answer["spread"].item() == pytest.approx(1)
    assert answer["high"].item() - answer["low"].item() == pytest.approx(2 * 2**0.5, rel=1e-4)


def test_moments_of_chosen_members() -> None:
    values = torch.tensor([[[1.0]], [[5.0]], [[100.0]]])
    mean, variance = moments(values, torch.tensor([[True], [True], [False]]))
    assert (mean.item(), variance.item()) == (3.0, 4.0)


def test_out_of_bag_members_judge_themselves() -> None:
    # Random labels cannot be forecast: members that learn their rows by heart still score 1/2 out of bag.
    torch.manual_seed(0)
    x, y = torch.randn(200, 10), torch.randint(2, (200,))
    task = Bagging(MLPEnsemble(EnsembleConfig(9, 10, 2, (32,))), Categorical(2))
    data = TensorData({"inputs": x, "target": y, "counts": bootstrap_counts(200, 9, 0)})
    fit(task, data, epochs=60, optim=Optim(lr=1e-2))
    assert (task.predict(x)["class"] == y).float().mean() > 0.75
    assert task.out_of_bag["accuracy"] == pytest.approx(0.5, abs=4 * (0.25 / 200) ** 0.5)
    task.finish(TensorData({"inputs": x, "target": y}), None)
    assert task.out_of_bag == {}, "nothing is out of bag without a bootstrap"


def test_messages() -> None:
    with pytest.raises(InputError, match="a bernoulli head for bagging\n  expected: a categorical"):
        make(Bernoulli(2))
