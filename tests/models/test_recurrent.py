"""The recurrent language model and classifier against their parts from torch.nn, and against themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional

from quire.errors import InputError
from quire.functional.recurrent import detach_state, gate_singular_values
from quire.models.recurrent import (
    RecurrentClassifier,
    RecurrentClassifierConfig,
    RecurrentLM,
    RecurrentLMConfig,
)
from quire.models.registry import build_model, model_spec

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "rnn": {"kind": "rnn"},
    "relu": {"kind": "rnn", "nonlinearity": "relu"},
    "lstm": {"kind": "lstm"},
    "gru": {"kind": "gru"},
    "gru, before, 1-z": {"kind": "gru", "reset": "before", "keeps": "1-z"},
}
kinds = pytest.mark.parametrize("kind", KINDS)
PEERS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
VOCABULARY = 9


def tokens(rows: int = 3, steps: int = 7) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, steps))


def scramble(model: nn.Module) -> Any:
    """Values everywhere, biases included."""
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.8, 0.8)
    return model.double().eval()


def language_model(kind: str = "lstm", **options: Any) -> RecurrentLM:
    return scramble(RecurrentLM(RecurrentLMConfig(VOCABULARY, width=6, layers=2, **KINDS[kind], **options)))


def classifier(kind: str = "lstm", **options: Any) -> RecurrentClassifier:
    options = {"num_classes": 3, "width": 6, "layers": 2, **options}
    return scramble(RecurrentClassifier(RecurrentClassifierConfig(VOCABULARY, **KINDS[kind], **options)))


# Language model -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru"])
@pytest.mark.parametrize("tie", [False, True])
def test_the_language_model_is_embedding_layer_and_readout(kind: str, tie: bool) -> None:
    model, x = language_model(kind, tie_weights=tie), tokens()
    peer = PEERS[kind](6, 6, 2, batch_first=True).double()
    peer.load_state_dict(model.recurrent.state_dict())
    matrix = model.embedding.weight
    hidden, _ = peer(matrix[x])
    weight = matrix if tie else model.head.weight
    torch.testing.assert_close(model(x), hidden @ weight.T + model.head.bias)


@kinds
def test_token_by_token_equals_one_pass(kind: str) -> None:
    model, x = language_model(kind), tokens()
    whole, last = model(x, return_state=True)
    assert torch.equal(model(x), whole)
    state, found = None, []
    for t in range(x.shape[1]):
        logits, state = model.step(x[:, t], state)
        assert logits.shape == (3, VOCABULARY)
        found.append(logits)
    torch.testing.assert_close(torch.stack(found, 1), whole)
    torch.testing.assert_close(state, last)
    first, state = model.step(x[:, :4])
    second, state = model(x[:, 4:], state)  # a state that is given comes back
    torch.testing.assert_close(torch.cat((first, second), 1), whole)
    torch.testing.assert_close(state, last)


@kinds
def test_later_tokens_do_not_reach_earlier_logits(kind: str) -> None:
    model, x = language_model(kind), tokens()
    other = x.clone()
    other[:, 4:] = tokens()[:, 4:]
    other[:, 4] = (x[:, 4] % (VOCABULARY - 1)) + 1
    before, after = model(x), model(other)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_a_tied_matrix_stands_once_and_learns_from_both_sides() -> None:
    tied, x = language_model(tie_weights=True), tokens()
    assert [name for name in tied.state_dict() if not name.startswith("recurrent")] == [
        "embedding.weight", "head.bias"
    ]  # fmt: skip
    untied = language_model()
    untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
    torch.testing.assert_close(tied(x), untied(x))
    for model in (tied, untied):
        functional.cross_entropy(model(x).mT, x.roll(-1, 1)).backward()
    both = untied.embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both)
    again = language_model(tie_weights=True)
    again.load_state_dict(load(save(tied.state_dict())))
    assert torch.equal(again(x), tied(x))


def test_fresh_models_begin_near_a_uniform_guess() -> None:
    for tie in (False, True):
        model = RecurrentLM(RecurrentLMConfig(50, width=64, layers=2, tie_weights=tie))
        x = torch.randint(0, 50, (8, 20))
        loss = functional.cross_entropy(model(x).mT, x.roll(-1, 1)).item()
        assert abs(loss - torch.tensor(50.0).log().item()) < 0.3
        weight = model.recurrent.get_parameter("weight_hh_l1")
        torch.testing.assert_close(gate_singular_values(weight), torch.ones(4, 64))
        assert (model.recurrent.get_parameter("bias_ih_l0")[64:128] == 1).all()


def test_dropout_is_at_work_while_training_only() -> None:
    model, x = language_model(dropout=0.5), tokens()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))
    model.dropout.eval()  # what is left is between the layers
    assert not torch.equal(model(x), model(x))
    model.train()
    model.recurrent.eval()  # what is left is on the ways in and out
    ways = []
    model.recurrent.register_forward_hook(lambda layer, inputs, outputs: ways.append(inputs[0]))
    hidden, _ = model.hidden(x)
    assert 0.2 < (ways[0] == 0).double().mean() < 0.8
    assert 0.2 < (hidden == 0).double().mean() < 0.8


def test_dropout_of_the_classifier_is_on_the_ways_in_and_out_too() -> None:
    model, x, seen = classifier(dropout=0.5), tokens(8), []
    for part in (model.recurrent, model.head):
        part.register_forward_hook(
            lambda layer, inputs, outputs: seen.append((inputs[0] == 0).double().mean())
        )
    model(x)
    assert seen == [0, 0]
    model.train()(x)
    assert all(0.2 < share < 0.8 for share in seen[2:])


@kinds
def test_a_language_model_learns_what_a_state_can_remember(kind: str) -> None:
    """1 2 1 3 1 2 1 3 …: what follows a 1 depends on the token before it; in parts, the state carried."""
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentLMConfig(4, width=16, **KINDS[kind]))
    text = torch.tensor([1, 2, 1, 3] * 20 + [1]).expand(2, -1)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(12):
        state = None
        for start in range(0, 80, 10):
            logits, state = model.step(text[:, start : start + 10], state)
            loss = functional.cross_entropy(logits.mT, text[:, start + 1 : start + 11])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            state = detach_state(state)
    assert loss.item() < 0.05  # without a memory it is ½·log 2 = 0.35


# Classifier -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("reading", ["last", "mean"])
def test_the_classifier_reads_each_text_as_if_alone(kind: str, bidirectional: bool, reading: Any) -> None:
    model = classifier(kind, bidirectional=bidirectional, reading=reading)
    peer = PEERS[kind](6, 6, 2, batch_first=True, bidirectional=bidirectional).double()
    peer.load_state_dict(model.recurrent.state_dict())
    x, lengths = tokens(4, 7), [7, 1, 0, 4]
    for row, length in enumerate(lengths):
        x[row, length:] = 0
    assert model.lengths(x).tolist() == lengths
    wanted = []
    for row, length in enumerate(lengths):
        if not length:
            wanted.append(model.head.bias)
            continue
        output, state = peer(model.embedding.weight[x[row : row + 1, :length]])
        h = state[0] if kind == "lstm" else state
        last = torch.cat((h[-2, 0], h[-1, 0])) if bidirectional else h[-1, 0]
        read = last if reading == "last" else output[0].mean(0)
        wanted.append(model.head.weight @ read + model.head.bias)
    torch.testing.assert_close(model(x), torch.stack(wanted))
    torch.testing.assert_close(model(functional.pad(x, (0, 5))), torch.stack(wanted))


@kinds
@pytest.mark.parametrize("reading", ["last", "mean"])
@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(3, 5, dtype=torch.long),
        torch.zeros(1, 1, dtype=torch.long),
        torch.tensor([[4]]),
        torch.tensor([[1, 2, 0], [0, 0, 0]]),
        torch.zeros(2, 0, dtype=torch.long),
    ],
    ids=["padding", "one padding", "one token", "mixed", "no steps"],
)
def test_nothing_but_padding_is_finite_forward_and_backward(kind: str, reading: Any, x: Tensor) -> None:
    model = classifier(kind, bidirectional=True, reading=reading).train()
    logits = model(x)
    functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)).backward()
    assert logits.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    for row in range(len(x)):
        if not x[row].any():
            assert torch.equal(logits[row], model.head.bias)


def test_padding_is_what_stands_at_the_end() -> None:
    model = classifier(padding=5)
    x = torch.tensor([[5, 3, 5, 2, 5, 5], [5, 5, 5, 5, 5, 5], [0, 0, 0, 0, 0, 0]])
    assert model.lengths(x).tolist() == [4, 0, 6]
    fresh = RecurrentClassifier(model.config)
    assert not fresh.embedding.weight[5].any()


def test_a_classifier_learns_the_first_word() -> None:
    """The class is the first token, which only a memory or the backward direction knows at the end."""
    torch.manual_seed(0)
    config = RecurrentClassifierConfig(VOCABULARY, width=16, num_classes=3)
    model = RecurrentClassifier(config)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(80):
        x, lengths = tokens(32, 8), torch.randint(1, 9, (32,))
        x[:, 0] = torch.randint(1, 4, (32,))
        x[torch.arange(8) >= lengths[:, None]] = 0
        loss = functional.cross_entropy(model(x), x[:, 0] - 1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.2  # chance is log 3 = 1.1


# Both -----------------------------------------------------------------------------------------

MODELS: list[tuple[Any, dict[str, Any]]] = [
    (language_model, {}),
    (language_model, {"kind": "gru, before, 1-z", "tie_weights": True}),
    (language_model, {"kind": "rnn"}),
    (classifier, {"bidirectional": True}),
    (classifier, {"kind": "gru, before, 1-z", "reading": "mean"}),
]


@pytest.mark.parametrize(("make", "options"), MODELS)
def test_a_model_is_rebuilt_from_its_description(make: Any, options: dict[str, Any]) -> None:
    model, x = make(**options), tokens()
    x[0, 3:] = 0
    again: Any = build_model(json.loads(json.dumps(model_spec(model)))).double().eval()
    again.load_state_dict(load(save(model.state_dict())))
    assert torch.equal(again(x), model(x))
    assert again.config == model.config


@pytest.mark.parametrize(("make", "options"), MODELS)
def test_a_model_can_be_exported_with_any_number_of_rows(make: Any, options: dict[str, Any]) -> None:
    model, x, other = make(**options), tokens(), tokens(5)
    other[:3, 2:] = 0
    other[1] = 0
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.testing.assert_close(program.module()(other), model(other))


@pytest.mark.parametrize(("make", "options"), MODELS)
def test_half_precision_is_close(make: Any, options: dict[str, Any]) -> None:
    model, x = make(**options).float(), tokens()
    x[1, 2:] = 0
    wanted = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    torch.testing.assert_close(found.float(), wanted, rtol=0.1, atol=0.1)
    torch.testing.assert_close(model.bfloat16()(x).float(), wanted, rtol=0.1, atol=0.1)


def test_wrong_options_and_tokens_are_explained() -> None:
    with pytest.raises(InputError, match=r"(?s)unknown kind 'ltsm'.*did you mean 'lstm'"):
        RecurrentLMConfig(9, "ltsm")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"(?s)reset='before' with kind='lstm'.*set kind to 'gru'"):
        RecurrentLMConfig(9, reset="before")
    with pytest.raises(
        InputError, match=r"(?s)nonlinearity='relu' with kind='gru'.*or leave nonlinearity out"
    ):
        RecurrentLMConfig(9, "gru", nonlinearity="relu")
    with pytest.raises(InputError, match="unknown share of the old state 'y'"):
        RecurrentLMConfig(9, "gru", keeps="y")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown nonlinearity 'elu'"):
        RecurrentLMConfig(9, "rnn", nonlinearity="elu")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="width is 0"):
        RecurrentLMConfig(9, width=0)
    with pytest.raises(InputError, match=r"dropout is 1\.0"):
        RecurrentLMConfig(9, dropout=1.0)
    with pytest.raises(InputError, match=r"(?s)padding is 9.*0 to 8"):
        RecurrentClassifierConfig(9, num_classes=2, padding=9)
    with pytest.raises(InputError, match=r"(?s)unknown reading 'max'.*last, mean"):
        RecurrentClassifierConfig(9, num_classes=2, reading="max")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"(?s)tokens of shape \(3,\) and type int64.*integers \(B, T\)"):
        language_model()(torch.zeros(3, dtype=torch.long))
    with pytest.raises(InputError, match=r"type float32"):
        classifier()(torch.zeros(3, 2))


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "options"), MODELS)
def test_the_gpu_gives_the_same(make: Any, options: dict[str, Any]) -> None:
    model, x = make(**options), tokens(4)
    x[1, 2:] = 0
    x[2] = 0
    wanted = model(x)
    torch.testing.assert_close(model.cuda()(x.cuda()).cpu(), wanted)
