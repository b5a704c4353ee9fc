"""Chapter 10: normalisation of data, batches and layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from quire.functional import normalise as F
from quire.nn.normalise import BatchNorm, LayerNorm, PostNorm, PreNorm, Standardise
from quire.sheet.registry import entry, gap, require, worst

Code = Callable[..., Any]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _gradients(output: Tensor, *inputs: Tensor) -> Tensor:
    """All gradients of a fixed, uneven combination of the outputs, in one vector."""
    factors = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    found = torch.autograd.grad((output * factors).sum(), inputs)
    return torch.cat([gradient.flatten() for gradient in found])


def _fill(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)


class _UnbiasedStandardise(Standardise):
    def fit(self, values: Tensor) -> Standardise:
        super().fit(values)
        self.deviation.copy_(values.std(dim=0))
        return self


@entry(
    "normalise/standardise",
    "Standardised data",
    r"z = \frac{x - \mu}{\sigma}, \quad \mu = \frac1N \sum_n x_n, "
    r"\quad \sigma^2 = \frac1N \sum_n (x_n - \mu)^2; \qquad x = \sigma z + \mu",
    code=Standardise,
    wrong=_UnbiasedStandardise,
    tolerance=1e-9,
)
def _standardise(build: Code) -> float:
    training, fresh = _random(30, 4) * torch.tensor([1.0, 9.0, 0.01, 0.0]) + 50, _random(5, 4)
    oracle = StandardScaler().fit(training.numpy())
    layer = build(4).double().fit(training)
    z = layer(fresh)
    return worst(
        gap(z, torch.from_numpy(oracle.transform(fresh.numpy()))),
        gap(layer.inverse(z), fresh),
        gap(layer(training)[:, :3].mean(0), torch.zeros(3)),
        gap(layer(training)[:, :3].square().mean(0), torch.ones(3)),
    )


def _norm_without_eps(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias, eps=0.0)


class _FrozenAverages(BatchNorm):
    """Evaluates with the statistics of the batch, as in training."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


@entry(
    "normalise/batch-norm",
    "Batch norm",
    r"y = \gamma_c \frac{x - \mu_c}{\sqrt{\sigma_c^2 + \epsilon}} + \beta_c; \qquad \mu_c, \sigma_c^2 "
    r"\text{ of the batch (training) or moving averages (test)}",
    code=(F.batch_norm, BatchNorm),
    wrong=(_norm_without_eps, _FrozenAverages),
    tolerance=1e-10,
)
def _batch_norm(formula: Code, layer: Code) -> float:
    errors = []
    peers: list[tuple[tuple[int, ...], Any]] = [
        ((8, 3), nn.BatchNorm1d), ((6, 3, 5), nn.BatchNorm1d),
        ((4, 3, 2, 5), nn.BatchNorm2d), ((4, 3, 2, 2, 3), nn.BatchNorm3d),
    ]  # fmt: skip
    for shape, kind in peers:
        peer, own = kind(3).double(), layer(3).double()
        _fill(peer)
        own.load_state_dict(peer.state_dict())
        errors.append(require(sum(p.numel() for p in own.parameters()) == 2 * 3))
        for _ in range(2):
            x = (_random(*shape) * 0.05 + 4).requires_grad_()
            wanted = peer(x)
            # A step by hand: statistics of the batch, then the formula; one by the layer.
            by_hand = formula(x, *F.channel_statistics(x), peer.weight, peer.bias)
            own_out = own(x)
            errors += [gap(by_hand, wanted), gap(own_out, wanted), require(own_out.shape == x.shape)]
            gradients = _gradients(wanted, x, peer.weight, peer.bias)
            errors.append(gap(_gradients(by_hand, x, peer.weight, peer.bias), gradients))
            errors.append(gap(_gradients(own_out, x, own.weight, own.bias), gradients))
        errors += [gap(own.running_mean, peer.running_mean), gap(own.running_var, peer.running_var)]
        x = _random(*shape)
        wanted = peer.eval()(x)
        averages = peer.running_mean, peer.running_var
        errors += [gap(formula(x, *averages, peer.weight, peer.bias), wanted), gap(own.eval()(x), wanted)]
    return worst(*errors)


