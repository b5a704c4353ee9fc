"""Chapter 13: recurrent networks.

B sequences, T steps, D inputs, H hidden units, V words.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.backprop import Elman, bptt
from quire.functional.initialise import orthogonal_
from quire.functional.losses import perplexity
from quire.functional.recurrent import (
    detach_state,
    elman_cell,
    gate_singular_values,
    gru_cell,
    lstm_cell,
    orthogonal_gates_,
    unroll,
)
from quire.models.recurrent import Kind, RecurrentLM, RecurrentLMConfig
from quire.nn.recurrent import GRU, LSTM, RNN
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]

TOLERANCE = 1e-11
ROWS, STEPS, INPUTS, HIDDEN = 3, 5, 3, 4


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _parts(state: Any) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state)


def _joined(parts: Any) -> Any:
    return parts[0] if len(parts) == 1 else tuple(parts)


def _gaps(found: Any, expected: Any) -> float:
    return worst(*[gap(a, b) for a, b in zip(_parts(found), _parts(expected), strict=True)])


def _gradients(outputs: Any, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Of Σ cos(k)·output_k, which weighs each number otherwise."""
    flat = torch.cat([part.flatten() for part in _parts(outputs)])
    weights = torch.arange(len(flat), dtype=flat.dtype).cos()
    return torch.autograd.grad(weights @ flat, leaves, retain_graph=True)


def _against_torch(layer_class: Code, cell: Code, peer_class: Code, peer_cell: Code, **options: Any) -> float:
    """Layer, cell and loop over the cell against torch.nn, with the same weights: values and gradients."""
    peer = peer_class(INPUTS, HIDDEN, batch_first=True, **options).double()
    layer = layer_class(INPUTS, HIDDEN, **options).double()
    layer.load_state_dict(peer.state_dict())
    single = peer_cell(INPUTS, HIDDEN, **options).double()
    single.load_state_dict({name.removesuffix("_l0"): value for name, value in peer.state_dict().items()})
    count = 2 if peer_class is nn.LSTM else 1
    x, start = _normal(ROWS, STEPS, INPUTS).requires_grad_(), [_normal(ROWS, HIDDEN) for _ in range(count)]
    weights, mine = list(peer.parameters()), list(layer.parameters())

    def apply(x: Tensor, state: Any, with_weights: list[Tensor] = weights) -> Any:
        return cell(x, state, *with_weights, **options)

    wanted, wanted_last = peer(x, _joined([part[None] for part in start]))
    output, last = layer(x, _joined([part[None] for part in start]))
    looped, looped_last = unroll(apply, x, _joined(start))
    wanted_gradients = _gradients((wanted, *_parts(wanted_last)), [x, *weights])
    return worst(
        _gaps(apply(x[:, 0], _joined(start)), single(x[:, 0], _joined(start))),
        _gaps((output, *_parts(last)), (wanted, *_parts(wanted_last))),
        _gaps((looped, *_parts(looped_last)), (wanted, *(part[0] for part in _parts(wanted_last)))),
        _gaps(_gradients((output, *_parts(last)), [x, *mine]), wanted_gradients),
        _gaps(_gradients((looped, *_parts(looped_last)), [x, *weights]), wanted_gradients),
    )


# Wrong versions -------------------------------------------------------------------------------


def _changed(make: Code, change: Code) -> Code:
    """A layer or model with something done to what goes in or comes out."""

    def changed(*arguments: Any, **options: Any) -> Any:
        module = make(*arguments, **options)
        plain = module.forward
        module.forward = lambda x, state=None, lengths=None: change(plain, x, state, lengths)
        return module

    return changed


def _forgets(layer: Code, x: Tensor, state: Any, lengths: Tensor | None) -> Any:
    """Starts from zero, whatever state it is given."""
    return layer(x, None, lengths)


def _runs_over(layer: Code, x: Tensor, state: Any, lengths: Tensor | None) -> Any:
    """Reads the padding as if it were part of the sequence, and only hides its outputs."""
    output, last = layer(x, state)
    if lengths is not None:
        output = output * (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1)
    return output, last


def _backwards_unturned(layer: Code, x: Tensor, state: Any, lengths: Tensor | None) -> Any:
    """Gives the outputs of the backward direction in the order in which they were computed."""
    output, last = layer(x, state, lengths)
    forward, backward = output.chunk(2, -1)
    return torch.cat((forward, backward.flip(1)), -1), last


