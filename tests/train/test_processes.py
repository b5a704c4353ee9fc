"""Learning by statistics in two processes gives what one gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed

from quire.data.batch import Batch, TensorData
from quire.errors import InputError
from quire.tasks import KMeansTask, LinearLeastSquares, MixtureTask, PrincipalComponents
from quire.train import StatisticsTask, fit_statistics, processes
from tests.train.together import together

pytestmark = pytest.mark.slow

TASKS = {
    "kmeans": lambda: KMeansTask(3, 5, starts=2, tol=0.0),
    "mixture": lambda: MixtureTask(3, 2, starts=2),
    "pca": lambda: PrincipalComponents(3, 2),
    "least squares": lambda: LinearLeastSquares(3),
}


class Streamed:
    """Rows that are not held in memory, as far as anyone can see."""

    row_size = 3

    def __init__(self, length: int) -> None:
        self.whole = TensorData({"inputs": torch.zeros(length, 3)})

    def __len__(self) -> int:
        return len(self.whole)

    def batches(self, rows: Tensor, batch_size: int) -> Iterator[Batch]:
        return self.whole.batches(rows, batch_size)


def rows() -> TensorData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(301, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 3.0, 1e-6]) + 5
    x[200:] += 9
    return TensorData({"inputs": x, "target": x @ torch.ones(3, 1, dtype=torch.float64)})


def learn(name: str) -> StatisticsTask:
    task: StatisticsTask = TASKS[name]()
    if name == "kmeans":
        assert isinstance(task, KMeansTask)
        # Centres that no row is nearest to: they have to be found new places among the rows of all processes.
        far = 1e3 * torch.arange(5.0)[:, None].expand(5, 3)
        task.begin(rows(), far.double())
    fit_statistics(task, rows(), sweeps=20, seed=3, started=name == "kmeans")
    return task


@pytest.mark.parametrize(("length", "count", "numbers"), [(301, 2, 60), (7, 3, 3), (100, 4, 1000), (5, 5, 1)])
def test_batches_of_all_processes_are_all_rows_and_each_has_its_own_place(
    length: int, count: int, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data: Any = Streamed(length)
    starts, seen = [], []
    for number in range(count):
        monkeypatch.setattr(processes, "processes", lambda number=number: (number, count))
        for batch in processes.own_rows(data, numbers):
            starts.append(int(batch.rows[0]))
            seen += batch.rows.tolist()
    assert seen == list(range(length))
    assert [start * len(starts) // length for start in starts] == list(range(len(starts)))


def main(folder: Path, number: int) -> None:
    """What each of two processes does."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    for name in TASKS:
        state = {key: value.clone().contiguous() for key, value in learn(name).state_dict().items()}
        save_file(state, folder / f"{name} {number}.safetensors")
    few = TensorData({"inputs": torch.ones(1, 3)})
    with pytest.raises(InputError, match="1 rows for 2 processes"):
        fit_statistics(PrincipalComponents(3, 1), few, sweeps=1)
    distributed.destroy_process_group()


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    together("tests.train.test_processes", tmp_path, 2)
    for name in TASKS:
        alone = learn(name).state_dict()
        first, second = (load_file(tmp_path / f"{name} {number}.safetensors") for number in range(2))
        for key, value in alone.items():
            if key in ("layout", "best"):  # each process has a batch of its own; two starts end alike
                continue
            assert torch.equal(first[key], second[key]), (name, key)
            torch.testing.assert_close(first[key], value, rtol=1e-8, atol=1e-9, msg=f"{name} {key}")
