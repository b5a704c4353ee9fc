"""The Hessian of any PyTorch loss as a linear map, and its largest eigenvalue by Lanczos' method.

The Hessian H is never formed. A product Hv is the gradient of (∇E)ᵀv; where the point stays the same, the
graph of ∇E is built once and each product is one more backward pass through it, at about the price of two
gradients. Lanczos' method turns k such products into a k×k tridiagonal matrix T whose eigenvalues θ (Ritz
values) approach those of H from the ends of the spectrum inwards.

Where an activation has a kink (ReLU), the curvature is that of the smooth pieces.

n parameters, k Lanczos steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.errors import InputError
from quire.functional.modes import evaluating

Batches = Iterable[tuple[Tensor, Tensor]]
LossFunction = Callable[[Tensor, Tensor], Tensor]
WeightedLosses = Callable[[], Iterable[tuple[float, Tensor]]]
Product = Callable[[Tensor], Tensor]


class Hessian:
    """The linear map v ↦ Hv, for the weighted mean of the losses that `losses()` gives.

    `keep` holds the graph of the gradient, and with it the activations of every batch, for as long as the
    parameters stay as they are: a product then costs about two gradients instead of three. `compile` does so
    too and compiles the products at the first of them, which takes from seconds to a minute and pays off for
    many products at one point. Only changes that PyTorch counts are noticed, not those through `.data`.
    """

    def __init__(
        self,
        losses: WeightedLosses,
        parameters: Iterable[Tensor],
        *,
        keep: bool = False,
        compile: bool = False,
    ) -> None:
        self.losses, self.keep, self.compile = losses, keep or compile, compile
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise InputError(
                "a model without trainable parameters",
                expected="at least one parameter that requires a gradient",
                fix="call requires_grad_() on what should be examined",
            )
        self.size = sum(parameter.numel() for parameter in self.parameters)
        first = self.parameters[0]
        self.dtype, self.device = first.dtype, first.device
        self._kept: Product | None = None
        self._point: list[tuple[int, int]] = []

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        loss: LossFunction,
        batches: Batches,
        *,
        keep: bool = False,
        compile: bool = False,
    ) -> Hessian:
        """Of the mean of ``loss(model(inputs), target)`` over `batches`, each weighted by its rows.

        `loss` is a mean over rows. The model is run as in evaluation, so that dropout and batch norm
        neither make H random nor are changed by looking at it; its mode is restored.
        """
        # An iterator would be used up by the first product.
        given: Batches = list(batches) if isinstance(batches, Iterator) else batches

        def losses() -> Iterator[tuple[float, Tensor]]:
            with evaluating(model), twice_differentiable(model):
                for inputs, target in given:
                    yield len(target), loss(model(inputs), target)

        return cls(losses, model.parameters(), keep=keep, compile=compile)

    def __call__(self, vector: Tensor) -> Tensor:
        """Hv for a flat vector (n,)."""
        if vector.shape != (self.size,):
            raise InputError(
                f"a vector of shape {tuple(vector.shape)}",
                expected=f"shape ({self.size},): one number for each parameter",
            )
        vector = vector.detach()
        if not self.keep:
            return sum_of_products(self._gradients(), self.parameters, vector)
        point = [(parameter._version, parameter.data_ptr()) for parameter in self.parameters]
        if self._kept is None or point != self._point:
            self._kept, self._point = self._linearise(vector), point
        return self._kept(vector)

    def gradient(self) -> Tensor:
        """∇E (n,)."""
        total, weights = torch.zeros(self.size, dtype=self.dtype, device=self.device), 0.0
        with torch.enable_grad():
            for weight, loss in self.losses():
                total += weight * flatten(gradients_of(loss, self.parameters))
                weights += weight
        return total / self._positive(weights)

    def _gradients(self) -> Iterator[tuple[float, tuple[Tensor, ...]]]:
        """Each batch's weight and gradient, which can be differentiated."""
        weights = 0.0
        with torch.enable_grad():
            for weight, loss in self.losses():
                weights += weight
                yield weight, gradients_of(loss, self.parameters, create_graph=True)
        self._positive(weights)

    def _linearise(self, example: Tensor) -> Product:
        kept = list(self._gradients())

        def product(vector: Tensor) -> Tensor:
            return sum_of_products(kept, self.parameters, vector, retain=True)

        if not self.compile:
            return product
        from torch.fx.experimental.proxy_tensor import make_fx

        # What does not depend on v is computed while this is traced and stays in the graph as constants.
        traced = make_fx(product)(example)
        compiled: Product = torch.compile(traced)
        return compiled

    @staticmethod
    def _positive(weights: float) -> float:
        if weights == 0:
            raise InputError("no batch to compute a loss from", expected="at least one (inputs, target) pair")
        return weights


def sum_of_products(
    gradients: Iterable[tuple[float, tuple[Tensor, ...]]],
    parameters: Sequence[Tensor],
    vector: Tensor,
    *,
    retain: bool = False,
) -> Tensor:
    """Σ_b w_b ∇(∇E_bᵀv) / Σ_b w_b."""
    pieces = split_like(vector, parameters)
    products: Tensor | None = None
    weights = 0.0
    for weight, gradient in gradients:
        if weight == 0:
            continue
        # A part of the gradient that is constant contributes nothing, and has no graph.
        pairs = [(g, v) for g, v in zip(gradient, pieces, strict=True) if g.requires_grad]
        tangents = torch.autograd.grad(
            [g for g, _ in pairs],
            parameters,
            [v for _, v in pairs],
            retain_graph=retain,
            allow_unused=True,
            materialize_grads=True,
        ) if pairs else [torch.zeros_like(piece) for piece in pieces]  # fmt: skip
        # A running mean: a single batch, the usual case, is not copied again.
        weights += weight
        product = flatten(tangents)
        products = product if products is None else products.lerp(product, weight / weights)
    return torch.zeros_like(vector) if products is None else products


