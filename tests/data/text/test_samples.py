"""Pairs and labelled texts: read, split, padded."""

from __future__ import annotations

import datetime
import json
import math
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from quire.data.text import LABELLED, PAIRS, TextData, TextPreparation, load_labelled, load_pairs
from quire.data.text.numbers import MONTHS, date_forms, dates, number_words, numbers, ordinal
from quire.errors import DataError, InputError
from quire.options import Text

SPLITS = ("train", "validation", "test")


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def part(data: TextData, split: str) -> dict[str, torch.Tensor]:
    return getattr(data, split).fields


# -- Pairs ---------------------------------------------------------------------------------------------


def pairs_file(path: Path, count: int = 40) -> Path:
    return write(path, "".join(f"{'x' * (i % 5 + 1)}{i}\t{i}{'y' * (i % 3)}\n" for i in range(count)))


def test_pairs_are_tokens_of_both_sides(tmp_path: Path) -> None:
    data = load_pairs(pairs_file(tmp_path / "a.tsv"), seed=3)
    preparation = data.preparation
    source, target = preparation.tokeniser, preparation.target_tokeniser
    assert target is not None
    assert source.pieces == tuple(c.encode() for c in "0123456789x")
    assert set(source.specials) == set(target.specials) == {"padding", "begin", "end", "unknown"}
    assert (preparation.length, preparation.target_length) == (7, 5)
    lines = (tmp_path / "a.tsv").read_text().splitlines()
    seen: list[int] = []
    for split in SPLITS:
        fields = part(data, split)
        assert fields["inputs"].shape == (len(data.lines(split)), 7)
        for i, line in enumerate(data.lines(split)):
            text, answer = lines[line - 1].split("\t")
            padded = source.encode(text) + [source.specials["padding"]] * (7 - len(text))
            assert fields["inputs"][i].tolist() == padded
            ended = [*target.encode(answer), target.specials["end"]]
            assert fields["target"][i].tolist() == ended + [-100] * (5 - len(ended))
            assert fields["lengths"][i] == len(text)
            assert preparation.decode(fields["target"][i : i + 1]) == [answer]
        seen += data.lines(split).tolist()
    assert sorted(seen) == list(range(1, 41))
    assert {split: len(getattr(data, split)) for split in SPLITS} == {"train": 32, "validation": 4, "test": 4}
    assert data.lines("train").tolist() != load_pairs(tmp_path / "a.tsv", seed=4).lines("train").tolist()
    assert load_pairs(tmp_path / "a.tsv", Text(validation=0, test=0)).validation is None


def test_the_same_source_is_in_one_part_alone(tmp_path: Path) -> None:
    write(tmp_path / "a.tsv", "".join(f"{i % 12}\t{i}\n" for i in range(60)))
    data = load_pairs(tmp_path / "a.tsv", Text(validation=0.2, test=0.2))
    texts = [set(data.samples[split].texts) for split in SPLITS]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 12
    assert data.warnings[0] == "48 sources have another target before, the first in line 13"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tb\nc d\n", "a.tsv:2: a line of 1 column\n  expected: two: source, a tab, target"),
        ("a\tb\nc\td\te\n", "a.tsv:2: a line of 3 columns"),
        ("a\tb\n\n\td\n", "a.tsv:3:1: an empty source"),
        ("a\tb\nc\t \n", "a.tsv:2:2: an empty target"),
        ("\n\n", "a.tsv: the text is empty"),
        ("a\tb\n", "a.tsv: 1 different texts for 3 parts"),
        (b"a\tb\nc\t\xff\n", "a.tsv:2: bytes that are not UTF-8, at byte 7"),
    ],
    ids=str,
)
def test_pairs_that_are_none(tmp_path: Path, content: str | bytes, message: str) -> None:
    write(tmp_path / "a.tsv", content)
    with pytest.raises(DataError) as caught:
        load_pairs(tmp_path / "a.tsv")
    assert message in str(caught.value)
    assert "--table" not in str(caught.value)


def test_what_is_no_file_of_pairs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a folder"):
        load_pairs(tmp_path)
    with pytest.raises(DataError, match="did you mean 'dates'"):
        load_pairs("date")


def test_long_pairs_are_left_out(tmp_path: Path) -> None:
    path = pairs_file(tmp_path / "a.tsv")
    data = load_pairs(path, Text(length=4))
    lines = path.read_text().splitlines()
    short = [i for i, line in enumerate(lines, 1) if max(map(len, line.split("\t"))) <= 4]
    assert sorted(np.concatenate([data.lines(split) for split in SPLITS])) == short
    assert (data.preparation.length, data.preparation.target_length) == (4, 5)
    first = next(i for i in range(1, 41) if i not in short)
    note = (
        f"{40 - len(short)} of 40 pairs are longer than --text.length 4 and are left out, the first in line "
    )
    assert data.warnings == (f"{note}{first}",)
    with pytest.raises(DataError, match="no training pair is left"):
        load_pairs(path, Text(length=1))


