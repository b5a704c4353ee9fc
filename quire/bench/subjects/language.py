"""GPTs: steps of training, whole runs, and writing; beside a plain PyTorch GPT in a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.bench.case import GROWTHS, SUBJECTS, Bar, Case, Clocked, Contestant, Growth, Place, Work, peer
from quire.bench.training import loop, trainer
from quire.data.batch import Batch
from quire.data.text import load_corpus
from quire.data.text.windows import TensorTokens, TokenWindows
from quire.models.generate import generate
from quire.models.gpt import GPT, GPTConfig
from quire.options import Optim, Schedule, Text, Train
from quire.tasks.language import LanguageModel
from quire.train import Callback, evaluate, fit
from quire.train.descent import Descent
from quire.train.keeping import Record

OPTIM = Optim(lr=1e-3, beta2=0.99, weight_decay=0.1, decay_biases=False, clip_norm=1.0)
TARGET = 1.4697
"""The loss on tinyshakespeare that nanoGPT's README gives."""


@SUBJECTS.register("gpt2")
def gpt2(place: Place) -> Iterator[Case]:
    """Training GPT-2 of 124 million parameters, beside a plain compiled loop and Hugging Face's model."""
    if not (place.on_gpu or place.small):
        return
    vocabulary, context, layers, heads, width, batch = 50304, 1024, 12, 12, 768, 64
    if place.small:
        vocabulary, context, layers, heads, width, batch = 64, 16, 1, 2, 16, 2
    warm, steps = place.size(10, 6), place.size(40, 2)
    tokens = torch.randint(vocabulary - 47, (place.size(2_000_000, 500),), device=place.device)
    train = Train(batch_size=batch, precision="bfloat16", compile=place.on_gpu, validate_every=10**9)
    config = GPTConfig(vocabulary, context, layers, heads, width, bias=False)
    units = float(batch * context)

    def plain(model: Callable[[], nn.Module]) -> Clocked:
        def body() -> Callable[[], object]:
            torch.compiler.reset()
            net = model().to(place.device)
            return plain_step(net, tokens, context, batch, half=True, compiled=place.on_gpu)

        return loop(body, place, warm=warm, steps=steps, units=units)

    def hugging_face() -> nn.Module:
        return HuggingFace(vocabulary, context, layers, heads, width)

    contestants: dict[str, Contestant] = {
        "quire": trainer(
            lambda: LanguageModel(GPT(config)), TokenWindows(TensorTokens(tokens), context), place, warm=warm,
            steps=steps, optim=OPTIM, train=train, units=units,
        ),
        "plain loop, compiled": plain(
            lambda: PlainGPT(vocabulary, context, layers, heads, width, approximate="tanh")
        ),
        "Hugging Face, compiled": peer("transformers", plain(hugging_face)),
    }  # fmt: skip
    weights = 12 * layers * width**2 + vocabulary * width
    operations = units * (6.0 * weights + 6.0 * layers * width * context)
    yield Case(
        f"GPT-2, {weights / 1e6:.0f} M parameters, context {context}, batch {batch}, bfloat16", contestants,
        work=Work(operations={"bfloat16": operations}), amount=units, unit="token", rounds=1,
        bars=(
            Bar("rate", at_least=600_000, machine="H200"),
            Bar("time", at_most=1.0, rival="plain loop, compiled"),
        ),
    )  # fmt: skip


