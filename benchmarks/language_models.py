"""GPTs: training and writing, beside a plain PyTorch model in a plain loop, in one run.

    cpu        characters, 4 layers of 128, context 64, batches of 12: time of a step, and the validation loss
               after 2,000 steps of the trainer
    gpu        characters, 6 layers of 384, context 256, batches of 64, 5,000 steps: the validation loss, and
               the seconds of the whole run, judging and compiling included
    gpt2       GPT-2 of 124 million parameters, context 1024, batches of 32, bfloat16: tokens a second
    decoding   512 tokens after a short prompt, with keys and values kept and without

The rival is a GPT as people write it: one product for queries, keys and values, PyTorch's fused attention,
GELU, layer norms without biases, AdamW fused, gradients clipped by norm; compiled on a GPU. Hugging Face's
GPT-2 stands beside it in `gpt2`.

    python -m benchmarks.language_models cpu --data tinyshakespeare/input.txt
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.machine import describe, machine
from quire.data.text import load_corpus
from quire.data.text.windows import TensorTokens, TokenWindows
from quire.models.generate import generate
from quire.models.gpt import GPT, GPTConfig
from quire.options import Optim, Schedule, Text, Train
from quire.tasks.language import LanguageModel
from quire.train import Callback, evaluate, fit
from quire.train.descent import Descent

WARM_UP = 10


# The rival --------------------------------------------------------------------------------------


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, approximate: str) -> None:
        super().__init__()
        self.heads, self.dropout, self.approximate = heads, dropout, approximate
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        rate = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        seen = self.out(seen.transpose(1, 2).contiguous().view(rows, length, width))
        x = x + F.dropout(seen, self.dropout, self.training)
        wide = F.gelu(self.up(self.norm2(x)), approximate=self.approximate)
        return x + F.dropout(self.down(wide), self.dropout, self.training)


class PlainGPT(nn.Module):
    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float = 0.0,
        approximate: str = "none",
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads, dropout, approximate) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


class Loop:
    """Forward, backward, clip, step, on windows drawn at random."""

    def __init__(
        self, model: nn.Module, tokens: Tensor, context: int, batch: int, *, half: bool, compiled: bool
    ) -> None:
        self.context, self.batch, self.half = context, batch, half
        self.tokens = tokens
        self.model = model.to(tokens.device)
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        self.optimiser = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=1e-3, betas=(0.9, 0.99), fused=True,
        )  # fmt: skip
        self.loss: Callable[..., Tensor] = torch.compile(self.model) if compiled else self.model

    def step(self) -> None:
        starts = torch.randint(
            len(self.tokens) - self.context - 1, (self.batch, 1), device=self.tokens.device
        )
        rows = self.tokens[starts + torch.arange(self.context + 1, device=self.tokens.device)].long()
        with torch.autocast(self.tokens.device.type, torch.bfloat16, enabled=self.half):
            loss = self.loss(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def __call__(self, steps: int) -> float:
        for _ in range(WARM_UP):
            self.step()
        return timed(lambda: [self.step() for _ in range(steps)], self.tokens.device) / steps


class HuggingFace(nn.Module):
    """GPT2LMHeadModel with the loss of the next token."""

    def __init__(self, vocabulary: int, context: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=vocabulary, n_positions=context, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
        )
        self.inner = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        logits = self.inner(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


# Quire ------------------------------------------------------------------------------------------


class Clock(Callback):
    """Seconds between two steps of a run, with the device's queue empty at both."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_step(self, descent: Descent, step: int) -> None:
        if step in (self.first, self.last):
            if descent.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            if step == self.first:
                self.begin = now
            else:
                self.seconds = now - self.begin


def trainer(task: LanguageModel, data: TokenWindows, steps: int, train: Train, device: str) -> float:
    """Seconds of a step."""
    clock = Clock(WARM_UP, WARM_UP + steps)
    optim = Optim(lr=1e-3, beta2=0.99, weight_decay=0.1, decay_biases=False, clip_norm=1.0)
    fit(task, data, steps=WARM_UP + steps, optim=optim, train=train, device=device, callbacks=[clock])
    return clock.seconds / steps


