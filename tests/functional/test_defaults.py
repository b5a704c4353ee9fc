"""What an option is when it is left out, where PyTorch, a paper or a printed formula says so."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quire import functional as F
from quire.functional import attention as fused
from quire.functional import few_labels, normalise, sampling
from quire.nn import attention, dropout, recurrent
from quire.nn import normalise as layers


def given(function: Callable[..., Any], *names: str) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: parameters[name].default for name in names}


ADAM = given(torch.optim.Adam, "lr", "betas", "eps")
PEERS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (F.leaky_relu, given(nn.LeakyReLU, "negative_slope")),
    (F.leaky_relu_derivative, given(nn.LeakyReLU, "negative_slope")),
    (F.softplus, given(nn.Softplus, "beta")),
    (F.softplus_derivative, given(nn.Softplus, "beta")),
    (F.kl_div, given(nn.KLDivLoss, "log_target")),
    (F.dropout, {"rate": given(nn.Dropout, "p")["p"], "training": True}),
    (dropout.Dropout, given(nn.Dropout, "p")),
    (normalise.batch_norm, given(nn.BatchNorm1d, "eps")),
    (normalise.layer_norm, {**given(nn.LayerNorm, "eps"), "dims": 1}),
    (layers.BatchNorm, given(nn.BatchNorm1d, "eps", "momentum")),
    (layers.LayerNorm, given(nn.LayerNorm, "eps")),
    (attention.MultiHeadAttention, given(nn.MultiheadAttention, "dropout", "bias", "kdim", "vdim")),
    (
        F.adam_step,
        {
            "step_size": ADAM["lr"],
            "beta1": ADAM["betas"][0],
            "beta2": ADAM["betas"][1],
            "eps": ADAM["eps"],
        },
    ),
    # PyTorch's recurrent layers hide their options behind *args; a built one shows them.
    *(
        (layer, {name: getattr(nn.RNN(1, 1), name) for name in ("num_layers", "bias", "dropout")})
        for layer in (recurrent.Recurrent,)
    ),
    (recurrent.Recurrent, {"bidirectional": False, "batch_first": True}),
    # Printed: Vaswani et al. 2017, Papineni et al. 2002, Liu et al. 2016, Sohn et al. 2020.
    (few_labels.pseudo_label, {"threshold": 0.95}),
    (F.sinusoidal, {"base": 10_000.0}),
    (F.shift_matrix, {"base": 10_000.0}),
    (F.relative_dot_product, {"base": 10_000.0}),
    (F.bleu, {"max_order": 4, "smoothing": "none"}),
    (F.default_scales, {"low": 0.2, "high": 0.9}),
    (F.match_boxes, {"threshold": 0.5}),
    (F.nms, {"threshold": 0.5, "groups": None}),
    (F.suppress, {"threshold": 0.5, "most": 100}),
    (F.multibox, {"alpha": 1.0, "negatives": 3.0, "beta": 1.0}),
    # Without them, nothing is done that was not asked for.
    (F.quadratic_energy, {"minimum": 0.0}),
    (F.gaussian_score, {"width": 1.0}),
    (F.gaussian_pooling, {"width": 1.0, "causal": False, "exclude_self": False}),
    (F.nadaraya_watson, {"kernel": "gaussian", "width": 1.0, "exclude_self": False, "empty": "nearest"}),
    (fused.attention, {"causal": False, "dropout": 0.0, "scale": None}),
    (sampling.filter_logits, {"temperature": 1.0, "top_k": None, "top_p": None}),
    (F.sample, {"temperature": 1.0, "top_k": None, "top_p": None}),
    (F.he_, {"slope": 0.0, "distribution": "normal"}),
    (F.xavier_, {"gain": 1.0, "distribution": "normal"}),
    (F.orthogonal_, {"gain": 1.0}),
    (F.l1_penalty, {"strength": 1.0}),
    (F.l2_penalty, {"strength": 1.0}),
    (F.multi_task_loss, {"weights": None}),
    (F.semi_supervised_loss, {"weight": 1.0, "ignore_index": -100}),
    (F.gaussian_log_likelihood, {"log_std": 0.0}),
    (F.laplace_nll, {"strength": 1.0}),
    (F.salt_and_pepper, {"low": 0.0, "high": 1.0}),
    (F.corrupt, {"low": 0.0, "high": 1.0}),
    (F.hide_places, {"patch": 1}),
    (F.momentum_step, {"momentum": 0.9}),
    (F.minibatches, {"drop_last": False}),
    (F.polynomial_features, {"bias": True}),
    (F.bias_variance, {"noise_std": 0.0}),
    (F.output_size, {"stride": 1, "padding": 0, "dilation": 1}),
    (F.convolution_parameter_count, {"groups": 1, "bias": True}),
    (F.cross_correlation, {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}),
    (F.convolution, {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}),
    (F.max_pool, {"stride": None, "padding": 0, "dilation": 1}),
    (F.average_pool, {"stride": None, "padding": 0, "count_padding": True}),
    (F.draw_windows, {"smallest": 1.0, "largest": 1.0, "aspect": 1.0}),
]


@pytest.mark.parametrize(
    ("function", "expected"), PEERS, ids=[getattr(f, "__name__", str(f)) for f, _ in PEERS]
)
def test_left_out_options(function: Callable[..., Any], expected: dict[str, Any]) -> None:
    assert given(function, *expected) == expected
