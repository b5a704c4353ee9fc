"""Recurrent layers against torch.nn with the same weights, and each sequence against itself alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from quire.errors import InputError
from quire.functional.recurrent import detach_state, gate_singular_values, gru_cell, unroll
from quire.nn import recurrent
from quire.nn.recurrent import GRU, LSTM, RNN, Recurrent

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def least_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of any length go through Quire's own function; PyTorch's is PyTorch's to test."""
    monkeypatch.setattr(recurrent, "LEAST_STEPS", 1)


KINDS: dict[str, tuple[type[Recurrent], type[nn.RNNBase], dict[str, Any]]] = {
    "rnn": (RNN, nn.RNN, {}),
    "relu": (RNN, nn.RNN, {"nonlinearity": "relu"}),
    "lstm": (LSTM, nn.LSTM, {}),
    "gru": (GRU, nn.GRU, {}),
}
OTHER_GRUS: dict[str, dict[str, Any]] = {
    "gru, 1-z": {"keeps": "1-z"},
    "gru, before": {"reset": "before"},
    "gru, before, 1-z": {"reset": "before", "keeps": "1-z"},
}
EVERY = [*KINDS, *OTHER_GRUS]
flags = pytest.mark.parametrize(
    ("num_layers", "bidirectional", "bias", "batch_first"),
    [flag for flag in itertools.product([1, 3], [False, True], [True, False], [True, False])],
)
every = pytest.mark.parametrize("kind", EVERY)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def make(kind: str, inputs: int = 3, hidden: int = 4, layers: int = 1, **options: Any) -> Recurrent:
    """A layer with biases and weights that are not zero anywhere, so that a lost one shows."""
    layer_class, own = (GRU, OTHER_GRUS[kind]) if kind in OTHER_GRUS else (KINDS[kind][0], KINDS[kind][2])
    layer = layer_class(inputs, hidden, layers, **own, **options).double()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -0.7, 0.7)
    return layer


def states(layer: Recurrent, rows: int) -> Any:
    shape = (layer.num_layers * layer.directions, rows, layer.hidden_size)
    return (normal(*shape), normal(*shape)) if layer.parts == 2 else normal(*shape)


def parts(state: Any) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state)


def row_of(state: Any, row: int) -> Any:
    picked = tuple(part[:, row : row + 1] for part in parts(state))
    return picked[0] if len(picked) == 1 else picked


def gradients(output: Tensor, state: Any, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    pieces = [
        (p * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)).sum()
        for p in (output, *parts(state))
    ]
    return torch.autograd.grad(torch.stack(pieces).sum(), leaves)


def assert_same(found: tuple[Any, ...], wanted: tuple[Any, ...], tolerance: float = 1e-12) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# Against torch.nn -----------------------------------------------------------------------------


@flags
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_equals_torch_in_values_and_gradients(
    kind: str, num_layers: int, bidirectional: bool, bias: bool, batch_first: bool
) -> None:
    options: dict[str, Any] = {"bidirectional": bidirectional, "bias": bias, "batch_first": batch_first}
    mine = make(kind, layers=num_layers, **options)
    peer = KINDS[kind][1](3, 4, num_layers, **KINDS[kind][2], **options).double()
    peer.load_state_dict(mine.state_dict())
    mine.load_state_dict(peer.state_dict())
    assert list(mine.state_dict()) == list(peer.state_dict())
    x = (normal(2, 5, 3) if batch_first else normal(5, 2, 3)).requires_grad_()
    for state in (None, states(mine, 2)):
        (output, last), (wanted, wanted_last) = mine(x, state), peer(x, state)
        assert_same((output, *parts(last)), (wanted, *parts(wanted_last)))
        found = gradients(output, last, [x, *mine.parameters()])
        assert_same(found, gradients(wanted, wanted_last, [x, *peer.parameters()]))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_is_torchs(kind: str) -> None:
    options: dict[str, Any] = {"dropout": 0.4, "bidirectional": True}
    mine, x = make(kind, layers=3, **options), normal(2, 5, 3)
    peer = KINDS[kind][1](3, 4, 3, batch_first=True, **KINDS[kind][2], **options).double()
    peer.load_state_dict(mine.state_dict())
    found = []
    for layer in (mine, peer):
        torch.manual_seed(5)
        found.append((layer(x)[0],))
    assert_same(*found)
    assert not torch.equal(mine(x)[0], mine(x)[0])
    assert torch.equal(mine.eval()(x)[0], mine(x)[0])


