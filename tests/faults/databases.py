"""PyTorch's own databases: the inputs of its layers through ours, the options of its optimisers through ours.

    python -m tests.faults.databases

In a process of its own: PyTorch's testing modules change global settings when they are imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quire.nn import BatchNorm, Dense, Dropout, LayerNorm
from quire.nn.attention import MultiHeadAttention
from quire.nn.recurrent import GRU, LSTM, RNN
from quire.nn.stem import Stem
from quire.options import Optim
from quire.train.groups import Group
from quire.train.optimisers import make_optimiser

DOUBLE = torch.float64


def _dense(in_features: int, out_features: int, bias: bool = True) -> nn.Module:
    return Dense(in_features, out_features, "linear", bias=bias)


def _recurrent(kind: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def make(*, batch_first: bool = False, proj_size: int = 0, **options: Any) -> nn.Module:
        if proj_size:
            raise TypeError("ours do not project")
        return kind(batch_first=batch_first, **options)

    return make


TWINS: dict[str, Callable[..., nn.Module]] = {
    "Linear": _dense,
    "Conv2d": Stem,
    "LayerNorm": LayerNorm,
    "BatchNorm1d": BatchNorm,
    "BatchNorm2d": BatchNorm,
    "BatchNorm3d": BatchNorm,
    "RNN": _recurrent(RNN),
    "LSTM": _recurrent(LSTM),
    "GRU": _recurrent(GRU),
}
SEQUENCES = ("RNN", "LSTM", "GRU")


def layers() -> Counter[str]:
    """Values and gradients of ours and theirs, with the same weights, on every input of the database."""
    from torch.testing._internal.common_modules import module_db

    counts: Counter[str] = Counter()
    for info in module_db:
        twin = TWINS.get(info.module_cls.__name__)
        if twin is None or info.module_cls.__module__.startswith("torch.ao"):
            continue
        for training in (True, False):
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=DOUBLE, requires_grad=False, training=training
            )
            for given in inputs:
                made = given.constructor_input
                try:
                    ours = twin(*made.args, **made.kwargs)
                except (TypeError, ValueError):  # an option that ours does not have
                    counts["layers with options that ours do not have"] += 1
                    continue
                theirs = info.module_cls(*made.args, **made.kwargs)
                values = [*given.forward_input.args, *given.forward_input.kwargs.values()]
                if info.module_cls.__name__ in SEQUENCES:
                    values = batched(values, 0 if made.kwargs["batch_first"] else 1)
                compare(ours, theirs, values, training=training)
                counts[f"inputs of {info.module_cls.__name__}"] += 1
    missing = [name for name in TWINS if not counts[f"inputs of {name}"]]
    assert not missing, f"nothing was compared for {missing}"
    return counts


def batched(values: list[Any], place: int) -> list[Any]:
    """The database has single sequences with their states; ours take batches."""

    def state(value: Any) -> Any:
        return value.unsqueeze(1) if isinstance(value, Tensor) else tuple(part.unsqueeze(1) for part in value)

    return [values[0].unsqueeze(place), *(state(value) for value in values[1:])]


def compare(ours: nn.Module, theirs: nn.Module, given: list[Any], *, training: bool) -> None:
    ours, theirs = ours.to(DOUBLE).train(training), theirs.to(DOUBLE).train(training)
    ours.load_state_dict(theirs.state_dict())
    found = []
    for module in (ours, theirs):
        values = [_leaf(value) for value in given]
        out = list(_flat(module(*values)))
        torch.manual_seed(0)
        loss = sum((part * torch.rand_like(part)).sum() for part in out)
        assert isinstance(loss, Tensor)
        inputs = [value for value in _flat(values) if value.requires_grad]
        gradients = torch.autograd.grad(loss, [*inputs, *module.parameters()], allow_unused=True)
        found.append([*out, *(g for g in gradients if g is not None)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def _leaf(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_leaf(inner) for inner in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _flat(inner)


def attention() -> Counter[str]:
    """Masks mean the opposite in ours, but for that of padding; single sequences become batches."""
    from torch.testing._internal.common_modules import module_db

    counts: Counter[str] = Counter()
    info = next(info for info in module_db if info.module_cls is nn.MultiheadAttention)
    for given in info.module_inputs_func(
        info, device="cpu", dtype=DOUBLE, requires_grad=False, training=False
    ):
        options, masks = given.constructor_input.kwargs, given.forward_input.kwargs
        if options["add_bias_kv"] or options["add_zero_attn"]:
            counts["layers with options that ours do not have"] += 1
            continue
        sizes = options["embed_dim"], options["num_heads"]
        theirs = nn.MultiheadAttention(*sizes, bias=options["bias"], batch_first=True)
        ours = MultiHeadAttention(*sizes, bias=options["bias"])
        forbidden, padding = masks["attn_mask"], masks["key_padding_mask"]
        padding = None if padding is None else padding.unsqueeze(0)
        mask = None if forbidden is None else ~forbidden.unsqueeze(0)  # (B·H, N, M) as (B, H, N, M)
        compare(
            _Given(ours, {"mask": mask, "key_padding_mask": padding}),
            _Given(
                theirs, {"attn_mask": forbidden, "key_padding_mask": padding, "average_attn_weights": False}
            ),
            [value.unsqueeze(0) for value in given.forward_input.args],
            training=False,
        )
        counts[f"inputs of MultiheadAttention, masks: {sum(m is not None for m in masks.values())}"] += 1
    assert sum("inputs" in name for name in counts) == 3, f"masks that were not tried: {counts}"
    return counts


class _Given(nn.Module):
    """Attention with what is no tensor to be differentiated; values and weights."""

    def __init__(self, inner: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, *values: Tensor) -> Any:
        return self.inner(*values, need_weights=True, **self.options)


def dropout() -> Counter[str]:
    """It is not in the database. Of the same random numbers, the same masks; how many, as promised."""
    counts: Counter[str] = Counter()
    for rate in (0.0, 0.2, 0.5, 0.9):
        for training in (True, False):
            found = []
            for layer in (Dropout(rate), nn.Dropout(rate)):
                torch.manual_seed(1)
                x = torch.ones(200, 300, dtype=DOUBLE).requires_grad_()
                out = layer.train(training)(x)
                found.append((out, torch.autograd.grad(out.square().sum(), x)[0]))
            torch.testing.assert_close(*found, rtol=0, atol=0)
            kept, out = 1 - rate if training else 1.0, found[0][0]
            spread = (kept * (1 - kept) / out.numel()) ** 0.5
            assert abs((out != 0).double().mean() - kept) <= 5 * spread
            torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / kept))
            counts["inputs of Dropout"] += 1
    return counts


def optimisers() -> Counter[str]:
    """Ten steps of ours and of torch.optim with every set of options that ours have."""
    from torch.testing._internal.common_optimizers import optim_db

    counts: Counter[str] = Counter()
    for info in optim_db:
        name = info.optim_cls.__name__
        if name not in ("SGD", "Adam", "AdamW"):
            continue
        for given in info.optim_inputs_func(device="cpu"):
            options = dict(given.kwargs)
            known = {"lr", "momentum", "weight_decay", "betas", "eps"}
            if set(options) - known or isinstance(options.get("lr"), Tensor) or "Tensor" in str(options):
                counts["sets of options that ours do not have"] += 1
                continue
            start = [torch.randn(3, 4, dtype=DOUBLE), torch.randn(5, dtype=DOUBLE)]
            theirs = [nn.Parameter(value.clone()) for value in start]
            ours = {str(i): nn.Parameter(value.clone()) for i, value in enumerate(start)}
            lr = options.pop("lr", 1e-3)
            reference = info.optim_cls(theirs, lr=lr, **options)
            beta1, beta2 = options.pop("betas", (0.9, 0.999))
            extra = {"weight_decay": 0.01} if name == "AdamW" and "weight_decay" not in options else {}
            group = Group(ours, decays=True, step_factor=1.0)
            kind: Any = "sgd" if name == "SGD" else "adam"
            decay: Any = "decoupled" if name == "AdamW" else "l2"
            chosen = Optim(kind, lr=lr, beta1=beta1, beta2=beta2, decay=decay, **options, **extra)
            optimiser = make_optimiser([group], chosen)
            for _ in range(10):
                for mine, other in zip(ours.values(), theirs, strict=True):
                    gradient = torch.randn_like(mine)
                    assert mine.grad is not None
                    mine.grad.copy_(gradient)
                    other.grad = gradient
                optimiser.step(lr)
                reference.step()
            torch.testing.assert_close([*ours.values()], theirs, rtol=1e-8, atol=1e-10)
            counts[f"sets of options of {name}"] += 1
    return counts


def main() -> None:
    sys.argv = sys.argv[:1]  # which PyTorch's modules read when they are imported
    if importlib.util.find_spec("expecttest") is None:
        raise SystemExit("PyTorch's databases need the package expecttest: pip install expecttest")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    counts = layers() + attention() + dropout() + optimisers()
    print(*(f"{count:5d}  {name}" for name, count in counts.items()), sep="\n")


if __name__ == "__main__":
    main()
