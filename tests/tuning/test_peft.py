"""The same as PEFT: outputs, gradients, merged weights, and files in both directions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.errors import DataError, InputError
from quire.tuning import LoRAConfig, inject, read_adapter
from quire.tuning.adapters import Adapters

pytestmark = pytest.mark.slow

peft = pytest.importorskip("peft")

PREFIX = "base_model.model."


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Net(nn.Module):
    """An embedding, a convolution and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.middle = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.conv(self.embed(tokens).unsqueeze(1)).relu()
        return self.head(self.middle(hidden.mean((2, 3))).tanh())


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=23, n_positions=16, n_embd=12, n_layer=2, n_head=3,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, tuple[Any, list[str], dict[str, Any]]] = {
    "embedding, convolution, dense": (Net, ["embed", "conv", "middle"], {}),
    "gpt-2": (gpt2, ["c_attn", "c_proj", "c_fc"], {"fan_in_fan_out": True}),
}


def both(name: str, targets: list[str] | None = None) -> tuple[Adapters, Any]:
    """Ours and PEFT's on copies of one model, with the same random factors."""
    make, found, options = MODELS[name]
    model = make().double()
    theirs = peft.get_peft_model(
        copy.deepcopy(model),
        peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets or found, **options),
        autocast_adapter_dtype=False,
    )
    ours = inject(model, LoRAConfig(rank=3, alpha=5.0, targets=tuple(targets or found)))
    state = {}
    for key, value in peft.get_peft_model_state_dict(theirs).items():
        state[key] = torch.randn_like(value) * 0.2
    peft.set_peft_model_state_dict(theirs, state)
    mine = ours.state_dict()
    assert {key: value.shape for key, value in mine.items()} == {k: v.shape for k, v in state.items()}
    for key, value in mine.items():
        value.copy_(state[key])
    return ours, theirs


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_merged_weights(name: str) -> None:
    ours, theirs = both(name)
    tokens = torch.randint(0, 11, (2, 9))
    mine, other = logits(ours.model(tokens)), logits(theirs(tokens))
    assert torch.allclose(mine, other, rtol=1e-10, atol=1e-12)
    cotangent = torch.randn_like(mine)
    mine.backward(cotangent)
    other.backward(cotangent)
    found = {key.replace(".default", ""): grad for key, grad in gradients(theirs).items()}
    for key, parameter in zip(ours.state_dict(), ours.parameters(), strict=True):
        assert torch.allclose(parameter.grad, found[key], rtol=1e-8, atol=1e-12), key
    assert len(found) == len(gradients(ours.model))

    ours.merge()
    merged = theirs.merge_and_unload()
    for key, value in merged.state_dict().items():
        assert torch.allclose(ours.model.state_dict()[key], value, rtol=1e-10, atol=1e-12), key
    assert torch.allclose(logits(ours.model(tokens)), other, rtol=1e-9, atol=1e-12)


