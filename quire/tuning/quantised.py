"""A base whose dense layers are stored in NormalFloat4 (QLoRA): frozen, a quarter of the size of bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from quire.errors import InputError
from quire.tuning.overlay import Overlay, is_product, lay_over, overlay_of, plain_class
from quire.tuning.stored import Stored
from quire.tuning.targets import Site, choose, find_sites, is_read_only


class Quantised(NamedTuple):
    """One weight that is now stored in NormalFloat4."""

    name: str
    bits: float
    """Per number, as stored."""
    largest: float
    """max |W − W₀|."""
    relative: float
    """‖W − W₀‖ / ‖W₀‖ in the Frobenius norm."""


def quantise_base(
    model: nn.Module, targets: Iterable[str] = ("all",), *, double: bool = True
) -> list[Quantised]:
    """Store the weights of dense layers in NormalFloat4, those of y = xWᵀ + b and of y = xW + b alike.

    Layers compute in the type of their inputs, or that of autocast, and gradients flow through them to what
    comes before. `targets` are those of `LoRAConfig`; of what they mean, weights that are no dense layer's,
    that are tied to others or inside of `nn.MultiheadAttention` stay as they are. Adapters come afterwards.
    """
    sites = [site for site in choose(model, targets) if can_be_stored(site)]
    if not sites:
        able = [site.name for site in find_sites(model) if can_be_stored(site)]
        raise InputError(
            f"targets {', '.join(targets)} without a dense layer",
            expected=f"some of {', '.join(able[:12])}" if able else "a model with dense layers",
            fix="choose other targets" if able else "train without quantisation",
        )
    return quantise_sites(sites, double=double)


def can_be_stored(site: Site) -> bool:
    """Whether a weight is read by one product alone, and has not been stored yet."""
    place = site.places[0]
    kind = plain_class(place.module)
    parameter = place.module._parameters.get(place.tensor)
    return (
        parameter is not None
        and len(site.places) == 1
        and place.tensor == "weight"
        and is_product(kind)
        and not is_read_only(kind)
    )


@torch.no_grad()
def quantise_sites(sites: Iterable[Site], *, double: bool = True) -> list[Quantised]:
    """Store exactly these weights."""
    done = []
    for site in sites:
        place = site.places[0]
        overlay = overlay_of(place.module, place.tensor)
        if overlay is not None:
            raise InputError(
                f"{site.name}, which has adapters, to quantise",
                expected="a base without adapters",
                fix="quantise the base first, then inject",
            )
        weight = place.module._parameters.pop(place.tensor)
        assert weight is not None
        overlay = Overlay()
        overlay.stored = Stored.of(weight, double=double)
        lay_over(place.module, place.tensor, overlay)
        error = overlay.stored.dequantise(torch.float32) - weight.float()
        norm = torch.linalg.vector_norm(weight.float()).item()
        largest = error.abs().max().item()
        relative = torch.linalg.vector_norm(error).item() / norm if norm else 0.0
        done.append(Quantised(site.name, overlay.stored.packed.bits, largest, relative))
    return done


def stored_sites(model: nn.Module) -> list[Site]:
    """The weights that are stored in NormalFloat4."""
    found = []
    for site in find_sites(model):
        overlay = overlay_of(site.places[0].module, site.places[0].tensor)
        if overlay is not None and overlay.stored is not None:
            found.append(site)
    return found