def test_pairs_to_predict_on(tmp_path: Path) -> None:
    data = load_pairs(pairs_file(tmp_path / "a.tsv"))
    preparation = TextPreparation.from_json(json.loads(json.dumps(data.preparation.to_json())))
    assert preparation == data.preparation
    plain = write(tmp_path / "b.txt", "x1\r\n\nx2?x3xxxx\n")
    prepared = preparation.transform(preparation.read(plain))
    assert prepared.lines.tolist() == [1, 3]
    assert set(prepared.data.fields) == {"inputs", "lengths"}
    assert prepared.data.fields["lengths"].tolist() == [2, 7]
    assert len(prepared.notes) == 2
    assert "1 characters of the texts that training does not have are replaced" in prepared.notes[0]
    assert "'?' (U+003F) in line 3" in prepared.notes[0]
    assert prepared.notes[1].startswith(
        "1 of 2 texts are longer than 7 tokens and are cut there, the first in"
    )
    with pytest.raises(DataError, match="lines without a target"):
        preparation.transform(preparation.read(plain), need_target=True)
    whole = preparation.transform(preparation.read(tmp_path / "a.tsv"), need_target=True).data.take(
        torch.arange(40)
    )
    where = torch.from_numpy(data.lines("test")) - 1
    assert whole.target[where].equal(part(data, "test")["target"])
    longer = write(tmp_path / "c.tsv", "x1\t1yyyyyyyy\n")
    fields = preparation.transform(preparation.read(longer), need_target=True).data.fields
    assert preparation.decode(fields["target"]) == ["1yyyyyyyy"]
    with pytest.raises(DataError, match=r"b.txt:2: a line of 2 columns\n  expected: 1, as in line 1"):
        preparation.read(write(plain, "x1\nx2\t2\n"))


def test_pairs_of_bytes_and_byte_pairs(tmp_path: Path) -> None:
    for tokens in ("bytes", "bpe"):
        data = load_pairs(pairs_file(tmp_path / "a.tsv"), Text(tokens=tokens, vocabulary=260))
        answers = data.samples["test"].answers
        assert answers is not None
        assert data.preparation.decode(part(data, "test")["target"]) == answers.tolist()
    older = data.preparation
    again = load_pairs(write(tmp_path / "b.tsv", "ab\tcd\n" * 3 + "b\td\na\tc\nc\te\n"), like=older)
    assert (again.preparation.tokeniser, again.preparation.length) == (older.tokeniser, older.length)


def test_number_words() -> None:
    known = {
        0: "zero", 7: "seven", 13: "thirteen", 20: "twenty", 42: "forty-two", 100: "one hundred",
        342: "three hundred forty-two", 1000: "one thousand", 90_017: "ninety thousand seventeen",
        999_999: "nine hundred ninety-nine thousand nine hundred ninety-nine",
    }  # fmt: skip
    assert {number: number_words(number) for number in known} == known
    with pytest.raises(ValueError, match="1000000"):
        number_words(10**6)
    cases = numbers()
    assert sorted(int(digits) for _, digits, _ in cases) == list(range(1, 10_000))
    assert cases == numbers() != numbers(seed=1)
    wide = [int(digits) for _, digits, _ in numbers(600, digits=6)]
    assert len(set(wide)) == 600
    assert max(wide) > 100_000 > 9 >= min(wide)


def test_dates_leave_no_doubt() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 31)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "23rd", "31st"]
    )
    assert date_forms(datetime.date(1999, 5, 3))[:2] == ["the 3rd of May, 1999", "May 3, 1999"]
    assert date_forms(datetime.date(1999, 5, 25))[-1] == "25/5/1999"
    assert not any("/" in form for form in date_forms(datetime.date(1999, 5, 12)))
    meaning: dict[str, str] = {}
    for words, written, group in dates(4000, seed=2):
        assert meaning.setdefault(words, written) == written == group
        date = datetime.date.fromisoformat(written)
        found = [int(number) for number in re.findall(r"\d+", words)]
        month = [i for i, name in enumerate(MONTHS, 1) if name[:3] in words] or [date.month]
        assert {date.day, date.year} <= set(found)
        assert month == [date.month]
    assert len(meaning) == 4000


