"""Predicted costs against PyTorch's FLOP counter, its allocator's own account, and closed forms."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from quire.doctor.costs.account import explain
from quire.doctor.costs.budget import largest_batch
from quire.doctor.costs.machine import Machine, measure_machine
from quire.doctor.costs.table import Costs, as_bytes, as_number, as_seconds
from quire.errors import InputError
from quire.functional.costs import (
    attention_bytes,
    attention_flops,
    backward_flops,
    convolution_flops,
    dense_flops,
    training_bytes,
    transformer_flops,
)
from quire.functional.memory import allocated_bytes
from quire.functional.receptive import receptive_field_of
from quire.models import GPT, GPTConfig
from tests.doctor.networks import NETWORKS

pytestmark = pytest.mark.slow


def total(output: Any) -> Tensor:
    """The sum of all outputs."""
    if isinstance(output, dict):
        output = [value for value in output.values() if isinstance(value, Tensor)]
    return output.sum() if isinstance(output, Tensor) else sum(part.sum() for part in output)


def layer(costs: Costs, name: str) -> Any:
    return next(row for row in costs.layers if row.name == name)


def chain(*sizes: int) -> nn.Sequential:
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers)


def none(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("name", NETWORKS)
def test_ten_networks(name: str) -> None:
    model, inputs = NETWORKS[name]()
    costs = explain(model, inputs)

    with FlopCounterMode(display=False) as counter:
        total(model.train()(*inputs)).backward()
    assert costs.counter_flops == counter.get_total_flops()
    optimiser = torch.optim.Adam(model.parameters())

    def step() -> None:
        output = model(*inputs)
        total(output).backward()
        optimiser.step()

    step()
    optimiser.zero_grad()
    kept = [*model.parameters(), *model.buffers(), *inputs]
    kept += [value for state in optimiser.state.values() for value in state.values()]
    measured = allocated_bytes(step) + sum({id(tensor): tensor.nbytes for tensor in kept}.values())
    assert costs.peak_bytes == pytest.approx(measured, rel=0.1)
    assert costs.notes == ()


@pytest.mark.parametrize("name", ["resnet", "gpt2"])
def test_layers_add_up(name: str) -> None:
    model, inputs = NETWORKS[name]()
    costs = explain(model, inputs)
    rows = costs.layers
    assert costs.parameters == sum(p.numel() for p in model.parameters()) == sum(r.parameters for r in rows)
    assert costs.forward_flops == sum(r.forward_flops for r in rows)
    assert costs.backward_flops == sum(r.backward_flops for r in rows)
    assert costs.activation_bytes == sum(r.activation_bytes for r in rows)
    assert costs.gradient_bytes == costs.parameter_bytes == sum(r.gradient_bytes for r in rows)
    assert costs.optimiser_bytes == sum(r.optimiser_bytes for r in rows)
    assert not layer(costs, "(loss)").forward_flops
    text = str(costs).splitlines()
    assert len(text) >= len(rows) + 8
    assert f"parameters   {costs.parameters:,}" in str(costs)


def test_shapes_are_those_of_a_real_pass() -> None:
    model, inputs = NETWORKS["mobile"]()
    costs = explain(model, tuple(none(*x.shape) for x in inputs))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda module, given, output, name=name: shapes.update({name or "(model)": tuple(output.shape)})
        )
    model(*inputs)
    found = {row.name: row.output for row in costs.layers if row.output is not None}
    assert len(found) > 30
    assert found == {name: shapes[name] for name in found}


def test_dense_layers_by_formula() -> None:
    rows, sizes = 7, (5, 11, 3, 2)
    costs = explain(chain(*sizes), none(rows, 5))
    wanted = [dense_flops(rows, a, b) for a, b in pairwise(sizes)]
    assert [row.forward_flops for row in costs.layers[:3]] == wanted
    # The first layer passes no gradient on.
    assert [row.backward_flops for row in costs.layers[:3]] == [wanted[0], 2 * wanted[1], 2 * wanted[2]]
    assert costs.backward_flops == backward_flops(sum(wanted), wanted[0])
    # Each layer's output is kept as the next one's input, the last as the model's.
    assert [row.activation_bytes for row in costs.layers[:3]] == [rows * size * 4 for size in sizes[1:]]


@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions_by_formula(groups: int) -> None:
    costs = explain(nn.Conv2d(8, 12, (3, 5), stride=2, groups=groups), none(2, 8, 20, 30))
    wanted = convolution_flops(2, 8, 12, (3, 5), (9, 13), groups)
    assert wanted == sum(2 for _ in range(2 * 12 * 9 * 13 * (8 // groups) * 3 * 5))  # counted one by one
    assert (costs.forward_flops, costs.backward_flops) == (wanted, wanted)
    back = explain(nn.ConvTranspose2d(12, 8, (3, 5), stride=2, groups=groups), none(2, 12, 9, 13))
    assert (back.forward_flops, back.backward_flops) == (wanted, wanted)


def test_recurrent_layers_which_the_counter_of_pytorch_leaves_out() -> None:
    """float64 is computed place by place, which the counter sees; float32 at once, which it does not."""
    for kind in (nn.LSTM, nn.GRU):
        model, x = kind(16, 32), none(6, 3, 16)
        fused, plain = explain(model, x), explain(copy.deepcopy(model).double(), x.double())
        gates = 4 if kind is nn.LSTM else 3
        assert fused.forward_flops == plain.forward_flops == 2 * 6 * 3 * gates * 32 * (16 + 32)
    assert explain(nn.LSTM(16, 32), none(6, 3, 16)).counter_flops == 0


class Explicit(nn.Module):
    """Attention with its weights written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(0.1)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        weights = self.dropout((q @ k.mT).mul(q.shape[-1] ** -0.5).softmax(-1))
        return (weights @ v).transpose(1, 2).flatten(2)


