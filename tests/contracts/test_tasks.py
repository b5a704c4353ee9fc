"""Every registered task says by the signature of its `predict` what predictions can be asked for, and refuses
anything else by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quire.tasks
from quire.errors import InputError
from quire.models.embedding import Embedding as Network
from quire.models.embedding import EmbeddingConfig
from quire.models.ensemble import EnsembleConfig, MLPEnsemble
from quire.models.nadaraya_watson import NadarayaWatson, NadarayaWatsonConfig
from quire.nn.head import HEADS, Head
from quire.nn.heads import Categorical, Gaussian
from quire.nn.views import RowViews
from quire.tasks import (
    Bagging,
    Embedding,
    KMeansTask,
    LeaveOneOut,
    LinearLeastSquares,
    SemiSupervised,
    Supervised,
)
from quire.tasks.embedding import References
from quire.train import TASKS, Task

every = pytest.mark.parametrize("name", sorted(TASKS))


def message(task: Task, *given: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        task.predict(*given, **options)
    return str(caught.value)


def test_no_task_is_left_out() -> None:
    files = Path(quire.tasks.__path__[0]).glob("*.py")
    written = [name for file in files for name in re.findall(r'@TASKS\.register\("(.*)"\)', file.read_text())]
    assert sorted(TASKS) == sorted(written)


@every
def test_an_option_that_is_misspelt_or_unknown_is_refused_before_anything_is_computed(name: str) -> None:
    kind = TASKS[name]
    task = kind.__new__(kind)  # with no weights, so that nothing can be computed
    _, inputs, *options = inspect.signature(kind.predict).parameters
    assert (inputs, options[0]) == ("inputs", "mode")
    assert kind.predict_options == set(options[1:])
    for option in options:
        said = message(task, torch.zeros(3, 2), **{option[:-1]: None})
        assert said.startswith(f"unknown prediction option of {kind.__name__} '{option[:-1]}'\n")
        assert f"\n  expected: one of {', '.join(sorted(options))}\n" in said
        assert said.endswith(f"did you mean '{option}'?")
    for mode in ((), ("mode",), ("interval",)):
        assert "option" in message(task, torch.zeros(3, 2), *mode, xyzzy=2)


ROWS = torch.tensor([[0.0, 1.0], [2.0, 1.0], [1.0, 3.0]])


def embedding() -> Task:
    known = References(ROWS, torch.tensor([0, 1, 0]), torch.arange(3))
    return Embedding(Network(EmbeddingConfig((2,), hidden=(4,), code=2)), 2, known, RowViews())


WITH_HEADS: dict[str, Callable[[], Task]] = {
    "supervised": lambda: Supervised(nn.Linear(2, 3), {"a": Categorical(2), "b": Gaussian(1)}),
    "least-squares": lambda: LinearLeastSquares(2),
    "leave-one-out": lambda: LeaveOneOut(NadarayaWatson(NadarayaWatsonConfig(2, 1, 3)), Gaussian(1)),
    "bagging": lambda: Bagging(MLPEnsemble(EnsembleConfig(2, 2, 3, (4,))), Categorical(3)),
    "semi-supervised": lambda: SemiSupervised(Network(EmbeddingConfig((2,), hidden=(4,), code=2)), 2),
    "embedding": embedding,
}


def test_every_task_that_takes_a_level_is_tried() -> None:
    assert {name for name, kind in TASKS.items() if "level" in kind.predict_options} == set(WITH_HEADS)


@pytest.mark.parametrize("name", WITH_HEADS)
def test_options_reach_the_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def listen(head: Head, raw: Tensor, mode: str, level: float, generator: Any) -> dict[str, Tensor]:
        seen.append((mode, level, generator))
        return {}

    for kind in HEADS:
        monkeypatch.setattr(HEADS[kind], "_predict", listen)
    generator = torch.Generator()
    task = WITH_HEADS[name]().eval()
    task.predict(ROWS, "sample", level=0.7, generator=generator)
    heads = len(seen)
    assert heads == sum(isinstance(module, Head) for module in task.modules())
    assert seen == [("sample", 0.7, generator)] * heads
    task.predict(ROWS)
    assert seen[heads:] == [("mode", 0.9, None)] * heads


class Passing(Supervised):
    """Knows one option, and passes the others on."""

    def predict(
        self, inputs: Tensor, mode: str = "mode", *, times: float = 1.0, **options: Any
    ) -> dict[str, Tensor]:
        return super().predict(times * inputs, mode, **options)


def test_a_task_that_passes_options_on_takes_those_of_the_one_that_it_passes_them_to() -> None:
    model, x = nn.Linear(2, 1), torch.randn(9, 2)
    plain, passing = Supervised(model, Gaussian(1)), Passing(model, Gaussian(1))
    assert Passing.predict_options == {"times", "level", "generator"}
    found = passing.predict(x, "interval", times=2.0, level=0.5)
    for name, wanted in plain.predict(2 * x, "interval", level=0.5).items():
        assert torch.equal(found[name], wanted)
    assert "did you mean 'level'?" in message(passing, x, "interval", times=2.0, levle=0.5)


def test_inputs_and_mode_can_be_named() -> None:
    task = KMeansTask(2, 2)
    task.centres.copy_(torch.eye(2))
    assert task.predict(inputs=torch.eye(2), mode="mode")["cluster"].tolist() == [0, 1]
