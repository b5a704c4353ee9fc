from __future__ import annotations

from types import SimpleNamespace

import pytest

from quire.errors import InputError
from quire.functional import schedules
from quire.options import Schedule


def sizes(schedule: Schedule, total: int, base: float = 0.8) -> list[float]:
    return [schedules.step_size(schedule, base, step, total) for step in range(total + 3)]


def test_warm_up_then_linear_by_hand() -> None:
    got = sizes(Schedule("linear", warmup=4, final=0.2), total=10)
    up, down = [0.2, 0.4, 0.6, 0.8], [0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    assert got == pytest.approx([*up, *down, 0.2, 0.2, 0.2])


def test_warm_up_then_cosine_by_hand() -> None:
    got = sizes(Schedule("cosine", warmup=2, final=0.0), total=6)
    half = 0.8 * 0.5
    swing = half * 2**-0.5
    assert got == pytest.approx([0.4, 0.8, 0.8, half + swing, half, half - swing, 0.0, 0.0, 0.0], abs=1e-15)


def test_power_and_exponential_count_from_the_end_of_warm_up() -> None:
    power = Schedule("power", warmup=3, scale=2, exponent=-1)
    assert schedules.step_size(power, 0.8, 5, 100) == pytest.approx(0.4)
    exponential = Schedule("exponential", warmup=3, scale=2, rate=0.25)
    assert schedules.step_size(exponential, 0.8, 4, 100) == pytest.approx(0.4)
    assert schedules.step_size(exponential, 0.8, 5, 100) == pytest.approx(0.2)


def test_constant_stays() -> None:
    assert set(sizes(Schedule(), total=5)) == {0.8}


@pytest.mark.parametrize("name", ["constant", "linear", "power", "exponential", "cosine"])
def test_every_shape_starts_at_the_base_and_has_no_jump_after_warm_up(name: str) -> None:
    plain = Schedule(name, scale=50)  # type: ignore[arg-type]
    assert schedules.step_size(plain, 0.8, 0, 100) == pytest.approx(0.8)
    warm = Schedule(name, warmup=10, scale=50)  # type: ignore[arg-type]
    assert schedules.step_size(warm, 0.8, 9, 100) == pytest.approx(0.8)
    assert schedules.step_size(warm, 0.8, 10, 100) == pytest.approx(0.8)
    assert schedules.step_size(warm, 0.8, 0, 100) > 0


def test_warm_up_longer_than_the_run_is_all_there_is() -> None:
    schedule = Schedule("cosine", warmup=10)
    assert [schedules.step_size(schedule, 1.0, step, 5) for step in range(5)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5]
    )
    assert schedules.step_size(schedule, 1.0, 10, 5) == 0.0


def test_messages() -> None:
    with pytest.raises(InputError, match=r"step -1\n  expected: a step >= 0\n  fix: count steps from 0"):
        schedules.linear(-1, 1.0, 0.0, 10)
    with pytest.raises(InputError, match="the scale of a schedule is 0"):
        schedules.power(1, 1.0, 0, -1.0)
    with pytest.raises(InputError, match=r"the rate of an exponential schedule is -0\.5"):
        schedules.exponential(1, 1.0, 10, -0.5)
    with pytest.raises(InputError, match="did you mean 'cosine'"):
        schedules.step_size(SimpleNamespace(name="cosin", warmup=0), 1.0, 0, 10)  # type: ignore[arg-type]


def test_a_schedule_of_no_steps_is_over() -> None:
    assert schedules.linear(0, 0.5, 0.1, 0) == schedules.cosine(3, 0.5, 0.1, 0) == 0.1


def test_a_step_size_is_a_plain_float() -> None:
    for name in ("constant", "linear", "power", "exponential", "cosine"):
        assert type(schedules.step_size(Schedule(name, warmup=1), 1.0, 5, 10)) is float  # type: ignore[arg-type]
