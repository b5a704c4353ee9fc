"""Every kind of layer: outputs and gradients of W₀ + s·B A against the plain layer with the sum put in."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quire.errors import InputError
from quire.tuning import Adapters, LoRAConfig, find_sites, inject
from quire.tuning.factors import LowRank
from tests.tuning.layers import CASES, Conv1D, by_hand, first_tensor, overlays, randomise

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_sum(name: str) -> None:
    case = CASES[name]
    model = case.make().double()
    plain = copy.deepcopy(model)
    adapters = inject(model, LoRAConfig(rank=2, alpha=3.0))
    randomise(adapters)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            # The padding's column of A starts at zero and gets no gradient.
            overlays(model)["weight"].adapters["default"].A.data[:, module.padding_idx] = 0
    inputs = case.inputs()
    leaves: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    weights: dict[str, Tensor] = {}
    laid = overlays(model)
    assert len(laid) == case.changed
    for weight, overlay in laid.items():
        change = overlay.adapters["default"]
        pair = tuple(p.detach().clone().requires_grad_() for p in (change.A, change.B))
        leaves[weight] = {"default": pair}  # type: ignore[dict-item]
        weights[weight] = by_hand(plain, weight, overlay, leaves[weight])
    expected = first_tensor(functional_call(plain, weights, inputs))
    actual = first_tensor(model(*inputs))
    assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(actual, first_tensor(plain(*inputs)), atol=1e-3)
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    actual.backward(cotangent)
    for weight, overlay in laid.items():
        change = overlay.adapters["default"]
        for parameter, leaf in zip((change.A, change.B), leaves[weight]["default"], strict=True):
            assert leaf.grad is not None
            assert torch.allclose(parameter.grad, leaf.grad, rtol=1e-10, atol=1e-12), weight
    assert all(p.grad is None for n, p in model.named_parameters() if "tuning" not in n)


def test_an_encoder_on_its_fused_path() -> None:
    """In evaluation without gradients PyTorch reads the weights and calls no layer."""
    model = nn.TransformerEncoderLayer(6, 2, 10, batch_first=True).eval()
    adapters = inject(model, LoRAConfig(rank=2))
    randomise(adapters)
    x = torch.randn(2, 5, 6)
    slow = model(x)
    with torch.no_grad():
        fast = model(x)
    assert torch.allclose(fast, slow, atol=1e-5)
    adapters.deactivate()
    assert not torch.allclose(model(x), slow, atol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_a_new_adapter_changes_nothing(name: str) -> None:
    case = CASES[name]
    model = case.make().double()
    inputs = case.inputs()
    before = first_tensor(model(*inputs))
    inject(model, LoRAConfig(rank=2, alpha=8.0))
    assert torch.allclose(first_tensor(model(*inputs)), before, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_merged_layers_are_plain_and_unmerging_is_exact(name: str) -> None:
    case = CASES[name]
    model = case.make()
    kinds = [type(module) for module in model.modules()]
    base = copy.deepcopy(model.state_dict())
    adapters = inject(model, LoRAConfig(rank=2, alpha=3.0))
    randomise(adapters)
    model.double()
    inputs = case.inputs()
    expected = first_tensor(model(*inputs))
    model.float()
    report = adapters.merge()
    assert len(report.errors) == case.changed
    assert 0 < report.total.relative < 1e-7
    assert [type(module) for module in model.modules()] == kinds
    assert list(model.state_dict()) == list(base)
    with torch.no_grad():
        merged = first_tensor(copy.deepcopy(model).double()(*inputs))
    assert torch.allclose(merged, expected, rtol=1e-4, atol=1e-5)
    adapters.unmerge()
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in base.items())
    assert torch.allclose(first_tensor(model.double()(*inputs)), expected, rtol=1e-12, atol=1e-12)


def test_a_case_by_hand() -> None:
    """W₀ = I, A = (1 2), B = (3 0)ᵀ, s = 2: y = x + 2·(3, 0)ᵀ(x₁ + 2x₂)."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    adapters = inject(model, LoRAConfig(rank=1, alpha=2.0))
    (first, second) = adapters.parameters()
    first.data, second.data = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [0.0]])
    assert model(torch.tensor([1.0, 1.0])).tolist() == [19.0, 1.0]
    assert model.weight.tolist() == [[7.0, 12.0], [0.0, 1.0]]
    adapters.merge()
    assert model.weight.tolist() == [[7.0, 12.0], [0.0, 1.0]]


def test_scale_is_alpha_over_rank() -> None:
    assert LoRAConfig(rank=4).scale == 1
    assert LoRAConfig(rank=4, alpha=2.0).scale == 0.5