def test_dropout_of_the_plain_loop_is_between_layers_alone() -> None:
    layer, x = make("gru, before", layers=2, dropout=0.5), normal(2, 5, 3)
    first = make("gru, before")
    first.load_state_dict({n: p for n, p in layer.state_dict().items() if n.endswith("l0")})
    assert torch.equal(layer(x)[1][0], first(x)[1][0])  # not before the first layer
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(layer.eval()(x)[0], layer(x)[0])
    single = make("gru, before", dropout=0.9)
    assert torch.equal(single(x)[0], single.eval()(x)[0])  # not after the last one


@pytest.mark.parametrize("kind", OTHER_GRUS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_other_grus_by_a_loop_over_cells(kind: str, bias: bool) -> None:
    layer = make(kind, layers=2, bidirectional=True, bias=bias)
    x, start = normal(2, 5, 3).requires_grad_(), states(layer, 2)

    def one(z: Tensor, place: str, index: int) -> tuple[Tensor, Tensor]:
        weights = [p for n, p in layer.named_parameters() if n.endswith(place)]
        h, outputs = start[index], []
        for t in reversed(range(5)) if place.endswith("reverse") else range(5):
            h = gru_cell(z[:, t], h, *weights, **OTHER_GRUS[kind])
            outputs.append(h)
        return torch.stack(outputs[::-1] if place.endswith("reverse") else outputs, 1), h

    z, ends = x, []
    for number in range(2):
        pieces = [one(z, f"l{number}{e}", 2 * number + i) for i, e in enumerate(("", "_reverse"))]
        z = torch.cat([output for output, _ in pieces], -1)
        ends += [end for _, end in pieces]
    output, last = layer(x, start)
    assert_same((output, last), (z, torch.stack(ends)))
    leaves = [x, *layer.parameters()]
    assert_same(gradients(output, last, leaves), gradients(z, torch.stack(ends), leaves))


# Lengths --------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("lengths", [[5, 1, 0, 3], [0, 0, 0, 0], [5, 5, 5, 5], [2, 1, 1, 2]])
def test_each_sequence_is_run_as_if_alone(kind: str, batch_first: bool, lengths: list[int]) -> None:
    layer = make(kind, layers=2, bidirectional=True, batch_first=batch_first)
    x, start = normal(4, 5, 3).requires_grad_(), states(layer, 4)
    output, last = layer(x if batch_first else x.transpose(0, 1), start, torch.tensor(lengths))
    output = output if batch_first else output.transpose(0, 1)
    alone, ends = [], []
    for row, length in enumerate(lengths):
        piece, end = x[row : row + 1, :length], row_of(start, row)
        if length:
            found, end = layer(piece if batch_first else piece.transpose(0, 1), end)
            found = found if batch_first else found.transpose(0, 1)
        else:
            found = piece.new_zeros(1, 0, 8)
        alone.append(torch.cat([found, x.new_zeros(1, 5 - length, 8)], 1))
        ends.append(parts(end))
    wanted, wanted_last = torch.cat(alone), tuple(torch.cat(e, 1) for e in zip(*ends, strict=True))
    assert_same((output, *parts(last)), (wanted, *wanted_last))
    if not any(lengths):
        assert not output.any()
        assert all(torch.equal(a, b) for a, b in zip(parts(last), parts(start), strict=True))
        return
    leaves = [x, *layer.parameters()]
    assert_same(gradients(output, last, leaves), gradients(wanted, wanted_last, leaves))


@every
def test_what_stands_in_the_padding_has_no_effect(kind: str) -> None:
    layer, lengths = make(kind, layers=2, bidirectional=True), torch.tensor([0, 2, 5])
    x = normal(3, 5, 3)
    padding = torch.arange(5)[None] >= lengths[:, None]
    found = []
    for filling in (0.0, torch.nan, torch.inf):
        inputs = x.masked_fill(padding[..., None], filling).requires_grad_()
        output, last = layer(inputs, None, lengths)
        found.append((output, *parts(last), *gradients(output, last, [inputs, *layer.parameters()])))
    for others in found[1:]:
        for a, b in zip(found[0], others, strict=True):
            assert a.isfinite().all()
            assert torch.equal(a, b)
    assert not found[0][0][padding].any()


@every
@pytest.mark.parametrize("lengths", [[0], [1], [4], None])
def test_a_batch_of_one(kind: str, lengths: list[int] | None) -> None:
    layer, x = make(kind, layers=2), normal(1, 4, 3).requires_grad_()
    output, last = layer(x, None, None if lengths is None else torch.tensor(lengths))
    assert output.shape == (1, 4, 4)
    for gradient in gradients(output, last, [x, *layer.parameters()]):
        assert gradient.isfinite().all()


@every
def test_no_steps_and_no_sequences(kind: str) -> None:
    layer = make(kind, layers=2)
    start = states(layer, 2)
    for lengths in (None, torch.zeros(2, dtype=torch.long)):
        output, last = layer(normal(2, 0, 3), start, lengths)
        assert output.shape == (2, 0, 4)
        assert all(torch.equal(a, b) for a, b in zip(parts(last), parts(start), strict=True))
    for lengths in (None, torch.zeros(0, dtype=torch.long)):
        output, last = layer(normal(0, 5, 3), None, lengths)
        assert output.shape == (0, 5, 4)
        assert parts(last)[0].shape == (2, 0, 4)


# State ----------------------------------------------------------------------------------------


@every
def test_parts_with_a_carried_state_equal_the_whole(kind: str) -> None:
    layer, x = make(kind, layers=2), normal(2, 7, 3).requires_grad_()
    whole, wanted = layer(x)
    state, pieces = None, []
    for piece in x.split([3, 1, 3], 1):
        output, state = layer(piece, state)
        pieces.append(output)
    found = torch.cat(pieces, 1)
    assert_same((found, *parts(state)), (whole, *parts(wanted)))
    leaves = [x, *layer.parameters()]
    assert_same(gradients(found, state, leaves), gradients(whole, wanted, leaves))
    # Detached, the outputs stay and the gradient ends: nothing reaches the first part.
    output, state = layer(x[:, :3])
    second, _ = layer(x[:, 3:], detach_state(state))
    assert_same((second,), (whole[:, 3:],))
    (reached,) = torch.autograd.grad(second.sum(), x)
    assert not reached[:, :3].any()
    assert reached[:, 3:].any()


def test_a_gradient_reaches_the_first_state_of_empty_sequences() -> None:
    layer, start = make("lstm"), tuple(part.requires_grad_() for part in states(make("lstm"), 2))
    _, (h, c) = layer(normal(2, 3, 3), start, torch.tensor([0, 2]))
    to_h, to_c = torch.autograd.grad(h[:, 0].sum() + 2 * c[:, 0].sum(), start)
    assert torch.equal(to_h[:, 0], torch.ones_like(to_h[:, 0]))
    assert torch.equal(to_c[:, 0], torch.full_like(to_c[:, 0], 2))
    assert not to_h[:, 1].any()


# Initial weights ------------------------------------------------------------------------------


@every
def test_recurrent_weights_start_orthogonal_and_biases_at_zero(kind: str) -> None:
    layer_class, options = (GRU, OTHER_GRUS[kind]) if kind in OTHER_GRUS else KINDS[kind][::2]
    layer = layer_class(100, 100, 2, bidirectional=True, **options)
    for name, parameter in layer.named_parameters():
        if name.startswith("weight_hh"):
            torch.testing.assert_close(gate_singular_values(parameter), torch.ones(layer.gates, 100))
        elif name.startswith("weight_ih"):
            for block in parameter.chunk(layer.gates):  # 10,000 weights: the standard error is 1.4%
                fans = 100 + parameter.shape[1]
                assert block.var().item() == pytest.approx(2 / fans, rel=0.08)
        elif kind == "lstm" and name.startswith("bias_ih"):
            assert parameter.tolist() == [0.0] * 100 + [1.0] * 100 + [0.0] * 200
        else:
            assert not parameter.any()


# Errors ---------------------------------------------------------------------------------------


def test_wrong_inputs_states_and_lengths_are_explained() -> None:
    layer = LSTM(3, 4, 2)
    with pytest.raises(InputError, match=r"(?s)inputs of shape \(5, 3\) for LSTM.*expected: \(B, T, 3\)"):
        layer(torch.zeros(5, 3))
    with pytest.raises(InputError, match=r"expected: \(T, B, 3\)"):
        LSTM(3, 4, batch_first=False)(torch.zeros(5, 2, 4))
    x, h = torch.zeros(2, 5, 3), torch.zeros(2, 2, 4)
    with pytest.raises(
        InputError, match=r"(?s)a state of shape \(2, 2, 4\).*a pair \(h, c\), each \(2, 2, 4\)"
    ):
        layer(x, h)
    with pytest.raises(InputError, match=r"\(2, 2, 4\) and \(2, 3, 4\)"):
        layer(x, (h, torch.zeros(2, 3, 4)))
    with pytest.raises(InputError, match=r"(?s)a state of shape \(1, 2, 4\).*expected: \(2, 2, 4\)"):
        GRU(3, 4, 2)(x, h[:1])
    for kind in ("lstm", "gru, before"):
        for wrong in (-1, 6):
            with pytest.raises(InputError, match=rf"(?s)a length of {wrong}\n.*0 to 5.*without its padding"):
                make(kind)(x.double(), None, torch.tensor([2, wrong]))
        with pytest.raises(InputError, match="one integer for each of the 2 sequences"):
            make(kind)(x.double(), None, torch.tensor([2]))


def test_wrong_options_are_explained() -> None:
    with pytest.raises(InputError, match=r"(?s)hidden_size is 0.*at least 1"):
        GRU(3, 0)
    with pytest.raises(InputError, match="unknown nonlinearity 'gelu'"):
        RNN(3, 4, nonlinearity="gelu")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown place of the reset gate 'middle'"):
        GRU(3, 4, reset="middle")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="drop rate"):
        RNN(3, 4, dropout=1.5)


