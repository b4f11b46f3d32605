"""The learning rate and how long a run goes on."""

from __future__ import annotations

import pytest

from jaxspec.training.schedule import Horizon, learning_rate_at


def test_the_learning_rate_rises_and_falls_along_a_cosine():
    rates = [learning_rate_at(step, 100, peak=2.0, warmup=0.1) for step in range(101)]
    assert rates[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert rates[9] == rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0)
    assert max(rates) == 2.0


def test_a_run_of_given_steps_ends_there():
    horizon = Horizon(5)
    assert not horizon.is_open
    assert [horizon.is_over(done=n, elapsed_s=1e9) for n in (4, 5)] == [False, True]


def test_steps_are_fitted_to_the_time_that_is_left():
    """100 s, 40 used for 12 steps, 0.5 s a step: 0.95 * 60 / 0.5 more."""
    horizon = Horizon(None, 100.0)
    assert horizon.is_open
    horizon.fit(done=12, elapsed_s=40.0, seconds_a_step=0.5)
    assert horizon.steps == horizon.total_steps == 12 + 114
    assert horizon.is_over(done=126, elapsed_s=50.0)
    assert horizon.is_over(done=3, elapsed_s=100.0)
    assert not horizon.is_over(done=125, elapsed_s=99.0)


def test_a_run_without_time_left_ends_after_a_step_more():
    horizon = Horizon(None, 10.0)
    horizon.fit(done=12, elapsed_s=11.0, seconds_a_step=1.0)
    assert horizon.total_steps == 13
