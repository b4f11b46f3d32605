"""Which pages a text can begin with, who owns them, and which are lost first."""

import pytest

from jaxspec.cache.page_pool import PagePool
from jaxspec.cache.prefix_tree import PrefixTree

A = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def make(num_pages=12, lookahead=0):
    pool = PagePool(1 + num_pages)
    return pool, PrefixTree(pool, page_size=4, lookahead=lookahead)


def serve(pool, tree, tokens, num_rows=None):
    """A request that takes what is there, computes the rest and ends; its pages."""
    num_free = pool.num_free
    pages = tree.take(tokens)
    pages += pool.allocate(-(-len(tokens) // 4) - len(pages))
    tree.hand_over(tokens, list(pages), len(tokens) if num_rows is None else num_rows)
    pool.check()
    tree.check()
    assert pool.num_free == num_free
    return pages


@pytest.mark.parametrize(
    ("lookahead", "tokens", "num_pages"),
    [
        (0, [*A, 20], 2),
        (0, A[:8], 1),  # its last token is computed again
        (0, [*A[:7], 20, 9], 1),
        (0, [20, *A[1:]], 0),
        (0, A[:4], 0),
        (0, [5], 0),
        (1, A, 2),
        (1, [*A[:8], 20], 1),  # row 7 depends on token 8
        (1, A[:8], 1),
        (1, [*A[:4], 20, 6, 7, 8, 9], 0),
        (2, A, 1),
        (2, [*A[:5], 20, 7, 8, 9], 0),
        (2, [*A[:6], 20, 8, 9], 1),
    ],
    ids=str,
)
def test_a_text_begins_with_the_pages_of_one_that_began_alike(lookahead, tokens, num_pages):
    pool, tree = make(lookahead=lookahead)
    pages = serve(pool, tree, A)
    taken = tree.take(tokens)
    assert taken == pages[:num_pages]
    assert pool.num_free == pool.num_usable - num_pages


def test_rows_that_may_be_written_again_are_not_kept():
    """Of three layers that look ahead, the last two rows hold drafts in place of tokens."""
    for num_rows, kept in ((8, 1), (9, 1), (10, 2)):
        pool, tree = make(lookahead=3)
        serve(pool, tree, [*A, 10, 11], num_rows)
        assert len(tree) == kept


def test_what_was_not_written_is_not_kept():
    pool, tree = make()
    serve(pool, tree, A, 7)
    assert len(tree) == 1


def test_pages_that_some_request_reads_cost_the_next_nothing():
    pool, tree = make()
    serve(pool, tree, A)
    assert tree.num_in_use(A) == 0
    tree.take(A[:6])
    assert tree.num_in_use(A) == 1


def test_two_texts_share_their_beginning_and_part_where_they_differ():
    pool, tree = make()
    first = serve(pool, tree, A)
    second = serve(pool, tree, [*A[:4], 20, 21, 22, 23, 24])
    assert second[0] == first[0] and second[1] not in first[:2]
    assert len(tree) == 3
    assert tree.take(A) == first[:2]
    assert tree.take([*A[:4], 20, 21, 22, 23, 24]) == second[:2]


def test_a_copy_is_let_go():
    """Two requests with one text at once: the tree keeps one of the copies."""
    pool, tree = make()
    one, two = pool.allocate(3), pool.allocate(3)
    tree.hand_over(A, list(one), 9)
    tree.hand_over([*A[:8], 30, 31, 32, 33, 34], [*two, *pool.allocate(1)], 13)
    assert len(tree) == 3
    assert tree.take([*A[:8], 30, 31, 32, 33]) == one[:2]
    pool.check()
    tree.check()


def test_a_running_request_enters_no_page_behind_anothers():
    """It does not own the other's page, which could be lost before its own."""
    pool, tree = make()
    one, two = pool.allocate(3), pool.allocate(3)
    tree.add(A, one, 9)
    tree.add([*A[:4], 20, 21, 22, 23, 24], two, 9)
    assert len(tree) == 2
    assert tree.take([*A[:4], 20, 21, 22, 23, 24]) == one[:1]


def test_the_longest_unused_text_is_lost_first_and_from_its_end():
    pool, tree = make(num_pages=6)
    first = serve(pool, tree, A)
    second = serve(pool, tree, [20, *A[1:]])
    serve(pool, tree, A)  # used again
    assert pool.num_idle == 4
    taken = pool.allocate(3)
    assert second[1] in taken and not {*first[:2], second[0]} & {*taken}
    assert tree.take([20, *A[1:]]) == second[:1]
    assert tree.take(A) == first[:2]


def test_a_page_in_use_is_never_lost():
    pool, tree = make(num_pages=4)
    serve(pool, tree, A)
    taken = tree.take(A)
    assert pool.num_free == 2
    pool.allocate(2)
    assert tree.take(A) == taken
    tree.check()


def test_what_leads_to_a_page_is_lost_after_it():
    """The second text's own copy of page one goes; the tree's is as lately used as what follows."""
    pool, tree = make(num_pages=7)
    serve(pool, tree, A[:5])
    copy = pool.allocate(3)
    serve(pool, tree, [30, 31, 32, 33, 34])
    tree.hand_over(A, copy, 9)
    while pool.num_idle:
        pool.allocate(pool.num_free - pool.num_idle + 1)
        tree.check()
    assert len(tree) == 0


def test_forgotten_pages_and_those_behind_them_are_not_found_again():
    pool, tree = make()
    pages = serve(pool, tree, [*A, 10, 11, 12, 13])
    tree.forget(pages[1:2])
    assert tree.take([*A, 10, 11, 12, 13]) == pages[:1]
    pool.check()
    tree.check()
    assert pool.num_idle == 0


def test_a_forgotten_page_stays_with_who_reads_it():
    pool, tree = make()
    serve(pool, tree, A)
    taken = tree.take(A)
    tree.forget(taken)
    assert pool.num_free == pool.num_usable - 2
    pool.release(taken)
    pool.check()
    assert pool.num_free == pool.num_usable


def test_a_text_of_ten_thousand_pages_is_forgotten_at_once():
    pool, tree = make(num_pages=10_000)
    pages = serve(pool, tree, list(range(40_000)))
    tree.forget(pages[:1])
    assert len(tree) == 0
