"""Pictures of attention and positions: the numbers in them, their labels, and where there are none."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from quire.data.text import Bytes, load_corpus, load_labelled, load_pairs
from quire.models.gpt import GPT, GPTConfig
from quire.models.recurrent import RecurrentLM, RecurrentLMConfig
from quire.models.seq2seq import Seq2Seq, Seq2SeqConfig
from quire.models.transformer import (
    Transformer,
    TransformerClassifier,
    TransformerClassifierConfig,
    TransformerConfig,
)
from quire.nn.heads import Categorical
from quire.options import Text
from quire.recipes import reading
from quire.recipes.sequences import vocabularies
from quire.report.pictures import embed
from quire.report.style import to_svg
from quire.tasks.language import LanguageModel
from quire.tasks.supervised import Supervised
from quire.tasks.translation import Translation
from tests.recipes.examples import write_labelled, write_pairs, write_text

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"width": 16, "heads": 2, "layers": 2, "feedforward": 24}


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (" ", "␣"),
        ("\n", "↵"),
        ("\t", "⇥"),
        (" the", "␣the"),
        ("é", "é"),
        ("ж", "ж"),
        ("中", "\\u4e2d"),  # the font has no such letter
        ("\u0301", "\\u0301"),  # an accent needs a letter to stand on
        ("\u00a0", "\\xa0"),  # a blank that could not be told from nothing
        ("\x07", "\\x07"),
        ("\x7f", "\\x7f"),
        ("$", "\\$"),  # no mathematics
        ("abcdefghijklmnop", "abcdef…nop"),
    ],
)
def test_labels_of_tokens_can_be_seen(text: str, label: str) -> None:
    assert reading.token_label(text) == label


def test_bytes_that_are_no_letters_are_shown_by_their_numbers() -> None:
    tokens = torch.tensor(list("a中".encode()))
    assert reading.token_labels(Bytes(), tokens) == ["a", "\\xe4", "\\xb8", "\\xad"]


def maps(layers: int, heads: int, rows: int, columns: int) -> tuple[Tensor, reading.Maps]:
    weights = torch.rand(layers, heads, rows, columns)
    return weights, reading.Maps.of(weights)


def test_of_many_layers_the_first_and_the_last_are_among_those_shown() -> None:
    weights, chosen = maps(12, 6, 3, 3)
    assert (chosen.layers, chosen.heads) == ([1, 5, 8, 12], [1, 2, 3, 4])
    for i, layer in enumerate(chosen.layers):
        for j, head in enumerate(chosen.heads):
            np.testing.assert_array_equal(chosen.weights[i, j], weights[layer - 1, head - 1])
    assert chosen.said == " Shown are 4 of 12 layers and 4 of 6 heads."
    assert maps(4, 4, 2, 2)[1].said == ""


def seen(fig: Figure) -> list[Any]:
    """The axes that hold a map."""
    return [axes for axes in fig.axes if axes.images and axes.get_label() != "<colorbar>"]


def ticks(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_a_causal_map_is_blank_above_its_diagonal_and_labelled_on_both_axes() -> None:
    weights, chosen = maps(2, 3, 4, 4)
    labels = ["a", "b", "␣", "↵"]
    fig = reading.attention_figure(chosen, labels, labels, "Attention", "looks at", causal=True)
    axes = seen(fig)
    assert [one.get_title() for one in axes] == [f"layer {i}, head {j}" for i in (1, 2) for j in (1, 2, 3)]
    for one, values in zip(axes, weights.flatten(0, 1), strict=True):
        drawn = np.ma.filled(one.images[0].get_array().astype(float), np.nan)
        np.testing.assert_array_equal(drawn, np.where(np.tri(4) > 0, values, np.nan))
    assert ticks(axes[0].yaxis) == ticks(axes[3].yaxis) == ticks(axes[5].xaxis) == labels
    assert ticks(axes[1].yaxis) == ticks(axes[0].xaxis) == []
    assert {one.images[0].norm.vmax for one in axes} == {np.float32(weights.tril().max()).item()}


@pytest.mark.parametrize("tokens", [1, 18, 44])
def test_maps_of_any_size_are_drawn_without_a_missing_letter(tokens: int) -> None:
    """To pixels, where a letter that the font lacks is a warning."""
    labels = [reading.token_label(text) for text in ["日本", "a\u0301", "$x$ ", "\u200b"] * 11][:tokens]
    fig = reading.attention_figure(maps(2, 4, 3, tokens)[1], labels[:3] * 3, labels, "Attention", "source")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fig.savefig(io.BytesIO(), format="png")
    assert embed(to_svg(fig), "attention.svg", "a picture")[0].startswith("<svg")


def test_watched_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    model = TransformerClassifier(TransformerClassifierConfig(vocab_size=9, num_classes=2, **SMALL)).eval()
    tokens = torch.randint(1, 9, (1, 5))
    found = reading.watched_attention(model, tokens)
    assert list(found) == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    theirs = nn.MultiheadAttention(16, 2, batch_first=True)
    theirs.load_state_dict(model.get_submodule("encoder.layers.0.self_attn").state_dict())
    x = model.get_submodule("encoder.layers.0.norm1")(model.embedding(tokens))
    wanted = theirs(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(found["encoder.layers.0.self_attn"], wanted)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_attention_on_the_source_is_that_of_every_layer_of_the_decoder() -> None:
    torch.manual_seed(0)
    sizes = {"source_vocab": 8, "target_vocab": 7}
    transformer = Transformer(TransformerConfig(**sizes, **SMALL)).eval()
    lstm = Seq2Seq(Seq2SeqConfig(**sizes, width=8, attention_width=5)).eval()
    source, target = torch.randint(1, 8, (1, 6)), torch.randint(7, (1, 4))
    found = reading.source_attention(transformer, source, target)
    assert found.shape == (2, 2, 4, 6)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 2, 4))
    torch.testing.assert_close(found[-1].mean(0), transformer.attend(source, target)[1][0])
    found = reading.source_attention(lstm, source, target)
    assert found.shape == (1, 1, 4, 6)
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 1, 4))


def test_similarity_of_positions_is_the_cosine() -> None:
    rows = torch.tensor([[1.0, 0.0], [2.0, 2.0], [-3.0, 0.0], [0.0, 0.0]])
    half = 0.5**0.5
    wanted = [[1, half, -1, 0], [half, 1, -half, 0], [-1, -half, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(reading.cosine_similarity(rows), wanted, atol=1e-12)
    (picture,) = reading.position_pictures({"of the text": rows})
    (axes,) = seen(picture.figure)
    np.testing.assert_allclose(axes.images[0].get_array(), wanted, atol=1e-12)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("position", "position")


def test_the_text_that_is_shown_fits_or_is_the_shortest() -> None:
    lengths = torch.tensor([3, 9, 7, 12])
    real = torch.arange(12) < lengths[:, None]
    assert reading.longest_that_fits(real, 8) == 2
    assert reading.longest_that_fits(real, 2) == 0
    tokens = torch.tensor([[1, 1, 1, 1], [1, 2, 3, 4], [1, 2, 1, 2]])
    hidden = torch.tensor([[True] * 4, [True, False, False, False], [True] * 4])
    assert reading.liveliest(tokens, torch.ones(3, 4, dtype=torch.bool)) == 1
    assert reading.liveliest(tokens, hidden) == 2


# Whole pictures -------------------------------------------------------------------------------


def test_pictures_of_a_language_model(tmp_path: Path) -> None:
    data = load_corpus(write_text(tmp_path / "mine.txt"), Text(context=16))
    size = data.preparation.tokeniser.vocab_size
    model = GPT(GPTConfig(size, 32, 2, 2, 8, dropout=0.5))
    attention, positions = reading.language_pictures(LanguageModel(model), data)
    assert (attention.name, positions.name) == ("attention", "positions")
    axes = seen(attention.figure)
    assert len(axes) == 4
    text = "".join(ticks(axes[0].yaxis)).replace("␣", " ").replace("↵", "\n")
    assert len(text) == 16
    assert text in (tmp_path / "mine.txt").read_text()
    tokens = torch.from_numpy(data.preparation.tokeniser.encode_array(text)).long()[None]
    drawn = [np.ma.filled(one.images[0].get_array(), 0) for one in axes]
    wanted = model.eval().attention_maps(tokens)[:, 0].flatten(0, 1)
    np.testing.assert_allclose(drawn, wanted, rtol=1e-5, atol=1e-7)
    # Of 32 places the text has 16: what was never trained is not shown.
    assert seen(positions.figure)[0].images[0].get_array().shape == (16, 16)
    rnn = RecurrentLM(RecurrentLMConfig(size, "rnn", 8))
    assert reading.language_pictures(LanguageModel(rnn), data) == []


@pytest.mark.parametrize("kind", ["transformer", "learned", "seq2seq"])
def test_pictures_of_a_translation(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    data = load_pairs(write_pairs(tmp_path / "mine.txt"), Text())
    words = vocabularies(data)
    model: nn.Module = Seq2Seq(Seq2SeqConfig(width=8, attention_width=4, dropout=0.5, **words))
    if kind != "seq2seq":
        positions = "learned" if kind == "learned" else "sinusoidal"
        model = Transformer(TransformerConfig(**words, **SMALL, dropout=0.5, positions=positions))
    task = Translation(model, max_length=6)
    attention, *others = reading.translation_pictures(task, data)
    axes = seen(attention.figure)
    assert len(axes) == (1 if kind == "seq2seq" else 4)
    source, said = "".join(ticks(axes[-1].xaxis)), ticks(axes[0].yaxis)
    letters = "".join(label for label in said if len(label) == 1)  # padding and the end are no letters
    assert f"“{source}” became “{letters}”" in attention.caption
    tokens = torch.from_numpy(data.preparation.tokeniser.encode_array(source)).long()[None]
    found = task.eval().predict(tokens)
    assert data.preparation.target_tokeniser is not None
    assert reading.token_labels(data.preparation.target_tokeniser, found["tokens"][0]) == said
    read = torch.cat([torch.tensor([[words["begin"]]]), found["tokens"][:, :-1]], 1)
    wanted = reading.source_attention(model, tokens, read).flatten(0, 1)
    for one, weights in zip(axes, wanted, strict=True):
        np.testing.assert_allclose(one.images[0].get_array(), weights, rtol=1e-5, atol=1e-7)
    assert [picture.name for picture in others] == (["positions"] if kind == "learned" else [])
    for picture, axes in [(picture, seen(picture.figure)) for picture in others]:
        sizes = [data.preparation.length, data.preparation.target_length]
        assert [one.images[0].get_array().shape for one in axes] == [(n, n) for n in sizes], picture.name


def test_pictures_of_a_text_classifier(tmp_path: Path) -> None:
    data = load_labelled(write_labelled(tmp_path / "mine.csv"), Text(validation=0.2, test=0.2))
    size = data.preparation.tokeniser.vocab_size
    padding = data.preparation.tokeniser.specials["padding"]
    model = TransformerClassifier(
        TransformerClassifierConfig(vocab_size=size, num_classes=3, padding=padding, **SMALL)
    )
    (attention,) = reading.classifier_pictures(Supervised(model, Categorical(3)), data)
    axes = seen(attention.figure)
    assert len(axes) == 4
    for one in axes:
        np.testing.assert_allclose(one.images[0].get_array().sum(1), 1, rtol=1e-5)
    text = "".join(ticks(axes[0].yaxis)).replace("␣", " ")
    assert f"“{text}”" in attention.caption
    assert f"{text},many" in (tmp_path / "mine.csv").read_text()
    assert " of class many " in attention.caption
