from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from quire.errors import InputError
from quire.functional.boxes import decode_boxes, valid_boxes
from quire.functional.coco import Detections, Truth
from quire.functional.suppression import nms
from quire.options import Augment, Optim, Schedule, Train
from quire.tasks.detection import Collected, Detection, DetectionRules, Judged
from quire.train import build_task, evaluate, fit
from quire.train.gradients import loss_factors
from tests.functional.test_coco import NAMES, with_pycocotools
from tests.tasks.detecting import detector, judged, scenes, whole

pytestmark = pytest.mark.slow

# Loss -----------------------------------------------------------------------------------------


def overlap(a, b):
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(w, 0) * max(h, 0)
    area = [(c[2] - c[0]) * (c[3] - c[1]) for c in (a, b)]
    return shared / (sum(area) - shared), shared / area[0]


def truth_of(data, n):
    return (data.fields[f"target.{name}"][n].tolist() for name in ("boxes", "labels", "crowd"))


def match_by_loop(defaults, boxes, labels, crowd, threshold=0.5):
    """True box of each default box, −1 for background, −2 for what lies in a crowd."""
    learned = [j for j in range(len(boxes)) if labels[j] >= 0 and not crowd[j]]
    table = {(i, j): overlap(d, boxes[j])[0] for i, d in enumerate(defaults) for j in learned}
    index = []
    for i, d in enumerate(defaults):
        best = max(learned, key=lambda j: (table[i, j], -j), default=None)
        found = best if best is not None and table[i, best] >= threshold else -1
        groups = [j for j in range(len(boxes)) if labels[j] >= 0 and crowd[j]]
        if found < 0 and any(overlap(d, boxes[j])[1] >= 0.5 for j in groups):
            found = -2
        index.append(found)
    while table:
        i, j = max(table, key=lambda pair: (table[pair], -pair[1], -pair[0]))
        if table[i, j] == 0:
            break
        index[i] = j
        table = {pair: value for pair, value in table.items() if pair[0] != i and pair[1] != j}
    return index


def losses_by_loop(task, batch):
    """Sums of both terms and the number of matched boxes, image by image, box by box."""
    logits, offsets = (t.double() for t in task.output(batch.inputs))
    defaults = task.model.defaults.tolist()
    classes, boxes, matched = [], [], []
    for n in range(len(batch)):
        true, labels, crowd = (
            batch.fields[f"target.{key}"][n].tolist() for key in ("boxes", "labels", "crowd")
        )
        index = match_by_loop(defaults, true, labels, crowd)
        surprise = -logits[n].log_softmax(-1)
        positive = [i for i, j in enumerate(index) if j >= 0]
        negative = sorted((i for i, j in enumerate(index) if j == -1), key=lambda i: -surprise[i, 0].item())
        count = max(3 * len(positive), task.rules.least_negatives)
        classes.append(sum(surprise[i, 0].item() for i in negative[:count]))
        place = 0.0
        for i in positive:
            classes[-1] += surprise[i, labels[index[i]] + 1].item()
            d, b = defaults[i], true[index[i]]
            w, h = d[2] - d[0], d[3] - d[1]
            wanted = [
                ((b[0] + b[2]) - (d[0] + d[2])) / 2 / w / 0.1, ((b[1] + b[3]) - (d[1] + d[3])) / 2 / h / 0.1,
                math.log((b[2] - b[0]) / w) / 0.2, math.log((b[3] - b[1]) / h) / 0.2,
            ]  # fmt: skip
            gaps = [abs(a - b) for a, b in zip(offsets[n, i].tolist(), wanted, strict=True)]
            place += sum(g * g / 2 if g < 1 else g - 0.5 for g in gaps)
        boxes.append(place)
        matched.append(len(positive))
    return classes, boxes, matched


def test_the_terms_equal_a_loop_over_boxes():
    task = detector(DetectionRules(least_negatives=5)).eval()
    data = scenes(6, empty=(2,), crowd=((0, 0), (3, 1)))
    assert (data.fields["target.labels"][data.fields["target.crowd"]] >= 0).all()
    for parameter in task.parameters():  # heads that begin near zero would make every box alike
        parameter.data += 0.1 * torch.randn_like(parameter)
    batch = whole(data)
    classes, boxes, matched = losses_by_loop(task, batch)
    assert matched[2] == 0
    found = task.terms(batch)
    assert found["classes"].item() == pytest.approx(sum(classes), rel=1e-5)
    assert found["boxes"].item() == pytest.approx(sum(boxes), rel=1e-5)
    assert task.weigh(batch) == {"classes": sum(matched), "boxes": sum(matched)}
    each = task.loss_each(batch)["loss"]
    expected = [(c + b) / max(m, 1) for c, b, m in zip(classes, boxes, matched, strict=True)]
    assert each.tolist() == pytest.approx(expected, rel=1e-5)
    assert classes[2] > 0  # what nothing looks like is learned too
    table = task.match(batch).tolist()
    for n, row in enumerate(table):
        true, labels, crowd = (
            data.fields[f"target.{key}"][n].tolist() for key in ("boxes", "labels", "crowd")
        )
        assert row == match_by_loop(task.model.defaults.tolist(), true, labels, crowd)
    assert any(-2 in row for row in table)


