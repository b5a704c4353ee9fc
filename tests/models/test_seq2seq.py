"""The LSTM encoder-decoder against an explicit loop; padding, lengths, single rows and training."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.models import seq2seq
from quire.models.registry import build_model, model_spec
from quire.models.seq2seq import Seq2Seq, Seq2SeqConfig

SMALL = {"source_vocab": 9, "target_vocab": 7, "width": 6, "attention_width": 5}
VARIANTS = [{}, {"bidirectional": False}, {"layers": 2}, {"layers": 3, "bidirectional": False}]
variants = pytest.mark.parametrize("options", VARIANTS, ids=str)


def make(seed: int = 0, **options: object) -> Seq2Seq:
    torch.manual_seed(seed)
    return Seq2Seq(Seq2SeqConfig(**{**SMALL, **options})).double()


def pairs(rows: int = 5, source: int = 8, target: int = 4) -> tuple[Tensor, Tensor]:
    """Sources of all lengths, one of them nothing but padding, and as many target tokens."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(1, 9, (rows, source), generator=generator)
    for row in range(rows):
        x[row, source - 2 * row :] = 0  # row 0 is full, row 4 is empty
    return x, torch.randint(0, 7, (rows, target), generator=generator)


def torch_lstm(layer: torch.nn.Module, **options: object) -> torch.nn.LSTM:
    twin = torch.nn.LSTM(6, 6, batch_first=True, **options).double()
    twin.load_state_dict(layer.state_dict())
    return twin


