"""`force_accept` runs the whole step and forces the decision alone; its text is not lossless."""

from tests.harness import expected, make_engine, request, run, tokens_of


def test_exactly_that_many_drafts_are_accepted_and_the_text_shows_it():
    engine = make_engine(accepts=0, force_accept=3)
    asked = [request(f"r{i}", [i + 1] * 4, max_tokens=17, ignore_eos=True) for i in range(3)]
    outputs = run(engine, *asked)
    for each in asked:
        output = outputs[each.request_id]
        assert output.metrics.accept_lengths == [4, 4, 4, 4]
        assert len(tokens_of(output)) == 17
        assert all(0 <= token < 32 for token in tokens_of(output))
        assert tokens_of(output)[0] == expected(each)[0], "the prefill is not forced"
        assert tokens_of(output) != list(expected(each))
    assert engine.stats.num_accepted == 3 * 12
