"""Samples of a trained model in the form of the user's own data: text, images, rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from quire.data.columns import Label
from quire.data.images import ImagePreparation
from quire.data.loaded import Prepares
from quire.data.preparation import Preparation
from quire.data.text import TextPreparation, TextStream
from quire.data.undo import rows_in_units
from quire.errors import InputError, unknown_name
from quire.models.generate import generate, stream
from quire.tasks.generating import Generates
from quire.tasks.language import LanguageModel
from quire.train.task import Task


def opening(preparation: TextPreparation) -> str:
    """What a text begins with where nobody says it: a line break, or what is next to it in a text without."""
    tokeniser = preparation.tokeniser
    usual = (sign for sign in ("\n", " ") if not len(tokeniser.unknown_places(sign)))
    return next(usual, None) or tokeniser.decode([0])


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


@dataclass(frozen=True, eq=False)
class Made:
    """New images or rows."""

    images: np.ndarray | None = None
    """(N, C, H, W) uint8."""
    rows: pa.Table | None = None
    """In the columns and units of the training file, with the class where it could be asked for."""
    labels: tuple[Label, ...] | None = None
    """The class that each was made of; None for a model without classes."""


def sample_data(
    task: Task, preparation: Prepares, count: int, *, label: Label | None, temperature: float, seed: int
) -> Made:
    """What `Generates.sample` gives, in the user's own form. `label` is a class by its own name."""
    assert isinstance(task, Generates)
    numbers = asked_numbers(task, preparation, count, label)
    made = task.sample(count, numbers, temperature, seed).cpu()
    labels = None if numbers is None else tuple(preparation.decode_classes(numbers))
    if isinstance(preparation, ImagePreparation):
        if made.dtype != torch.uint8:  # rows of a task that knows no images: shares of 255
            made = (255 * made).round().clamp(0, 255).to(torch.uint8)
        return Made(images=made.view(-1, preparation.channels, *preparation.size).numpy(), labels=labels)
    assert isinstance(preparation, Preparation)
    rows = rows_in_units(preparation, made)
    if labels is not None:
        rows = rows.append_column(preparation.target.name, pa.array(labels))
    return Made(rows=rows, labels=labels)


def asked_numbers(task: Task, preparation: Prepares, count: int, label: Label | None) -> list[int] | None:
    """Class numbers of samples: that of this name, or all classes in turn; None without classes."""
    if not task.needs_target:
        if label is not None:
            raise InputError(
                f"label {str(label)!r} for a model that was made without classes",
                expected="no label: this model knows one distribution only",
                fix="leave it out, or train a conditional model: 'quire train cvae', 'quire train cgan'",
            )
        return None
    names = [str(one) for one in preparation.target.classes]
    if label is None:
        return [number % len(names) for number in range(count)]
    if str(label) not in names:
        raise unknown_name("class", str(label), names)
    return [names.index(str(label))] * count