@SUBJECTS.register("gpt-cpu")
def gpt_cpu(place: Place) -> Iterator[Case]:
    """nanoGPT's setting for a CPU, 4 layers of 128: a step of the trainer, beside its own and plain ones.

    nanoGPT computes in float32 there. In mixed precision, which the trainer has for CPUs too, products take
    half the time where a CPU multiplies bfloat16; a plain loop gains nothing by it (`fused_attention`).
    """
    if place.on_gpu:
        return
    context, layers, heads, width, batch = 64, 4, 4, 128, 12
    if place.small:
        context, layers, heads, width, batch = 8, 1, 2, 16, 2
    data = load_corpus(place.data or "python-reference", nano_text(context))
    vocabulary = data.preparation.tokeniser.vocab_size
    config = GPTConfig(vocabulary, context, layers, heads, width, bias=False, activation="gelu")
    tokens = data.train.tokens
    assert isinstance(tokens, TensorTokens)
    values = tokens.values
    units = float(batch * context)
    warm, steps = place.size(10, 2), place.size(40, 2)

    def plain(half: bool) -> Callable[[], object]:
        return plain_step(
            PlainGPT(vocabulary, context, layers, heads, width), values, context, batch, half=half
        )

    def quire(precision: Literal["float32", "bfloat16"]) -> Clocked:
        return trainer(
            lambda: LanguageModel(GPT(config)), data.train, place, warm=warm, steps=steps, optim=OPTIM,
            train=Train(batch_size=batch, validate_every=10**9, precision=precision), units=units,
        )  # fmt: skip

    def nano() -> Callable[[], object]:
        return nano_step(PlainGPT(vocabulary, context, layers, heads, width), values, context, batch)

    yield Case(
        f"GPT of {layers} layers of {width}, context {context}, batch {batch}",
        {
            "quire, bfloat16": quire("bfloat16"),
            "quire, float32": quire("float32"),
            "nanoGPT's loop": loop(nano, place, warm=warm, steps=steps, units=units),
            "plain loop": loop(lambda: plain(False), place, warm=warm, steps=steps, units=units),
            "plain loop, bfloat16": loop(lambda: plain(True), place, warm=warm, steps=steps, units=units),
        },
        work=Work(operations={"float32": units * 6.0 * (12 * layers * width**2 + vocabulary * width)}),
        amount=units, unit="token", bars=(Bar("time", at_most=1 / 1.2, rival="nanoGPT's loop"),),
    )  # fmt: skip


class Until(Callback):
    """Stops a run once its validation loss is low enough."""

    def __init__(self, target: float) -> None:
        self.target = target

    def on_record(self, descent: Descent, record: Record) -> None:
        if record["split"] == "validation" and record["values"]["loss"] <= self.target:
            descent.stop()


@SUBJECTS.register("shakespeare")
def shakespeare(place: Place) -> Iterator[Case]:
    """Seconds from nothing to nanoGPT's loss on tinyshakespeare (--data input.txt), set-up included."""
    if not (place.on_gpu or place.small) or (place.data is None and not place.small):
        return
    context, layers, heads, width, batch, most = 256, 6, 6, 384, 64, 5000
    if place.small:
        context, layers, heads, width, batch, most = 8, 1, 2, 16, 4, 4
    optim = replace(OPTIM, schedule=Schedule("cosine", warmup=100, final=OPTIM.lr / 10))

    def run() -> tuple[float, int]:
        data = load_corpus(place.data or "python-reference", nano_text(context))
        torch.manual_seed(1337)
        size = data.preparation.tokeniser.vocab_size
        task = LanguageModel(GPT(GPTConfig(size, context, layers, heads, width, dropout=0.2, bias=False)))
        found = fit(
            task, data.train, data.validation, steps=most, optim=optim, seed=1337,
            train=Train(
                # Not compiled: 1,500 recorded steps take less time than compiling them.
                batch_size=batch, validate_every=place.size(250, 2), precision="bfloat16",
            ),
            device=str(place.device), train_measures=False, callbacks=[Until(TARGET)],
        )  # fmt: skip
        assert data.validation is not None
        loss = evaluate(task, data.validation.judged().to(place.device))["loss"]
        return loss, found.steps

    yield Case(
        f"characters, {layers} layers of {width}, until the loss is {TARGET}", {"quire": run},
        whole=True, unit="run", result=lambda found: float(found[0]), result_name="validation loss",
        bars=(Bar("time", at_most=25.0, machine="H200"), Bar("result", at_most=TARGET, machine="H200")),
    )  # fmt: skip


@SUBJECTS.register("decoding")
def decoding(place: Place) -> Iterator[Case]:
    """512 tokens after a short prompt, with keys and values kept; beside doing all of it again."""
    layers, heads, width = (12, 12, 768) if place.on_gpu else (6, 6, 384)
    length, rows = place.size(512, 4), 32 if place.on_gpu else 1
    torch.manual_seed(0)
    model = GPT(GPTConfig(256, 1024, layers, heads, width)).to(place.device).eval()
    prompt = torch.randint(256, (rows, 16), device=place.device)

    def kept() -> list[list[int]]:
        return [list(one.tokens) for one in generate(model, prompt, length=length, temperature=0.0)]

    @torch.no_grad()
    def again() -> list[list[int]]:
        tokens = prompt
        for _ in range(length):
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
        found: list[list[int]] = tokens[:, 16:].tolist()
        return found

    kept()
    yield Case(
        f"{length} tokens of {rows} texts, GPT of {layers} layers of {width}",
        {"quire": kept, "without a cache": again}, whole=True, amount=float(length * rows), unit="token",
        bars=(Bar("time", at_most=0.2, rival="without a cache"),),
    )  # fmt: skip


