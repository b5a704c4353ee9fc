"""`quire explain`: names, families, runs, and functions of the user's in files of theirs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quire.cli import main as command
from quire.cli.explain import main, parse_memory
from quire.cli.main import Command
from quire.cli.objects import typed_object
from quire.errors import InputError
from quire.recipes.outlines import read_shape
from tests.cli.conftest import Quire

pytestmark = pytest.mark.slow

OWN = """
import torch
from dataclasses import dataclass
from part import WIDTH

@dataclass
class Sizes:
    inputs: int = 6

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 2)
    def forward(self, x):
        return self.head(self.embed(x)).mean(1)

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(Sizes().inputs, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))

net = Net()
number = 3
"""


@pytest.fixture(autouse=True)
def explains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(command.COMMANDS, "explain", Command("what a model costs", main))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "part.py").write_text("WIDTH = 5\n")
    sys.modules.pop("part", None)


def explain(quire: Quire, *words: str) -> dict:
    answer = quire("explain", *words, "--no-time", "--json")
    assert answer.code == 0, answer.error
    return json.loads(answer.out)


def test_a_published_network(quire: Quire) -> None:
    found = explain(quire, "resnet18", "--input", "3,224,224", "--batch", "2", "--memory", "2GiB")
    # 11,689,512 parameters are published; 1.814 G products for an image, twice as many operations.
    assert found["parameters"] == 11_689_512
    assert found["forward_flops"] / 2 / 2 == pytest.approx(1.814e9, rel=1e-3)
    shapes = {layer["name"]: layer["output"] for layer in found["layers"]}
    assert shapes["layer4.1.conv2"] == [2, 512, 7, 7]
    fields = {layer["name"]: layer["receptive_field"] for layer in found["layers"]}
    assert fields["layer4.1.conv2"] == [435, 435]
    fit = found["fit"]
    assert fit["peak_bytes"] <= fit["memory"] == 2**31 < fit["next_bytes"]
    assert fit["next_batch"] == fit["batch"] + 1
    assert found["seconds"] is None


def test_options_of_a_network(quire: Quire) -> None:
    few = explain(quire, "resnet20", "--input", "3,32,32", "--set", "num_classes=7")
    assert few["layers"][-3]["output"] == [1, 7]


def test_a_family(quire: Quire) -> None:
    small = explain(quire, "gpt")
    assert small["parameters"] < 1e6
    words = ("--set", "vocab_size=50257", "--input", "1024", "--loss", "cross-entropy")
    assert explain(quire, "gpt", *words)["parameters"] == 124_439_808  # GPT-2's
    wide = explain(quire, "mlp", "--set", "hidden=[9]", "--batch", "3")
    assert wide["layers"][0]["output"] == [3, 9]


@pytest.mark.parametrize("place", ["mine.py", "./mine.py", "mine"])
def test_a_function_of_the_users(quire: Quire, place: str) -> None:
    found = explain(quire, f"{place}:make_model", "--input", "6", "--batch", "10")
    assert found["parameters"] == 6 * 4 + 4 + 4 * 3 + 3
    assert found["forward_flops"] == 2 * 10 * (6 * 4 + 4 * 3)
    sys.modules.pop("mine", None)


def test_classes_objects_and_tokens(quire: Quire, tmp_path: Path) -> None:
    for name in ("Net", "net"):
        found = explain(quire, f"{tmp_path}/mine.py:{name}", "--input", "8")
        assert (found["parameters"], found["input_bytes"]) == (11 * 5 + 5 * 2 + 2, 8 * 8)
    found = explain(quire, "mine.py:net", "--input", "8:int32")
    assert found["input_bytes"] == 8 * 4


def test_the_users_file_leaves_no_trace(tmp_path: Path) -> None:
    path, modules = list(sys.path), set(sys.modules)
    assert typed_object("mine.py:number") == 3
    assert sys.path == path
    assert set(sys.modules) - modules <= {"part"}


def test_the_table(quire: Quire) -> None:
    answer = quire("explain", "mine.py:make_model", "--input", "6", "--memory", "1MB")
    lines = answer.out.splitlines()
    assert lines[0].split()[:4] == ["layer", "kind", "output", "parameters"]
    assert lines[1].split()[:4] == ["0", "Linear", "1×4", "28"]
    assert any(line.startswith("a step       ") and "at best on cpu" in line for line in lines)
    assert lines[-1].startswith("largest batch in 976.6 KiB: ")


def test_a_run(quire: Quire, tmp_path: Path) -> None:
    rows = "".join(f"{a},{-a},{2 * a}\n" for a in range(40))
    (tmp_path / "table.csv").write_text("a,b,y\n" + rows)
    words = ("--data", "table.csv", "--target", "y", "--model.hidden", "16", "--epochs", "1", "--quiet")
    assert quire("train", "mlp", *words, "--out", "runs/one").code == 0
    found = explain(quire, "runs/one", "--batch", "5")
    assert found["layers"][0]["output"] == [5, 16]
    assert found["parameters"] == 2 * 16 + 16 + 16 + 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["resnet152x", "--input", "3,8,8"], "did you mean 'resnet152'?"),
        (["resnet50"], "quire explain resnet50 --input 3,224,224"),
        (["resnet50", "--input", "3,a"], "sizes of one sample"),
        (["resnet50", "--input", "3,224,224:float"], "sizes of one sample"),
        (["resnet50", "--input", "3,224,224", "--batch", "0"], "at least 1"),
        (["resnet50", "--input", "3,224,224", "--memory", "much"], "a size such as 16GiB"),
        (["resnet50", "--input", "4,224,224"], "the model cannot take a step on these inputs"),
        (["resnet50", "--input", "3,224,224", "--set", "num_classes"], "NAME=VALUE"),
        (["mine.py:make_modle", "--input", "6"], "did you mean 'make_model'?"),
        (["mine.py:number", "--input", "6"], "mine.py:number gives int"),
        (["mime.py:make_model", "--input", "6"], "no such file"),
        (["nowhere.at.all:make", "--input", "6"], "ModuleNotFoundError"),
        (["broken.py:make", "--input", "6"], "SyntaxError"),
        (["mine.py:", "--input", "6"], "write the function after a colon"),
        (["mine.py:net", "--input", "6", "--set", "a=1"], "leave --set out"),
        (["runs/none"], "does not exist"),
    ],
)
def test_mistakes(quire: Quire, tmp_path: Path, words: list[str], hint: str) -> None:
    (tmp_path / "broken.py").write_text("def make(:\n")
    answer = quire("explain", *words, "--no-time")
    assert (answer.code, answer.out) == (2, "")
    assert hint in answer.error


def test_a_run_of_pairs_and_one_of_classes(quire: Quire, tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("".join(f"{a} {b}\t{b} {a} .\n" for a in "abcdef" for b in "ghij"))
    words = ("--data", "pairs.tsv", "--steps", "1", "--quiet", "--model.width", "8", "--out", "runs/pairs")
    assert quire("train", "seq2seq", *words).code == 0
    found = explain(quire, "runs/pairs", "--batch", "3")
    assert {layer["output"][0] for layer in found["layers"] if layer["output"]} == {3}
    rows = "".join(f"{a},{-a},{'xyz'[a % 3]}\n" for a in range(40))
    (tmp_path / "table.csv").write_text("a,b,kind\n" + rows)
    words = ("--data", "table.csv", "--target", "kind", "--steps", "1", "--quiet", "--out", "runs/told")
    assert quire("train", "cvae", *words).code == 0
    found = explain(quire, "runs/told", "--batch", "3")
    assert found["input_bytes"] == 3 * 2 * 4 + 3 * 8  # two values and the number of a class


def test_sizes() -> None:
    assert parse_memory("16GiB") == 16 * 2**30
    assert [parse_memory(text) for text in ("800MB", "1.5 GiB", "2g", "77")] == [
        800_000_000, 3 * 2**29, 2_000_000_000, 77,
    ]  # fmt: skip
    assert read_shape("3x8x8") == read_shape("3,8,8") == ((3, 8, 8), "")
    assert read_shape("12:int64") == ((12,), "int64")
    with pytest.raises(InputError):
        read_shape("-3")
