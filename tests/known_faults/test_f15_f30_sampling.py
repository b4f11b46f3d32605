"""F15, F30: rows of different temperatures and seeds in one batch."""

from jaxspec.cache.page_pool import PagePool
from tests.harness import check, make_engine, request, run, tokens_of


def sampled(name, prompt, **params):
    return request(name, prompt, temperature=1.0, max_tokens=14, ignore_eos=True, **params)


def test_greedy_rows_beside_random_ones_equal_their_solo_runs():
    """F15: temperatures 0, 0.7, 0."""
    asked = [
        request("first", [1, 2], max_tokens=14, ignore_eos=True),
        request("second", [1, 2], temperature=0.7, seed=3, max_tokens=14, ignore_eos=True),
        request("third", [4], max_tokens=14, ignore_eos=True),
    ]
    outputs = run(make_engine(), *asked)
    check(outputs, *asked)
    assert tokens_of(outputs["first"]) != tokens_of(outputs["second"])
    for each in (asked[0], asked[2]):
        alone = run(make_engine(), each)[each.request_id]
        assert tokens_of(alone) == tokens_of(outputs[each.request_id])


def test_a_seed_gives_the_same_text_in_any_company_and_slot():
    """F30: alone, beside 1 and 3 others, in another slot, drafted well or badly."""
    asked = sampled("seeded", [5, 6, 7], seed=42)
    others = [sampled(f"o{i}", [i] * 3) for i in range(3)]
    texts = []
    for company in ([asked], [asked, others[0]], [*others, asked], [others[0], asked, *others[1:]]):
        for accepts in (0, 7):
            outputs = run(make_engine(accepts=accepts), *company)
            texts.append(tuple(tokens_of(outputs["seeded"])))
    assert len(set(texts)) == 1


def test_a_seed_gives_the_same_text_after_a_retraction():
    """F30: pages for a request and a half, of which the seeded one came last."""
    to_the_end = dict(max_tokens=None, ignore_eos=True)
    asked = request("seeded", [5, 6, 7], temperature=1.0, seed=42, **to_the_end)
    alone = run(make_engine(), asked)["seeded"]
    engine = make_engine()
    engine._use_pool(PagePool(16))
    retracted = run(engine, request("long", [1, 2, 3], **to_the_end), asked)["seeded"]
    assert retracted.metrics.num_preemptions >= 1
    assert tokens_of(retracted) == tokens_of(alone)


def test_copies_without_a_seed_differ():
    """F30: one random stream for all would make them equal."""
    outputs = run(make_engine(), *[sampled(f"r{i}", [5, 6, 7]) for i in range(4)])
    assert len({tuple(tokens_of(output)) for output in outputs.values()}) == 4


def test_equal_seeds_give_equal_texts_and_others_do_not():
    """F30."""
    asked = [sampled(name, [5, 6], seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    outputs = run(make_engine(), *asked)
    assert tokens_of(outputs["a"]) == tokens_of(outputs["b"])
    assert tokens_of(outputs["a"]) != tokens_of(outputs["c"])