@variants
def test_equals_an_explicit_loop_over_rows_and_tokens(options):
    model = make(**options)
    layers, both = options.get("layers", 1), options.get("bidirectional", True)
    encoder = torch_lstm(model.encoder, num_layers=layers, bidirectional=both)
    decoder = torch_lstm(model.decoder, num_layers=layers)
    attention = model.attention
    to_query, to_key = attention.query_projection.weight, attention.key_projection.weight
    source, target = pairs()
    logits, weights = model.attend(source, target)
    torch.testing.assert_close(model(source, target), logits, rtol=1e-12, atol=1e-12)
    for row in range(4):  # row 4 has no source
        tokens = source[row][source[row] != 0]
        states, (last, _) = encoder(model.source_embedding(tokens)[None])
        summary = torch.cat([last[-2, 0], last[-1, 0]]) if both else last[-1, 0]
        start = torch.tanh(model.bridge.weight @ summary + model.bridge.bias).reshape(2, layers, 1, 6)
        state = (start[0], start[1])
        for place, token in enumerate(target[row]):
            query, state = decoder(model.target_embedding(token)[None, None], state)
            query = query[0, 0]
            scores = torch.stack(
                [attention.vector @ torch.tanh(to_query @ query + to_key @ h) for h in states[0]]
            )
            share = scores.exp() / scores.exp().sum()
            context = sum(a * h for a, h in zip(share, states[0], strict=True))
            combined = torch.tanh(model.combine.weight @ torch.cat([query, context]) + model.combine.bias)
            wanted = model.output.weight @ combined + model.output.bias
            torch.testing.assert_close(logits[row, place], wanted, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(weights[row, place, : len(tokens)], share, rtol=1e-10, atol=1e-12)
            assert not weights[row, place, len(tokens) :].any()


@variants
def test_teacher_forcing_equals_step_by_step(options):
    model = make(**options)
    source, target = pairs()
    wanted, state = model(source, target), model.encode(source)
    for place in range(target.shape[1]):
        logits, state = model.step(target[:, place], state)
        torch.testing.assert_close(logits, wanted[:, place], rtol=1e-10, atol=1e-12)


@variants
def test_padding_and_company_never_change_a_result(options):
    model = make(**options)
    source, target = pairs()
    wanted, weights = model.attend(source, target)
    longer = torch.cat([source, torch.zeros(5, 3, dtype=torch.long)], 1)
    torch.testing.assert_close(model(longer, target), wanted, rtol=1e-10, atol=1e-12)
    for row in range(5):
        alone = source[row : row + 1, : 8 - 2 * row]  # the last one has no column at all
        logits, share = model.attend(alone, target[row : row + 1])
        torch.testing.assert_close(logits, wanted[row : row + 1], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(share, weights[row : row + 1, :, : 8 - 2 * row], rtol=1e-10, atol=1e-12)


def test_a_position_reads_no_later_target():
    model = make()
    source, target = pairs()
    other = target.clone()
    other[:, 2:] = (other[:, 2:] + 1) % 7
    assert torch.equal(model(source, target)[:, :2], model(source, other)[:, :2])
    assert not torch.allclose(model(source, target)[:, 2:], model(source, other)[:, 2:])


def test_a_target_may_be_longer_than_its_source_and_the_other_way_round():
    model = make()
    for source, target in ((1, 9), (9, 1), (4, 4)):
        assert model(torch.ones(2, source).long(), torch.ones(2, target).long()).shape == (2, target, 7)


@variants
def test_a_gradient_reaches_every_parameter(options):
    model = make(dropout=0.2, **options)
    source, target = pairs(rows=4)
    (model(source, target) - 1).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("shape", [(3, 5, 2), (1, 5, 2), (3, 0, 2), (3, 5, 0), (1, 0, 0), (0, 5, 2)])
def test_nothing_to_read_gives_numbers_forward_and_backward(shape):
    rows, source, target = shape
    model = make(layers=2)
    x, y = torch.zeros(rows, source, dtype=torch.long), torch.ones(rows, target, dtype=torch.long)
    logits, weights = model.attend(x, y)
    assert logits.shape == (rows, target, 7)
    assert weights.shape == (rows, target, source)
    assert logits.isfinite().all()
    assert not weights.any()
    logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_an_empty_source_beside_others_leaves_their_gradient_alone():
    model = make()
    source, target = pairs()
    model(source[:4], target[:4]).square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(source, target)[:4].square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-9, atol=1e-12, msg=name)


def test_streamed_attention_gives_the_same(monkeypatch):
    model = make()
    source, target = pairs()
    found = []
    for most in (2**24, 0):
        monkeypatch.setattr(seq2seq, "MOST_HELD", most)
        model.zero_grad()
        logits = model(source, target)
        logits.square().sum().backward()
        found.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_dropout_acts_in_training_alone():
    model = make(dropout=0.5, layers=2)
    source, target = pairs()
    assert not torch.equal(model(source, target), model(source, target))
    model.eval()
    assert torch.equal(model(source, target), model(source, target))


def test_saved_and_built_again():
    model = make(layers=2, bidirectional=False, padding=3, begin=5, end=6)
    again = build_model(json.loads(json.dumps(model_spec(model)))).double()
    assert (again.begin, again.end) == (5, 6)
    again.load_state_dict(model.state_dict())
    source, target = pairs()
    assert torch.equal(again(source, target), model(source, target))


@pytest.mark.slow
def test_half_precision_and_export():
    model = make().float().eval()
    source, target = pairs()
    wanted = model(source, target)
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(source, target).float() - wanted).norm() < 0.05 * wanted.norm()
    rows = torch.export.Dim("rows")
    program = torch.export.export(model, (source, target), dynamic_shapes=({0: rows}, {0: rows}))
    other = source.repeat(2, 1), target.repeat(2, 1)
    torch.testing.assert_close(program.module()(*other), model(*other))
    assert (model.bfloat16()(source, target).float() - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.gpu
def test_the_same_on_the_gpu():
    model = make(layers=2)
    source, target = pairs()
    wanted = model(source, target)
    found = model.cuda()(source.cuda(), target.cuda())
    torch.testing.assert_close(found.cpu(), wanted)


def test_messages():
    model = make()
    with pytest.raises(InputError, match=r"source tokens of shape \(3,\).*\n  expected: whole numbers"):
        model(torch.ones(3).long(), torch.ones(1, 3).long())
    with pytest.raises(InputError, match=r"target tokens of shape \(1, 3\) and type torch.float32"):
        model(torch.ones(1, 3).long(), torch.ones(1, 3))
    with pytest.raises(InputError, match="end is 7\n  expected: a token of the target, from 0 to 6"):
        Seq2SeqConfig(9, 7, end=7)
    with pytest.raises(InputError, match="padding is -1\n  expected: a token of the source, from 0 to 8"):
        Seq2SeqConfig(9, 7, padding=-1)
    with pytest.raises(InputError, match="layers is 0"):
        Seq2SeqConfig(9, 7, layers=0)
    with pytest.raises(InputError, match=r"dropout is 1\.0"):
        Seq2SeqConfig(9, 7, dropout=1.0)
