"""The latent plane of a variational autoencoder."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from quire.board.instruments.base import Answer, Axis, Mark, Plot, Slider, instrument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.tasks.variational import Variational

GRID = 9
SPAN = 2.5
EPOCHS = 20
SHOWN = 400


@instrument(
    "vae-plane",
    title="The latent plane of a VAE",
    about="A variational autoencoder with two latent numbers, trained on 8 × 8 digits when you first look "
    "here. Every point of the plane decodes to an image; neighbouring points to similar ones.",
    controls=(
        Slider("first", "latent z₁", -SPAN, SPAN, 0.1, 0.0),
        Slider("second", "latent z₂", -SPAN, SPAN, 0.1, 0.0),
    ),
    entries=("variational/vae",),
)
def vae_plane(first: float, second: float) -> Answer:
    import torch

    task, codes, classes, bound = trained()
    places = torch.linspace(-SPAN, SPAN, GRID)
    plane = torch.cartesian_prod(places.flip(0), places).flip(1)  # from the top left, z₁ to the right
    here = torch.tensor([[first, second]])
    with torch.no_grad():
        images = task.model.decode(torch.cat([plane, here])).sigmoid().reshape(-1, 8, 8)
    sheet = images[:-1].reshape(GRID, GRID, 8, 8).permute(0, 2, 1, 3).reshape(GRID * 8, GRID * 8)
    return Answer(
        [
            Plot("What this point decodes to", Axis("", least=0, most=8), Axis(""),
                 [Mark("tiles", "image", tiles=rounded(images[-1]))], square=True),
            Plot("Codes of digits, and this point",
                 Axis("z₁", least=-3, most=3), Axis("z₂", least=-3, most=3),
                 [Mark("points", "digits", codes[:, 0].tolist(), codes[:, 1].tolist(), group=classes),
                  Mark("points", "here", [first], [second], group=[-1])], square=True),
            Plot("The whole plane", Axis("z₁", least=-SPAN, most=SPAN), Axis("z₂", least=-SPAN, most=SPAN),
                 [Mark("tiles", "images", tiles=rounded(sheet))], square=True),
        ],
        [("bound of log p(x)", f"{bound:.4g}"), ("trained for", f"{EPOCHS} epochs on built-in digits")],
    )  # fmt: skip


def rounded(values: Tensor) -> list[list[float]]:
    return [[round(value, 2) for value in row] for row in values.tolist()]


@functools.cache
def trained() -> tuple[Variational, Tensor, list[int], float]:
    """The task, codes and classes of some digits, and its bound on the digits that it was not trained on."""
    import torch
    from sklearn.datasets import load_digits

    from quire.data.batch import TensorData
    from quire.models.vae import VAE, VAEConfig
    from quire.options import Optim
    from quire.tasks.variational import Variational
    from quire.train import evaluate, fit

    pixels, classes = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32) / 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        task = Variational(VAE(VAEConfig((64,), hidden=(128, 64), latent=2)), importance=0, binarise=False)
        data, rest = (TensorData({"inputs": part}) for part in (images[:1500], images[1500:]))
        fit(task, data, epochs=EPOCHS, optim=Optim("adam", lr=3e-3), train_measures=False)
        bound = evaluate(task, rest)["elbo"]
        with torch.no_grad():
            codes = task.model.encode(images[:SHOWN])[0]
    return task, codes, classes[:SHOWN].tolist(), bound