class Fused(Explicit):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_attention_by_formula() -> None:
    samples, places, width, heads = 3, 40, 16, 2
    x = none(samples, places, width)
    explicit, fused = explain(Explicit(width, heads), x), explain(Fused(width, heads), x)
    wanted = attention_flops(places, places, width, samples)
    assert wanted == 2 * samples * heads * sum(2 * 8 for _ in range(places) for _ in range(places))
    assert explicit.attention_flops == fused.attention_flops == wanted
    assert explicit.attention_bytes == attention_bytes(places, places, heads, samples)
    assert fused.attention_bytes == 0
    assert (
        explicit.forward_flops
        == fused.forward_flops
        == wanted + 3 * dense_flops(samples * places, width, width)
    )
    longer = explain(Explicit(width, heads), none(samples, 2 * places, width))
    assert longer.attention_flops == 4 * explicit.attention_flops
    assert longer.attention_bytes == 4 * explicit.attention_bytes
    assert explain(chain(3, 3), none(2, 3)).attention_flops == 0


def test_a_transformer_takes_six_operations_for_each_token_and_weight() -> None:
    samples, places, layers, width = 2, 16, 3, 32
    model = GPT(GPTConfig(vocab_size=50, context=places, layers=layers, heads=4, width=width, tied=False))
    costs = explain(model, none(samples, places, dtype=torch.long))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "wte" not in name)
    matrices -= sum(p.numel() for name, p in model.named_parameters() if "wpe" in name)
    products = layers * attention_flops(places, places, width, samples)
    # Backward, the fused attention computes its weights once more.
    wanted = transformer_flops(samples * places, matrices) + products * 3 + products // 2
    assert costs.forward_flops + costs.backward_flops == wanted


@pytest.mark.parametrize(("optimiser", "states"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2)])
def test_what_an_optimiser_keeps(optimiser: str, states: int) -> None:
    costs = explain(chain(100, 100), none(1, 100), optimiser=optimiser)
    steps = 8 if states == 2 else 0  # a count for each of two parameters
    assert costs.optimiser_bytes == states * costs.parameters * 4 + steps
    fixed = costs.parameter_bytes + costs.gradient_bytes + costs.optimiser_bytes
    assert fixed == training_bytes(costs.parameters, states) + steps
    assert costs.peak_bytes >= fixed
    mine = explain(chain(100, 100), none(1, 100), optimiser=lambda p: torch.optim.RMSprop(p, momentum=0.9))
    assert mine.optimiser_bytes == 2 * costs.parameters * 4 + 8


def test_frozen_parameters_cost_no_gradient() -> None:
    model = chain(50, 50, 50)
    model[0].requires_grad_(False)
    costs = explain(model, none(4, 50))
    assert costs.trained == 50 * 51
    assert costs.gradient_bytes == 50 * 51 * 4
    assert (layer(costs, "0").backward_flops, layer(costs, "0").gradient_bytes) == (0, 0)


