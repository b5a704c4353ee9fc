"""Steps of small groups in one call, against PyTorch's optimisers; and that nothing moves that should not."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from quire.data.batch import Batch
from quire.functional import moves
from quire.functional.moves import Move
from quire.kernels import host
from quire.models.mlp import MLP, MLPConfig
from quire.nn.heads import Categorical
from quire.options import Optim, Train
from quire.tasks.supervised import Supervised
from quire.train.groups import make_groups
from quire.train.optimisers import Optimiser, make_optimiser
from quire.train.step import Stepper
from tests.kernels.widths import WIDTHS, limited

WAYS = {
    "adam": Optim(name="adam", lr=0.01, weight_decay=0.0),
    "adamw": Optim(name="adam", lr=0.01, weight_decay=0.1, decay="decoupled"),
    "adam with a penalty": Optim(name="adam", lr=0.01, weight_decay=0.1, decay="l2", beta1=0.8, beta2=0.95),
    "sgd": Optim(name="sgd", lr=0.1, momentum=0.0, weight_decay=0.0),
    "momentum": Optim(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.1, decay="l2"),
    "momentum that shrinks": Optim(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.1, decay="decoupled"),
}
SIZES = {"long": (5000, 3), "odd": (37,), "short": (2,), "one": (1,)}


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in SIZES.items()}


@pytest.fixture(params=["one thread", "several"], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many move even a few numbers."""
    if request.param == "one thread":
        yield 1
        return
    with limited("plain"):
        if not host.library().quire_has_threads():  # type: ignore[union-attr]
            pytest.skip("PyTorch's threads are not GNU's")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(moves, "FEW", 0)
    yield 3
    torch.set_num_threads(before)


def prepared(options: Optim, threads: int) -> tuple[dict[str, nn.Parameter], Optimiser, Move]:
    given = parameters()
    factors = dict.fromkeys(SIZES, 1.0) | {"short": 0.5}
    optimiser = make_optimiser(make_groups(given, undecayed=["odd"], step_factors=factors), options)
    move = optimiser.at_once(threads=threads)
    assert move is not None
    assert len(optimiser.groups) == 3
    return given, optimiser, move


