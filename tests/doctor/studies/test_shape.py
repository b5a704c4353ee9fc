"""Linear regions and equivariance of networks made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quire.doctor.studies.shape import equivariance, linear_regions, relu_chain
from quire.errors import InputError
from quire.functional import sawtooth

pytestmark = pytest.mark.slow

# Linear regions -----------------------------------------------------------------------------------


def network_of(weights: list[Tensor], biases: list[Tensor]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in zip(weights, biases, strict=True):
        layer = nn.Linear(weight.shape[1], weight.shape[0]).double()
        layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
        layers += [layer, nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers[:-2])


def test_a_sawtooth_has_its_known_regions() -> None:
    weights, biases = sawtooth(3, 2)
    rows = torch.tensor([[0.0], [1.0], [0.5]], dtype=torch.float64)
    found = linear_regions(network_of(weights, biases), rows, pairs=40)
    # (D + 1)^K = 16 pieces on [0, 1]; its middle cuts one of them into two.
    left, right, whole = sorted(set(found.lines))
    assert whole == 16
    assert left + right == 17
    assert found.units == 6


def test_lines_in_general_position_cut_a_plane() -> None:
    """Three lines through a triangle's plane make 1 + 3 + 3 pieces."""
    angles = torch.tensor([0.3, 1.4, 2.5], dtype=torch.float64)
    weight = torch.stack([angles.cos(), angles.sin()], 1)
    net = network_of(
        [weight, torch.ones(1, 3).double()],
        [torch.tensor([-0.4, -0.7, 0.1]).double(), torch.zeros(1).double()],
    )
    rows = torch.tensor([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]], dtype=torch.float64) - 3
    found = linear_regions(net, rows, pairs=3)
    assert found.plane == 7
    assert len(found.figure().axes) == 2


def test_convolutions_and_batch_norm_are_written_out() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 4),
    )
    net(torch.randn(50, 1, 4, 4))  # statistics of its own
    rows = torch.randn(6, 1, 4, 4)
    chain = relu_chain(net, rows)
    assert chain.units == 48
    torch.testing.assert_close(chain(rows), net.eval()(rows).double().detach(), atol=1e-5, rtol=1e-4)
    # Pieces of a line, by the signs of the units on many points of it.
    found = linear_regions(net, rows, pairs=1)
    start, end = torch.randperm(6, generator=torch.Generator().manual_seed(0))[:2].tolist()
    t = torch.linspace(0, 1, 20001, dtype=torch.float64)[:, None, None, None]
    line = rows[start].double() * (1 - t) + rows[end].double() * t
    signs = (net[:2].double()(line) > 0).flatten(1)
    assert found.lines[0] == 1 + int((signs[1:] != signs[:-1]).any(1).sum())


def test_what_is_no_chain_of_relus_is_refused() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.act, self.two = nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.two(self.act(self.one(x)))

    rows = torch.randn(5, 3)
    with pytest.raises(InputError, match="do not follow each other"):
        linear_regions(Residual(), rows)
    with pytest.raises(InputError, match=r"the layer 1 \(Tanh\)"):
        linear_regions(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), rows)
    with pytest.raises(InputError, match=r"linear regions of the layer norm1 \(LayerNorm\)"):
        linear_regions(nn.TransformerEncoderLayer(4, 1, batch_first=True), torch.randn(5, 3, 4))
    assert linear_regions(nn.Sequential(nn.Linear(3, 2)), rows, pairs=4).lines == [1] * 4


# Equivariance -------------------------------------------------------------------------------------


def test_circular_padding_is_what_makes_a_convolution_follow_a_shift() -> None:
    torch.manual_seed(0)
    images = torch.randn(8, 2, 9, 9)
    circular = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
    zeros = nn.Conv2d(2, 3, 3, padding=1)
    zeros.load_state_dict(circular.state_dict())
    one, other = equivariance(circular, images), equivariance(zeros, images)
    assert one.error["shift"] < 1e-6
    assert other.error["shift"] > 0.05
    assert min(one.error["flip"], one.error["rotation"]) > 0.05
    assert not one.same
    assert "follows shift; does not follow flip" in str(one)
    # Padding has changed the outermost pixels, and the shift has moved them by one.
    assert equivariance(zeros, images, margin=2).error["shift"] < 1e-6


def test_a_symmetric_filter_follows_flips_and_a_pooled_answer_stays() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    images = torch.randn(16, 1, 6, 6)
    assert equivariance(net, images).same["shift"] == 1.0
    with torch.no_grad():
        kernel = net[0].weight
        for turn in (lambda k: k.flip(-1), lambda k: k.rot90(1, (-2, -1)), lambda k: k.rot90(2, (-2, -1))):
            kernel.copy_((kernel + turn(kernel)) / 2)  # the mean over the square's symmetries
    found = equivariance(net, images)
    assert max(found.error.values()) < 1e-5
    assert set(found.same.values()) == {1.0}


def test_a_set_stays_in_any_order_and_a_sequence_does_not() -> None:
    torch.manual_seed(0)
    places = torch.randn(6, 7, 5)
    attention = nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True)
    assert max(equivariance(attention, places).error.values()) < 1e-4  # follows: outputs have places
    assert max(equivariance(lambda x: attention(x).sum(1), places).error.values()) < 1e-4
    recurrent = nn.GRU(5, 4, batch_first=True)
    assert min(equivariance(lambda x: recurrent(x)[0][:, -1], places).error.values()) > 1e-2


def test_padding_stays_where_it_is() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 0, 0], [9, 5, 4, 3, 2, 0]])
    seen: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        seen.append(x)
        return torch.stack([x.sum(1).float(), (x * torch.arange(6)).sum(1).float()], 1)

    equivariance(model, tokens, real=tokens != 0)
    _, shuffled, backwards = seen
    assert backwards.tolist() == [[8, 7, 6, 5, 0, 0], [2, 3, 4, 5, 9, 0]]
    assert torch.equal(shuffled.sort(1).values, tokens.sort(1).values)
    assert not torch.equal(shuffled, tokens)
    assert bool((shuffled[:, 5] == 0).all())


def test_rows_of_a_table_have_no_symmetries() -> None:
    with pytest.raises(InputError, match="images"):
        equivariance(nn.Identity(), torch.randn(5))
