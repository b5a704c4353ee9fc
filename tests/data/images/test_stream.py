"""Batches decoded ahead by threads are those that lie in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.data.batch import Batch, TensorData
from quire.data.images import ImageStream, Shape, load_images, load_scenes
from quire.data.images.decode import Header
from quire.data.images.parallel import count_workers, ordered
from quire.data.images.stream import AHEAD, PIECE
from quire.errors import DataError
from quire.options import Images, Scenes
from tests.data.images.making import class_folders, noise, save, voc_set

SHAPE = Shape(2, 3, 1, "crop")


class Counted:
    """Images whose pixels are their row number, which remember what was read and may fail."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count, self.broken = count, broken
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.count

    def header(self, row: int) -> Header:
        return Header(3, 2, grey=True)

    def read(self, row: int, shape: Shape) -> np.ndarray:
        self.reads.append(row)
        if row == self.broken:
            raise DataError("cut off", path=f"image-{row}.png")
        time.sleep(0.0005 * (row % 3))  # later rows are often ready first
        return np.full(shape.dimensions, row, np.uint8)

    def whole(self, shape: Shape) -> None:
        return None

    def take(self, rows: np.ndarray) -> Counted:
        raise NotImplementedError


def stream(pixels: Counted, workers: int = 4) -> ImageStream:
    return ImageStream(pixels, {"target": torch.arange(len(pixels)) * 10}, SHAPE, workers)


def decoding_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("quire-decode")]


def rows_of(batches: Iterator[Batch]) -> list[list[int]]:
    return [batch.rows.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 7, 20, 100])
def test_order_and_start(workers: int, batch_size: int) -> None:
    data = stream(Counted(60), workers)
    order = torch.randperm(60)[:50]
    parts = [part.tolist() for part in order.split(batch_size)]
    for start in (0, 1, len(parts)):
        batches = list(data.batches(order, batch_size, start))
        assert rows_of(iter(batches)) == parts[start:]
        for batch in batches:
            assert (batch.inputs[:, 0, 0, 0] == batch.rows).all()
            assert (batch.inputs == batch.inputs[:, :1, :1, :1]).all()
            assert (batch.target == batch.rows * 10).all()
    assert decoding_threads() == []


def test_nothing_is_decoded_that_is_skipped() -> None:
    pixels = Counted(40)
    list(stream(pixels).batches(torch.arange(40), 8, start=3))
    assert sorted(pixels.reads) == list(range(24, 40))


def test_few_batches_are_in_flight() -> None:
    pixels = Counted(1000)
    batches = stream(pixels, workers=2).batches(torch.arange(1000), 20)
    for done in range(1, 4):
        next(batches)
        until = time.monotonic() + 30
        while len(pixels.reads) <= done * 20 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(pixels.reads) > done * 20  # the next is under way already
        time.sleep(0.05)
        assert len(pixels.reads) <= (done + AHEAD) * 20 + PIECE
    del batches


def test_threads_end_when_the_iterator_is_dropped() -> None:
    batches = stream(Counted(100)).batches(torch.arange(100), 4)
    next(batches)
    assert decoding_threads()
    del batches
    assert decoding_threads() == []


def test_a_broken_file_surfaces_with_its_name() -> None:
    pixels = Counted(1000, broken=25)
    batches = stream(pixels, workers=2).batches(torch.arange(1000), 10)
    assert len(next(batches)) == 10
    next(batches)
    with pytest.raises(DataError, match=r"image-25\.png: cut off"):
        next(batches)
    assert decoding_threads() == []
    assert len(pixels.reads) < 100


def test_take_and_sizes() -> None:
    data = stream(Counted(9))
    batch = data.take(torch.tensor([7, 2]))
    assert batch.rows.tolist() == [7, 2]
    assert batch.inputs[:, 0, 0, 0].tolist() == [7, 2]
    assert data.take(torch.tensor([], dtype=torch.int64)).inputs.shape == (0, 1, 2, 3)
    assert list(data.batches(torch.tensor([], dtype=torch.int64), 4)) == []
    assert (len(data), data.row_size) == (9, 6)
    assert data.complete
    assert not ImageStream(Counted(2), {"target.labels": torch.tensor([[0], [-1]])}, SHAPE).complete
    assert not data.to("cpu").pinned


@pytest.mark.gpu
def test_batches_for_a_gpu_are_pinned() -> None:
    data = stream(Counted(9)).to("cuda")
    batch = data.take(torch.arange(3))
    assert all(value.is_pinned() for value in batch.fields.values())
    assert torch.equal(batch.to(torch.device("cuda")).target.cpu(), torch.tensor([0, 10, 20]))