def test_only_the_active_adapter_is_trained() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    adapters = inject(model, LoRAConfig(rank=1), "first")
    adapters.add(LoRAConfig(rank=2, targets=("0",)), "second")
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        f"{i}.tuning.weight.adapters.first.{side}" for i in (0, 1) for side in "AB"
    }
    adapters.activate("second")
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        f"0.tuning.weight.adapters.second.{side}" for side in "AB"
    }
    adapters.detach()
    assert all(p.requires_grad for p in model.parameters())
    assert [type(m) for m in model] == [nn.Linear, nn.Linear]


def test_dropout_acts_on_the_thin_path_alone_and_only_in_training() -> None:
    torch.manual_seed(0)
    model = nn.Linear(50, 3)
    adapters = inject(model, LoRAConfig(rank=2, dropout=0.5))
    x = torch.randn(4, 50)
    with torch.no_grad():
        base = nn.functional.linear(x, model._parameters["weight"], model.bias)
        assert torch.equal(model(x), base)  # B is zero, and the base sees all inputs
        randomise(adapters)
        runs = torch.stack([model(x) for _ in range(4000)])
        model.eval()
        mean = model(x)
        assert torch.equal(model(x), mean)
    assert runs.std(0).min() > 0.1
    errors = (runs.mean(0) - mean).abs() / (runs.std(0) / 4000**0.5)
    assert errors.max() < 5


def test_dropout_of_an_embedding_drops_tokens() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(7, 4)
    adapters = inject(model, LoRAConfig(rank=2, dropout=0.25))
    randomise(adapters)
    change = next(m for m in model.modules() if isinstance(m, LowRank))
    x = torch.randint(0, 7, (2000,))
    base = model._parameters["weight"][x]
    with torch.no_grad():
        moved = (model(x) - base) / (change.delta(base.new_empty(7, 4))[x] / 0.75)
    kept = moved.mean(1).round()
    assert torch.allclose(moved, kept[:, None].expand_as(moved), atol=1e-4)
    assert set(kept.tolist()) == {0.0, 1.0}
    assert abs(kept.mean().item() - 0.75) < 0.05


@pytest.mark.parametrize("layer", [nn.LSTM(3, 4), nn.MultiheadAttention(4, 2), nn.Conv2d(4, 4, 3, groups=2)])
def test_dropout_is_refused_where_a_weight_is_read_as_a_whole(layer: nn.Module) -> None:
    with pytest.raises(InputError, match=r"dropout 0\.1 for .*, which its layer reads as a whole") as caught:
        inject(layer, LoRAConfig(dropout=0.1))
    assert "set dropout to 0" in str(caught.value)
    assert all(p.requires_grad for p in layer.parameters())
    assert type(layer).__name__ in ("LSTM", "MultiheadAttention", "Conv2d")


# Several adapters -----------------------------------------------------------------------------


def two_adapters() -> tuple[nn.Module, Adapters]:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    adapters = inject(model, LoRAConfig(rank=1, alpha=2.0), "first")
    adapters.add(LoRAConfig(rank=3, targets=("2",)), "second")
    randomise(adapters)
    return model, adapters


@pytest.mark.parametrize("weights", [{"first": 1.0, "second": 1.0}, {"first": 0.5, "second": -2.0}])
def test_a_stack_adds_up(weights: dict[str, float]) -> None:
    model, adapters = two_adapters()
    x = torch.randn(6, 4, dtype=torch.float64)
    adapters.activate(weights)
    laid = overlays(model)
    expected = x
    for index, bias in (("0", model[0].bias), ("2", model[2].bias)):
        overlay = laid[f"{index}.weight"]
        pairs = {name: (overlay.adapters[name].A, overlay.adapters[name].B) for name in overlay.active}
        weight = by_hand(model, f"{index}.weight", overlay, pairs)
        expected = expected @ weight.T + bias
        expected = expected.tanh() if index == "0" else expected
    assert torch.allclose(model(x), expected, rtol=1e-12)
    adapters.merge()
    assert torch.allclose(model(x), expected, rtol=1e-12)
    adapters.unmerge()
    assert adapters.active == weights
    assert torch.allclose(model(x), expected, rtol=1e-12)


def test_adapters_are_swapped_on_one_base() -> None:
    model, adapters = two_adapters()
    x = torch.randn(6, 4, dtype=torch.float64)
    pointer = model[0]._parameters["weight"].data_ptr()
    outputs = {}
    for chosen in ("first", "second"):
        adapters.activate(chosen)
        outputs[chosen] = model(x)
    adapters.deactivate()
    base = model(x)
    assert not torch.allclose(outputs["first"], outputs["second"])
    assert not torch.allclose(outputs["first"], base)
    for chosen, output in outputs.items():
        adapters.activate(chosen)
        assert torch.equal(model(x), output)
    assert model[0]._parameters["weight"].data_ptr() == pointer
    adapters.activate(["second", "first"])
    adapters.remove("first")
    assert type(model[0]) is nn.Linear
    assert torch.equal(model(x), outputs["second"])
    adapters.remove("second")
    assert torch.equal(model(x), base)
    assert type(model[2]) is nn.Linear


