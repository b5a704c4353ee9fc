"""Classes that a network is told: one-hot vectors e_y, joined to what it reads.

A negative class number says that the class of a row is not known, and joins zeros.

B rows of a batch, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import InputError

Labels = int | Sequence[int] | Tensor | None


def check_classes(classes: object) -> None:
    """A number of classes, 0 for a network without."""
    if not isinstance(classes, int) or isinstance(classes, bool) or classes < 0:
        raise InputError(
            f"classes is {classes!r}", expected="a whole number from 0 on", fix="set classes to 0 for none"
        )


def indicators(classes: int, label: Tensor | None, rows: Tensor) -> Tensor | None:
    """e_y (B, K) of class numbers (B,) in the type of `rows`; None for a network without classes."""
    if label is None or not classes:
        if (label is None) != (not classes):
            raise missing_label(classes) if classes else unexpected_label()
        return None
    if label.is_floating_point() or label.shape != rows.shape[:1]:
        raise InputError(
            f"class numbers of type {label.dtype} and shape {tuple(label.shape)}",
            expected=f"{len(rows)} integers, one for each row",
            fix="give the batch's class numbers (B,)",
        )
    if not (label.is_cuda or torch.compiler.is_compiling()) and bool((label >= classes).any()):
        raise InputError(
            f"the class number {int(label.max())}",
            expected=f"numbers from 0 to {classes - 1}",
            fix="build the model with as many classes as the data has",
        )
    # Compared instead of scattered: nothing waits for a GPU, and an unknown class is a row of zeros.
    return (label[:, None] == torch.arange(classes, device=label.device)).to(rows.dtype)


def joined(rows: Tensor, told: Tensor | None) -> Tensor:
    """[x, e_y] of rows (B, D), or of maps (B, C, H, W), to which a class is joined as constant maps."""
    if told is None:
        return rows
    if rows.dim() == 4:
        told = told[:, :, None, None].expand(-1, -1, *rows.shape[2:])
    return torch.cat([rows, told], 1)


def asked_classes(classes: int, count: int, label: Labels) -> Tensor | None:
    """A class number for each of `count` samples: one for all, one for each, or without `label` all classes
    in turn; None for a model without classes."""
    if not classes:
        if label is not None:
            raise unexpected_label()
        return None
    asked = torch.arange(count) % classes if label is None else torch.as_tensor(label, device="cpu")
    asked = asked.expand(count) if asked.dim() == 0 else asked
    whole = not (asked.is_floating_point() or asked.dtype == torch.bool)
    if not whole or asked.shape != (count,) or bool(((asked < 0) | (asked >= classes)).any()):
        raise InputError(
            f"label {asked.tolist() if asked.numel() <= 16 else tuple(asked.shape)} for {count} samples",
            expected=f"one class, or {count}, from 0 to {classes - 1}",
            fix="choose classes that the model was trained on",
        )
    return asked


def missing_label(classes: int) -> InputError:
    return InputError(
        "no class numbers for a conditional model",
        expected=f"a label from 0 to {classes - 1} for each row",
        fix="give the rows a target, or pass label",
    )


def unexpected_label() -> InputError:
    return InputError(
        "class numbers for a model that was made without classes",
        expected="inputs or codes alone",
        fix="leave the label out, or build the model with classes=K",
    )
