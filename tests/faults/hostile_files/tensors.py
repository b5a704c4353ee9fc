"""Weights and adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
from safetensors.numpy import save as save_arrays

from tests.faults import payloads
from tests.faults.hostile_files.case import Case, lay, lay_all
from tests.faults.hostile_files.runs import signed
from tests.faults.watch import CANARY


def tensors() -> Iterator[Case]:
    for name, content in payloads.pickles().items():
        yield Case(f"weights.pth that is a pickle, {name}", "weights", lay("weights.pth", content))
        yield Case(f"weights.pt in a zip, {name}", "weights", lay("weights.pt", payloads.torch_zip(content)))
        yield Case(
            f"weights.safetensors that is a pickle, {name}", "weights", lay("weights.safetensors", content)
        )
        yield Case(
            f"adapter.safetensors that is a pickle, {name}", "adapter", lay("adapter.safetensors", content)
        )
    content = payloads.pickles()["system"]
    yield Case(
        "weights.bin with a name outside",
        "weights",
        lay("weights.bin", payloads.torch_zip(content, "../../archive/data.pkl")),
    )
    yield Case(
        "weights.pt, a zip bomb",
        "weights",
        lay("weights.pt", lambda: payloads.zip_bomb("archive/data.pkl", 200)),
    )
    for name, content in payloads.bad_tensors().items():
        yield Case(f"weights.safetensors: {name}", "weights", lay("weights.safetensors", content))
        yield Case(f"adapter.safetensors: {name}", "adapter", lay("adapter.safetensors", content))
        yield Case(f"checkpoint's weights: {name}", "run", signed("weights.safetensors", content))
    good = save_arrays({"base_model.model.x.lora_A.weight": np.zeros((2, 4), np.float32)})
    peft = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    described = {
        "that imports": {**peft, "peft_type": f"{CANARY}.Type", "auto_mapping": {"parent_library": CANARY}},
        "of rank 10**9": {**peft, "r": 10**9},
        "of rank -1": {**peft, "r": -1},
        "of rank true": {**peft, "r": {"a": 1}},
        "of alpha text": {**peft, "lora_alpha": "many"},
        "of infinite alpha": {**peft, "lora_alpha": 1e400},
    }
    for name, entry in described.items():
        files = {"adapter_config.json": json.dumps(entry).encode(), "adapter_model.safetensors": good}
        yield Case(f"PEFT's description {name}", "adapter", lay_all(files))
    for name, content in payloads.bad_json().items():
        files = {"adapter_config.json": content, "adapter_model.safetensors": good}
        yield Case(f"PEFT's description: {name}", "adapter", lay_all(files))
        files = {"config.json": content, "model.safetensors": save_arrays({"wte.weight": np.zeros((4, 64))})}
        yield Case(f"GPT-2's description: {name}", "weights", lay_all(files, "model.safetensors"))
    files = {
        "adapter_config.json": json.dumps(peft).encode(),
        "adapter_model.bin": payloads.pickles()["exec"],
    }
    yield Case("PEFT's weights as a pickle", "adapter", lay_all(files))
    header = {"quire.adapter": json.dumps({"format": 1, "name": "x", "config": {"rank": 10**12}})}
    arrays = {"base_model.model.model.layers.0.weight.lora_A.weight": np.zeros((1, 4), np.float32)}
    yield Case("adapter of rank 10**12", "adapter", lay("adapter.safetensors", save_arrays(arrays, header)))
    deep = {"quire.adapter": "[" * 100_000}
    yield Case("adapter with a deep header", "adapter", lay("adapter.safetensors", save_arrays(arrays, deep)))
