"""Every entry of the sheet: its proof passes, and the same proof rejects a wrong version."""

from __future__ import annotations

import pytest
import torch

import quire.sheet  # noqa: F401  registers all entries
from quire.sheet.registry import ENTRIES, gap

REQUIRED = {
    "classical": "k-means k-means++ pca pca-svd pca-randomised explained-variance pca-inverse mixture "
    "mixture-em information-criteria",
    "autoencode": "plain linear sparse denoising contractive reconstruction",
    "variational": "reparameterisation kl decoders elbo importance-bound vae conditional semi-supervised",
    "adversarial": "discriminator generator optimal-discriminator jensen-shannon conditional players",
    "maths": "norms hadamard derivative-rules log-rules bayes convexity jensen gaussian-mle divergences "
    "convolution-algebra curse-of-dimensionality graphical-model",
    "dense": "layer mlp parameter-count linear-regions universal-approximation output-distributions "
    "temperature linear-limits feature-order one-hot",
    "activation": "sigmoid arctan tanh relu leaky-relu relu6 softplus log-sigmoid softmax log-softmax "
    "softmin linear",
    "loss": "quadratic-cost mse half-squared-error l1 smooth-l1 binary-cross-entropy "
    "binary-cross-entropy-with-logits multi-label cross-entropy nll "
    "gaussian-nll kl margin-ranking triplet-margin cosine-embedding info-nce "
    "softmax-gradient logistic-gradient perplexity",
    "backprop": "bp1 bp2 bp3 bp4 graph bptt",
    "optimise": "gradient-descent sgd momentum adam weight-decay l1 schedule-linear schedule-power "
    "schedule-exponential schedule-warmup schedule-cosine clipping accumulation checkpointing",
    "convergence": "quadratic-model spectrum",
    "initialise": "he xavier orthogonal gains recurrent",
    "regularise": "l1 l2 early-stopping augmentation-images augmentation-tabular augmentation-text noise "
    "dropout bagging transfer multi-task masked contrastive semi-supervised",
    "generalise": "bias-variance monte-carlo k-fold polynomial",
    "normalise": "standardise batch-norm moving-average layer-norm pre-norm post-norm",
    "convolve": "cross-correlation convolution pointwise pooling unpooling output-size parameter-count "
    "receptive-field separable equivariance",
    "convnets": "lenet alexnet vgg googlenet resnet resnext cifar-resnet densenet residual wiring "
    "class-activation-map",
    "recurrent": "elman lstm gru gru-conventions stacked-bidirectional variable-lengths carried-state "
    "orthogonal language-model",
    "seq2seq": "likelihood teacher-forcing additive-attention greedy temperature beam exact-match",
    "attention": "pooling nadaraya-watson scoring masked-softmax multi-head bmm equivariance complexity",
    "position": "sinusoidal learned relative-dot-product shift-matrix concatenate-project",
    "transformer": "encoder decoder encoder-decoder feed-forward gpt kv-cache temperature top-k top-p",
    "tune": "full lora lora-merge lora-convolution lora-recurrent lora-attention lora-stack nf4 "
    "double-quantisation qlora",
    "cost": "parameters shapes forward backward transformer attention memory largest-batch step-time",
    "detect": "iou generalised-iou default-boxes matching box-coding multibox nms ssd",
    "measure": "accuracy precision recall f1 confusion-matrix precision-recall-curve average-precision "
    "coco-ap bleu perplexity",
}
ERRATA = {
    "maths/norms", "maths/hadamard", "maths/log-rules", "maths/convolution-algebra", "dense/parameter-count",
    "activation/log-softmax", "optimise/gradient-descent", "optimise/sgd", "initialise/he",
    "regularise/dropout", "convolve/separable", "attention/masked-softmax", "attention/bmm",
}  # fmt: skip
PICTURES = {
    "maths/curse-of-dimensionality", "dense/linear-regions", "dense/universal-approximation",
    "backprop/graph", "initialise/he", "generalise/bias-variance", "generalise/polynomial",
    "convolve/receptive-field", "autoencode/plain", "autoencode/contractive", "variational/vae",
    "adversarial/optimal-discriminator", "convergence/quadratic-model", "attention/nadaraya-watson",
    "attention/complexity", "position/sinusoidal", "classical/mixture", "detect/default-boxes",
}  # fmt: skip


def test_every_entry_of_the_finished_chapters_is_there() -> None:
    wanted = {f"{chapter}/{name}" for chapter, names in REQUIRED.items() for name in names.split()}
    assert wanted - set(ENTRIES) == set()


def test_the_errata_and_pictures_are_there() -> None:
    assert {id for id in ERRATA if not ENTRIES[id].erratum} == set()
    assert {id for id in PICTURES if ENTRIES[id].picture is None} == set()
    for chapter in ("activation", "optimise"):
        assert any(e.picture for _, e in ENTRIES.items() if e.chapter == chapter), chapter


LONGER = {"cost/largest-batch", "cost/memory", "variational/vae", "seq2seq/temperature"}
"""Proofs of a second or more; what they prove is compared with other oracles in tests/doctor, tests/tasks and
tests/functional too, which `make quick` tries."""


@pytest.mark.parametrize(
    "id", [pytest.param(id, marks=pytest.mark.slow if id in LONGER else ()) for id in ENTRIES]
)
def test_the_proof_passes_and_can_fail(id: str) -> None:
    entry = ENTRIES[id]
    verdict = entry.verify()
    assert verdict.passed, verdict
    assert entry.sabotage() > entry.tolerance, "the proof accepts a wrong version"
    assert entry.wrong != entry.code


@pytest.mark.parametrize("id", list(ENTRIES))
def test_an_entry_has_formula_title_and_public_code(id: str) -> None:
    entry = ENTRIES[id]
    assert entry.title
    assert entry.latex.count("{") == entry.latex.count("}")
    for location in entry.locations():
        assert location.startswith("quire."), location
        assert "quire/sheet/" not in location, "an entry's code is what users call, not a helper of the proof"


@pytest.mark.slow
@pytest.mark.parametrize("id", [id for id, entry in ENTRIES.items() if entry.picture])
def test_pictures_are_drawn_with_titles_and_axes(id: str) -> None:
    from quire.report.style import to_svg

    picture = ENTRIES[id].picture
    assert picture is not None
    figure = picture()
    titled = [axes for axes in figure.axes if axes.get_title() or axes.get_xlabel() or axes.get_ylabel()]
    assert titled or figure.get_suptitle()
    assert to_svg(figure).count("<svg") == 1


def test_gap_does_not_hide_errors() -> None:
    assert gap(torch.tensor(1.0, dtype=torch.float64), 1.0) == 0
    assert gap(float("nan"), 1.0) == float("inf")
    assert gap(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert gap(1.0 + 1e-9, 1.0) == pytest.approx(1e-9, rel=1e-3)
    assert gap(2e6, 1e6) == pytest.approx(1.0)
