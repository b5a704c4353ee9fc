"""Weights files: what is read, what is refused, and what fits a network that is not quite the same."""

from __future__ import annotations

import os
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from quire.errors import DataError, InputError
from quire.models import BUILDERS, ConvNet, load_weights, read_weights


def tiny(name: str = "resnet18", classes: int = 5, **config: Any) -> ConvNet:
    shallow = {"block_config": (2, 11)} if name == "densenet121" else {}
    return BUILDERS[name](classes, **{"small": True, "width": 0.125} | shallow | config).eval()


def images(channels: int = 3) -> Tensor:
    return torch.randn(2, channels, 8, 8)


def saved(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".pth", ".pt", ".bin"])
@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saved(tmp_path: Path, ending: str, zipped: bool) -> None:
    state = tiny().state_dict()
    path = saved(tmp_path / f"w{ending}", state, _use_new_zipfile_serialization=zipped)
    assert same(read_weights(path), state)
    assert same(read_weights(str(path)), state)


def test_safetensors(tmp_path: Path) -> None:
    state = tiny().state_dict()
    save_file(state, tmp_path / "w.safetensors")
    assert same(read_weights(tmp_path / "w.safetensors"), state)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3, "best": 0.5},
        lambda state: {"model": state, "optimizer": {"state": {}}},
        lambda state: {"model": {"state_dict": state}},
        lambda state: {f"module.{name}": value for name, value in state.items()},
        lambda state: {"state_dict": {f"module._orig_mod.{name}": value for name, value in state.items()}},
        lambda state: OrderedDict(
            (name, nn.Parameter(v, v.is_floating_point())) for name, v in state.items()
        ),
    ],
)
def test_wrappers_and_prefixes(tmp_path: Path, wrap: Any) -> None:
    state = tiny().state_dict()
    found = read_weights(saved(tmp_path / "w.pth", wrap(state)))
    assert same(found, state)
    assert not any(value.requires_grad for value in found.values())


