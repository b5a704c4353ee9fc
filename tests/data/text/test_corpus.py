"""Files and folders to the tokens of a language model, in memory and through a memory map."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.data.text import Characters, Corpus, MappedTokens, TextPreparation, load_corpus, open_corpus
from quire.data.text.corpus import bounds
from quire.data.text.files import read_blocks
from quire.errors import DataError, InputError
from quire.options import Text

SHAKESPEARE = Path(__file__).parents[4] / "shared" / "data" / "tinyshakespeare" / "input.txt"
PROSE = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 20


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, size: int, on_bad: str = "refuse") -> str:
    return "".join(block.text for block in read_blocks(path, on_bad, size))


# -- Bytes to text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 5, 7, 1000])
def test_blocks_make_the_text(tmp_path: Path, size: int) -> None:
    text = "a naïve 东京 😀\r\nline\n\nlast without end"
    path = write(tmp_path / "a.txt", text)
    assert read(path, size) == text
    assert read(write(path, b"\xef\xbb\xbf" + text.encode()), size) == text
    lines = [(block.line, block.text) for block in read_blocks(path, "refuse", size)]
    done = ""
    for line, part in lines:
        assert line == done.count("\n") + 1
        done += part


@pytest.mark.parametrize("size", [4, 5, 6, 7, 8, 9, 1000])
def test_bad_bytes_have_a_place(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfgood\nna\xefve 1\n")
    with pytest.raises(DataError) as caught:
        read(path, size)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: bytes that are not UTF-8, at byte 11 of the file")
    assert "--text.on-bad-utf8 replace" in message
    assert "b'\\xef" in message
    assert read(path, size, "replace") == "good\nna\ufffdve 1\n"
    with pytest.raises(DataError, match=r"byte 3 of the file[\s\S]*b'\\xe2\\x82'"):
        read(write(path, b"ab\xe2\x82"), size)


@pytest.mark.parametrize("size", [4, 1000])
def test_zero_bytes_and_other_encodings(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "a.txt", "é\nab\0c".encode())
    with pytest.raises(DataError) as caught:
        read(path, size)
    assert str(caught.value).startswith(f"{path}:2: a zero byte, at byte 6 of the file")
    assert read(path, size, "replace") == "é\nab\ufffdc"
    with pytest.raises(DataError, match="the file is UTF-16"):
        read(write(path, "text".encode("utf-16")), size)
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "none.txt", size)


# -- What there is to read -----------------------------------------------------------------------------


def text_of(corpus: Corpus) -> str:
    return "".join(block.text for block in corpus.blocks())


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b.TXT", "a.txt", ".hidden/x.txt", "code.py", "a/empty.txt"):
        write(tmp_path / name, "" if "empty" in name else f"<{name}>\n")
    corpus = open_corpus(tmp_path, Text())
    assert text_of(corpus) == "<a/b.TXT>\n\n\n<a/z.txt>\n\n\n<a.txt>\n\n\n<b.txt>\n"
    assert corpus.notes[0] == "empty files are left out: a/empty.txt"
    assert "1 of 6 files end otherwise than in .txt and are ignored: code.py" in corpus.notes[1]
    assert text_of(open_corpus(tmp_path, Text(suffixes=(".py",)))) == "<code.py>\n"


def test_lines_are_those_of_the_files(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "abc\n" * 30)
    write(tmp_path / "b.txt", "abc\n" * 3 + "aXc\n")
    with pytest.raises(DataError) as caught:
        load_corpus(tmp_path, Text(context=4, unknown="refuse", validation=0.3, test=0))
    assert str(caught.value).startswith(f"{tmp_path / 'b.txt'}:4: the character 'X' (U+0058) is not in the")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "a.txt: the text is empty"),
        (" \n\n\t", {}, "a.txt: the text is empty"),
        (
            "abc" * 20,
            {"context": 64},
            "a.txt: 48 tokens in the training part\n  expected: at least 65, a con",
        ),
        ("abc" * 20, {"context": 64}, "set --text.context to at most 47"),
        ("ab", {"context": 1}, "a.txt: 1 token in the training part"),
        ("abcdefgh", {"context": 2}, "1 token in the validation part"),
        ("abcdefgh", {"context": 2, "validation": 0.3}, "1 token in the test part"),
        ("abcdefgh", {"context": 2}, "give more text, or set --text.validation to 0"),
        ("x", {"validation": 0.5}, "0 tokens in the training part"),
    ],
)
def test_texts_too_short(tmp_path: Path, content: str, options: dict[str, float], message: str) -> None:
    write(tmp_path / "a.txt", content)
    with pytest.raises(DataError) as caught:
        load_corpus(tmp_path / "a.txt", Text(**options))
    assert message in str(caught.value)


def test_names_that_are_none(tmp_path: Path) -> None:
    write(tmp_path / "novel.txt", PROSE)
    with pytest.raises(
        DataError, match=r"no such file, folder or built-in text[\s\S]*did you mean 'novel.txt'"
    ):
        load_corpus(tmp_path / "nove.txt")
    with pytest.raises(DataError, match="did you mean 'python-reference'"):
        load_corpus("python-referense")
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match="a folder without text files"):
        load_corpus(tmp_path / "photos")
    write(tmp_path / "photos" / "a.md", "x")
    with pytest.raises(DataError, match=r"--text.suffixes, such as \.md"):
        load_corpus(tmp_path / "photos")


# -- Parts ---------------------------------------------------------------------------------------------


def test_parts_follow_each_other() -> None:
    for count in (7, 100, 1003):
        for validation, test in ((0.1, 0.1), (0.1, 0.0), (0.0, 0.2), (0.0, 0.0), (0.3, 0.15)):
            found = bounds(count, Text(validation=validation, test=test))
            assert list(found) == ["train"] + ["validation"] * (validation > 0) + ["test"] * (test > 0)
            ends = [0, *[stop for _, stop in found.values()]]
            assert [start for start, _ in found.values()] == ends[:-1]
            assert ends[-1] == count
            for split, share in (("validation", validation), ("test", test)):
                start, stop = found.get(split, (0, 0))
                assert abs(stop - start - share * count) <= 1.5


def test_tokens_are_the_text(tmp_path: Path) -> None:
    for kind in ("characters", "bytes", "bpe"):
        options = Text(tokens=kind, vocabulary=280, context=16)
        data = load_corpus(write(tmp_path / "a.txt", PROSE), options)
        tokeniser = data.preparation.tokeniser
        parts = {name: getattr(data, name) for name in ("train", "validation", "test")}
        texts = {name: tokeniser.decode(part.tokens.values) for name, part in parts.items()}
        cuts = bounds(len(PROSE), options)
        assert texts == {name: PROSE[start:stop] for name, (start, stop) in cuts.items()}
        assert data.first["test"] == len(data.train.tokens.values) + len(data.validation.tokens.values)
        assert data.lines("validation").tolist() == [
            data.first["validation"] + 16 * i for i in range(len(parts["validation"]))
        ]
        assert len(data.lines("train")) == len(data.train)
        assert data.source == str(tmp_path / "a.txt")


def test_the_vocabulary_is_that_of_the_training_part(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "ab\n" * 30 + "zy\n" * 3)
    data = load_corpus(path, Text(context=4, test=0))
    assert data.preparation.tokeniser == Characters("\nab", ("unknown",), "replace")
    assert data.warnings == (
        "6 characters of the validation part that training does not have are replaced by the token for "
        f"unknown ones: the character 'z' (U+007A) in line 31 of {path} is the first",
    )
    assert data.validation is not None
    assert (data.validation.take(torch.arange(1)).inputs == 3).any()
    skipping = load_corpus(path, Text(context=4, test=0, unknown="skip"))
    assert skipping.preparation.tokeniser.vocab_size == 3
    assert len(skipping.validation.tokens) == len(data.validation.tokens) - 6
    assert "are left out" in skipping.warnings[0]


def test_an_older_tokeniser_is_taken_over(tmp_path: Path) -> None:
    older = load_corpus(write(tmp_path / "a.txt", PROSE), Text(context=8)).preparation
    data = load_corpus(write(tmp_path / "b.txt", "April clocks!\n" * 20), Text(context=4), like=older)
    assert data.preparation.tokeniser == older.tokeniser
    assert "20 characters" not in data.warnings[0]
    assert "16 characters of the training part" in data.warnings[0]


def test_built_in_reference() -> None:
    data = load_corpus("python-reference", Text(context=32))
    text = data.preparation.tokeniser.decode(data.train.tokens.values)
    assert len(text) > 300_000
    assert text.startswith('The "assert" statement')
    assert 'The "if" statement' in text
    assert data.source == "python-reference (built in)"
    whole = text_of(open_corpus("python-reference", Text()))
    assert text_of(open_corpus("python-reference", Text())) == whole


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="the text is not here")
def test_the_usual_split_of_tiny_shakespeare() -> None:
    data = load_corpus(SHAKESPEARE, Text(test=0, context=256))
    text = SHAKESPEARE.read_text()
    assert len(data.train) == int(0.9 * len(text)) - 256
    alphabet = sorted(set(text))  # all 65 are in the training part
    assert data.preparation.tokeniser.encode(text[:1000]) == [alphabet.index(c) for c in text[:1000]]
    assert data.validation is not None
    assert len(data.validation) == math.ceil((len(text) - int(0.9 * len(text)) - 1) / 256)
    batch = data.train.take(torch.tensor([12345]))
    assert batch.inputs[0].tolist() == [alphabet.index(c) for c in text[12345 : 12345 + 256]]
    assert batch.target[0].tolist() == [alphabet.index(c) for c in text[12346 : 12346 + 256]]


# -- Larger than memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["characters", "bytes", "bpe"])
def test_a_memory_map_equals_memory(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "texts" / "a.txt", PROSE)
    write(tmp_path / "texts" / "b.txt", "Down the rabbit-hole, naïve 😀.\n" * 40)
    plain = Text(tokens=kind, vocabulary=270, context=12)
    expected = load_corpus(tmp_path / "texts", plain)
    # Small blocks: what is read in pieces has to come to the same tokens.
    monkeypatch.setattr("quire.data.text.files.read_blocks.__defaults__", ("refuse", 50))
    small = Text(tokens=kind, vocabulary=270, context=12, memory=1e-6)
    for cache in (tmp_path / "cache", None):
        data = load_corpus(tmp_path / "texts", small, cache=cache)
        assert isinstance(data.train.tokens, MappedTokens)
        assert isinstance(data.train.tokens.values, np.memmap)
        assert data.preparation == expected.preparation
        for split in ("train", "validation", "test"):
            one, other = getattr(data, split), getattr(expected, split)
            rows = torch.randperm(len(one))
            assert len(one) == len(other)
            for a, b in zip(one.batches(rows, 16), other.batches(rows, 16), strict=True):
                assert a.inputs.equal(b.inputs)
                assert a.target.equal(b.target)
    assert len(list((tmp_path / "texts.tokens").iterdir())) == 2


def test_a_token_file_is_written_once_and_verified(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "a.txt", PROSE), tmp_path / "cache"
    options = Text(context=8, memory=1e-6, cache=cache)
    first = load_corpus(path, options)
    (binary,), (description,) = cache.glob("*.bin"), cache.glob("*.json")
    entry = json.loads(description.read_text())
    assert (entry["format"], entry["bytes"], sum(entry["counts"].values())) == ("quire.tokens", 2, len(PROSE))
    assert binary.stat().st_size == 2 * len(PROSE)
    before = binary.stat().st_mtime_ns
    assert load_corpus(path, options).preparation == first.preparation
    assert binary.stat().st_mtime_ns == before

    content, expected = binary.read_bytes(), first.train.take(torch.arange(50)).inputs
    for damage in (bytes([content[0] ^ 1]) + content[1:], content[:-2], b""):
        binary.write_bytes(damage)
        again = load_corpus(path, options)
        assert again.train.take(torch.arange(50)).inputs.equal(expected)
        assert binary.read_bytes() == content
    for broken in ("", "{}", "[]", description.read_text().replace('"quire.tokens"', '"other"')):
        description.write_text(broken)
        assert load_corpus(path, options).preparation == first.preparation

    write(path, PROSE.replace("thirteen", "fourteen"))
    changed = load_corpus(path, options)
    assert "fourteen" in changed.preparation.tokeniser.decode(
        changed.train.take(torch.tensor([64])).inputs[0]
    ) + (changed.preparation.tokeniser.decode(changed.train.tokens.values))
    assert len(list(cache.iterdir())) == 4
    load_corpus(path, Text(context=16, memory=1e-6, cache=cache))
    assert len(list(cache.iterdir())) == 4  # a context changes no token
    load_corpus(path, Text(context=8, memory=1e-6, cache=cache, validation=0.2))
    assert len(list(cache.iterdir())) == 6


def test_notes_are_kept_in_the_token_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "ab\n" * 30 + "zy\n" * 3)
    options = Text(context=4, test=0, memory=1e-7, cache=tmp_path / "cache")
    assert load_corpus(path, options).warnings == load_corpus(path, options).warnings != ()


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", PROSE)
    write(tmp_path / "file", "x")
    with pytest.raises(DataError, match=r"larger than --text.memory cannot be written[\s\S]*--text.cache"):
        load_corpus(path, Text(memory=1e-6), cache=tmp_path / "file" / "below")
    with pytest.raises(InputError, match="lies in the folder of the text"):
        load_corpus(path.parent, Text(memory=1e-6), cache=tmp_path / "cache")
    bad = write(tmp_path / "bad.txt", b"\xff" + PROSE.encode())
    with pytest.raises(DataError, match="not UTF-8"):
        load_corpus(bad, Text(memory=1e-6), cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DataError, match="is not in the training part"):
        load_corpus(
            write(path, "ab" * 300 + "é"), Text(memory=1e-7, unknown="refuse"), cache=tmp_path / "cache"
        )
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_very_long_text_has_its_windows_further_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.txt", PROSE)
    monkeypatch.setattr("quire.data.text.language.MOST_ROWS", 100)
    data = load_corpus(path, Text(context=20))
    length = len(data.train.tokens)
    assert data.train.stride == math.ceil((length - 20) / 100)
    assert len(data.train) <= 100
    assert "each 12th token" in data.warnings[0]


def test_streams_of_a_part(tmp_path: Path) -> None:
    data = load_corpus(write(tmp_path / "a.txt", PROSE), Text(context=8, test=0))
    streams = data.streams("train", 4)
    assert streams is not None
    first, second = list(streams.batches(torch.arange(8), 4))
    decode = data.preparation.tokeniser.decode
    assert decode(first.inputs[0]) + decode(second.inputs[0]) == PROSE[:16]
    assert data.streams("test", 4) is None


# -- The preparation -----------------------------------------------------------------------------------


def test_saved_and_applied_to_another_text(tmp_path: Path) -> None:
    data = load_corpus(write(tmp_path / "a.txt", PROSE), Text(context=8))
    entry = json.loads(json.dumps(data.preparation.to_json()))
    preparation = TextPreparation.from_json(entry)
    assert preparation == data.preparation
    assert entry["format"] == "quire.text"
    other = write(tmp_path / "b.txt", "April clocks, Zoë\n")
    prepared = preparation.transform(preparation.read(other))
    assert prepared.lines.tolist() == [0, 8, 16]
    text = preparation.decode(prepared.data.take(torch.arange(3)).inputs)
    assert "".join(text)[:18] == "April clocks, \ufffdo\ufffd\n"
    assert prepared.notes == (
        "2 characters of the text that training does not have are replaced by the token for unknown ones: "
        f"the character 'Z' (U+005A) in line 1 of {other} is the first",
    )
    assert (preparation.targets, preparation.feature_names) == ((), [])
    with pytest.raises(InputError, match="text of kind 'language' has no classes"):
        _ = preparation.target
    with pytest.raises(DataError, match="a text of 1 tokens"):
        preparation.transform(preparation.read(write(other, "A")))
    with pytest.raises(DataError, match="the text is empty"):
        preparation.transform(preparation.read(write(other, "")))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "speech"},
        {"length": 0},
        {"length": 8.0},
        {"target_length": 3},
        {"tokeniser": None},
        {"tokeniser": {"kind": "characters"}},
        {"column": {"path": "x"}},
        {"targets": [{"name": "x"}]},
    ],
    ids=str,
)
def test_damaged_preparations(tmp_path: Path, change: dict[str, object]) -> None:
    entry = load_corpus(write(tmp_path / "a.txt", PROSE), Text(context=8)).preparation.to_json()
    with pytest.raises(InputError, match="damaged"):
        TextPreparation.from_json(entry | change)
    for other in ({"version": 2}, {"format": "quire.images"}):
        with pytest.raises(InputError, match="a preparation of format"):
            TextPreparation.from_json(entry | other)