def test_a_model_larger_than_memory() -> None:
    with torch.device("meta"):
        model = chain(*[2**15] * 8)
    costs = explain(model, none(4, 2**15))
    assert costs.parameters == 7 * (2**30 + 2**15)
    assert costs.peak_bytes > 16 * costs.parameters
    assert next(model.parameters()).is_meta


def test_nothing_is_changed() -> None:
    model, inputs = NETWORKS["resnet"]()
    model.eval()
    model.bn1.train()
    model.calls = 0
    model.register_forward_pre_hook(lambda module, given: setattr(module, "calls", module.calls + 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, image = torch.get_rng_state(), inputs[0].clone()
    for given in (inputs, none(*inputs[0].shape)):
        explain(model, given)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(image, inputs[0])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {name for name, module in model.named_modules() if module.training} == {"bn1"}
    assert model.calls == 0
    assert not any(module._forward_hooks for module in model.modules())


class Again(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def test_what_is_computed_again_counts_at_its_layer() -> None:
    def build(wrap: Any) -> nn.Module:
        blocks = [wrap(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))) for _ in range(4)]
        return nn.Sequential(nn.Linear(8, 32), *blocks)

    plain, again = explain(build(nn.Sequential), none(64, 8)), explain(build(Again), none(64, 8))
    product = dense_flops(64, 32, 32)
    # The last layer's output is not needed again, so PyTorch stops before it.
    extra = again.backward_flops - plain.backward_flops
    assert extra == 4 * product
    assert layer(again, "1.body.0").backward_flops == 3 * product
    assert again.activation_bytes < 0.6 * plain.activation_bytes


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.ZeroPad2d((1, 0, 2, 0)), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        )
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.wide = nn.Conv2d(4, 4, 3, padding=2, dilation=2)
        self.narrow = nn.Conv2d(4, 4, (1, 3), padding=(0, 1))
        self.last = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        x = torch.cat([self.wide(x), self.narrow(x), x], 1)
        return self.last(x)[:, :, ::2]


def test_receptive_fields_are_where_gradients_come_from() -> None:
    model = Branches().eval()
    costs = explain(model, none(1, 2, 64, 64))
    parts: dict[str, nn.Module] = {
        "stem.3": model.stem,
        "pool": nn.Sequential(model.stem, model.pool),
        "wide": nn.Sequential(model.stem, model.pool, model.wide),
        "narrow": nn.Sequential(model.stem, model.pool, model.narrow),
        "(model)": model,
    }
    for name, part in parts.items():
        measured = receptive_field_of(part, (2, 64, 64))
        assert not measured.touches_border
        assert layer(costs, name).receptive_field == measured.size, name
    mixed = explain(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2)), none(1, 1, 8, 8))
    assert [row.receptive_field for row in mixed.layers[:3]] == [(3, 3), None, None]


