"""The matching kernels against loops over pairs, and against the plain form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.errors import InputError
from quire.functional.detect import default_boxes, leave_out_crowds, match_boxes
from tests.kernels.pooling import device

# NumPy, which interprets the kernels, says so where a pair without overlap is 0/0.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def boxes(*shape: int, grid: int | None = None, low: float = 0.05, high: float = 0.4) -> Tensor:
    """Boxes of several sizes; on a grid, so that many overlaps are equal."""
    centre = torch.rand(*shape, 2)
    side = torch.rand(*shape, 2) * (high - low) + low
    made = torch.cat([centre - side / 2, centre + side / 2], -1)
    if grid is not None:
        made = (made * grid).round() / grid
        made[..., 2:] = torch.maximum(made[..., 2:], made[..., :2] + 1 / grid)
    return made.to(device())


def by_loop(defaults: Tensor, truth: Tensor, present: Tensor, threshold: float) -> list[int]:
    """The definition for one image, in NumPy's float32: pairs in falling order, then the best above the
    threshold."""
    one = np.float32(1)
    pairs: dict[tuple[int, int], np.float32] = {}
    for g, row in enumerate(truth.cpu().float().numpy()):
        for a, box in enumerate(defaults.cpu().float().numpy()):
            sides = np.minimum(row[2:], box[2:]) - np.maximum(row[:2], box[:2])
            if not present[g] or (sides <= 0).any():
                continue
            shared = sides[0] * sides[1]
            areas = [(each[2] - each[0]) * (each[3] - each[1]) * one for each in (row, box)]
            pairs[g, a] = shared / (areas[0] + areas[1] - shared)
    index = [-1] * len(defaults)
    for a in range(len(defaults)):
        own = [(-v, g) for (g, other), v in pairs.items() if other == a]
        if own and -min(own)[0] >= np.float32(threshold):
            index[a] = min(own)[1]
    taken: set[int] = set()
    done: set[int] = set()
    for g, a in sorted(pairs, key=lambda pair: (-pairs[pair], pair)):
        if g not in done and a not in taken:
            index[a] = g
            done.add(g)
            taken.add(a)
    return index


def both(defaults: Tensor, truth: Tensor, **options: object) -> Tensor:
    found = match_boxes(defaults, truth, degenerate="zero", backend="triton", **options)  # type: ignore[arg-type]
    plain = match_boxes(defaults, truth, degenerate="zero", backend="torch", **options)  # type: ignore[arg-type]
    assert found.dtype == plain.dtype
    assert torch.equal(found, plain)
    return found


@pytest.mark.parametrize("grid", [None, 12], ids=["random", "ties"])
@pytest.mark.parametrize(
    ("count", "true"), [(1, 1), (5, 9), (127, 3), (130, 17), (150, 33)], ids=lambda n: str(n)
)
def test_pairs_are_taken_in_order(count: int, true: int, grid: int | None) -> None:
    defaults, truth = boxes(count, grid=grid), boxes(2, true, grid=grid)
    present = torch.rand(2, true) < 0.8
    for threshold in (0.5, 0.3):
        found = both(defaults, truth, present=present.to(device()), threshold=threshold)
        for image in range(2):
            assert found[image].tolist() == by_loop(defaults, truth[image], present[image], threshold)


def test_boxes_that_all_want_the_same() -> None:
    """40 times the same true box: each is turned down again and again, in tiles far apart."""
    defaults = boxes(400, low=0.3, high=0.6)
    truth = torch.tensor([[0.3, 0.25, 0.7, 0.75]], device=device()).expand(40, 4)
    found = both(defaults, truth, threshold=1.0)
    assert sorted(found[found >= 0].tolist()) == list(range(40))


def test_of_equal_true_boxes_the_first_is_learned() -> None:
    defaults, truth = boxes(150, low=0.2), boxes(8, low=0.2).repeat(4, 1)
    found = both(defaults, truth, threshold=0.2)
    assert found.tolist() == by_loop(defaults, truth, torch.ones(32, dtype=torch.bool), 0.2)
    assert (found >= 0).sum() > 32  # more than were forced


def test_defaults_of_a_network_with_ties() -> None:
    defaults = default_boxes([(8, 8), (4, 4)], [0.2, 0.4, 0.8], [[1, 2, 0.5], [1]], device=device())
    truth = torch.stack([defaults[10], defaults[10], (defaults[40] + defaults[44]) / 2, defaults[200] * 0.5])
    found = both(defaults, truth[None].expand(3, 4, 4))
    assert found[0].tolist() == by_loop(defaults, truth, torch.ones(4, dtype=torch.bool), 0.5)


def test_what_is_no_box_matches_nothing() -> None:
    defaults, truth = boxes(140), boxes(3, 6)
    defaults[3], defaults[77, 2] = torch.nan, torch.inf
    truth[0, 2, 2:], truth[1, 0], truth[2, 1, 0] = truth[0, 2, :2], torch.nan, -torch.inf
    truth[2, 3] = truth[2, 3].flip(0)
    found = both(defaults, truth)
    assert (found[0] != 2).all()
    assert (found[1] != 0).all()
    assert (found[:, [3, 77]] == -1).all()


@pytest.mark.parametrize("scale", [1e-19, 1e-16, 1e15, 1e20])
def test_areas_at_the_ends_of_float32(scale: float) -> None:
    """Areas are subnormal, or infinite, where overlaps are NaN in the plain form."""
    defaults, truth = boxes(150), boxes(2, 9)
    found = both(defaults * scale, truth * scale, threshold=0.3)
    if scale == 1e15:
        assert torch.equal(found, both(defaults * 2.0**50, truth * 2.0**50, threshold=0.3))
        assert (found >= 0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_parts_of_other_tensors(dtype: torch.dtype) -> None:
    defaults, truth = boxes(2, 140).to(dtype)[1], boxes(3, 2, 7).to(dtype)
    both(defaults, truth.transpose(0, 1))
    both(boxes(140, 2).transpose(0, 1)[0], truth[:, 0])
    present = (torch.rand(7, 3, 2) < 0.7).to(device())
    both(defaults, truth, present=present.permute(1, 2, 0))


def test_nothing_to_match() -> None:
    defaults, truth = boxes(20), boxes(2, 3)
    assert both(defaults, truth[:, :0]).tolist() == [[-1] * 20] * 2
    assert both(defaults[:0], truth).shape == (2, 0)
    assert both(defaults, truth[:0]).shape == (0, 20)
    assert both(defaults, truth, present=torch.zeros(2, 3, dtype=torch.bool, device=device())).max() == -1


def test_crowds_are_left_out_as_in_a_loop() -> None:
    defaults, truth = boxes(150), boxes(3, 140, high=0.3)
    crowd = torch.rand(3, 140, device=device()) < 0.05
    crowd[1] = False
    truth[0, 5], crowd[0, 5] = torch.nan, True
    defaults[7] = torch.nan
    index = both(defaults, truth[:, :4], threshold=0.3)
    found = leave_out_crowds(index, defaults, truth, crowd, backend="triton")
    assert torch.equal(found, leave_out_crowds(index, defaults, truth, crowd, backend="torch"))
    assert torch.equal(found[1], index[1])
    left = 0
    for image in range(3):
        for a, box in enumerate(defaults.tolist()):
            area = (box[2] - box[0]) * (box[3] - box[1])
            shares = [0.0]
            for row, counts in zip(truth[image].tolist(), crowd[image].tolist(), strict=True):
                width, height = (min(row[i + 2], box[i + 2]) - max(row[i], box[i]) for i in (0, 1))
                if counts and width > 0 and height > 0:
                    shares.append(width * height / area)
            out = max(shares) >= 0.5 and index[image, a] == -1
            assert found[image, a] == (-2 if out else index[image, a])
            left += out
    assert left
    one = leave_out_crowds(index[0], defaults, truth, crowd, backend="triton")
    assert torch.equal(one, leave_out_crowds(index[0], defaults, truth, crowd, backend="torch"))


def test_what_the_kernels_do_not_do() -> None:
    defaults, truth = boxes(20), boxes(2, 3)
    with pytest.raises(InputError, match=r"float64 with backend='triton'"):
        match_boxes(defaults.double(), truth, backend="triton")
    with pytest.raises(InputError, match=r"default boxes of shape \(1, 20, 4\) with backend='triton'"):
        match_boxes(defaults[None], truth, backend="triton")
    with pytest.raises(InputError, match=r"true boxes of shape \(4097, 4\) with backend='triton'"):
        match_boxes(defaults, truth[0, :1].expand(4097, 4), backend="triton")
    crowd = torch.ones(2, 3, dtype=torch.bool, device=device())
    with pytest.raises(InputError, match=r"boxes of types torch.bfloat16 and torch.float32 with"):
        leave_out_crowds(match_boxes(defaults, truth), defaults.bfloat16(), truth, crowd, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("grid", [None, 30, 300], ids=["random", "ties", "some ties"])
def test_many_boxes_on_the_gpu(grid: int | None) -> None:
    for count, shape in ((24_564, (4, 100)), (100_000, (100,)), (3000, (2, 1500)), (500, (1, 900))):
        defaults, truth = boxes(count, grid=grid), boxes(*shape, grid=grid)
        both(defaults, truth, present=torch.rand(shape, device="cuda") < 0.9)


@pytest.mark.gpu
def test_no_matrix_in_memory() -> None:
    defaults, truth = boxes(50_000), boxes(2, 200)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    match_boxes(defaults, truth, degenerate="zero")
    assert torch.cuda.max_memory_allocated() - before < 50_000 * 200 * 2 * 4 / 10


@pytest.mark.gpu
def test_compiled() -> None:
    defaults, truth = boxes(500), boxes(2, 20)
    compiled = torch.compile(lambda d, t: match_boxes(d, t, degenerate="zero") + 1, fullgraph=True)
    assert torch.equal(compiled(defaults, truth) - 1, both(defaults, truth))
