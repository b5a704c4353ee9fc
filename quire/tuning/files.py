"""Adapters in files: safetensors with PEFT's names, and what the adapter is in the file's JSON header.

    base_model.model.LAYER.lora_A.weight, …lora_B.weight          weights that are called `weight`
    base_model.model.LAYER.lora_A.weight_hh_l0, …                 other weights, by their name
    base_model.model.LAYER.lora_embedding_A, …lora_embedding_B    embeddings
    base_model.model.LAYER.weight                                 what is learned in full

A folder that PEFT wrote is read as well, and `export_peft` writes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from quire.errors import DataError, InputError
from quire.files import read_file, write_bytes, write_files
from quire.options import from_dict, to_dict
from quire.tuning.config import LoRAConfig
from quire.tuning.factors import Full
from quire.tuning.overlay import is_transposed, plain_class
from quire.tuning.targets import Place, Site, find_sites

FORMAT = 1
HEADER = "quire.adapter"
PREFIX = "base_model.model."
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FACTOR = re.compile(r"(?P<path>.*?)\.?\blora_(?P<embedding>embedding_)?(?P<side>[AB])(\.(?P<tensor>.+))?")
UNKNOWN_TO_US = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "lora_bias")
"""Settings of PEFT that change the formula."""


@dataclass(frozen=True)
class AdapterFile:
    """What a file says of an adapter."""

    path: Path
    name: str
    config: LoRAConfig
    tensors: Mapping[str, Tensor]

    def by_weight(self, model: nn.Module) -> list[tuple[Site, dict[str, Tensor]]]:
        """The weights of `model` that the file changes, each with A and B, or the whole value as V."""
        sites = {place.name: site for site in find_sites(model) for place in site.places}
        found: dict[str, dict[str, Tensor]] = {}
        for key, value in self.tensors.items():
            weight, role = _parse(key, sites)
            if weight not in sites:
                raise DataError(
                    f"the adapter changes '{weight}', which this model does not have",
                    path=self.path,
                    expected="an adapter of the same base model",
                    fix="load it into the model that it was trained on",
                )
            found.setdefault(weight, {})[role] = value
        for weight, roles in found.items():
            if set(roles) not in ({"A", "B"}, {"V"}):
                raise DataError(
                    f"'{weight}' with {', '.join(sorted(roles))} alone",
                    path=self.path,
                    expected="both factors A and B, or a whole value",
                    fix="copy the file again",
                )
        return [(sites[weight], roles) for weight, roles in found.items()]


def tensor_names(place: Place, change: nn.Module) -> dict[str, str]:
    """The names in a file of an adapter's parameters, by their names in the module."""
    layer = PREFIX + (f"{place.path}." if place.path else "")
    if isinstance(change, Full):
        return {"value": layer + place.tensor}
    if issubclass(plain_class(place.module), nn.Embedding):
        return {side: f"{layer}lora_embedding_{side}" for side in "AB"}
    return {side: f"{layer}lora_{side}.{place.tensor}" for side in "AB"}


def write_adapter(path: Path, name: str, config: LoRAConfig, tensors: Mapping[str, Tensor]) -> None:
    """A file that appears whole or not at all."""
    header = {"format": FORMAT, "name": name, "config": to_dict(config)}
    write_bytes(path, _encoded(tensors, {HEADER: json.dumps(header)}))


def read_adapter(path: Path | str) -> AdapterFile:
    """An adapter's file, or the folder that PEFT made of one."""
    path = Path(path)
    if path.is_dir():
        return _read_peft(path)
    tensors, metadata = _read(path)
    try:
        header = json.loads(metadata[HEADER])
        version, name = header["format"], str(header["name"])
        config = from_dict(LoRAConfig, header["config"]) if version == FORMAT else LoRAConfig()
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise DataError(
            "a file of tensors that does not say what adapter it is",
            path=path,
            expected=f"a header '{HEADER}', or the folder with {PEFT_CONFIG}",
            fix="give the folder, if PEFT wrote it",
        ) from None
    if version != FORMAT:
        raise DataError(
            f"an adapter of format {version}",
            path=path,
            expected=f"format {FORMAT}",
            fix="read it with the version of Quire that wrote it",
        )
    return AdapterFile(path, name, config, tensors)


