"""Adapters in files, on bases that change, in the trainer, and the mistakes one can make with them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from quire.data.batch import TensorData
from quire.errors import DataError, InputError
from quire.models import MLP, MLPConfig
from quire.nn.heads import Categorical
from quire.options import Optim, Train
from quire.tasks.supervised import Supervised
from quire.train import fit
from quire.tuning import Adapters, LoRAConfig, inject, quantise_base, read_adapter
from tests.tuning.layers import randomise


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LSTM(6, 3), nn.Flatten(0))


def small() -> tuple[nn.Module, Adapters]:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    adapters = inject(model, LoRAConfig(rank=2, alpha=3.0, full=("3.bias",)))
    randomise(adapters)
    return model, adapters


TOKENS = torch.randint(0, 9, (5, 7))


def test_an_adapter_alone_is_saved_and_loaded(tmp_path: Path) -> None:
    model, adapters = small()
    expected = model(TOKENS)
    adapters.save(tmp_path / "one.safetensors")
    base, others = copy.deepcopy((model, adapters))
    others.detach()
    fresh = Adapters(base)
    assert fresh.load(tmp_path / "one.safetensors") == "default"
    assert not torch.allclose(base(TOKENS), expected)  # loaded, not active
    fresh.activate("default")
    assert torch.equal(base(TOKENS), expected)
    assert fresh.configs == adapters.configs
    assert fresh.load(tmp_path / "one.safetensors", "again") == "again"
    fresh.activate("again")
    assert torch.equal(base(TOKENS), expected)
    size = (tmp_path / "one.safetensors").stat().st_size
    assert size < 4 * sum(p.numel() for p in adapters.parameters()) + 2500
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    _, adapters = small()
    adapters.save(tmp_path / "one.safetensors")
    with safe_open(tmp_path / "one.safetensors", framework="pt") as file:
        header = json.loads(file.metadata()["quire.adapter"])
        assert set(file.keys()) == {
            "base_model.model.0.lora_embedding_A", "base_model.model.0.lora_embedding_B",
            "base_model.model.1.lora_A.weight", "base_model.model.1.lora_B.weight",
            "base_model.model.3.lora_A.weight", "base_model.model.3.lora_B.weight", "base_model.model.3.bias",
        }  # fmt: skip
    assert header == {
        "format": 1,
        "name": "default",
        "config": {"rank": 2, "alpha": 3.0, "dropout": 0.0, "targets": ["all"], "full": ["3.bias"]},
    }
    found = read_adapter(tmp_path / "one.safetensors")
    assert (found.name, found.config) == ("default", LoRAConfig(rank=2, alpha=3.0, full=("3.bias",)))


def test_recurrent_adapters_have_names_of_their_own(tmp_path: Path) -> None:
    model = nn.LSTM(3, 4)
    adapters = inject(model, LoRAConfig(rank=2))
    randomise(adapters)
    assert "base_model.model.lora_A.weight_hh_l0" in adapters.state_dict()
    adapters.save(tmp_path / "one.safetensors")
    x = torch.randn(5, 2, 3)
    expected = model(x)[0]
    adapters.remove("default")
    assert not torch.allclose(model(x)[0], expected)
    adapters.load(tmp_path / "one.safetensors")
    adapters.activate("default")
    assert torch.equal(model(x)[0], expected)


def test_files_that_are_no_adapters(tmp_path: Path) -> None:
    adapters = Adapters(nn.Linear(3, 2))
    with pytest.raises(DataError, match=r"none\.safetensors: no such file"):
        adapters.load(tmp_path / "none.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(DataError, match="does not say what adapter it is"):
        adapters.load(tmp_path / "plain.safetensors")
    for header, message in (
        ({"format": 2, "name": "x", "config": {}}, "an adapter of format 2"),
        ({"format": 1, "name": "x", "config": {"rank": "many"}}, "does not say what adapter it is"),
        ({"format": 1, "name": "x", "config": {"rnk": 4}}, "does not say what adapter it is"),
        ([1], "does not say what adapter it is"),
    ):
        metadata = {"quire.adapter": json.dumps(header)}
        save_file({"x": torch.zeros(1)}, tmp_path / "odd.safetensors", metadata)
        with pytest.raises(DataError, match=message):
            adapters.load(tmp_path / "odd.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="a damaged file, or no safetensors at all"):
        adapters.load(tmp_path / "broken.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"folder: no adapter_config\.json"):
        adapters.load(tmp_path / "folder")
    (tmp_path / "folder" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(DataError, match="not the description of a LoRA adapter"):
        adapters.load(tmp_path / "folder")
    assert adapters.configs == {}


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    _, adapters = small()
    adapters.save(tmp_path / "one.safetensors")
    with pytest.raises(DataError, match=r"changes '0\.weight', which this model does not have"):
        Adapters(nn.Linear(3, 2)).load(tmp_path / "one.safetensors")
    wider = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    with pytest.raises(DataError, match=r"factors of '1\.weight' of shape \(6, 2\)\n  expected: \(7, 2\)"):
        Adapters(wider).load(tmp_path / "one.safetensors")
    state = adapters.state_dict()
    del state["base_model.model.1.lora_B.weight"]
    header = {"format": 1, "name": "x", "config": {"rank": 2}}
    save_file(state, tmp_path / "half.safetensors", {"quire.adapter": json.dumps(header)})
    with pytest.raises(DataError, match=r"'1\.weight' with A alone"):
        Adapters(copy.deepcopy(small()[1]).detach()).load(tmp_path / "half.safetensors")


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, adapters = small()
    adapters.save(tmp_path / "one.safetensors")
    before = (tmp_path / "one.safetensors").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        adapters.save(tmp_path / "one.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]
    assert (tmp_path / "one.safetensors").read_bytes() == before


# Mistakes -------------------------------------------------------------------------------------


def test_mistakes() -> None:
    model, adapters = small()
    with pytest.raises(InputError, match="unknown adapter 'defult'") as caught:
        adapters.activate("defult")
    assert "did you mean 'default'?" in str(caught.value)
    with pytest.raises(InputError, match="a model that already has adapters"):
        inject(model, LoRAConfig())
    for name in ("default", "a.b", "", "train"):
        with pytest.raises(InputError, match=f"an adapter called '{name}'"):
            adapters.add(LoRAConfig(), name)
    with pytest.raises(InputError, match="adapter 'default' with weight inf"):
        adapters.activate({"default": float("inf")})
    with pytest.raises(InputError, match="weights that are not merged"):
        adapters.unmerge()
    adapters.add(LoRAConfig(targets=("1",)), "other")
    with pytest.raises(InputError, match="2 adapters and no name"):
        adapters.state_dict()
    adapters.deactivate()
    with pytest.raises(InputError, match="no active adapter to merge"):
        adapters.merge()
    adapters.activate("other")
    adapters.merge()
    for forbidden in (
        adapters.merge, adapters.deactivate, lambda: adapters.add(LoRAConfig(), "third"),
        lambda: adapters.remove("other"), lambda: adapters.load_base({}),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"call unmerge\(\) first"):
            forbidden()


def test_adapters_can_be_saved_while_they_are_merged() -> None:
    _, adapters = small()
    before = {key: value.clone() for key, value in adapters.state_dict().items()}
    adapters.merge()
    state = adapters.state_dict()
    assert all(torch.equal(state[key], value) for key, value in before.items())
    assert adapters.merged


def test_a_merge_that_fails_leaves_every_weight_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapters = small()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = model(TOKENS)
    from quire.tuning import merging

    real, calls = merging._error, []

    def fail(*tensors: torch.Tensor) -> merging.MergeError:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError
        return real(*tensors)

    monkeypatch.setattr(merging, "_error", fail)
    with pytest.raises(MemoryError):
        adapters.merge()
    assert not adapters.merged
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert torch.equal(model(TOKENS), expected)


def test_a_list_of_adapters() -> None:
    _, adapters = small()
    adapters.add(LoRAConfig(rank=1, targets=("1",)), "other")
    first, second = adapters.summaries()
    assert (first.name, first.weight, first.weights) == ("default", 1.0, 4)
    assert first.parameters == 2 * (9 + 4) + 2 * (4 + 6) + 2 * (6 + 3) + 3
    assert (second.name, second.weight, second.weights, second.parameters) == ("other", 0.0, 1, 4 + 6)


# The base -------------------------------------------------------------------------------------


def test_the_base_keeps_its_names() -> None:
    model, adapters = small()
    plain = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    base = adapters.base_state_dict()
    plain.load_state_dict(base)  # strict: the same names, nothing more
    adapters.deactivate()
    assert torch.equal(plain(TOKENS), model(TOKENS))
    other = {key: torch.randn_like(value) for key, value in base.items()}
    adapters.load_base(other)
    plain.load_state_dict(other)
    assert torch.equal(plain(TOKENS), model(TOKENS))
    with pytest.raises(InputError, match=r"a base without 1\.bias"):
        adapters.load_base({key: value for key, value in other.items() if key != "1.bias"})
    with pytest.raises(InputError, match=r"unknown 8\.weight"):
        adapters.load_base({**other, "8.weight": torch.zeros(1)})


@pytest.mark.parametrize("quantise", [False, True])
def test_a_whole_state_dict_fits_a_model_made_from_the_description(quantise: bool) -> None:
    def fresh() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 70), nn.Linear(70, 6), nn.Tanh(), nn.Linear(6, 3))

    model = fresh()
    if quantise:
        quantise_base(model, ("1",))
    adapters = inject(model, LoRAConfig(rank=2, dropout=0.1), "first")
    adapters.add(LoRAConfig(rank=1, targets=("3",), full=("1.bias",)), "second")
    randomise(adapters)
    adapters.activate({"first": 0.5, "second": 2.0})
    spec = json.loads(json.dumps(adapters.spec()))
    again = fresh()
    others = Adapters.from_spec(again, spec)
    again.load_state_dict(model.state_dict())
    model.eval(), again.eval()
    assert torch.equal(again(TOKENS), model(TOKENS))
    assert (others.configs, others.active) == (adapters.configs, adapters.active)
    assert [n for n, p in again.named_parameters() if p.requires_grad] == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]


# In the trainer -------------------------------------------------------------------------------


def rows(shift: float) -> TensorData:
    torch.manual_seed(5)
    x = torch.randn(200, 4)
    return TensorData({"inputs": x, "target": ((x[:, 0] + shift * x[:, 1]) > 0).long()})


def test_the_trainer_moves_adapters_alone_and_learns() -> None:
    torch.manual_seed(0)
    model = MLP(MLPConfig(4, 2, hidden=(16,)))
    task = Supervised(model, Categorical(2))
    fit(task, rows(0.0), epochs=30, optim=Optim("adam", lr=0.01))
    base = copy.deepcopy(model.state_dict())
    adapters = inject(model, LoRAConfig(rank=2, alpha=4.0))
    data = rows(-1.5)

    def accuracy() -> float:
        with torch.no_grad():
            return (model(data.inputs).argmax(1) == data.target).float().mean().item()

    assert accuracy() < 0.75
    fit(task, data, epochs=60, optim=Optim("adam", lr=0.02), train=Train(micro_batches=2))
    assert accuracy() > 0.93
    now = adapters.base_state_dict()
    assert all(torch.equal(now[key], value) for key, value in base.items())
    tuned = accuracy()
    adapters.merge()
    assert accuracy() == tuned
    adapters.unmerge()
    adapters.deactivate()
    assert accuracy() < 0.75
