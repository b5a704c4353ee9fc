"""Generation: cached is uncached token for token, rows are as if alone, and it stops where it should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional.sampling import beam_search, sample
from quire.models.generate import NOTHING, Cache, Generated, Stepwise, cut, generate, stream
from quire.models.gpt import GPT, GPTConfig
from quire.models.recurrent import RecurrentLM, RecurrentLMConfig

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
LETTERS = "abcdefghijklmnopqrstuvwxyz.,!"


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(**{"vocab_size": 29, "context": 16, "layers": 2, "heads": 2, "width": 16, **changes})
    )
    for parameter in model.parameters():  # fresh weights would say the same token again and again
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def recurrent(kind: Any) -> RecurrentLM:
    torch.manual_seed(0)
    model = RecurrentLM(RecurrentLMConfig(29, kind, width=8, layers=2)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def uncached(model: Any, prompt: list[int], length: int, keep: int, **options: Any) -> list[int]:
    """The rule of the file's docstring, by whole forward passes."""
    generator = torch.Generator().manual_seed(options.pop("seed", 0))
    context = getattr(model, "context", 10**9)
    window, given = prompt[-context:], []
    for _ in range(length):
        logits = model(torch.tensor([window]))[:, -1]
        token = int(sample(logits, generator=generator, **options))
        given.append(token)
        window = [*window, token]
        window = window[-keep:] if len(window) > context else window
    return given


def decode(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


# Cached is uncached ---------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [None, 1, 5, 16])
def test_greedy_rows_of_any_length_are_what_each_gives_alone(keep: int | None) -> None:
    model = gpt()
    found = generate(model, PROMPTS, length=50, temperature=0, keep=keep)
    for prompt, row in zip(PROMPTS, found, strict=True):
        assert row.tokens == uncached(model, prompt, 50, keep or 8, temperature=0)
        assert len(set(row.tokens)) > 1


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8, "temperature": 1.3}], ids=str
)
def test_draws_are_those_of_the_uncached_model(options: dict[str, Any]) -> None:
    model = gpt(bias=False, tied=False)
    for seed in (1, 2):
        found = generate(model, [[3, 4]], length=40, seed=seed, **options)[0].tokens
        assert found == uncached(model, [3, 4], 40, 8, seed=seed, **options)


def test_rows_of_equal_length_need_no_mask_and_give_the_same() -> None:
    model = gpt()
    together = generate(model, torch.tensor([[1, 2, 3], [4, 5, 6]]), length=20, temperature=0)
    alone = [generate(model, [row], length=20, temperature=0)[0] for row in ([1, 2, 3], [4, 5, 6])]
    assert together == alone


def test_a_long_prompt_is_cut_to_the_context() -> None:
    model, prompt = gpt(), list(range(29))
    for rows in ([prompt], [[1, 2], prompt]):
        found = generate(model, rows, length=12, temperature=0)[-1].tokens
        assert found == uncached(model, prompt, 12, 8, temperature=0)
        assert found[0] == model(torch.tensor([prompt[-16:]]))[0, -1].argmax()


@pytest.mark.parametrize("kind", ["rnn", "lstm", "gru"])
def test_recurrent_models_generate_by_their_steps(kind: str) -> None:
    model = recurrent(kind)
    found = generate(model, PROMPTS, length=30, temperature=0)
    for prompt, row in zip(PROMPTS, found, strict=True):
        assert row.tokens == uncached(model, prompt, 30, 1, temperature=0)


def test_prefill_and_advance_are_the_forward_pass() -> None:
    model = gpt()
    tokens = torch.randint(0, 29, (3, 12), generator=torch.Generator().manual_seed(1))
    wanted = model(tokens)
    for first in (1, 5, 12):
        logits, cache = model.prefill(tokens[:, :first])
        torch.testing.assert_close(logits, wanted[:, first - 1])
        for place in range(first, 12):
            logits, cache = model.advance(tokens[:, place], cache)
            torch.testing.assert_close(logits, wanted[:, place])
    lengths = torch.tensor([2, 7, 4])
    logits, cache = model.prefill(tokens[:, :7], lengths)
    torch.testing.assert_close(logits, wanted[torch.arange(3), lengths - 1])
    for step in range(5):
        logits, cache = model.advance(tokens[torch.arange(3), lengths + step], cache)
        torch.testing.assert_close(logits, wanted[torch.arange(3), lengths + step])


