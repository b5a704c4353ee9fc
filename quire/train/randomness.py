"""Random states as tensors, so that a resumed run draws the numbers that it would have drawn."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def stream_seed(seed: int, process: int, step: int = 0) -> int:
    """The seed of a process's own stream of random numbers; the first process has the run's own. A process
    that joins a run after `step` steps begins another."""
    if not process and not step:
        return seed
    words = np.random.SeedSequence([seed, process, step]).generate_state(2)
    return int(words[0]) << 31 ^ int(words[1])


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Tensor]:
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor([numpy_state["state"]["pos"], numpy_state["has_gauss"]]),
        "numpy_gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state |= {f"cuda:{i}": value for i, value in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    position, has_gauss = state["numpy_position"].tolist()
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": state["numpy"].numpy().astype(np.uint32), "pos": position},
            "has_gauss": has_gauss,
            "gauss": state["numpy_gauss"].item(),
        }
    )
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if f"cuda:{i}" in state:
                torch.cuda.set_rng_state(state[f"cuda:{i}"], i)