# Use ------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@every
def test_a_parametrised_weight_takes_part(kind: str) -> None:
    layer, x = make(kind), normal(2, 5, 3)
    other = make(kind)
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        other.weight_hh_l0.mul_(2)
    parametrize.register_parametrization(layer, "weight_hh_l0", Doubled())
    assert_same(layer(x)[:1], other(x)[:1])


class Outputs(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        output, state = self.layer(x, None, lengths)
        return torch.cat([output.flatten(1), *(part.transpose(0, 1).flatten(1) for part in parts(state))], 1)


@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru, 1-z", "gru, before"])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_a_layer_can_be_exported_with_any_number_of_rows(kind: str, with_lengths: bool) -> None:
    module = Outputs(make(kind, layers=2, bidirectional=True)).eval()
    rows = torch.export.Dim("rows")
    sample = (normal(3, 4, 3), *([torch.tensor([4, 0, 2])] if with_lengths else []))
    program = torch.export.export(module, sample, dynamic_shapes=tuple({0: rows} for _ in sample))
    other = (normal(5, 4, 3), *([torch.tensor([1, 4, 4, 0, 3])] if with_lengths else []))
    torch.testing.assert_close(program.module()(*other), module(*other), rtol=1e-12, atol=1e-12)


def test_the_compiler_leaves_the_kernel_alone() -> None:
    layer, x = make("lstm", layers=2, bidirectional=True), normal(3, 4, 3).requires_grad_()
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(layer, backend=backend)
    for lengths in (None, torch.tensor([1, 0, 4])):
        (output, last), (wanted, wanted_last) = compiled(x, None, lengths), layer(x, None, lengths)
        assert_same((output, *parts(last)), (wanted, *parts(wanted_last)))
        leaves = [x, *layer.parameters()]
        assert_same(gradients(output, last, leaves), gradients(wanted, wanted_last, leaves))
    assert not any("lstm" in graph for graph in graphs)  # where it would be unrolled, step by step


@every
@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 0, 6])])
def test_half_precision_and_autocast_are_close(kind: str, lengths: Tensor | None) -> None:
    layer, x = make(kind, layers=2).float(), torch.randn(3, 6, 3)
    wanted, _ = layer(x, None, lengths)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = layer(x, None, lengths)
    torch.testing.assert_close(found.float(), wanted, rtol=0.1, atol=0.05)
    if "before" not in kind:  # kernels compute in the weights' type
        assert torch.equal(found, wanted)
    output, _ = layer.bfloat16()(x.bfloat16(), None, lengths)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), wanted, rtol=0.1, atol=0.05)


