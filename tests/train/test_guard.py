"""NaN in the data, the loss or a gradient: the step is not applied, and the message says where."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from quire.data.batch import TensorData
from quire.errors import NonFiniteError
from quire.nn.heads import Categorical, Gaussian
from quire.options import Optim, Train
from quire.tasks.supervised import Supervised
from quire.train import fit
from quire.train.descent import Callback, Descent
from quire.train.guard import quick_norm
from quire.train.player import Player
from tests.train.examples import classes, classifier, numbers, regressor

PLAIN = Train(batch_size=20, shuffle=False)


def with_value(data: TensorData, field: str, row: int, value: float) -> TensorData:
    fields = {name: tensor.clone() for name, tensor in data.fields.items()}
    fields[field][row] = value
    return TensorData(fields)


def state(task: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in task.state_dict().items()}


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_input_is_named_by_row_and_the_step_is_not_applied(value: float, explicit: bool) -> None:
    task, expected = classifier(), classifier()
    if not explicit:
        task.explicit = expected.explicit = lambda: None
    data = with_value(classes(), "inputs", 45, value)
    fit(expected, TensorData({k: v[:40] for k, v in data.fields.items()}), steps=2, train=PLAIN)
    with pytest.raises(NonFiniteError) as caught:
        fit(task, data, epochs=1, train=PLAIN)
    message = str(caught.value)
    assert "step 2:" in message
    assert "non-finite values in 'inputs'" in message
    assert "rows 45 of the training data" in message
    assert "not applied" in message
    assert caught.value.rows == [45]
    for name, value_after in state(task).items():
        torch.testing.assert_close(value_after, state(expected)[name], rtol=0, atol=0)


def test_a_bad_target_is_named() -> None:
    with pytest.raises(NonFiniteError, match=r"non-finite values in 'target'.*rows 3 of"):
        fit(regressor(), with_value(numbers(), "target", 3, float("nan")), epochs=1, train=PLAIN)


class Reciprocal(nn.Module):
    """A finite input that makes an infinite output: 1/x at 0."""

    def forward(self, x: Tensor) -> Tensor:
        return 1 / x


class RootOfAbsolute(nn.Module):
    """Finite at 0, with an infinite gradient there."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


def test_a_loss_that_overflows_is_traced_to_layer_and_row() -> None:
    model = nn.Sequential(Reciprocal(), nn.Linear(5, 1))
    data = with_value(numbers(), "inputs", 7, 0.0)
    with pytest.raises(NonFiniteError) as caught:
        fit(Supervised(model, Gaussian(1)), data, epochs=1, train=PLAIN)
    message = str(caught.value)
    assert "first layer with a non-finite output is 'model.0'" in message
    assert "loss term 'target' is not finite" in message
    assert caught.value.rows == [7]


def test_a_gradient_that_is_not_finite_is_named_with_its_tensor() -> None:
    class First(nn.Linear):
        """Gives exactly 0 for row 7, whose inputs are 0."""

    model = nn.Sequential(First(5, 4, bias=False), RootOfAbsolute(), nn.Linear(4, 3))
    fields = {name: tensor.clone() for name, tensor in classes().fields.items()}
    fields["inputs"][7] = 0.0
    with pytest.raises(NonFiniteError) as caught:
        fit(Supervised(model, Categorical(3)), TensorData(fields), epochs=1, train=PLAIN)
    assert "the gradient of 'model.0.weight' is not finite" in str(caught.value)
    assert caught.value.rows == [7]


def test_a_step_size_that_explodes_is_stopped_before_the_weights_are_lost() -> None:
    task = regressor(hidden=(8,))
    with pytest.raises(NonFiniteError, match=r"(?s)fix: lower --optim.lr or set --optim.clip-norm"):
        fit(task, numbers(), epochs=200, optim=Optim("sgd", lr=1e4), train=PLAIN)
    assert all(torch.isfinite(value).all() for value in task.state_dict().values())


