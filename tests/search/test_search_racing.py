"""Racing against exhaustive scoring of the same tables."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longrope2.search.racing import Race, Scores

MODES = ["off", "exact", "statistical"]


class Table:
    """Answers tasks from a table [candidate][document] and counts them."""

    def __init__(self, rows):
        self.rows = dict(rows)
        self.asked = []

    def __call__(self, tasks):
        self.asked += tasks
        return [self.rows[key][document] for key, document in tasks]


def run(rows, *, mode, num_parents=2, confidence=0.5, order=None, scores=None):
    """Race `rows` (name → NLL by document), alone or against what `scores` already holds."""
    table = Table(rows)
    documents = len(next(iter(rows.values())))
    scores = scores or Scores(documents)
    race = Race(mode=mode, num_parents=num_parents, confidence=confidence)
    race.run(list(rows), scores, order or list(range(documents)), table)
    return scores, table


def known(rows):
    """Scores of candidates that are complete already."""
    scores = Scores(len(next(iter(rows.values()))))
    for key, row in rows.items():
        for document, nll in enumerate(row):
            scores.add(key, document, nll)
    return scores


nlls = st.one_of(st.floats(0, 100), st.sampled_from([0.0, 1.0, math.inf]))


@st.composite
def tables(draw, values=nlls):
    documents = draw(st.integers(1, 6))
    count = draw(st.integers(1, 12))
    rows = [draw(st.lists(values, min_size=documents, max_size=documents)) for _ in range(count)]
    return {f"g{i}": row for i, row in enumerate(rows)}, draw(st.permutations(range(documents)))


@settings(max_examples=200)
@example(
    table=({f"g{i}": row for i, row in enumerate([[0.0, 2], [1, 0], [2, 0], [1, 1], [0, 1]])}, [0, 1]), num_parents=2
)
@given(table=tables(), num_parents=st.integers(1, 6))
def test_exact_racing_never_drops_a_parent_nor_the_best(table, num_parents):
    rows, order = table
    scores, asked = run(rows, mode="exact", num_parents=num_parents, order=order)
    totals = {key: math.fsum(row) for key, row in rows.items()}
    last_parent = sorted(totals.values())[min(num_parents, len(totals)) - 1]
    for key in rows:
        if not scores.is_complete(key):
            assert totals[key] >= last_parent or math.isclose(totals[key], last_parent)
    best = scores.best()
    assert best is not None
    assert totals[best] == pytest.approx(min(totals.values()))
    # What choosing parents looks at: no dropped candidate comes before a true parent.
    chosen = [totals[key] for key in scores.ranking()[:num_parents]]
    assert chosen == pytest.approx(sorted(totals.values())[:num_parents])
    assert len(asked.asked) == len(set(asked.asked)) <= len(rows) * len(order)


@settings(max_examples=100)
@given(table=tables(st.floats(0.01, 100)), newcomers=tables(st.floats(0.01, 100)), num_parents=st.integers(1, 6))
def test_exact_racing_against_an_earlier_population_keeps_its_promise(table, newcomers, num_parents):
    earlier, order = table
    rows = {f"new{key}": (row * len(order))[: len(order)] for key, row in newcomers[0].items()}
    scores, _ = run(rows, mode="exact", num_parents=num_parents, order=order, scores=known(earlier))
    totals = sorted(math.fsum(row) for row in (*earlier.values(), *rows.values()))
    chosen = [math.fsum((earlier | rows)[key]) for key in scores.ranking()[:num_parents]]
    assert chosen == pytest.approx(totals[:num_parents])


@settings(max_examples=200)
@given(table=tables(), mode=st.sampled_from(MODES), num_parents=st.integers(1, 6), confidence=st.floats(0, 3))
def test_no_mode_costs_more_than_exhaustive_scoring_or_asks_twice(table, mode, num_parents, confidence):
    rows, order = table
    scores, asked = run(rows, mode=mode, num_parents=num_parents, confidence=confidence, order=order)
    assert len(asked.asked) == len(set(asked.asked)) <= len(rows) * len(order)
    if mode == "off":
        assert set(asked.asked) == {(key, document) for key in rows for document in order}
    for key, documents in scores.table.items():
        assert documents == {document: rows[key][document] for document in documents}
    # Every candidate has at least one document, some have all, and the ranking has every candidate.
    assert set(scores.table) == set(rows)
    assert scores.best() is not None
    assert sorted(scores.ranking()) == sorted(rows)


def test_exact_racing_drops_as_soon_as_the_sum_is_too_large():
    earlier = {"a": [1.0] * 4, "b": [2.0] * 4}
    rows = {"slow": [3.0, 3.0, 3.0, 3.0], "hopeless": [50.0, 0.0, 0.0, 0.0], "good": [0.5] * 4}
    _, asked = run(rows, mode="exact", num_parents=2, scores=known(earlier))
    by_key = {key: [d for k, d in asked.asked if k == key] for key in rows}
    assert by_key == {"slow": [0, 1, 2], "hopeless": [0], "good": [0, 1, 2, 3]}


def test_without_as_many_complete_candidates_as_parents_nobody_is_dropped():
    rows = {f"g{i}": [float(10**i)] * 3 for i in range(5)}
    _, asked = run(rows, mode="exact", num_parents=6)
    assert len(asked.asked) == 15


def test_scouts_find_the_telling_document_and_the_leaders_on_it_are_completed():
    rows = {f"g{i}": [5.0, 5.0 + 0.1 * i, 20.0 - i] for i in range(9)}
    scores, asked = run(rows, mode="statistical", order=[0, 2, 1])
    scouts = [(f"g{i}", document) for i in (0, 3, 6) for document in (0, 2, 1)]
    assert asked.asked[:9] == scouts
    # The last document separates best: all candidates go there next, and its two best are scored on all.
    assert asked.asked[9:15] == [(f"g{i}", 2) for i in (1, 2, 4, 5, 7, 8)]
    assert set(asked.asked[15:19]) == {(f"g{i}", document) for i in (7, 8) for document in (0, 1)}
    assert scores.best() == "g8"


@settings(max_examples=100)
@given(
    base=st.lists(st.integers(1, 50), min_size=3, max_size=6),
    offsets=st.lists(st.integers(1, 40), min_size=1, max_size=8),
)
def test_without_spread_between_documents_one_document_is_enough(base, offsets):
    """Documents differ, candidates differ by the same on each: nothing is left to learn after one."""
    earlier = {"best": [float(v) for v in base], "other": [v + 100.0 for v in base]}
    rows = {f"g{i}": [v + float(offset) for v in base] for i, offset in enumerate(offsets)}
    scores, asked = run(rows, mode="statistical", num_parents=9, scores=known(earlier))
    assert len(asked.asked) == len(rows)
    scales = scores.scales("best")
    assert scales == pytest.approx([1.0] * len(base))
    for key, row in rows.items():
        assert scores.estimate(key, "best", scales) == pytest.approx(sum(row))
    estimates = [scores.estimate(key, "best", scales) for key in scores.ranking()]
    assert estimates == sorted(estimates)


def test_without_a_known_spread_nobody_is_judged_by_one_document():
    """One individual is all there was, so it is not known yet how far a document can be trusted."""
    rows = {"a": [2.0, 2.0, 2.0, 2.0], "b": [3.0, 3.0, 3.0, 3.0]}
    scores, _ = run(rows, mode="statistical", num_parents=9, scores=known({"reference": [1.0, 1.0, 1.0, 1.0]}))
    assert {key: len(found) for key, found in scores.table.items()} == {"reference": 4, "a": 2, "b": 2}


def test_whoever_differs_in_proportion_is_known_by_one_document():
    """Documents that separate better do so for all candidates: one of them is enough."""
    base, weights = [9.0, 8.0, 7.0, 6.0], [0.5, 4.0, 1.0, 2.5]
    earlier = {"best": base, "other": [b + 3 * w for b, w in zip(base, weights, strict=True)]}
    rows = {f"g{i}": [b + i * w for b, w in zip(base, weights, strict=True)] for i in range(1, 6)}
    scores, asked = run(rows, mode="statistical", num_parents=99, scores=known(earlier))
    assert asked.asked == [(key, 1) for key in rows]
    scales = scores.scales("best")
    assert scales == pytest.approx([w / 2 for w in weights])
    for key, row in rows.items():
        assert scores.estimate(key, "best", scales) == pytest.approx(sum(row))


@settings(max_examples=200)
@given(
    table=tables(st.floats(0.01, 50)),
    num_parents=st.integers(1, 6),
    confidence=st.one_of(st.just(0.0), st.floats(0, 3)),
    gains=st.lists(st.floats(0.001, 1), min_size=6, max_size=6),
)
def test_whoever_beats_the_reference_on_every_document_is_completed(table, num_parents, confidence, gains):
    earlier, order = table
    scores = known(earlier)
    reference = scores.best()
    better = [nll * (1 - gain / 2) for nll, gain in zip(earlier[reference], gains, strict=False)]
    scores, _ = run(
        {"better": better},
        mode="statistical",
        num_parents=num_parents,
        confidence=confidence,
        order=order,
        scores=scores,
    )
    assert scores.is_complete("better")
    assert scores.best() == "better"


@pytest.mark.parametrize("confidence", [0.0, 0.5, 2.0])
def test_a_reference_that_overflows_is_no_measure(confidence):
    """Against an infinite total any finite candidate may be the best."""
    earlier = {"broken": [math.inf, 1.0, 1.0], "worse": [math.inf, math.inf, math.inf]}
    rows = {"finite": [9.0, 9.0, 9.0], "half": [9.0, math.inf, 1.0]}
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        scores, _ = run(
            rows, mode="statistical", confidence=confidence, order=order, scores=known(earlier), num_parents=3
        )
        assert scores.is_complete("finite")
        assert scores.ranking()[0] == "finite"
        assert scores.estimate("half", "broken", scores.scales("broken")) == math.inf


@pytest.mark.parametrize("mode", ["exact", "statistical"])
def test_an_infinite_nll_is_dropped_at_once(mode):
    earlier = {"a": [1.0, 2.0, 3.0], "b": [2.0, 2.0, 3.0]}
    rows = {"overflow": [math.inf, 0.0, 0.0], "fine": [0.9, 1.9, 2.9]}
    scores, asked = run(rows, mode=mode, num_parents=9, scores=known(earlier))
    assert [task for task in asked.asked if task[0] == "overflow"] == [("overflow", 0)]
    assert scores.best() == "fine"
    assert scores.ranking()[-1] == "overflow"


def test_more_confidence_asks_for_more_evaluations():
    rng = np.random.default_rng(0)
    base = rng.uniform(5, 10, 20)
    earlier = {f"e{i}": list(base + rng.normal(0.3 * i, 0.5, 20).clip(-4)) for i in range(10)}
    rows = {f"g{i}": list(base + rng.normal(0.15, 0.5, 20).clip(-4)) for i in range(40)}
    counts = []
    for confidence in (0.0, 0.5, 2.0, 8.0):
        _, asked = run(rows, mode="statistical", num_parents=99, confidence=confidence, scores=known(earlier))
        counts.append(len(asked.asked))
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] / 3


def test_the_spread_is_pooled_over_the_nearest_candidates_as_computed_by_numpy():
    rng = np.random.default_rng(1)
    rows = {f"g{i}": list(rng.uniform(0, 1, 6) + 0.1 * i) for i in range(30)}
    scores = known(rows)
    reference = scores.best()
    apart = {k: np.subtract(row, rows[reference]) for k, row in rows.items()}
    scales = sum(np.abs(row) for row in apart.values())
    scales /= scales.mean()
    assert scores.scales(reference) == pytest.approx(list(scales))
    scores.add("new", 2, rows[reference][2] + 2.1)
    slope = 2.1 / scales[2]
    fits = {k: np.linalg.lstsq(scales[:, None], row, rcond=None) for k, row in apart.items() if k != reference}
    nearest = sorted(fits, key=lambda key: abs(fits[key][0][0] - slope))[:16]
    expected = math.sqrt(sum(fits[key][1][0] for key in nearest) / (5 * 16))
    race = Race(mode="statistical", num_parents=99)
    slopes = race._slopes(reference, scores, scales)
    assert race._spread(slope, slopes) == pytest.approx(expected)
    # The verdict is that of a normal interval for a sum that is predicted by a line through the origin.
    others = scales.sum() - scales[2]
    estimate = scores.estimate("new", reference, scales)
    assert estimate == pytest.approx(scores.total(reference) + 2.1 + slope * others)
    error = expected * math.sqrt(5 + (others / scales[2]) ** 2)
    gap = estimate - scores.total(reference)
    for confidence in (0.5 * gap / error, 0.99 * gap / error, 1.01 * gap / error):
        verdict = Race(mode="statistical", num_parents=99, confidence=confidence)
        assert verdict._may_be_best("new", reference, scores, scales, slopes) == (confidence * error > gap)


def test_estimates_are_exact_for_the_complete_and_in_proportion_for_others():
    scores = known({"r": [1.0, 2.0, 30.0], "x": [7.0, 7.0, 7.0]})
    even, uneven = [1.0, 1.0, 1.0], [0.5, 0.5, 2.0]
    assert scores.estimate("x", "r", even) == 21.0
    assert scores.estimate("r", "x", even) == 33.0
    scores.add("y", 2, 33.0)  # three more than the reference on a hard document, so three more on each
    assert scores.estimate("y", "r", even) == pytest.approx(33.0 + 9.0)
    assert scores.estimate("y", "r", uneven) == pytest.approx(33.0 + 3.0 + 0.75 + 0.75)
    scores.add("y", 0, 2.0)
    assert scores.estimate("y", "r", even) == pytest.approx(33.0 + 3 * 2.0)


def test_the_best_is_complete_and_ties_go_to_the_first():
    scores = Scores(2)
    assert scores.best() is None
    scores.add("partial", 0, 0.0)
    assert scores.best() is None
    assert not scores.is_complete("unknown")
    for key in ("first", "second"):
        for document in range(2):
            scores.add(key, document, 1.0)
    assert scores.best() == "first"
    assert scores.ranking() == ["partial", "first", "second"]


# Documents of several kinds


def test_nobody_is_judged_before_a_document_of_every_kind():
    """The depths disagree: who is best at the start is worst in the middle."""
    earlier = {"a": [1.0, 5.0, 1.0, 5.0], "b": [5.0, 1.5, 5.0, 1.5]}
    rows = {"early": [0.5, 9.0, 0.5, 9.0], "even": [2.0, 2.0, 2.0, 2.0]}
    table = Table(rows)
    scores = known(earlier)
    race = Race(mode="statistical", num_parents=9, confidence=0.0, kinds=["start", "middle", "start", "middle"])
    race.run(list(rows), scores, [0, 1, 2, 3], table)
    asked = {key: [document for name, document in table.asked if name == key] for key in rows}
    assert {document % 2 for document in asked["early"][:2]} == {0, 1}
    assert scores.best() == "even"
    assert len(asked["early"]) == 2


@settings(max_examples=100)
@given(
    kinds=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    order=st.randoms(),
)
def test_blocks_hold_each_document_once_and_the_next_of_every_kind(kinds, order):
    documents = list(range(len(kinds)))
    order.shuffle(documents)
    blocks = Race(mode="off", num_parents=1, kinds=kinds)._blocks(documents)
    assert sorted(document for block in blocks for document in block) == list(range(len(kinds)))
    for block in blocks:
        assert len({kinds[document] for document in block}) == len(block)
    # No kind is left out of a block while it has documents.
    for number, block in enumerate(blocks):
        later = {kinds[document] for other in blocks[number + 1 :] for document in other}
        assert later <= {kinds[document] for document in block}
    assert Race(mode="off", num_parents=1)._blocks(documents) == [[document] for document in documents]
