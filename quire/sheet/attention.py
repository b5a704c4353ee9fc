"""Chapter 15: attention, against explicit sums, torch.nn and measured memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from quire.functional.attention import (
    additive_score,
    attention_pooling,
    bmm,
    dot_score,
    gaussian_score,
    hard_softmax,
    masked_softmax,
    scaled_dot_score,
    weight_kind,
)
from quire.functional.kernel_pooling import gaussian_pooling
from quire.functional.memory import peak_bytes
from quire.functional.streaming import additive_attention
from quire.nn.attention import MultiHeadAttention
from quire.sheet.registry import entry, gap, require, worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Code = Callable[..., Any]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _gradients(output: Tensor, *inputs: Tensor) -> Tensor:
    """All gradients of a fixed, uneven combination of the outputs, in one vector."""
    factors = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    found = torch.autograd.grad((output * factors).sum(), inputs)
    return torch.cat([gradient.flatten() for gradient in found])


# Pooling --------------------------------------------------------------------------------------


def _normalised_over_queries(
    query: Tensor, key: Tensor, value: Tensor, score: Code = scaled_dot_score, weighting: str = "convex"
) -> Tensor:
    return score(query, key).softmax(-2) @ value


@entry(
    "attention/pooling",
    "Attention pooling and its special cases",
    r"\sum_{i=1}^{M} \alpha(q, k_i)\, v_i; \qquad \alpha \ge 0; \quad \alpha \ge 0, \textstyle\sum_i "
    r"\alpha_i = 1 \text{ (convex)}; \quad \alpha = e_j \text{ (a database query)}; \quad "
    r"\alpha = \tfrac1M \text{ (average pooling)}",
    code=attention_pooling,
    wrong=_normalised_over_queries,
    tolerance=1e-12,
)
def _pooling(pool: Code) -> float:
    query, key, value = _random(3, 4), _random(5, 4), _random(5, 2)
    errors = []
    for n in range(3):
        scores = [sum(query[n, d].item() * key[m, d].item() for d in range(4)) for m in range(5)]
        exponentials = [math.exp(s) for s in scores]
        best = scores.index(max(scores))
        weights = {
            "convex": [e / sum(exponentials) for e in exponentials],
            "one-hot": [float(m == best) for m in range(5)],
            "uniform": [1 / 5] * 5,
            "non-negative": [max(0.0, s) for s in scores],
        }
        for weighting, alpha in weights.items():
            wanted = torch.stack([a * v for a, v in zip(alpha, value, strict=True)]).sum(0)
            errors.append(gap(pool(query, key, value, dot_score, weighting)[n], wanted))
            kind = weight_kind(torch.tensor([alpha]))
            convex = weighting != "non-negative"
            errors.append(
                require(
                    kind.nonnegative
                    and kind.convex == convex
                    and kind.one_hot == (weighting == "one-hot")
                    and kind.uniform == (weighting == "uniform")
                )
            )
    # A database: every key asked for gives back its own value.
    keys, records = torch.eye(5, dtype=torch.float64), _random(5, 2)
    order = torch.tensor([3, 0, 4, 1, 2])
    errors.append(gap(pool(keys[order], keys, records, dot_score, "one-hot"), records[order]))
    return worst(*errors)


# Scores ---------------------------------------------------------------------------------------


def _additive_without_bend(query: Tensor, key: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    return ((query @ w_q.mT)[:, None] + (key @ w_k.mT)[None]) @ w_v


@entry(
    "attention/scoring",
    "Scores: dot product, scaled, additive, Gaussian",
    r"q^\top k \;(\mathrm{Var} = d), \qquad \frac{q^\top k}{\sqrt d} \;(\mathrm{Var} = 1), \qquad "
    r"w_v^\top \tanh(W_q q + W_k k), \qquad "
    r"-\tfrac12 \|q - k\|^2 = q^\top k - \tfrac12\|q\|^2 - \tfrac12\|k\|^2",
    code=(dot_score, scaled_dot_score, additive_score, gaussian_score),
    wrong=(
        lambda query, key: nn.functional.normalize(query, dim=-1) @ nn.functional.normalize(key, dim=-1).mT,
        lambda query, key: query @ key.mT / query.shape[-1],
        _additive_without_bend,
        lambda query, key, width=1.0: -(torch.cdist(query, key) ** 2) / width**2,
    ),
    tolerance=1e-12,
)
def _scoring(dot: Code, scaled: Code, additive: Code, gaussian: Code) -> float:
    # All sign vectors of four parts: independent parts of variance 1, and every average is exact.
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=4)), dtype=torch.float64)
    variances = worst(
        gap(dot(signs, signs).var(correction=0), 4.0), gap(scaled(signs, signs).var(correction=0), 1.0)
    )
    query, key = _random(3, 4), _random(5, 4)
    w_q, w_k, w_v = _random(6, 4), _random(6, 4), _random(6)
    errors = [variances]
    for n, m in itertools.product(range(3), range(5)):
        q, k = query[n], key[m]
        product = sum(a.item() * b.item() for a, b in zip(q, k, strict=True))
        hidden = [w_v[i].item() * math.tanh((w_q[i] @ q + w_k[i] @ k).item()) for i in range(6)]
        errors += [
            gap(dot(query, key)[n, m], product),
            gap(scaled(query, key)[n, m], product / 2),
            gap(additive(query, key, w_q, w_k, w_v)[n, m], sum(hidden)),
            gap(gaussian(query, key, 0.5)[n, m], -(math.dist(q.tolist(), k.tolist()) ** 2) / (2 * 0.25)),
        ]
    # Equally long keys: what tells a Gaussian from a dot product is the same for all of them, and cancels.
    even = 3 * nn.functional.normalize(key, dim=-1)
    same = gap(gaussian(query, even).softmax(-1), dot(query, even).softmax(-1))
    uneven = gap(gaussian(query, key).softmax(-1), dot(query, key).softmax(-1))
    return worst(*errors, same, require(uneven > 0.01))


# Masks ----------------------------------------------------------------------------------------


def _multiplied(
    scores: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Multiplies scores by 0 and 1, as is often printed: a masked score is then 0, and its weight e⁰/Σ."""
    allowed = torch.ones_like(scores)
    allowed = allowed.tril() if causal else allowed
    if lengths is not None:
        allowed = allowed * (torch.arange(scores.shape[-1]) < lengths[:, None, None])
    if mask is not None:
        allowed = allowed * (mask if mask.dtype == torch.bool else mask.exp())
    return (scores * allowed).softmax(-1)