@pytest.mark.parametrize("name", PAIRS)
def test_built_in_pairs_are_tested_on_what_was_never_seen(name: str) -> None:
    data = load_pairs(name)
    groups = [set(data.samples[split].groups) for split in SPLITS]
    assert sum(map(len, groups)) == len(set.union(*groups)) == len(PAIRS[name]())
    assert len(groups[2]) == pytest.approx(0.1 * len(PAIRS[name]()), abs=1)
    assert data.warnings == ()
    decoded = data.preparation.decode(part(data, "test")["target"][:50])
    assert decoded == data.samples["test"].answers[:50].tolist()


# -- Labelled texts ------------------------------------------------------------------------------------


def labelled_csv(path: Path, count: int = 60, header: str = "id,review,stars\n") -> Path:
    rows = [f'{i},"good, {"very " * (i % 7)}number {i}",{"good" if i % 3 else "bad"}\n' for i in range(count)]
    return write(path, header + "".join(rows))


def test_a_table_with_texts_and_labels(tmp_path: Path) -> None:
    data = load_labelled(labelled_csv(tmp_path / "a.csv"), seed=1)
    assert data.classes == ["bad", "good"]
    assert data.preparation.target.name == "stars"
    assert data.preparation.column is not None
    assert (data.preparation.column.name, data.preparation.column.position) == ("review", 1)
    tokeniser = data.preparation.tokeniser
    assert set(tokeniser.specials) == {"padding", "unknown"}
    length = data.preparation.length
    for split in SPLITS:
        fields = part(data, split)
        for i, line in enumerate(data.lines(split)):
            number = line - 2
            text = f"good, {'very ' * (number % 7)}number {number}"
            assert tokeniser.decode(fields["inputs"][i]) == text[:length]
            assert fields["lengths"][i] == min(len(text), length)
            assert fields["target"][i] == int(number % 3 > 0)
    shares = [part(data, split)["target"].double().mean() for split in SPLITS]
    assert all(abs(share - 2 / 3) < 0.01 for share in shares)


def test_texts_are_cut_where_most_have_ended(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv", "text,label\n" + "".join(f"{'x' * i},{'ab'[i % 2]}\n" for i in range(1, 41))
    )
    data = load_labelled(path, Text(validation=0, test=0))
    assert data.preparation.length == 38  # of the lengths 1 … 40
    assert data.warnings == (
        "the texts are in 'text', the labels in 'label'; --text.column and --text.label name others",
        "2 of 40 texts are longer than 38 tokens and are cut there, the first in line 40",
    )
    split = load_labelled(path, Text(validation=0.25, test=0.25), seed=1)
    training = sorted(map(len, split.samples["train"].texts))
    assert split.preparation.length == training[math.ceil(0.95 * len(training)) - 1]
    short = load_labelled(path, Text(length=5))
    assert part(short, "train")["inputs"].shape == (len(short.train), 5)


def test_columns_by_name_and_by_position(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.tsv",
        "kind\tlong text that is not meant\tshort\n"
        + "".join(f"{'ab'[i % 2]}\t{'word ' * 9}{i}\tx{i}\n" for i in range(30)),
    )
    data = load_labelled(path, Text(column="short", label="kind"))
    assert data.samples["train"].texts[0].startswith("x")
    assert data.classes == ["a", "b"]
    assert load_labelled(path, Text(label="1")).preparation.column.position == 1
    with pytest.raises(DataError, match="missing column 'shor', named by the target"):
        load_labelled(path, Text(column="shor"))
    with pytest.raises(DataError, match="the column 'kind' for the texts and for the labels"):
        load_labelled(path, Text(column="kind", label="kind"))


def test_parquet_and_numbers_as_labels(tmp_path: Path) -> None:
    table = pa.table({"text": [f"text {i}" for i in range(30)], "label": [i % 3 for i in range(30)]})
    pq.write_table(table, tmp_path / "a.parquet")
    data = load_labelled(tmp_path / "a.parquet")
    assert data.classes == [0, 1, 2]
    numbers_only = pa.table({"a": [1.0, 2.0, 3.0] * 9, "label": ["x", "y", "z"] * 9})
    pq.write_table(numbers_only, tmp_path / "b.parquet")
    with pytest.raises(DataError, match="no column of text beside the labels"):
        load_labelled(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="values of type double"):
        load_labelled(tmp_path / "b.parquet", Text(column="a"))