def test_a_name_that_begins_like_a_prefix_is_kept(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", {"module.a": torch.ones(1), "b": torch.ones(1)})
    assert list(read_weights(path)) == ["module.a", "b"]


class Code:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_refused_and_not_run(tmp_path: Path, zipped: bool) -> None:
    trap = tmp_path / "ran"
    content = {"state_dict": tiny().state_dict(), "hook": Code(trap)}
    path = saved(tmp_path / "w.pth", content, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InputError) as caught:
        read_weights(path)
    assert not trap.exists()
    text = str(caught.value)
    assert "asks for posix.system, which is code and was not run" in text
    assert "save the state_dict alone" in text
    assert "weights_only" not in text  # PyTorch's advice is to switch the protection off
    torch.load(path, weights_only=False)
    assert trap.exists(), "the file was no trap"


@pytest.mark.parametrize("content", [nn.Linear(2, 2), {"state_dict": {}, "args": Namespace(lr=1)}], ids=str)
def test_whole_models_and_options_are_code(tmp_path: Path, content: Any) -> None:
    with pytest.raises(
        InputError, match=r"asks for (torch\.nn\.modules\.linear\.Linear|argparse\.Namespace)"
    ):
        read_weights(saved(tmp_path / "w.pth", content))


@pytest.mark.parametrize("ending", [".pth", ".safetensors", "legacy.pth"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_truncated_files(tmp_path: Path, ending: str, share: float) -> None:
    path = tmp_path / f"w{ending}"
    if ending == ".safetensors":
        save_file(tiny().state_dict(), path)
    else:
        saved(path, tiny().state_dict(), _use_new_zipfile_serialization=ending == ".pth")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError, match=r"(?s)w.*: a damaged weights file.*download the file again"):
        read_weights(path)


@pytest.mark.parametrize("content", [b"hello world, this is no weights file", bytes(range(256)) * 4])
def test_other_files(tmp_path: Path, content: bytes) -> None:
    for ending in (".pth", ".safetensors"):
        (tmp_path / f"w{ending}").write_bytes(content)
        with pytest.raises(DataError, match="a damaged weights file, or none at all"):
            read_weights(tmp_path / f"w{ending}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "list of 2 entries"),
        ({}, "dict of 0 entries"),
        (3, "int of 0 entries"),
        ({"a": torch.ones(1), "b": 2}, "'b' of type int"),
        ({"state_dict": {"a": [1]}}, "'a' of type list"),
    ],
)
def test_no_tensors(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"(?s){message}.*tensors by name"):
        read_weights(saved(tmp_path / "w.pth", content))


def test_missing_files_and_other_endings(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_weights(tmp_path / "w.pth")
    with pytest.raises(DataError, match="no such file"):
        read_weights(tmp_path)
    (tmp_path / "w.h5").write_bytes(b"")
    with pytest.raises(DataError, match=r"(?s)ends in '\.h5'.*\.safetensors, \.pth"):
        read_weights(tmp_path / "w.h5")


# Loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["lenet5", "alexnet", "vgg11_bn", "googlenet", "resnext50_32x4d", "densenet121"]
)
def test_the_same_network(tmp_path: Path, name: str) -> None:
    there, here = tiny(name, in_channels=3), tiny(name, in_channels=3)
    assert load_weights(here, saved(tmp_path / "w.pth", there.state_dict())) == []
    assert same(here.state_dict(), there.state_dict())
    x = images()
    assert torch.equal(here(x), there(x))


@pytest.mark.parametrize("name", ["alexnet", "vgg11", "googlenet", "resnet18", "densenet121"])
def test_another_number_of_classes_keeps_a_new_head(tmp_path: Path, name: str) -> None:
    there, here = tiny(name, 9), tiny(name, 4)
    fresh = {key: value.clone() for key, value in here.state_dict().items()}
    notes = load_weights(here, saved(tmp_path / "w.pth", there.state_dict()))
    assert notes == ["the last layer starts anew: the file has 9 classes, the network 4"]
    for key, value in here.state_dict().items():
        expected = fresh if key.startswith(here.parts[-1]) else there.state_dict()
        assert torch.equal(value, expected[key]), key


def test_colours_are_added_up_for_grey_images(tmp_path: Path) -> None:
    there, here = tiny(), tiny(in_channels=1)
    notes = load_weights(here, saved(tmp_path / "w.pth", there.state_dict()))
    assert notes == ["the first convolution adds up its three colours for grey images"]
    grey = images(1)
    torch.testing.assert_close(here(grey), there(grey.expand(-1, 3, -1, -1)))


def test_auxiliary_heads_of_one_side(tmp_path: Path) -> None:
    with_heads, without = tiny("googlenet"), tiny("googlenet", aux_logits=False)
    notes = load_weights(without, saved(tmp_path / "a.pth", with_heads.state_dict()))
    assert notes == ["the file's auxiliary heads are left out"]
    x = images()
    assert torch.equal(with_heads(x), without(x))
    again = tiny("googlenet")
    fresh = again.aux1.fc1.weight.clone()
    notes = load_weights(again, saved(tmp_path / "b.pth", without.state_dict()))
    assert notes == ["the auxiliary heads start anew: the file has none"]
    assert torch.equal(again.aux1.fc1.weight, fresh)
    assert torch.equal(again(x), without(x))


@pytest.mark.parametrize("name", ["resnet18", "googlenet"])
def test_what_was_replaced_by_the_identity_is_left_out(tmp_path: Path, name: str) -> None:
    there, here = tiny(name), tiny(name)
    last = "layer4" if name == "resnet18" else "inception5b"
    for gone in (last, "fc"):
        setattr(here, gone, nn.Identity())
    (note,) = load_weights(here, saved(tmp_path / "w.pth", there.state_dict()))
    assert note.startswith(last)
    assert note.endswith("are left out: the network goes without")
    assert here.parts[-1] == (() if name == "resnet18" else ("aux1.fc2.", "aux2.fc2."))
    assert len(here.parts) == len(there.parts) - (name == "resnet18")
    x = images()
    assert torch.equal(here.stages(x)[-2], there.stages(x)[-2])


def test_several_changes_at_once(tmp_path: Path) -> None:
    there, here = tiny("googlenet", 9), tiny("googlenet", 4, in_channels=1, aux_logits=False)
    notes = load_weights(here, saved(tmp_path / "w.pth", there.state_dict()))
    assert [note.split()[1] for note in notes] == ["file's", "last", "first"]
    assert torch.equal(here.inception5b.branch1.conv.weight, there.inception5b.branch1.conv.weight)
    again = tiny("googlenet", 12)
    notes = load_weights(
        again, saved(tmp_path / "w.pth", tiny("googlenet", 9, aux_logits=False).state_dict())
    )
    assert notes == [
        "the auxiliary heads start anew: the file has none",
        "the last layer starts anew: the file has 9 classes, the network 12",
    ]


def test_the_names_of_published_densenets(tmp_path: Path) -> None:
    there, here = tiny("densenet121"), tiny("densenet121")
    old = {}
    for key, value in there.state_dict().items():
        for part in ("norm1", "conv1", "norm2", "conv2"):
            if "denselayer" in key:
                key = key.replace(f".{part}.", f".{part[:-1]}.{part[-1]}.")
        old[key] = value
    assert "features.denseblock2.denselayer11.norm.2.running_mean" in old
    assert load_weights(here, saved(tmp_path / "w.pth", old)) == []
    assert same(here.state_dict(), there.state_dict())


def test_counters_of_batch_norm_may_be_missing(tmp_path: Path) -> None:
    there, here = tiny(), tiny()
    old = {key: value for key, value in there.state_dict().items() if "num_batches" not in key}
    assert load_weights(here, saved(tmp_path / "w.pth", old)) == []
    assert torch.equal(here.conv1.weight, there.conv1.weight)


def test_other_types_are_converted(tmp_path: Path) -> None:
    there, here = tiny(), tiny()
    half = {
        key: value.half() if value.is_floating_point() else value for key, value in there.state_dict().items()
    }
    load_weights(here, saved(tmp_path / "w.pth", half))
    assert here.conv1.weight.dtype == torch.float32
    torch.testing.assert_close(here.conv1.weight, there.conv1.weight, rtol=1e-3, atol=1e-3)


def test_weights_of_another_network_name_it(tmp_path: Path) -> None:
    here = tiny("resnet18", layers=(2, 2, 2, 1))
    before = {key: value.clone() for key, value in here.state_dict().items()}
    path = saved(tmp_path / "w.pth", BUILDERS["resnet20"](7, in_channels=2).state_dict())
    with pytest.raises(DataError) as caught:
        load_weights(here, path)
    text = str(caught.value)
    assert f"{path}: weights that are not those of this ResNet: without layer" in text
    assert "with unknown layer1.2.conv1.weight" in text
    assert "more" in text
    assert "conv1.weight (16, 2, 3, 3) instead of (8, 3, 3, 3)" in text
    assert "these are of resnet20" in text
    assert "build the network with quire.models.resnet20" in text
    assert same(here.state_dict(), before), "a network that does not fit is not touched"


def test_weights_of_no_network(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", {"a": torch.ones(1), "b": torch.ones(2)})
    with pytest.raises(DataError, match=r"(?s)with unknown a, b.*take the weights of this network"):
        load_weights(tiny(), path)


def test_a_head_that_reads_other_features_is_no_new_head(tmp_path: Path) -> None:
    there = tiny(classes=9).state_dict()
    there["fc.weight"] = torch.zeros(9, 3)
    with pytest.raises(DataError, match=r"fc\.weight \(9, 3\) instead of \(5, 64\)"):
        load_weights(tiny(), saved(tmp_path / "w.pth", there))


def test_four_channels_are_not_added_up(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", tiny(in_channels=4).state_dict())
    with pytest.raises(DataError, match=r"conv1\.weight \(8, 4, 3, 3\) instead of \(8, 1, 3, 3\)"):
        load_weights(tiny(in_channels=1), path)
