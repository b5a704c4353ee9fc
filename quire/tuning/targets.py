"""Which weights of a model can be adapted, and which of them a list of targets means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn

from quire.errors import InputError, nearest
from quire.tuning.overlay import CHILD, Named, is_product, is_transposed, overlay_of, plain_class

GROUPS = ("all", "attention", "dense", "convolution", "recurrent", "embedding")
"""Targets that mean a kind of weight. The dense layers inside of attention are "attention", not "dense"."""

IN_ATTENTION = re.compile(r"attn|attention|^(q|k|v|o|qkv)_proj$|^(query|key|value)$", re.IGNORECASE)
"""A part of a path that says that a layer belongs to attention."""
RECURRENT = re.compile(r"weight_(ih|hh|hr)(_l\d+)?(_reverse)?")
PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SHOWN = 12
"""How many names a message mentions."""


class Place(NamedTuple):
    """Where a weight is read: `module` has it as `tensor`."""

    path: str
    module: nn.Module
    tensor: str

    @property
    def name(self) -> str:
        return f"{self.path}.{self.tensor}" if self.path else self.tensor


@dataclass(frozen=True)
class Site:
    """A weight with all the places where it is read; tied weights have several."""

    places: tuple[Place, ...]
    kind: str
    """One of the groups but "all", or "other"."""

    @property
    def name(self) -> str:
        return self.places[0].name

    @property
    def by_rows(self) -> bool:
        """Whether the first dimension is that of the inputs."""
        kind = plain_class(self.places[0].module)
        return issubclass(kind, nn.Embedding | nn.EmbeddingBag) or is_transposed(kind)

    @property
    def takes_inputs(self) -> bool:
        """Whether the thin path sees the layer's inputs, on which dropout acts; otherwise W is formed."""
        module = self.places[0].module
        kind = plain_class(module)
        if kind.forward in [c.forward for c in CONVOLUTIONS]:
            return getattr(module, "groups", 1) == 1
        return (is_product(kind) and not is_read_only(kind)) or kind.forward is nn.Embedding.forward

    @property
    def shape(self) -> tuple[int, ...]:
        place = self.places[0]
        overlay = overlay_of(place.module, place.tensor)
        if overlay is not None and overlay.stored is not None:
            return overlay.stored.shape
        return tuple(self.base.shape)

    @property
    def base(self) -> Tensor:
        """W₀ as it is read now."""
        place = self.places[0]
        overlay = overlay_of(place.module, place.tensor)
        parameter = place.module._parameters.get(place.tensor)
        if overlay is not None:
            return overlay.base(parameter)
        assert parameter is not None
        return parameter


def find_sites(model: nn.Module) -> list[Site]:
    """Every weight of a model, vectors included, in the order of its modules."""
    found: dict[int, list[Place]] = {}
    for place in _places(model):
        parameter = place.module._parameters.get(place.tensor)
        overlay = overlay_of(place.module, place.tensor)
        found.setdefault(id(overlay if parameter is None else parameter), []).append(place)
    inside = [
        path for path, module in model.named_modules() if plain_class(module).__name__.endswith("Attention")
    ]
    return [Site(tuple(places), _kind(places[0], inside)) for places in found.values()]


def choose(model: nn.Module, targets: Iterable[str], *, vectors: bool = False) -> list[Site]:
    """The weights that `targets` mean, each once; a target that means nothing is refused."""
    sites = [site for site in find_sites(model) if vectors or len(site.shape) > 1]
    chosen: dict[int, Site] = {}
    for target in targets:
        matching = {i: site for i, site in enumerate(sites) if _means(target, site)}
        if not matching:
            raise _nothing(target, sites)
        chosen |= matching
    return [chosen[i] for i in sorted(chosen)]


def _means(target: str, site: Site) -> bool:
    if target in GROUPS:
        return site.kind == target or (target == "all" and site.kind != "other")
    names = [name for place in site.places for name in (place.path, place.name)]
    return any(fnmatchcase(name, pattern) for name in names for pattern in (target, f"*.{target}"))


def _nothing(target: str, sites: list[Site]) -> InputError:
    groups = [group for group in GROUPS if any(_means(group, site) for site in sites)]
    names = [site.name for site in sites]
    layers = [place.path for site in sites for place in site.places]
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    return InputError(
        f"target '{target}' means no weight of this model",
        expected=f"{', '.join(groups)}, or a name or pattern among {shown}",
        fix=nearest(target, [*GROUPS, *names, *layers, *[name.split(".")[-1] for name in layers]])
        or "take one of these",
    )


def _places(model: nn.Module) -> Iterator[Place]:
    inner: set[nn.Module] = set()
    for path, module in model.named_modules():
        holder = module._modules.get(CHILD)
        if isinstance(holder, Named):  # what tuning itself has added
            inner.update(holder.modules())
        if module in inner:
            continue
        stored = [
            name
            for name in (holder if isinstance(holder, Named) else ())
            if (overlay := overlay_of(module, name)) is not None and overlay.stored is not None
        ]
        for name in [*(n for n, p in module._parameters.items() if p is not None), *stored]:
            yield Place(path, module, name)


def _kind(place: Place, attentions: list[str]) -> str:
    kind = plain_class(place.module)
    if issubclass(kind, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if RECURRENT.fullmatch(place.tensor):
        return "recurrent"
    if place.tensor in PROJECTIONS:
        return "attention"
    if issubclass(kind, nn.modules.conv._ConvNd):
        return "convolution"
    if place.tensor == "weight" and (is_transposed(kind) or _looks_dense(place.module)):
        named = any(IN_ATTENTION.search(part) for part in place.path.split("."))
        inside = any(not path or f"{place.path}.".startswith(f"{path}.") for path in attentions)
        return "attention" if named or inside else "dense"
    return "other"


def _looks_dense(module: nn.Module) -> bool:
    """Whether a layer is W (out, in), whatever else it does."""
    sizes = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    weight = module._parameters.get("weight")
    return issubclass(plain_class(module), nn.Linear) or (weight is not None and tuple(weight.shape) == sizes)


def is_read_only(kind: type[nn.Module]) -> bool:
    """PyTorch's attention reads its output layer's weight and never calls the layer."""
    return issubclass(kind, nn.modules.linear.NonDynamicallyQuantizableLinear)
