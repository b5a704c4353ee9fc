"""Chapter 12: where in an image a network sees a class, against closed forms and finite differences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.functional.evidence import class_activation_map, grad_cam
from quire.sheet.registry import entry, gap, worst


def _signed(features: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    """Leaves out the rectifier, so that places which speak against the class count as well."""
    (gradient,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), features, retain_graph=True)
    return (gradient.mean((2, 3), keepdim=True) * features.detach()).sum(1)


@entry(
    "convnets/class-activation-map",
    "Class activation map and Grad-CAM",
    r"M_c(i, j) = \sum_k w_{ck} A_k(i, j), \quad \frac{1}{HW} \sum_{i,j} M_c(i, j) = o_c - b_c; \qquad "
    r"L_c = \mathrm{ReLU}\Big(\sum_k \alpha_k A_k\Big), \; "
    r"\alpha_k = \frac{1}{HW} \sum_{i,j} \frac{\partial o_c}{\partial A_k(i, j)}",
    code=(class_activation_map, grad_cam),
    wrong=(lambda features, weights, classes: features.sum(1), _signed),
    tolerance=1e-8,
)
def _(activation: Callable[..., Tensor], by_gradient: Callable[..., Tensor]) -> float:
    n, k, height, width = 4, 5, 3, 2
    classes = torch.tensor([2, 0, 1, 2])
    features = torch.randn(n, k, height, width, dtype=torch.float64, requires_grad=True)
    linear = nn.Linear(k, 3).double()
    maps = activation(features, linear.weight, classes)
    logits = linear(features.mean((2, 3)))
    loop = torch.zeros(n, height, width, dtype=torch.float64)
    for i, c in enumerate(classes.tolist()):
        for j in range(k):
            loop[i] += (linear.weight[c, j] * features[i, j]).detach()
    # Averaged maps and a linear layer: the gradient is w/HW everywhere, so both maps agree but for the scale.
    pooled = worst(
        gap(maps, loop),
        gap(maps.mean((1, 2)), logits[torch.arange(n), classes] - linear.bias[classes]),
        gap(by_gradient(features, logits, classes), loop.relu() / (height * width)),
    )

    head = nn.Sequential(nn.Flatten(), nn.Linear(k * height * width, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    with torch.no_grad():
        step = 1e-5 * torch.eye(k * height * width, dtype=torch.float64).unflatten(1, (k, height, width))
        rises = []
        for image, c in zip(features, classes.tolist(), strict=True):
            rise = (head(image + step) - head(image - step))[:, c] / 2e-5
            rises.append(rise.unflatten(0, (k, height, width)))
        weights = torch.stack(rises).mean((2, 3))  # (N, K)
        measured = (weights[:, :, None, None] * features).sum(1).relu()
    return worst(pooled, gap(by_gradient(features, head(features), classes), measured))
