"""The translation task: exact over micro-batches, judged as it decodes, trained and saved."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from quire.data.batch import Batch, TensorData
from quire.errors import InputError
from quire.functional.bleu_score import bleu
from quire.models.mlp import MLP, MLPConfig
from quire.models.seq2seq import Seq2Seq, Seq2SeqConfig
from quire.nn.heads import IGNORE
from quire.options import Optim
from quire.tasks.translation import (
    Translation,
    decode,
    exact_matches,
    log_likelihood,
    shift_target,
    unpad,
)
from quire.train import fit
from quire.train.evaluate import evaluate
from quire.train.sums import add_up
from quire.train.task import build_task
from tests.tasks.translating import (
    BEGIN,
    END,
    WORDS,
    hit_some,
    kinds,
    make,
    pairs,
)

# Loss -----------------------------------------------------------------------------------------


def test_what_the_decoder_reads():
    target = torch.tensor([[3, 4, END, IGNORE], [END, IGNORE, IGNORE, IGNORE]])
    assert shift_target(target, BEGIN, END).tolist() == [[BEGIN, 3, 4, END], [BEGIN, END, END, END]]
    assert shift_target(target[:, :0], BEGIN, END).shape == (2, 0)


@kinds
def test_loss_by_an_explicit_loop(kind):
    task, batch = make(kind=kind), pairs()
    total, tokens = 0.0, 0
    for source, target in zip(batch.inputs, batch.target, strict=True):
        state = task.pairs.encode(source[None])
        before = BEGIN
        for token in target[target != IGNORE].tolist():
            logits, state = task.pairs.step(torch.tensor([before]), state)
            total -= math.log(logits.softmax(-1)[0, token].item())
            tokens, before = tokens + 1, token
    assert task.weigh(batch) == {"target": tokens}
    assert task.terms(batch)["target"].item() == pytest.approx(total, rel=1e-10)
    assert task.loss_each(batch)["target"].sum().item() == pytest.approx(total, rel=1e-10)
    assert log_likelihood(task.pairs, batch.inputs, batch.target).sum().item() == pytest.approx(-total)


def test_label_smoothing_is_in_the_loss_and_not_in_the_perplexity():
    plain, batch = make(), pairs()
    smooth = Translation(plain.model, max_length=5, label_smoothing=0.2)
    logits, real = plain.output(batch), batch.target != IGNORE
    uniform = -(logits.log_softmax(-1).mean(-1) * real).sum()
    wanted = 0.8 * plain.terms(batch)["target"] + 0.2 * uniform
    torch.testing.assert_close(smooth.terms(batch)["target"], wanted)
    assert smooth.measures(smooth.tally(batch)) == plain.measures(plain.tally(batch))


@kinds
def test_sums_weights_and_tallies_add_up_over_micro_batches(kind):
    task = make(kind=kind)
    batch = hit_some(task, pairs())
    parts = batch.split(4)
    assert add_up(task.weigh(part) for part in parts) == task.weigh(batch)
    total = sum(task.terms(part)["target"] for part in parts)
    torch.testing.assert_close(total, task.terms(batch)["target"], rtol=1e-12, atol=1e-12)
    whole = task.tally(batch)
    for name, value in add_up(task.tally(part) for part in parts).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-12)


def test_a_batch_known_to_be_complete_is_weighed_without_looking():
    batch = Batch({"inputs": torch.ones(3, 2), "target": torch.full((3, 4), END)}, torch.arange(3), True)
    assert make().weigh(batch) == {"target": 12.0}


@kinds
def test_padding_changes_nothing(kind):
    task = make(kind=kind)
    batch = hit_some(task, pairs())
    padded = batch.replace(
        inputs=torch.cat([batch.inputs, torch.zeros(9, 3, dtype=torch.long)], 1),
        target=torch.cat([batch.target, torch.full((9, 2), IGNORE)], 1),
    )
    (sums, tallies), (wanted, counts) = task.judge(padded), task.judge(batch)
    torch.testing.assert_close(sums["target"], wanted["target"], rtol=1e-12, atol=1e-12)
    assert {k: v.tolist() for k, v in tallies.items() if k not in ("log_loss", "bleu")} == {
        k: v.tolist() for k, v in counts.items() if k not in ("log_loss", "bleu")
    }
    torch.testing.assert_close(tallies["log_loss"], counts["log_loss"], rtol=1e-12, atol=1e-12)
    for mode in ("mode", "beam"):
        one, other = task.predict(batch.inputs, mode), task.predict(padded.inputs, mode)
        assert torch.equal(one["tokens"], other["tokens"])
        torch.testing.assert_close(one["log_probability"], other["log_probability"])


# Measures -------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("seed", range(4))
def test_measures_equal_those_of_greedy_decoding(seed, kind):
    task = make(seed, kind=kind)
    batch = hit_some(task, pairs(12, seed))
    found = unpad(decode(task.pairs, batch.inputs, max_length=5).tokens, END, keep=True)
    wanted = [row[row != IGNORE].tolist() for row in batch.target]
    exact = [one == other for one, other in zip(found, wanted, strict=True)]
    assert 4 <= sum(exact) < 12
    assert exact_matches(task.output(batch), batch.target).tolist() == exact
    measures = task.measures(task.tally(batch))
    assert measures["exact_match"] == pytest.approx(sum(exact) / 12)
    without_end = [[token for token in row if token != END] for row in found]
    references = [[[token for token in row if token != END]] for row in wanted]
    assert measures["bleu"] == pytest.approx(bleu(without_end, references).item(), rel=1e-12)
    guess = task.output(batch).argmax(-1)
    right = [int(g) == int(t) for g, t in zip(guess.flatten(), batch.target.flatten(), strict=True) if t >= 0]
    assert measures["accuracy"] == pytest.approx(sum(right) / len(right))
    loss = task.terms(batch)["target"].item() / len(right)
    assert measures["perplexity"] == pytest.approx(math.exp(loss))


def test_a_wrong_end_token_is_no_match():
    logits = nn.functional.one_hot(torch.tensor([[3, END, 4], [3, 4, 4], [4, END, 4], [3, 3, 3]]), WORDS)
    target = torch.tensor([[3, END, IGNORE]] * 3 + [[IGNORE] * 3])
    assert exact_matches(logits.double(), target).tolist() == [True, False, False, False]


def test_rows_without_a_target_are_left_out():
    task = make(1)
    batch = hit_some(task, pairs())
    target = batch.target.clone()
    target[[0, 4]] = IGNORE
    kept = torch.tensor([1, 2, 3, 5, 6, 7, 8])
    rest = Batch({"inputs": batch.inputs[kept], "target": batch.target[kept]}, kept)
    found, wanted = task.tally(batch.replace(target=target)), task.tally(rest)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=1e-12)


@kinds
def test_nothing_to_judge_gives_numbers(kind):
    task, batch = make(kind=kind), pairs()
    empty = batch.replace(target=torch.full_like(batch.target, IGNORE))
    sums, tallies = task.judge(empty)
    assert sums["target"] == 0
    assert task.weigh(empty) == {"target": 0}
    assert task.measures(tallies) == {"accuracy": 0, "perplexity": 1, "exact_match": 0, "bleu": 0}
    without_source = batch.replace(inputs=torch.zeros_like(batch.inputs))
    assert all(math.isfinite(value) for value in task.measures(task.tally(without_source)).values())


# Training and saving --------------------------------------------------------------------------


def test_twenty_pairs_are_learned_by_heart():
    # A source of digits is turned round: shorter ones too, so lengths matter.
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(3, 10, (20, 6), generator=generator)
    target = torch.full((20, 7), IGNORE)
    for row in range(20):
        length = 2 + row % 5
        source[row, length:] = 0
        target[row, :length] = source[row, :length].flip(0)
        target[row, length] = END
    torch.manual_seed(0)
    model = Seq2Seq(Seq2SeqConfig(10, 10, width=32, attention_width=16))
    task = Translation(model, max_length=8)
    data = TensorData({"inputs": source, "target": target})
    before = evaluate(task, data)
    fit(task, data, steps=150, optim=Optim(lr=1e-2))
    after = evaluate(task, data)
    assert before["exact_match"] < 0.2
    assert after["exact_match"] == 1
    assert after["bleu"] == 1
    assert after["perplexity"] < 1.2 < before["perplexity"]
    for row, tokens in enumerate(unpad(task.predict(source, "beam")["tokens"], END)):
        assert tokens == source[row, : 2 + row % 5].flip(0).tolist()


@kinds
def test_saved_and_built_again(kind):
    task, batch = make(kind=kind, layers=2), pairs()
    task.label_smoothing, task.step_factors, task.frozen = 0.1, {"model.encoder.": 0.5}, {"model.output.": 2}
    again = build_task(json.loads(json.dumps(task.spec()))).double().eval()
    again.load_state_dict(task.state_dict())
    assert again.spec() == task.spec()
    assert again.step_factor("model.encoder.weight_ih_l0") == 0.5
    assert again.step_factor("model.output.bias") == 1
    assert again.frozen_epochs("model.output.bias") == 2
    assert torch.equal(again.predict(batch.inputs)["tokens"], task.predict(batch.inputs)["tokens"])
    assert torch.equal(again.terms(batch)["target"], task.terms(batch)["target"])


@pytest.mark.gpu
@kinds
def test_the_same_on_the_gpu(kind):
    task = make(kind=kind)
    batch = hit_some(task, pairs())
    wanted = task.measures(task.tally(batch))
    modes = {mode: task.predict(batch.inputs, mode) for mode in ("mode", "beam")}
    task.cuda()
    there = batch.to(torch.device("cuda"))
    assert task.measures(task.tally(there)) == pytest.approx(wanted)
    for mode, columns in modes.items():
        found = task.predict(there.inputs, mode)
        assert torch.equal(found["tokens"].cpu(), columns["tokens"])
        torch.testing.assert_close(found["log_probability"].cpu(), columns["log_probability"])
    one, two = (task.predict(there.inputs, "sample", seed=3)["tokens"] for _ in range(2))
    assert torch.equal(one, two)


def test_messages():
    task, batch = make(), pairs()
    with pytest.raises(
        InputError, match="a MLP without begin, end, encode, step\n  expected: an encoder-dec"
    ):
        Translation(MLP(MLPConfig(2, 2)), max_length=3)
    with pytest.raises(InputError, match="max_length is 0\n  expected: at least 1"):
        Translation(task.model, max_length=0)
    with pytest.raises(InputError, match="label_smoothing is 1"):
        Translation(task.model, max_length=3, label_smoothing=1)
    with pytest.raises(
        InputError, match=r"unknown mode of translation 'beams'\n.*\n  fix: did you mean 'beam'"
    ):
        task.predict(batch.inputs, "beams")
    with pytest.raises(InputError, match=r"targets of shape \(9,\)"):
        task.terms(batch.replace(target=batch.target[:, 0]))
    with pytest.raises(InputError, match="max_length is -1"):
        task.predict(batch.inputs, max_length=-1)
