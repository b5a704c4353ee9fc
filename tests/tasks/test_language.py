"""Language models as a task: the loss of tokens, large vocabularies, and state that is carried."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from quire.data.batch import Batch
from quire.data.text import TensorTokens, TokenWindows
from quire.errors import InputError
from quire.models import GPT, GPTConfig, RecurrentLM, RecurrentLMConfig
from quire.nn.heads import IGNORE
from quire.options import Optim, Train
from quire.tasks import LanguageModel
from quire.train import Callback, evaluate, fit
from quire.train.checkpoints import newest_checkpoint
from quire.train.descent import Descent
from tests.train.examples import folder


def batch(rows: int = 3, tokens: int = 5, vocabulary: int = 11) -> Batch:
    generator = torch.Generator().manual_seed(0)
    inputs, target = torch.randint(vocabulary, (2, rows, tokens), generator=generator)
    target[0, 3:] = IGNORE
    return Batch({"inputs": inputs, "target": target}, torch.arange(rows))


def gpt(**options: bool) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(GPT(GPTConfig(11, 8, 1, 2, 8)), **options).double().eval()


def recurrent(kind: str = "lstm") -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(RecurrentLM(RecurrentLMConfig(11, kind, 8)))  # type: ignore[arg-type]


def text(tokens: int = 200) -> TokenWindows:
    values = torch.randint(11, (tokens,), generator=torch.Generator().manual_seed(1))
    return TokenWindows(TensorTokens(values), 6, 1)


@pytest.mark.parametrize("chunked", [False, True])
def test_terms_and_measures_are_those_of_the_tokens_that_count(chunked: bool) -> None:
    task, one = gpt(chunked=chunked), batch()
    logits = task.model(one.inputs)
    each = [
        (F.log_softmax(logits[b, t], -1)[y].item(), logits[b, t].argmax().item() == y)
        for b in range(3)
        for t, y in enumerate(one.target[b].tolist())
        if y != IGNORE
    ]
    lost = -sum(value for value, _ in each)
    assert task.weigh(one) == {"target": 13.0}
    assert task.terms(one)["target"].item() == pytest.approx(lost)
    sums, tallies = task.judge(one)
    assert sums["target"].item() == pytest.approx(lost, rel=1e-6)
    found = task.measures(tallies)
    assert found["perplexity"] == pytest.approx(math.exp(lost / 13), rel=1e-6)
    assert found["bits_per_token"] == pytest.approx(lost / 13 / math.log(2), rel=1e-6)
    assert found["accuracy"] == pytest.approx(sum(right for _, right in each) / 13)


def test_a_chunked_loss_has_the_same_gradient() -> None:
    whole, chunked, one = gpt(), gpt(chunked=True), batch()
    for task in (whole, chunked):
        task.terms(one)["target"].backward()
    for (name, p), q in zip(whole.named_parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    with pytest.raises(InputError, match="a chunked loss of RecurrentLM"):
        LanguageModel(recurrent().model, chunked=True)


class Watch(Callback):
    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []

    def on_step(self, descent: Descent, step: int) -> None:
        self.states.append({name: value.clone() for name, value in descent.stepper.carried.items()})


@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_state_goes_on_from_batch_to_batch(kind: str, micro_batches: int) -> None:
    """Without a step size the weights stay, so that the carried state is that of one long pass."""
    task, data, watch = recurrent(kind), text(), Watch()
    options = Train(batch_size=4, carry=True, micro_batches=micro_batches)
    fit(task, data, steps=3, train=options, optim=Optim("sgd", lr=1e-30), callbacks=[watch])
    streams = data.streams(4)
    inputs = torch.cat([one.inputs for one in streams.batches(torch.arange(12), 4)], 1)
    _, state = task.model.step(inputs)
    parts = state if isinstance(state, tuple) else (state,)
    for i, part in enumerate(parts):
        torch.testing.assert_close(watch.states[-1][f"state.{i}"].transpose(0, 1), part)


def test_a_new_epoch_begins_without_a_state() -> None:
    task, data, watch = recurrent(), text(60), Watch()
    steps = data.streams(4).steps
    fit(
        task, data, steps=steps + 1, train=Train(batch_size=4, carry=True), callbacks=[watch],
        optim=Optim("sgd", lr=1e-30),
    )  # fmt: skip
    torch.testing.assert_close(watch.states[0], watch.states[steps])


def test_resuming_carries_the_state_on(tmp_path: Path) -> None:
    for name, stops in (("whole", [7]), ("parts", [2, 5, 7])):
        for i, steps in enumerate(stops):
            store = folder(tmp_path / name, resume=i > 0)
            fit(recurrent(), text(), steps=steps, train=Train(batch_size=4, carry=True), store=store)
            store.close()
    whole, parts = (newest_checkpoint(tmp_path / name / "checkpoints") for name in ("whole", "parts"))
    for group in ("weights", "carried"):
        for key, value in whole.tensors[group].items():
            assert torch.equal(value, parts.tensors[group][key]), (group, key)


def test_carrying_what_has_no_state_is_refused() -> None:
    with pytest.raises(InputError, match=r"--train\.carry with LanguageModel on TokenWindows"):
        fit(LanguageModel(GPT(GPTConfig(11, 8, 1, 2, 8))), text(), steps=1, train=Train(carry=True))
    with pytest.raises(InputError, match=r"--train\.carry with --train\.compile"):
        Train(carry=True, compile=True)


def test_a_task_is_rebuilt_from_its_description() -> None:
    task = gpt(chunked=True)
    again = LanguageModel.from_spec(task.spec()).double().eval()
    again.load_state_dict(task.state_dict())
    assert torch.equal(again.model(batch().inputs), task.model(batch().inputs))
    assert again.chunked


def test_a_part_is_judged_token_by_token() -> None:
    task, data = recurrent(), text()
    found = evaluate(task, data.judged())
    tokens = data.tokens.windows(torch.tensor([0]), 200, whole=True)
    lost = 0.0
    for start in range(0, 199, 6):
        part = tokens[:, start : start + 7]
        logits = task.eval().model(part[:, :-1])
        lost += F.cross_entropy(logits[0], part[0, 1:].long(), reduction="sum").item()
    assert found["loss"] == pytest.approx(lost / 199, rel=1e-5)
