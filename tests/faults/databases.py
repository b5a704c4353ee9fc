"""PyTorch's own databases: the inputs of its layers through ours, the options of its optimisers through ours,
and numerical derivatives of the functions of the sheet.

    python -m tests.faults.databases              everything
    python -m tests.faults.databases --every 15   one function of the sheet in fifteen

In a process of its own: PyTorch's testing modules change global settings when they are imported.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quire.nn import BatchNorm, Dense, LayerNorm
from quire.nn.attention import MultiHeadAttention
from quire.nn.recurrent import GRU, LSTM, RNN
from quire.options import Optim
from quire.train.groups import Group
from quire.train.optimisers import make_optimiser

MOST_NUMBERS = 60
"""Of the inputs to a numerical derivative, which takes two calls for each."""
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
    """Without masks, which mean the opposite in ours; single sequences of the database become batches."""
    from torch.testing._internal.common_modules import module_db

    counts: Counter[str] = Counter()
    info = next(info for info in module_db if info.module_cls is nn.MultiheadAttention)
    for given in info.module_inputs_func(
        info, device="cpu", dtype=DOUBLE, requires_grad=False, training=False
    ):
        options, forward = given.constructor_input.kwargs, given.forward_input
        odd = options["add_bias_kv"] or options["add_zero_attn"]
        if odd or any(mask is not None for mask in forward.kwargs.values()):
            counts["layers with options that ours do not have"] += 1
            continue
        sizes = options["embed_dim"], options["num_heads"]
        theirs = nn.MultiheadAttention(*sizes, bias=options["bias"], batch_first=True).to(DOUBLE)
        ours = MultiHeadAttention(*sizes, bias=options["bias"]).to(DOUBLE)
        ours.load_state_dict(theirs.state_dict())
        values = [value.unsqueeze(0) for value in forward.args]
        torch.testing.assert_close(ours(*values), theirs(*values)[0], rtol=1e-9, atol=1e-9)
        counts["inputs of MultiheadAttention"] += 1
    assert counts["inputs of MultiheadAttention"], "nothing was compared"
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


# Functions of the sheet -------------------------------------------------------------------------

ON_PURPOSE = {"hard_softmax": "gives the best key and the gradient of the soft weights"}
"""Functions whose derivative is not that of their values."""
ASIDE = 0.01
"""How far from the points of a proof, which like to be those where a derivative jumps."""


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def noting(function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    """The same function, which notes what it is given."""

    def noted(*values: Any, **options: Any) -> Any:
        if len(calls) < 50:
            calls.append((function, values, options))
        return function(*values, **options)

    return noted if inspect.isfunction(function) else function


def functions(every: int) -> Counter[str]:
    """First and second derivatives of each function of the sheet, at the inputs of its own proof."""
    import quire.sheet

    counts: Counter[str] = Counter()
    faults: list[str] = []
    seen: set[Any] = set()
    for _, entry in [*quire.sheet.ENTRIES.items()][::every]:
        calls: list[Call] = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                entry.proof(*[noting(function, calls) for function in entry.code])
        except Exception:
            counts["proofs that look at more than the values"] += 1
            continue
        for function, values, options in calls:
            name = getattr(function, "__name__", "?")
            if function in seen or name in ON_PURPOSE or name.endswith("_"):  # which initialise in place
                continue
            outcome = check(function, values, options)
            if outcome:
                seen.add(function)
                counts[outcome] += 1
                if outcome not in ("first and second derivatives", "first derivatives"):
                    faults.append(f"{entry.id}: {name}: {outcome}")
    assert not faults, "\n".join(faults)
    return counts


def check(function: Callable[..., Any], values: tuple[Any, ...], options: dict[str, Any]) -> str:
    """What was found; nothing where this is no small differentiable function of tensors."""
    places = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.is_floating_point()]
    if not places or sum(values[i].numel() for i in places) > MOST_NUMBERS:
        return ""
    exact = [values[i].detach().to(DOUBLE) for i in places]
    given = [_leaf(value + ASIDE * (0.5 + torch.rand_like(value))) for value in exact]

    def apply(*inner: Tensor) -> tuple[Tensor, ...]:
        filled = list(values)
        for place, value in zip(places, inner, strict=True):
            filled[place] = value
        state = torch.random.get_rng_state()
        torch.manual_seed(0)
        try:
            out = _flat(function(*filled, **options))
            return tuple(part for part in out if part.is_floating_point() and part.dtype == DOUBLE)
        finally:
            torch.random.set_rng_state(state)

    try:
        out = apply(*given)
        if not out or not any(part.requires_grad for part in out):
            return ""
        if not all(part.requires_grad and bool(part.isfinite().all()) for part in out):
            return ""
    except Exception:  # wants other types, or another number of calls
        return ""
    from torch.autograd.gradcheck import GradcheckError

    try:
        torch.autograd.gradcheck(apply, given, check_undefined_grad=False)
    except GradcheckError as error:
        return f"wrong derivative: {' '.join(str(error).split())[:160]}"
    except Exception:  # the number of its outputs depends on the values
        return ""
    try:
        torch.autograd.gradgradcheck(apply, given, check_undefined_grad=False)
    except GradcheckError as error:
        return f"wrong second derivative: {' '.join(str(error).split())[:160]}"
    except RuntimeError:  # says that it has none
        return "first derivatives"
    return "first and second derivatives"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    sys.argv = sys.argv[:1]  # which PyTorch's modules read when they are imported
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        import expecttest  # noqa: F401
    except ImportError:
        print("not done: the layers and optimisers, as the package expecttest is not installed")
        counts: Counter[str] = Counter()
    else:
        counts = layers() + attention() + optimisers()
    counts += functions(arguments.every)
    print(*(f"{count:5d}  {name}" for name, count in counts.items()), sep="\n")


if __name__ == "__main__":
    main()
