"""How adaptive widths are held against never and always."""

from collections import Counter
from itertools import pairwise

from jaxspec.bench.adaptive import order_of, ratio_to_better


def test_in_four_rounds_each_way_has_each_place_and_comes_behind_each_other():
    rounds = [order_of(turn) for turn in range(4)]
    assert all(len(set(each)) == 4 for each in (*rounds, *zip(*rounds, strict=True)))
    behind = Counter(pair for each in rounds for pair in pairwise(each))
    assert len(behind) == 12 and set(behind.values()) == {1}


def test_a_ratio_is_that_within_rounds_to_the_way_that_was_better_over_all():
    """The second round of the machine was twice as slow for all."""
    times = {
        "never": [1.0, 2.0, 1.0],
        "always": [0.9, 3.0, 1.5],
        "adaptive": [1.0, 2.0, 1.25],
        "started": [2.0, 4.0, 1.0],
    }
    assert ratio_to_better(times, "adaptive") == 1.0
    assert ratio_to_better(times, "started") == 0.5
