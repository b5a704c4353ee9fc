"""Discrete probability, divergences, the Gaussian likelihood and graphical models.

P, Q distributions along the last dimension; A, B events; N samples, D features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import InputError, nearest, unknown_name


def bayes(prior: Tensor, likelihood: Tensor) -> Tensor:
    """P(A|B) = P(B|A) P(A) / P(B), as a table (A, B), from P(A) of shape (A,) and P(B|A) of shape (A, B).

    A column of a B that cannot happen is 0.
    """
    if prior.dim() != 1 or likelihood.dim() != 2 or len(prior) != len(likelihood):
        raise InputError(
            f"bayes with a prior {tuple(prior.shape)} and a likelihood {tuple(likelihood.shape)}",
            expected="a prior (A,) and a likelihood (A, B)",
            fix="let the rows of the likelihood be the values of A",
        )
    _check_distribution("the prior", prior)
    _check_distribution("the likelihood", likelihood)
    joint = prior[:, None] * likelihood
    return _divide(joint, joint.sum(0))


def entropy(p: Tensor) -> Tensor:
    """H(P) = −Σ P log P, with 0 log 0 = 0."""
    return -_expected_log(p, p)


def distribution_cross_entropy(p: Tensor, q: Tensor) -> Tensor:
    """H(P, Q) = −Σ P log Q."""
    return -_expected_log(p, q)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(P‖Q) = Σ P log(P/Q) ≥ 0, infinite where Q rules out what P allows."""
    return _expected_log(p, p) - _expected_log(p, q)


def js_divergence(p: Tensor, q: Tensor) -> Tensor:
    """JS(P, Q) = ½KL(P‖M) + ½KL(Q‖M) with M = ½(P + Q): symmetric, and at most log 2."""
    middle = (p + q) / 2
    return (kl_divergence(p, middle) + kl_divergence(q, middle)) / 2


def _expected_log(p: Tensor, q: Tensor) -> Tensor:
    """Σ P log Q over what P allows; the rest stays out of the gradient too. What is no number stays none."""
    allowed = ~(p <= 0)
    logarithm = torch.log(torch.where(allowed, q, torch.ones_like(q)))
    return torch.where(allowed, p * logarithm, torch.zeros_like(p)).sum(-1)


class GaussianFit(NamedTuple):
    """The likeliest linear model: weights (D,) or (D, K), and the noise variance of each output."""

    weights: Tensor
    variance: Tensor


def gaussian_mle(inputs: Tensor, target: Tensor) -> GaussianFit:
    """The weights and variance that maximise Π N(y | wᵀx, σ²), for inputs (N, D) and targets (N,) or (N, K).

    −log likelihood = (N/2) log 2πσ² + Σ(y − wᵀx)²/(2σ²), so w is the least-squares solution (XᵀX)⁻¹Xᵀy,
    the shortest one where several fit alike, and σ² is the mean squared residual.
    """
    if inputs.dim() != 2 or len(inputs) != len(target) or not len(inputs):
        raise InputError(
            f"gaussian_mle of inputs {tuple(inputs.shape)} and targets {tuple(target.shape)}",
            expected="inputs (N, D) and targets (N,) or (N, K)",
            fix="give a row of features for each target; a column of ones makes an intercept",
        )
    # The pseudo-inverse works from singular values, without the squared condition number of XᵀX.
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    weights = torch.linalg.pinv(inputs.to(dtype)) @ target.to(dtype)
    variance = (target.to(dtype) - inputs.to(dtype) @ weights).square().mean(0)
    kept = inputs.dtype if inputs.is_floating_point() else dtype  # whole numbers have weights that are not
    return GaussianFit(weights.to(kept), variance.to(kept))


