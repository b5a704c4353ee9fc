"""First and second derivatives of the public functions of quire.functional, against differences.

Public is each function without a leading underscore in a module of `quire.functional`. It stands in the table
with inputs, or among the exceptions with a reason.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._pytree import tree_flatten, tree_unflatten

import quire.functional
from tests.faults.gradients_table import CASES, GENERATOR, Case, Draw, name_of

EXCEPTED: dict[str, str] = {
    "of whole numbers, words or plain numbers: costs, sizes, counts, options": """
        bleu_score.bleu bleu_score.bleu_from_statistics bleu_score.bleu_statistics bleu_score.n_grams
        bleu_score.sentence_bleu coco.coco_curves coco.coco_measures coco.evenly components.rounding
        convolutions.as_sizes costs.attention_bytes costs.attention_flops costs.backward_flops
        costs.convolution_flops costs.dense_flops costs.roofline_seconds costs.training_bytes
        costs.transformer_flops detect.count_positives detect.default_boxes detect.default_scales
        feedforward.one_hot feedforward.parameter_count feedforward.scalar_parameter_count
        few_labels.pair_masks geometry.convolution_parameter_count geometry.output_size
        image_augment.colour_values initialise.fans initialise.gain masks.causal_mask masks.length_mask
        maths.points_for_resolution maths.squared_distance_spread measures.accuracy
        measures.confusion_matrix measures.f1 measures.precision measures.recall
        mixtures.akaike_information mixtures.bayesian_information mixtures.covariance_shape
        mixtures.mixture_parameter_count nf4.dynamic_float nf4.make_tables nf4.nf4_bytes
        nf4.normal_float normalise.batch_share optimise.effective_step position.frequencies
        position.shift_matrix receptive.receptive_field recurrent.valid_steps reduction.count_elements
        reduction.count_samples regions.sawtooth regularise.dropout_masks regularise.ensemble_variance
        sampling.full_precision scatter.checked_columns scatter.chunk_rows scatter.share_lost
        scatter.slab_rows schedules.cosine schedules.exponential schedules.linear schedules.power
        schedules.step_size schedules.warmup streaming.block_size streaming.shared_batch
        streaming.slices tally.search_time""",
    "gives whole numbers, truth values, Python numbers or an answer in words": """
        attention.weight_kind boxes.valid_boxes components.components_for_share
        convexity.convex_set_violation convexity.convexity_violation detect.fit_scales
        detect.hard_negatives detect.leave_out_crowds detect.match_boxes feedforward.from_one_hot
        generalise.generalisation_error generalise.monte_carlo geometry.equivariance_error
        kernel_pooling.nearest_key measures.interval_coverage measures.measures_from_confusion
        measures.measures_from_sums nearest.nearest_centres nf4.nearest_code nf4.quantise_nf4
        nf4.quantise_scales quadratic.best_step_size quadratic.condition_number quadratic.is_stable
        quadratic.slowest_rate quadratic.stable_step_size quadratic.steepest_step_size
        regions.line_regions regions.plane_regions sampling.beam_search sampling.greedy
        screen.by_differences screen.decide suppression.nms suppression.suppress""",
    "constant in pieces: its derivative is 0 wherever there is one": """
        activations.leaky_relu_derivative activations.linear_derivative activations.relu6_derivative
        activations.relu_derivative attention.uniform_weights measures.average_precision
        measures.precision_recall_curve""",
    "gives the best key, and on purpose the gradient of masked_softmax": "attention.hard_softmax",
    "draws numbers, of which none depends on a tensor's values in a smooth way": """
        adversarial.random_directions augment.token_drop augment.token_mask augment.token_swap
        autoencode.hide_places clusters.kmeans_plusplus clusters.random_rows generalise.k_fold
        generalise.resample_rows image_augment.chosen image_augment.draw_windows image_augment.integers
        maths.simulated_distance_spread optimise.minibatches reduction.normal reduction.uniform
        regularise.bootstrap regularise.random_mask sampling.sample variational.row_normal
        variational.row_uniform warp.draw_warps""",
    "fills a parameter in place, without a graph": """
        initialise.he_ initialise.initialise_ initialise.orthogonal_ initialise.xavier_
        recurrent.orthogonal_gates_""",
    "gives gradients or measurements, without a graph of their own": """
        evidence.activation_maps evidence.evidence_maps evidence.grad_cam initialise.variance_by_layer
        memory.allocated_bytes memory.peak_bytes optimise.accumulate optimise.accumulate_coupled
        optimise.saved_bytes receptive.receptive_field_of recurrent.detach_state recurrent.gate_blocks
        recurrent.gate_singular_values""",
    "fits, by steps that are not recorded": """
        few_labels.softmax_regression generalise.bias_variance generalise.cross_validate
        generalise.degree_curve""",
    "learning by statistics, in buffers, by numpy or by a kernel; pca_svd has derivatives": """
        clusters.step_at_once components.beside components.centred_image components.filtered
        components.leading_eigenpairs components.moved components.nystrom components.pairs_in_basis
        components.pca_covariance components.pca_randomised components.products_in
        components.sharper_view components.spectrum mixture_chunks.fill mixture_chunks.normalise
        mixture_chunks.products_of mixture_chunks.sweep_chunks mixture_chunks.sweep_on_host
        mixture_sweeps.mixture_sweep mixture_sweeps.product_moments mixture_sweeps.quadratic_features
        nearest.cluster_sums nearest.running_sums scatter.as_array scatter.column_sums
        scatter.first_view scatter.moments scatter.power_sums scatter.squares scatter.without_shift
        screen.screen tally.power_sums""",
    "rounds to float32": "mixture_sweeps.frame_of nf4.dequantise_nf4",
    "checks, or says which way is taken": """
        attention.check_values attention.check_widths boxes.require_boxes boxes.require_valid
        components.check_components image_augment.check_images mixture_sweeps.takes_kernels
        modes.has_hooks nearest.takes_kernels recurrent.check_convention recurrent.check_lengths
        reduction.require_positive reduction.require_same_shape regularise.check_rate
        small_layers.is_small streaming.check_backend tally.takes through_time.can_run
        through_time.transformed""",
    "of modules, functions, threads or memory, not of tensors": """
        evidence.recorded memory.storages modes.evaluating moves.make_move
        reduction.loss regularise.freeze screen.pieces threads.one_thread threads.share_rows
        threads.together threads.workers""",
}
"""Why a function is not in the table."""


# Whether each has its place -----------------------------------------------------------------------


def public() -> set[str]:
    """module.function for each public function."""
    modules = [
        importlib.import_module(f"quire.functional.{found.name}")
        for found in pkgutil.iter_modules(quire.functional.__path__)
    ]
    return {
        name_of(value)
        for module in modules
        for key, value in vars(module).items()
        if inspect.isfunction(value) and not key.startswith("_") and value.__module__ == module.__name__
    }


def misplaced(functions: set[str]) -> list[str]:
    """What is to be done so that each of these functions stands in the table or has a reason not to."""
    tried = {case.name for case in CASES}
    reasons = Counter(name for names in EXCEPTED.values() for name in names.split())
    left = [
        f"{name} has no row: add inputs for it to tests/faults/gradients_table.py or, if it has no "
        "derivative, its name under a reason to EXCEPTED in tests/faults/gradients.py"
        for name in sorted(functions - tried - set(reasons))
    ]
    gone = [
        f"{name} is no public function: take it out" for name in sorted((tried | set(reasons)) - functions)
    ]
    both = [f"{name} has a row and a reason: take one out" for name in sorted(tried & set(reasons))]
    twice = [f"{name} has several reasons: leave one" for name, count in reasons.items() if count > 1]
    return left + gone + both + twice


# Checks -------------------------------------------------------------------------------------------


def prepare(case: Case) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """A function of the tensors to differentiate alone, and these tensors."""
    call = case.draw(Draw(case.name))
    leaves, shape = tree_flatten((call.arguments, call.options))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    function = call.by or case.function

    def apply(*inputs: Tensor) -> tuple[Tensor, ...]:
        filled = [torch.Generator().manual_seed(0) if leaf is GENERATOR else leaf for leaf in leaves]
        for place, value in zip(places, inputs, strict=True):
            filled[place] = value
        arguments, options = tree_unflatten(filled, shape)
        found, _ = tree_flatten(function(*arguments, **options))
        return tuple(part for part in found if isinstance(part, Tensor) and part.is_floating_point())

    return apply, [leaves[place] for place in places]


def check(case: Case) -> None:
    """With the tolerances of gradcheck, and of its second order."""
    everything, inputs = prepare(case)
    assert all(value.dtype == torch.float64 for value in inputs)
    has_gradient = [part.requires_grad for part in everything(*inputs)]
    assert any(has_gradient), "nothing of the result has a gradient"

    def apply(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(part for part, has in zip(everything(*values), has_gradient, strict=True) if has)

    near = everything(*(value.detach() + 1e-6 for value in inputs))
    for part, moved, has in zip(everything(*inputs), near, has_gradient, strict=True):
        assert has or torch.equal(part, moved), "a part of the result has lost its gradient"
    gradcheck(apply, inputs)
    if not case.once:
        gradgradcheck(apply, inputs)
        # A backward written by hand may go another way where it is to be differentiated again, and of that
        # way alone the second order takes differences.
        outputs = apply(*inputs)
        weights = [torch.rand_like(part) for part in outputs]
        options: dict[str, bool] = {"retain_graph": True, "allow_unused": True}
        first = torch.autograd.grad(outputs, inputs, weights, **options)
        again = torch.autograd.grad(outputs, inputs, weights, **options, create_graph=True)
        torch.testing.assert_close([*again], [*first], rtol=1e-9, atol=1e-9)


def second_derivative(case: Case) -> None:
    """What a penalty of the gradient asks for; nothing reaches the first backward but constants."""
    apply, inputs = prepare(case)
    found = [part for part in apply(*inputs) if part.requires_grad]
    total = torch.stack([part.sum() for part in found]).sum()
    gradients = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True)
    penalty = torch.stack([g.square().sum() for g in gradients if g is not None]).sum()
    torch.autograd.grad(total + penalty, inputs, allow_unused=True)
