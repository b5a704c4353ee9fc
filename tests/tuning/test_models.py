"""Quire's own sequence models under adapters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from quire.models.gpt import GPT, GPTConfig
from quire.nn.attention import MultiHeadAttention
from quire.nn.recurrent import GRU, LSTM, RNN
from quire.tuning import Adapters, LoRAConfig, inject, quantise_base
from quire.tuning.targets import find_sites
from tests.tuning.layers import by_hand, first_tensor, overlays, randomise


def sum_put_in(model: nn.Module, plain: nn.Module) -> None:
    """Write W₀ + ΔW into `plain`, weight by weight, from the factors of `model`."""
    for name, overlay in overlays(model).items():
        pairs = {key: (overlay.adapters[key].A, overlay.adapters[key].B) for key in overlay.active}
        plain.get_parameter(name).data = by_hand(plain, name, overlay, pairs).detach()


def gpt(tied: bool = True) -> GPT:
    return GPT(GPTConfig(vocab_size=19, context=8, layers=2, heads=2, width=12, tied=tied))


@pytest.mark.parametrize("tied", [True, False])
def test_gpt(tied: bool) -> None:
    model = gpt(tied).double().eval()
    plain = copy.deepcopy(model)
    adapters = inject(model, LoRAConfig(rank=2, alpha=4.0))
    randomise(adapters)
    assert len(overlays(model)) == 2 * 4 + 2 + (not tied)
    sum_put_in(model, plain)
    tokens = torch.randint(0, 19, (3, 7))
    assert torch.allclose(model(tokens), plain(tokens), rtol=1e-10, atol=1e-12)
    model(tokens).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in adapters.parameters())
    _, cache = model.prefill(tokens[:, :-1])
    again, _ = model.advance(tokens[:, -1], cache)
    assert torch.allclose(again, plain(tokens)[:, -1], rtol=1e-10, atol=1e-12)
    adapters.merge()
    assert torch.allclose(model(tokens), plain(tokens), rtol=1e-10, atol=1e-12)


def test_targets_of_gpt() -> None:
    kinds = {site.name: site.kind for site in find_sites(gpt()) if len(site.shape) > 1}
    assert {name for name, kind in kinds.items() if kind == "attention"} == {
        f"transformer.h.{i}.attn.{part}.weight" for i in (0, 1) for part in ("c_attn", "c_proj")
    }
    assert {name for name, kind in kinds.items() if kind == "dense"} == {
        f"transformer.h.{i}.mlp.{part}.weight" for i in (0, 1) for part in ("c_fc", "c_proj")
    }


@pytest.mark.parametrize("quantise", [False, True])
def test_a_whole_gpt_is_saved_and_loaded(quantise: bool) -> None:
    model = gpt().eval()
    if quantise:
        assert len(quantise_base(model)) == 8  # the tied embedding stays
    adapters = inject(model, LoRAConfig(rank=2, targets=("attention",), full=("ln_f",)))
    randomise(adapters)
    again = gpt().eval()
    Adapters.from_spec(again, adapters.spec())
    again.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 19, (3, 7))
    assert torch.equal(again(tokens), model(tokens))


def test_a_checkpointed_gpt_has_the_same_gradients() -> None:
    model = gpt()
    quantise_base(model)
    adapters = inject(model, LoRAConfig(rank=2))
    randomise(adapters)
    tokens = torch.randint(0, 19, (3, 7))
    found = []
    for checkpoint in (False, True):
        model.transformer.checkpoint = checkpoint
        model.zero_grad()
        model(tokens).square().mean().backward()
        found.append([p.grad.clone() for p in adapters.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(*found, strict=True))


LAYERS = {
    "elman": (lambda: RNN(3, 4), 2),
    "lstm": (lambda: LSTM(3, 4, 2, bidirectional=True), 8),
    "gru": (lambda: GRU(3, 4), 2),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("lengths", [None, torch.tensor([5, 0, 2])])
def test_recurrent_layers(name: str, lengths: Tensor | None) -> None:
    make, count = LAYERS[name]
    layer = make().double()
    plain = copy.deepcopy(layer)
    adapters = inject(layer, LoRAConfig(rank=2, targets=("recurrent",)))
    randomise(adapters)
    assert len(overlays(layer)) == count
    sum_put_in(layer, plain)
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    output = first_tensor(layer(x, lengths=lengths))
    assert torch.allclose(output, first_tensor(plain(x, lengths=lengths)), rtol=1e-12)
    output.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in adapters.parameters())


@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 3}])
def test_multi_head_attention(widths: dict[str, int]) -> None:
    layer = MultiHeadAttention(6, 2, **widths).double()
    plain = copy.deepcopy(layer)
    adapters = inject(layer, LoRAConfig(rank=2, targets=("attention",)))
    randomise(adapters)
    assert len(overlays(layer)) == (4 if widths else 2)
    sum_put_in(layer, plain)
    shapes = (6, widths.get("kdim", 6), widths.get("vdim", 6))
    query, key, value = (torch.randn(2, 4, width, dtype=torch.float64) for width in shapes)
    output = first_tensor(layer(query, key, value))
    assert torch.allclose(output, first_tensor(plain(query, key, value)), rtol=1e-10)