@entry(
    "attention/masked-softmax",
    "Masked softmax",
    r"\alpha_{nm} = \frac{\exp(s_{nm} + \mu_{nm})}{\sum_j \exp(s_{nj} + \mu_{nj})}, \quad \mu_{nm} = "
    r"\begin{cases} 0 & m \text{ may be seen} \\ -\infty & \text{otherwise} \end{cases}; \qquad "
    r"\alpha_n = 0 \text{ if nothing may be seen}",
    code=masked_softmax,
    wrong=_multiplied,
    tolerance=1e-12,
    erratum="The causal mask is added to the scores (0 and −∞), not multiplied with them: softmax(M ⊙ QKᵀ) "
    "gives a masked key the weight e⁰/Σ, which is not zero.",
)
def _masked_softmax(softmax: Code) -> float:
    b, n = 3, 4
    scores = _random(b, n, n)
    lengths = torch.tensor([0, 2, 4])
    mask = torch.rand(b, n, n) < 0.6
    mask[1, 2] = False
    added = torch.where(mask, _random(b, n, n), -torch.inf)
    triangle = torch.tensor([[m <= i for m in range(n)] for i in range(n)]).expand(b, n, n)
    within = (torch.arange(n) < lengths[:, None, None]).expand(b, n, n)
    cases: list[tuple[dict[str, Any], Tensor, Tensor]] = [
        ({"causal": True}, triangle, scores),
        ({"lengths": lengths}, within, scores),
        ({"mask": mask}, mask, scores),
        ({"mask": added}, mask, scores + torch.where(mask, added, 0.0)),
        ({"mask": mask, "lengths": lengths, "causal": True}, triangle & within & mask, scores),
    ]
    errors = []
    for options, allowed, seen in cases:
        wanted = torch.zeros(b, n, n, dtype=torch.float64)
        for i, j in itertools.product(range(b), range(n)):
            terms = {m: math.exp(seen[i, j, m].item()) for m in range(n) if allowed[i, j, m]}
            for m, term in terms.items():
                wanted[i, j, m] = term / sum(terms.values())
        leaf = scores.clone().requires_grad_()
        weights = softmax(leaf, **options)
        slopes = _gradients(weights, leaf).reshape(scores.shape)
        # By the quotient rule: α_m (g_m − Σ_j α_j g_j).
        g = torch.linspace(-1, 2, scores.numel(), dtype=torch.float64).reshape(scores.shape)
        errors += [
            gap(weights, wanted),
            gap(slopes, wanted * (g - (wanted * g).sum(-1, keepdim=True))),
        ]
    return worst(*errors)