def _lstm_reordered(x: Tensor, state: Any, *weights: Tensor) -> Any:
    """Gates in the order i, f, o, g."""
    exchanged = [torch.cat([w.chunk(4)[k] for k in (0, 1, 3, 2)]) for w in weights]
    return lstm_cell(x, state, *exchanged)


# Cells ----------------------------------------------------------------------------------------


@entry(
    "recurrent/elman",
    "Elman's recurrent net",
    r"h_t = \sigma(W_{ih} x_t + b_{ih} + W_{hh} h_{t-1} + b_{hh}), \quad \sigma \in \{\tanh, \mathrm{relu}\}",
    code=(RNN, elman_cell),
    wrong=(
        _changed(RNN, _forgets),
        lambda x, h, w_ih, w_hh, b_ih, b_hh, **options: elman_cell(
            x, h, w_ih, w_hh.t(), b_ih, b_hh, **options
        ),
    ),
    tolerance=TOLERANCE,
)
def _(layer: Code, cell: Code) -> float:
    errors = [
        _against_torch(layer, cell, nn.RNN, nn.RNNCell, nonlinearity=nonlinearity)
        for nonlinearity in ("tanh", "relu")
    ]
    # By hand: h₁ = tanh(2·1 + 1) and h₂ = tanh(2·0 − 3h₁ + 1).
    h = torch.zeros(1, 1, dtype=torch.float64)
    for x in (1.0, 0.0):
        weights = [torch.tensor([[value]]).double() for value in (2.0, -3.0)]
        h = cell(torch.tensor([[x]]).double(), h, *weights, torch.ones(1).double(), torch.zeros(1).double())
    first = torch.tensor(3.0).double().tanh()
    return worst(*errors, gap(h, torch.tanh(1 - 3 * first).reshape(1, 1)))


@entry(
    "recurrent/lstm",
    "Long short-term memory",
    r"\begin{aligned} (i, f, g, o) &= W_{ih} x_t + b_{ih} + W_{hh} h_{t-1} + b_{hh} \\ "
    r"c_t &= \sigma(f) \odot c_{t-1} + \sigma(i) \odot \tanh(g), \quad "
    r"h_t = \sigma(o) \odot \tanh(c_t) \end{aligned}",
    code=(LSTM, lstm_cell),
    wrong=(_changed(LSTM, _forgets), _lstm_reordered),
    tolerance=TOLERANCE,
)
def _(layer: Code, cell: Code) -> float:
    # With the forget gate open and the input gate shut the cell is kept for ever.
    closed = torch.tensor([-1e3, 1e3, 0.0, 0.0]).double().repeat_interleave(HIDDEN)
    state = (_normal(ROWS, HIDDEN), _normal(ROWS, HIDDEN))
    weights = [
        _normal(4 * HIDDEN, INPUTS),
        _normal(4 * HIDDEN, HIDDEN),
        closed,
        torch.zeros(4 * HIDDEN).double(),
    ]
    _, (_, kept) = unroll(lambda x, s: cell(x, s, *weights), _normal(ROWS, STEPS, INPUTS), state)
    return worst(_against_torch(layer, cell, nn.LSTM, nn.LSTMCell), gap(kept, state[1]))


@entry(
    "recurrent/gru",
    "Gated recurrent unit",
    r"\begin{aligned} r, z &= \sigma(W_i x_t + b_i + W_h h_{t-1} + b_h), \quad "
    r"n = \tanh(W_{in} x_t + b_{in} + r \odot (W_{hn} h_{t-1} + b_{hn})) \\ "
    r"h_t &= (1 - z) \odot n + z \odot h_{t-1} \end{aligned}",
    code=(GRU, gru_cell),
    wrong=(
        lambda *sizes, **options: GRU(*sizes, keeps="1-z", **options),
        lambda *tensors: gru_cell(*tensors, reset="before"),
    ),
    tolerance=TOLERANCE,
)
def _(layer: Code, cell: Code) -> float:
    return _against_torch(layer, cell, nn.GRU, nn.GRUCell)


