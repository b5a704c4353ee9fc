"""Attention layers against torch.nn's with the same weights, values and gradients in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.errors import InputError
from quire.nn.attention import AdditiveAttention, AttentionPooling, KeyValueCache, MultiHeadAttention

pytestmark = pytest.mark.slow


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def pair(embed_dim: int = 8, num_heads: int = 2, **options: Any) -> tuple[MultiHeadAttention, Any]:
    """Our layer and torch.nn's with its weights, all of them different from zero."""
    own = MultiHeadAttention(embed_dim, num_heads, **options).double()
    peer = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True, **options).double()
    for parameter in peer.parameters():
        nn.init.normal_(parameter)
    own.load_state_dict(peer.state_dict())
    return own, peer


def same(own: nn.Module, peer: nn.Module, got: Tensor, wanted: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(got, wanted)
    factors = torch.randn_like(got)
    found = torch.autograd.grad((got * factors).sum(), [*inputs, *own.parameters()])
    names = [name for name, _ in own.named_parameters()]
    expected = torch.autograd.grad(
        (wanted * factors).sum(), [*inputs, *map(peer.get_parameter, names)], retain_graph=True
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 3}, {"kdim": 5, "bias": False}])
def test_the_state_dict_is_torchs(options: dict[str, Any]) -> None:
    own, peer = pair(**options)
    assert {k: v.shape for k, v in own.state_dict().items()} == {
        k: v.shape for k, v in peer.state_dict().items()
    }
    b, n, m = 3, 4, 6
    query = random(b, n, 8).requires_grad_()
    key = random(b, m, options.get("kdim", 8)).requires_grad_()
    value = random(b, m, options.get("vdim", 8)).requires_grad_()
    same(own, peer, own(query, key, value), peer(query, key, value)[0], query, key, value)


ADDED = torch.arange(25.0).reshape(5, 5).sin()
MASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "open": ({}, {}),
    "causal": ({"causal": True}, {"attn_mask": torch.ones(5, 5).triu(1).bool()}),
    "boolean": ({"mask": torch.eye(5).flip(0) == 0}, {"attn_mask": torch.eye(5).flip(0) == 1}),
    "additive": ({"mask": ADDED}, {"attn_mask": ADDED.double()}),
    "by sequence": (
        {"mask": torch.stack([torch.eye(5) == 0, torch.ones(5, 5).tril().bool()])},
        {"attn_mask": torch.stack([torch.eye(5) == 1] * 2 + [torch.ones(5, 5).triu(1).bool()] * 2)},
    ),
    "lengths": (
        {"lengths": torch.tensor([2, 5])},
        {"key_padding_mask": torch.arange(5) >= torch.tensor([[2], [5]])},
    ),
    "padding": (
        {"key_padding_mask": torch.arange(5) >= torch.tensor([[1], [4]]), "causal": True},
        {
            "key_padding_mask": torch.arange(5) >= torch.tensor([[1], [4]]),
            "attn_mask": torch.ones(5, 5).triu(1).bool(),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(MASKS))
def test_masks_are_torchs(kind: str) -> None:
    own, peer = pair()
    x = random(2, 5, 8).requires_grad_()
    ours, theirs = MASKS[kind]
    got, weights = own(x, need_weights=True, **ours)
    wanted, expected = peer(x, x, x, average_attn_weights=False, **theirs)
    same(own, peer, own(x, **ours), wanted, x)
    same(own, peer, got, wanted, x)
    torch.testing.assert_close(weights, expected)


def test_a_first_state_like_torchs() -> None:
    torch.manual_seed(0)
    own = MultiHeadAttention(64, 4)
    torch.manual_seed(0)
    peer = nn.MultiheadAttention(64, 4)
    assert (own.in_proj_bias == 0).all()
    assert (own.out_proj.bias == 0).all()
    for name in ("in_proj_weight", "out_proj.weight"):
        a, b = own.get_parameter(name), peer.get_parameter(name)
        assert a.std().item() == pytest.approx(b.std().item(), rel=0.05)
        assert a.abs().max().item() == pytest.approx(b.abs().max().item(), rel=0.01)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_nothing_to_see_is_never_nan(hard: bool, need_weights: bool) -> None:
    layer = MultiHeadAttention(8, 2, hard=hard)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, 8, requires_grad=True)
    for options in (
        {"lengths": torch.tensor([0, 3])},
        {"key_padding_mask": torch.tensor([[True] * 5, [False] * 5])},
        {"mask": torch.zeros(5, 5).bool()},
        {"mask": torch.full((5, 5), -torch.inf)},
    ):
        result = layer(x, need_weights=need_weights, **options)
        output = result[0] if need_weights else result
        # Zeros are pooled, so the output is the last bias.
        torch.testing.assert_close(output[0], layer.out_proj.bias.expand(5, 8))
        if need_weights:
            assert (result[1][0] == 0).all()
        for gradient in torch.autograd.grad(output.square().sum(), [x, *layer.parameters()]):
            assert gradient.isfinite().all()