def test_micro_batches_add_up_to_the_whole():
    task, data = detector(augment=Augment(flip=0.5, crop=0.7)), scenes(12, empty=(4,))
    batch = task.eval().augment(whole(data))
    weights, sums = task.weigh(batch), task.terms(batch)
    parts = batch.split(3)
    for name in ("classes", "boxes"):
        assert sum(task.weigh(part)[name] for part in parts) == weights[name]
        together = sum(task.terms(part)[name] for part in parts)
        torch.testing.assert_close(together, sums[name])
    assert "target.matched" in batch.fields
    # What was matched for the step is what would be matched now.
    again = batch.fields.copy()
    kept = again.pop("target.matched")
    assert torch.equal(kept, task.match(type(batch)(again, batch.rows)))
    # It is not decided again: what stands in the batch counts.
    changed = batch.replace(**{"target.matched": torch.full_like(kept, -1)})
    assert task.weigh(changed) == {"classes": 0.0, "boxes": 0.0}


def test_boxes_follow_their_image():
    task, data = detector(augment=Augment(flip=1.0)), scenes(8)
    batch = task.augment(whole(data))
    assert torch.equal(batch.inputs, data.inputs.flip(-1))
    x1, y1, x2, y2 = data.fields["target.boxes"].unbind(-1)
    there = data.fields["target.labels"] >= 0
    mirrored = torch.stack([1 - x2, y1, 1 - x1, y2], -1)
    torch.testing.assert_close(batch.fields["target.boxes"][there], mirrored[there])
    assert torch.equal(batch.fields["target.labels"], data.fields["target.labels"])
    assert set(detector().augment(whole(data)).fields) == {*data.fields, "target.matched"}


def test_scales_weigh_the_terms():
    data = scenes(6)
    plain, double = (detector(scales=scales).eval() for scales in (None, {"boxes": 2.0}))
    a, b = evaluate(plain, data), evaluate(double, data)
    assert a["loss"] == pytest.approx(a["classes"] + a["boxes"])
    assert b["loss"] == pytest.approx(a["classes"] + 2 * a["boxes"])
    assert loss_factors(double, {"classes": 4.0, "boxes": 4.0}) == {"classes": 0.25, "boxes": 0.5}
    with pytest.raises(InputError, match="unknown term of detection 'box'"):
        detector(scales={"box": 1.0})


def test_a_batch_without_any_object_moves_nothing():
    task, data = detector(), scenes(3, empty=range(3))
    weights = task.weigh(whole(data))
    assert weights == {"classes": 0.0, "boxes": 0.0}
    assert loss_factors(task, weights) == {"classes": 0.0, "boxes": 0.0}
    sums = task.terms(whole(data))
    assert sums["classes"] > 0
    assert sums["boxes"] == 0


# Measures -------------------------------------------------------------------------------------


def test_measures_equal_pycocotools():
    task, data = judged()
    found = evaluate(task, data)
    predicted = task.predict(data.inputs)
    detections, truth = [], []
    for n in range(len(data)):
        scale = data.fields["target.extent"][n].repeat(2)
        for box, score, label in zip(*(predicted[k][n] for k in ("boxes", "scores", "labels")), strict=True):
            if label >= 0:
                detections.append([*(box * scale).tolist(), score.item(), label.item(), n])
        for box, label, crowd in zip(*truth_of(data, n), strict=True):
            if label >= 0:
                truth.append([*(torch.tensor(box) * scale).tolist(), label, n, crowd])
    d, t = torch.tensor(detections, dtype=torch.float64), torch.tensor(truth, dtype=torch.float64)
    peer = with_pycocotools(
        Detections(d[:, :4], d[:, 4], d[:, 5].long(), d[:, 6].long()),
        Truth(t[:, :4], t[:, 4].long(), t[:, 5].long(), t[:, 6].bool()),
        len(data),
        2,
    )
    assert 0.05 < found["map50"] < 0.95
    stats = dict(zip(NAMES, peer.stats, strict=True))
    for name, theirs in (("map", "ap"), ("map50", "ap50"), ("map75", "ap75"), ("recall100", "ar_100")):
        assert found[name] == pytest.approx(stats[theirs], abs=1e-6), name
    assert set(found) == {"loss", "classes", "boxes", "map", "map50", "map75", "recall100"}
    assert set(found) - {"loss", "classes", "boxes"} <= task.higher_is_better