# Heads ----------------------------------------------------------------------------------------


class _Interleaved(MultiHeadAttention):
    """Cuts the width into heads the wrong way round, as a reshape without a transpose does."""

    def _by_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.num_heads)).permute(0, 3, 1, 2)


@entry(
    "attention/multi-head",
    "Multi-head attention",
    r"\mathrm{Concat}(h_1, \dots, h_H) W_O, \quad h_i = \mathrm{softmax}\Big(\frac{Q W_i^Q (K W_i^K)^\top}"
    r"{\sqrt d} + \mu\Big) V W_i^V; \qquad \text{hard: one-hot of the best key}",
    code=(MultiHeadAttention, hard_softmax),
    wrong=(_Interleaved, masked_softmax),
    tolerance=1e-10,
)
def _multi_head(layer: Code, hard: Code) -> float:
    errors = []
    b, n, m, width, heads = 2, 4, 5, 6, 3
    future = torch.ones(n, n).triu(1).bool()
    padded = torch.arange(m) >= torch.tensor([[3], [5]])
    for kind in ("self", "cross", "masked", "lengths", "widths"):
        options: dict[str, Any] = {"kdim": 3, "vdim": 2} if kind == "widths" else {}
        peer = nn.MultiheadAttention(width, heads, batch_first=True, **options).double()
        for parameter in peer.parameters():
            nn.init.normal_(parameter)
        own = layer(width, heads, **options).double()
        own.load_state_dict(peer.state_dict())
        query = _random(b, n, width).requires_grad_()
        sources = [_random(b, m, size).requires_grad_() for size in (peer.kdim, peer.vdim)]
        if kind in ("self", "masked"):
            masked = kind == "masked"
            wanted, maps = peer(
                query, query, query, attn_mask=future if masked else None, average_attn_weights=False
            )
            got, weights = own(query, causal=masked, need_weights=True)
            fused, inputs = own(query, causal=masked), [query]
        else:
            padding = padded if kind == "lengths" else None
            wanted, maps = peer(query, *sources, key_padding_mask=padding, average_attn_weights=False)
            lengths = torch.tensor([3, 5]) if kind == "lengths" else None
            got, weights = own(query, *sources, lengths=lengths, need_weights=True)
            fused, inputs = own(query, *sources, lengths=lengths), [query, *sources]
        theirs = [peer.get_parameter(name) for name, _ in own.named_parameters()]
        slopes = _gradients(wanted, *inputs, *theirs)
        errors += [gap(weights, maps), gap(got, wanted), gap(fused, wanted)]
        errors += [gap(_gradients(out, *inputs, *own.parameters()), slopes) for out in (got, fused)]
    # Hard: one key in full, the gradient of the soft weights.
    scores = _random(3, 5).requires_grad_()
    chosen = hard(scores)
    for row, best in zip(chosen, scores.argmax(-1).tolist(), strict=True):
        errors.append(gap(row, torch.eye(5, dtype=torch.float64)[best]))
    errors.append(gap(_gradients(chosen, scores), _gradients(scores.softmax(-1), scores)))
    return worst(*errors)


@entry(
    "attention/bmm",
    "Products of batches of matrices",
    r"(A B)_{bnv} = \sum_m A_{bnm} B_{bmv}",
    code=bmm,
    wrong=lambda left, right: left * right if left.shape == right.shape else left @ right,
    tolerance=1e-12,
    erratum="Batch matrix multiplication is sometimes written with ⊙. It is a matrix product for each entry "
    "of the batch, not an element-wise product.",
)
def _bmm(product: Code) -> float:
    errors = []
    for b, n, m, v in ((2, 3, 3, 3), (3, 2, 4, 5), (1, 1, 6, 1)):
        left, right = _random(b, n, m), _random(b, m, v)
        wanted = torch.zeros(b, n, v, dtype=torch.float64)
        for i, j, k, c in itertools.product(range(b), range(n), range(m), range(v)):
            wanted[i, j, c] += left[i, j, k] * right[i, k, c]
        errors.append(gap(product(left, right), wanted))
    return worst(*errors)


