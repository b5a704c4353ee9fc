"""Public functions have the derivatives that differences give, or a reason to have none."""

from __future__ import annotations

import pytest

from quire.errors import InputError
from tests.faults.gradients import check, misplaced, public, second_derivative
from tests.faults.gradients_table import CASES, Case


def test_each_function_has_a_row_or_a_reason() -> None:
    assert misplaced(public()) == []


def test_a_new_function_is_noticed() -> None:
    (message,) = misplaced(public() | {"losses.brand_new"})
    assert message.startswith("losses.brand_new has no row: add inputs")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_derivatives(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [case for case in CASES if case.once], ids=lambda case: case.name)
def test_a_second_derivative_that_is_missing_is_refused(case: Case) -> None:
    with pytest.raises((InputError, RuntimeError), match=r"a second derivative of|is not implemented"):
        second_derivative(case)
