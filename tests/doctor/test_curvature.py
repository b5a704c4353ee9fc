from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.doctor import Hessian, hessian_spectrum, hessian_vector_product, lanczos, spectrum
from quire.doctor.curvature import largest_eigenvalue
from quire.errors import InputError
from quire.models.gpt import GPT, GPTConfig

pytestmark = pytest.mark.slow

Batches = list[tuple[Tensor, Tensor]]
LossFunction = Callable[[Tensor, Tensor], Tensor]


def small() -> tuple[nn.Module, nn.Module, Batches]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    sizes = (5, 2, 1)  # uneven, so that a mean of means would be wrong
    batches = [(torch.randn(n, 3, dtype=torch.float64), torch.randint(0, 2, (n,))) for n in sizes]
    return model, nn.CrossEntropyLoss(), batches


def dense_hessian(model: nn.Module, loss: LossFunction, batches: Batches) -> Tensor:
    """By torch.autograd.functional.hessian over all rows at once."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    inputs, target = (torch.cat(part) for part in zip(*batches, strict=True))

    def mean_loss(flat: Tensor) -> Tensor:
        pieces = flat.split([parameter.numel() for parameter in parameters.values()])
        shaped = {n: x.view_as(p) for x, (n, p) in zip(pieces, parameters.items(), strict=True)}
        return loss(torch.func.functional_call(model, shaped, (inputs,)), target)

    flat = torch.cat([parameter.flatten() for parameter in parameters.values()])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.autograd.functional.hessian(mean_loss, flat, vectorize=True)


def test_products_equal_the_dense_hessian() -> None:
    model, loss, batches = small()
    dense = dense_hessian(model, loss, batches)
    hessian = Hessian.of_model(model, loss, batches)
    for _ in range(3):
        vector = torch.randn(hessian.size, dtype=torch.float64)
        torch.testing.assert_close(hessian(vector), dense @ vector, rtol=1e-10, atol=1e-12)


def test_a_hessian_known_by_hand() -> None:
    """E = x²y has H = [[2y, 2x], [2x, 0]]; at (3, 5) and v = (1, 2): (10 + 12, 6)."""
    point = torch.tensor([3.0, 5.0], requires_grad=True)
    product = hessian_vector_product(lambda: point[0] ** 2 * point[1], [point], torch.tensor([1.0, 2.0]))
    assert product.tolist() == [22.0, 6.0]
    linear = hessian_vector_product(lambda: 3 * point.sum(), [point], torch.ones(2))
    assert linear.tolist() == [0.0, 0.0]


def test_works_without_gradients_on_an_iterator_and_leaves_the_model_alone() -> None:
    model, loss, batches = small()
    model.append(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)).double())
    model.train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        hessian = Hessian.of_model(model, loss, iter(batches))
        vector = torch.ones(hessian.size, dtype=torch.float64)
        first, second = hessian(vector), hessian(vector)
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not model[1].training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("spread", [1.0, 1e6])
def test_lanczos_finds_every_eigenvalue_once(spread: float) -> None:
    """Without reorthogonalisation a wide spectrum gives copies of its largest eigenvalue."""
    eigenvalues = torch.logspace(0, math.log10(spread), 40, dtype=torch.float64) + torch.arange(40) / 40
    rotation = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))[0]
    matrix = rotation * eigenvalues @ rotation.t()
    result = lanczos(lambda v: matrix @ v, torch.randn(40, dtype=torch.float64), 100)
    torch.testing.assert_close(result.ritz()[0], eigenvalues.sort().values, rtol=1e-9, atol=1e-9 * spread)
    identity = torch.eye(40, dtype=torch.float64)
    torch.testing.assert_close(result.basis @ result.basis.t(), identity, rtol=0, atol=1e-12)


def test_lanczos_stops_at_an_invariant_subspace() -> None:
    matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0, 3.0], dtype=torch.float64))
    result = lanczos(lambda v: matrix @ v, torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), 4)
    assert len(result.diagonal) == 2
    assert result.residual == 0
    torch.testing.assert_close(result.ritz()[0], torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_spectrum_equals_that_of_the_dense_hessian() -> None:
    model, loss, batches = small()
    eigenvalues = torch.linalg.eigvalsh(dense_hessian(model, loss, batches))
    result = spectrum(model, loss, batches, k=26, probes=4)
    assert result.largest == pytest.approx(eigenvalues[-1].item(), abs=1e-9)
    assert result.smallest == pytest.approx(eigenvalues[0].item(), abs=1e-9)
    assert result.trace == pytest.approx(eigenvalues.sum().item(), abs=1e-9)
    assert result.trace_error == 0
    assert result.stable_step == pytest.approx(2 / eigenvalues[-1].item())
    assert result.weights.sum().item() == pytest.approx(1)
    step = (result.grid[1] - result.grid[0]).item()
    assert result.density.sum().item() * step == pytest.approx(1, abs=1e-3)


def test_density_follows_the_known_eigenvalues() -> None:
    """Half of the eigenvalues near 1, half near 10, in 200 dimensions: seen with 20 products a probe."""
    eigenvalues = torch.cat([torch.linspace(0.9, 1.1, 100), torch.linspace(9, 11, 100)]).double()
    point = torch.zeros(200, dtype=torch.float64, requires_grad=True)
    hessian = Hessian(lambda: [(1.0, (eigenvalues * point**2).sum() / 2)], [point])
    result = hessian_spectrum(hessian, k=20, probes=6)
    assert result.weights[result.nodes < 5].sum().item() == pytest.approx(0.5, abs=0.08)
    assert result.largest == pytest.approx(11, abs=1e-3 + result.largest_error)
    assert result.smallest == pytest.approx(0.9, abs=1e-3 + result.smallest_error)
    # The diagonal is all there is of H, so that ±1 probes give the trace without any error.
    assert result.trace == pytest.approx(1100)
    assert result.trace_error < 1e-9
    assert result.condition_number == pytest.approx(11 / 0.9, rel=0.01)
    assert result.negative_share == 0


def test_the_trace_lies_within_its_standard_error() -> None:
    matrix = torch.randn(300, 300, dtype=torch.float64)
    matrix = matrix + matrix.t()
    point = torch.zeros(300, dtype=torch.float64, requires_grad=True)
    hessian = Hessian(lambda: [(1.0, point @ matrix @ point / 2)], [point])
    result = hessian_spectrum(hessian, k=3, probes=40)
    assert 0 < result.trace_error < 200
    assert abs(result.trace - matrix.trace().item()) < 5 * result.trace_error


def test_the_error_bound_holds() -> None:
    model, loss, batches = small()
    eigenvalues = torch.linalg.eigvalsh(dense_hessian(model, loss, batches))
    result = spectrum(model, loss, batches, k=4, probes=1)
    assert result.largest_error > 0
    assert (eigenvalues - result.largest).abs().min().item() <= result.largest_error
    assert (eigenvalues - result.smallest).abs().min().item() <= result.smallest_error


def quadratic(*eigenvalues: float) -> Hessian:
    values = torch.tensor(eigenvalues, dtype=torch.float64)
    point = torch.zeros_like(values, requires_grad=True)
    return Hessian(lambda: [(1.0, (values * point**2).sum() / 2)], [point])


def test_advice() -> None:
    plain = hessian_spectrum(quadratic(1.0, 2.0, 4.0))
    assert plain.condition_number == pytest.approx(4)
    assert "diverges above a step size of 0.5;" in plain.advice()
    assert "0.75 (with momentum 0.5)" in plain.advice(momentum=0.5)
    assert "0.6 is too large: try 0.25" in plain.advice(0.6)
    assert "too large" not in plain.advice(0.4)
    assert "250 times smaller" in plain.advice(0.001)
    assert "condition number 1e+04 is large" in hessian_spectrum(quadratic(1e-4, 0.3, 1.0)).advice()
    saddle = hessian_spectrum(quadratic(-1.0, 1.0, 2.0, 3.0))
    assert "λmin = -1 is negative" in saddle.advice()
    assert math.isinf(saddle.condition_number)
    assert saddle.negative_share == pytest.approx(0.25)
    assert "Some directions are flat" in hessian_spectrum(quadratic(0.0, 1.0)).advice()
    assert "no step size is too large" in hessian_spectrum(quadratic(-2.0, -1.0)).advice()


def test_the_picture_names_its_axes() -> None:
    axes = hessian_spectrum(quadratic(1.0, 2.0, 4.0)).figure().axes[0]
    assert "eigenvalue" in axes.get_xlabel()
    assert "density" in axes.get_ylabel()
    assert "0.5" in axes.get_title()


def test_attention_and_recurrence_have_curvature() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.recurrent = nn.GRU(4, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.scaled_dot_product_attention(x, x, x) + self.attention(x, x, x)[0]
            return self.recurrent(x)[0][:, -1]

    result = spectrum(
        Reader(), nn.CrossEntropyLoss(), [(torch.randn(2, 5, 4), torch.tensor([0, 2]))], k=3, probes=2
    )
    assert math.isfinite(result.largest)
    assert result.largest > 0


def test_errors_say_what_to_do() -> None:
    model, loss, batches = small()
    hessian = Hessian.of_model(model, loss, batches)
    with pytest.raises(InputError, match=r"shape \(3,\)(.|\n)*shape \(26,\)"):
        hessian(torch.zeros(3))
    with pytest.raises(InputError, match="no batch"):
        Hessian.of_model(model, loss, [])(torch.zeros(26, dtype=torch.float64))
    with pytest.raises(InputError, match="requires_grad_"):
        Hessian.of_model(model.requires_grad_(False), loss, batches)
    with pytest.raises(InputError, match="probes = 0"):
        hessian_spectrum(hessian, probes=0)


@pytest.mark.parametrize("keep", [False, True])
def test_a_kept_graph_gives_the_same_products_and_notices_a_new_point(keep: bool) -> None:
    model, loss, batches = small()
    hessian = Hessian.of_model(model, loss, batches, keep=keep)
    vector = torch.randn(hessian.size, dtype=torch.float64)
    for _ in range(2):
        dense = dense_hessian(model, loss, batches)
        torch.testing.assert_close(hessian(vector), dense @ vector, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(hessian(2 * vector), 2 * dense @ vector, rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3


def test_a_kept_graph_is_built_once_for_a_point() -> None:
    model, loss, batches = small()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    hessian = Hessian.of_model(model, loss, batches, keep=True)
    for _ in range(4):
        hessian(torch.ones(hessian.size, dtype=torch.float64))
    assert len(calls) == len(batches)


@pytest.mark.slow
def test_compiled_products_are_the_same() -> None:
    model, loss, batches = small()
    hessian = Hessian.of_model(model, loss, batches, compile=True)
    dense = dense_hessian(model, loss, batches)
    for _ in range(2):
        vector = torch.randn(hessian.size, dtype=torch.float64)
        torch.testing.assert_close(hessian(vector), dense @ vector, rtol=1e-9, atol=1e-11)


def test_the_gradient_is_that_of_all_rows() -> None:
    model, loss, batches = small()
    inputs, target = (torch.cat(part) for part in zip(*batches, strict=True))
    expected = torch.autograd.grad(loss(model(inputs), target), list(model.parameters()))
    gradient = Hessian.of_model(model, loss, batches).gradient()
    torch.testing.assert_close(gradient, torch.cat([part.flatten() for part in expected]))


class Residual(nn.Module):
    """A convolution, a residual block with batch norm, a linear layer, for 8×8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.inner, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.leave = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(self.enter(x)).relu(), 2)
        return self.leave((x + self.second(self.inner(x))).relu().mean((2, 3)))


