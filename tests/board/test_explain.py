"""What the page explains is what the command prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.board.explain import costs, costs_of_run, models, shapes
from quire.cli.explain import main
from quire.cli.main import main as command
from quire.errors import InputError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "input", "batch"),
    [("resnet20", "3,32,32", 4), ("lenet5", "", 2), ("mlp", "", 2), ("seq2seq", "", 2)],
)
def test_as_the_command_says(capsys: pytest.CaptureFixture[str], model: str, input: str, batch: int) -> None:
    found = costs(model, input, batch)
    shape = input or {"lenet5": "1,32,32"}.get(model, "")
    words = [model, *(["--input", shape] if shape else []), "--batch", str(batch), "--json", "--no-time"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert [layer["parameters"] for layer in found["layers"]] == [
        layer["parameters"] for layer in said["layers"]
    ]
    flops = [layer["forward_flops"] + layer["backward_flops"] for layer in said["layers"]]
    assert [layer["flops"] for layer in found["layers"]] == flops
    assert f"{said['parameters']:,}" in dict(found["totals"])["parameters"]


def test_the_model_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Images of 8×8 in grey, as the data was, and not the 32×32 of the published network."""
    out = tmp_path / "digits"
    assert command(["train", "lenet", "--steps", "1", "--quiet", "--out", str(out)]) == 0
    capsys.readouterr()
    found = costs_of_run(str(out), "", 3)
    assert found["input"] == ["1×8×8"]
    assert main([str(out), "--batch", "3", "--json", "--no-time"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [layer["name"] for layer in found["layers"]] == [layer["name"] for layer in said["layers"]]
    # What the run itself counted when it was trained.
    counted = json.loads((out / "result.json").read_text())["parameters"]
    assert sum(layer["parameters"] for layer in found["layers"]) == counted
    assert f"{counted:,}" in dict(found["totals"])["parameters"]
    with pytest.raises(InputError, match="cannot take a step"):
        costs_of_run(str(out), "5,8,8", 3)


def test_every_model_can_be_picked() -> None:
    known = models()
    assert {"resnet18", "lenet5"} <= set(known["networks"])
    for name in ("autoencoder", "generator", "recurrent", "vae", "lenet5", "resnet20"):
        assert name in (*known["families"], *known["networks"])
        assert costs(name, "", 2)["layers"], name


@pytest.mark.parametrize("text", ["3,x", "-1", "3,,3", "1e9", "3;x", "9" * 20, "1,1,1,1,1,1,1,1", "<b>"])
def test_shapes_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="sizes of one sample"):
        shapes(text)


def test_what_would_not_fit() -> None:
    assert [shape.sizes for shape in shapes("3,224,224")] == [(3, 224, 224)]
    assert shapes("5; 7:int32") == [((5,), ""), ((7,), "int32")]
    with pytest.raises(InputError, match="numbers"):
        costs("resnet18", "3,100000,100000", 1)
    with pytest.raises(InputError, match="in one sample"):
        costs("resnet18", "999999999,999999999,999999999", 1)
    with pytest.raises(InputError, match="from 1 to 1024"):
        costs("resnet18", "", 0)
    with pytest.raises(InputError, match="unknown model 'resnet1'"):
        costs("resnet1", "", 1)