# What attention does not see, and what it costs -----------------------------------------------


class _WithOrder(MultiHeadAttention):
    def forward(self, query: Tensor, *sources: Any, **options: Any) -> Any:
        return super().forward(query, causal=True)


@entry(
    "attention/equivariance",
    "Without positions, order is invisible",
    r"f(P X) = P f(X) \text{ for every permutation } P",
    code=MultiHeadAttention,
    wrong=_WithOrder,
    tolerance=1e-12,
)
def _equivariance(layer: Code) -> float:
    own = layer(8, 2).double()
    x = _random(2, 6, 8)
    orders = [torch.randperm(6) for _ in range(3)] + [torch.arange(6).flip(0)]
    # Permuted keys alone change nothing at all.
    memory = _random(2, 6, 8)
    unchanged = [gap(own(x, memory[:, order]), own(x, memory)) for order in orders]
    return worst(*unchanged, *(gap(own(x[:, order]), own(x)[:, order]) for order in orders))


def _held(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention_pooling(query, key, value, gaussian_score)


def _held_additive(query: Tensor, key: Tensor, value: Tensor, vector: Tensor, backend: str = "") -> Tensor:
    return attention_pooling(query, key, value, lambda q, k: torch.tanh(q[:, None] + k[None]) @ vector)


def _training_peak(function: Code, *inputs: Tensor) -> int:
    """Bytes held at most by a forward and a backward pass."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    return peak_bytes(lambda: torch.autograd.grad(function(*leaves).sum(), leaves))


def _cost_picture() -> Figure:
    from quire.report.style import figure

    torch.manual_seed(1)
    walk = torch.randn(24, 8).cumsum(0) / 3
    maps = {
        "all keys": masked_softmax(scaled_dot_score(walk, walk)),
        "causal": masked_softmax(scaled_dot_score(walk, walk), causal=True),
    }
    fig = figure(10.2, 3.2)
    *images, cost = fig.subplots(1, 3)
    for axes, (title, weights) in zip(images, maps.items(), strict=True):
        drawn = axes.imshow(weights.numpy(), cmap="viridis")
        axes.set(title=f"attention map, {title}", xlabel="key", ylabel="query")
        fig.colorbar(drawn, ax=axes)
    sizes = [64, 128, 256, 512]
    inputs = [[*(torch.randn(size, 16) for _ in range(3)), torch.randn(16)] for size in sizes]
    for label, function in (("all held", _held_additive), ("streamed", additive_attention)):
        peaks = [_training_peak(partial(function, backend="torch"), *given) / 2**20 for given in inputs]
        cost.loglog(sizes, peaks, "o-", label=label, base=2)
    cost.set(title="additive, measured", xlabel="queries and keys N", ylabel="peak memory (MiB)")
    cost.legend(frameon=False, fontsize=8)
    return fig


@entry(
    "attention/complexity",
    "Time and memory of attention",
    r"\text{time } O(N^2 d); \qquad \text{memory } O(N^2) \text{ materialised}, \quad O(N) \text{ streamed}",
    code=(attention_pooling, gaussian_pooling, additive_attention),
    wrong=(attention_pooling, _held, _held_additive),
    tolerance=0.05,
    picture=_cost_picture,
)
def _complexity(pool: Code, streamed: Code, additive: Code) -> float:
    errors = []
    # Time: the products q·k and α·v are 2N²d operations each.
    for n, d in ((16, 8), (32, 8), (16, 24)):
        inputs = [torch.randn(n, d) for _ in range(3)]
        with FlopCounterMode(display=False) as counter:
            pool(*inputs)
        errors.append(gap(counter.get_total_flops(), 4 * n * n * d))

    def growth(function: Code, size: int, *more: Tensor) -> float:
        """log₂ of how the memory grows with twice the queries and keys: 2 is quadratic, 1 linear."""
        small, large = (
            _training_peak(function, *(torch.randn(rows, 4) for _ in range(3)), *more)
            for rows in (size, 2 * size)
        )
        return math.log2(large / small)

    errors.append(abs(growth(pool, 256) - 2))
    # One block of scores is a constant, so the measured growth is at most linear.
    vector = torch.randn(4)
    errors.append(max(0.0, growth(streamed, 512) - 1))
    errors.append(max(0.0, growth(partial(additive, backend="torch"), 512, vector) - 1))
    return worst(*errors)
