"""F7, F8: blocks that reach past the context write and read nothing that is not theirs."""

import numpy as np
import pytest

from jaxspec.request import FinishReason
from tests.harness import (
    BLOCK,
    CONTEXT,
    SCRIPT,
    check,
    make_engine,
    request,
    run,
    scripted_accept_lengths,
    tokens_of,
)


def test_a_neighbours_pages_survive_a_row_at_the_end_of_its_context():
    """F7: page size 1; also the row's own older entries, which its accept lengths depend on."""
    engine = make_engine(page_size=1)
    full = request("full", [1, 2, 3], max_tokens=None, ignore_eos=True)
    beside = request("beside", [7] * 4, max_tokens=16, ignore_eos=True)
    for asked in (full, beside):
        engine.add_request(asked)
    outputs, row = {}, np.zeros(0, np.int32)
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
        seq = engine._by_id.get("beside")
        if seq is not None:
            now = engine._pages.table[seq.slot].copy()
            assert now[: np.count_nonzero(row)].tolist() == row[row > 0].tolist()
            row = now
    check(outputs, full, beside)
    for asked in (full, beside):
        lengths = outputs[asked.request_id].metrics.accept_lengths
        assert lengths == scripted_accept_lengths(asked, SCRIPT)
    assert engine.num_free_pages == engine._pages.pool.num_usable


@pytest.mark.parametrize("room", range(1, BLOCK + 2))
@pytest.mark.parametrize("accepts", [0, 7])
def test_a_prompt_shortly_before_the_end_gets_exactly_the_tokens_that_fit(room, accepts):
    """F8: the verify window runs past the last position; the text does not."""
    asked = request(
        "a", [(i * 3) % 32 for i in range(CONTEXT - room)], max_tokens=None, ignore_eos=True
    )
    output = run(make_engine(accepts=accepts), asked)["a"]
    check({"a": output}, asked)
    assert len(tokens_of(output)) == room
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
