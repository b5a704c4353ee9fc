"""Text from a trained language model, in the tokens of its preparation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quire.data.text import TextPreparation, TextStream
from quire.errors import InputError
from quire.models.generate import generate, stream
from quire.tasks.language import LanguageModel


def prompt_tokens(preparation: TextPreparation, prompt: str) -> list[int]:
    """The tokens of a prompt; a character that training did not have is an error that names it."""
    if not prompt:
        raise InputError("an empty prompt", expected="at least one character", fix="--prompt 'The '")
    unknown = preparation.tokeniser.unknown_places(prompt)
    if len(unknown):
        place = int(unknown[0])
        raise InputError(
            f"the character {prompt[place]!r}, number {place + 1} of the prompt",
            expected="characters that the training text has",
            fix="write the prompt without it",
        )
    return [int(token) for token in preparation.tokeniser.encode(prompt)]


def sample_text(
    task: LanguageModel, preparation: TextPreparation, prompts: Sequence[str], *, length: int, **options: Any
) -> list[str]:
    """Each prompt with up to `length` more tokens; options are those of `quire.models.generate.stream`."""
    tokens = [prompt_tokens(preparation, prompt) for prompt in prompts]
    decode = preparation.tokeniser.decode
    found = generate(task.model, tokens, length=length, decode=decode, **options)
    return [prompt + (one.text or "") for prompt, one in zip(prompts, found, strict=True)]


def stream_text(
    task: LanguageModel, preparation: TextPreparation, prompt: str, *, length: int, **options: Any
) -> Iterator[str]:
    """The text after a prompt, in pieces as soon as their characters are complete."""
    decode = preparation.tokeniser.decode
    text = TextStream(preparation.tokeniser)
    prompts = [prompt_tokens(preparation, prompt)]
    for column in stream(task.model, prompts, length=length, decode=decode, **options):
        yield text.push(column.tolist())