def test_a_last_column_of_numbers_is_no_column_of_labels(tmp_path: Path) -> None:
    rows = "".join(f"{'ab'[i % 2]},text {i},{i / 7}\n" for i in range(30))
    path = write(tmp_path / "a.csv", "label,text,score\n" + rows)
    with pytest.raises(DataError) as caught:
        load_labelled(path)
    assert str(caught.value) == (
        f"{path}:score: another label in each of 30 rows\n  expected: classes with several texts each\n"
        "  fix: name the column of the labels with --text.label"
    )
    named = load_labelled(path, Text(label="label", column="text"))
    assert named.classes == ["a", "b"]
    assert not any("--text.label" in note for note in named.warnings)


def test_labels_and_texts_that_are_missing(tmp_path: Path) -> None:
    rows = [f"text {i},{'ab'[i % 2]}" for i in range(30)]
    rows[3], rows[8] = "text 3,", '"  ",a'
    data = load_labelled(write(tmp_path / "a.csv", "text,label\n" + "\n".join(rows) + "\n"))
    assert data.warnings[1] == "1 of 30 rows have no target and are left out, the first in line 5"
    assert data.warnings[2] == "1 of 29 texts are empty and are left out, the first in line 10"
    one = write(tmp_path / "b.csv", "text,label\n" + "".join(f"text {i},a\n" for i in range(9)))
    with pytest.raises(DataError, match="one class only: 'a'"):
        load_labelled(one)
    with pytest.raises(DataError, match="every text is empty"):
        load_labelled(write(one, "text,label\n" + " ,a\n ,b\n"), Text(column="text"))
    with pytest.raises(DataError, match="texts without labels"):
        load_labelled(write(tmp_path / "c.txt", "one\ntwo\n"))


def test_the_same_text_is_in_one_part_alone(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv", "text,label\n" + "".join(f"text {i % 20},{'ab'[i % 2]}\n" for i in range(80))
    )
    data = load_labelled(path, Text(validation=0.2, test=0.2))
    texts = [set(data.samples[split].texts) for split in SPLITS]
    assert sum(map(len, texts)) == 20
    assert all(texts)


def class_folders(root: Path, folders: list[str], count: int = 12) -> Path:
    for folder in folders:
        for i in range(count):
            write(root / folder / f"{i:02}.txt", f"{folder} number {i}")
    return root


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    data = load_labelled(class_folders(tmp_path, ["neg", "pos", "pos/more"]))
    assert data.classes == ["neg", "pos"]
    assert len(data.train) + len(data.validation) + len(data.test) == 36
    for name, code in zip(data.lines("train"), data.train.target.tolist(), strict=True):
        assert name.startswith(data.classes[code])
    write(tmp_path / "pos" / "notes.md", "x")
    assert load_labelled(tmp_path).warnings[0].startswith("1 files end otherwise than in .txt")
    with pytest.raises(DataError, match="a folder without text files"):
        load_labelled(tmp_path, Text(suffixes=(".rst",)))
    write(tmp_path / "pos" / "bad.txt", b"\xff")
    with pytest.raises(DataError, match=r"bad.txt:1: bytes that are not UTF-8"):
        load_labelled(tmp_path)


def test_parts_of_their_own(tmp_path: Path) -> None:
    class_folders(tmp_path, ["train/neg", "train/pos", "test/neg", "test/pos"])
    write(tmp_path / "test" / "neg" / "00.txt", "train/neg number 0")
    data = load_labelled(tmp_path, Text(validation=0.25))
    assert [len(data.samples[split]) for split in SPLITS] == [18, 6, 24]
    assert all(name.startswith("test/") for name in data.lines("test"))
    kept = "train/neg number 0" in set(data.samples["train"].texts)
    note = "1 test texts are in the training part as well, the first being test/neg/00.txt"
    assert (note in data.warnings) == kept
    write(tmp_path / "test" / "new" / "a.txt", "new")
    with pytest.raises(DataError, match="no training text of class 'new'"):
        load_labelled(tmp_path)
    write(tmp_path / "train" / "loose.txt", "x")
    with pytest.raises(DataError, match="a text file beside the folders of the classes"):
        load_labelled(tmp_path)


