"""`quire doctor`, on runs and on models that Quire has never seen."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.recipes.checkup import check_up_again
from quire.runs import load

pytestmark = pytest.mark.slow

STRANGER = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def loader():
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = torch.randn(32, 6, generator=generator)
        yield x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def healthy():
    torch.manual_seed(0)
    return Net(), loss, loader()


def creeping():
    torch.manual_seed(0)
    net = Net()
    return net, loss, loader(), torch.optim.SGD(net.parameters(), 1e-6)


def squashed():
    torch.manual_seed(0)
    return nn.Sequential(Net(), nn.Softmax(1)), loss, loader()


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


def nothing():
    return 3
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stranger.py").write_text(STRANGER, encoding="utf-8")
    rows = [f"{i % 7},{(3 * i) % 5},{'yes' if i % 7 > 3 else 'no'}" for i in range(140)]
    (tmp_path / "rows.csv").write_text("a,b,answer\n" + "\n".join(rows) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_healthy_stranger(stranger: Path, quire: Any) -> None:
    found = quire("doctor", "stranger.py:healthy", "--out", "page.html")
    assert found.code == 0, found.error
    assert found.out.startswith("It learns: the loss went from ")
    assert "curvature: Gradient descent diverges above a step size of " in found.out
    page = (stranger / "page.html").read_text(encoding="utf-8")
    assert "It learns: the loss went from" in page
    assert page.count("<svg") >= 4
    assert quire("doctor", "stranger:healthy", "--strict").code == 0


def test_what_is_wrong_with_a_stranger_is_said_first(stranger: Path, quire: Any) -> None:
    found = quire("doctor", "stranger.py:squashed", "--json", "--no-curvature")
    answer = json.loads(found.out)
    assert found.code == 0
    assert answer["verdict"].startswith(
        "Cross-entropy is given probabilities, and takes their softmax, at 1: "
    )
    assert answer["findings"][0]["code"] == "softmax-before-cross-entropy"
    assert quire("doctor", "stranger.py:squashed", "--strict").code == 1
    silenced = quire("doctor", "stranger.py:squashed", "--silence", "softmax-before-cross-entropy", "--json")
    assert "softmax-before-cross-entropy" not in silenced.out
    creeps = quire("doctor", "stranger.py:creeping")
    assert creeps.out.startswith("The step is too small, at SGD, step size 1e-06: use a step size of about ")


def test_a_step_is_advised_for_models_and_runs(stranger: Path, quire: Any) -> None:
    found = quire("doctor", "stranger.py:creeping", "--advise", "40", "--optimiser", "sgd", "--json")
    step = json.loads(found.out)["advice"]["step"]
    # It learns with that step, where 1e-6 did nothing.
    assert 1e-2 < step < 10
    assert quire("train", "softmax", "--epochs", "1", "--out", "run", "--quiet").code == 0
    text = quire("doctor", "run", "--advise", "20", "--no-curvature").out
    assert "\nadvice: Step size " in text
    assert "of adam: the loss went from" in text
    short = quire("doctor", "run", "--advise", "3")
    assert short.code == 2
    assert "--advise 3" in short.error


def test_a_model_on_a_file_of_ones_own(stranger: Path, quire: Any) -> None:
    found = quire("doctor", "stranger.py:plain", "--data", "rows.csv", "--target", "answer", "--lr", "0.01")
    assert found.code == 0, found.error
    assert found.out.startswith("It learns: ")
    large = quire("doctor", "stranger.py:plain", "--data", "rows.csv", "--lr", "300", "--optimiser", "sgd")
    assert large.out.startswith("The step is too large, at SGD, step size 300: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stranger.py:nothing"], "stranger.py:nothing gives int"),
        (["stranger.py:helthy"], "did you mean 'healthy'?"),
        (["strangr.py:healthy"], "no such file"),
        (["stranger.py:plain"], "a model without batches"),
        (["stranger.py:healthy", "--silence", "dead-unit"], "unknown check 'dead-unit'"),
        (["stranger.py:healthy", "--lr", "-1"], "--lr -1"),
        (["stranger.py:healthy", "--out", "nowhere/page.html"], "there is no folder nowhere"),
        (["stranger.py:plain", "--data", "row.csv"], "row.csv: no such file"),
        (["runs/none"], "run runs/none does not exist"),
    ],
)
def test_mistakes_are_said_before_any_work(stranger: Path, quire: Any, words: list[str], said: str) -> None:
    found = quire("doctor", *words)
    assert found.code == 2
    assert said in found.error
    assert "Traceback" not in found.error
    assert not list(stranger.glob("*.html"))


def test_a_run_has_a_page_beside_its_report(stranger: Path, quire: Any) -> None:
    assert quire("train", "mlp", "--epochs", "3", "--out", "run", "--quiet").code == 0
    found = quire("doctor", "run")
    assert found.code == 0, found.error
    assert found.out.startswith("It learns: ")
    page = (stranger / "run" / "doctor.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 5
    refused = quire("doctor", "run", "--lr", "0.1")
    assert refused.code == 2
    assert "--lr 0.1 for a run" in refused.error


@pytest.mark.parametrize("recipe", ["mlp", "gan"])
def test_a_run_that_failed_before_anything_was_saved(recipe: str, stranger: Path, quire: Any) -> None:
    """Its first steps are taken again."""
    words = ["--optim.name", "sgd", "--optim.lr", "1e12", "--optim.clip-norm", "None", "--out", "failed"]
    assert quire("train", recipe, *words, "--steps", "30", "--quiet").code == 1
    assert not (stranger / "failed" / "checkpoints").exists()
    found = quire("doctor", "failed")
    assert found.code == 0, found.error
    assert "not-finite" in found.out
    assert ("The step size 1e+12 is too large" in found.out) == (recipe == "mlp")  # of one player
    assert "<svg" in (stranger / "failed" / "doctor.html").read_text(encoding="utf-8")
    assert quire("predict", "failed", "nothing.csv").code == 2


def rows(path: Path, count: int = 400) -> str:
    """A straight line with a little noise."""
    lines = [f"{i % 17},{i % 23},{2 * (i % 17) - i % 23 + 0.01 * (i % 7)}" for i in range(count)]
    path.write_text("a,b,y\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


FAST = ["--optim.name", "sgd", "--optim.clip-norm", "None", "--quiet", "--epochs", "60"]


def test_the_steps_of_a_failed_run_are_taken_as_it_took_them(stranger: Path, quire: Any) -> None:
    """Without its weight decay it would learn."""
    decay = ["--optim.lr", "0.01", "--optim.weight-decay", "1e4", "--optim.decay", "l2"]
    failed = quire("train", "mlp", "--data", rows(stranger / "r.csv"), *FAST, *decay, "--out", "failed")
    assert failed.code == 1
    sentence = failed.error.removeprefix("error: ").splitlines()[0]
    answer = json.loads(quire("doctor", "failed", "--json", "--no-curvature").out)
    found = {finding["code"]: finding for finding in answer["findings"]}
    assert answer["verdict"].startswith("Training failed, at step ")
    assert found["failed"]["evidence"] == sentence
    assert found["failed"]["where"] == sentence.partition(":")[0]
    assert "--optim.weight-decay" in found["failed"]["fix"]
    assert "not-finite" in found
    assert quire("doctor", "failed", "--no-curvature", "--strict").code == 1


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("recipe", ["mlp", "gmm"])
def test_no_run_that_failed_is_given_a_clean_verdict(
    recipe: str, kept: bool, stranger: Path, quire: Any
) -> None:
    """Whatever its first steps look like, with weights or without any."""
    length = ["--epochs", "3"] if recipe == "mlp" else ["--sweeps", "9"]
    data = ["--data", rows(stranger / "r.csv")]
    assert quire("train", recipe, *data, *length, "--out", "run", "--quiet").code == 0
    if not kept:
        for name in ("result.json", "sums.json"):
            (stranger / "run" / name).unlink()
        shutil.rmtree(stranger / "run" / "checkpoints")
        killed = quire("doctor", "run", "--no-curvature")
        assert killed.out.startswith("It learns: the loss went from "), killed.error
    with (stranger / "run" / "log.txt").open("a", encoding="utf-8") as log:
        log.write("2026-11-20T00:00:00+00:00 failed: run/metrics.jsonl: no space left on device\n")
    found = quire("doctor", "run", "--no-curvature")
    assert found.code == 0, found.error
    assert found.out.startswith("Training failed, at log.txt: mend what is said there")
    assert "evidence: run/metrics.jsonl: no space left on device\n" in found.out
    with (stranger / "run" / "log.txt").open("a", encoding="utf-8") as log:
        log.write("2026-11-20T00:00:00+00:00 resumed at step 0\n")
    assert "training failed" not in quire("doctor", "run", "--no-curvature").out


def test_all_rows_of_a_failed_run_are_looked_at(stranger: Path, quire: Any) -> None:
    large = ["--data", rows(stranger / "r.csv", 391), "--optim.lr", "1e30"]
    assert quire("train", "mlp", *large, *FAST, "--train.batch-size", "8", "--out", "failed").code == 1
    plan = load("failed").begun
    trained_on = plan.data.train
    both = replace(plan, data=replace(plan.data, validation=trained_on.subset(torch.arange(100))))  # type: ignore[type-var]
    verdict = check_up_again(both, torch.device("cpu"), [])
    evidence = next(found.evidence for found in verdict.findings if found.code == "rows-in-both-splits")
    assert evidence.startswith(f"100 of 100 rows that were compared with {len(trained_on)};")


@pytest.mark.parametrize("adapters", [[], ["--tune.lora.rank", "2"]])
def test_a_tuned_run_that_failed_is_looked_at_as_it_was_tuned(
    adapters: list[str], stranger: Path, quire: Any
) -> None:
    data = ["--data", rows(stranger / "r.csv")]
    assert quire("train", "mlp", *data, "--epochs", "20", "--out", "base", "--quiet").code == 0
    words = ["--tune.base", "base", *adapters, "--optim.lr", "1e38", *FAST, "--out", "tuned"]
    assert quire("train", "mlp", *data, *words).code == 1
    found = quire("doctor", "tuned")
    assert found.code == 0, found.error
    assert found.out.startswith("Training failed, at step 1: ")
    assert ("some parameters are frozen" in found.out) == bool(adapters)
    base, tuned = load("base"), load("tuned")
    own = tuned.begun.task.state_dict()
    weights = [value for name, value in own.items() if name.startswith("model.body.0.weight")]
    assert any(torch.equal(value, base.task.state_dict()["model.body.0.weight"]) for value in weights)
