"""Where a mixture begins: the frame in which all rows are alike, and the first parameters of each start.

N rows, B rows of a batch, D features, K components, R starts at once.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from quire.data.batch import Data, in_order
from quire.errors import DataError
from quire.functional.clusters import centre_update, kmeans_plusplus, random_rows
from quire.functional.mixture_sweeps import Frame, frame_of, product_moments
from quire.functional.mixtures import Mixture, Moments, mixture_update
from quire.functional.nearest import cluster_sums, nearest_centres
from quire.train.statistics import as_rows
from quire.train.sums import add_to

Start = Literal["kmeans", "k-means++", "random", "random_from_data"]
SAMPLE_ROWS = 2**17
"""Rows that centres are chosen from."""
ROUNDS, SETTLED = 100, 1e-4
"""K-means ends after so many rounds, or when the centres move by less than this part of the variance."""
CHUNK_NUMBERS = 2**22
"""Numbers of float64 that are held at once beside the rows."""


def whitening_frame(data: Data, kind: str, floor: float, device: torch.device) -> Frame:
    """The coordinates in which all rows together have mean 0 and covariance 1; `kind` is that of the
    covariances, and `floor` what is added to them."""
    provisional: Tensor | None = None
    totals: dict[str, Tensor] = {}
    for batch in in_order(data):
        rows = as_rows(batch.inputs).to(device)
        for part in rows.split(max(1, CHUNK_NUMBERS // rows.shape[1])):
            x = part.double()
            provisional = x.mean(0) if provisional is None else provisional
            x = x - provisional
            add_to(totals, {"first": x.sum(0), "second": x.mT @ x})
    assert provisional is not None
    mean = totals["first"] / len(data)
    covariance = totals["second"] / len(data) - mean[:, None] * mean
    if not bool(covariance.isfinite().all()):
        raise DataError(
            "rows with values that are not finite numbers, or too large to be squared",
            expected="finite numbers below 1e150",
            fix="remove those rows, or fill in their missing values",
        )
    return frame_of(mean + provisional, covariance, kind, floor)


def first_mixtures(
    data: Data, frame: Frame, like: Mixture, init: str, generator: torch.Generator, floor: Tensor
) -> Mixture:
    """R mixtures in the frame, of the shapes of `like`: of the rows that are nearest to chosen centres, or of
    random responsibilities."""
    device, (starts, components, features) = like.means.device, like.means.shape
    about, centres = torch.zeros_like(like.means), None
    if init != "random":
        drawn = torch.randperm(len(data), generator=generator, device=generator.device)[:SAMPLE_ROWS]
        sample = as_rows(data.take(drawn.sort().values.cpu()).inputs).to(device)
        centres = choose_centres(sample, components, starts, init, generator)
        about = frame.enter(centres)
    totals: dict[str, Tensor] = {}
    for batch in in_order(data):
        for x in as_rows(batch.inputs).to(device).split(max(1, CHUNK_NUMBERS // features**2)):
            inside = frame.enter(x.double())
            if centres is None:
                shares = random_shares((starts, len(x), components), generator)
                moments = product_moments(inside, shares, like)
            else:
                moments = nearest_moments(x, centres, inside, about, like)
            add_to(totals, moments._asdict())
    return mixture_update(Moments(**totals), like, about, floor)


def random_shares(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Random responsibilities (R, B, K)."""
    drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return drawn / drawn.sum(-1, keepdim=True)


def nearest_moments(x: Tensor, centres: Tensor, inside: Tensor, about: Tensor, like: Mixture) -> Moments:
    """Moments of rows that belong to the nearest centre alone, about these (R, K, D): exact however small
    clusters are beside their distances. `inside` and `about` are rows and centres in the frame."""
    found = []
    for r in range(len(centres)):
        nearest = nearest_centres(x, centres[r])
        share = torch.nn.functional.one_hot(nearest, centres.shape[1]).double()
        found.append(product_moments(inside - about[r][nearest], share, Mixture(*(part[r] for part in like))))
    return Moments(*(torch.stack(parts) for parts in zip(*found, strict=True)))


def choose_centres(x: Tensor, components: int, starts: int, init: str, generator: torch.Generator) -> Tensor:
    """K centres among rows (N, D) for each of R starts, (R, K, D), in float64.

    "random_from_data" takes different rows, "k-means++" rows that are far apart, and "kmeans" moves those
    until K-means has all but settled.
    """
    if init == "random_from_data":
        return x[random_rows(len(x), components, generator, starts=starts, device=x.device)].double()
    chosen = x[kmeans_plusplus(x, components, generator, starts=starts)].double()
    if init == "k-means++":
        return chosen
    settled = SETTLED * float(x.double().var(0, correction=0).mean())
    refined = []
    for centres in chosen:
        for _ in range(ROUNDS):
            sums = cluster_sums(x, centres)
            centres, before = centre_update(sums.sums, sums.counts), centres
            if float((centres - before).square().sum()) <= settled:
                break
        refined.append(centres)
    return torch.stack(refined)