def copy_into(parameter: Tensor, value: Tensor, weight: str, path: Path) -> None:
    """Give an adapter's parameter the value of a file."""
    if value.shape != parameter.shape:
        raise DataError(
            f"factors of '{weight}' of shape {tuple(value.shape)}",
            path=path,
            expected=f"{tuple(parameter.shape)}",
            fix="load it into the model that it was trained on",
        )
    parameter.data.copy_(value)


def export_peft(folder: Path, config: LoRAConfig, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """A folder that `peft.PeftModel.from_pretrained` opens."""
    foreign = [
        key
        for key in tensors
        if "lora_" in key and not re.search(r"lora_([AB]\.weight|embedding_[AB])$", key)
    ]
    if foreign:
        raise InputError(
            f"PEFT has no name for {foreign[0].removeprefix(PREFIX)}",
            expected="an adapter of dense, convolutional or embedding layers",
            fix="save it as a file instead",
        )
    kinds = {path: plain_class(module) for path, module in model.named_modules()}
    layers = sorted({match["path"] for key in tensors if (match := _factor(key))})
    whole = sorted({key.removeprefix(PREFIX).rpartition(".")[0] for key in tensors if not _factor(key)})
    described = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "r": config.rank,
        "lora_alpha": config.scale * config.rank,
        "lora_dropout": config.dropout,
        "target_modules": layers,
        "modules_to_save": whole or None,
        "fan_in_fan_out": bool(layers) and all(is_transposed(kinds[path]) for path in layers),
        "bias": "none",
        "inference_mode": True,
    }
    config_file = (json.dumps(described, indent=1) + "\n").encode()
    write_files(folder, {PEFT_WEIGHTS: _encoded(tensors, {}), PEFT_CONFIG: config_file})


def _read_peft(folder: Path) -> AdapterFile:
    path = folder / PEFT_CONFIG
    try:
        values: dict[str, Any] = json.loads(read_file(path))
        config = LoRAConfig(values["r"], float(values["lora_alpha"]), values.get("lora_dropout", 0.0))
    except OSError:
        raise DataError(
            f"no {PEFT_CONFIG}", path=folder, expected="an adapter's file or PEFT's folder"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
        raise DataError(
            f"not the description of a LoRA adapter: {problem}",
            path=path,
            expected="r, lora_alpha and the rest",
        ) from None
    odd = [name for name in UNKNOWN_TO_US if values.get(name)]
    if odd or values.get("peft_type") != "LORA":
        raise DataError(
            f"an adapter with {', '.join(odd) or values.get('peft_type')}",
            path=path,
            expected="W₀ + (alpha/r)·B A with one rank and one alpha",
            fix="merge it with PEFT and load the merged weights",
        )
    tensors, _ = _read(folder / PEFT_WEIGHTS)
    layers = {match["path"] for key in tensors if (match := _factor(key))}
    whole = {key.removeprefix(PREFIX) for key in tensors if not _factor(key)}
    config = replace(config, targets=tuple(sorted(layers)), full=tuple(sorted(whole)))
    return AdapterFile(folder, "default", config, tensors)


def _factor(key: str) -> re.Match[str] | None:
    """PEFT puts `base_layer` into the paths of layers inside of layers that it has wrapped."""
    return FACTOR.fullmatch(key.removeprefix(PREFIX).replace("base_layer.", ""))


def _parse(key: str, sites: Mapping[str, Site]) -> tuple[str, str]:
    """The weight that a tensor belongs to, and whether it is A, B or the value V."""
    match = _factor(key)
    if match is None:
        return key.removeprefix(PREFIX), "V"
    layer = f"{match['path']}." if match["path"] else ""
    weight = layer + (match["tensor"] or "weight")
    if weight not in sites and match["tensor"] == "weight":  # PEFT's name for attention's fused projections
        weight = f"{layer}in_proj_weight"
    return weight, match["side"]


def _encoded(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    plain = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    content: bytes = save(plain, {"format": "pt", **metadata})
    return content


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise DataError("no such file", path=path, expected="an adapter's file", fix="check the path")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, MemoryError, ValueError, TypeError, KeyError) as problem:
        raise DataError(
            f"a damaged file, or no safetensors at all: {problem}",
            path=path,
            expected="an adapter's file as it was written",
            fix="copy the file again",
        ) from None
