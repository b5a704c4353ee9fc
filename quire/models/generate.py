"""Text from a model, token by token, for a batch of prompts of any lengths.

A model that generates reads a prompt once and then takes one token at a time:

    logits, cache = model.prefill(tokens, lengths)     (B, T) → (B, V) after each row's last token
    logits, cache = model.advance(tokens, cache)       (B,)   → (B, V)

`Stepwise` makes such a model of anything with `step(tokens (B,), state) → (logits (B, V), state)`, such as
a recurrent network or a decoder that has read its source. Rows are filled up at their end, so that the
first token of each has position 0 and causal attention needs no mask; a row gives what it would give alone.

A model with positions can read no more than `context` tokens at once. A longer prompt is cut to its last
`context` tokens. A row that has filled the context is cut to its last `keep` tokens, which are read again
from position 0: a token is drawn from the last `keep` … `context` ones, and all but one in context − keep
steps come from the cache. With `keep` equal to `context` each token sees as many as possible, and nothing is
saved from there on.

B rows, T tokens of a prompt, V vocabulary, C columns of a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, Unpack

import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional.modes import evaluating
from quire.functional.sampling import filter_logits, sample
from quire.nn.attention import KeyValueCache

NOTHING = -1
"""What a row that has ended gives."""
Prompts = Tensor | Sequence[Sequence[int]]
Decode = Callable[[list[int]], str]


class Generates(Protocol):
    """A model that generates."""

    @property
    def context(self) -> int | None:
        """How many tokens it can read at once; None if any number."""

    def prefill(self, tokens: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        """The logits after the first `lengths` tokens of each row, and the cache for `advance`."""

    def advance(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """The logits after one more token of each row. The cache that came in is used up."""


class Cache:
    """Keys and values of the tokens that each layer has read, for a batch of prompts of any lengths.

    Row b has read the first `lengths[b]` of the prompt's T columns, and all columns behind them. `lengths` is
    None where all rows have read all T, and then nothing has to be masked.
    """

    def __init__(self, layers: int, columns: int, lengths: Tensor | None) -> None:
        self.layers = [KeyValueCache() for _ in range(layers)]
        self.prompt, self.lengths = columns, lengths

    def __len__(self) -> int:
        """Columns, which is the number of tokens of the longest row."""
        return len(self.layers[0])

    def places(self, device: torch.device) -> Tensor:
        """Of each row's next token, (B, 1), or (1,) where it is the same for all."""
        if self.lengths is None:
            return torch.tensor([len(self)], device=device)
        return (self.lengths + (len(self) - self.prompt)).unsqueeze(1)

    def mask(self) -> Tensor | None:
        """(B, 1, 1, C), true at the columns that a row's last token sees."""
        if self.lengths is None:
            return None
        columns = torch.arange(len(self), device=self.lengths.device)
        return ((columns >= self.prompt) | (columns < self.lengths.unsqueeze(1)))[:, None, None]

    def select(self, rows: Tensor) -> Cache:
        """A cache of these rows, some of them several times."""
        lengths = None if self.lengths is None else self.lengths[rows]
        chosen = Cache(0, self.prompt, lengths)
        for layer in self.layers:
            chosen.layers.append(copy(layer))
            chosen.layers[-1].reorder(rows)
        return chosen