def test_labelled_texts_to_predict_on(tmp_path: Path) -> None:
    data = load_labelled(labelled_csv(tmp_path / "a.csv"))
    preparation = TextPreparation.from_json(json.loads(json.dumps(data.preparation.to_json())))
    assert preparation == data.preparation
    whole = preparation.transform(preparation.read(tmp_path / "a.csv"), need_target=True)
    rows = torch.from_numpy(data.lines("test")) - 2
    for name in ("inputs", "lengths", "target"):
        assert whole.data.fields[name][rows].equal(part(data, "test")[name])
    other = write(tmp_path / "b.csv", "stars,review\nbad,good number\nworse,good\n")
    with pytest.raises(DataError) as caught:
        preparation.transform(preparation.read(other), need_target=True)
    assert str(caught.value).startswith(f"{other}:3: a class that was not in training (value 'worse')")
    assert "one of bad, good" in str(caught.value)
    assert len(preparation.transform(preparation.read(other)).data) == 2
    lines = write(tmp_path / "c.txt", "good\n\n very ÿ \n")
    prepared = preparation.transform(preparation.read(lines))
    assert prepared.lines.tolist() == [1, 3]
    assert preparation.decode(prepared.data.take(torch.arange(2)).inputs) == ["good", "very \ufffd"]
    alone = write(tmp_path / "d.csv", 'review\n"good, very"\n""\n')
    prepared = preparation.transform(preparation.read(alone))
    assert prepared.data.fields["lengths"].tolist() == [10, 0]
    padding = preparation.tokeniser.specials["padding"]
    assert (prepared.data.take(torch.tensor([1])).inputs == padding).all()
    renamed = preparation.transform(preparation.read(write(alone, "words\ngood\nvery\n")))
    assert preparation.decode(renamed.data.take(torch.arange(2)).inputs) == ["good", "very"]
    with pytest.raises(DataError, match="missing column 'review', named by the training table"):
        preparation.read(write(alone, "text,other\na,b\nc,d\n"))
    with pytest.raises(DataError, match="texts without labels"):
        preparation.transform(preparation.read(lines), need_target=True)
    assert preparation.decode_classes(torch.tensor([1, 0])) == ["good", "bad"]
    taken = load_labelled(labelled_csv(tmp_path / "e.csv", 30), like=preparation)
    assert (taken.preparation.tokeniser, taken.preparation.length) == (
        preparation.tokeniser,
        preparation.length,
    )


def test_tables_without_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "".join(f"{'ab'[i % 2]},text number {i}\n" for i in range(30)))
    data = load_labelled(path, Text(label="1"))
    preparation = data.preparation
    assert preparation.column is not None
    assert not preparation.column.named
    assert data.classes == ["a", "b"]
    same = preparation.transform(preparation.read(path), need_target=True)
    assert len(same.data) == 30
    wide = write(tmp_path / "b.csv", "1,2,3\n4,5,6\n")
    with pytest.raises(DataError, match="a table of 3 columns"):
        preparation.read(wide)


@pytest.mark.parametrize("tokens", ["bytes", "bpe"])
def test_other_tokens_of_labelled_texts(tmp_path: Path, tokens: str) -> None:
    data = load_labelled(labelled_csv(tmp_path / "a.csv"), Text(tokens=tokens, length=200))
    assert data.preparation.decode(data.train.inputs) == data.samples["train"].texts.tolist()


def test_unknown_characters_are_refused_with_their_line(tmp_path: Path) -> None:
    rows = [f"text {i},{'ab'[i % 2]}" for i in range(40)]
    rows[12] = "tXt 12,a"
    path = write(tmp_path / "a.csv", "text,label\n" + "\n".join(rows) + "\n")
    for seed in range(40):
        data = load_labelled(path, seed=seed)
        if 14 not in data.lines("train"):
            break
    with pytest.raises(DataError) as caught:
        load_labelled(path, Text(unknown="refuse"), seed=seed)
    assert str(caught.value).startswith(f"{path}:14: the character 'X' (U+0058) is not in the training part")
    assert part(load_labelled(path, Text(unknown="skip"), seed=seed), "train")["inputs"].shape[1] >= 6


@pytest.mark.parametrize("name", LABELLED)
def test_built_in_texts_are_split_by_where_they_come_from(name: str) -> None:
    data = load_labelled(name)
    assert len(data.classes) >= 3
    groups = [set(data.samples[split].groups) for split in SPLITS]
    texts = [set(data.samples[split].texts) for split in SPLITS]
    for found in (groups, texts):
        assert sum(map(len, found)) == len(set.union(*found))
    assert sum(map(len, texts)) >= 3000
    for split in SPLITS:
        assert set(part(data, split)["target"].tolist()) == set(range(len(data.classes)))
    assert LABELLED[name]() == LABELLED[name]()


def test_a_damaged_preparation_of_labelled_texts(tmp_path: Path) -> None:
    entry = load_labelled(labelled_csv(tmp_path / "a.csv")).preparation.to_json()
    for change in ({"targets": []}, {"kind": "pairs"}, {"kind": "language"}, {"warnings": None}):
        with pytest.raises(InputError, match="damaged preparation"):
            TextPreparation.from_json(entry | change)