class DiscreteNetwork:
    """A directed acyclic graph of discrete variables: p(x) = Π_i p(x_i | parents of x_i).

        DiscreteNetwork({
            "rain": ((), torch.tensor([0.8, 0.2])),
            "wet": (("rain",), torch.tensor([[0.9, 0.1], [0.2, 0.8]])),
        })

    A table has a dimension for each parent, in order, and last one for the variable, along which it sums
    to 1. Inference is exact, by variable elimination, and differentiable with respect to the tables.
    """

    def __init__(self, tables: Mapping[str, tuple[Sequence[str], Tensor]]) -> None:
        self.parents = {name: tuple(parents) for name, (parents, _) in tables.items()}
        self.tables = {name: table for name, (_, table) in tables.items()}
        if not tables:
            raise InputError("a network without variables", expected="at least one table")
        for name, parents in self.parents.items():
            for parent in parents:
                if parent not in self.tables:
                    fix = nearest(parent, self.tables) or f"add a table for '{parent}'"
                    raise InputError(
                        f"'{name}' has the unknown parent '{parent}'",
                        expected=f"parents among {', '.join(sorted(self.tables))}",
                        fix=fix,
                    )
        try:
            self.variables = tuple(TopologicalSorter(self.parents).static_order())
        except CycleError as problem:
            cycle = " → ".join(reversed(problem.args[1]))
            raise InputError(
                f"the graph has a cycle: {cycle}",
                expected="a directed acyclic graph",
                fix="take one of these edges out",
            ) from None
        for name in self.variables:
            self._check_table(name)

    def _check_table(self, name: str) -> None:
        table, parents = self.tables[name], self.parents[name]
        if table.dim() == len(parents) + 1:
            expected = (*(self.states(parent) for parent in parents), table.shape[-1])
        if table.dim() != len(parents) + 1 or tuple(table.shape) != expected:
            sizes = ", ".join([*(f"{self.states(parent)} for {parent}" for parent in parents), "its own"])
            raise InputError(
                f"the table of '{name}' has shape {tuple(table.shape)}",
                expected=f"the dimensions {sizes}",
                fix="order the dimensions as the parents, and the variable last",
            )
        _check_distribution(f"the table of '{name}'", table)

    def states(self, name: str) -> int:
        """How many values a variable takes."""
        if name not in self.tables:
            raise unknown_name("variable", name, self.tables)
        return self.tables[name].shape[-1]

    def joint(self) -> Tensor:
        """The whole table p(x), a dimension for each of `variables`, in that order."""
        return self.marginal(*self.variables)

    def probability(self, assignment: Mapping[str, int]) -> Tensor:
        """p of a full or partial assignment; the variables left out are summed over."""
        return self._eliminate((), assignment)

    def marginal(self, *names: str) -> Tensor:
        """p(names), a dimension for each name in the order given."""
        return self._eliminate(names, {})

    def conditional(self, names: Sequence[str], given: Sequence[str]) -> Tensor:
        """p(names | given) = p(given, names) / p(given): a dimension for each of `given`, then of `names`.

        Rows of a condition that cannot happen are 0.
        """
        both = self.marginal(*given, *names)
        whole = self.marginal(*given)
        return _divide(both, whole.reshape(*whole.shape, *[1] * len(names)))

    def posterior(self, names: Sequence[str], evidence: Mapping[str, int]) -> Tensor:
        """p(names | evidence) for observed values, a dimension for each name in the order given."""
        both = self._eliminate(tuple(names), evidence)
        total = both.sum()
        if not bool(total > 0):
            raise InputError(
                f"the evidence {dict(evidence)} has probability 0",
                expected="values that can occur together",
                fix="leave one of them out, or check the tables",
            )
        return both / total

    def _eliminate(self, names: Sequence[str], evidence: Mapping[str, int]) -> Tensor:
        """Σ over everything but `names` of the product of the tables, with the evidence put in."""
        self._check_query(names, evidence)
        # What is neither asked for, observed nor an ancestor of such sums to 1 and is never touched.
        involved = self._ancestors([*names, *evidence])
        factors = [self._factor(name, evidence) for name in involved]
        if not factors:  # the probability of no claim at all
            return next(iter(self.tables.values())).new_ones(())
        hidden = {name for scope, _ in factors for name in scope} - set(names)
        while hidden:
            # Greedy: the variable whose elimination makes the smallest table.
            name = min(sorted(hidden), key=lambda candidate: self._size_without(candidate, factors))
            touched = [factor for factor in factors if name in factor[0]]
            scope = _scope(touched, without=name)
            rest = [factor for factor in factors if name not in factor[0]]
            factors = [*rest, (scope, _product(touched, scope))]
            hidden.discard(name)
        return _product(factors, tuple(names))

    def _check_query(self, names: Sequence[str], evidence: Mapping[str, int]) -> None:
        asked = [*names, *evidence]
        twice = sorted({name for name in asked if asked.count(name) > 1})
        for name in asked:
            self.states(name)
        if twice:
            raise InputError(
                f"variables asked for twice: {', '.join(twice)}",
                expected="each variable once, either asked for or observed",
                fix="leave the second mention out",
            )
        for name, value in evidence.items():
            if not 0 <= value < self.states(name):
                raise InputError(
                    f"the evidence {name}={value}",
                    expected=f"a value from 0 to {self.states(name) - 1}",
                    fix="number the values of a variable from 0",
                )

    def _ancestors(self, names: Iterable[str]) -> list[str]:
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting.extend(self.parents[name])
        return [name for name in self.variables if name in found]

    def _factor(self, name: str, evidence: Mapping[str, int]) -> Factor:
        scope = (*self.parents[name], name)
        table = self.tables[name][tuple(evidence.get(one, slice(None)) for one in scope)]
        return tuple(one for one in scope if one not in evidence), table

    def _size_without(self, name: str, factors: Sequence[Factor]) -> int:
        size = 1
        for other in _scope([factor for factor in factors if name in factor[0]], without=name):
            size *= self.states(other)
        return size


Factor = tuple[tuple[str, ...], Tensor]


def _scope(factors: Iterable[Factor], without: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for scope, _ in factors for name in scope if name != without))


def _product(factors: Sequence[Factor], scope: Sequence[str]) -> Tensor:
    """The product of tables, summed over every variable that is not in `scope`."""
    number = {name: i for i, name in enumerate(dict.fromkeys(name for names, _ in factors for name in names))}
    operands: list[object] = []
    for names, table in factors:
        operands += [table, [number[name] for name in names]]
    return torch.einsum(*operands, [number[name] for name in scope])


def _divide(part: Tensor, whole: Tensor) -> Tensor:
    impossible = whole <= 0
    return torch.where(impossible, 0.0, part / torch.where(impossible, 1.0, whole))


def _check_distribution(what: str, table: Tensor) -> None:
    total = table.sum(-1)
    slack = 1e-2 if table.dtype in (torch.bfloat16, torch.float16) else 1e-5
    wrong = ~((total - 1).abs() <= slack)
    if bool((table < 0).any()) or bool(wrong.any()):
        shown = total[wrong].flatten()[0] if bool(wrong.any()) else table.min()
        kind = "a sum of" if bool(wrong.any()) else "the entry"
        raise InputError(
            f"{what} has {kind} {shown.item():g}",
            expected="entries of at least 0 that sum to 1 along the last dimension",
            fix="divide by table.sum(-1, keepdim=True)",
        )
