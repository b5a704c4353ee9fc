"""Pictures of what a network on text looks at: its attention, and how alike its learned positions are.

L layers, H heads, T tokens that look (down), S tokens that are looked at (across), P positions, E width.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from torch import Tensor, nn

from quire.data.text import IGNORE, CorpusData, TextData, Tokeniser
from quire.functional.modes import evaluating
from quire.models.gpt import GPT
from quire.models.seq2seq import Seq2Seq
from quire.models.transformer import Transformer, TransformerClassifier
from quire.nn.attention import MultiHeadAttention
from quire.nn.position import LearnedPosition
from quire.recipes.plan import Picture
from quire.report.images import SIGNED
from quire.report.style import figure, plain
from quire.tasks.language import LanguageModel
from quire.tasks.supervised import Supervised
from quire.tasks.translation import Translation, shift_target, unpad

MOST_LAYERS = 4
MOST_HEADS = 4
SQUARE_TOKENS = 18
"""Tokens of a text that looks at itself."""
MOST_TOKENS = 44
"""Tokens of a source; so many labels can still be read across a page."""
MOST_POSITIONS = 256
MOST_LETTERS = 10
"""Of a token's label."""
CANDIDATES = 64
"""Texts among which the one to be shown is chosen."""
WIDTH = 9.4
"""Inches that a page has at most."""
CELL = 0.1
"""Inches of a token, which its label needs."""
SIGNS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}

Array = np.ndarray


class Maps(NamedTuple):
    """Weights (L, H, T, S) of the layers and heads that are shown, and which those are, counted from 1."""

    weights: Array
    layers: list[int]
    heads: list[int]
    total: tuple[int, int]
    """How many layers and heads there are."""

    @classmethod
    def of(cls, weights: Tensor) -> Maps:
        """Of all weights (L, H, T, S): some layers, evenly spread from the first to the last, and the first
        heads."""
        layers, heads = weights.shape[:2]
        shown = np.unique(np.linspace(0, layers - 1, min(layers, MOST_LAYERS)).round().astype(int)).tolist()
        few = list(range(min(heads, MOST_HEADS)))
        kept = weights[shown][:, few].float().cpu().numpy()
        return cls(kept, [i + 1 for i in shown], [i + 1 for i in few], (layers, heads))

    @property
    def said(self) -> str:
        """Which of them are shown, where some are not."""
        layers, heads = self.total
        parts = [
            f"{len(some)} of {count} {name}"
            for some, count, name in ((self.layers, layers, "layers"), (self.heads, heads, "heads"))
            if len(some) < count
        ]
        return f" Shown are {' and '.join(parts)}." if parts else ""


# What recipes call -----------------------------------------------------------------------------


def language_pictures(task: LanguageModel, data: CorpusData) -> Sequence[Picture]:
    """Attention and positions of a GPT on the beginning of the most trusted part; nothing of other models."""
    model = task.model
    if not isinstance(model, GPT):
        return []
    part = (data.test or data.validation or data.train).judged()
    batch = part.take(torch.arange(min(len(part), CANDIDATES)))
    row = liveliest(batch.inputs[:, :SQUARE_TOKENS], batch.target[:, :SQUARE_TOKENS] != IGNORE)
    real = int((batch.target[row] != IGNORE).sum())
    tokens = batch.inputs[row : row + 1, : min(real, SQUARE_TOKENS)].to(task.device)
    with evaluating(model):
        maps = Maps.of(model.attention_maps(tokens)[:, 0])
    labels = token_labels(data.preparation.tokeniser, tokens[0])
    fig = attention_figure(maps, labels, labels, "Attention of each head", "looks at", causal=True)
    caption = (
        "How much each token (down) looks at itself and at those before it (across) to guess the next one; "
        f"what comes later it cannot see.{maps.said}"
    )
    weight = model.transformer.wpe.weight[: data.preparation.length]
    return [
        Picture("attention", "Attention", caption, fig),
        *position_pictures({"of the text": weight}),
    ]