def _written_out(x: Tensor, h: Tensor, w: list[Tensor], reset: str, keeps: str) -> Tensor:
    """The GRU with a matrix for each gate."""
    (wr, wz, wn), (ur, uz, un), (br, bz, bn), (cr, cz, cn) = (part.chunk(3) for part in w)
    r = 1 / (1 + torch.exp(-(x @ wr.T + br + h @ ur.T + cr)))
    z = 1 / (1 + torch.exp(-(x @ wz.T + bz + h @ uz.T + cz)))
    inner = r * (h @ un.T + cn) if reset == "after" else (r * h) @ un.T + cn
    n = torch.tanh(x @ wn.T + bn + inner)
    return (1 - z) * n + z * h if keeps == "z" else z * n + (1 - z) * h


@entry(
    "recurrent/gru-conventions",
    "Conventions of the GRU",
    r"\begin{aligned} \text{after: } n &= \tanh(W_{in} x + b_{in} + r \odot (W_{hn} h + b_{hn})) & "
    r"\text{before: } n &= \tanh(W_{in} x + b_{in} + W_{hn} (r \odot h) + b_{hn}) \\ "
    r"z \text{ keeps: } h' &= (1 - z) \odot n + z \odot h & "
    r"1 - z \text{ keeps: } h' &= z \odot n + (1 - z) \odot h \end{aligned}",
    code=(gru_cell, GRU),
    wrong=(
        lambda *tensors, reset="after", keeps="z": gru_cell(*tensors, keeps=keeps),
        lambda *sizes, reset="after", keeps="z", **options: GRU(*sizes, reset=reset, **options),
    ),
    tolerance=TOLERANCE,
)
def _(cell: Code, layer_class: Code) -> float:
    errors = []
    size = 3 * HIDDEN
    w = [_normal(size, INPUTS), _normal(size, HIDDEN), _normal(size), _normal(size)]
    x, h0 = _normal(ROWS, STEPS, INPUTS), _normal(ROWS, HIDDEN)
    for reset, keeps in itertools.product(("after", "before"), ("z", "1-z")):
        layer = layer_class(INPUTS, HIDDEN, reset=reset, keeps=keeps).double()
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        layer.load_state_dict(dict(zip(names, w, strict=True)))
        output, _ = layer(x, h0[None])
        h = h0
        for t in range(STEPS):
            found = cell(x[:, t], h, *w, reset=reset, keeps=keeps)
            h = _written_out(x[:, t], h, w, reset, keeps)
            errors += [gap(found, h), gap(output[:, t], h)]
    # z and 1 − z exchange their roles when z's weights change their sign, since 1 − σ(a) = σ(−a).
    turned = [torch.cat((r, -z, n)) for r, z, n in (part.chunk(3) for part in w)]
    errors.append(gap(cell(x[:, 0], h0, *w, keeps="1-z"), cell(x[:, 0], h0, *turned, keeps="z")))
    # Before and after agree where W_hn is diagonal and has no bias, and differ otherwise.
    diagonal = [part.clone() for part in w]
    diagonal[1][2 * HIDDEN :] = torch.diag(_normal(HIDDEN))
    diagonal[3][2 * HIDDEN :] = 0
    both = [cell(x[:, 0], h0, *diagonal, reset=reset) for reset in ("after", "before")]
    other = [cell(x[:, 0], h0, *w, reset=reset) for reset in ("after", "before")]
    return worst(*errors, gap(*both), require(gap(*other) > 1e-3))


# Layers ---------------------------------------------------------------------------------------


