"""Going on from a trained model: its network is taken over, and trained as a whole or through adapters."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from quire.errors import InputError
from quire.models import build_model, model_spec
from quire.options import Tune
from quire.recipes.base import DescentOptions
from quire.recipes.plan import Plan
from quire.tasks.loading import Trained, load_trained
from quire.tuning import Adapters, LoRAConfig, find_sites, inject, quantise_base
from quire.tuning.targets import choose

OUTPUTS = ("num_classes", "out_features")
FROM_DATA = (*OUTPUTS, "in_features", "in_channels", "vocab_size", "source_vocab", "target_vocab")
"""What of a network's description the data decides; everything else is the base's."""
AS_ASKED = ("dropout", "checkpoint")
"""What changes how a network is trained, not what it computes."""
NOT_SHAPE = {*AS_ASKED, "weights", "freeze", "unfreeze", "step_decay", "chunked", "backbone_step"}
"""Options of --model that may be given beside a base."""


def take_over(plan: Plan, options: DescentOptions) -> None:
    """Give the plan's task the network of the base, if there is one. Outputs for other targets than the
    base's are made anew."""
    if options.tune.base is None:
        return
    _refuse_other_shape(options)
    base = load_trained(options.tune.base)
    task: Any = plan.task
    old: Any = base.task
    if type(task) is not type(old) or not hasattr(old, "model"):
        raise _other_family(options, base)
    if base.adapters is not None:
        base.adapters.merge(dequantise=True)
    own, theirs = model_spec(task.model), model_spec(old.model)
    if own["model"] != theirs["model"]:
        raise _other_family(options, base)
    if own.get("context", 0) > theirs.get("context", 0):
        raise InputError(
            f"--text.context {own['context']} with --tune.base {options.tune.base}",
            expected=f"at most {theirs['context']} tokens, the context of the base",
            fix=f"--text.context {theirs['context']}",
        )
    spec = {**theirs, **{key: own[key] for key in (*FROM_DATA, *AS_ASKED) if key in own}}
    same = plan.data.preparation.targets == base.preparation.targets
    fresh = () if same else _output_names(spec)
    model = build_model(spec)
    given = {name: value for name, value in old.model.state_dict().items() if name not in fresh}
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    misfits = [name for name, value in given.items() if shapes.get(name) != value.shape]
    if misfits:
        raise InputError(
            f"{misfits[0]} of the base has the shape {tuple(given[misfits[0]].shape)}",
            expected=f"{tuple(shapes.get(misfits[0], ()))}, as the data needs it",
            fix="give data with the same inputs as those of the base",
        )
    model.load_state_dict(given, strict=False)
    task.model = model
    if same and hasattr(task, "heads"):
        task.heads.load_state_dict(old.heads.state_dict())
    if fresh:
        plan.fresh = fresh
        plan.notes.append(f"the targets are not those of the base: {', '.join(fresh)} are learned anew")


def check_adapters(plan: Plan, options: DescentOptions) -> None:
    """Refuse adapters that cannot be laid over the network, before anything is written."""
    tune, task = options.tune, plan.task
    if not tune.lora.rank:
        return
    model: Any = getattr(task, "model", None)
    if model is None or not find_sites(model):
        raise InputError(
            f"--tune.lora.rank {tune.lora.rank} for a {type(task).__name__}", expected="a single network"
        )
    trained = tune.base or getattr(getattr(options, "model", None), "weights", None) or plan.before
    if trained is None:
        raise InputError(
            f"--tune.lora.rank {tune.lora.rank} on a network that was never trained",
            expected="trained weights, which the adapters leave as they are",
            fix="give a run with --tune.base RUN",
        )
    config = lora_config(tune, plan.fresh)
    choose(model, config.targets)
    choose(model, config.full, vectors=True)


def attach(plan: Plan, options: DescentOptions) -> Adapters | None:
    """Freeze the network and lay adapters over it as the options say; None where nobody asked for them."""
    tune = options.tune
    if not tune.lora.rank:
        return None
    model: Any = plan.task.model
    if tune.quantise == "nf4":
        done = quantise_base(model)
        bits = sum(one.bits for one in done) / len(done)
        worst = max(done, key=lambda one: one.relative)
        plan.notes.append(
            f"{len(done)} weights are kept in NormalFloat4, {bits:.3f} bits a number; the largest relative "
            f"error is {worst.relative:.3f}, of {worst.name}"
        )
    adapters = plan.adapters = inject(model, lora_config(tune, plan.fresh))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(site_size(site.shape) for site in find_sites(model))
    plan.notes.append(
        f"{trainable:,} parameters are trained beside {frozen:,} that stay ({trainable / frozen:.2%})"
    )
    return adapters


def site_size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def lora_config(tune: Tune, fresh: tuple[str, ...]) -> LoRAConfig:
    lora = tune.lora
    return LoRAConfig(lora.rank, lora.alpha, lora.dropout, lora.targets, (*lora.full, *fresh))


def _output_names(spec: dict[str, Any]) -> tuple[str, ...]:
    """The parameters whose shape depends on how many outputs there are."""
    sizes = {key: spec[key] + 1 for key in OUTPUTS if key in spec}
    with torch.device("meta"):
        one, other = build_model(spec), build_model({**spec, **sizes})
    shapes = {name: value.shape for name, value in other.named_parameters()}
    return tuple(name for name, value in one.named_parameters() if shapes[name] != value.shape)


def _refuse_other_shape(options: DescentOptions) -> None:
    """Options of the network's shape would be ignored: the base decides."""
    chosen = getattr(options, "model", None)
    if chosen is None:
        return
    usual = type(options)().model  # type: ignore[attr-defined]
    for entry in dataclasses.fields(chosen):
        name = entry.name
        if name not in NOT_SHAPE and getattr(chosen, name) != getattr(usual, name, None):
            raise InputError(
                f"--model.{name.replace('_', '-')} {getattr(chosen, name)} with --tune.base",
                expected="the network of the base, whose shape cannot change",
                fix="leave it out",
            )


def _other_family(options: DescentOptions, base: Trained) -> InputError:
    from quire.train.folder import read_config

    assert options.tune.base is not None
    recipe = read_config(options.tune.base)["recipe"]
    return InputError(
        f"--tune.base {options.tune.base} is a run of '{recipe}'",
        expected="a run of the same family",
        fix=f"quire train {recipe} --tune.base {options.tune.base} …",
    )
