"""Named adapters on one frozen base: added, chosen, stacked, merged, taken back, saved and loaded.

    W = W₀ + Σ_chosen weight · s · L R

The base is never copied and never reloaded to change adapters. `merge` writes the sum into the weights and
gives every layer its own class back, so that a merged model costs what the base does; until `unmerge` it
keeps W₀ of the merged weights beside them, because W₀ + ΔW − ΔW is not W₀ in floating point.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from quire.errors import InputError, unknown_name
from quire.options import from_dict, to_dict
from quire.tuning import files
from quire.tuning.config import LoRAConfig
from quire.tuning.factors import Change, Full, LowRank
from quire.tuning.merging import Merged, MergeReport, merge_weight
from quire.tuning.overlay import CHILD, Named, Overlay, lay_over, overlay_of, take_away
from quire.tuning.quantised import quantise_sites, stored_sites
from quire.tuning.stored import Stored
from quire.tuning.targets import Place, Site, choose, find_sites

NAME = re.compile(r"[A-Za-z0-9_-]+")


class AdapterSummary(NamedTuple):
    """One adapter in a list."""

    name: str
    weight: float
    """With which it is active; 0 if it is not."""
    config: LoRAConfig
    weights: int
    """Weights that it changes."""
    parameters: int


class Laid(NamedTuple):
    """An overlay and the places where it lies."""

    places: tuple[Place, ...]
    overlay: Overlay


class Adapters:
    """The adapters of `model`, whose own parameters are frozen from now on."""

    def __init__(self, model: nn.Module) -> None:
        if any(isinstance(module, Overlay) and len(module.adapters) for module in model.modules()):
            raise InputError(
                "a model that already has adapters",
                expected="one set of adapters for a model",
                fix="call add() of the first",
            )
        self.model = model
        self.configs: dict[str, LoRAConfig] = {}
        self.active: dict[str, float] = {}
        self._laid: dict[str, Laid] = {}
        self._merged: list[Merged] | None = None
        self._thawed = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self._thawed:
            parameter.requires_grad_(False)

    # Adding and choosing ----------------------------------------------------------------------

    def add(self, config: LoRAConfig, name: str = "default") -> None:
        """A new adapter, which changes nothing yet: its ΔW is zero, and it is not active."""
        full = choose(self.model, config.full, vectors=True)
        whole = {site.name for site in full}
        thin = [site for site in choose(self.model, config.targets) if site.name not in whole]
        unseen = [site.name for site in thin if config.dropout and not site.takes_inputs]
        if unseen:
            raise InputError(
                f"dropout {config.dropout} for {unseen[0]}, which its layer reads as a whole",
                expected="dropout 0 for recurrent weights, fused attention and grouped convolutions",
                fix="set dropout to 0, or leave these weights out of the targets",
            )
        changes: list[tuple[Site, Change]] = [
            (site, _low_rank(site, config.rank, config.scale, config.dropout)) for site in thin
        ]
        self._add(name, config, [*changes, *((site, Full(site.base)) for site in full)])

    def _add(self, name: str, config: LoRAConfig, changes: Iterable[tuple[Site, Change]]) -> None:
        self._require_unmerged("an adapter cannot be added")
        if not NAME.fullmatch(name) or hasattr(nn.Module, name) or name in self.configs:
            raise InputError(
                f"an adapter called '{name}'" + (" twice" if name in self.configs else ""),
                expected="a new name of letters, digits, - and _ that torch.nn.Module has no other use for",
                fix="choose another name",
            )
        self.configs[name] = config
        for site, change in changes:
            place = site.places[0]
            overlay = overlay_of(place.module, place.tensor) or Overlay()
            overlay.adapters[name] = change.train(place.module.training).requires_grad_(False)
            for place in site.places:
                lay_over(place.module, place.tensor, overlay)
            self._laid[site.name] = Laid(site.places, overlay)

    def activate(self, chosen: str | Iterable[str] | Mapping[str, float]) -> None:
        """Use one adapter, several added up, or several with weights; the others rest. Only what is active is
        trained."""
        self._require_unmerged("adapters cannot be changed")
        if isinstance(chosen, str):
            chosen = [chosen]
        weights = dict(chosen) if isinstance(chosen, Mapping) else dict.fromkeys(chosen, 1.0)
        for name, weight in weights.items():
            if name not in self.configs:
                raise unknown_name("adapter", name, self.configs)
            if not math.isfinite(weight):
                raise InputError(f"adapter '{name}' with weight {weight}", expected="a finite number")
        self.active = weights
        for _, overlay in self._laid.values():
            overlay.active = {name: w for name, w in weights.items() if name in overlay.adapters}
            for name in overlay.adapters:
                overlay.adapters[name].requires_grad_(name in weights)

    def deactivate(self) -> None:
        """The base alone."""
        self.activate(())

    def remove(self, name: str) -> None:
        """Take an adapter away; layers that no adapter changes become what they were."""
        self._require_unmerged("an adapter cannot be removed")
        self.activate({other: weight for other, weight in self.active.items() if other != name})
        self.configs.pop(self._known(name))
        for key, (places, overlay) in list(self._laid.items()):
            if name in overlay.adapters:
                del overlay.adapters[name]
            if not len(overlay.adapters):
                del self._laid[key]
                if overlay.stored is None:
                    for place in places:
                        take_away(place.module, place.tensor)

    def detach(self) -> nn.Module:
        """Take all adapters away and let the base be trained as before; merged weights stay merged."""
        if self._merged is None:
            for name in list(self.configs):
                self.remove(name)
        for parameter in self._thawed:
            parameter.requires_grad_(True)
        return self.model

    # Merging ----------------------------------------------------------------------------------

    @property
    def merged(self) -> bool:
        return self._merged is not None

    @torch.no_grad()
    def merge(self, *, dequantise: bool = False) -> MergeReport:
        """W ← W₀ + ΔW of the active adapters; the model is then one without adapters.

        A weight in NormalFloat4 is quantised again, or becomes a plain one with `dequantise`; the report says
        in numbers what rounding did. W₀ is kept for `unmerge`, so merged weights take twice their memory.
        """
        self._require_unmerged("adapters cannot be merged again")
        if not self.active:
            raise InputError(
                "no active adapter to merge", expected="at least one", fix="call activate() first"
            )
        done: list[Merged] = []
        try:
            for name, (places, overlay) in self._laid.items():
                done.append(merge_weight(name, places, overlay, dequantise))
        except BaseException:  # all weights or none
            for merged in done:
                merged.undo()
            raise
        self._merged = done
        return MergeReport({merged.name: merged.error for merged in done if merged.error is not None})

    @torch.no_grad()
    def unmerge(self) -> None:
        """W ← W₀, bit by bit, with the same adapters active as before."""
        if self._merged is None:
            raise InputError("weights that are not merged", expected="a model after merge()")
        for merged in self._merged:
            merged.undo()
        self._merged = None

    # Saving -----------------------------------------------------------------------------------

    def state_dict(self, name: str | None = None) -> dict[str, Tensor]:
        """The tensors of one adapter alone, under PEFT's names."""
        name = self._known(name)
        found: dict[str, Tensor] = {}
        for places, change in self._changes(name):
            for attribute, key in files.tensor_names(places[0], change).items():
                found[key] = getattr(change, attribute).detach()
        return found

    def save(self, path: Path | str, name: str | None = None) -> None:
        """One adapter alone in a safetensors file."""
        name = self._known(name)
        files.write_adapter(Path(path), name, self.configs[name], self.state_dict(name))

    def export(self, folder: Path | str, name: str | None = None) -> None:
        """One adapter as a folder that PEFT reads."""
        name = self._known(name)
        files.export_peft(Path(folder), self.configs[name], self.state_dict(name), self.model)

    def load(self, path: Path | str, name: str | None = None) -> str:
        """Add the adapter of a file, or of a folder that PEFT wrote, and return its name; activate it with
        `activate`."""
        found = files.read_adapter(path)
        name = name or found.name
        config = found.config
        changes: list[tuple[Site, Change]] = []
        for site, tensors in found.by_weight(self.model):
            change: Change
            if "V" in tensors:
                change = Full(site.base)
                pairs = {"value": tensors["V"]}
            else:
                change = _low_rank(site, config.rank, config.scale, config.dropout)
                pairs = tensors
            for attribute, value in pairs.items():
                files.copy_into(getattr(change, attribute), value, site.name, found.path)
            changes.append((site, change))
        self._add(name, config, changes)
        return name

    # The base ---------------------------------------------------------------------------------

    def base_state_dict(self) -> dict[str, Tensor]:
        """The base's weights under its own names, those in NormalFloat4 in full."""
        inner = _inner_prefixes(self.model)
        found = {k: v for k, v in self.model.state_dict().items() if not k.startswith(inner)}
        for site in stored_sites(self.model):
            found |= {place.name: site.base for place in site.places}
        return found

    @torch.no_grad()
    def load_base(self, state: Mapping[str, Tensor]) -> None:
        """Give the base other weights, by its own names; those in NormalFloat4 are quantised."""
        self._require_unmerged("the base cannot be loaded")
        state, inner = dict(state), _inner_prefixes(self.model)
        for site in stored_sites(self.model):
            overlay = overlay_of(site.places[0].module, site.places[0].tensor)
            if site.name in state and overlay is not None and overlay.stored is not None:
                old = overlay.stored
                weight = state.pop(site.name).to(old.codes.device, old.dtype)
                overlay.stored = Stored.of(weight, double=old.small_scales)
        given = self.model.load_state_dict(state, strict=False)
        missing = [key for key in given.missing_keys if not key.startswith(inner)]
        if missing or given.unexpected_keys:
            raise InputError(
                f"a base without {', '.join(missing[:4])}"
                if missing
                else f"unknown {given.unexpected_keys[0]}",
                expected="the weights of the same model under its own names",
                fix="load a state dict of the model without adapters",
            )

    def spec(self) -> dict[str, Any]:
        """What `from_spec` needs to make the same names and shapes, as plain JSON values (no weights)."""
        return {
            "adapters": {name: to_dict(config) for name, config in self.configs.items()},
            "active": dict(self.active),
            "stored": [site.name for site in stored_sites(self.model)],
        }

    @classmethod
    def from_spec(cls, model: nn.Module, spec: Mapping[str, Any]) -> Self:
        """Adapters as described, on a fresh model; a state dict of the old one then fits."""
        names = set(spec.get("stored", ()))
        quantise_sites([site for site in find_sites(model) if site.name in names])
        made = cls(model)
        for name, config in spec["adapters"].items():
            made.add(from_dict(LoRAConfig, config), name)
        made.activate(spec["active"])
        return made

    # Looking ----------------------------------------------------------------------------------

    def parameters(self, name: str | None = None) -> Iterator[nn.Parameter]:
        """The parameters of one adapter."""
        for _, change in self._changes(self._known(name)):
            yield from change.parameters()

    def summaries(self) -> list[AdapterSummary]:
        return [
            AdapterSummary(
                name,
                self.active.get(name, 0.0),
                config,
                len(self._changes(name)),
                sum(parameter.numel() for parameter in self.parameters(name)),
            )
            for name, config in self.configs.items()
        ]

    def _changes(self, name: str) -> list[tuple[tuple[Place, ...], Change]]:
        if self._merged is not None:
            pairs = [(merged.places, merged.adapters) for merged in self._merged]
        else:
            pairs = [(laid.places, laid.overlay.adapters) for laid in self._laid.values()]
        return [(places, adapters[name]) for places, adapters in pairs if name in adapters]

    def _known(self, name: str | None) -> str:
        if name is None:
            if len(self.configs) != 1:
                raise InputError(
                    f"{len(self.configs)} adapters and no name",
                    expected=f"one of {', '.join(self.configs) or 'none'}",
                    fix="say which one",
                )
            (name,) = self.configs
        if name not in self.configs:
            raise unknown_name("adapter", name, self.configs)
        return name

    def _require_unmerged(self, what: str) -> None:
        if self._merged is not None:
            raise InputError(
                f"{what} while weights are merged",
                expected="a model before merge()",
                fix="call unmerge() first",
            )


def inject(model: nn.Module, config: LoRAConfig, name: str = "default") -> Adapters:
    """Freeze `model` and give it one active adapter."""
    adapters = Adapters(model)
    try:
        adapters.add(config, name)
    except InputError:
        adapters.detach()
        raise
    adapters.activate(name)
    return adapters


def _low_rank(site: Site, rank: int, scale: float, dropout: float) -> LowRank:
    return LowRank(
        site.base, rank, scale, dropout=dropout, by_rows=site.by_rows, lookup=site.kind == "embedding"
    )


def _inner_prefixes(model: nn.Module) -> tuple[str, ...]:
    """How the names of what tuning has added begin."""
    return tuple(
        f"{path}."
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Named) and path.split(".")[-1] == CHILD
    )