@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 1, 1), (1, 3, 0), (2, 0, 3), (0, 2, 2)])
def test_extreme_sizes(batch: int, queries: int, keys: int) -> None:
    layer = MultiHeadAttention(4, 2)
    query, memory = torch.randn(batch, queries, 4, requires_grad=True), torch.randn(batch, keys, 4)
    out = layer(query, memory)
    assert out.shape == (batch, queries, 4)
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_hard_heads_take_one_value_each() -> None:
    layer = MultiHeadAttention(8, 2, hard=True).double()
    x = random(2, 5, 8).requires_grad_()
    output, weights = layer(x, need_weights=True, causal=True)
    assert set(weights.unique().tolist()) == {0.0, 1.0}
    assert (weights.sum(-1) == 1).all()
    values = functional.linear(x, layer.in_proj_weight[16:]).unflatten(-1, (2, 4))  # (B, M, H, D)
    chosen = torch.stack(
        [values[torch.arange(2)[:, None], weights[:, h].argmax(-1), h] for h in range(2)], 2
    ).flatten(-2)
    torch.testing.assert_close(output, layer.out_proj(chosen))
    # The gradient reaches queries and keys as well, through the soft weights.
    gradient = torch.autograd.grad(output.square().sum(), layer.in_proj_weight)[0]
    assert (gradient.unflatten(0, (3, 8)).abs().sum((1, 2)) > 0).all()