def hessian_vector_product(
    function: Callable[[], Tensor], parameters: Iterable[Tensor], vector: Tensor
) -> Tensor:
    """Hv of the scalar that `function()` computes from `parameters`, for a flat vector v."""
    return Hessian(lambda: [(1.0, function())], parameters)(vector)


class Tridiagonal(NamedTuple):
    """T = QᵀHQ of Lanczos' method, in float64."""

    diagonal: Tensor
    """(k,)."""
    off_diagonal: Tensor
    """(k − 1,)."""
    residual: float
    """β_k, the norm of what is left; 0 where the basis spans an invariant subspace."""
    basis: Tensor
    """Qᵀ (k, n), orthonormal rows."""

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues θ of T, ascending, and its eigenvectors as columns."""
        matrix = torch.diag(self.diagonal)
        matrix += torch.diag(self.off_diagonal, 1) + torch.diag(self.off_diagonal, -1)
        values, vectors = torch.linalg.eigh(matrix)
        return values, vectors

    def errors(self, values: Tensor, vectors: Tensor) -> Tensor:
        """How far each Ritz value is at most from an eigenvalue of H: β_k·|last component|, and rounding."""
        n, dtype = self.basis.shape[1], self.basis.dtype
        rounding = values.abs().max() * n**0.5 * torch.finfo(dtype).eps
        return self.residual * vectors[-1].abs() + rounding


def lanczos(product: Product, start: Tensor, steps: int) -> Tridiagonal:
    """k steps of Lanczos' method from `start` (n,), for a symmetric map given as a function.

    Each new vector is made orthogonal to all earlier ones, twice: without it rounding lets converged
    directions come back, and the spectrum shows eigenvalues that are not there.
    """
    *_, last = lanczos_steps(product, start, steps)
    return last


def lanczos_steps(product: Product, start: Tensor, steps: int) -> Iterator[Tridiagonal]:
    """`lanczos`, with the result after each product."""
    n = start.numel()
    steps = min(steps, n)
    basis = start.new_empty(steps, n)
    basis[0] = start / start.norm()
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    scale = 0.0
    for k in range(steps):
        vector = product(basis[k])
        diagonal.append(torch.dot(vector.double(), basis[k].double()).item())
        for _ in range(2):
            vector = vector - basis[: k + 1].t() @ (basis[: k + 1] @ vector)
        residual = vector.double().norm().item()
        scale = max(scale, abs(diagonal[-1]), residual)
        if residual <= scale * n**0.5 * torch.finfo(start.dtype).eps:
            residual = 0.0
        yield Tridiagonal(
            torch.tensor(diagonal, dtype=torch.float64),
            torch.tensor(off_diagonal, dtype=torch.float64),
            residual,
            basis[: k + 1],
        )
        if residual == 0.0:
            return
        if k + 1 < steps:
            off_diagonal.append(residual)
            basis[k + 1] = vector / residual


class Eigenvalue(NamedTuple):
    """An extreme eigenvalue as Lanczos' method found it."""

    value: float
    error: float
    """An eigenvalue of H lies at most this far from `value`."""
    products: int
    vector: Tensor
    """The Ritz vector (n,), of norm 1."""


def largest_eigenvalue(
    hessian: Hessian,
    tolerance: float = 0.01,
    most: int = 25,
    *,
    least: int = 14,
    start: Tensor | None = None,
    seed: int = 0,
) -> Eigenvalue:
    """λmax, stopped where Lanczos' bound of its error is below `tolerance`·|λmax|, after `least` products at
    the earliest and `most` at the latest.

    The bound is rigorous for *an* eigenvalue. A start that happens to have next to no part in the direction
    of the largest one settles on the second at first: of 4,000 random starts on small networks 9 did so
    with `least` = 1 and none with 14. `start` may be the last vector found, where the point has moved little
    since. Memory for `most` vectors of the size of the model.
    """
    if most < 1 or not tolerance > 0:
        raise InputError(
            f"tolerance = {tolerance:g} and most = {most}",
            expected="a positive tolerance and at least one product",
        )
    first = random_direction(hessian, seed) if start is None else start
    for result in lanczos_steps(hessian, first, most):
        values, vectors = result.ritz()
        value, error = values[-1].item(), result.errors(values, vectors)[-1].item()
        if len(values) >= least and error <= tolerance * abs(value):
            break
    vector = result.basis.t() @ vectors[:, -1].to(result.basis)
    return Eigenvalue(value, error, len(result.diagonal), vector)


def random_direction(hessian: Hessian, seed: int) -> Tensor:
    """Normal numbers (n,), the same on every device."""
    numbers = torch.randn(hessian.size, generator=torch.Generator().manual_seed(seed))
    return numbers.to(hessian.device, hessian.dtype)


def gradients_of(
    value: Tensor, parameters: Sequence[Tensor], create_graph: bool = False
) -> tuple[Tensor, ...]:
    if not value.requires_grad:  # a loss that is linear in the parameters has a constant gradient
        return tuple(torch.zeros_like(parameter) for parameter in parameters)
    return torch.autograd.grad(
        value, parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def split_like(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    pieces = vector.split([parameter.numel() for parameter in parameters])
    return [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]


@contextlib.contextmanager
def twice_differentiable(model: nn.Module | None = None) -> Iterator[None]:
    """Kernels that have a second derivative: the fused ones of attention and of cuDNN's recurrent layers
    have the first alone."""
    recurrent = model is not None and any(isinstance(module, nn.RNNBase) for module in model.modules())
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if recurrent:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield
