"""Networks on images: trained weights taken over, parts frozen and let in, sizes chosen, pictures drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import quire.recipes  # noqa: F401
from quire.errors import DataError, InputError
from quire.models import resnet18, resnet20
from quire.options import Augment, Images, Noise, Scenes, Train
from quire.recipes.base import RECIPES
from quire.recipes.execute import execute
from quire.recipes.pretrained import IMAGENET_MEAN
from quire.recipes.scenes import Detector, SSDOptions
from quire.recipes.vision import AuxiliaryNet, GoogLeNetOptions, ResNet, ResNetOptions
from tests.recipes.examples import write_csv, write_images, write_scenes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "photos")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file like those that are published: a state dict of a thousand classes for colour images."""
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.manual_seed(3)
    torch.save(resnet18().state_dict(), path)
    return path


def options(photos: Path, **model: object) -> ResNetOptions:
    return ResNetOptions(data=photos, model=ResNet(depth=18, **model), epochs=1, quiet=True)


def test_published_weights_are_taken_over_but_for_the_last_layer(photos: Path, published: Path) -> None:
    plan = RECIPES["resnet"].build(options(photos, weights=published))
    state, file = plan.task.model.state_dict(), torch.load(published, weights_only=True)
    assert all(torch.equal(state[name], file[name]) for name in file if not name.startswith("fc."))
    assert state["fc.weight"].shape == (3, 512)
    assert plan.notes == ["the last layer starts anew: the file has 1000 classes, the network 3"]
    assert plan.task.inputs.mean.tolist() == pytest.approx(IMAGENET_MEAN)
    assert plan.data.preparation.mean == IMAGENET_MEAN  # so that evaluate and predict scale alike


def test_a_frozen_body_stays_as_it_is(photos: Path, published: Path, tmp_path: Path) -> None:
    given = options(photos, weights=published, freeze=True)
    plan = RECIPES["resnet"].build(given)
    moving = {name for name, p in plan.task.named_parameters() if p.requires_grad}
    assert moving == {"model.fc.weight", "model.fc.bias"}
    before = {name: value.clone() for name, value in plan.task.state_dict().items()}
    from quire.train import fit

    fit(plan.task, plan.data.train, epochs=1, train=Train(batch_size=16), optim=given.optim)
    changed = {n for n, value in plan.task.state_dict().items() if not torch.equal(value, before[n])}
    assert changed == moving  # the statistics of batch norms stay too


def test_layers_join_one_after_the_other_and_early_ones_move_less(photos: Path, published: Path) -> None:
    plan = RECIPES["resnet"].build(options(photos, weights=published, unfreeze=2.0, step_decay=0.5))
    task = plan.task
    waits = {name: task.frozen_epochs(f"model.{name}") for name in ("fc.weight", "layer4.0.conv1.weight",
             "layer3.0.conv1.weight", "conv1.weight")}  # fmt: skip
    assert list(waits.values()) == [0, 2, 4, 10]
    assert task.step_factor("model.fc.weight") == 1
    assert task.step_factor("model.layer4.1.bn2.bias") == 0.5
    assert task.step_factor("model.conv1.weight") == 0.5**5
    assert all(p.requires_grad for p in task.parameters())


@pytest.mark.usefixtures("unseen")
def test_a_run_is_taken_over_with_its_network_and_its_scale(photos: Path, tmp_path: Path) -> None:
    recipe = RECIPES["resnet"]
    first = execute(
        recipe,
        ResNetOptions(data=photos, epochs=1, quiet=True, out=tmp_path / "first", images=Images(size=12)),
    )
    other = write_images(tmp_path / "other", seed=9)
    (other / "noise").rename(other / "snow")
    plan = recipe.build(ResNetOptions(data=other, model=ResNet(weights=first.run)))
    from quire.runs import load

    source = load(first.run)
    assert plan.data.preparation.size == (12, 12)
    assert plan.data.preparation.mean == source.preparation.mean
    assert [str(c) for c in plan.data.classes] == ["bar", "snow", "square"]
    for name, value in source.task.model.state_dict().items():
        assert torch.equal(plan.task.model.state_dict()[name], value), name


