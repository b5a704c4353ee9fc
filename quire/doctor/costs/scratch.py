"""Memory inside of operations, which no tensor shows: estimates of what libraries take.

oneDNN, on a CPU, computes convolutions on copies whose channels come in blocks of 16, and keeps a buffer for
the backward pass of an LSTM, as cuDNN does for all recurrent layers. The work space that cuDNN chooses for a
convolution is not known before it is run, and is left out.

T places, N samples, I inputs, H units
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
BLOCK = 16


def inside(kind: Any, args: Sequence[Any], result: Any) -> int:
    """Bytes that an operation takes besides its results, and has given back at its end."""
    if kind is aten.convolution and _blocks(args[0], args[1], args[6]):
        x, weight, out = args[0], args[1], result
        weights, outputs = _blocked(weight), _blocked(out)
        return max(_copied(x) + weights + outputs, outputs + _plain(out)) - _plain(out)
    if kind is aten.convolution_backward and _blocks(args[1], args[2], args[7]):
        gradient, x, weight = args[:3]
        incoming, weights = _blocked(gradient), _blocked(weight)
        made = [0 if part is None else _plain(part) for part in result]
        data = incoming + weights + _blocked(x) if made[0] else 0
        outgoing = max(_copied(x) + incoming + weights, weights + made[1]) if made[1] else 0
        return max(max(data, made[0] + outgoing) - sum(made), 0)
    if kind is aten.mkldnn_rnn_layer or kind is aten.mkldnn_rnn_layer_backward:
        x, weights = args[0], _plain(args[1]) + _plain(args[2])
        gates = x.shape[0] * x.shape[1] * args[1].shape[0] * x.itemsize
        return gates + weights * (1 if kind is aten.mkldnn_rnn_layer else 2)
    return 0


def kept(kind: Any, args: Sequence[Any]) -> int:
    """Bytes of the buffer that a recurrent layer returns for its backward pass."""
    if kind is aten.mkldnn_rnn_layer:
        x, hidden = args[0], args[10]
        places, samples, features = x.shape
        states = (places + 1) * (5 * hidden + 6 * max(features, hidden))
        return samples * (4 * places * hidden + states) * x.itemsize
    if kind is aten._cudnn_rnn:
        x, weights, hx, hidden = args[0], args[1], args[4], args[7]
        gates = max((weight.shape[0] for weight in weights), default=0) // max(hidden, 1)
        return x.numel() // x.shape[-1] * hidden * hx.shape[0] * (gates + 2) * x.itemsize
    return 0


def _blocks(x: Tensor, weight: Tensor, transposed: bool) -> bool:
    wide = math.prod(weight.shape[2:]) > 1
    here = x.device.type == "cpu" and x.dtype == torch.float32
    return here and wide and not transposed and torch.backends.mkldnn.is_available()


def _plain(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _blocked(tensor: Tensor) -> int:
    channels = tensor.shape[1]
    return _plain(tensor) // max(channels, 1) * (-(-channels // BLOCK) * BLOCK)


def _copied(x: Tensor) -> int:
    """Few channels are read as they are."""
    return _blocked(x) if x.shape[1] >= BLOCK else 0
