"""Which weights a list of targets means, in models of several kinds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quire.errors import InputError
from quire.models.registry import MODELS, build_model
from quire.tuning import LoRAConfig, inject
from quire.tuning.targets import choose, find_sites
from tests.tuning.layers import Conv1D


class AdditiveAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"c_attn": Conv1D(12, 4), "c_proj": Conv1D(4, 4)})
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(8, 4), "c_proj": Conv1D(4, 8)})
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.table = nn.Parameter(torch.zeros(9, 4))
        self.h = nn.ModuleList([Block(), Block()])
        self.mix = nn.MultiheadAttention(4, 2, kdim=3)
        self.pool = AdditiveAttention()
        self.rnn = nn.LSTM(4, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.up = nn.ConvTranspose1d(4, 4, 3)
        self.head = nn.Linear(4, 7)


def names(*targets: str, vectors: bool = False) -> set[str]:
    return {site.name for site in choose(Model(), targets, vectors=vectors)}


ATTENTION = {
    "h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight", "h.1.attn.c_attn.weight", "h.1.attn.c_proj.weight",
    "mix.q_proj_weight", "mix.k_proj_weight", "mix.v_proj_weight", "mix.out_proj.weight", "pool.score.weight",
}  # fmt: skip
DENSE = {
    "h.0.mlp.c_fc.weight", "h.0.mlp.c_proj.weight", "h.1.mlp.c_fc.weight", "h.1.mlp.c_proj.weight",
    "head.weight",
}  # fmt: skip


def test_groups() -> None:
    assert names("attention") == ATTENTION
    assert names("dense") == DENSE
    assert names("recurrent") == {"rnn.weight_ih_l0", "rnn.weight_hh_l0"}
    assert names("convolution") == {"conv.weight", "up.weight"}
    assert names("embedding") == {"wte.weight"}
    assert names("all") == names("attention", "dense", "recurrent", "convolution", "embedding")


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("c_attn", {"h.0.attn.c_attn.weight", "h.1.attn.c_attn.weight"}),
        ("h.1.attn.c_attn", {"h.1.attn.c_attn.weight"}),
        ("h.0.a*", {"h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight"}),
        ("mlp.c_proj", {"h.0.mlp.c_proj.weight", "h.1.mlp.c_proj.weight"}),
        ("weight_hh_l0", {"rnn.weight_hh_l0"}),
        ("rnn", {"rnn.weight_ih_l0", "rnn.weight_hh_l0"}),
        ("table", {"table"}),
        ("head.weight", {"head.weight"}),
    ],
)  # fmt: skip
def test_names_and_patterns(target: str, found: set[str]) -> None:
    assert names(target) == found


def test_vectors_only_on_request() -> None:
    assert names("h.0.norm", vectors=True) == {"h.0.norm.weight", "h.0.norm.bias"}
    with pytest.raises(InputError, match=r"target 'h\.0\.norm' means no weight of this model"):
        names("h.0.norm")


def test_a_target_that_means_nothing_lists_what_could_be_meant() -> None:
    with pytest.raises(InputError) as caught:
        names("attention", "c_atn")
    text = str(caught.value)
    assert "target 'c_atn' means no weight of this model" in text
    assert (
        "expected: all, attention, dense, convolution, recurrent, embedding, or a name or pattern among"
        in text
    )
    assert "wte.weight" in text
    assert "did you mean 'c_attn'?" in text
    model = nn.Linear(3, 2)
    with pytest.raises(InputError, match="expected: all, dense, or a name or pattern among weight"):
        inject(model, LoRAConfig(targets=("attention",)))
    assert model.weight.requires_grad
    assert type(model) is nn.Linear


def test_sites_are_the_same_with_adapters_on() -> None:
    model = Model()
    before = [(site.name, site.kind) for site in find_sites(model)]
    inject(model, LoRAConfig(rank=1, full=("norm",)))
    assert [(site.name, site.kind) for site in find_sites(model)] == before


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_registered_model_can_be_adapted(name: str) -> None:
    """Whatever the registry holds: ΔW = 0 leaves the weights, and detaching restores the model."""
    entry = MODELS[name]
    model = build_model({"model": name, **entry.example.config})
    kinds = [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    matrices = [site.name for site in find_sites(model) if len(site.shape) > 1]
    if not matrices:
        pytest.skip("no weights of more than one dimension")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    adapters = inject(model, LoRAConfig(rank=1, targets=tuple(matrices)))
    assert all(torch.equal(value, state[key]) for key, value in adapters.base_state_dict().items())
    adapters.merge()
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert list(adapters.detach().state_dict()) == keys


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": 1.5}, "rank is 1.5"),
        ({"alpha": -1.0}, "alpha is -1.0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": "some"}, "dropout is 'some'"),
        ({"targets": ()}, "at least one target"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LoRAConfig(**options)  # type: ignore[arg-type]


def test_targets_as_text() -> None:
    assert LoRAConfig(targets="attention, dense").targets == ("attention", "dense")  # type: ignore[arg-type]