@entry(
    "normalise/moving-average",
    "Moving averages of batch norm, in both conventions",
    r"\bar\mu \leftarrow (1 - m) \bar\mu + m \mu \;\;(m \text{ of the batch}), \qquad "
    r"\bar\mu \leftarrow m' \bar\mu + (1 - m') \mu \;\;(m' \text{ of the average}), \qquad m' = 1 - m",
    code=(F.moving_average, BatchNorm),
    wrong=(
        lambda average, batch, momentum, share="batch": F.moving_average(average, batch, momentum),
        lambda features, eps=1e-5, momentum=0.1, *, momentum_of="batch": BatchNorm(features, eps, momentum),
    ),
    tolerance=1e-12,
)
def _moving_average(average: Code, layer: Code) -> float:
    peer = nn.BatchNorm1d(4, momentum=0.2).double()
    of_batch, of_average = (
        layer(4, momentum=0.2).double(),
        layer(4, momentum=0.8, momentum_of="average").double(),
    )
    means = [torch.zeros(4, dtype=torch.float64)] * 2
    variances = [torch.ones(4, dtype=torch.float64)] * 2
    for _ in range(5):
        x = _random(6, 4) * 2 + 1
        for module in (peer, of_batch, of_average):
            module(x)
        for i, how in enumerate([(0.2, "batch"), (0.8, "average")]):
            means[i] = average(means[i], x.mean(0), *how)
            variances[i] = average(variances[i], x.var(0), *how)
    errors = [
        gap(mean, peer.running_mean) for mean in (*means, of_batch.running_mean, of_average.running_mean)
    ]
    errors += [gap(v, peer.running_var) for v in (*variances, of_batch.running_var, of_average.running_var)]
    return worst(*errors)


class _RowAndBatch(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean()) / (x.var(correction=0) + self.eps).sqrt() * self.weight + self.bias


@entry(
    "normalise/layer-norm",
    "Layer norm",
    r"y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, "
    r"\qquad \mu, \sigma^2 \text{ of each row by itself}",
    code=(F.layer_norm, LayerNorm),
    wrong=(
        lambda x, dims=1, weight=None, bias=None, eps=1e-5: F.layer_norm(x, dims, weight, bias, eps=0.0),
        _RowAndBatch,
    ),
    tolerance=1e-10,
)
def _layer_norm(formula: Code, layer: Code) -> float:
    errors = []
    for shape, dims in (((7, 5), 1), ((3, 4, 6), 1), ((3, 4, 6), 2)):
        peer, own = nn.LayerNorm(shape[-dims:]).double(), layer(shape[-dims:]).double()
        _fill(peer)
        own.load_state_dict(peer.state_dict())
        x = (_random(*shape) * 0.05 + 4).requires_grad_()
        wanted, by_hand, own_out = peer(x), formula(x, dims, peer.weight, peer.bias), own(x)
        gradients = _gradients(wanted, x, peer.weight, peer.bias)
        errors += [gap(by_hand, wanted), gap(own_out, wanted)]
        errors.append(gap(_gradients(by_hand, x, peer.weight, peer.bias), gradients))
        errors.append(gap(_gradients(own_out, x, own.weight, own.bias), gradients))
    return worst(*errors)


def _transformer_block(norm_first: bool) -> nn.TransformerEncoderLayer:
    """PyTorch's encoder layer with its attention silenced: what is left is the feed-forward block."""
    block = nn.TransformerEncoderLayer(
        6, 2, 11, dropout=0.0, norm_first=norm_first, batch_first=True
    ).double()
    _fill(block.norm1)
    _fill(block.norm2)
    nn.init.zeros_(block.self_attn.out_proj.weight)
    nn.init.zeros_(block.self_attn.out_proj.bias)
    return block


def _feed_forward(block: nn.TransformerEncoderLayer) -> nn.Module:
    return nn.Sequential(block.linear1, nn.ReLU(), block.linear2)


@entry(
    "normalise/pre-norm",
    "Pre-norm residual block",
    r"y = x + f(\mathrm{norm}(x)), \qquad "
    r"\frac{\partial y}{\partial x} = I + \frac{\partial f(\mathrm{norm}(x))}{\partial x}",
    code=PreNorm,
    wrong=PostNorm,
    tolerance=1e-10,
)
def _pre_norm(wrap: Code) -> float:
    block = _transformer_block(norm_first=True)
    own = wrap(block.norm2, _feed_forward(block))
    x = _random(2, 3, 6).requires_grad_()
    wanted, out = block(x), own(x)
    # With a silent f the block is the identity, whatever the norm.
    silent = nn.Linear(6, 6).double()
    nn.init.zeros_(silent.weight)
    nn.init.zeros_(silent.bias)
    identity = wrap(block.norm2, silent)(x)
    return worst(gap(out, wanted), gap(_gradients(out, x), _gradients(wanted, x)), gap(identity, x))


@entry(
    "normalise/post-norm",
    "Post-norm residual block",
    r"y = \mathrm{norm}(x + f(x))",
    code=PostNorm,
    wrong=PreNorm,
    tolerance=1e-10,
)
def _post_norm(wrap: Code) -> float:
    block = _transformer_block(norm_first=False)
    own = wrap(block.norm2, _feed_forward(block))
    x = _random(2, 3, 6).requires_grad_()
    wanted, out = block(x), own(block.norm1(x))
    return worst(gap(out, wanted), gap(_gradients(out, x), _gradients(wanted, x)))