class Stepwise:
    """Anything with `step(tokens, state)` as a model that generates, from `state` on.

    `rows` is the dimension of the state's tensors that counts the rows: 1 in torch.nn's recurrent states. A
    state is a tensor or a nest of tuples; whatever else is in it is the same for all rows. Prompts of several
    lengths need a state of one size.
    """

    context = None

    def __init__(
        self, step: Callable[[Tensor, Any], tuple[Tensor, Any]], state: Any = None, rows: int = 1
    ) -> None:
        self.step, self.state, self.rows = step, state, rows

    def prefill(self, tokens: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        logits, state = self.step(tokens[:, 0], self.state)
        for column in range(1, tokens.shape[1]):
            new_logits, new_state = self.step(tokens[:, column], state)
            if lengths is None:
                logits, state = new_logits, new_state
            else:  # rows that are through already stay as they were
                goes_on = column < lengths
                logits = torch.where(goes_on.unsqueeze(1), new_logits, logits)
                state = self._merge(goes_on, new_state, state)
        return logits, state

    def advance(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        return self.step(tokens, cache)

    def _merge(self, choice: Tensor, new: Any, old: Any) -> Any:
        if isinstance(new, Tensor):
            if new.shape != old.shape:
                raise InputError(
                    "prompts of several lengths for a state that grows with each token",
                    expected="prompts of one length",
                    fix="generate for each length by itself",
                )
            shape = [1] * new.dim()
            shape[self.rows] = len(choice)
            return torch.where(choice.view(shape), new, old)
        if isinstance(new, tuple):
            parts = [self._merge(choice, *pair) for pair in zip(new, old, strict=True)]
            return type(new)(*parts) if hasattr(new, "_fields") else tuple(parts)
        return new


# Generating -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generated:
    """What one row gave after its prompt."""

    tokens: list[int]
    """Without a stop token, but with the tokens of a stop string."""
    text: str | None = None
    """The tokens decoded, up to a stop string; None without `decode`."""


class Options(TypedDict, total=False):
    """The options of `stream` that have a default."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None
    stop_tokens: Sequence[int]
    stop_strings: Sequence[str]
    decode: Decode | None
    keep: int | None


def generate(model: Any, prompts: Prompts, *, length: int, **options: Unpack[Options]) -> list[Generated]:
    """Up to `length` tokens after each prompt: all that `stream` gives, row by row."""
    rows: list[list[int]] = [[] for _ in range(len(prompts))]
    for column in stream(model, prompts, length=length, **options):
        for row, token in zip(rows, column.tolist(), strict=True):
            if token != NOTHING:
                row.append(token)
    decode, stops = options.get("decode"), options.get("stop_strings", ())
    return [Generated(row, cut(decode(row), stops) if decode else None) for row in rows]


def stream(
    model: Any,
    prompts: Prompts,
    *,
    length: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_tokens: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    decode: Decode | None = None,
    keep: int | None = None,
) -> Iterator[Tensor]:
    """The next token of each row, one column (B,) at a time, `NOTHING` for rows that have ended.

    A row ends at a stop token, which is not given, after the token that completes a stop string in
    `decode(new tokens of the row)`, or after `length` tokens. Temperature 0 takes the best token. A seed
    makes the draws of a batch repeatable. What `keep` is stands at the top of the file. The model is in
    evaluation while it generates.
    """
    machine = _machine(model)
    rows = _Rows(_read(prompts), machine.context, keep)
    if length < 0:
        raise InputError(f"length is {length}", expected="a number of tokens >= 0", fix="give a length")
    if stop_strings and decode is None:
        raise InputError(
            "stop_strings without decode",
            expected="a function that turns a row's tokens into text",
            fix="give decode=tokenizer.decode",
        )
    filter_logits(torch.zeros(2), temperature=temperature, top_k=top_k, top_p=top_p)  # finds wrong options
    device = _device(model, prompts)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def draw(logits: Tensor) -> Tensor:
        return sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)

    def stops(row: int) -> bool:
        if decode is None or not stop_strings:
            return False
        text = decode(rows.new(row))
        return any(stop in text for stop in stop_strings)

    return _columns(model, machine, rows, length, draw, set(stop_tokens), stops, device)


@torch.no_grad()
def _columns(
    model: Any,
    machine: Generates,
    rows: _Rows,
    length: int,
    draw: Callable[[Tensor], Tensor],
    stop_tokens: set[int],
    stops: Callable[[int], bool],
    device: torch.device,
) -> Iterator[Tensor]:
    drawn, cache, fits = torch.empty(0), None, False
    ended = [False] * len(rows.tokens)
    with evaluating(model):
        for _ in range(length):
            if fits:
                logits, cache = machine.advance(drawn, cache)
            else:
                logits, cache = machine.prefill(*rows.padded(device))
            drawn = draw(logits)
            column = drawn.tolist()
            fits = rows.append(column)
            ended = [before or token in stop_tokens for before, token in zip(ended, column, strict=True)]
            if all(ended):
                return
            given = [NOTHING if end else token for end, token in zip(ended, column, strict=True)]
            yield torch.tensor(given, device=device)
            ended = [before or stops(row) for row, before in enumerate(ended)]
            if all(ended):
                return


def cut(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first of the stop strings."""
    places = [place for stop in stop_strings if (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))]


class _Rows:
    """The tokens of each row, and from where on the model has them."""

    def __init__(self, tokens: list[list[int]], context: int | None, keep: int | None) -> None:
        if context is not None and keep is not None and not 1 <= keep <= context:
            raise InputError(
                f"keep is {keep}", expected=f"1 to {context}, the model's context", fix="leave keep out"
            )
        self.tokens, self.context = tokens, context
        self.keep = keep or max(1, (context or 2) // 2)
        self.prompts = [len(row) for row in tokens]
        self.starts = [0 if context is None else max(0, len(row) - context) for row in tokens]

    def append(self, column: Sequence[int]) -> bool:
        """Whether all rows still fit into the context; those that do not are cut."""
        fits = True
        for row, (tokens, token) in enumerate(zip(self.tokens, column, strict=True)):
            tokens.append(token)
            if self.context is not None and len(tokens) - self.starts[row] > self.context:
                self.starts[row] = len(tokens) - self.keep
                fits = False
        return fits

    def new(self, row: int) -> list[int]:
        return self.tokens[row][self.prompts[row] :]

    def padded(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """(B, T) filled up at the end, and the lengths (B,) if they differ."""
        windows = [tokens[start:] for tokens, start in zip(self.tokens, self.starts, strict=True)]
        lengths = [len(window) for window in windows]
        longest = max(lengths)
        filled = [[*window, *[window[-1]] * (longest - len(window))] for window in windows]
        even = min(lengths) == longest
        return torch.tensor(filled, device=device), None if even else torch.tensor(lengths, device=device)


def _read(prompts: Prompts) -> list[list[int]]:
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2 or prompts.is_floating_point():
            raise InputError(
                f"prompts of shape {tuple(prompts.shape)} and type {prompts.dtype}",
                expected="whole numbers (B, T), or a list of lists of tokens",
                fix="put a single prompt into a batch of one: prompt[None]",
            )
        prompts = prompts.tolist()
    rows = [[int(token) for token in row] for row in prompts]
    empty = [number for number, row in enumerate(rows) if not row]
    if not rows or empty:
        raise InputError(
            f"prompt {empty[0]} of {len(rows)} is empty" if rows else "no prompts",
            expected="at least one token in each prompt",
            fix="begin with the token that separates texts, or with a line break",
        )
    return rows


def _machine(model: Any) -> Generates:
    if hasattr(model, "prefill") and hasattr(model, "advance"):
        machine: Generates = model
        return machine
    if hasattr(model, "step"):
        return Stepwise(model.step)
    raise InputError(
        f"{type(model).__name__} cannot generate",
        expected="a model with prefill and advance, or with step(tokens, state)",
        fix="use a GPT or a recurrent language model",
    )


def _device(model: Any, prompts: Prompts) -> torch.device:
    if isinstance(model, nn.Module) and (parameter := next(model.parameters(), None)) is not None:
        return parameter.device
    return prompts.device if isinstance(prompts, Tensor) else torch.device("cpu")