@entry(
    "recurrent/stacked-bidirectional",
    "Stacked and bidirectional layers",
    r"h^{(l)}_t = \big[\overrightarrow{h}^{(l)}_t ;\, \overleftarrow{h}^{(l)}_t\big], \quad "
    r"\overrightarrow{h}^{(l)}_t = f\big(h^{(l-1)}_t, \overrightarrow{h}^{(l)}_{t-1}\big), \quad "
    r"\overleftarrow{h}^{(l)}_t = f\big(h^{(l-1)}_t, \overleftarrow{h}^{(l)}_{t+1}\big), \quad h^{(0)} = x",
    code=(RNN, LSTM, GRU),
    wrong=tuple(_changed(layer, _backwards_unturned) for layer in (RNN, LSTM, GRU)),
    tolerance=TOLERANCE,
)
def _(*layers: Code) -> float:
    errors = []
    for layer_class, peer_class in zip(layers, (nn.RNN, nn.LSTM, nn.GRU), strict=True):
        layer = layer_class(INPUTS, HIDDEN, 2, bidirectional=True).double()
        for parameter in layer.parameters():  # biases as well
            nn.init.normal_(parameter)
        x, weights = _normal(ROWS, STEPS, INPUTS), layer.state_dict()
        z, ends = x, []
        for number in range(2):  # torch's plain layer, four times, over turned sequences where it goes back
            outputs = []
            for ending in ("", "_reverse"):
                single = peer_class(z.shape[-1], HIDDEN, batch_first=True).double()
                ending = f"_l{number}{ending}"
                single.load_state_dict(
                    {f"{n.removesuffix(ending)}_l0": v for n, v in weights.items() if n.endswith(ending)}
                )
                turned = z.flip(1) if "reverse" in ending else z
                output, end = single(turned)
                outputs.append(output.flip(1) if "reverse" in ending else output)
                ends.append(_parts(end))
            z = torch.cat(outputs, -1)
        output, last = layer(x)
        wanted = tuple(torch.cat(part) for part in zip(*ends, strict=True))
        errors.append(_gaps((output, *_parts(last)), (z, *wanted)))
    return worst(*errors)


@entry(
    "recurrent/variable-lengths",
    "Sequences of several lengths",
    r"h_t = \begin{cases} f(x_t, h_{t-1}) & t \le \ell \\ h_\ell & t > \ell \end{cases}, \qquad "
    r"y_t = \begin{cases} h_t & t \le \ell \\ 0 & t > \ell \end{cases}, \qquad \ell = 0: h = h_0",
    code=(RNN, LSTM, GRU, unroll),
    wrong=(
        *(_changed(layer, _runs_over) for layer in (RNN, LSTM, GRU)),
        lambda cell, x, state, lengths=None, *, reverse=False: unroll(cell, x, state, reverse=reverse),
    ),
    tolerance=TOLERANCE,
)
def _(rnn: Code, lstm: Code, gru: Code, unroll: Code) -> float:
    lengths, errors = [STEPS, 2, 0, 1], []
    for layer_class, peer_class in ((rnn, nn.RNN), (lstm, nn.LSTM), (gru, nn.GRU)):
        layer = layer_class(INPUTS, HIDDEN, 2, bidirectional=True).double()
        peer = peer_class(INPUTS, HIDDEN, 2, bidirectional=True, batch_first=True).double()
        layer.load_state_dict(peer.state_dict())
        x = _normal(4, STEPS, INPUTS).requires_grad_()
        start = [_normal(4, 4, HIDDEN) for _ in range(2 if layer_class is lstm else 1)]
        output, last = layer(x, _joined(start), torch.tensor(lengths))
        wanted, ends = [], []
        for row, length in enumerate(lengths):
            end: Any = _joined([part[:, row : row + 1].contiguous() for part in start])
            found = x.new_zeros(1, 0, 2 * HIDDEN)
            if length:
                found, end = peer(x[row : row + 1, :length], end)
            wanted.append(torch.cat((found, x.new_zeros(1, STEPS - length, 2 * HIDDEN)), 1))
            ends.append(_parts(end))
        expected = (torch.cat(wanted), *(torch.cat(part, 1) for part in zip(*ends, strict=True)))
        errors.append(_gaps((output, *_parts(last)), expected))
        errors.append(_gaps(_gradients(output, [x]), _gradients(expected[0], [x])))
    # The plain loop, where padding that is not a number must not reach a gradient either.
    w = [_normal(HIDDEN, INPUTS).requires_grad_(), _normal(HIDDEN, HIDDEN).requires_grad_()]
    x, h0 = _normal(2, STEPS, INPUTS), _normal(2, HIDDEN)
    x[1, 2:] = torch.nan
    for reverse in (False, True):
        output, last = unroll(
            lambda x, h: elman_cell(x, h, *w), x, h0, torch.tensor([STEPS, 2]), reverse=reverse
        )
        h, states = h0[1:], []
        for t in (1, 0) if reverse else (0, 1):
            h = torch.tanh(x[1:, t] @ w[0].T + h @ w[1].T)
            states.append(h)
        states = states[::-1] if reverse else states
        errors += [gap(output[1], torch.cat((*states, x.new_zeros(3, HIDDEN)))), gap(last[1:], h)]
        errors += [require(g.isfinite().all()) for g in torch.autograd.grad(output.sum(), w)]
    return worst(*errors)


