"""Weights from files in torchvision's format, and how they get into a network that is not quite the same.

A file is safetensors, or what torch.save wrote, read by PyTorch's restricted reader, which makes tensors and
plain containers and runs no code.
"""

from __future__ import annotations

import functools
import re
import zipfile
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from quire.errors import DataError
from quire.files import is_bomb
from quire.models.registry import BUILDERS

if TYPE_CHECKING:
    from quire.models.vision import ConvNet

PICKLED = (".pth", ".pt", ".bin")
WRAPPERS = ("state_dict", "model")
"""Entries under which training scripts keep the weights, beside optimiser and epoch."""
PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before each name."""
NAMED = 4
"""How many names a message mentions."""


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """The tensors of a weights file by name, on the CPU."""
    path = Path(path)
    if not path.is_file():
        raise DataError("no such file", path=path, expected="a weights file", fix="check the path")
    if path.suffix == ".safetensors":
        content: Any = _read_safetensors(path)
    elif path.suffix in PICKLED:
        content = _read_restricted(path)
    else:
        raise DataError(
            f"a file that ends in '{path.suffix}'",
            path=path,
            expected=f".safetensors, {' or '.join(PICKLED)}",
            fix="rename the file if it is one of these",
        )
    return _plain_names(_tensors(content, path))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as problem:
        raise _damaged(path, str(problem)) from None


def _read_restricted(path: Path) -> Any:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
            if is_bomb(path, unpacked):
                raise ValueError(f"a file of {path.stat().st_size} bytes that unpacks to {unpacked}")
        return torch.load(path, map_location="cpu", weights_only=True)
    # A damaged file ends the reader in as many ways as there are bytes: KeyError, EOFError, RuntimeError, ...
    except Exception as problem:
        # PyTorch's own text goes on to recommend running whatever the file asks for.
        code = re.search(r"GLOBAL ([\w.]+)", str(problem))
        if code is None:
            raise _damaged(path, str(problem).split(". ")[0] or type(problem).__name__) from None
    raise DataError(
        f"a file that asks for {code[1]}, which is code and was not run",
        path=path,
        expected="tensors by name, as torch.save(model.state_dict(), FILE) writes them",
        fix="save the state_dict alone where the file comes from, or use safetensors",
    )


def _damaged(path: Path, detail: str) -> DataError:
    return DataError(
        f"a damaged weights file, or none at all: {detail}",
        path=path,
        expected="a whole file of tensors by name",
        fix="copy or download the file again",
    )


def _tensors(content: Any, path: Path) -> dict[str, Tensor]:
    """What is inside of the wrappers, if it is tensors by name and nothing else."""
    while isinstance(content, Mapping) and any(isinstance(content.get(name), Mapping) for name in WRAPPERS):
        content = next(content[name] for name in WRAPPERS if isinstance(content.get(name), Mapping))
    if isinstance(content, Mapping) and content:
        others = [key for key, value in content.items() if not isinstance(value, Tensor)]
        if not others:
            return {str(key): value.detach() for key, value in content.items()}
        found = f"'{others[0]}' of type {type(content[others[0]]).__name__}"
    else:
        found = f"{type(content).__name__} of {len(content) if isinstance(content, Sized) else 0} entries"
    raise DataError(
        f"a weights file with {found}",
        path=path,
        expected=f"tensors by name, alone or under one of {', '.join(WRAPPERS)}",
        fix="save model.state_dict() alone",
    )


def _plain_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


# Into a network -------------------------------------------------------------------------------


def load_weights(network: ConvNet, path: Path | str) -> list[str]:
    """Load a weights file into a network; notes say what was not taken as it is, see `fit_weights`."""
    return fit_weights(network, read_weights(path), path)


def fit_weights(network: ConvNet, weights: Mapping[str, Tensor], path: Path | str) -> list[str]:
    """Load weights that were read from `path`; notes say what was not taken as it is.

    The last layer stays as it was made if the number of classes differs, a first convolution for colours is
    added up for grey images, and what only one side has is left alone if it is an auxiliary head or was
    replaced by the identity. All else must fit; where it does not, the network is not touched.
    """
    own, found = network.state_dict(), _today(weights)
    given = dict(found)
    notes = [
        _leave_replaced(network, given),
        _leave_auxiliary(own, given),
        _keep_new_head(network.parts[-1], own, given),
        _add_up_colours(own, given),
    ]
    for name in own:
        if name.endswith("num_batches_tracked"):  # which files from before PyTorch 0.4.1 do not have
            given.setdefault(name, own[name])
    if problems := misfits(own, given):
        like = _nearest_network(found)
        raise DataError(
            f"weights that are not those of this {type(network).__name__}: {'; '.join(problems)}",
            path=path,
            expected="torchvision's names and shapes" + (f"; these are of {like}" if like else ""),
            fix=f"build the network with quire.models.{like}" if like else "take the weights of this network",
        )
    network.load_state_dict(given)
    return [note for note in notes if note]


def _today(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published DenseNet files still have `norm.1`, `conv.2` for what is norm1 and conv2 now."""
    old = re.compile(r"(denselayer\d+\.(?:norm|conv))\.(\d)\.")
    return {old.sub(r"\1\2.", name): value for name, value in weights.items()}


