"""The Transformer is PyTorch's with the same weights, and its steps are its forward pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.errors import InputError
from quire.models.generate import Stepwise, generate
from quire.models.registry import build_model, model_spec
from quire.models.transformer import (
    BlockConfig,
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    Transformer,
    TransformerClassifier,
    TransformerClassifierConfig,
    TransformerConfig,
)

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"width": 12, "heads": 3, "layers": 2, "feedforward": 20, "dropout": 0.0}
KINDS = [(norm, activation) for norm in ("pre", "post") for activation in ("relu", "gelu")]
kinds = pytest.mark.parametrize(("norm", "activation"), KINDS, ids=["-".join(kind) for kind in KINDS])


def plain_peer(norm: str = "pre", activation: str = "relu") -> nn.Transformer:
    options: dict[str, Any] = {"dropout": 0.0, "activation": activation, "batch_first": True}
    options["norm_first"] = norm == "pre"
    encoder = nn.TransformerEncoderLayer(12, 3, 20, **options)
    decoder = nn.TransformerDecoderLayer(12, 3, 20, **options)
    return nn.Transformer(
        12, 3, batch_first=True,
        custom_encoder=nn.TransformerEncoder(encoder, 2, nn.LayerNorm(12), enable_nested_tensor=False),
        custom_decoder=nn.TransformerDecoder(decoder, 2, nn.LayerNorm(12)),
    ).double()  # fmt: skip


def peer(norm: str, activation: str) -> nn.Transformer:
    made = plain_peer(norm, activation)
    for parameter in made.parameters():  # norms and biases of 1 and 0 would hide a wrong place
        nn.init.uniform_(parameter, -0.5, 0.5)
    return made


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    return list(torch.autograd.grad((output * weights).sum(), inputs, retain_graph=True))


def tiny(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    options = {"source_vocab": 7, "target_vocab": 6, **SMALL, **changes}
    return Transformer(TransformerConfig(**options)).double()


def classifier(**changes: Any) -> TransformerClassifier:
    torch.manual_seed(0)
    options = {"vocab_size": 9, "num_classes": 4, **SMALL, **changes}
    return TransformerClassifier(TransformerClassifierConfig(**options)).double()


# Against PyTorch ------------------------------------------------------------------------------


@kinds
def test_encoder_and_decoder_are_those_of_pytorch(norm: Any, activation: Any) -> None:
    theirs = peer(norm, activation)
    config = BlockConfig(**SMALL, norm=norm, activation=activation)
    own = nn.ModuleDict({"encoder": Encoder(config), "decoder": Decoder(config)}).double()
    own.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(own.state_dict())
    source, target = random(3, 5, 12), random(3, 4, 12)
    padding = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 1, 0]]).bool()
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    wanted = theirs(
        source, target, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding
    )
    mask = ~padding[:, None]
    got = own["decoder"](target, own["encoder"](source, mask), None, mask)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    places = [source, target]
    for a, b in zip(
        gradients(got, *places, *own.parameters()),
        gradients(wanted, *places, *theirs.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@kinds
def test_layers_take_boolean_and_additive_masks(norm: Any, activation: Any) -> None:
    theirs = peer(norm, activation)
    config = BlockConfig(**SMALL, norm=norm, activation=activation)
    encoder, decoder = EncoderLayer(config).double(), DecoderLayer(config).double()
    encoder.load_state_dict(theirs.encoder.layers[0].state_dict())
    decoder.load_state_dict(theirs.decoder.layers[0].state_dict())
    x, memory = random(2, 5, 12), random(2, 3, 12)
    added = torch.randn(5, 5, dtype=torch.float64)
    forbidden = torch.rand(5, 5) < 0.4
    forbidden.fill_diagonal_(False)
    for mine, given in ((added, added), (~forbidden, forbidden)):
        torch.testing.assert_close(encoder(x, mine), theirs.encoder.layers[0](x, given))
        wanted = theirs.decoder.layers[0](x, memory, tgt_mask=given)
        torch.testing.assert_close(decoder(x, memory, mine, causal=False), wanted)
    triangle = torch.ones(5, 5).triu(1).bool()
    wanted = theirs.decoder.layers[0](x, memory, tgt_mask=triangle | forbidden)
    torch.testing.assert_close(decoder(x, memory, ~forbidden), wanted)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_the_whole_model_is_pytorchs_between_embedding_and_readout(positions: Any) -> None:
    model = tiny(positions=positions, context=9)
    theirs = plain_peer()
    weights = {k: v for k, v in model.state_dict().items() if k.startswith(("encoder.", "decoder."))}
    theirs.load_state_dict(weights)
    source = torch.tensor([[3, 4, 5, 6], [5, 6, 0, 0]])
    target = torch.tensor([[1, 4, 3], [1, 5, 5]])

    def embedded(tokens: Tensor, part: Any) -> Tensor:
        places = []
        for n in range(tokens.shape[1]):
            row = part.position.weight[n] if positions == "learned" else torch.empty(12).double()
            if positions == "sinusoidal":
                for i in range(0, 12, 2):
                    angle = n / 10_000 ** (i / 12)
                    row[i], row[i + 1] = math.sin(angle), math.cos(angle)
            places.append(row)
        return part.weight[tokens] * math.sqrt(12) + torch.stack(places)

    padding = source == 0
    hidden = theirs(
        embedded(source, model.source_embedding), embedded(target, model.target_embedding),
        tgt_mask=torch.ones(3, 3).triu(1).bool(),
        src_key_padding_mask=padding, memory_key_padding_mask=padding,
    )  # fmt: skip
    wanted = hidden @ model.output.weight.t() + model.output.bias
    torch.testing.assert_close(model(source, target), wanted, rtol=1e-10, atol=1e-10)


def test_first_values_are_xaviers_and_embeddings_have_variance_one() -> None:
    config = TransformerConfig(source_vocab=500, target_vocab=500, width=64, heads=2, layers=1)
    model = Transformer(config)
    embedded = model.source_embedding.weight * 8
    assert embedded.std().item() == pytest.approx(1, rel=0.03)
    weight = model.encoder.layers[0].linear1.weight
    assert weight.abs().max() <= math.sqrt(6 / (64 + 512))
    assert not model.encoder.layers[0].self_attn.in_proj_bias.any()


# Behaviour ------------------------------------------------------------------------------------


SOURCE = torch.tensor([[3, 4, 5, 6, 3], [5, 6, 0, 0, 0], [0, 0, 0, 0, 0]])
TARGET = torch.tensor([[1, 4, 3, 5], [1, 5, 5, 2], [1, 3, 4, 4]])


def test_a_place_does_not_see_what_follows() -> None:
    model = tiny()
    other = TARGET.clone()
    other[:, 2:] = torch.tensor([0, 3])
    one, two = model(SOURCE, TARGET), model(SOURCE, other)
    torch.testing.assert_close(one[:, :2], two[:, :2])
    assert not torch.allclose(one[:, 2:], two[:, 2:])


def test_padding_of_the_source_changes_nothing() -> None:
    model = tiny()
    wider = torch.cat([SOURCE, torch.zeros(3, 2, dtype=torch.long)], 1)
    torch.testing.assert_close(model(wider, TARGET), model(SOURCE, TARGET))
    torch.testing.assert_close(model(SOURCE[1:2, :2], TARGET[1:2]), model(SOURCE, TARGET)[1:2])


def test_padding_of_the_target_is_not_seen() -> None:
    model = tiny(target_padding=0)
    gap = torch.tensor([[1, 0, 3, 5], [0, 0, 3, 2], [1, 3, 4, 4]])
    # As if the padding were masked by hand.
    memory_mask = (SOURCE != 0)[:, None]
    memory = model.encoder(model.source_embedding(SOURCE), memory_mask)
    allowed = (gap != 0)[:, None] & torch.ones(4, 4).tril().bool()
    hidden = model.decoder(model.target_embedding(gap), memory, allowed, memory_mask, causal=False)
    torch.testing.assert_close(model(SOURCE, gap), model.output(hidden))
    assert not torch.allclose(model(SOURCE, gap), tiny()(SOURCE, gap))


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm": "post", "positions": "learned", "context": 5}, {"target_padding": 0}, {"padding": None}],
    ids=str,
)
def test_steps_are_the_forward_pass(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    target = TARGET.clone()
    target[1, 1] = 0
    wanted = model(SOURCE, target)
    state = model.encode(SOURCE)
    for place in range(4):
        logits, state = model.step(target[:, place], state)
        torch.testing.assert_close(logits, wanted[:, place], rtol=1e-10, atol=1e-12)


def test_a_state_can_go_on_in_several_ways() -> None:
    model = tiny().eval()
    with torch.no_grad():
        _, state = model.step(TARGET[:, 0], model.encode(SOURCE))
        _, left = model.step(torch.tensor([3, 3, 3]), state)
        _, right = model.step(torch.tensor([4, 4, 4]), state)
        for token, after in ((3, left), (4, right)):
            prefix = torch.cat([TARGET[:, :1], torch.full((3, 1), token), TARGET[:, 2:3]], 1)
            logits, _ = model.step(TARGET[:, 2], after)
            torch.testing.assert_close(logits, model(SOURCE, prefix)[:, -1])


def test_likelihoods_of_all_short_targets_sum_to_one() -> None:
    model = tiny(target_vocab=3, begin=1, end=2)

    def mass(state: Any, token: Tensor, left: int) -> Tensor:
        """Of all continuations that end, or have `left` more tokens."""
        logits, state = model.step(token, state)
        p = logits.softmax(-1)
        if left == 1:
            return p.sum(-1)
        goes_on = [p[:, v] * mass(state, torch.full_like(token, v), left - 1) for v in (0, 1)]
        return p[:, 2] + goes_on[0] + goes_on[1]

    total = mass(model.encode(SOURCE), torch.ones(3, dtype=torch.long), 4)
    torch.testing.assert_close(total, torch.ones(3, dtype=torch.float64))


def test_generating_from_a_source() -> None:
    model = tiny().eval()
    machine = Stepwise(model.step, model.encode(SOURCE), rows=0)
    rows = generate(machine, [[1, 3]] * 3, length=5, temperature=0)
    for row in range(3):
        tokens = [1, 3]
        for _ in range(5):
            tokens.append(int(model(SOURCE[row : row + 1], torch.tensor([tokens]))[0, -1].argmax()))
        assert rows[row].tokens == tokens[2:]
    with pytest.raises(InputError, match="a state that grows"):
        generate(machine, [[1], [1, 4], [1]], length=5)


def test_attention_maps_are_weights_over_real_tokens() -> None:
    model = tiny().eval()
    logits, weights = model.attend(SOURCE, TARGET)
    torch.testing.assert_close(logits, model(SOURCE, TARGET))
    assert weights.shape == (3, 4, 5)
    assert not weights[1, :, 2:].any()
    torch.testing.assert_close(weights.sum(-1)[:2], torch.ones(2, 4).double())
    assert not weights[2].any()


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_nothing_but_padding_and_no_tokens_give_numbers(norm: Any, rate: float) -> None:
    for source in (SOURCE, SOURCE[2:], SOURCE[:1, :0], SOURCE[:, :0], SOURCE[:0]):
        for target in (TARGET[: len(source)], TARGET[: len(source), :1], TARGET[: len(source), :0]):
            model = tiny(norm=norm, dropout=rate, target_padding=5)
            logits = model(source, torch.where(target == 4, 5, target))
            assert logits.shape == (*target.shape, 6)
            assert logits.isfinite().all()
            logits.square().sum().backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        stepped, _ = model.step(TARGET[: len(source), 0], model.encode(source))
        assert stepped.isfinite().all()
    model = tiny(target_padding=1).eval()
    all_padding = torch.ones(1, 3, dtype=torch.long)
    assert model(SOURCE[2:], all_padding).isfinite().all()


def test_dropout_acts_in_training_only() -> None:
    model = tiny(dropout=0.5)
    assert not torch.equal(model(SOURCE, TARGET), model(SOURCE, TARGET))
    model.eval()
    assert torch.equal(model(SOURCE, TARGET), model(SOURCE, TARGET))


def test_half_precision_and_compiling() -> None:
    model = tiny().float().eval()
    wanted = model(SOURCE, TARGET)
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(SOURCE, TARGET).float() - wanted).norm() < 0.05 * wanted.norm()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(SOURCE, TARGET), wanted)
    rows = torch.export.Dim("rows")
    program = torch.export.export(model, (SOURCE, TARGET), dynamic_shapes=({0: rows}, {0: rows}))
    torch.testing.assert_close(program.module()(SOURCE[:2], TARGET[:2]), wanted[:2])


# Classifier -----------------------------------------------------------------------------------


def test_the_classifier_by_hand() -> None:
    model = classifier()
    tokens = torch.tensor([[3, 4, 5], [6, 0, 0]])
    states = model.encoder(model.embedding(tokens[:1]))
    wanted = model.output(states.mean(1))
    torch.testing.assert_close(model(tokens)[:1], wanted)
    alone = model.output(model.encoder(model.embedding(tokens[1:, :1]))[:, 0])
    torch.testing.assert_close(model(tokens)[1:], alone)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_classifier_of_padding_alone_and_of_no_tokens(norm: Any) -> None:
    model = classifier(norm=norm)
    for tokens in (torch.zeros(1, 3, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)):
        logits = model(tokens)
        torch.testing.assert_close(logits, model.output.bias.expand(len(tokens), -1))
        logits.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_classifier_exports_with_any_number_of_rows() -> None:
    model = classifier().eval()
    tokens = torch.tensor([[3, 4, 5, 0], [6, 0, 0, 0], [1, 2, 3, 4]])
    program = torch.export.export(model, (tokens,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.testing.assert_close(program.module()(tokens[:2]), model(tokens)[:2])


# Descriptions and mistakes --------------------------------------------------------------------


def test_models_are_rebuilt_from_their_descriptions() -> None:
    for model, inputs in ((tiny(norm="post"), (SOURCE, TARGET)), (classifier(), (SOURCE,))):
        again = build_model(model_spec(model)).double()
        again.load_state_dict(model.state_dict())
        torch.testing.assert_close(again(*inputs), model(*inputs))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"norm": "before"}, "unknown norm 'before'"),
        ({"activation": "rellu"}, "did you mean 'relu'?"),
        ({"positions": "rotary"}, "unknown positions 'rotary'"),
        ({"layers": 0}, "layers is 0"),
        ({"dropout": 1.0}, "a probability in [0, 1)"),
        ({"heads": 5}, "5 heads for a width of 12"),
        ({"end": 6}, "a token of the vocabulary, 0 to 5"),
        ({"padding": 7}, "padding is 7"),
    ],
)
def test_a_wrong_config_says_so(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        tiny(**changes)
    assert text in str(caught.value)
    assert "expected:" in str(caught.value)


def test_wrong_inputs_say_so() -> None:
    with pytest.raises(InputError, match="integers"):
        tiny()(SOURCE.float(), TARGET)
    with pytest.raises(InputError, match="places 0 to 2"):
        tiny(positions="learned", context=3)(SOURCE[:, :3], TARGET)
