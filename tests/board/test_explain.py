"""What the page explains is what the command prints."""

from __future__ import annotations

import json

import pytest

from quire.board.explain import build, costs, models, shapes
from quire.cli.explain import main
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
    assert shapes("3,224,224") == [(3, 224, 224)]
    assert shapes("5; 7") == [(5,), (7,)]
    with pytest.raises(InputError, match="numbers"):
        build("resnet18", [(3, 100_000, 100_000)], 1)
    with pytest.raises(InputError, match="from 1 to 1024"):
        costs("resnet18", "", 0)
    with pytest.raises(InputError, match="unknown model 'resnet1'"):
        costs("resnet1", "", 1)
