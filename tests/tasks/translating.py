"""Small encoder-decoders, and pairs for them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from quire.data.batch import Batch
from quire.models.seq2seq import Seq2Seq, Seq2SeqConfig
from quire.models.transformer import Transformer, TransformerConfig
from quire.nn.heads import IGNORE
from quire.tasks.translation import (
    Translation,
    decode,
    log_likelihood,
    unpad,
)

BEGIN, END = 1, 2
WORDS = 5  # of the target: 0, begin, end, 3, 4


def make(
    seed: int = 2, max_length: int = 5, sharpness: float = 6.0, kind: str = "seq2seq", **options: object
) -> Translation:
    torch.manual_seed(seed)
    model: Seq2Seq | Transformer
    if kind == "transformer":
        model = Transformer(
            TransformerConfig(source_vocab=8, target_vocab=WORDS, width=8, heads=2, layers=2, feedforward=9)
        )
    else:
        model = Seq2Seq(Seq2SeqConfig(8, WORDS, width=6, attention_width=4, **options))
        with torch.no_grad():  # choices that depend on what was read
            model.target_embedding.weight.mul_(3)
            model.combine.weight.mul_(4)
    with torch.no_grad():
        model.output.weight.mul_(sharpness)
        model.output.bias.zero_()
    return Translation(model.double(), max_length=max_length).eval()


kinds = pytest.mark.parametrize("kind", ["seq2seq", "transformer"])


def pairs(rows: int = 9, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(1, 8, (rows, 6), generator=generator)
    target = torch.randint(3, WORDS, (rows, 5), generator=generator)
    for row in range(rows):
        source[row, 1 + row % 6 :] = 0
        target[row, row % 5] = END
        target[row, row % 5 + 1 :] = IGNORE
    return Batch({"inputs": source, "target": target}, torch.arange(rows))


def hit_some(task: Translation, batch: Batch) -> Batch:
    """Every third target is what the model decodes."""
    found = decode(task.pairs, batch.inputs, max_length=5)
    target = batch.target.clone()
    for row, tokens in enumerate(unpad(found.tokens, END, keep=True)):
        if row % 3 == 0:
            target[row] = IGNORE
            target[row, : len(tokens)] = torch.tensor(tokens)
    return batch.replace(target=target)


class Table(nn.Module):
    """p(y_l | y_{l−1}) in a table of logits, whatever the source: another model with the same methods."""

    begin, end = BEGIN, END

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        return self.logits[target_in]

    def encode(self, source: Tensor) -> dict[str, object]:
        return {"steps": torch.zeros(len(source)), "parts": [(torch.arange(len(source)), None)]}

    def step(self, tokens: Tensor, state: dict[str, object]) -> tuple[Tensor, dict[str, object]]:
        return self.logits[tokens], {**state, "steps": state["steps"] + 1}


def enumerate_sequences(task: Translation, source: Tensor, length: int) -> dict[tuple[int, ...], float]:
    """log p of every sequence that decoding can give: ended, or cut off at `length`."""
    found: dict[tuple[int, ...], float] = {}
    for n in range(1, length + 1):
        every = [
            tokens
            for tokens in itertools.product(range(WORDS), repeat=n)
            if END not in tokens[:-1] and (tokens[-1] == END or n == length)
        ]
        values = log_likelihood(task.pairs, source.expand(len(every), -1), torch.tensor(every))
        found |= dict(zip(every, values.tolist(), strict=True))
    return found