def test_weights_that_do_not_fit_are_refused_before_anything_is_written(
    photos: Path, published: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(DataError, match="not those of this ResNet"):
        execute(
            RECIPES["resnet"], ResNetOptions(data=photos, model=ResNet(depth=34, weights=published), out=out)
        )
    table = tmp_path / "table"
    mlp = RECIPES["mlp"]
    execute(mlp, mlp.options(data=write_csv(tmp_path / "a.csv"), out=table, epochs=1, quiet=True))
    with pytest.raises(InputError, match="is a run of 'mlp'"):
        execute(RECIPES["resnet"], ResNetOptions(data=photos, model=ResNet(weights=table), out=out))
    assert not out.exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: ResNet(freeze=True), "--model.freeze without --model.weights"),
        (lambda: ResNet(unfreeze=1.0), "--model.unfreeze without --model.weights"),
        (lambda: ResNet(weights=Path("a"), freeze=True, unfreeze=1.0), "both --model.freeze and"),
        (lambda: ResNetOptions(train=Train(noise=Noise(inputs=0.1))), "noise.inputs 0.1 with images"),
        (lambda: SSDOptions(train=Train(noise=Noise(inputs=0.1))), "noise.inputs 0.1 with images"),
        (lambda: Detector(levels=0), "--model.levels is 0"),
        (lambda: Augment(crop=0.0), "--augment.crop is 0"),
        (lambda: Images(size=0), "--images.size is 0"),
        (lambda: Images(validation=0.5, test=0.5), "--images.validation"),
    ],
)
def test_options_that_make_no_sense_fail_when_they_are_made(wrong: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrong()  # type: ignore[operator]


def test_mixing_targets_is_refused_where_they_are_boxes() -> None:
    with pytest.raises(InputError, match=r"--augment\.mixup 0\.2 where targets are not classes"):
        RECIPES["ssd"].build(SSDOptions(augment=Augment(mixup=0.2)))


def test_an_image_of_another_size_is_brought_to_what_the_network_takes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(8):
            noise = np.random.default_rng(i).integers(0, 255, (50, 40 + i), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / name / f"{i}.png")
    recipe = RECIPES["lenet"]
    plan = recipe.build(recipe.options(data=tmp_path))
    assert plan.data.preparation.size == (32, 32)
    assert type(plan.task.model).__name__ == "LeNet"
    assert plan.task.predict(plan.data.train.inputs[:2])["class"].shape == (2,)


def test_mixed_images_train_and_auxiliary_heads_count(photos: Path) -> None:
    """One step with mixup, cutmix and GoogLeNet's auxiliary classifiers."""
    from quire.train import fit

    augment = Augment(mixup=0.2, cutmix=1.0, flip=0.5, crop=0.8, colour=0.2, cut_out=0.3)
    given = GoogLeNetOptions(data=photos, augment=augment, model=AuxiliaryNet(auxiliary=True))
    plan = RECIPES["googlenet"].build(given)
    batch = plan.task.augment(plan.data.train.take(torch.arange(6)))
    assert batch.target.shape == (6, 3)
    assert batch.target.sum(1).tolist() == pytest.approx([1.0] * 6)
    before = plan.task.model.aux1.fc2.weight.detach().clone()
    found = fit(plan.task, plan.data.train, plan.data.validation, steps=2, train=given.train)
    values = found.history[0]["values"]
    assert values["loss"] == pytest.approx(values["target"] + 0.3 * values["auxiliary"], rel=1e-4)
    assert "auxiliary" not in found.history[1]["values"]
    assert not torch.equal(plan.task.model.aux1.fc2.weight, before)


@pytest.mark.parametrize("name", ["lenet", "ssd"])
def test_the_report_shows_what_the_network_sees(name: str, photos: Path, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    data = photos if name == "lenet" else write_scenes(tmp_path / "scenes")
    outcome = execute(recipe, recipe.options(data=data, epochs=1, quiet=True, out=tmp_path / "run"))
    figures = {path.stem for path in (outcome.run / "figures").glob("*.svg")}
    wanted = {"lenet": {"filters", "maps", "augmented"}, "ssd": {"filters", "boxes", "precision-recall"}}
    assert figures >= wanted[name]
    report = outcome.report.read_text()
    assert "Grad-CAM" in report if name == "lenet" else "mAP at IoU 0.5" in report


def test_a_detector_takes_over_a_backbone(published: Path, tmp_path: Path) -> None:
    scenes = write_scenes(tmp_path / "scenes")
    given = SSDOptions(
        data=scenes, images=Scenes(size=64), model=Detector(weights=published, backbone_step=0.1)
    )
    plan = RECIPES["ssd"].build(given)
    file = torch.load(published, weights_only=True)
    own = plan.task.model.backbone.state_dict()
    assert torch.equal(own["layer1.0.conv1.weight"], file["layer1.0.conv1.weight"])
    assert plan.task.step_factor("model.backbone.conv1.weight") == 0.1
    assert plan.task.step_factor("model.classes.0.weight") == 1.0


def test_few_images_are_learned_for_more_epochs(photos: Path) -> None:
    plan = RECIPES["resnet"].build(ResNetOptions(data=photos))
    assert plan.epochs == 600  # one step an epoch
    assert isinstance(plan.task.model, type(resnet20()))
