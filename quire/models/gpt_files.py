"""GPT-2 in Hugging Face's files: model.safetensors, and config.json beside it.

Sizes are read from the tensors. The number of heads stands in config.json; without one it is width/64, as in
all published sizes. Names may have "transformer." before them (GPT2LMHeadModel) or not (GPT2Model, and the
first published files).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from quire.errors import DataError, InputError
from quire.files import read_file
from quire.models.weights import read_weights

BODY, HEAD, EMBEDDING = "transformer.", "lm_head.weight", "transformer.wte.weight"
BUFFERS = (".attn.bias", ".attn.masked_bias")
"""Causal masks, which older files carry beside the weights."""
END_OF_TEXT = 50256
"""Which Hugging Face takes for the end unless it is told otherwise."""

FIELDS = {
    "vocab_size": "vocab_size",
    "n_positions": "context",
    "n_layer": "layers",
    "n_head": "heads",
    "n_embd": "width",
    "n_inner": "feedforward",
    "layer_norm_epsilon": "norm_epsilon",
    "activation_function": "activation",
    "tie_word_embeddings": "tied",
    "attn_pdrop": "dropout",
    "embd_pdrop": "dropout",
    "resid_pdrop": "dropout",
}
"""Entries of config.json, and the fields of `GPTConfig` that they are."""
ALWAYS = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""Entries that have one value here; another one is refused."""
ACTIVATIONS = {"gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "gelu": "gelu"}


def own_weights(weights: Mapping[str, Tensor], tied: bool = True) -> dict[str, Tensor]:
    """Without causal masks, and without the head if it is the embedding and is to be."""
    kept = {name: value for name, value in weights.items() if not name.endswith(BUFFERS)}
    if tied and HEAD in kept and EMBEDDING in kept and torch.equal(kept[HEAD], kept[EMBEDDING]):
        del kept[HEAD]
    return kept


def read_gpt2(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights by the names of GPT2LMHeadModel, and fields of `GPTConfig`."""
    path = path / "model.safetensors" if path.is_dir() else path
    weights = read_weights(path)
    if not any(name.startswith(BODY) for name in weights):
        weights = {name if name == HEAD else BODY + name: value for name, value in weights.items()}
    weights = own_weights(weights)
    described = _read_description(path.with_name("config.json"))
    return weights, _fields(weights, described, path)


def _fields(weights: Mapping[str, Tensor], described: Mapping[str, Any], path: Path) -> dict[str, Any]:
    names = [EMBEDDING, *(f"{BODY}{name}.weight" for name in ("wpe", "h.0.mlp.c_fc"))]
    if lacking := [name for name in names if name not in weights or weights[name].dim() != 2]:
        raise DataError(
            f"a weights file without {', '.join(lacking)}",
            path=path,
            expected="the tensors of a GPT-2, with or without 'transformer.' before their names",
            fix="take a file of Hugging Face's GPT2LMHeadModel or GPT2Model",
        )
    (vocab_size, width), (context, _), (_, feedforward) = (weights[name].shape for name in names)
    heads = described.get("n_head", width // 64)
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise DataError(
            f"{heads} heads for a width of {width}",
            path=path,
            expected="a number of heads that divides the width",
            fix="put the model's config.json, which has n_head, beside the file",
        )
    epsilon = described.get("layer_norm_epsilon", 1e-5)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise DataError(
            f"layer_norm_epsilon is {epsilon!r}",
            path=path.with_name("config.json"),
            expected="a small positive number",
            fix="take the files of a plain GPT-2",
        )
    return {
        "vocab_size": vocab_size,
        "context": context,
        "layers": len({name.split(".")[2] for name in weights if name.startswith(f"{BODY}h.")}),
        "heads": heads,
        "width": width,
        "bias": f"{BODY}ln_f.bias" in weights,
        "tied": HEAD not in weights,
        "feedforward": None if feedforward == 4 * width else feedforward,
        "activation": ACTIVATIONS[described.get("activation_function", "gelu_new")],
        "norm_epsilon": float(epsilon),
    }


def _read_description(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        described = dict(json.loads(read_file(path)))
    except (ValueError, TypeError, RecursionError) as problem:
        raise DataError(
            f"no JSON object: {problem}", path=path, expected="a config of Hugging Face", fix="copy it again"
        ) from None
    allowed: dict[str, list[object]] = {name: [value] for name, value in ALWAYS.items()}
    for name, values in (allowed | {"activation_function": list(ACTIVATIONS)}).items():
        if described.get(name, values[0]) not in values:
            raise DataError(
                f"{name} is {described[name]!r}",
                path=path,
                expected=" or ".join(repr(value) for value in values),
                fix="take the files of a plain GPT-2",
            )
    return described


def write_gpt2(path: Path, weights: Mapping[str, Tensor], config: Any) -> None:
    """Write weights and config.json so that Hugging Face's GPT2LMHeadModel loads them."""
    if path.suffix != ".safetensors":
        raise InputError(
            f"a file that ends in '{path.suffix}'",
            expected="a name that ends in .safetensors",
            fix=f"write {path.stem}.safetensors",
        )
    described = {"architectures": ["GPT2LMHeadModel"], **ALWAYS}
    described |= {name: getattr(config, field) for name, field in FIELDS.items()}
    if config.vocab_size <= END_OF_TEXT:
        described |= {"bos_token_id": None, "eos_token_id": None}
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, save({name: value.cpu().contiguous() for name, value in weights.items()}, {"format": "pt"}))
    _write(path.with_name("config.json"), json.dumps(described, indent=2).encode())


def _write(path: Path, content: bytes) -> None:
    """To a sibling that is then renamed, so that no reader sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
