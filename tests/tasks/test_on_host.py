"""What the host knows of a task's buffers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from quire.data.batch import TensorData
from quire.tasks import KMeansTask, MixtureTask, PrincipalComponents
from quire.tasks.on_host import OnHost, gathered
from quire.train.statistics import StatisticsTask, fit_statistics
from quire.train.task import build_task


def test_it_is_gathered_once_and_known_from_then_on() -> None:
    flag, values = torch.tensor([True]), torch.tensor([[1, 2]])
    asked = []

    def gather() -> torch.Tensor:
        asked.append(1)
        return gathered(flag, values)

    known = OnHost(gather, tuple)
    assert [known(), known()] == [(1.0, 1.0, 2.0)] * 2
    assert len(asked) == 1
    values.fill_(7)
    assert known() == (1.0, 1.0, 2.0), "who changes a buffer tells, or says that it is to be asked again"
    known.forget()
    assert known() == (1.0, 7.0, 7.0)
    assert known.tell([3.0]) == known() == (3.0,)
    assert len(asked) == 2


TASKS = [KMeansTask(3, 2), MixtureTask(3, 2), PrincipalComponents(3, 2)]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_that_is_loaded_knows_what_was_saved(task: StatisticsTask) -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    fit_statistics(task, TensorData({"inputs": x}), sweeps=3)
    other = build_task(task.spec())
    before = str(other._control())  # type: ignore[operator]
    other.load_state_dict(task.state_dict())
    assert str(other._control()) == str(task._control()) != before  # type: ignore[operator]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda task: pickle.loads(pickle.dumps(task))])
@pytest.mark.parametrize("task", TASKS)
def test_a_copy_knows_of_its_own_buffers(task: StatisticsTask, again: object) -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    data = TensorData({"inputs": x})
    fit_statistics(task, data, sweeps=3)
    other = again(task)  # type: ignore[operator]
    before = {name: value.clone() for name, value in task.state_dict().items()}
    fit_statistics(other, TensorData({"inputs": 5 + 2 * x}), sweeps=30)
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())
    assert other._control.gather.__self__ is other  # type: ignore[operator, union-attr]