def translation_pictures(task: Translation, data: TextData) -> Sequence[Picture]:
    """What each decoded token looked at in its source, and the learned positions of both sides."""
    model, preparation = task.model, data.preparation
    assert preparation.target_tokeniser is not None
    part = data.test or data.validation or data.train
    row = longest_that_fits(
        part.inputs[:CANDIDATES] != preparation.tokeniser.specials["padding"], MOST_TOKENS
    )
    source = part.inputs[row : row + 1].to(task.device)
    source = source[:, : int((source != preparation.tokeniser.specials["padding"]).sum())]
    if not source.shape[1]:
        return []
    with evaluating(task):
        found = task.predict(source)["tokens"]
        found = found[:, : len(unpad(found, task.pairs.end, keep=True)[0])]
        weights = source_attention(model, source, shift_target(found, task.pairs.begin, task.pairs.end))
    maps = Maps.of(weights[..., :MOST_TOKENS])
    across = token_labels(preparation.tokeniser, source[0, :MOST_TOKENS])
    down = token_labels(preparation.target_tokeniser, found[0])
    fig = attention_figure(maps, down, across, "Attention on the source", "source", ylabel="decoded")
    text = in_words(preparation.tokeniser.decode(source[0]), 120)
    said = in_words(preparation.target_tokeniser.decode(found[0]), 60)
    caption = (
        f"“{text}” became “{said}”: how much each token that was decoded (down) looked at those of the "
        f"source (across).{cut_note(source.shape[1], MOST_TOKENS)}{maps.said}"
    )
    lengths = {"source": preparation.length, "target": preparation.target_length}
    learned = {
        f"of the {side}": weight[: lengths[side]]
        for side in lengths
        if (weight := learned_positions(getattr(model, f"{side}_embedding"))) is not None
    }
    return [Picture("attention", "Attention", caption, fig), *position_pictures(learned)]


def classifier_pictures(task: Supervised, data: TextData) -> Sequence[Picture]:
    """What the tokens of one text look at in each other, where a Transformer reads them."""
    model, tokeniser = task.model, data.preparation.tokeniser
    if not isinstance(model, TransformerClassifier):
        return []
    part = data.test or data.validation or data.train
    row = longest_that_fits(part.inputs[:CANDIDATES] != model.config.padding, SQUARE_TOKENS)
    tokens = part.inputs[row : row + 1].to(task.device)
    tokens = tokens[:, : int((tokens != model.config.padding).sum())]
    if not tokens.shape[1]:
        return []
    with evaluating(task):
        weights = torch.stack(list(watched_attention(model, tokens).values()))[:, 0]
        said = task.predict(tokens)["class"]
    maps = Maps.of(weights[..., :SQUARE_TOKENS, :SQUARE_TOKENS])
    labels = token_labels(tokeniser, tokens[0, :SQUARE_TOKENS])
    fig = attention_figure(maps, labels, labels, "Attention of each head", "looks at")
    truth, guess = data.preparation.decode_classes([int(part.target[row]), int(said)])
    caption = (
        f"How much each token of “{in_words(tokeniser.decode(tokens[0]), 80)}” (down) looks at the others "
        f"(across). The text is of class {in_words(truth)} and was taken for {in_words(guess)}."
        f"{cut_note(tokens.shape[1], SQUARE_TOKENS)}{maps.said}"
    )
    weight = learned_positions(model.embedding)
    learned = {} if weight is None else {"of the text": weight[: data.preparation.length]}
    return [Picture("attention", "Attention", caption, fig), *position_pictures(learned)]


# Numbers --------------------------------------------------------------------------------------


