"""K-means step by step."""

from __future__ import annotations

from quire.board.instruments.base import Answer, Axis, Mark, Plot, Slider, instrument

SWEEPS = 12


@instrument(
    "kmeans",
    title="K-means, step by step",
    about="Rows go to their nearest centre, then each centre goes to the mean of its rows; neither can raise "
    "the sum of squared distances, so it ends. Where it ends depends on where it starts.",
    controls=(
        Slider("step", "half-steps taken", 0, 2 * SWEEPS, 1, 1),
        Slider("clusters", "clusters K", 2, 6, 1, 4),
        Slider("start", "start", 0, 9, 1, 2),
    ),
    entries=("classical/k-means",),
)
def kmeans(step: int, clusters: int, start: int) -> Answer:
    import torch

    from quire.functional.clusters import centre_update, inertia
    from quire.functional.nearest import cluster_sums, nearest_centres

    source = torch.Generator().manual_seed(7)
    homes = torch.tensor([[0.0, 0.0], [3.0, 0.4], [1.4, 2.6], [4.2, 3.0]], dtype=torch.float64)
    spread = 0.55 * torch.randn(4, 35, 2, generator=source, dtype=torch.float64)
    rows = (homes[:, None] + spread).flatten(0, 1)
    drawn = torch.Generator().manual_seed(start)
    centres = rows[torch.randperm(len(rows), generator=drawn)[:clusters]].clone()
    labels = torch.zeros(len(rows), dtype=torch.int64)
    ways = [centres]
    course: list[float] = []
    for half in range(2 * SWEEPS):
        if half % 2 == 0:
            fresh = nearest_centres(rows, centres)
        else:
            found = cluster_sums(rows, centres)
            centres = centre_update(found.sums, found.counts)
        if half < step:
            labels = fresh
            if half % 2:
                ways.append(centres)
        course.append(inertia(rows, centres, fresh).item())
    shown = ways[-1]
    marks = [
        Mark(
            "points", "rows", rows[:, 0].tolist(), rows[:, 1].tolist(), group=labels.tolist() if step else ()
        )
    ]
    for k in range(clusters):
        way = torch.stack([places[k] for places in ways])
        marks.append(Mark("line", "ways of the centres", way[:, 0].tolist(), way[:, 1].tolist(), faint=True))
    marks.append(Mark("points", "centres", shown[:, 0].tolist(), shown[:, 1].tolist(), group=[-1] * clusters))
    done = ("nothing yet", "rows were assigned", "centres were moved")[0 if step == 0 else 1 + (step + 1) % 2]
    final = step >= 2 and course[step - 1] == course[-1]
    return Answer(
        [
            Plot("Rows and centres", Axis("x₁"), Axis("x₂"), marks, square=True),
            Plot(
                "Sum of squared distances", Axis("half-step"), Axis("J"),
                [Mark("line", "J", list(range(1, len(course) + 1)), course),
                 Mark("points", "here", [step] if step else [], [course[step - 1]] if step else [])],
            ),
        ],
        [("last half-step", done), ("J", f"{course[step - 1]:.4g}" if step else "–"),
         ("J at the end", f"{course[-1]:.4g}")],
        "It has converged." if final else "",
    )  # fmt: skip
