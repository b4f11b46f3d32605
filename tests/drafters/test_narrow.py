"""A drafter of which fewer drafts are verified is the same drafter."""

import numpy as np
import pytest

from jaxspec.drafters.narrow import narrow, widths_of
from tests.drafters.eagle_rig import Run
from tests.drafters.test_multi_layer_eagle import EMBED, NUM_LAYERS, build, dense_of, params_of
from tests.harness import PAGE, drafter_named


def test_the_widths_of_a_drafter():
    assert widths_of(drafter_named("none")) == (1,)
    assert widths_of(drafter_named("ngram")) == (8, 4, 1)
    assert widths_of(drafter_named("ngram", block=3)) == (3, 1)
    tree = drafter_named("ngram")._replace(depth=3)
    assert widths_of(tree) == (8, 1)


@pytest.mark.parametrize(("width", "depth"), [(0, None), (9, None), (4, 3)], ids=str)
def test_other_widths_are_refused(width, depth):
    drafter = drafter_named("ngram")._replace(depth=depth)
    with pytest.raises(
        ValueError, match=f"^a block of 8 tokens cannot be verified as one of {width}$"
    ):
        narrow(drafter, width, PAGE)


def test_all_drafts_are_those_of_the_drafter_itself():
    drafter = drafter_named("scripted")
    assert narrow(drafter, 8, PAGE) is drafter
    assert narrow(drafter, 4, PAGE) is narrow(drafter, 4, PAGE)


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "features"])
def test_a_drafter_of_several_layers_takes_in_one_token_at_a_time(is_chain):
    """Its last rows are made again at each step, also where a step brings fewer than there are."""
    drafter = build(is_chain)
    run = Run(drafter, params_of(), EMBED.shape[1])
    run.commit(4, 2, 3)
    plain = Run(narrow(drafter, 1, 4), params_of(), EMBED.shape[1])
    plain.state, plain.carry, plain.lens = run.state, run.carry, run.lens
    for _ in range(3):
        plain.commit(1, 1, 1)
    run.state, run.carry, run.lens = plain.state, plain.carry, plain.lens
    run.commit(1, 4, 2)
    drafts = run.draft()
    for row in range(3):
        expected, _ = run.from_scratch(row, dense_of(is_chain))
        assert drafts[row].tolist() == np.asarray(expected).tolist()
    assert drafts.shape == (3, NUM_LAYERS)
