"""Bytes of fine-tuning: predictions against what the tensors take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.functional.memory import LiveBytes
from quire.tuning import LoRAConfig, inject, quantise_base
from quire.tuning.memory import measure_memory, predict_memory, step_memory
from tests.tuning.layers import Conv1D


def make() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(50, 64),
        nn.Linear(64, 100),
        nn.BatchNorm1d(7),
        Conv1D(30, 100),
        nn.GRU(30, 4, batch_first=True),
    )


def nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantise", [None, ("all",), ("1",)])
@pytest.mark.parametrize("optimiser", ["adam", "momentum", "sgd"])
def test_predicted_bytes_are_those_of_the_tuned_model(
    dtype: torch.dtype, quantise: tuple[str, ...] | None, optimiser: str
) -> None:
    model = make().to(dtype)
    config = LoRAConfig(rank=3, full=("4.bias*", "1.bias"))
    predicted = predict_memory(model, config, quantise=quantise, optimiser=optimiser)
    assert all(type(module).__module__.startswith(("torch.", "tests.")) for module in model.modules())
    on_meta = predict_memory(make().to(dtype).to("meta"), config, quantise=quantise, optimiser=optimiser)
    assert on_meta == predicted
    if quantise:
        quantise_base(model, quantise)
    adapters = inject(model, config)
    trained = list(adapters.parameters())
    frozen = [p for p in model.parameters() if not p.requires_grad] + list(model.buffers())
    states = {"adam": 2, "momentum": 1, "sgd": 0}[optimiser]
    assert (predicted.base, predicted.trained) == (nbytes(frozen), nbytes(trained))
    assert predicted.gradients == nbytes(trained)
    assert predicted.optimiser == states * nbytes(trained)
    assert measure_memory(model, optimiser=optimiser) == predicted
    assert predicted.total == nbytes(frozen) + (2 + states) * nbytes(trained)


def test_full_fine_tuning_trains_everything() -> None:
    model = make()
    predicted = predict_memory(model)
    weights = nbytes(list(model.parameters()))
    assert (predicted.trained, predicted.gradients, predicted.optimiser) == (weights, weights, 2 * weights)
    assert predicted.base == nbytes(list(model.buffers()))


def test_adam_keeps_what_is_predicted() -> None:
    model = make()
    adapters = inject(model, LoRAConfig(rank=2, targets=("1",)))
    optimiser = torch.optim.Adam(adapters.parameters())
    for parameter in adapters.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    kept = [v for state in optimiser.state.values() for v in state.values() if v.dim() > 0]
    assert measure_memory(model).optimiser == nbytes(kept)


def test_a_quarter_of_bfloat16() -> None:
    model = nn.Linear(1024, 1024, bias=False).bfloat16()
    plain = predict_memory(model, LoRAConfig(rank=8)).base
    stored = predict_memory(model, LoRAConfig(rank=8), quantise=("all",)).base
    assert plain == 2 * 2**20
    assert 8 * stored / 2**20 == pytest.approx(4.127, abs=0.03)


def test_live_bytes_by_hand() -> None:
    """Two tensors alive at once, then one, then two others: the most is what counts."""
    with LiveBytes() as live:
        a = torch.zeros(1000)
        b = a + 1
        assert live.now == 8000
        del a
        assert live.now == 4000
        b.add_(1)
        c = b.view(10, 100)
        assert live.now == 4000
        del b, c
        assert live.now == 0
        torch.zeros(250)
    assert live.peak == 8000


def test_activations_of_a_chain_by_hand() -> None:
    """y = tanh(xWᵀ) twice: the two tanh outputs are kept, and the products exist while they are made."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False), nn.Tanh())
    model.requires_grad_(False)
    x = torch.randn(100, 32, requires_grad=True)
    memory = step_memory(model, (x,), torch.sum)
    one = 100 * 32 * 4
    # Alive at the worst moment, in backward: both outputs of tanh or the gradient that replaces one, the
    # gradient that comes and the one that is made. The gradient of x is among them.
    assert 3 * one <= memory.activations <= 4 * one + 8
    assert memory.trained == 0


def test_the_simulated_step_touches_nothing() -> None:
    model = make()
    model[2].train()
    quantise_base(model)
    inject(model, LoRAConfig(rank=2))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    tokens = torch.randint(0, 50, (3, 7))
    memory = step_memory(model, (tokens,), lambda output: output[0].sum())
    assert memory.activations > 0
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "activations" in str(memory)


def test_the_simulated_peak_is_that_of_the_allocator() -> None:
    """A real step on the CPU under PyTorch's profiler, which sees each allocation and each release."""
    layers = [nn.Linear(96, 200), nn.GELU(), Conv1D(96, 200), nn.LayerNorm(96)]
    model = nn.Sequential(*layers, nn.Linear(96, 7))
    quantise_base(model)
    inject(model, LoRAConfig(rank=4))
    x = torch.randn(50, 96)

    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    predicted = step_memory(model, (x,), loss)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        loss(model(x)).backward()
    assert seen.profiler is not None
    now = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert predicted.activations + predicted.gradients == pytest.approx(peak, rel=0.01)


@pytest.mark.gpu
def test_a_qlora_step_takes_what_the_arithmetic_says() -> None:
    """Peak memory of a step on the device within 5% of the sum."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    with torch.device("cuda"):
        model = nn.Sequential(*[Block(2048) for _ in range(8)]).bfloat16()
        quantise_base(model)
        adapters = inject(model, LoRAConfig(rank=16))
        inputs = torch.randn(8, 256, 2048, dtype=torch.bfloat16)
    optimiser = torch.optim.Adam(adapters.parameters())

    def loss(output: Tensor) -> Tensor:
        return output.float().square().mean()

    def step() -> None:
        optimiser.zero_grad()
        loss(model(inputs)).backward()
        optimiser.step()

    step()  # makes the optimiser's state
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated() - measure_memory(model).total - inputs.nbytes
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - max(others, 0) - inputs.nbytes
    predicted = step_memory(model, (inputs,), loss)
    assert peak == pytest.approx(predicted.total, rel=0.05), f"{peak} measured, {predicted}"


def test_an_optimiser_that_is_none() -> None:
    with pytest.raises(InputError, match=r"unknown optimiser 'adm'(.|\n)*did you mean 'adam'"):
        predict_memory(make(), LoRAConfig(), optimiser="adm")  # type: ignore[arg-type]