def _keep_new_head(head: tuple[str, ...], own: Mapping[str, Tensor], given: dict[str, Tensor]) -> str:
    new = [name for name in own if name.startswith(head)]
    mine = len(own[new[-1]]) if new else 0
    others = {len(given[name]) for name in new if name in given and given[name].dim()} - {mine}
    fits = all(given[name].shape[1:] == own[name].shape[1:] for name in new if name in given)
    if not others or not fits:
        return ""
    given.update({name: own[name] for name in new})
    return f"the last layer starts anew: the file has {max(others)} classes, the network {mine}"


def _add_up_colours(own: Mapping[str, Tensor], given: dict[str, Tensor]) -> str:
    first = next(name for name, value in own.items() if value.dim() == 4)
    colours, grey = given.get(first), own[first]
    if colours is None or colours.dim() != 4 or (colours.shape[1], grey.shape[1]) != (3, 1):
        return ""
    # A grey image gives the same as the file's network on the image with its grey in all three channels.
    given[first] = colours.sum(1, keepdim=True)
    return "the first convolution adds up its three colours for grey images"


def _leave_replaced(network: nn.Module, given: dict[str, Tensor]) -> str:
    gone = tuple(f"{name}." for name, module in network.named_modules() if isinstance(module, nn.Identity))
    left = [name for name in given if name.startswith(gone)]
    for name in left:
        del given[name]
    return f"{_some(left)} are left out: the network goes without" if left else ""


def _leave_auxiliary(own: Mapping[str, Tensor], given: dict[str, Tensor]) -> str:
    auxiliary = re.compile(r"aux\d*\.")
    here, there = ({name for name in names if auxiliary.match(name)} for names in (own, given))
    if there and not here:
        for name in there:
            del given[name]
        return "the file's auxiliary heads are left out"
    if here and not there:
        given.update({name: own[name] for name in here})
        return "the auxiliary heads start anew: the file has none"
    return ""


def misfits(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    reshaped = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(value.shape)}"
        for name, value in own.items()
        if name in given and given[name].shape != value.shape
    ]
    found = {
        "without": [name for name in own if name not in given],
        "with unknown": [name for name in given if name not in own],
        "with": reshaped,
    }
    return [f"{what} {_some(names)}" for what, names in found.items() if names]


def _some(names: list[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _nearest_network(weights: Mapping[str, Tensor]) -> str:
    """The name of the network that most of the tensors fit by name and shape; nothing if few do."""
    found = {(name, tuple(value.shape)) for name, value in weights.items()}
    shares = {name: len(found & _shapes(name)) / len(found | _shapes(name)) for name in BUILDERS}
    best = max(shares, key=lambda name: shares[name])
    return best if shares[best] > 0.5 else ""


@functools.cache
def _shapes(name: str) -> frozenset[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a network's tensors, which are not made for this."""
    with torch.device("meta"):
        return frozenset((key, tuple(value.shape)) for key, value in BUILDERS[name]().state_dict().items())
