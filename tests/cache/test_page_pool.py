"""Who owns which page: exact accounting, whatever the order of calls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.cache.page_pool import OutOfPages, PagePool


def test_page_zero_is_never_given():
    pool = PagePool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_usable) == (0, 4)
    pool.check()


def test_a_pool_without_a_usable_page_is_refused():
    with pytest.raises(
        ValueError, match=r"^num_pages is 1; the pool needs the null page and one more$"
    ):
        PagePool(1)


def test_too_many_pages_are_refused_and_none_is_taken():
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(OutOfPages, match=r"^2 pages wanted, 1 free$"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check()


def test_a_shared_page_is_free_after_its_last_owner():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.num_free == 2
    pool.check()
    pool.release(pages[:1])
    assert pool.num_free == 3
    pool.check()


def test_releasing_or_sharing_a_free_page_is_a_fault():
    pool = PagePool(4)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(AssertionError, match=f"page {page} is released but nobody owns it"):
        pool.release([page])
    with pytest.raises(AssertionError, match=f"page {page} is free and cannot be shared"):
        pool.share([page])


def test_check_finds_a_page_that_is_free_and_owned():
    pool = PagePool(4)
    pool.allocate(1)
    pool._free.append(1)
    with pytest.raises(AssertionError, match="free list"):
        pool.check()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["take", "give", "share"]), st.integers(0, 7))))
def test_free_and_owned_pages_make_up_the_pool(calls):
    pool, held = PagePool(9), []
    for call, number in calls:
        if call == "take" and number <= pool.num_free:
            held += pool.allocate(number)
        elif call == "give" and held:
            pool.release([held.pop(number % len(held))])
        elif call == "share" and held:
            page = held[number % len(held)]
            pool.share([page])
            held.append(page)
        pool.check()
        assert pool.num_free + len(set(held)) == pool.num_usable
