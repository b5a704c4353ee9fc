"""GPT is Hugging Face's GPT-2 with the same weights; its files go both ways."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from quire.errors import DataError, InputError
from quire.functional.linear_loss import linear_cross_entropy
from quire.models.gpt import GPT, GPT2_SIZES, GPTConfig
from quire.models.registry import build_model, model_spec

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"vocab_size": 29, "context": 10, "layers": 2, "heads": 3, "width": 24}


def tiny(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL, **changes}))


def randomise(model: torch.nn.Module) -> None:
    """Norms of 1 and biases of 0 would hide a wrong place."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)


def tokens(rows: int = 3, length: int = 10, words: int = 29) -> Tensor:
    return torch.randint(0, words, (rows, length), generator=torch.Generator().manual_seed(5))


def hugging_face(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    plain = {"bos_token_id": None, "eos_token_id": None, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**plain, **options})).eval()


# Against Hugging Face -------------------------------------------------------------------------


@pytest.mark.parametrize("size", GPT2_SIZES)
def test_logits_are_those_of_gpt2_in_every_size(size: str) -> None:
    """Width and heads of the size; two layers and few words, because all of them are alike."""
    heads, width = GPT2_SIZES[size].heads, GPT2_SIZES[size].width
    theirs = hugging_face(vocab_size=500, n_embd=width, n_head=heads, n_layer=2, n_positions=32)
    own = GPT(GPTConfig(500, 32, 2, heads, width)).eval()
    own.load_state_dict(theirs.state_dict())
    inputs = tokens(1, 16, 500)
    with torch.no_grad():
        torch.testing.assert_close(own(inputs), theirs(inputs).logits, rtol=0, atol=1e-4)


def test_a_whole_tiny_gpt2_in_values_and_gradients() -> None:
    theirs = hugging_face(vocab_size=29, n_embd=24, n_head=3, n_layer=4, n_positions=10).double()
    randomise(theirs)
    own = tiny(layers=4).double()
    own.load_state_dict(theirs.state_dict())
    inputs = tokens()
    wanted, got = theirs(inputs).logits, own(inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    weights = torch.linspace(-1, 2, got.numel()).double().view_as(got)
    (got * weights).sum().backward()
    (wanted * weights).sum().backward()
    named = dict(theirs.named_parameters())
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad, rtol=1e-8, atol=1e-8, msg=name)


def test_parameters_have_gpt2s_names_shapes_and_number() -> None:
    counts = {
        "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200
    }  # fmt: skip
    for size, count in counts.items():
        with torch.device("meta"):
            assert sum(p.numel() for p in GPT(GPT2_SIZES[size]).parameters()) == count
    state = hugging_face(vocab_size=29, n_embd=24, n_head=3, n_layer=2).state_dict()
    theirs = {name: value.shape for name, value in state.items()}
    own = {name: value.shape for name, value in tiny(context=1024).state_dict().items()}
    assert own == {name: shape for name, shape in theirs.items() if name != "lm_head.weight"}
    assert own["transformer.h.0.attn.c_attn.weight"] == (24, 72)


# Files ----------------------------------------------------------------------------------------