def network(name: str) -> tuple[nn.Module, LossFunction, Batches]:
    if name == "gpt":
        tokens = torch.randint(0, 11, (8, 9))
        model: nn.Module = GPT(GPTConfig(11, 8, 1, 2, 8))
        return (
            model.double(),
            lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
            [(tokens[:, :-1], tokens[:, 1:])],
        )
    target = torch.randint(0, 5, (48,))
    images = torch.randn(48, 1, 8, 8, dtype=torch.float64) + target.double().view(-1, 1, 1, 1) / 2
    if name == "resnet":
        return Residual().double(), F.cross_entropy, [(images, target)]
    layers = (nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))
    return nn.Sequential(*layers).double(), F.cross_entropy, [(images, target)]


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt"])
def test_the_largest_eigenvalue_is_within_a_hundredth_in_25_products(name: str) -> None:
    """At the start and after 60 steps of Adam, against all eigenvalues of the dense Hessian."""
    model, loss, batches = network(name)
    for steps in (0, 60):
        optimiser = torch.optim.Adam(model.parameters(), 0.01)
        model.train()
        for _ in range(steps):
            optimiser.zero_grad()
            loss(model(batches[0][0]), batches[0][1]).backward()
            optimiser.step()
        model.eval()
        eigenvalues = torch.linalg.eigvalsh(dense_hessian(model, loss, batches))
        found = largest_eigenvalue(Hessian.of_model(model, loss, batches, keep=True))
        assert found.value == pytest.approx(eigenvalues[-1].item(), rel=0.01)
        assert (eigenvalues - found.value).abs().min().item() <= found.error <= 0.01 * found.value
        assert found.products <= 25