def timed(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def nano_text(context: int) -> Text:
    """nanoGPT's split: nine tenths to learn from, one to judge by."""
    return Text(context=context, validation=0.1, test=0.0, unknown="skip")


def nano_optim(warmup: int, *, lr: float = 1e-3) -> Optim:
    schedule = Schedule("cosine", warmup=warmup, final=lr / 10)
    return Optim(lr=lr, beta2=0.99, weight_decay=0.1, decay_biases=False, clip_norm=1.0, schedule=schedule)


# Subjects ---------------------------------------------------------------------------------------


def cpu(options: argparse.Namespace) -> None:
    data = load_corpus(options.data, nano_text(64))
    vocabulary = data.preparation.tokeniser.vocab_size
    config = GPTConfig(vocabulary, 64, 4, 4, 128, bias=False, activation="gelu")
    tokens = data.train.tokens
    assert isinstance(tokens, TensorTokens)
    rival = Loop(PlainGPT(vocabulary, 64, 4, 4, 128), tokens.values, 64, 12, half=False, compiled=False)
    times: dict[str, list[float]] = {"trainer": [], "plain loop": []}
    for _ in range(options.rounds):
        times["plain loop"].append(rival(options.steps))
        task = LanguageModel(GPT(config))
        train = Train(batch_size=12, validate_every=10**6)
        times["trainer"].append(trainer(task, data.train, options.steps, train, "cpu"))
    show(times, 12 * 64)
    torch.manual_seed(options.seed)
    task = LanguageModel(GPT(config))
    result = fit(
        task, data.train, data.validation, steps=2000, optim=nano_optim(100, lr=4e-3), seed=options.seed,
        train=Train(batch_size=12, validate_every=250),
    )  # fmt: skip
    assert data.validation is not None
    found = evaluate(task, data.validation.judged())["loss"]
    print(f"validation loss {found:.4f} after 2,000 steps in {result.seconds:.0f} s (bar: at most 1.88)")


def gpu(options: argparse.Namespace) -> None:
    start = time.perf_counter()
    data = load_corpus(options.data, nano_text(256))
    torch.manual_seed(options.seed)
    size = data.preparation.tokeniser.vocab_size
    task = LanguageModel(GPT(GPTConfig(size, 256, 6, 6, 384, dropout=0.2, bias=False)))
    train = Train(batch_size=64, validate_every=250, precision="bfloat16", compile=not options.eager)
    result = fit(
        task, data.train, data.validation, steps=5000, optim=nano_optim(100), seed=options.seed,
        train=train, device="cuda", train_measures=False,
    )  # fmt: skip
    assert data.validation is not None
    found = evaluate(task, data.validation.judged().to("cuda"))["loss"]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    curve = [(r["step"], r["values"]["loss"]) for r in result.history if r["split"] == "validation"]
    print("validation:", ", ".join(f"{step} {loss:.4f}" for step, loss in curve))
    print(f"validation loss {found:.4f} (bar: at most 1.4697), {seconds:.1f} s in all (bar: at most 60)")


def gpt2(options: argparse.Namespace) -> None:
    vocabulary, context, batch = 50304, 1024, 32
    torch.manual_seed(0)
    tokens = torch.randint(50257, (2_000_000,), device="cuda")
    data = TokenWindows(TensorTokens(tokens), context)
    config = GPTConfig(vocabulary, context, 12, 12, 768, bias=False)
    times: dict[str, list[float]] = {}

    def measure(name: str, work: Callable[[], float]) -> None:
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        times.setdefault(name, []).append(work())
        rate = batch * context / times[name][-1]
        memory = torch.cuda.max_memory_allocated() / 2**30
        print(f"{name:24}{1000 * times[name][-1]:9.2f} ms{rate:12,.0f} tokens/s{memory:8.1f} GiB", flush=True)

    def ours(chunked: bool) -> float:
        train = Train(batch_size=batch, precision="bfloat16", compile=True, validate_every=10**6)
        return trainer(LanguageModel(GPT(config), chunked=chunked), data, options.steps, train, "cuda")

    def theirs(model: nn.Module) -> float:
        return Loop(model, tokens, context, batch, half=True, compiled=True)(options.steps)

    for _ in range(options.rounds):
        measure("trainer", lambda: ours(False))
        measure("trainer, chunked loss", lambda: ours(True))
        measure(
            "plain loop, compiled",
            lambda: theirs(PlainGPT(vocabulary, context, 12, 12, 768, approximate="tanh")),
        )
        if options.peers:
            measure("Hugging Face, compiled", lambda: theirs(HuggingFace(vocabulary, context)))
    best = max(
        batch * context / statistics.median(values) for name, values in times.items() if "train" in name
    )
    operations = 6 * 124e6 + 6 * 12 * 768 * context
    print(f"{best:,.0f} tokens/s (bar: at least 550,000), {best * operations / 1e12:.0f} TFLOP/s")


def decoding(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = GPTConfig(256, 1024, 6, 6, 384)
    if device.type == "cuda":
        config = GPTConfig(256, 1024, 12, 12, 768)
    model = GPT(config).to(device).eval()
    prompt = torch.randint(256, (options.batch, 16), device=device)
    found: dict[str, list[list[int]]] = {}

    def cached() -> None:
        made = generate(model, prompt, length=512, temperature=0.0)
        found["cached"] = [list(one.tokens) for one in made]

    @torch.no_grad()
    def uncached() -> None:
        tokens = prompt
        for _ in range(512):
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
        found["uncached"] = tokens[:, 16:].tolist()

    generate(model, prompt, length=8, temperature=0.0)
    fast, slow = timed(cached, device), timed(uncached, device)
    same = found["cached"] == found["uncached"]
    print(
        f"512 tokens of {options.batch} rows on {device}: cached {fast:.2f} s, uncached {slow:.2f} s, "
        f"{slow / fast:.1f} times (bar: at least 5), {'equal' if same else 'DIFFERENT'}"
    )


def show(times: dict[str, list[float]], tokens: int) -> None:
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in median.items():
        print(f"{name:14}{1000 * seconds:9.2f} ms a step{tokens / seconds:12,.0f} tokens/s")
    first, second, *_ = median.values()
    if math.isfinite(first):
        print(f"trainer / plain loop {first / second:.3f} in time (bar: at most 1)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("subject", choices=("cpu", "gpu", "gpt2", "decoding"))
    parser.add_argument("--data", type=Path, help="a text file; tinyshakespeare for the bars")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1, help="decoding: texts at once")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--eager", action="store_true", help="gpu: without torch.compile")
    parser.add_argument("--peers", action="store_true", help="gpt2: Hugging Face's as well")
    options = parser.parse_args()
    if options.subject in ("cpu", "gpu") and options.data is None:
        options.data = "python-reference"
    print(describe(machine(("transformers",))))
    {"cpu": cpu, "gpu": gpu, "gpt2": gpt2, "decoding": decoding}[options.subject](options)


if __name__ == "__main__":
    main()
