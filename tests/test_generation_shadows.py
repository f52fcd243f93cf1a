"""The schedule of the work ahead: everything in time, and little at a time."""

from hypothesis import given
from hypothesis import strategies as st

from longrope2.generation.strategies import Schedule


def simulate(crossings, chunk, prompt, end):
    """Columns run with the prompt (first) and with each step, as lists of (rows, from, to)."""
    schedule, work = Schedule(crossings, chunk), []
    for columns in range(prompt, end + 1):
        step = []
        for shadow, stop in schedule.due(columns):
            assert shadow.done <= stop <= min(columns, shadow.crossing - 1)
            if stop > shadow.done:
                step.append((shadow.rows, shadow.done, stop))
            shadow.done = stop
            if columns == shadow.crossing:
                assert stop == columns - 1
                crossings = {at: rows for at, rows in crossings.items() if at != columns}
        work.append(step)
    assert all(at > end for at in crossings), "a row crossed without its cache"
    return work


@given(
    crossings=st.dictionaries(st.integers(21, 80), st.just([0]), max_size=5),
    chunk=st.integers(1, 90),
    prompt=st.integers(1, 20),
)
def test_property_every_cache_is_whole_when_its_rows_cross(crossings, chunk, prompt):
    work = simulate(crossings, chunk, prompt, 80)
    assert sum(stop - start for step in work for _, start, stop in step) == sum(at - 1 for at in crossings)


@given(crossing=st.integers(2, 300), chunk=st.integers(1, 100), prompt=st.integers(1, 299))
def test_property_a_lone_crossing_never_takes_more_than_a_chunk_a_step(crossing, chunk, prompt):
    prompt = min(prompt, crossing - 1)
    with_prompt, *steps = simulate({crossing: [0]}, chunk, prompt, crossing)
    amounts = [sum(stop - start for _, start, stop in step) for step in steps]
    assert max(map(len, steps)) <= 1
    assert max(amounts) <= chunk
    # As late as possible: chunks without a gap, up to the crossing itself.
    busy = [index for index, amount in enumerate(amounts) if amount]
    assert busy == list(range(busy[0], len(steps)))
    if with_prompt:
        assert len(busy) == len(steps)


def test_caches_in_turn_share_the_steps():
    """Rows that cross 40 tokens apart, with work for 32 steps each: never two chunks in a step."""
    work = simulate({257: [0], 297: [1]}, 8, 20, 300)
    assert max(map(len, work)) == 1
    assert max(stop - start for step in work for _, start, stop in step) == 8


def test_caches_that_would_overlap_start_earlier():
    work = simulate({257: [0], 267: [1]}, 8, 20, 270)
    assert max(map(len, work)) == 1
    assert not any(work[:180])


def test_a_dropped_cache_takes_no_more_work():
    schedule = Schedule({40: [0], 60: [1]}, 4)
    for columns in range(1, 61):
        for shadow, stop in schedule.due(columns):
            if shadow.rows == [0]:
                schedule.drop(shadow)
            else:
                shadow.done = stop
    assert shadow.rows == [1]
    assert shadow.done == 59