@GROWTHS.register("gpt")
def growth(place: Place) -> Iterator[Growth]:
    """A step against the length of the context, at 16,384 tokens a step."""
    layers, heads, width = (4, 8, 512) if place.on_gpu else (2, 4, 128)
    tokens = place.size(16_384 if place.on_gpu else 2048, 64)

    def make(context: int) -> Case:
        model = GPT(GPTConfig(256, context, layers, heads, width, bias=False)).to(place.device)
        task = LanguageModel(model)
        ids = torch.randint(256, (tokens // context, context + 1), device=place.device)
        batch = Batch({"inputs": ids[:, :-1], "target": ids[:, 1:]}, torch.arange(len(ids)))

        def step() -> object:
            with torch.autocast(place.device.type, torch.bfloat16, enabled=place.on_gpu):
                loss = sum(task.terms(batch).values())
            assert isinstance(loss, Tensor)
            loss.backward()
            model.zero_grad(set_to_none=True)
            return None

        return Case("", {"quire": step})

    first = 16 if place.small else 128
    sizes = tuple(first * 2**power for power in range(12) if first * 2**power <= tokens)
    yield Growth(
        f"A step of a GPT of {layers} layers of {width}, {tokens:,} tokens", "context T", sizes, make,
        order=1, memory_order=0,
    )  # fmt: skip


# The rivals ---------------------------------------------------------------------------------------


def nano_text(context: int) -> Text:
    """nanoGPT's split: nine tenths to learn from, one to judge by."""
    return Text(context=context, validation=0.1, test=0.0, unknown="skip")


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int, approximate: str) -> None:
        super().__init__()
        self.heads, self.approximate = heads, approximate
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.approximate))


class PlainGPT(nn.Module):
    """A GPT as people write it: one product for queries, keys and values, PyTorch's fused attention."""

    def __init__(
        self, vocabulary: int, context: int, layers: int, heads: int, width: int, approximate: str = "none"
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads, approximate) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


class HuggingFace(nn.Module):
    """GPT2LMHeadModel with the loss of the next token."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=vocabulary, n_positions=context, n_layer=layers, n_head=heads, n_embd=width,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        self.inner = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        logits = self.inner(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def decayed(model: nn.Module) -> list[dict[str, object]]:
    """Matrices with weight decay, vectors without."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def nano_step(model: nn.Module, tokens: Tensor, context: int, batch: int) -> Callable[[], object]:
    """As nanoGPT trains on a CPU: windows cut one by one out of 16-bit numbers, a step size for each step,
    AdamW that is not fused, and the loss read in each step."""
    optimiser = torch.optim.AdamW(decayed(model), lr=1e-3, betas=(0.9, 0.99))
    numbers = tokens.numpy().astype(np.uint16)
    taken = 0

    def windows(starts: Tensor, offset: int) -> Tensor:
        cut = [numbers[start + offset : start + offset + context] for start in starts.tolist()]
        return torch.stack([torch.from_numpy(window.astype(np.int64)) for window in cut])

    def step() -> object:
        nonlocal taken
        taken += 1
        rate = 1e-4 + 0.5 * (1 + math.cos(math.pi * taken / 2000)) * 9e-4
        for group in optimiser.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(numbers) - context, (batch,))
        loss = model(windows(starts, 0), windows(starts, 1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.item()

    return step


def plain_step(
    model: nn.Module, tokens: Tensor, context: int, batch: int, *, half: bool = False, compiled: bool = False
) -> Callable[[], object]:
    """Forward, backward, clip and fused AdamW, on windows drawn at random."""
    optimiser = torch.optim.AdamW(decayed(model), lr=1e-3, betas=(0.9, 0.99), fused=True)
    forward: Callable[..., Tensor] = torch.compile(model) if compiled else model
    within = torch.arange(context + 1, device=tokens.device)

    def step() -> object:
        starts = torch.randint(len(tokens) - context - 1, (batch, 1), device=tokens.device)
        rows = tokens[starts + within].long()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=half):
            loss = forward(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss

    return step