def test_dropout_only_while_training() -> None:
    layer = MultiHeadAttention(8, 2, dropout=0.5)
    x = torch.randn(2, 5, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("steps", [[1] * 7, [3, 1, 3], [7], [5, 2]])
@pytest.mark.parametrize("gradients", [False, True])
def test_cached_decoding_is_the_whole_at_once(steps: list[int], gradients: bool) -> None:
    own, _ = pair()
    x = random(2, 7, 8)
    whole = own(x, causal=True)
    cache, parts = KeyValueCache(), []
    with torch.set_grad_enabled(gradients):
        for part in x.split(steps, 1):
            parts.append(own(part, causal=True, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert len(cache) == 7
    assert cache.key.shape == (2, 2, 7, 4)
    if gradients:
        found = torch.autograd.grad(torch.cat(parts, 1).square().sum(), list(own.parameters()))
        expected = torch.autograd.grad(whole.square().sum(), list(own.parameters()))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_cache_can_be_reordered_and_trimmed() -> None:
    own, _ = pair()
    x = random(3, 6, 8)
    cache = KeyValueCache()
    with torch.inference_mode():
        own(x[:, :5], causal=True, cache=cache)
    with torch.no_grad():
        own(x[:, 5:], causal=True, cache=cache)
        rows = torch.tensor([2, 2, 0])
        cache.reorder(rows)
        cache.trim(4)
        got = own(x[rows, 4:], causal=True, cache=cache)
        torch.testing.assert_close(got, own(x[rows], causal=True)[:, 4:])
    with pytest.raises(InputError, match="a cache of 6 tokens trimmed to 7"):
        cache.trim(7)
    with pytest.raises(InputError, match="start a new cache for a new batch"):
        own(x[:1], cache=cache)
    with pytest.raises(InputError, match="an empty cache"):
        _ = KeyValueCache().key


def test_a_static_cache_projects_the_encoder_once() -> None:
    own, _ = pair(kdim=5, vdim=5)
    query, memory = random(2, 4, 8), random(2, 6, 5)
    wanted = own(query, memory)
    cache = KeyValueCache(static=True)
    first = own(query[:, :1], memory, cache=cache)
    held = cache.key
    rest = own(query[:, 1:], cache=cache)
    torch.testing.assert_close(torch.cat([first, rest], 1), wanted)
    assert torch.equal(cache.key, held)
    assert len(cache) == 6


def test_growing_copies_little() -> None:
    cache = KeyValueCache()
    buffers = set()
    for _ in range(200):
        key, _ = cache.append(torch.randn(1, 1, 1, 2), torch.randn(1, 1, 1, 2))
        buffers.add(key.data_ptr())
    assert len(buffers) <= 10


def test_bf16_and_compiling() -> None:
    exact = MultiHeadAttention(16, 4).double()
    x = random(2, 6, 16)
    wanted = exact(x, causal=True)
    half = exact.to(torch.bfloat16)(x.bfloat16(), causal=True)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), wanted, atol=0.03, rtol=0.03)
    layer = MultiHeadAttention(8, 2)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    y = torch.randn(2, 5, 8)
    for options in ({}, {"causal": True}, {"lengths": torch.tensor([0, 3])}):
        torch.testing.assert_close(compiled(y, **options), layer(y, **options))


def test_additive_attention_is_its_formula() -> None:
    layer = AdditiveAttention(3, 5, 4).double()
    query, key, value = random(2, 6, 3), random(2, 7, 5), random(2, 7, 2)
    lengths = torch.tensor([0, 4])
    out = layer(query, key, value, lengths=lengths)
    weights = layer.weights(query, key, lengths=lengths)
    assert (out[0] == 0).all()
    assert (weights[0] == 0).all()
    w_q, w_k = layer.query_projection.weight, layer.key_projection.weight
    for n in range(6):
        scores = torch.stack(
            [layer.vector @ torch.tanh(w_q @ query[1, n] + w_k @ key[1, m]) for m in range(4)]
        )
        torch.testing.assert_close(weights[1, n, :4], scores.softmax(0))
        torch.testing.assert_close(out[1, n], scores.softmax(0) @ value[1, :4])
    for gradient in torch.autograd.grad(out.sum(), list(layer.parameters())):
        assert gradient.isfinite().all()
    torch.testing.assert_close(layer(query, key), layer.weights(query, key) @ key)


def test_pooling_starts_as_the_average_and_learns_where_to_look() -> None:
    layer = AttentionPooling(4)
    x = torch.randn(3, 5, 4)
    lengths = torch.tensor([5, 2, 0])
    got = layer(x, lengths=lengths)
    torch.testing.assert_close(got[0], x[0].mean(0))
    torch.testing.assert_close(got[1], x[1, :2].mean(0))
    assert (got[2] == 0).all()
    got.square().sum().backward()
    assert layer.query.grad is not None
    assert layer.query.grad.isfinite().all()
    assert (layer.query.grad != 0).any()
    with torch.no_grad():
        layer.query.copy_(1000 * x[:1, 3])
    best = (x[0] @ x[0, 3]).argmax()
    torch.testing.assert_close(layer(x)[0], x[0, best])
    assert AttentionPooling(4, 3)(x).shape == (3, 3, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MultiHeadAttention(10, 4), "4 heads for a width of 10\n.*\n  fix: a width of 8"),
        (lambda: MultiHeadAttention(8, 2, dropout=1.5), "attention dropout 1.5"),
        (lambda: MultiHeadAttention(8, 2)(torch.zeros(5, 8)), r"attention of shapes \(5, 8\)"),
        (lambda: MultiHeadAttention(8, 2)(torch.zeros(1, 5, 6)), r"\(B, N, 8\), \(B, M, 8\)"),
        (
            lambda: MultiHeadAttention(8, 2)(torch.zeros(1, 5, 8), key_padding_mask=torch.zeros(1, 4).bool()),
            r"booleans of shape \(1, 5\), true at keys that are padding",
        ),
        (lambda: AttentionPooling(4)(torch.zeros(2, 3)), r"expected: \(B, M, 4\)"),
    ],
)
def test_messages(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_gpu(dtype: torch.dtype) -> None:
    here = MultiHeadAttention(64, 4)
    x, lengths = torch.randn(3, 40, 64), torch.tensor([0, 17, 40])
    there = MultiHeadAttention(64, 4)
    there.load_state_dict(here.state_dict())
    there.to("cuda", dtype)
    for options in ({}, {"causal": True}, {"lengths": lengths}, {"lengths": lengths, "causal": True}):
        moved = {name: t.cuda() if isinstance(t, Tensor) else t for name, t in options.items()}
        got = there(x.to("cuda", dtype), **moved)
        torch.testing.assert_close(got.float().cpu(), here(x, **options), atol=0.03, rtol=0.03)
        for gradient in torch.autograd.grad(got.square().sum(), list(there.parameters())):
            assert gradient.isfinite().all()