def test_boxes_are_judged_in_pixels_of_the_original_image():
    task, data = judged()
    ((part,),) = (tally.parts for tally in task.tally(whole(data)).values())
    width, height = data.fields["target.extent"].unbind(1)
    shares = (data.fields["target.boxes"], task.predict(data.inputs)["boxes"])
    for pixels, share in zip((part.true_boxes, part.boxes), shares, strict=True):
        torch.testing.assert_close(pixels[..., 0::2], share[..., 0::2] * width[:, None, None])
        torch.testing.assert_close(pixels[..., 1::2], share[..., 1::2] * height[:, None, None])
    assert torch.equal(part.images, torch.arange(len(data)))


def test_batches_of_a_split_add_up():
    task, data = judged(5)
    at_once, in_parts = evaluate(task, data), evaluate(task, data, batch_size=3)
    assert in_parts == pytest.approx(at_once, rel=1e-6)


def test_nothing_to_find_is_not_a_number():
    task, data = detector(), scenes(3, empty=range(3))
    found = evaluate(task, data)
    assert all(math.isnan(found[name]) for name in ("map", "map50", "map75", "recall100"))
    curves = task.curves(task.judge(whole(data))[1])
    assert np.isnan(curves["average_precision"]).all()


def test_curves_of_each_class():
    """One image with two objects of class 0: the best detection hits, the next misses, the last hits."""
    task, _ = judged()
    true = torch.tensor([[[0.0, 0, 10, 10], [20, 20, 30, 30]]])
    boxes = torch.tensor([[[0.0, 0, 10, 9], [0, 0, 10, 10], [20, 20, 30, 30]]])
    part = Judged(
        torch.tensor([7]), boxes, torch.tensor([[0.9, 0.8, 0.7]]), torch.tensor([[0, 0, 0]]), true,
        torch.tensor([[0, 0]]), torch.zeros(1, 2, dtype=torch.bool),
    )  # fmt: skip
    curves = task.curves({"found": Collected((part,))})
    assert curves["recall"].shape == (101,)
    assert curves["precision"].shape == (2, 101)
    # Precision 1 up to recall ½ (51 points), then 2/3.
    np.testing.assert_allclose(curves["precision"][0, :51], 1.0)
    np.testing.assert_allclose(curves["precision"][0, 51:], 2 / 3)
    assert curves["average_precision"][0] == pytest.approx((51 + 50 * 2 / 3) / 101)
    assert np.isnan(curves["precision"][1]).all()


# Predictions ----------------------------------------------------------------------------------


def test_predictions_are_those_of_nms_in_each_image_and_class():
    rules = DetectionRules(score=0.02, overlap=0.3, candidates=10_000, most=60)
    task, data = judged()
    task.rules = rules
    found = task.predict(data.inputs)
    assert {name: value.shape for name, value in found.items()} == {
        "boxes": (10, 60, 4), "scores": (10, 60), "labels": (10, 60),
    }  # fmt: skip
    assert found["labels"].dtype == torch.int64
    logits, offsets = task.model(data.inputs)
    for n in range(10):
        probabilities = logits[n].softmax(-1)
        boxes = decode_boxes(offsets[n], task.model.defaults).clamp(0, 1)
        expected = []
        for c in range(2):
            rows = ((probabilities[:, c + 1] >= 0.02) & valid_boxes(boxes)).nonzero().flatten()
            kept = rows[nms(boxes[rows], probabilities[rows, c + 1], threshold=0.3)]
            expected += [(probabilities[i, c + 1].item(), c, boxes[i]) for i in kept]
        expected = sorted(expected, key=lambda each: -each[0])[:60]
        count = len(expected)
        assert count > 5
        assert found["labels"][n, :count].tolist() == [c for _, c, _ in expected]
        assert found["scores"][n, :count].tolist() == pytest.approx([s for s, _, _ in expected])
        torch.testing.assert_close(found["boxes"][n, :count], torch.stack([b for _, _, b in expected]))
        assert (found["labels"][n, count:] == -1).all()
    sure = task.predict(data.inputs, score_threshold=0.7)
    kept = sure["labels"] >= 0
    assert 0 < kept.sum() < (found["labels"] >= 0).sum()
    assert (sure["scores"][kept] >= 0.7).all()
    with pytest.raises(InputError, match=r"unknown mode of detection 'sample'"):
        task.predict(data.inputs, "sample")