def test_hugging_face_loads_what_is_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kinds: list[dict[str, Any]] = [
        {}, {"tied": False}, {"bias": False, "feedforward": 40}, {"activation": "gelu"}
    ]  # fmt: skip
    for number, changes in enumerate(kinds):
        own = tiny(**changes).eval()
        randomise(own)
        own.to_file(tmp_path / str(number) / "model.safetensors")
        theirs, report = transformers.GPT2LMHeadModel.from_pretrained(
            tmp_path / str(number), output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        with torch.no_grad():
            torch.testing.assert_close(theirs.eval()(tokens()).logits, own(tokens()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_files_of_hugging_face_are_read(tmp_path: Path, tied: bool) -> None:
    theirs = hugging_face(
        vocab_size=29, n_embd=24, n_head=3, n_layer=2, n_positions=10, n_inner=40, tie_word_embeddings=tied,
        layer_norm_epsilon=1e-3,
    )  # fmt: skip
    randomise(theirs)
    theirs.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        own = GPT.from_file(path, dropout=0.3)
        assert own.config == GPTConfig(29, 10, 2, 3, 24, 0.3, tied=tied, feedforward=40, norm_epsilon=1e-3)
        own.eval()
        with torch.no_grad():
            torch.testing.assert_close(own(tokens()), theirs(tokens()).logits, rtol=0, atol=1e-4)


def test_bare_names_masks_and_heads_of_64_without_a_config(tmp_path: Path) -> None:
    own = tiny(width=128, heads=2).eval()
    bare = {name.removeprefix("transformer."): value for name, value in own.state_dict().items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 10, 10).tril().bool()
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    bare["lm_head.weight"] = own.head_weight.clone()
    save_file({name: value.contiguous() for name, value in bare.items()}, tmp_path / "old.safetensors")
    again = GPT.from_file(tmp_path / "old.safetensors").eval()
    assert again.config == own.config
    assert torch.equal(again(tokens()), own(tokens()))


def test_files_are_whole_and_in_half_precision_too(tmp_path: Path) -> None:
    own = tiny().bfloat16()
    own.to_file(tmp_path / "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert all(value.dtype == torch.bfloat16 for value in load_file(tmp_path / "model.safetensors").values())
    again = GPT.from_file(tmp_path)
    for name, value in again.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value.bfloat16(), own.state_dict()[name])


def test_wrong_files_say_what_is_wrong(tmp_path: Path) -> None:
    tiny().to_file(tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())

    def refused(weights: dict[str, Tensor] | None = None, **described: Any) -> str:
        if weights is not None:
            save_file(weights, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config | described))
        with pytest.raises(DataError) as caught:
            GPT.from_file(tmp_path)
        assert "expected:" in str(caught.value)
        assert "fix:" in str(caught.value)
        return str(caught.value)

    assert "activation_function is 'swish'" in refused(activation_function="swish")
    assert "scale_attn_by_inverse_layer_idx is True" in refused(scale_attn_by_inverse_layer_idx=True)
    assert "model_type is 'llama'" in refused(model_type="llama")
    assert "5 heads for a width of 24" in refused(n_head=5)
    part = {name: value for name, value in weights.items() if "h.1.mlp.c_fc" not in name}
    assert "without transformer.h.1.mlp.c_fc.weight" in refused(part)
    assert "with unknown transformer.extra" in refused({**weights, "transformer.extra": torch.zeros(1)})
    assert "(7,) instead of (24,)" in refused({**weights, "transformer.ln_f.weight": torch.zeros(7)})
    assert "without transformer.wte.weight" in refused({"features.weight": torch.zeros(2, 2)})
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("[1, 2")
    with pytest.raises(DataError, match=r"config.json: no JSON object"):
        GPT.from_file(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(DataError, match="0 heads for a width of 24"):
        GPT.from_file(tmp_path)
    with pytest.raises(DataError, match="no such file"):
        GPT.from_file(tmp_path / "none.safetensors")
    with pytest.raises(InputError, match=r"write model\.safetensors"):
        tiny().to_file(tmp_path / "model.bin")


# The model ------------------------------------------------------------------------------------


def test_first_values_are_gpt2s() -> None:
    model = tiny(width=192, layers=8, vocab_size=500)
    state = model.state_dict()
    for name, value in state.items():
        if value.dim() == 2:
            wanted = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
            assert value.std().item() == pytest.approx(wanted, rel=0.05), name
        else:
            assert torch.equal(value, torch.full_like(value, float("ln" in name and "weight" in name))), name
    # A fresh model knows nothing.
    target = torch.randint(0, 500, (80,))
    loss = F.cross_entropy(model(tokens(8)).flatten(0, 1), target)
    assert abs(loss.item() - math.log(500)) < 0.2


def test_a_place_does_not_see_what_follows() -> None:
    model = tiny().double()
    changed = tokens()
    changed[:, 6:] = (changed[:, 6:] + 1) % 29
    one, two = model(tokens()), model(changed)
    torch.testing.assert_close(one[:, :6], two[:, :6])
    assert (one[:, 6:] - two[:, 6:]).abs().amin() > 0


def test_features_and_head_give_the_loss_without_logits() -> None:
    for tied in (True, False):
        model = tiny(tied=tied).double()
        target = tokens().roll(-1, 1)
        target[:, -1] = -100
        plain = F.cross_entropy(model(tokens()).flatten(0, 1), target.flatten())
        fused = linear_cross_entropy(model.features(tokens()), model.head_weight, target, chunk=4)
        torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)
        wanted = torch.autograd.grad(plain, list(model.parameters()))
        for a, b in zip(torch.autograd.grad(fused, list(model.parameters())), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_checkpointing_changes_memory_and_not_gradients(rate: float) -> None:
    found, saved = [], []
    for again in (False, True):
        model = tiny(checkpoint=again, dropout=rate, layers=4)
        bytes_kept = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal bytes_kept
            bytes_kept += tensor.numel() * tensor.element_size()
            return tensor

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens()).square().sum()
        saved.append(bytes_kept)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert saved[1] < saved[0] / 2


def test_attention_maps_are_causal_weights() -> None:
    model = tiny().double().eval()
    maps = model.attention_maps(tokens())
    assert maps.shape == (2, 3, 3, 10, 10)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 3, 3, 10).double())
    assert not maps.triu(1).any()
    # The first layer by hand: softmax of q·k/√8 over the places up to each.
    block = model.transformer.h[0]
    x = block.ln_1(model.transformer.wte(tokens()) + model.transformer.wpe(torch.arange(10)))
    q, k, _ = (x @ block.attn.c_attn.weight + block.attn.c_attn.bias).split(24, -1)
    scores = (q[1, 7, 8:16] * k[1, :8, 8:16]).sum(-1) / math.sqrt(8)
    torch.testing.assert_close(maps[0, 1, 1, 7, :8], scores.softmax(0))


