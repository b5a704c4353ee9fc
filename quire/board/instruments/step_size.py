"""Step size against convergence on the quadratic model."""

from __future__ import annotations

import math

from quire.board.instruments.base import Answer, Axis, Mark, Plot, Slider, instrument

STEPS = 40


@instrument(
    "step-size",
    title="Step size and convergence",
    about="Gradient descent near a minimum, E = ½ Σ λᵢ αᵢ² with λmax = 2. Each direction shrinks by 1 − ηλ "
    "in every step: beyond η = 2/λmax = 1 the steepest one grows instead, and a large condition number "
    "leaves the flattest one behind.",
    controls=(
        Slider("step_size", "step size η", 0.01, 1.2, 0.01, 0.3),
        Slider("condition", "condition number κ", 1, 50, 1, 10),
    ),
    entries=("convergence/spectrum",),
)
def step_size(step_size: float, condition: int) -> Answer:
    import torch

    from quire.functional import quadratic

    turn = torch.tensor(math.pi / 6, dtype=torch.float64)
    axes = torch.stack([torch.stack([turn.cos(), turn.sin()]), torch.stack([-turn.sin(), turn.cos()])], dim=1)
    spectrum = torch.tensor([2.0 / condition, 2.0], dtype=torch.float64)
    model = quadratic.QuadraticModel((axes * spectrum) @ axes.T, torch.zeros(2, dtype=torch.float64))
    start = torch.tensor([1.6, 1.4], dtype=torch.float64)
    path = model.simulate(start, step_size, STEPS)
    predicted = model.predict(start, step_size, STEPS)
    seen = path[(path.abs() < 3).all(1).cumprod(0).bool()]
    circle = torch.linspace(0, 2 * math.pi, 73, dtype=torch.float64)
    levels = []
    for level in (0.25, 1.0, 2.25):
        radii = (2 * level / model.eigenvalues).sqrt()
        ring = model.point(torch.stack([circle.cos(), circle.sin()], 1) * radii)
        ring[(ring.abs() > 2.4).any(1)] = math.nan
        levels.append(Mark("line", f"E = {level:g}", ring[:, 0].tolist(), ring[:, 1].tolist(), faint=True))
    count = list(range(STEPS + 1))
    energy, closed = model.value(path), model.value(predicted)
    rate = quadratic.descent_rates(model.eigenvalues, step_size).abs().max().item()
    stable = quadratic.is_stable(model.eigenvalues, step_size)
    return Answer(
        [
            Plot(
                "The way to the minimum", Axis("w₁", least=-2.4, most=2.4), Axis("w₂", least=-2.4, most=2.4),
                [*levels, Mark("line", "descent", seen[:, 0].tolist(), seen[:, 1].tolist()),
                 Mark("points", "steps", seen[:, 0].tolist(), seen[:, 1].tolist())],
                square=True,
            ),
            Plot(
                "Error over the steps", Axis("step"), Axis("E", log=True),
                [Mark("line", "step by step", count, _positive(energy.tolist())),
                 Mark("points", "closed form (1 − ηλ)ᵗ", count, _positive(closed.tolist()))],
            ),
        ],
        [
            ("limit 2/λmax", f"{quadratic.stable_step_size(model.eigenvalues):.3g}"),
            ("best step 2/(λmin + λmax)", f"{quadratic.best_step_size(model.eigenvalues):.3g}"),
            ("slowest factor |1 − ηλ|", f"{rate:.3g}"),
            ("E after 40 steps", f"{energy[-1].item():.3g}"),
        ],
        "It converges." if stable else "It does not converge: the step is at or beyond the limit.",
    )  # fmt: skip


def _positive(values: list[float]) -> list[float]:
    """What a logarithmic axis can show."""
    return [value if 1e-30 < value < 1e12 else math.nan for value in values]