def test_the_layer_tells_what_it_is() -> None:
    layer = GRU(3, 4, 2, dropout=0.1, batch_first=False, reset="before")
    assert repr(layer) == "GRU(3, 4, num_layers=2, dropout=0.1, batch_first=False, reset=before, keeps=z)"
    assert repr(LSTM(3, 4, bidirectional=True)) == "LSTM(3, 4, bidirectional=True)"


@every
@pytest.mark.gpu
def test_the_gpu_gives_the_same(kind: str) -> None:
    layer, x = make(kind, layers=2, bidirectional=True), normal(4, 5, 3)
    start = states(layer, 4)
    on_gpu = make(kind, layers=2, bidirectional=True).cuda()
    on_gpu.load_state_dict(layer.state_dict())
    moved: Any = tuple(part.cuda() for part in parts(start))
    for lengths in (None, torch.tensor([5, 0, 1, 3])):
        mine, theirs = x.clone().requires_grad_(), x.cuda().requires_grad_()
        output, last = layer(mine, start, lengths)
        for place in ("cpu", "cuda") if lengths is not None else ("cpu",):
            found, found_last = on_gpu(
                theirs, moved if len(moved) == 2 else moved[0], None if lengths is None else lengths.to(place)
            )
            assert_same(tuple(p.cpu() for p in (found, *parts(found_last))), (output, *parts(last)), 1e-9)
            grads = gradients(found, found_last, [theirs, *on_gpu.parameters()])
            wanted = gradients(output, last, [mine, *layer.parameters()])
            assert_same(tuple(g.cpu() for g in grads), wanted, 1e-8)
            output, last = layer(mine, start, lengths)


def test_the_plain_loop_is_the_kernel() -> None:
    """The loop that exported programs use, for each kind that has a kernel."""
    for kind in KINDS:
        layer, x = make(kind), normal(3, 6, 3)
        names = [f"{n}_l0" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        weight_ih, weight_hh, bias_ih, bias_hh = [layer.get_parameter(n) for n in names]
        start = tuple(normal(3, 4) for _ in range(layer.parts))
        a = nn.functional.linear(x, weight_ih, bias_ih)
        step: Any = layer._step(weight_hh, bias_hh)
        output, last = unroll(step, a, start if layer.parts == 2 else start[0])
        wanted, wanted_last = layer(x, tuple(p[None] for p in start) if layer.parts == 2 else start[0][None])
        assert_same((output, *parts(last)), (wanted, *(p[0] for p in parts(wanted_last))))
