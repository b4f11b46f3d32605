"""The host's plan of a decode dispatch: row ids move, device arrays never."""

import chex
import jax
import numpy as np
import pytest

from jaxspec.engine.draft_input import DraftInput


def lists(plan):
    chex.assert_shape([plan.rows, plan.reserved_lens], (len(plan),))
    assert plan.rows.dtype == plan.reserved_lens.dtype == np.int32
    return plan.rows.tolist(), plan.reserved_lens.tolist()


def test_an_idle_plan_has_no_rows():
    plan = DraftInput.create_idle_input()
    assert len(plan) == 0
    assert lists(plan) == ([], [])


def test_idle_plans_filter_merge_and_reserve():
    """F17: a batch that became empty is still a plan."""
    idle = DraftInput.create_idle_input()
    assert lists(idle.filter_batch({1, 2})) == ([], [])
    assert lists(idle.merge_batch(idle)) == ([], [])
    assert lists(idle.reserve(np.zeros(0, np.int32))) == ([], [])
    assert lists(idle.merge_batch(DraftInput.create([4], [9]))) == ([4], [9])


def test_filter_keeps_the_order():
    plan = DraftInput.create([3, 1, 4], [30, 10, 40])
    assert lists(plan.filter_batch({4, 3, 9})) == ([3, 4], [30, 40])
    assert lists(plan.filter_batch(set())) == ([], [])
    assert lists(plan) == ([3, 1, 4], [30, 10, 40]), "a plan does not change"


def test_merge_appends():
    plan = DraftInput.create([3], [30]).merge_batch(DraftInput.create([1, 2], [10, 20]))
    assert lists(plan) == ([3, 1, 2], [30, 10, 20])


def test_reserve_raises_and_never_lowers():
    plan = DraftInput.create([3, 1], [30, 10]).reserve(np.array([20, 26], np.int32))
    assert lists(plan) == ([3, 1], [30, 26])


def test_plans_touch_no_device_array():
    """F34: numpy alone, so that no dispatch is waited for."""
    with jax.transfer_guard("disallow"):
        plan = DraftInput.create([1, 2, 3], [4, 4, 4]).filter_batch({1, 3})
        plan = plan.merge_batch(DraftInput.create([5], [1])).reserve(np.full(3, 9, np.int32))
    assert type(plan.rows) is np.ndarray
    assert type(plan.reserved_lens) is np.ndarray


@pytest.mark.parametrize("rows", [[1, 1], [0, 2], [-1]], ids=str)
def test_rows_that_are_not_distinct_slots_are_refused(rows):
    with pytest.raises(ValueError, match=r"must be distinct slots from 1 on$"):
        DraftInput.create(rows, [1] * len(rows))


def test_merging_a_row_that_is_there_is_refused():
    plan = DraftInput.create([1, 2], [1, 1])
    with pytest.raises(ValueError, match=r"^rows \[1, 2, 2\] must be distinct slots from 1 on$"):
        plan.merge_batch(DraftInput.create([2], [1]))


@pytest.mark.parametrize(("rows", "lens"), [([1, 2], [1]), ([[1]], [[1]])], ids=str)
def test_vectors_of_different_length_are_refused(rows, lens):
    with pytest.raises(ValueError, match="must be vectors of one length"):
        DraftInput.create(rows, lens)