@torch.no_grad()
def watched_attention(model: nn.Module, *inputs: Tensor, ending: str = "") -> dict[str, Tensor]:
    """The weights (B, H, T, S) of each multi-head attention whose name ends so, while the model reads."""
    seen: dict[str, Tensor] = {}
    watches = []
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention) and name.endswith(ending):

            def note(module: MultiHeadAttention, given: tuple[Tensor, ...], options: Mapping[str, Any],
                     name: str = name) -> None:  # fmt: skip
                # Not a call of the module, which would be noted again.
                seen[name] = module.forward(*given, **{**options, "need_weights": True})[1]

            watches.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        model(*inputs)
    finally:
        for watch in watches:
            watch.remove()
    return seen


@torch.no_grad()
def source_attention(model: nn.Module, source: Tensor, target_in: Tensor) -> Tensor:
    """What the decoder looks at in one source: (L, H, T, S); an LSTM's has one layer and one head."""
    if isinstance(model, Transformer):
        return torch.stack([*watched_attention(model, source, target_in, ending="multihead_attn").values()])[
            :, 0
        ]
    assert isinstance(model, Seq2Seq)
    return model.attend(source, target_in)[1][None]


def learned_positions(embedding: nn.Module) -> Tensor | None:
    """The rows (P, E) that an embedding has learned for its places, if it has."""
    position = getattr(embedding, "position", None)
    return position.weight if isinstance(position, LearnedPosition) else None


def liveliest(tokens: Tensor, real: Tensor) -> int:
    """The number of the row with most different real tokens."""
    kinds = [len(set(row[there].tolist())) for row, there in zip(tokens, real, strict=True)]
    return kinds.index(max(kinds))


def longest_that_fits(real: Tensor, most: int) -> int:
    """The number of the longest row with at most so many tokens, or of the shortest if all have more."""
    lengths = real.sum(1)
    fitting = torch.where(lengths <= most, lengths, -lengths)
    return int(fitting.argmax())


def cosine_similarity(rows: Tensor) -> Tensor:
    """cos(r_n, r_m) of each pair: (P, E) → (P, P); 0 where a row has no length."""
    unit = nn.functional.normalize(rows.detach().double(), dim=1)
    return unit @ unit.T


# Labels ---------------------------------------------------------------------------------------


@cache
def _drawn() -> frozenset[int]:
    """The code points that the font of the pictures has."""
    return frozenset(get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap())


def token_label(text: str) -> str:
    """A token as the label of a tick: blanks and breaks as signs; what cannot be drawn, or not alone, by its
    number; long tokens cut."""
    letters = []
    for letter in text:
        if letter in SIGNS:
            letters.append(SIGNS[letter])
        elif unicodedata.category(letter)[0] in "CMZ" or ord(letter) not in _drawn():
            letters.append(ascii(letter)[1:-1])
        else:
            letters.append(letter)
    return plain("".join(letters), MOST_LETTERS)


def token_labels(tokeniser: Tokeniser, tokens: Tensor) -> list[str]:
    return [token_label(tokeniser.token_text(token)) for token in tokens.tolist()]


def in_words(text: object, limit: int = 40) -> str:
    """A user's text for a caption: on one line, its middle cut out beyond `limit`."""
    return plain(text, limit).replace(r"\$", "$")


def cut_note(length: int, most: int) -> str:
    return f" Only the first {most} of {length} tokens are drawn." if length > most else ""


# Drawing --------------------------------------------------------------------------------------