class Exported(nn.Module):
    def __init__(self, task):
        super().__init__()
        self.task = task

    def forward(self, pixels):
        found = self.task.predict(pixels)
        return found["boxes"], found["scores"], found["labels"]


@pytest.fixture(scope="module")
def exported():
    """A detector with many detections as a program, images of another number than it is traced with, and what
    it finds in them."""
    task = detector(DetectionRules(candidates=40, most=12, score=0.05))
    for parameter in task.model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    images = scenes(9).inputs
    module = Exported(task.eval())
    wanted = module(images[2:])
    assert (wanted[2] >= 0).sum(1).min() > 3
    assert (wanted[2] >= 0).sum(1).max() > 6
    dynamic = ({0: torch.export.Dim("images")},)
    return torch.export.export(module, (images[:2],), dynamic_shapes=dynamic), images[2:], wanted


def test_a_torch_program_detects_the_same(exported):
    program, images, wanted = exported
    for a, b in zip(program.module()(images), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_an_onnx_file_detects_the_same(exported):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    program, images, wanted = exported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = torch.onnx.export(program, dynamo=True, verbose=False, input_names=["pixels"])
    session = runtime.InferenceSession(
        file.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found = session.run(None, {"pixels": images.numpy()})
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(a), b, atol=1e-4, rtol=0)


# Saving, training -----------------------------------------------------------------------------


def test_a_task_is_rebuilt_from_its_description():
    rules = DetectionRules(match=0.4, most=7)
    task = detector(
        rules, scales={"boxes": 0.5}, step_factors={"model.backbone.": 0.1}, frozen={"model.": 2.0}
    )
    spec = json.loads(json.dumps(task.spec()))
    again = build_task(spec)
    assert isinstance(again, Detection)
    assert again.spec() == spec
    assert again.rules == rules
    again.load_state_dict(task.state_dict())
    images = scenes(3).inputs
    for name, value in task.eval().predict(images).items():
        assert torch.equal(again.eval().predict(images)[name], value)
    assert again.step_factor("model.backbone.conv1.weight") == 0.1
    assert again.step_factor("model.lateral.0.0.weight") == 1.0
    assert again.frozen_epochs("model.lateral.0.0.weight") == 2.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"match": 0.0}, r"match is 0.0[\s\S]*\(0, 1\]"),
        ({"score": 2}, r"score is 2"),
        ({"most": 0}, r"most is 0[\s\S]*>= 1"),
        ({"negatives": -1.0}, r"negatives is -1.0[\s\S]*>= 0"),
    ],
)
def test_messages(values, words):
    with pytest.raises(InputError, match=words):
        DetectionRules(**values)


def test_a_detector_learns_a_handful_of_scenes():
    task, data = detector(), scenes(16)
    before = evaluate(task, data)
    optim = Optim(lr=1e-2, schedule=Schedule("cosine", warmup=10))
    fit(task, data, steps=80, optim=optim, train=Train(batch_size=8))
    after = evaluate(task, data)
    assert before["map50"] < 0.2
    assert after["map50"] > 0.9
    assert after["loss"] < before["loss"] / 3


@pytest.mark.gpu
def test_a_step_never_waits_for_the_gpu():
    task = detector(augment=Augment(flip=0.5, crop=0.6, zoom_out=1.5, colour=0.3)).cuda()
    data = scenes(8, empty=(1,), crowd=((0, 0),)).to("cuda")
    batch = whole(data)
    task.terms(task.augment(batch))  # what is set up once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = task.augment(batch)
        weights = task.weigh(batch)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            sums = task.terms(batch)
        (sums["classes"] / weights["classes"] + sums["boxes"] / weights["boxes"]).backward()
        task.judge(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sums["classes"].dtype == torch.float32


@pytest.mark.gpu
def test_the_gpu_gives_the_same():
    task, data = detector().eval(), scenes(8, crowd=((0, 0),))
    here = evaluate(task, data)
    there = evaluate(task.cuda(), data.to("cuda"))
    assert there == pytest.approx(here, rel=1e-3, abs=1e-3)
