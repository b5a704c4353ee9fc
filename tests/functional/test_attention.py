"""Scores, masks, weights and pooling against explicit loops and PyTorch's own attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import InputError
from quire.functional.attention import (
    WEIGHTINGS,
    additive_score,
    attention,
    attention_pooling,
    bmm,
    dot_score,
    fused_attention,
    gaussian_score,
    hard_softmax,
    masked_softmax,
    nonnegative_weights,
    scaled_dot_score,
    uniform_weights,
    weight_kind,
)
from quire.functional.masks import MaskRule, causal_mask, length_mask


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def softmax_loop(scores: Tensor, allowed: Tensor) -> Tensor:
    """Row by row, from the definition; a row without an allowed key stays zero."""
    weights = torch.zeros_like(scores)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in scores.shape[:-1])).reshape(
        -1, scores.dim() - 1
    ):
        row = tuple(place.tolist())
        keys = [m for m in range(scores.shape[-1]) if allowed[row][m]]
        terms = {m: math.exp(scores[row][m].item()) for m in keys}
        for m in keys:
            weights[row][m] = terms[m] / sum(terms.values())
    return weights


# Scores ---------------------------------------------------------------------------------------


def test_scores_are_the_formulas_pair_by_pair() -> None:
    query, key = random(2, 3, 4), random(2, 5, 4)
    w_q, w_k, w_v = random(6, 4), random(6, 4), random(6)
    for b in range(2):
        for n in range(3):
            for m in range(5):
                q, k = query[b, n], key[b, m]
                pairs = [
                    (dot_score(query, key), sum(q * k)),
                    (scaled_dot_score(query, key), sum(q * k) / 2),
                    (gaussian_score(query, key, 0.7), -sum((q - k) ** 2) / (2 * 0.7**2)),
                    (additive_score(query, key, w_q, w_k, w_v), w_v @ torch.tanh(w_q @ q + w_k @ k)),
                ]
                for got, wanted in pairs:
                    torch.testing.assert_close(got[b, n, m], wanted)


def test_additive_takes_two_widths() -> None:
    scores = additive_score(random(3, 2), random(4, 7), random(5, 2), random(5, 7), random(5))
    assert scores.shape == (3, 4)


def test_a_gaussian_is_a_dot_product_where_keys_are_equally_long() -> None:
    query, key = random(6, 3), functional.normalize(random(8, 3), dim=-1) * 2
    gaussian, dot = gaussian_score(query, key, 0.5), dot_score(query, key) / 0.25
    torch.testing.assert_close(gaussian.softmax(-1), dot.softmax(-1))
    assert not torch.allclose(gaussian_score(query, key + 1, 0.5).softmax(-1), dot.softmax(-1))


# Masks ----------------------------------------------------------------------------------------


def test_masks_by_hand() -> None:
    assert causal_mask(2).tolist() == [[True, False], [True, True]]
    assert causal_mask(2, 3).tolist() == [[True, True, False], [True, True, True]]
    assert causal_mask(3, 1).tolist() == [[False], [False], [True]]
    assert length_mask(torch.tensor([0, 2]), 3).tolist() == [[False] * 3, [True, True, False]]


@pytest.mark.parametrize("kind", ["lengths", "query lengths", "causal", "boolean", "additive", "all"])
@pytest.mark.parametrize("heads", [False, True])
def test_masked_softmax_is_the_definition(kind: str, heads: bool) -> None:
    b, n, m = 3, 4, 5
    scores = random(b, 2, n, m) if heads else random(b, n, m)
    lengths = torch.tensor([0, 3, 5])
    by_query = torch.tensor([[0, 1, 2, 3], [5, 5, 0, 4], [1, 1, 1, 9]])
    mask = torch.rand(b, 1, n, m) < 0.6 if heads else torch.rand(b, n, m) < 0.6
    mask[0, ..., 0, :] = False
    added = random(*mask.shape).masked_fill(~mask, -torch.inf)

    def over_heads(limits: Tensor) -> Tensor:
        limits = limits.reshape(b, -1, 1)  # (B, N or 1, 1)
        return torch.arange(m) < (limits[:, None] if heads else limits)

    everything = torch.ones(scores.shape, dtype=torch.bool)
    triangle = torch.tensor([[j <= i + 1 for j in range(m)] for i in range(n)])
    calls: dict[str, tuple[dict[str, Any], Tensor]] = {
        "lengths": ({"lengths": lengths}, over_heads(lengths)),
        "query lengths": ({"lengths": by_query}, over_heads(by_query)),
        "causal": ({"causal": True}, triangle),
        "boolean": ({"mask": mask}, mask),
        "additive": ({"mask": added}, mask),
        "all": (
            {"mask": mask, "lengths": lengths, "causal": True},
            mask & over_heads(lengths) & triangle,
        ),
    }
    options, allowed = calls[kind]
    seen = scores + torch.where(added == -torch.inf, 0.0, added) if kind == "additive" else scores
    scores.requires_grad_()
    weights = masked_softmax(scores, **options)
    torch.testing.assert_close(weights, softmax_loop(seen, allowed & everything))
    (gradient,) = torch.autograd.grad((weights * random(*scores.shape)).sum(), scores)
    assert gradient.isfinite().all()
    assert (gradient[~(allowed & everything)] == 0).all()


def test_the_lengths_of_scores_without_a_batch_belong_to_the_rows() -> None:
    weights = masked_softmax(torch.zeros(3, 4), lengths=torch.tensor([1, 2, 4]))
    assert weights.tolist() == [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4]
    assert masked_softmax(torch.zeros(2, 4), lengths=torch.tensor(2)).tolist() == [[0.5, 0.5, 0, 0]] * 2


def test_a_learned_mask_has_a_gradient_where_it_is_finite() -> None:
    mask = torch.zeros(3, 4, dtype=torch.float64)
    mask[0] = -torch.inf
    mask[1, 2:] = -torch.inf
    mask.requires_grad_()
    (gradient,) = torch.autograd.grad(masked_softmax(random(2, 3, 4), mask)[..., 0].sum(), mask)
    assert gradient.isfinite().all()
    assert (gradient[0] == 0).all()
    assert gradient[1, 0] > 0
    query = random(2, 3, 5)
    (gradient,) = torch.autograd.grad(attention(query, random(2, 4, 5), random(2, 4, 5), mask).sum(), mask)
    assert gradient.isfinite().all()
    assert (gradient[0] == 0).all()
    assert (gradient[2] != 0).any()


def test_scores_that_are_minus_infinity_count_as_masked() -> None:
    scores = torch.tensor([[-torch.inf, -torch.inf], [-torch.inf, 3.0]], requires_grad=True)
    weights = masked_softmax(scores)
    assert weights.tolist() == [[0, 0], [0, 1]]
    (gradient,) = torch.autograd.grad(weights.sum(), scores)
    assert gradient.isfinite().all()


# Weightings -----------------------------------------------------------------------------------


def test_hard_attention_takes_the_best_with_the_soft_gradient() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0], [5.0, 1.0, 5.0], [0.0, 0.0, 9.0]], dtype=torch.float64)
    scores.requires_grad_()
    lengths = torch.tensor([3, 3, 0])
    hard = hard_softmax(scores, lengths=lengths)
    assert hard.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    factors = random(3, 3)
    (straight,) = torch.autograd.grad((hard * factors).sum(), scores)
    soft = masked_softmax(scores, lengths=lengths)
    (wanted,) = torch.autograd.grad((soft * factors).sum(), scores)
    torch.testing.assert_close(straight, wanted)
    assert (straight[:2] != 0).any()
    assert (straight[2] == 0).all()


def test_the_best_key_is_one_that_may_be_seen() -> None:
    hard = hard_softmax(torch.tensor([[9.0, 1.0, 2.0]]), mask=torch.tensor([[False, True, True]]))
    assert hard.tolist() == [[0, 0, 1]]


def test_no_key_at_all_has_no_weights() -> None:
    for weigh in (masked_softmax, hard_softmax, uniform_weights, nonnegative_weights):
        assert weigh(torch.zeros(2, 3, 0)).shape == (2, 3, 0)


def test_what_rows_are_is_asked_of_all_of_them() -> None:
    convex, other = [0.5, 0.5], [0.3, 0.3]
    assert weight_kind(torch.tensor([convex, convex])) == (True, True, False, True)
    assert weight_kind(torch.tensor([convex, other])) == (True, False, False, False)
    assert weight_kind(torch.tensor([[0.0, 1.0], convex])) == (True, True, False, False)
    assert weight_kind(torch.tensor([convex, [1.5, -0.5]])) == (False, False, False, False)


def test_special_cases_by_hand() -> None:
    scores = torch.tensor([[2.0, -1.0, 3.0]])
    lengths = torch.tensor([2])
    assert nonnegative_weights(scores, lengths=lengths).tolist() == [[2, 0, 0]]
    assert uniform_weights(scores, lengths=lengths).tolist() == [[0.5, 0.5, 0]]
    # The floats of a mask shift scores, which an average does not look at.
    assert uniform_weights(scores, torch.tensor([[0.0, 7.0, -torch.inf]])).tolist() == [[0.5, 0.5, 0]]
    kinds = {
        (-1.0, 2.0): (False, False, False, False),
        (0.3, 0.3): (True, False, False, False),
        (0.3, 0.7): (True, True, False, False),
        (0.0, 1.0): (True, True, True, False),
        (0.5, 0.5): (True, True, False, True),
    }
    for row, wanted in kinds.items():
        assert weight_kind(torch.tensor([row])) == wanted


@pytest.mark.parametrize("weighting", list(WEIGHTINGS))
def test_pooling_with_every_weighting_and_nothing_to_see(weighting: Any) -> None:
    query, key, value = (random(2, 3, 4).requires_grad_() for _ in range(3))
    pooled = attention_pooling(query, key, value, weighting=weighting, lengths=torch.tensor([0, 2]))
    assert (pooled[0] == 0).all()
    assert (pooled[1] != 0).any()
    gradients = torch.autograd.grad(pooled.square().sum(), (query, key, value), allow_unused=True)
    for gradient in gradients:
        if gradient is not None:
            assert gradient.isfinite().all()
            assert (gradient[0] == 0).all()


def test_a_database_query() -> None:
    key = torch.eye(4)[[2, 0, 3, 1]]
    value = torch.tensor([[20.0], [0.0], [30.0], [10.0]])
    found = attention_pooling(torch.eye(4), key, value, dot_score, "one-hot")
    assert found[:, 0].tolist() == [0, 10, 20, 30]


def test_any_function_is_a_score() -> None:
    query, key, value = random(3, 1), random(5, 1), random(5, 2)
    pooled = attention_pooling(query, key, value, lambda q, k: -(q - k.mT).abs())
    weights = (-(query - key.mT).abs()).softmax(-1)
    torch.testing.assert_close(pooled, weights @ value)


def test_bmm_is_a_sum_over_keys() -> None:
    left, right = random(3, 2, 4), random(3, 4, 5)
    wanted = torch.zeros(3, 2, 5, dtype=torch.float64)
    for b in range(3):
        for n in range(2):
            for m in range(4):
                wanted[b, n] += left[b, n, m] * right[b, m]
    torch.testing.assert_close(bmm(left, right), wanted)


# Fused ----------------------------------------------------------------------------------------


SITUATIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"lengths": torch.tensor([0, 5])},
    {"lengths": torch.tensor([[0, 1, 2, 3], [5, 4, 0, 2]])},
    {"lengths": torch.tensor([2, 0]), "causal": True},
    {
        "mask": torch.tensor(
            [[True] * 5, [False] * 5, [True, False, True, False, True], [False, True] * 2 + [True]]
        )
    },
    {"mask": torch.tensor([-torch.inf, 0.5, 0.0, -1.0, -torch.inf]), "lengths": torch.tensor([1, 4])},
    {"scale": 0.3},
]


@pytest.mark.parametrize("options", SITUATIONS, ids=str)
@pytest.mark.parametrize("heads", [False, True])
def test_attention_is_pooling_in_values_and_gradients(options: dict[str, Any], heads: bool) -> None:
    shape = (2, 3) if heads else (2,)
    query, key, value = random(*shape, 4, 6), random(*shape, 5, 6), random(*shape, 5, 2)
    inputs = [t.requires_grad_() for t in (query, key, value)]
    got = attention(query, key, value, **options)
    rest = dict(options)
    scale = rest.pop("scale", 6**-0.5)
    scores = MaskRule.of((*shape, 4, 5), **rest).apply(query @ key.mT * scale)
    # The peer's softmax gives NaN in rows without a key, which are taken out by hand.
    weights = scores.softmax(-1).nan_to_num()
    dead = (scores == -torch.inf).all(-1)
    torch.testing.assert_close(got, torch.where(dead[..., None], 0.0, weights @ value))
    factors = random(*got.shape)
    found = torch.autograd.grad((got * factors).sum(), inputs)
    again = attention_pooling(query, key, value, lambda q, k: q @ k.mT * scale, **rest)
    wanted = torch.autograd.grad((again * factors).sum(), inputs)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs)
    if dead.any():
        assert (found[0][dead] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_in_other_types(dtype: torch.dtype) -> None:
    query, key, value = random(2, 4, 8), random(2, 5, 8), random(2, 5, 3)
    lengths = torch.tensor([0, 4])
    wanted = attention(query, key, value, lengths=lengths)
    got = attention(*(t.to(dtype) for t in (query, key, value)), lengths=lengths)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, atol=0.03, rtol=0.03)
    weights = masked_softmax(random(2, 4, 5).to(dtype), lengths=lengths)
    assert weights.dtype == dtype
    assert (weights[0] == 0).all()


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 4), (3, 0), (0, 3), (4, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_extreme_sizes(queries: int, keys: int, causal: bool) -> None:
    query, key = random(1, queries, 4).requires_grad_(), random(1, keys, 4).requires_grad_()
    pooled = attention(query, key, key, causal=causal)
    assert pooled.shape == (1, queries, 4)
    assert pooled.isfinite().all()
    if causal and queries > keys:
        assert (pooled[:, : queries - keys] == 0).all()
    pooled.sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_causal_beside_cached_keys_is_the_end_of_the_triangle() -> None:
    query, key = random(2, 6, 4), random(2, 6, 4)
    whole = attention(query, key, key, causal=True)
    for new in (1, 2, 5):
        torch.testing.assert_close(attention(query[:, -new:], key, key, causal=True), whole[:, -new:])


def test_dropout_keeps_the_mean() -> None:
    query, key, value = torch.zeros(1, 1, 2), torch.zeros(1, 4, 2), torch.ones(1, 4, 1)
    torch.manual_seed(0)
    drawn = torch.cat([attention(query, key, value, dropout=0.5) for _ in range(400)])
    assert set(drawn.unique().tolist()) <= {0.0, 0.5, 1.0, 1.5, 2.0}
    assert drawn.mean().item() == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
def test_compiled_without_a_break() -> None:
    query, lengths = random(2, 3, 4), torch.tensor([0, 2])
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    for options in ({}, {"causal": True}, {"lengths": lengths}):
        torch.testing.assert_close(
            compiled(query, query, query, **options), attention(query, query, query, **options)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", SITUATIONS[:6], ids=str)
def test_on_the_gpu(options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = [random(2, 3, n, 16) for n in (4, 5, 5)]
    wanted = attention(*inputs, **options)
    there = [t.to("cuda", dtype).requires_grad_() for t in inputs]
    moved = {name: t.cuda() if isinstance(t, Tensor) else t for name, t in options.items()}
    got = attention(*there, **moved)
    torch.testing.assert_close(got.double().cpu(), wanted, atol=0.03, rtol=0.03)
    for gradient in torch.autograd.grad(got.sum(), there):
        assert gradient.isfinite().all()


# Messages -------------------------------------------------------------------------------------


S = torch.zeros(2, 3, 4)
Q, K = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masked_softmax(S, torch.ones(3, 4).long()), "a mask of type torch.int64"),
        (
            lambda: masked_softmax(S, torch.ones(2, 4).bool()),
            r"a mask of shape \(2, 4\) for scores",
        ),
        (lambda: masked_softmax(S, torch.ones(1, 2, 3, 4).bool()), "can be broadcast"),
        (lambda: masked_softmax(S, lengths=torch.ones(2)), r"lengths of type torch.float32"),
        (lambda: masked_softmax(S, lengths=torch.ones(3).long()), r"expected: \(2,\) or \(2, 3\)"),
        (lambda: dot_score(Q, torch.zeros(2, 5, 3)), "project both to one width"),
        (lambda: attention(Q, torch.zeros(5), K), r"attention of queries of shape \(2, 3, 4\)"),
        (lambda: attention(Q, K, torch.zeros(2, 4, 4)), "one value for each key"),
        (lambda: attention(Q, K, K, dropout=1.0), "attention dropout 1.0"),
        (lambda: attention_pooling(Q, K, K, weighting="hard"), "unknown weighting 'hard'"),  # type: ignore[arg-type]
        (lambda: bmm(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)), r"expected: \(…, N, M\) and \(…, M, V\)"),
        (lambda: MaskRule.of((3, 4), exclude_self=True), "exclude_self with 3 queries and 4 keys"),
    ],
)
def test_messages(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize("masked", [False, True])
def test_half_precision_on_a_cpu_is_no_less_exact(masked: bool) -> None:
    """It is computed in single: values and gradients are as near to float64's as PyTorch's own, or nearer."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(3, 2, 4, 33, 16, generator=generator).bfloat16()
    back = torch.randn(2, 4, 33, 16, generator=generator).bfloat16()
    mask = torch.randn(33, 33, generator=generator).bfloat16() if masked else None

    def both(function: Any, dtype: torch.dtype) -> list[Tensor]:
        inputs = [part.to(dtype).requires_grad_() for part in parts]
        out = function(*inputs, None if mask is None else mask.to(dtype))
        assert out.dtype == dtype
        return [out.double(), *(part.double() for part in torch.autograd.grad(out, inputs, back.to(dtype)))]

    exact = both(functional.scaled_dot_product_attention, torch.float64)
    mine, theirs = (
        both(function, torch.bfloat16)
        for function in (fused_attention, functional.scaled_dot_product_attention)
    )
    for wanted, found, other in zip(exact, mine, theirs, strict=True):
        assert float((found - wanted).detach().norm()) <= 1.01 * float((other - wanted).detach().norm())