def moving(dtype: torch.dtype) -> Player:
    """A player with two groups, of weights and of biases that do not decay."""
    options = Optim(weight_decay=0.1, decay_biases=False)
    player = Player(classifier().to(dtype), "model", options, steps_per_epoch=1)
    assert len(player.groups) == 2
    return player


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_quick_norm_is_the_norm_and_any_value_that_is_not_finite_spoils_it(dtype: torch.dtype) -> None:
    player = moving(dtype)
    generator = torch.Generator().manual_seed(0)
    for group in player.groups:
        # Squares that no sum in half precision can hold.
        group.grad.copy_(100 * torch.randn(group.grad.shape, generator=generator))
    exact = torch.cat([group.grad.double() for group in player.groups]).norm().item()
    assert quick_norm(player) == pytest.approx(exact, rel=10 * torch.finfo(dtype).eps)
    for group in player.groups:
        for place in (0, len(group.grad) // 2, -1):
            for value in (math.nan, math.inf, -math.inf):
                before = group.grad[place].item()
                group.grad[place] = value
                assert not math.isfinite(quick_norm(player))
                group.grad[place] = before


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_whose_norm_overflows_is_told_from_one_that_is_not_finite(clip: float | None) -> None:
    """1e25, though both the loss and the gradient are finite: its square is not."""

    class Steep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1e25 * (x - x.detach())

    task = Supervised(nn.Sequential(nn.Linear(5, 3), Steep()), Categorical(3))
    before = state(task)
    with pytest.raises(NonFiniteError, match=r"step 0: the norm of the gradient overflowed"):
        fit(task, classes(), epochs=1, optim=Optim(clip_norm=clip), train=PLAIN)
    assert all(torch.equal(value, before[name]) for name, value in state(task).items())


class AsOnDevice(Callback):
    """Steps are taken as on a GPU, where nothing waits for a step's numbers."""

    def on_start(self, descent: Descent) -> None:
        self.stepper = descent.stepper
        self.stepper.on_host, self.stepper.skip, self.stepper.one = False, torch.zeros(()), torch.ones(())
        self.kept = 0

    def on_step(self, descent: Descent, step: int) -> None:
        self.kept = max(self.kept, len(self.stepper.suspects))
        self.last = step


@pytest.mark.parametrize("bad", [0, 15, 16, 17, 40, 79])
def test_a_bad_step_is_found_later_and_nothing_after_it_was_applied(bad: int) -> None:
    """Steps of one row, eighty in all; a flag that is looked at every sixteen steps, as it was then."""
    train, data = Train(batch_size=1, shuffle=False), classes(80)
    task, expected, device = classifier(), classifier(), AsOnDevice()
    if bad:
        fit(expected, TensorData({k: v[:bad] for k, v in data.fields.items()}), epochs=1, train=train)
    with pytest.raises(NonFiniteError, match=rf"step {bad}:.*rows {bad} of"):
        fit(task, with_value(data, "inputs", bad, float("nan")), epochs=1, train=train, callbacks=[device])
    for name, value in state(task).items():
        torch.testing.assert_close(value, state(expected)[name])
    look = device.stepper.LOOK_EVERY
    assert device.last <= bad + 2 * look + 1
    assert device.kept <= 2 * look


@pytest.mark.gpu
def test_on_a_gpu_the_first_bad_step_is_found_and_nothing_after_it_was_applied() -> None:
    data = with_value(classes(), "inputs", 45, float("nan"))
    task, expected = classifier(), classifier()
    fit(
        expected, TensorData({k: v[:40] for k, v in data.fields.items()}), steps=2, train=PLAIN, device="cuda"
    )
    with pytest.raises(NonFiniteError, match=r"step 2:.*rows 45 of"):
        fit(task, data, epochs=3, train=PLAIN, device="cuda")
    for name, value in state(task).items():
        torch.testing.assert_close(value, state(expected)[name], rtol=0, atol=0)