def test_a_start_almost_without_the_largest_direction_finds_it_all_the_same() -> None:
    """From such a start the second eigenvalue converges first, within a bound that holds, for it."""
    hessian = quadratic(*[0.01 * i for i in range(60)], 20.0, 30.0)
    start = torch.ones(62, dtype=torch.float64)
    start[-1] = 1e-4
    hasty = largest_eigenvalue(hessian, least=1, start=start)
    assert hasty.value == pytest.approx(20, rel=0.01)
    assert largest_eigenvalue(hessian, start=start).value == pytest.approx(30, rel=0.01)


def test_the_largest_eigenvalue_stops_early_starts_warm_and_tells_what_it_missed() -> None:
    values = [0.1 * i for i in range(60)] + [30.0]
    hessian = quadratic(*values)
    cold = largest_eigenvalue(hessian, least=2)
    assert cold.value == pytest.approx(30, rel=0.01)
    torch.testing.assert_close(cold.vector.abs()[-1].item(), 1.0, rtol=0, atol=0.01)
    assert 2 <= cold.products < 25
    assert largest_eigenvalue(hessian, least=1, start=cold.vector).products == 1
    assert largest_eigenvalue(hessian, start=cold.vector).products == 14
    # A dense end of the spectrum needs more than three products, and the bound says so.
    short = largest_eigenvalue(quadratic(*values[:-1]), tolerance=1e-6, most=3)
    assert short.products == 3
    assert min(abs(short.value - value) for value in values) <= short.error
    assert short.error > 1e-6 * short.value
    with pytest.raises(InputError, match=r"most = 0(.|\n)*at least one product"):
        largest_eigenvalue(hessian, most=0)


@pytest.mark.gpu
def test_the_same_on_the_gpu() -> None:
    model, loss, batches = small()
    expected = spectrum(model, loss, batches, k=10, probes=2)
    on_gpu = [(inputs.cuda(), target.cuda()) for inputs, target in batches]
    result = spectrum(model.cuda(), loss, on_gpu, k=10, probes=2)
    assert result.largest == pytest.approx(expected.largest, rel=1e-8)
    assert result.trace == pytest.approx(expected.trace, rel=1e-8)
