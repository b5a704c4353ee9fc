"""LoRA rank against error."""

from __future__ import annotations

from quire.board.instruments.base import Answer, Axis, Mark, Plot, Slider, instrument

SIZE = 32
STEPS = 300


@instrument(
    "lora-rank",
    title="LoRA rank and error",
    about="A layer of 32 × 32 weights has to learn a change ΔW whose singular values fall by a factor. An "
    "adapter of rank r can do no better than the r largest of them (Eckart–Young); the points are adapters "
    "trained for 300 steps.",
    controls=(
        Slider("rank", "rank r", 1, 32, 1, 4),
        Slider("decay", "factor between singular values", 0.5, 1.0, 0.05, 0.8),
    ),
    entries=("tune/lora",),
)
def lora_rank(rank: int, decay: float) -> Answer:
    import torch
    from torch import nn

    from quire.tuning import LoRAConfig, inject

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, right = (torch.linalg.qr(torch.randn(SIZE, SIZE))[0] for _ in range(2))
        values = decay ** torch.arange(SIZE)
        change = (left * values) @ right
        inner = nn.Linear(SIZE, SIZE, bias=False)
        layer, base = nn.Sequential(inner), inner.weight.detach().clone()
        adapters = inject(layer, LoRAConfig(rank=rank))
        optimiser = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=0.03)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
        course = []
        every = torch.eye(SIZE)
        for _ in range(STEPS):
            optimiser.zero_grad()
            loss = (layer(every).T - base - change).square().sum()
            loss.backward()
            optimiser.step()
            schedule.step()
            course.append((loss.item() / values.square().sum().item()) ** 0.5)
    total = values.square().sum()
    bound = [(values[r:].square().sum() / total).sqrt().item() for r in range(SIZE + 1)]
    trained = sum(summary.parameters for summary in adapters.summaries())
    return Answer(
        [
            Plot(
                "Error by rank", Axis("rank r"), Axis("‖ΔW − BA‖ / ‖ΔW‖", least=0, most=1),
                [Mark("line", "best possible", list(range(SIZE + 1)), bound),
                 Mark("points", "adapter after training", [rank], [course[-1]])],
            ),
            Plot(
                "While the adapter learns", Axis("step"), Axis("‖ΔW − BA‖ / ‖ΔW‖", least=0, most=1),
                [Mark("line", "adapter", list(range(1, STEPS + 1)), course),
                 Mark("line", "best possible", [1, STEPS], [bound[rank]] * 2, faint=True)],
            ),
        ],
        [
            ("best possible", f"{bound[rank]:.3g}"),
            ("reached", f"{course[-1]:.3g}"),
            ("trained numbers", f"{trained:,} of {SIZE * SIZE:,}"),
        ],
    )  # fmt: skip
