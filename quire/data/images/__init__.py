"""Images: folders, IDX, CIFAR, Pascal VOC and COCO to tensors. Names load on first use."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "builtin": ("IMAGES", "SCENES", "builtin_images", "builtin_scenes"),
    "decode": ("Shape",),
    "hashing": ("fingerprint",),
    "load": ("ImageData", "load_images", "load_scenes"),
    "preparation": ("ImagePreparation", "PreparedImages"),
    "recognise": ("open_images", "open_scenes"),
    "source": ("ImageSource",),
    "stream": ("ImageStream",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"quire.data.images.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'quire.data.images' has no attribute '{name}'")


def __dir__() -> list[str]:
    return list(__all__)