class Halting(nn.Module):
    """Goes on while its numbers say so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)
            if x.sum() > 1e9:
                break
        return x


def test_a_model_whose_course_depends_on_numbers() -> None:
    model = Halting()
    for x in (torch.randn(5, 4), none(5, 4)):
        costs = explain(model, x)
        assert costs.forward_flops == 3 * dense_flops(5, 4, 4)
        assert "computed with real numbers" in costs.notes[0]
        assert "computed with real numbers" in str(costs)
    assert model.layer.weight.grad is None


def test_losses() -> None:
    scores = none(6, 4)
    model = chain(4, 3)
    sums, entropy = explain(model, scores), explain(model, scores, loss="cross-entropy")
    assert entropy.activation_bytes > sums.activation_bytes  # log-probabilities
    own = explain(model, scores, loss=lambda output: output.exp().square().sum())
    assert own.activation_bytes == sums.activation_bytes + 6 * 3 * 4  # the exponentials
    pixels = explain(nn.Conv2d(3, 7, 1), none(2, 3, 5, 5), loss="cross-entropy")
    words = explain(chain(3, 7), none(2, 5, 3), loss="cross-entropy")
    assert (pixels.forward_flops, words.forward_flops) == (2 * 50 * 3 * 7, 2 * 10 * 3 * 7)
    assert explain(model, scores, loss="squared-error").backward_flops == dense_flops(6, 4, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": none(2, 5)}, "the model cannot take a step on these inputs: RuntimeError"),
        ({"optimiser": "adm"}, "did you mean 'adam'?"),
        ({"loss": "cross_entropy"}, "did you mean 'cross-entropy'?"),
    ],
)
def test_mistakes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        explain(**{"model": chain(4, 3), "inputs": none(2, 4), **change})
    assert message in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(InputError, match="expected: a device of this machine"):
        explain(chain(4, 3), none(2, 4), device="cuda")


def test_inputs_by_name() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a @ b

    costs = explain(Two(), {"a": none(2, 3), "b": none(3, 4)})
    assert (costs.forward_flops, costs.backward_flops, costs.parameters) == (48, 0, 0)


# Budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("megabytes", [3, 10, 77])
def test_the_largest_batch_fits_and_the_next_does_not(megabytes: int) -> None:
    model, memory = chain(256, 256, 256), megabytes * 10**6
    fit = largest_batch(model, none(1, 256), memory)
    at, beyond = (explain(model, none(fit.batch + more, 256)).peak_bytes for more in (0, 1))
    assert at <= memory < beyond
    assert (fit.peak_bytes, fit.next_batch, fit.next_bytes) == (at, fit.batch + 1, beyond)
    assert f"largest batch in {as_bytes(memory)}: {fit.batch}" in str(fit)


def test_nothing_fits_or_one_sample_is_too_few() -> None:
    model = chain(256, 256)
    fit = largest_batch(model, none(1, 256), 1000)
    assert (fit.batch, fit.next_batch) == (0, 1)
    assert str(fit).startswith("largest batch in 1000 B: 0 (1 would need")
    norm = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256))
    fit = largest_batch(norm, lambda batch: none(batch, 256), 2 * 10**6)
    assert explain(norm, none(fit.batch, 256)).peak_bytes <= 2 * 10**6
    assert fit.batch > 2


def test_a_budget_without_an_end() -> None:
    with pytest.raises(InputError, match="check that the inputs begin with the number of samples"):
        largest_batch(chain(4, 4), lambda batch: none(2, 4), 10**9, limit=1000)
    with pytest.raises(InputError, match="an example without tensors"):
        largest_batch(chain(4, 4), 3, 10**9)


# Time -----------------------------------------------------------------------------------------


def test_seconds_of_a_machine_that_is_made_up() -> None:
    machine = Machine("cpu", {torch.float32: 1000.0}, bytes=100.0, launch=0.5)
    work = [(2000, 10, torch.float32), (10, 300, torch.float32), (0, 0, torch.float64)]
    assert machine.seconds(work) == pytest.approx(2 + 3 + 3 * 0.5)
    ahead = Machine("cuda", {torch.float32: 1000.0}, bytes=100.0, launch=0.5, ahead=True)
    assert ahead.seconds(work) == pytest.approx(5)
    assert ahead.seconds([(1, 1, torch.float32)] * 4) == pytest.approx(2)
    costs = explain(chain(3, 3), none(2, 3), machine=machine)
    assert costs.seconds == pytest.approx(sum(row.seconds or 0 for row in costs.layers))
    assert "a step" in str(costs)
    assert "a step" not in str(explain(chain(3, 3), none(2, 3)))


def test_this_machine_is_measured_without_a_trace() -> None:
    state = torch.get_rng_state()
    machine = measure_machine(dtypes=[torch.bfloat16])
    assert set(machine.flops) == {torch.float32, torch.bfloat16}
    assert min(*machine.flops.values(), machine.bytes, machine.launch) > 0
    assert machine.launch < 1
    assert torch.equal(state, torch.get_rng_state())


def test_sizes_as_they_are_read() -> None:
    assert [as_bytes(size) for size in (0, 1000, 1536, 2**30, 3 * 2**50)] == [
        "0 B", "1000 B", "1.5 KiB", "1 GiB", "3072 TiB",
    ]  # fmt: skip
    assert [as_number(value) for value in (0, 999, 1500, 2.5e9, 1e16)] == ["0", "999", "1.5K", "2.5G", "10P"]
    assert [as_seconds(value) for value in (None, 2.0, 0.0125, 3e-6)] == ["–", "2 s", "12.5 ms", "3 µs"]