def attention_figure(
    maps: Maps,
    down: Sequence[str],
    across: Sequence[str],
    title: str,
    xlabel: str,
    *,
    ylabel: str = "token",
    causal: bool = False,
) -> Figure:
    """A map for each layer and head, all on one scale of colours; where a token cannot look is left blank."""
    weights = maps.weights
    if causal:
        weights = np.where(np.tri(*weights.shape[2:]) > 0, weights, np.nan)
    names = [(layer, head) for layer in range(len(maps.layers)) for head in range(len(maps.heads))]
    wide, high = max(1.0, CELL * len(across)), max(0.35, CELL * len(down))
    margin = 0.5 + 0.06 * max(map(len, down))
    room = max(1, int((WIDTH - margin - 0.6) // (wide + 0.08)))
    # Heads of a layer stand in one row, or in several that are full.
    columns = max(n for n in range(1, len(maps.heads) + 1) if n <= room and len(maps.heads) % n == 0)
    lines = len(names) // columns
    foot = 0.35 + (0.06 * max(map(len, across)) if any(len(label) > 1 for label in across) else 0.1)
    fig = figure(max(3.2, columns * (wide + 0.08) + margin + 0.6), lines * (high + 0.24) + foot + 0.35)
    grid = fig.subplots(lines, columns, squeeze=False)
    top = float(np.nanmax(weights)) or 1.0
    # A square root shows small weights as well: most are near 1/T, and a few near 1.
    scale = PowerNorm(0.5, vmin=0.0, vmax=top)
    for number, (axes, (layer, head)) in enumerate(zip(grid.flat, names, strict=True)):
        axes.grid(False)
        shown = axes.imshow(weights[layer, head], cmap="viridis", norm=scale, interpolation="nearest",
                            aspect="auto")  # fmt: skip
        axes.set_box_aspect(high / wide)
        if len(names) > 1:
            axes.set_title(f"layer {maps.layers[layer]}, head {maps.heads[head]}", fontsize=8, pad=2)
        last = number // columns == lines - 1
        _tick(axes, across if last else [], down if number % columns == 0 else [])
        if last:
            axes.set_xlabel(xlabel, fontsize=8, labelpad=2)
        if number % columns == 0:
            axes.set_ylabel(ylabel, fontsize=8, labelpad=2)
    bar = fig.colorbar(shown, ax=grid, shrink=min(1.0, 2.4 / (lines * (high + 0.24))), aspect=18, pad=0.02)
    bar.set_label("attention weight", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
    fig.suptitle(title, fontsize=11, x=0.01, ha="left")
    return fig


def _tick(axes: Axes, across: Sequence[str], down: Sequence[str]) -> None:
    upright = all(len(label) <= 1 for label in across)
    axes.set_xticks(range(len(across)), across, fontsize=6.5, rotation=0 if upright else 90)
    axes.set_yticks(range(len(down)), down, fontsize=6.5)
    axes.tick_params(length=0, pad=1.5)


def position_pictures(learned: Mapping[str, Tensor]) -> list[Picture]:
    """One picture of all positions (P, E) that were learned, by what they are of."""
    if not learned:
        return []
    fig = figure(0.9 + 3.1 * len(learned), 3.4)
    grid = fig.subplots(1, len(learned), squeeze=False)[0]
    for axes, (name, rows) in zip(grid, learned.items(), strict=True):
        places = np.linspace(0, len(rows) - 1, min(len(rows), MOST_POSITIONS)).round().astype(int)
        similar = cosine_similarity(rows.detach()[torch.from_numpy(places).to(rows.device)]).cpu().numpy()
        edges = (-0.5, len(rows) - 0.5)
        axes.grid(False)
        shown = axes.imshow(similar, cmap=SIGNED, vmin=-1, vmax=1, extent=(*edges, *edges[::-1]),
                            interpolation="nearest")  # fmt: skip
        axes.set(xlabel="position", ylabel="position")
        axes.set_title(f"Positions {name}", fontsize=9)
    bar = fig.colorbar(shown, ax=grid, shrink=0.8, aspect=18)
    bar.set_label("cosine similarity", fontsize=8.5)
    bar.outline.set_visible(False)
    fig.suptitle("How alike the learned positions are", fontsize=11, x=0.01, ha="left")
    caption = (
        "The cosine of the angle between the vectors that were learned for two places. Where neighbours are "
        "alike, the network has found out which places lie close together."
    )
    return [Picture("positions", "Learned positions", caption, fig)]