def test_batch_of_one_and_no_tokens() -> None:
    model = tiny()
    for shape in ((1, 1), (1, 10), (2, 0), (0, 4)):
        logits = model(torch.zeros(shape, dtype=torch.long))
        assert logits.shape == (*shape, 29)
        logits.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_dropout_acts_in_training_only() -> None:
    model = tiny(dropout=0.5)
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


def test_half_precision_compiling_and_export() -> None:
    model = tiny().eval()
    inputs, wanted = tokens(), model(tokens())
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(inputs).float() - wanted).norm() < 0.05 * wanted.norm()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(inputs), wanted)
    model.train()
    model.transformer.checkpoint = True
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(inputs), wanted)
    model.eval()
    program = torch.export.export(model, (inputs,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.testing.assert_close(program.module()(inputs[:2]), wanted[:2])


def test_the_model_is_rebuilt_from_its_description() -> None:
    model = tiny(tied=False, bias=False, feedforward=7)
    again = build_model(json.loads(json.dumps(model_spec(model))))
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(tokens()), model(tokens()))
    assert not any(name.endswith("bias") for name in model.state_dict())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"heads": 5}, "5 heads for a width of 24"),
        ({"activation": "gelu_neu"}, "did you mean 'gelu_new'?"),
        ({"layers": 0}, "layers is 0"),
        ({"feedforward": -1}, "feedforward is -1"),
        ({"dropout": 1.0}, "a probability in [0, 1)"),
    ],
)
def test_a_wrong_config_says_so(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        tiny(**changes)
    assert text in str(caught.value)


def test_wrong_tokens_say_so() -> None:
    with pytest.raises(InputError, match="at most 10, the model's context"):
        tiny()(tokens(1, 11))
    with pytest.raises(InputError, match="integers"):
        tiny()(torch.zeros(2, 3))
    with pytest.raises(InputError, match="at least one token"):
        tiny().prefill(tokens(2, 0))
    _, cache = tiny().prefill(tokens(2, 10))
    with pytest.raises(InputError, match="a cache of 10 tokens"):
        tiny().advance(tokens(2, 1)[:, 0], cache)


def test_a_head_that_is_not_the_embedding_is_not_dropped() -> None:
    model = tiny()
    foreign = {**model.state_dict(), "lm_head.weight": model.head_weight + 1}
    with pytest.raises(RuntimeError, match="lm_head"):
        model.load_state_dict(foreign)
    inside = torch.nn.ModuleDict({"inner": tiny()})
    given = {f"inner.{k}": v for k, v in {**model.state_dict(), "lm_head.weight": model.head_weight}.items()}
    inside.load_state_dict(given)


@pytest.mark.gpu
def test_the_gpu_gives_the_same() -> None:
    model, inputs = tiny().double(), tokens()
    wanted = model(inputs)
    torch.testing.assert_close(model.cuda()(inputs.cuda()).cpu(), wanted)