def test_a_prompt_without_tokens_gives_numbers_and_the_right_next() -> None:
    model = gpt()
    logits, cache = model.prefill(torch.tensor([[1, 2], [7, 7]]), torch.tensor([2, 0]))
    assert logits.isfinite().all()
    logits, _ = model.advance(torch.tensor([3, 4]), cache)
    torch.testing.assert_close(logits[0], model(torch.tensor([[1, 2, 3]]))[0, -1])
    torch.testing.assert_close(logits[1], model(torch.tensor([[4]]))[0, -1])


def test_a_cache_gives_rows_to_beam_search() -> None:
    model = gpt()
    _, cache = model.prefill(torch.tensor([[1, 2, 9], [5, 5, 5]]), torch.tensor([2, 3]))
    found = beam_search(
        model.advance, cache, torch.tensor([3, 4]), beams=4, steps=4, end=0, select=Cache.select
    )
    for row, prefix in enumerate(([1, 2, 3], [5, 5, 5, 4])):
        assert len(found[row]) == 4
        for one in found[row]:
            whole = torch.tensor([[*prefix, *one.tokens]])
            each = model(whole)[0].log_softmax(-1)[len(prefix) - 1 : -1]
            total = each.gather(1, torch.tensor(one.tokens)[:, None]).sum()
            assert one.log_probability == pytest.approx(total.item(), abs=1e-5)


# Where it stops -------------------------------------------------------------------------------


class Fixed:
    """A model whose rows say what they are told to, whatever they read."""

    context = None

    def __init__(self, *rows: str) -> None:
        self.rows = [[LETTERS.index(letter) for letter in row] for row in rows]

    def prefill(self, tokens: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, int]:
        return self.advance(tokens[:, 0], 0)

    def advance(self, tokens: Tensor, cache: int) -> tuple[Tensor, int]:
        logits = torch.zeros(len(self.rows), len(LETTERS))
        for row, letters in enumerate(self.rows):
            logits[row, letters[cache % len(letters)]] = 100.0
        return logits, cache + 1


def test_stop_tokens_end_a_row_and_are_not_given() -> None:
    model = Fixed("hello.world", "yes!no")
    stops = [LETTERS.index("."), LETTERS.index("!")]
    found = generate(model, [[0], [0]], length=9, temperature=0, stop_tokens=stops, decode=decode)
    assert found == [Generated([7, 4, 11, 11, 14], "hello"), Generated([24, 4, 18], "yes")]
    columns = [
        column.tolist() for column in stream(model, [[0], [0]], length=9, temperature=0, stop_tokens=stops)
    ]
    assert [row[1] for row in columns] == [24, 4, 18, NOTHING, NOTHING]


def test_stop_strings_end_a_row_across_tokens_and_are_cut_from_the_text() -> None:
    model = Fixed("one,two,three.", "abcabcabc.")
    found = generate(
        model, [[0], [0]], length=12, temperature=0, stop_strings=["o,t", "bca", "zz"], decode=decode
    )
    assert found[0].text == "one,tw"
    assert decode(found[0].tokens) == "one,two,t"
    assert found[1].text == "a"
    assert decode(found[1].tokens) == "abca"
    assert cut("abcdef", ["de", "bc"]) == "a"
    assert cut("abc", ["x"]) == "abc"
    assert cut("abc", []) == "abc"


def test_prompts_are_no_part_of_a_stop_string_nor_of_the_text() -> None:
    found = generate(Fixed("bcd"), [[0]], length=2, temperature=0, stop_strings=["ab"], decode=decode)
    assert found == [Generated([1, 2], "bc")]