@entry(
    "recurrent/carried-state",
    "Truncated backpropagation with a carried state",
    r"s^{(k)}_0 = \mathrm{detach}\big(s^{(k-1)}_L\big): \quad \text{outputs of one long pass}, \qquad "
    r"\nabla_W = \sum_k \nabla_W C_k \Big|_{s^{(k)}_0 \text{ constant}}",
    code=(RNN, detach_state),
    wrong=(_changed(RNN, _forgets), lambda state: state),
    tolerance=TOLERANCE,
)
def _(layer_class: Code, detach: Code) -> float:
    steps, part = 12, 4
    layer = layer_class(INPUTS, HIDDEN).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    x, errors_at = _normal(ROWS, steps, INPUTS), _normal(ROWS, steps, HIDDEN)
    whole, _ = layer(x)

    def of_cost(carry: Code) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs of all parts, and gradients of Σ errors_at ⊙ h."""
        state, pieces = None, []
        for piece in x.split(part, 1):
            output, state = layer(piece, state)
            state = carry(state)
            pieces.append(output)
        outputs = torch.cat(pieces, 1)
        return outputs, torch.autograd.grad((outputs * errors_at).sum(), list(layer.parameters()))

    outputs, truncated = of_cost(detach)
    # The equations of backpropagation through time, part by part, from the state where each begins.
    w_ih, w_hh, b_ih, b_hh = [parameter.detach() for parameter in layer.parameters()]
    cell = Elman(w_ih, w_hh, b_ih + b_hh)
    sums = [torch.zeros_like(w_ih), torch.zeros_like(w_hh), torch.zeros_like(b_ih)]
    h0 = torch.zeros(ROWS, HIDDEN, dtype=torch.float64)
    for piece, at in zip(x.split(part, 1), errors_at.split(part, 1), strict=True):
        found = bptt(cell, piece.transpose(0, 1), at.transpose(0, 1), h0)
        sums = [a + b for a, b in zip(sums, found, strict=True)]
        h0 = cell.run(piece.transpose(0, 1), h0).states[-1]
    by_hand = [*sums, sums[2]]
    full = [*bptt(cell, x.transpose(0, 1), errors_at.transpose(0, 1))]
    return worst(
        gap(outputs, whole),
        gap(outputs[:, -1], h0),
        *[gap(a, b) for a, b in zip(truncated, by_hand, strict=True)],
        *[gap(a, b) for a, b in zip(of_cost(lambda state: state)[1][:3], full, strict=True)],
        require(gap(truncated[1], full[1]) > 1e-3),
    )


# Orthogonal weights ---------------------------------------------------------------------------


def _gradient_norms(weight: Tensor, steps: int) -> Tensor:
    """‖∂(v·h_T)/∂h_t‖ / ‖v‖ for h_t = W h_{t−1} + x_t, from t = T back to 0."""
    size = weight.shape[1]
    h0 = _normal(1, size).requires_grad_()
    states = [h0]

    def cell(x: Tensor, h: Tensor) -> Tensor:
        states.append(elman_cell(x, h, torch.eye(size, dtype=torch.float64), weight, nonlinearity="linear"))
        return states[-1]

    _, last = unroll(cell, _normal(1, steps, size), h0)
    direction = _normal(1, size)
    flowing = torch.autograd.grad((last * direction).sum(), states[::-1])
    return torch.stack([gradient.norm() for gradient in flowing]) / direction.norm()


def _orthogonal_picture() -> Figure:
    from quire.report.style import figure

    steps, size = 60, 32
    fig = figure(6.5, 3.8)
    axes = fig.subplots()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for scale in (1.1, 1.0, 0.9):
            weight = orthogonal_gates_(torch.empty(size, size, dtype=torch.float64), gain=scale)
            axes.semilogy(range(steps + 1), _gradient_norms(weight, steps), label=f"{scale} × orthogonal")
        uniform = torch.empty(size, size, dtype=torch.float64).uniform_(-(size**-0.5), size**-0.5)
        axes.semilogy(range(steps + 1), _gradient_norms(uniform, steps), label="uniform ±1/√H")
    axes.set(
        xlabel="steps back", ylabel="norm of the gradient", title=f"Gradient through h′ = W h, {size} units"
    )
    axes.legend()
    return fig


@entry(
    "recurrent/orthogonal",
    "Orthogonal recurrent weights",
    r"W_{hh} = \begin{pmatrix} Q_1 \\ \vdots \\ Q_G \end{pmatrix}, \quad Q_g^\top Q_g = I, \ s_i(Q_g) = 1, "
    r"\qquad h_t = Q h_{t-1} + x_t: \ \Big\| \frac{\partial C}{\partial h_0} \Big\| = "
    r"\Big\| \frac{\partial C}{\partial h_T} \Big\|",
    code=(orthogonal_gates_, gate_singular_values),
    wrong=(
        orthogonal_,  # the whole (G·H, H) matrix, whose blocks are not orthogonal
        lambda weight: torch.linalg.svdvals(weight.detach().unflatten(0, (-1, weight.shape[1]))).square(),
    ),
    tolerance=TOLERANCE,
    picture=_orthogonal_picture,
)
def _(fill: Code, singular_values: Code) -> float:
    errors = []
    for gates in (1, 3, 4):
        weight = fill(torch.empty(gates * 6, 6, dtype=torch.float64))
        errors.append(gap(singular_values(weight), torch.ones(gates, 6)))
        for block in weight.split(6):
            errors.append(gap(block.T @ block, torch.eye(6)))
            errors.append(gap(_gradient_norms(block, 40), torch.ones(41)))
    known = torch.tensor([[3.0, 0.0], [4.0, 5.0]]).double()  # WᵀW has the eigenvalues 45 and 5
    errors.append(gap(singular_values(known), torch.tensor([[45.0, 5.0]]).double().sqrt()))
    half = fill(torch.empty(6, 6, dtype=torch.float64), gain=0.5)
    return worst(*errors, gap(_gradient_norms(half, 40), 0.5 ** torch.arange(41.0).double()))


# Language model -------------------------------------------------------------------------------


def _looks_ahead(model: Code, tokens: Tensor, *rest: Any) -> Any:
    """Logits at t that have seen the token at t + 1."""
    return model(tokens.roll(-1, 1), *rest)


@entry(
    "recurrent/language-model",
    "Recurrent language model",
    r"p(x_1, \dots, x_T) = \prod_t p(x_t \mid x_{<t}), \quad p(x_{t+1} \mid x_{\le t}) = "
    r"\mathrm{softmax}(V h_t + b), \quad \sum_x p(x) = 1, \quad "
    r"\mathrm{perplexity} = p(x)^{-1/T}",
    code=(RecurrentLM, perplexity),
    wrong=(_changed(RecurrentLM, _looks_ahead), nn.functional.cross_entropy),
    tolerance=TOLERANCE,
)
def _(model_class: Code, perplexity: Code) -> float:
    words, steps, errors = 3, 4, []
    kinds: tuple[Kind, ...] = ("rnn", "lstm", "gru")
    for kind in kinds:
        config = RecurrentLMConfig(words, kind, width=5, layers=2, tie_weights=kind == "lstm")
        model = model_class(config).double()
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        # All sequences after a first word that is given.
        tails = torch.tensor(list(itertools.product(range(words), repeat=steps)))
        sequences = torch.cat((torch.zeros(len(tails), 1, dtype=torch.long), tails), 1)
        log_p = model(sequences[:, :-1]).log_softmax(-1).gather(-1, sequences[:, 1:, None]).sum((1, 2))
        errors.append(gap(log_p.exp().sum(), 1.0))
        # Word by word, with nothing but the state to remember by.
        state, slow = None, torch.zeros(len(tails), dtype=torch.float64)
        for t in range(steps):
            logits, state = model.step(sequences[:, t], state)
            slow = slow + logits.log_softmax(-1).gather(-1, sequences[:, t + 1, None])[:, 0]
        errors.append(gap(slow, log_p))
        row = sequences[17:18]
        errors.append(gap(perplexity(model(row[:, :-1]).mT, row[:, 1:]), (-log_p[17] / steps).exp()))
    return worst(*errors)