# What is learned in full ----------------------------------------------------------------------


def test_full_weights_replace_the_base_and_blend_in_a_stack() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    base = copy.deepcopy(model)
    x = torch.randn(6, 4, dtype=torch.float64)
    adapters = inject(model, LoRAConfig(rank=1, targets=("0",), full=("1", "2")))
    assert torch.allclose(model(x), base(x), rtol=1e-13)
    assert {n for n, p in model.named_parameters() if p.requires_grad} >= {
        "1.tuning.bias.adapters.default.value", "2.tuning.weight.adapters.default.value",
    }  # fmt: skip
    value = overlays(model)["2.weight"].adapters["default"].value
    value.data.normal_()
    plain = copy.deepcopy(base)
    plain[2].weight.data = value.detach()
    assert torch.allclose(model(x), plain(x), rtol=1e-13)
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert torch.allclose(value.grad, plain[2].weight.grad)
    adapters.activate({"default": 0.25})
    plain[2].weight.data = 0.75 * base[2].weight.data + 0.25 * value.detach()
    assert torch.allclose(model(x), plain(x), rtol=1e-12)
    adapters.merge()
    assert torch.allclose(model(x), plain(x), rtol=1e-12)
    adapters.unmerge()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in base.state_dict().items())


# Tied weights ---------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def test_a_tied_weight_is_adapted_where_it_is_looked_up_and_where_it_multiplies() -> None:
    model = Tied().double()
    (site,) = find_sites(model)
    assert [place.name for place in site.places] == ["embed.weight", "head.weight"]
    adapters = inject(model, LoRAConfig(rank=2, alpha=3.0))
    randomise(adapters)
    first, second = adapters.parameters()
    tokens = torch.randint(0, 7, (2, 5))
    weight = model.embed._parameters["weight"].detach() + 1.5 * (second @ first).T
    expected = weight[tokens] @ weight.T
    assert torch.allclose(model(tokens), expected)
    assert len(list(adapters.parameters())) == 2
    adapters.merge()
    assert torch.allclose(model(tokens), expected)
    assert model.head.weight is model.embed.weight
    adapters.unmerge()
    assert torch.allclose(model(tokens), expected)
    adapters.detach()
    assert model.head.weight is model.embed.weight


# Living with PyTorch --------------------------------------------------------------------------


@pytest.mark.slow
def test_it_compiles_into_one_graph_and_follows_a_swap() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), Conv1D(3, 6))
    adapters = inject(model, LoRAConfig(rank=2, alpha=1.0))
    adapters.add(LoRAConfig(rank=1, targets=("dense",)), "other")
    randomise(adapters)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 2, 4, 4)
    for chosen in ("default", "other", {"default": 0.5, "other": 2.0}):
        adapters.activate(chosen)
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
    adapters.merge()
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


def test_a_deep_copy_is_independent() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 2))
    adapters = inject(model, LoRAConfig(rank=1))
    randomise(adapters)
    other, others = copy.deepcopy((model, adapters))
    x = torch.randn(4, 1, 3)
    before = model(x)[0]
    assert torch.equal(other(x)[0], before)
    others.merge()
    others.model[0].weight.data.zero_()
    assert torch.equal(model(x)[0], before)


def test_factors_are_float32_over_a_bfloat16_base() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(1, 2, 3), nn.Flatten(0), nn.Linear(12, 4)).bfloat16()
    adapters = inject(model, LoRAConfig(rank=2))
    randomise(adapters)
    assert {p.dtype for p in adapters.parameters()} == {torch.float32}
    output = model(torch.randn(1, 8).bfloat16())
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in adapters.parameters())


def test_autocast() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Conv1D(4, 8))
    adapters = inject(model, LoRAConfig(rank=2))
    randomise(adapters)
    x = torch.randn(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    assert output.dtype == torch.bfloat16
    assert torch.allclose(output.float(), model(x), rtol=0.1, atol=0.1)


def test_a_recurrent_layer_keeps_working_after_moves_and_removal() -> None:
    layer = nn.LSTM(3, 4)
    plain = copy.deepcopy(layer)
    adapters = inject(layer, LoRAConfig(rank=2))
    randomise(adapters)
    layer.to(torch.float64).to(torch.float32)
    x = torch.randn(5, 2, 3)
    assert not torch.allclose(layer(x)[0], plain(x)[0], atol=1e-3)
    adapters.detach()
    assert torch.equal(layer(x)[0], plain(x)[0])
    layer(x)[0].sum().backward()
    assert layer.weight_hh_l0.grad is not None
    layer.weight_hh_l0.data.zero_()
    assert not torch.equal(layer(x)[0], plain(x)[0])