def test_attention_of_torch_is_that_of_peft(tmp_path: Path) -> None:
    """PEFT adapts in_proj and out_proj of nn.MultiheadAttention together, under names of its own. Its
    version 0.21 adds the change of out_proj twice, so that one is zero here."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x)[0]

    model = Attend()
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["attn"])
    theirs = peft.get_peft_model(copy.deepcopy(model), config)
    state = {k: torch.randn_like(v) * 0.3 for k, v in peft.get_peft_model_state_dict(theirs).items()}
    state[f"{PREFIX}attn.base_layer.out_proj.lora_B.weight"].zero_()
    peft.set_peft_model_state_dict(theirs, state)
    ours = inject(model, LoRAConfig(rank=2, alpha=3.0, targets=("attention",)))
    assert set(ours.state_dict()) == {
        f"{PREFIX}attn.{where}lora_{side}.{what}"
        for where, what in (("", "in_proj_weight"), ("out_proj.", "weight"))
        for side in "AB"
    }
    for key, value in ours.state_dict().items():
        theirs_key = key.replace("in_proj_weight", "weight").replace("out_proj", "base_layer.out_proj")
        value.copy_(state[theirs_key])
    x = torch.randn(2, 5, 8)
    mine, other = model(x), theirs(x)
    assert torch.allclose(mine, other, atol=1e-6)
    mine.square().sum().backward()
    other.square().sum().backward()
    found = gradients(theirs)
    for key, parameter in zip(ours.state_dict(), ours.parameters(), strict=True):
        if "in_proj" in key:
            grad = found[f"{PREFIX}attn.lora_{key[-16]}.default.weight"]
            assert torch.allclose(parameter.grad, grad, atol=1e-5), key
    theirs.save_pretrained(tmp_path / "theirs")
    fresh = Adapters(_base(ours))
    fresh.load(tmp_path / "theirs")
    fresh.activate("default")
    assert torch.allclose(fresh.model(x), other, atol=1e-6)


def test_dropout_draws_the_same_numbers() -> None:
    model = nn.Sequential(nn.Linear(20, 6), nn.Linear(6, 4))
    config = peft.LoraConfig(r=2, lora_alpha=2, lora_dropout=0.5, target_modules=["0", "1"])
    theirs = peft.get_peft_model(copy.deepcopy(model), config).train()
    ours = inject(model, LoRAConfig(rank=2, dropout=0.5))
    state = {k: torch.randn_like(v) for k, v in peft.get_peft_model_state_dict(theirs).items()}
    peft.set_peft_model_state_dict(theirs, state)
    for key, value in ours.state_dict().items():
        value.copy_(state[key])
    x = torch.randn(3, 20)
    torch.manual_seed(4)
    mine = model(x)
    torch.manual_seed(4)
    assert torch.allclose(mine, theirs(x), atol=1e-5)


def test_the_factors_start_alike() -> None:
    """A uniform with variance 1/(3·fan-in) and B zero; for embeddings A zero and B normal."""
    model = nn.ModuleDict(
        {"dense": nn.Linear(400, 50), "conv": nn.Conv2d(16, 8, 5), "embed": nn.Embedding(50, 400)}
    )
    theirs = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=64, target_modules=["dense", "conv", "embed"])
    )
    ours = inject(model, LoRAConfig(rank=64)).state_dict()
    for key, value in peft.get_peft_model_state_dict(theirs).items():
        assert ours[key].shape == value.shape
        assert ours[key].std().item() == pytest.approx(value.std().item(), rel=0.05), key
        assert ours[key].abs().max().item() == pytest.approx(value.abs().max().item(), rel=0.3), key


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_of_peft_is_loaded(name: str, tmp_path: Path) -> None:
    ours, theirs = both(name)
    theirs.save_pretrained(tmp_path / "theirs")
    fresh = Adapters(_base(ours))
    assert fresh.load(tmp_path / "theirs") == "default"
    fresh.activate("default")
    tokens = torch.randint(0, 11, (2, 9))
    fresh.model.eval()
    theirs.eval()
    assert torch.allclose(logits(fresh.model(tokens)), logits(theirs(tokens)), rtol=1e-6, atol=1e-8)
    assert read_adapter(tmp_path / "theirs").config.alpha == 5.0


@pytest.mark.parametrize("name", MODELS)
def test_peft_loads_an_adapter_of_ours(name: str, tmp_path: Path) -> None:
    ours, _ = both(name)
    base = _base(ours)
    ours.export(tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours", autocast_adapter_dtype=False).eval()
    tokens = torch.randint(0, 11, (2, 9))
    ours.model.eval()
    assert torch.allclose(logits(theirs(tokens)), logits(ours.model(tokens)), rtol=1e-6, atol=1e-8)


def test_what_is_learned_in_full_is_exported_too(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Net()
    ours = inject(model, LoRAConfig(rank=2, targets=("middle",), full=("head",)))
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    base = _base(ours)
    ours.export(tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    tokens = torch.randint(0, 11, (2, 9))
    assert torch.allclose(theirs(tokens), model.eval()(tokens), atol=1e-5)
    fresh = Adapters(_base(ours))
    fresh.load(tmp_path / "ours")
    fresh.activate("default")
    assert torch.allclose(fresh.model(tokens), model(tokens), atol=1e-6)


def test_what_peft_has_no_name_for_is_refused(tmp_path: Path) -> None:
    ours = inject(nn.LSTM(3, 4), LoRAConfig(rank=2))
    with pytest.raises(InputError, match=r"PEFT has no name for lora_A\.weight_ih_l0"):
        ours.export(tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("option", ["use_dora", "use_rslora"])
def test_other_formulas_of_peft_are_refused(option: str, tmp_path: Path) -> None:
    theirs = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["middle"], **{option: True}))
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(DataError, match=f"an adapter with {option}"):
        read_adapter(tmp_path / "theirs")


def _base(adapters: Adapters) -> nn.Module:
    """A plain copy of the base of `adapters`."""
    other, others = copy.deepcopy((adapters.model, adapters))
    others.detach()
    return other
