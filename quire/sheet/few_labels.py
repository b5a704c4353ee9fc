"""Chapter 9, learning with few labels: guessed labels, pairs of a class, neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor
from torch.nn import functional

from quire.functional import few_labels
from quire.sheet.registry import entry, gap, require, worst


def _mean_over_trusted(logits: Tensor, sure: Tensor, threshold: float) -> Tensor:
    """Divides by what is trusted, and lets the guess be learned too."""
    trust, guess = sure.softmax(-1).max(-1)
    each = functional.cross_entropy(logits, guess, reduction="none") * trust
    return each[trust >= threshold].mean()


@entry(
    "regularise/pseudo-labels",
    "Guessed labels: consistent answers to two views",
    r"L = \frac{1}{B} \sum_b \mathbb{1}[\max_c q_{bc} \ge t]\, (-\log p(\hat{c}_b | x''_b)), \qquad "
    r"q_b = p(\cdot | x'_b) \text{ held fixed}, \; \hat{c}_b = \arg\max_c q_{bc}",
    code=few_labels.pseudo_label,
    wrong=_mean_over_trusted,
    tolerance=1e-12,
)
def _(loss: Callable[..., Tensor]) -> float:
    logits = torch.randn(30, 4).double().requires_grad_()
    sure = (2 * torch.randn(30, 4)).double().requires_grad_()
    value = loss(logits, sure, threshold=0.7)
    by_loop, trusted, wanted = 0.0, 0, torch.zeros(30, 4).double()
    for b in range(30):
        q, log_p = sure[b].softmax(0), logits[b].log_softmax(0)
        if q.max() >= 0.7:
            trusted += 1
            by_loop -= log_p[q.argmax()].item() / 30
            wanted[b] = (log_p.exp().detach() - functional.one_hot(q.argmax(), 4)) / 30
    (slope,) = torch.autograd.grad(value, logits, retain_graph=True)
    (none,) = torch.autograd.grad(value, sure, allow_unused=True)
    return worst(
        require(0 < trusted < 30),
        abs(value.item() - by_loop),
        gap(slope, wanted),
        require(none is None or not none.any()),
    )


def _margin_before_the_square(first: Tensor, second: Tensor, target: Tensor, margin: float) -> Tensor:
    """max(0, m² − d²) where rows belong apart."""
    squared = (first - second).square().sum(-1)
    return torch.where(target > 0, squared, (margin**2 - squared).clamp(min=0)).mean()


@entry(
    "regularise/siamese",
    "Siamese pairs: contrastive margin",
    r"L(a, b, y) = \begin{cases} d^2 & y = 1 \\ \max(0, m - d)^2 & y = -1 \end{cases}, \qquad "
    r"d = \lVert a - b \rVert",
    code=few_labels.contrastive_margin,
    wrong=_margin_before_the_square,
    tolerance=1e-12,
)
def _(loss: Callable[..., Tensor]) -> float:
    errors = []
    for distance in (0.2, 0.7, 1.4):
        a = torch.randn(1, 3).double()
        step = functional.normalize(torch.randn(1, 3).double(), dim=1)
        b = (a + distance * step).requires_grad_()
        for sign, value, pull in (
            (1.0, distance**2, 2 * distance),
            (-1.0, max(0.0, 1 - distance) ** 2, -2 * max(0.0, 1 - distance)),
        ):
            found = loss(a, b, torch.tensor([sign]).double(), margin=1.0)
            (slope,) = torch.autograd.grad(found, b)
            # Along the line between the two: towards a where they belong together, away from it otherwise.
            errors += [abs(found.item() - value), gap(slope, pull * step)]
    return worst(*errors)


@entry(
    "regularise/neighbours",
    "Answers by nearest neighbours",
    r"p(c | x) = \frac{\sum_{i \in N_k(x),\, y_i = c} e^{s_i / \tau}}{\sum_{i \in N_k(x)} e^{s_i / \tau}}, "
    r"\qquad s_i = \frac{z \cdot z_i}{\lVert z \rVert \lVert z_i \rVert}",
    code=(few_labels.nearest_codes, few_labels.neighbour_votes),
    wrong=(
        lambda queries, references, k: (queries @ references.T).topk(k, largest=False),
        lambda likeness, classes, number, **_: functional.one_hot(classes, number).double().mean(1),
    ),
    tolerance=1e-9,
)
def _(nearest: Callable[..., tuple[Tensor, Tensor]], votes: Callable[..., Tensor]) -> float:
    queries, references = (functional.normalize(torch.randn(n, 5).double(), dim=1) for n in (20, 60))
    classes, temperature = torch.randint(3, (60,)), 0.2
    likeness, places = nearest(queries, references, 7)
    found = votes(likeness, classes[places], 3, temperature=temperature, doubt=0.0)

    def loudness(distances: object) -> object:
        """Of unit vectors at distance d, whose cosine is 1 − d²/2."""
        return ((1 - torch.as_tensor(distances).square() / 2) / temperature).exp().numpy()

    peer = KNeighborsClassifier(7, weights=loudness, algorithm="brute")
    peer.fit(references.numpy(), classes.numpy())
    return gap(found, torch.from_numpy(peer.predict_proba(queries.numpy())))