def oracle(options: Optim, given: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Of torch.optim, a group of options for each parameter."""
    groups = []
    for name, parameter in given.items():
        decay = 0.0 if name == "odd" else options.weight_decay
        groups.append({"params": [parameter], "lr": options.lr * (0.5 if name == "short" else 1)})
        groups[-1]["weight_decay"] = decay
    if options.name == "adam":
        kind = torch.optim.AdamW if options.decay == "decoupled" else torch.optim.Adam
        return kind(groups, betas=(options.beta1, options.beta2), eps=options.eps)
    return torch.optim.SGD(groups, momentum=options.momentum)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_torch(way: str, width: str, threads: int) -> None:
    options = WAYS[way]
    with limited(width):
        given, optimiser, move = prepared(options, threads)
        theirs = parameters()
        peer = oracle(options, theirs)
        shrinks = options.name == "sgd" and options.decay == "decoupled"
        for step in range(7):
            squares = 0.0
            for mine, other in zip(given.values(), theirs.values(), strict=True):
                other.grad = torch.randn(other.shape) * (1 + step)
                assert mine.grad is not None
                mine.grad.copy_(other.grad)
                squares += float(other.grad.double().square().sum())
            for group in peer.param_groups if shrinks else ():  # where torch.optim has a penalty only
                decay = group.setdefault("shrinks", group["weight_decay"])
                group["weight_decay"] = 0.0
                group["params"][0].data.mul_(1 - group["lr"] * decay)
            peer.step()
            assert move(options.lr, 1.5) == pytest.approx(math.sqrt(squares), rel=1e-6)
        for name in SIZES:
            torch.testing.assert_close(given[name], theirs[name], rtol=2e-6, atol=2e-6)
        assert [count.item() for count in optimiser.counts()] == [7] * 3


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("way", ["adamw", "momentum"])
def test_steps_are_those_of_the_optimiser_itself(way: str, width: str, threads: int) -> None:
    """One that goes on from the other's state cannot tell."""
    with limited(width):
        (given, one, move), (theirs, other, _) = prepared(WAYS[way], threads), prepared(WAYS[way], threads)
        for step in range(6):
            for mine, their in zip(given.values(), theirs.values(), strict=True):
                assert mine.grad is not None
                assert their.grad is not None
                mine.grad.copy_(torch.randn(mine.shape))
                their.grad.copy_(mine.grad)
            one.step(0.01) if step % 2 else move(0.01, 0.0)
            other.step(0.01)
        for name, value in one.state().items():
            torch.testing.assert_close(value, other.state()[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dict(given), dict(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_a_gradient_that_is_not_finite_moves_nothing(
    value: float, name: str, width: str, threads: int
) -> None:
    with limited(width):
        given, optimiser, move = prepared(WAYS["adamw"], threads)
        before = {n: p.detach().clone() for n, p in given.items()}
        state = {n: s.clone() for n, s in optimiser.state().items()}
        assert given[name].grad is not None
        given[name].grad.flatten()[-1:].fill_(value)
        assert not move(0.1, 0.0) < math.inf
        torch.testing.assert_close(dict(given), before, rtol=0, atol=0)
        torch.testing.assert_close(optimiser.state(), state, rtol=0, atol=0)


@pytest.mark.parametrize("what", ["values", "gradients"])
def test_memory_that_goes_away_under_parameters_is_left_alone(what: str, threads: int) -> None:
    """Sharing it with other processes moves it, and frees what it was."""
    with limited("plain"):
        (given, _, move), (theirs, _, same) = (
            prepared(WAYS["adamw"], threads),
            prepared(WAYS["adamw"], threads),
        )
        for step in range(4):
            for mine, their in zip(given.values(), theirs.values(), strict=True):
                assert mine.grad is not None
                assert their.grad is not None
                if step == 2:
                    (mine.data if what == "values" else mine.grad).share_memory_()
                mine.grad.copy_(torch.randn(mine.shape))
                their.grad.copy_(mine.grad)
            others = [torch.full((15_000,), 7.0) for _ in range(9)]
            move(0.01, 0.0)
            same(0.01, 0.0)
            assert all(bool((other == 7).all()) for other in others)
        torch.testing.assert_close(dict(given), dict(theirs), rtol=0, atol=0)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_moves_nothing(loss: float, threads: int) -> None:
    with limited("plain"):
        given, _, move = prepared(WAYS["sgd"], threads)
        for parameter in given.values():
            assert parameter.grad is not None
            parameter.grad.fill_(1.0)
        before = {n: p.detach().clone() for n, p in given.items()}
        assert not move(0.1, loss) < math.inf
        torch.testing.assert_close(dict(given), before, rtol=0, atol=0)


def stepper(**options: float) -> tuple[Stepper, Batch]:
    torch.manual_seed(0)
    task = Supervised(MLP(MLPConfig(5, 3, hidden=(4,))), Categorical(3))
    inputs, target = torch.randn(8, 5), torch.randint(3, (8,))
    batch = Batch({"inputs": inputs, "target": target}, torch.arange(8))
    return Stepper(task, Optim(**options), Train(), torch.device("cpu"), 10), batch  # type: ignore[arg-type]


def weights(found: Stepper) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in found.task.parameters()]


def test_the_trainer_takes_them_where_nothing_comes_between() -> None:
    with limited("plain"):
        assert stepper()[0].players[0].move is not None
        assert stepper(clip_norm=1.0)[0].players[0].move is None


def test_a_gradient_whose_squares_overflow_is_moved_along_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with limited("plain"):
        (mine, batch), (theirs, _) = stepper(), stepper()
        theirs.players[0].move = None
        move = mine.players[0].move
        assert move is not None
        asked = []
        monkeypatch.setattr(mine.players[0], "move", lambda *given: asked.append(given) or math.inf)
        for number in range(3):
            mine.step(batch, number)
            theirs.step(batch, number)
            assert mine.last_norm() == theirs.last_norm()
        assert len(asked) == 3
        torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=0)


def test_many_numbers_are_left_to_pytorch_where_its_threads_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with limited("plain"):
        library = host.library()
        assert library is not None
        optimiser = stepper()[0].players[0].optimiser
        monkeypatch.setattr(library, "quire_has_threads", lambda: 0)
        monkeypatch.setattr(moves, "FEW", 10_000)
        assert optimiser.at_once(threads=2) is not None  # which one thread takes
        monkeypatch.setattr(moves, "FEW", 20)
        assert optimiser.at_once() is not None
        assert optimiser.at_once(threads=2) is None


def test_what_is_not_checked_moves_whatever_comes(threads: int) -> None:
    with limited("plain"):
        found = stepper(name="sgd", lr=0.5)[0]
        (player,) = found.players
        before, move = weights(found), player.optimiser.at_once(threads=threads, checked=False)
        assert move is not None
        player.groups[0].grad.fill_(1.0)[0] = math.nan
        assert move(0.5, 0.0) == 0.0
        after = [value for parameter in weights(found) for value in parameter.flatten().tolist()]
        assert sum(map(math.isnan, after)) == 1
        assert after[1] == pytest.approx(before[0].flatten()[1].item() - 0.5)
