"""Text to tokens and back, for each kind of token."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quire.data.text import BytePairs, Bytes, Characters, Tokeniser, tokeniser_from_json, train_byte_pairs
from quire.data.text.bytepairs import cut
from quire.data.text.vocabulary import find_alphabet, fit_tokeniser, small_note
from quire.errors import InputError
from quire.options import Text

SAMPLE = (
    "The cat sat on the mat.\nThe naïve café — 东京 😀 — sat on the hat, too;  two  spaces\tand tabs.\r\n" * 3
)
SPECIALS = ("padding", "begin", "end")
BPE = train_byte_pairs([SAMPLE], 300, SPECIALS)
EVERY = {
    "characters": Characters(find_alphabet([SAMPLE]), (*SPECIALS, "unknown"), "replace"),
    "bytes": Bytes(SPECIALS),
    "bpe": BPE,
}
words = st.text(st.sampled_from(sorted(set(SAMPLE))), max_size=60)
anything = st.text(max_size=40) | words


@pytest.fixture(params=EVERY, ids=str)
def tokeniser(request: pytest.FixtureRequest) -> Tokeniser:
    return EVERY[request.param]


@settings(max_examples=60, deadline=None)
@given(text=words)
def test_decoding_undoes_encoding(text: str) -> None:
    for tokeniser in EVERY.values():
        tokens = tokeniser.encode(text)
        assert tokeniser.decode(tokens) == text
        assert all(0 <= token < tokeniser.vocab_size for token in tokens)


@settings(max_examples=60, deadline=None)
@given(text=anything)
def test_bytes_and_byte_pairs_know_every_text(text: str) -> None:
    assert EVERY["bytes"].encode(text) == list(text.encode())
    for kind in ("bytes", "bpe"):
        assert EVERY[kind].decode(EVERY[kind].encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(text=words, data=st.data())
def test_a_stream_says_what_is_complete_and_nothing_broken(text: str, data: st.DataObject) -> None:
    for tokeniser in EVERY.values():
        tokens, stream, said, done = tokeniser.encode(text), tokeniser.stream(), "", 0
        while done < len(tokens):
            size = data.draw(st.integers(1, 4))
            said += stream.push(tokens[done : done + size])
            done += size
            known = b"".join(tokeniser.pieces[token] for token in tokens[:done])
            # What is held back is less than one character, and what is said is never a broken one.
            assert text.startswith(said)
            assert len(known) - len(said.encode()) < 4
        assert said + stream.finish() == text


def test_a_character_comes_whole_or_not_at_all() -> None:
    stream = Bytes().stream()
    first, *middle, last = "😀".encode()
    assert [stream.push(first), stream.push(middle), stream.push(last)] == ["", "", "😀"]
    stream.push(first)
    assert stream.finish() == "\ufffd"
    assert Bytes().decode([0xE2, 0x82, ord("x")]) == "\ufffdx"


def test_characters_are_numbered_in_order() -> None:
    tokeniser = Characters("abcé")
    assert tokeniser.encode("écab") == [3, 2, 0, 1]
    assert tokeniser.encode("") == []
    assert (tokeniser.vocab_size, tokeniser.specials) == (4, {})
    assert find_alphabet(["cab", "", "bé"]) == "abcé"


def test_special_tokens_stand_beside_the_text(tokeniser: Tokeniser) -> None:
    ordinary = len(tokeniser.pieces)
    names = ["padding", "begin", "end"] + ["unknown"] * (tokeniser.kind == "characters")
    assert tokeniser.specials == {name: ordinary + i for i, name in enumerate(names)}
    assert tokeniser.vocab_size == ordinary + len(names)
    begin, end, padding = (tokeniser.specials[name] for name in ("begin", "end", "padding"))
    tokens = tokeniser.encode("the cat")
    assert tokeniser.decode([begin, *tokens, -100, padding, end, *tokens]) == "the cat"
    stream = tokeniser.stream()
    assert [stream.push([*tokens, end]), stream.ended, stream.push(tokens)] == ["the cat", True, ""]
    assert tokeniser.decode(torch.tensor([begin, *tokens])) == "the cat"
    assert tokeniser.decode(np.array(tokens)) == "the cat"
    assert [tokeniser.token_text(t) for t in (begin, end, padding)] == ["<begin>", "<end>", "<padding>"]
    assert max(tokeniser.encode("<begin><end><|endoftext|>"), default=0) < ordinary + len(names)
    assert not {begin, end, padding} & set(tokeniser.encode("<begin> <end> <padding>"))
    with pytest.raises(
        InputError, match=rf"token {tokeniser.vocab_size}\b[\s\S]*below {tokeniser.vocab_size}"
    ):
        tokeniser.decode([tokeniser.vocab_size])


def test_unknown_characters() -> None:
    refusing = Characters("\n abc", policy="refuse")
    with pytest.raises(InputError) as caught:
        refusing.encode("abß")
    assert str(caught.value).startswith(
        "the character 'ß' (U+00DF) at character 3 was not in the training text"
    )
    with pytest.raises(InputError, match=r"'Z' \(U\+005A\) in line 2, at character 4, was not"):
        refusing.encode("ab\na bZ")
    with pytest.raises(InputError, match=r"\(U\+10FFFF\) at character 1"):
        refusing.encode("\U0010ffff")
    assert refusing.unknown_places("aXbY").tolist() == [1, 3]
    assert Characters("abc", policy="skip").encode("aXbYc") == [0, 1, 2]
    replacing = Characters("abc", ("unknown",), "replace")
    assert replacing.encode("aXb") == [0, 3, 1]
    assert replacing.decode([0, 3, 1]) == "a\ufffdb"
    assert replacing.stream().push([3]) == "\ufffd"
    for kind in ("bytes", "bpe"):
        with pytest.raises(InputError, match=r"U\+D800\) at character 2 is no character"):
            EVERY[kind].encode("a\ud800")


def test_byte_pairs_join_what_stands_together_most() -> None:
    """By hand: a stands before b five times, then ab before ab twice and before a once."""
    tokeniser = train_byte_pairs(["abab\nabab\nabac"], 258)
    assert tokeniser.pieces[256:] == (b"ab", b"abab")
    pieces = [tokeniser.pieces[token] for token in tokeniser.encode("ababac cab")]
    assert pieces == [b"abab", b"a", b"c", b" ", b"c", b"ab"]


def test_byte_pairs_are_the_librarys_own() -> None:
    """Its decoder, and its encoding of the text as a whole, are the oracle."""
    library = Tokenizer.from_str(BPE.model)
    text = (SAMPLE + "x  \n\n y\u00a0z\u2028 ") * 40
    tokens = BPE.encode(text)
    assert tokens == library.encode(text).ids
    assert BPE.decode(tokens) == library.decode(tokens) == text
    assert train_byte_pairs([SAMPLE], 300, SPECIALS) == BPE


@settings(max_examples=80, deadline=None)
@given(text=st.text(st.sampled_from("ab1,' \n\t\u00a0é"), max_size=80), size=st.integers(1, 30))
def test_cuts_do_not_change_tokens(text: str, size: int) -> None:
    parts = list(cut(text, size))
    assert "".join(parts) == text
    assert all(0 < len(part) <= size for part in parts)
    library = Tokenizer.from_str(BPE.model)
    if all(part[0] in " \t\n" and not before[-1].isspace() for before, part in pairwise(parts)):
        assert [t for part in parts for t in library.encode(part).ids] == library.encode(text).ids


def test_a_long_text_is_cut_only_where_it_may_be() -> None:
    text = "word another\n\n  third " * 50
    for before, after in pairwise(cut(text, 40)):
        assert after[0].isspace()
        assert not before[-1].isspace()
    assert list(cut("x" * 25, 10)) == ["x" * 10, "x" * 10, "x" * 5]


def test_saved_and_read_again(tokeniser: Tokeniser) -> None:
    again = tokeniser_from_json(json.loads(json.dumps(tokeniser.to_json())))
    assert again == tokeniser
    assert again.encode(SAMPLE) == tokeniser.encode(SAMPLE)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "os.system"},
        {"kind": None},
        {"specials": ["padding", "padding"]},
        {"specials": ["eval"]},
        {"alphabet": "ba"},
        {"alphabet": ""},
        {"policy": "guess"},
        {"policy": "skip"},
    ],
    ids=str,
)
def test_a_damaged_tokeniser_is_refused(change: dict[str, object]) -> None:
    entry = EVERY["characters"].to_json() | change
    with pytest.raises(InputError, match="damaged tokeniser"):
        tokeniser_from_json(entry)


@pytest.mark.parametrize("model", ["", "{}", "[]", '{"model": {"type": "BPE"}}'])
def test_damaged_byte_pairs_are_refused(model: str) -> None:
    with pytest.raises(InputError, match="damaged tokeniser"):
        tokeniser_from_json({"kind": "bpe", "model": model, "specials": []})
    entry = json.loads(BPE.model)
    for broken in (
        {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
        {**entry["model"], "merges": ["a"]},
    ):
        with pytest.raises(InputError, match="damaged tokeniser"):
            tokeniser_from_json(
                {"kind": "bpe", "model": json.dumps(entry | {"model": broken}), "specials": []}
            )


def test_tokenisers_of_the_options() -> None:
    assert fit_tokeniser(["ab"], Text(tokens="bytes"), ("padding",)) == Bytes(("padding",))
    assert fit_tokeniser(["ba"], Text(unknown="refuse")) == Characters("ab")
    assert fit_tokeniser(["ba"], Text(), ("end",)) == Characters("ab", ("end", "unknown"), "replace")
    small = fit_tokeniser(["ab ab"], Text(tokens="bpe", vocabulary=400))
    assert isinstance(small, BytePairs)
    assert small_note(small, Text(tokens="bpe", vocabulary=400)) == [
        "the training text gives 258 tokens; --text.vocabulary asks for 400"
    ]
    assert small_note(BPE, Text(tokens="bpe", vocabulary=300)) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": "words"}, "--text.tokens is 'words'"),
        ({"vocabulary": 200}, "--text.vocabulary is 200"),
        ({"context": 0}, "--text.context is 0"),
        ({"suffixes": ("txt",)}, "--text.suffixes"),
        ({"suffixes": ()}, "--text.suffixes"),
        ({"unknown": "guess"}, "--text.unknown is 'guess'"),
        ({"on_bad_utf8": "skip"}, "--text.on_bad_utf8 is 'skip'"),
        ({"validation": 0.5, "test": 0.5}, "--text.validation + --text.test is 1.0"),
        ({"memory": 0}, "--text.memory is 0"),
        ({"length": 0}, "--text.length is 0"),
    ],
)
def test_wrong_options(values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Text(**values)
    assert message in str(caught.value)