# -- Files ----------------------------------------------------------------------------------------------


TINY = 1e-6
"""GiB: nothing fits."""


def same_data(ours: ImageStream, theirs: TensorData) -> None:
    rows = torch.randperm(len(theirs))
    pairs = zip(ours.batches(rows, 4), theirs.batches(rows, 4), strict=True)
    for here, there in pairs:
        assert here.fields.keys() == there.fields.keys()
        assert here.complete == there.complete
        assert torch.equal(here.rows, there.rows)
        for name in there.fields:
            assert torch.equal(here.fields[name], there.fields[name]), name
    some = rows[:2]
    subset, whole = ours.subset(some), theirs.subset(some)
    assert torch.equal(subset.take(torch.arange(2)).inputs, whole.inputs)
    assert ours.row_size == theirs.inputs[0].numel()


def test_a_stream_equals_what_lies_in_memory(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 9, "b": 7}, side=20)
    for options in (Images(size=12), Images(size=12, broken="skip")):
        memory = load_images(tmp_path, options, seed=3)
        streamed = load_images(tmp_path, Images(**{**vars(options), "memory": TINY}), seed=3)
        for split in ("train", "validation", "test"):
            assert isinstance(getattr(streamed, split), ImageStream)
            same_data(getattr(streamed, split), getattr(memory, split))
            assert streamed.lines(split).tolist() == memory.lines(split).tolist()
        assert streamed.preparation == memory.preparation


def test_streams_of_scenes_and_of_arrays(tmp_path: Path) -> None:
    voc_set(tmp_path, {str(i): [("x", 1, 1, 5 + i, 9)] * (i % 3) for i in range(12)})
    memory, streamed = (load_scenes(tmp_path, Scenes(size=8, memory=m)) for m in (4, TINY))
    same_data(streamed.train, memory.train)
    memory, streamed = (load_images("digits", Images(size=12, memory=m)) for m in (4, TINY))
    assert isinstance(streamed.train, ImageStream)
    same_data(streamed.test, memory.test)
    assert memory.train.inputs.shape[1:] == (1, 12, 12)


@pytest.mark.parametrize("memory", [4, TINY])
def test_cut_off_files_are_refused_or_left_out(tmp_path: Path, memory: float) -> None:
    class_folders(tmp_path, {"a": 10, "b": 10}, side=16)
    broken = save(tmp_path / "a" / "zz.png", noise(64, 64))
    broken.write_bytes(broken.read_bytes()[:6000])
    (tmp_path / "b" / "zz.png").write_bytes(b"")
    options = Images(validation=0, test=0, size=8, memory=memory)
    with pytest.raises(DataError, match=r"b/zz\.png: an empty file"):
        load_images(tmp_path, options)
    (tmp_path / "b" / "zz.png").unlink()
    if memory == TINY:
        data = load_images(tmp_path, options, like=load_images("digits", Images(size=8)).preparation)
        with pytest.raises(DataError, match=r"a/zz\.png: it cannot be decoded"):
            list(data.train.batches(torch.arange(21), 4))
    else:
        with pytest.raises(DataError, match=r"a/zz\.png: it cannot be decoded"):
            load_images(tmp_path, options)
    assert decoding_threads() == []
    (tmp_path / "b" / "zz.png").write_bytes(b"")
    data = load_images(tmp_path, Images(**{**vars(options), "broken": "skip"}))
    assert len(data.train) == 20
    assert "a/zz.png" not in data.lines("train")
    assert sum(len(batch) for batch in data.train.batches(torch.arange(20), 6)) == 20
    first, second = data.warnings
    assert first == f"1 of 22 images unusable, left out: {tmp_path}/b/zz.png: an empty file"
    assert second.startswith(f"1 of 21 images unusable, left out: {tmp_path}/a/zz.png: it cannot")


def test_progress_is_told(tmp_path: Path) -> None:
    class_folders(tmp_path, {"a": 20, "b": 20})
    told: list[tuple[int, int]] = []
    load_images(tmp_path, Images(validation=0.25, test=0.25), progress=lambda *now: told.append(now))
    assert told == sorted(told)
    assert told[-1] == (40, 40)
    assert len(told) > 3


# -- Threads --------------------------------------------------------------------------------------------


def test_ordered_is_in_order_and_bounded() -> None:
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for i in range(20):
            drawn.append(i)
            yield i

    results = ordered(lambda i: i * i, items(), 3, 5)
    assert next(results) == 0
    assert len(drawn) == 5
    assert list(results) == [i * i for i in range(1, 20)]


def test_workers() -> None:
    assert count_workers(3) == 3
    assert count_workers(0) >= 1
