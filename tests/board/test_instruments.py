"""The numbers of the instruments, against what a second way of computing says."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from quire.board.instruments import INSTRUMENTS, answer
from quire.board.instruments.base import Choice
from quire.board.instruments.kmeans import SWEEPS
from quire.errors import InputError

pytestmark = pytest.mark.slow


def marks(name: str, **given: Any) -> dict[str, dict[str, Any]]:
    """Title of a plot and name of a mark to the mark; of equal names the first."""
    found = answer(name, INSTRUMENTS[name].read({key: str(value) for key, value in given.items()}))
    named: dict[str, dict[str, Any]] = {}
    for plot in found["plots"]:
        for mark in plot["marks"]:
            named.setdefault(f"{plot['title']}: {mark['name']}", mark)
    return named


@pytest.mark.parametrize("name", list(INSTRUMENTS))
def test_each_end_of_each_control_answers(name: str) -> None:
    one = INSTRUMENTS[name]
    settings: list[dict[str, str]] = [{}]
    for control in one.controls:
        ends = control.choices if isinstance(control, Choice) else (control.least, control.most)
        settings += [{control.name: str(end)} for end in ends]
    for given in settings:
        found = answer(name, one.read(given))
        json.dumps(found, allow_nan=False)
        assert found["plots"]
        for plot in found["plots"]:
            for mark in plot["marks"]:
                assert len(mark["x"]) == len(mark["y"])
                assert not mark["group"] or len(mark["group"]) == len(mark["x"])
                assert len({len(row) for row in mark["tiles"]}) <= 1


@pytest.mark.parametrize(
    "given", [{"value": "9"}, {"value": "x"}, {"top_k": "2.5"}, {"top_k": "nan"}, {"x": "1"}]
)
def test_values_out_of_range_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(InputError):
        INSTRUMENTS["temperature"].read(given)
    with pytest.raises(InputError, match="one of sigmoid, tanh"):
        INSTRUMENTS["activations"].read({"activation": "__class__"})


@pytest.mark.parametrize("step", [0.05, 0.9, 1.1])
def test_step_size_against_the_recursion(step: float) -> None:
    found = marks("step-size", step_size=step, condition=20)
    eigenvalues, turn = np.array([0.1, 2.0]), math.pi / 6
    axes = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    alpha = axes.T @ np.array([1.6, 1.4])
    energies = [
        float((eigenvalues * ((1 - step * eigenvalues) ** t * alpha) ** 2).sum() / 2) for t in range(41)
    ]
    for mark in ("step by step", "closed form (1 − ηλ)ᵗ"):
        assert found[f"Error over the steps: {mark}"]["y"] == pytest.approx(energies, rel=1e-8)
    said = answer("step-size", {"step_size": step, "condition": 20})["said"]
    assert ("not" in said) == (step >= 1)


def test_kernel_width_against_explicit_sums() -> None:
    found = marks("kernel-width", width=0.4, noise=0.5)
    x, y = (np.array(found["Answers: data"][key]) for key in "xy")
    pooled = found["Answers: pooled"]
    for place in (0, 77, 200):
        weights = np.exp(-0.5 * ((pooled["x"][place] - x) / 0.4) ** 2)
        assert pooled["y"][place] == pytest.approx((weights * y).sum() / weights.sum(), rel=1e-9)
    errors = []
    for left_out in range(len(x)):
        weights = np.exp(-0.5 * ((x[left_out] - x) / 0.4) ** 2) * (np.arange(len(x)) != left_out)
        errors.append(((weights * y).sum() / weights.sum() - y[left_out]) ** 2)
    assert found["Error on points left out: chosen width"]["y"] == [pytest.approx(np.mean(errors), rel=1e-9)]


@pytest.mark.parametrize(
    ("name", "peer"),
    [("sigmoid", torch.sigmoid), ("tanh", torch.tanh), ("softplus", torch.nn.functional.softplus),
     ("leaky_relu", torch.nn.functional.leaky_relu), ("relu6", torch.nn.functional.relu6)],
)  # fmt: skip
def test_activations_against_autograd(name: str, peer: Any) -> None:
    found = marks("activations", activation=name, place=0.7)
    sums = torch.tensor(found[f"f(a): {name}"]["x"], dtype=torch.float64, requires_grad=True)
    values = peer(sums)
    assert found[f"f(a): {name}"]["y"] == pytest.approx(values.tolist(), abs=1e-12)
    values.sum().backward()
    smooth = [abs(x) > 1e-9 and abs(x - 6) > 1e-9 for x in sums.tolist()]
    ours, theirs = np.array(found["f′(a): derivative"]["y"]), sums.grad.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(ours[smooth], theirs[smooth], atol=1e-12)


@pytest.mark.parametrize("given", [(32, 3, 1, 1, 1, 3), (33, 5, 2, 2, 1, 3), (64, 3, 2, 0, 2, 4)])
def test_convolution_against_torch(given: tuple[int, ...]) -> None:
    size, kernel, stride, padding, dilation, layers = given
    names = ("size", "kernel", "stride", "padding", "dilation", "layers")
    found = marks("convolution", **dict(zip(names, given, strict=True)))
    layer = torch.nn.Conv1d(1, 1, kernel, stride, padding, dilation, bias=False)
    torch.nn.init.ones_(layer.weight)
    x = torch.zeros(1, 1, size, requires_grad=True)
    sizes, out = [size], x
    for _ in range(layers):
        out = layer(out)
        sizes.append(out.shape[-1])
    assert found["Pixels along a side: output size"]["y"] == sizes
    out[0, 0, out.shape[-1] // 2].backward()
    seen = x.grad[0, 0] > 0  # type: ignore[index]
    row = np.array(found["What the middle pixel of the output sees: seen"]["tiles"][0]) > 0.5
    assert row[seen.numpy()].all()  # dilation leaves gaps, the span has none
    assert row.sum() == min(
        found["Receptive field: receptive field"]["y"][-1], seen.nonzero().max() - seen.nonzero().min() + 1
    )


def test_a_kernel_that_does_not_fit_is_said() -> None:
    values = INSTRUMENTS["convolution"].read({"size": "4", "kernel": "9", "padding": "0"})
    assert "Layer 1 does not fit" in answer("convolution", values)["said"]


def test_temperature_against_softmax() -> None:
    from quire.board.instruments.temperature import LOGITS

    found = marks("temperature", value=0.5, top_k=3)
    weights = np.exp(np.array(LOGITS) / 0.5) * (np.arange(8) < 3)
    assert found["Probability of the next token: after"]["y"] == pytest.approx(
        (weights / weights.sum()).tolist()
    )
    plain = np.exp(LOGITS) / np.exp(LOGITS).sum()
    assert found["Probability of the next token: softmax alone"]["y"] == pytest.approx(plain.tolist())


@pytest.mark.parametrize("rank", [2, 8])
def test_adapters_come_near_the_best_of_their_rank_and_not_below(rank: int) -> None:
    found = marks("lora-rank", rank=rank, decay=0.8)
    values = 0.8 ** np.arange(32)
    best = math.sqrt((values[rank:] ** 2).sum() / (values**2).sum())
    assert found["Error by rank: best possible"]["y"][rank] == pytest.approx(best, rel=1e-5)
    reached = found["Error by rank: adapter after training"]["y"][0]
    assert best * (1 - 1e-4) <= reached <= best * 1.05


def test_kmeans_ends_where_scikit_learn_does() -> None:
    for start in range(4):
        before = marks("kmeans", step=0, clusters=3, start=start)
        rows = np.stack([before["Rows and centres: rows"][key] for key in "xy"], 1)
        seeds = np.stack([before["Rows and centres: centres"][key] for key in "xy"], 1)
        peer = KMeans(3, init=seeds, n_init=1, max_iter=SWEEPS, tol=0, algorithm="lloyd").fit(rows)
        after = marks("kmeans", step=2 * SWEEPS, clusters=3, start=start)
        centres = np.stack([after["Rows and centres: centres"][key] for key in "xy"], 1)
        np.testing.assert_allclose(centres, peer.cluster_centers_, rtol=1e-9)
        assert after["Sum of squared distances: J"]["y"][-1] == pytest.approx(peer.inertia_)
        course = after["Sum of squared distances: J"]["y"]
        assert all(later <= earlier + 1e-9 for earlier, later in pairwise(course))


def test_the_latent_plane_tells_digits_apart() -> None:
    from sklearn.neighbors import KNeighborsClassifier

    found = marks("vae-plane", first=0.5, second=-0.5)
    codes = found["Codes of digits, and this point: digits"]
    places = np.stack([codes["x"], codes["y"]], 1)
    right = (
        KNeighborsClassifier(7)
        .fit(places[:200], codes["group"][:200])
        .score(places[200:], codes["group"][200:])
    )
    assert right > 0.5  # two numbers for ten classes; chance is 0.1
    plane = np.array(found["The whole plane: images"]["tiles"])
    assert plane.shape == (72, 72)
    centre = np.array(marks("vae-plane")["What this point decodes to: image"]["tiles"])
    np.testing.assert_allclose(plane[32:40, 32:40], centre, atol=0.011)