def test_the_length_is_an_upper_bound_and_may_be_zero() -> None:
    assert [len(row.tokens) for row in generate(gpt(), PROMPTS, length=7, seed=0)] == [7, 7, 7]
    assert generate(gpt(), PROMPTS, length=0) == [Generated([])] * 3


def test_columns_come_one_by_one() -> None:
    class Counting(Fixed):
        calls = 0

        def advance(self, tokens: Tensor, cache: int) -> tuple[Tensor, int]:
            self.calls += 1
            return super().advance(tokens, cache)

    model = Counting("abcdef")
    columns = stream(model, [[0]], length=6, temperature=0)
    assert isinstance(columns, Iterator)
    assert model.calls == 0
    assert [next(columns).tolist() for _ in range(2)] == [[0], [1]]
    assert model.calls == 2  # nothing is computed ahead


def test_a_seed_repeats_and_others_differ() -> None:
    rows = [generate(gpt(), [[1]], length=20, seed=seed)[0].tokens for seed in (5, 5, 6)]
    assert rows[0] == rows[1] != rows[2]


def test_the_model_is_in_evaluation_meanwhile_and_as_it_was_afterwards() -> None:
    model = gpt(dropout=0.5).train()
    model.transformer.ln_f.eval()
    before = [part.training for part in model.modules()]
    first = generate(model, [[1]], length=5, temperature=0)
    assert [part.training for part in model.modules()] == before
    assert first == generate(model.eval(), [[1]], length=5, temperature=0)
    columns = stream(model.train(), [[1]], length=5)
    next(columns)
    assert not model.training
    columns.close()  # type: ignore[attr-defined]
    assert model.training


def test_states_of_stepwise_models_are_merged_by_rows() -> None:
    """A state with the rows first, in a nest: the sum of the tokens that a row has read."""

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        total = tokens.unsqueeze(1) if state is None else state[0][0] + tokens.unsqueeze(1)
        logits = torch.full((len(tokens), 100), -9.0).scatter(1, total % 100, 9.0)
        return logits, ((total,), "same for all")

    found = generate(Stepwise(step, rows=0), [[1, 2, 3], [4], [50, 1]], length=3, temperature=0)
    assert [row.tokens for row in found] == [[6, 12, 24], [4, 8, 16], [51, 2, 4]]


# Mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "text"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 of 2 is empty"),
        (torch.zeros(3, dtype=torch.long), {}, "prompt[None]"),
        (torch.zeros(3, 2), {}, "whole numbers"),
        ([[1]], {"keep": 17}, "keep is 17"),
        ([[1]], {"keep": 0}, "keep is 0"),
        ([[1]], {"length": -1}, "length is -1"),
        ([[1]], {"stop_strings": ["x"]}, "stop_strings without decode"),
        ([[1]], {"temperature": -1.0}, "temperature -1.0"),
        ([[1]], {"top_k": 0}, "top_k of 0"),
        ([[1]], {"top_p": 2.0}, "top_p of 2.0"),
    ],
)
def test_wrong_options_are_found_before_anything_is_read(
    prompts: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError) as caught:
        stream(gpt(), prompts, **{"length": 3, **options})
    assert text in str(caught.value)
    assert "expected:" in str(caught.value)


def test_what_cannot_generate_says_so() -> None:
    with pytest.raises(InputError, match="Linear cannot generate"):
        generate(nn.Linear(2, 2), [[1]], length=1)


@pytest.mark.gpu
def test_the_gpu_generates_the_same() -> None:
    model = gpt()
    wanted = generate(model, PROMPTS, length=30, temperature=0)
    assert generate(model.cuda(), PROMPTS, length=30, temperature=0) == wanted
    rows = [generate(model, PROMPTS, length=30, seed=1) for _ in range(2)]
    assert rows[0] == rows[1]
