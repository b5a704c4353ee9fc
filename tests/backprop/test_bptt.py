from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quire.backprop import Elman, bptt, state_gradient
from quire.errors import InputError


def cell(hidden: int = 4, inputs: int = 3, activation: str = "tanh") -> Elman:
    shapes = ((hidden, inputs), (hidden, hidden), (hidden,))
    return Elman(*(torch.randn(*shape, dtype=torch.float64) / 2 for shape in shapes), activation)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def states(net: Elman, x: Tensor, h0: Tensor | None, detach_before: int = 0) -> list[Tensor]:
    """The recurrence written out; the state before step `detach_before` is cut off from the past."""
    h = torch.zeros(len(net.bias), dtype=x.dtype) if h0 is None else h0
    result = []
    for t, step in enumerate(x):
        h = h.detach() if t == detach_before else h
        h = torch.tanh(net.w_input @ step + net.w_hidden @ h + net.bias)
        result.append(h)
    return result


def test_states_equal_those_of_torch() -> None:
    net = cell()
    rnn = nn.RNN(3, 4).double()
    with torch.no_grad():
        rnn.weight_ih_l0.copy_(net.w_input)
        rnn.weight_hh_l0.copy_(net.w_hidden)
        rnn.bias_ih_l0.copy_(net.bias)
        rnn.bias_hh_l0.zero_()
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    close(net.run(x).states[1:], rnn(x)[0].detach())


def test_a_case_solved_by_hand() -> None:
    """Linear, h0 = 1, w_h = 2, w_x = 0, b = 0: h_t = w^t, so dh_3/dw = 3w² = 12, one step of it 4."""
    net = Elman(torch.zeros(1, 1), torch.tensor([[2.0]]), torch.zeros(1), "linear")
    x, h0 = torch.zeros(3, 1), torch.ones(1)
    assert [state_gradient(net, x, h0, steps=n).w_hidden.item() for n in (1, 2, 3, None)] == [4, 8, 12, 12]


@pytest.mark.parametrize("steps", [1, 2, 4, 5, 9, None])
def test_state_gradient_equals_autograd(steps: int | None) -> None:
    net, x = cell(), torch.randn(5, 3, dtype=torch.float64)
    h0 = torch.randn(4, dtype=torch.float64)
    cut = 0 if steps is None else max(0, len(x) - steps)

    def last(w_input: Tensor, w_hidden: Tensor, bias: Tensor) -> Tensor:
        return states(Elman(w_input, w_hidden, bias), x, h0, cut)[-1]

    expected = torch.autograd.functional.jacobian(last, (net.w_input, net.w_hidden, net.bias))
    for actual, wanted in zip(state_gradient(net, x, h0, steps=steps), expected, strict=True):
        close(actual, wanted)


@pytest.mark.parametrize("steps", [1, 3, 6, None])
def test_bptt_equals_autograd_with_each_state_cut_off(steps: int | None) -> None:
    net, x = cell(), torch.randn(6, 3, dtype=torch.float64)
    errors = torch.randn(6, 4, dtype=torch.float64)
    parameters = [part.requires_grad_() for part in (net.w_input, net.w_hidden, net.bias)]
    cost = torch.zeros((), dtype=torch.float64)
    for t in range(len(x)):
        cut = 0 if steps is None else max(0, t + 1 - steps)
        cost = cost + (errors[t] * states(net, x[: t + 1], None, cut)[t]).sum()
    expected = torch.autograd.grad(cost, parameters)
    with torch.no_grad():
        for actual, wanted in zip(bptt(net, x, errors, steps=steps), expected, strict=True):
            close(actual, wanted)


def test_a_batch_adds_up() -> None:
    net, x = cell(), torch.randn(5, 3, 3, dtype=torch.float64)
    errors, h0 = torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    together = bptt(net, x, errors, h0, steps=2)
    alone = [bptt(net, x[:, i], errors[:, i], h0[i], steps=2) for i in range(3)]
    for actual, parts in zip(together, zip(*alone, strict=True), strict=True):
        close(actual, torch.stack(parts).sum(0))


def test_errors_say_what_to_do() -> None:
    net, x = cell(), torch.randn(5, 3, dtype=torch.float64)
    with pytest.raises(InputError, match="truncation to 0 steps"):
        state_gradient(net, x, steps=0)
    with pytest.raises(InputError, match=r"∂C/∂h of shape \(5, 3\)(.|\n)*\(5, 4\)"):
        bptt(net, x, x)
    with pytest.raises(InputError, match=r"\(4, 3\), \(3, 3\), \(4,\)"):
        Elman(net.w_input, torch.zeros(3, 3), net.bias)
    with pytest.raises(InputError, match="'softmax' in a recurrent net"):
        cell(activation="softmax")
