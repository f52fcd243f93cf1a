"""The journal on disk: what was written comes back, whatever a kill left, and nobody else's is taken."""

import json
import math
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longrope2.errors import LongRopeError
from longrope2.files import unsealed
from longrope2.journal import JournalError
from longrope2.perplexity import Score
from longrope2.records import as_json
from longrope2.search.journal import Journal
from longrope2.search.space import Genome

GENOMES = [
    Genome(critical_dimension=3, right=(2.0, 2.5)),
    Genome(critical_dimension=2, right=(2.0,), shape="given", left=(1.0, 1.5), attention_factor=1.1, origin="yarn"),
]
SCORE = Score(1.0, 7, exact=False)
HEADER = {
    "model": "tiny",
    "weights": "sha256:1",
    "config": {"seed": 0, "shape": (1, 2), "books": None},
}


def written(path, evaluations, header=HEADER):
    journal = Journal(path, header)
    for (key, document), nll in evaluations.items():
        journal.record(key, document, Score(nll, 7, exact=False))
    journal.generation(0, 0, lambda: GENOMES)
    journal.report(0, 0, length=512, perplexity=1.5)
    journal.close()
    return path


def nlls(journal):
    return {place: score.nll for place, score in journal.known.scores.items()}


@settings(max_examples=50)
@given(
    evaluations=st.dictionaries(
        st.tuples(st.text(min_size=1, max_size=8), st.integers(0, 99)),
        st.one_of(st.floats(0, allow_infinity=False), st.just(math.inf)),
        max_size=8,
    ),
    model=st.text(),
)
@example(evaluations={("k", 0): 1.0}, model="what Python takes for ends of lines: \u2028 \x85 \x0b \r")
def test_evaluations_survive_the_disk_exactly(tmp_path_factory, evaluations, model):
    header = {**HEADER, "model": model}
    path = written(tmp_path_factory.mktemp("journal") / "deep" / "history.jsonl", evaluations, header)
    before = path.read_bytes()
    again = Journal(path, header)
    assert nlls(again) == evaluations
    assert all((score.num_tokens, score.exact) == (7, False) for score in again.known.scores.values())
    assert again.resumed == len(evaluations)
    # What was made or reported before is not made or reported again.
    assert again.generation(0, 0, lambda: pytest.fail("made again")) == GENOMES
    again.report(0, 0, length=512, perplexity=2.5)
    again.close()
    assert path.read_bytes() == before
    for line in before.decode().split("\n")[:-1]:
        json.loads(line, parse_constant=pytest.fail)  # strict JSON: no Infinity, no NaN


def test_what_was_synced_is_on_disk(tmp_path, synced):
    journal = Journal(tmp_path / "history.jsonl", HEADER)
    journal.record("k0", 3, Score(1.5, 7, exact=True))
    assert not synced
    journal.sync()
    assert synced == [(tmp_path / "history.jsonl").stat().st_ino]
    journal.close()


def test_the_lines_say_what_they_are(tmp_path):
    journal = Journal(tmp_path / "history.jsonl", HEADER)
    journal.record("k0", 3, Score(1.5, 7, exact=True))
    journal.record("k1", 0, Score(math.inf, 7, exact=False))
    journal.generation(1, 2, lambda: GENOMES[:1])
    journal.report(1, 2, length=512, perplexity=None)
    journal.report(1, 2, length=512, perplexity=None)
    # Every line is with the system before the next step, so that a kill loses nothing.
    lines = [json.loads(unsealed(line)) for line in (tmp_path / "history.jsonl").read_bytes().splitlines()]
    assert lines == [
        {"type": "header", "format": 2, **json.loads(json.dumps(HEADER))},
        {"type": "evaluation", "key": "k0", "document": 3, "nll": 1.5, "tokens": 7, "exact": True},
        {"type": "evaluation", "key": "k1", "document": 0, "nll": None, "tokens": 7, "exact": False},
        {
            "type": "generation",
            "stage": 1,
            "iteration": 2,
            "genomes": [as_json(GENOMES[0])],
        },
        {"type": "iteration", "stage": 1, "iteration": 2, "length": 512, "perplexity": None},
    ]
    assert journal.resumed == 0
    assert nlls(journal) == {("k0", 3): 1.5, ("k1", 0): math.inf}
    journal.close()
    journal.close()  # twice is no harm


@pytest.mark.parametrize("last", ["evaluation", "generation", "header"])
def test_a_torn_last_line_is_dropped_wherever_it_was_torn(tmp_path, last):
    path = tmp_path / "history.jsonl"
    journal = Journal(path, HEADER)
    if last != "header":
        journal.record("k0", 0, Score(1.25, 7, exact=False))
        journal.generation(0, 0, lambda: GENOMES)
    if last == "evaluation":
        journal.record("k1λ", 4, Score(math.inf, 7, exact=False))
    content = path.read_bytes()  # before the time of the session is added
    journal.close()
    start = content[:-1].rfind(b"\n") + 1
    for end in range(start, len(content)):
        path.write_bytes(content[:end])
        again = Journal(path, HEADER)
        assert nlls(again) == ({} if last == "header" else {("k0", 0): 1.25})
        if last == "evaluation":
            again.record("k1λ", 4, Score(math.inf, 7, exact=False))
        elif last == "generation":
            again.generation(0, 0, lambda: GENOMES)
        assert path.read_bytes() == content
        again.close()


NO_OBJECTS = [b"", b"{", b"not json", b"\xff\xfe\x00", b"[1, 2]", b"3", b"null"]
WRONG_OBJECTS = [
    b'{"key": "k", "document": 0, "nll": 1.0}',
    b'{"type": "evaluation", "document": 0, "nll": 1.0}',
    b'{"type": "evaluation", "key": "k", "nll": 1.0}',
    b'{"type": "evaluation", "key": "k", "document": 0}',
    b'{"type": "evaluation", "key": "k", "document": "first", "nll": 1.0}',
    b'{"type": "evaluation", "key": "k", "document": 0, "nll": "low"}',
    b'{"type": "evaluation", "key": "k", "document": 0, "nll": [1]}',
    b'{"type": "evaluation", "key": "k", "document": 0, "nll": NaN}',
    b'{"type": "evaluation", "key": "k", "document": 0, "nll": -Infinity}',
    b'{"type": "evaluation", "key": "k", "document": 0, "nll": 1.0}',
    b'{"type": "generation", "stage": 0, "iteration": 1}',
    b'{"type": "generation", "stage": 0, "iteration": 1, "genomes": [{"right": [1.0]}]}',
    b'{"type": "generation", "stage": 0, "iteration": 1, "genomes": [{"lefft": 1}]}',
    b'{"type": "iteration", "stage": 0}',
]


@pytest.mark.parametrize(
    ("number", "damage"), [(1, d) for d in NO_OBJECTS] + [(3, d) for d in NO_OBJECTS + WRONG_OBJECTS]
)
def test_a_damaged_line_is_named(tmp_path, number, damage):
    path = written(tmp_path / "history.jsonl", {("k0", 0): 1.0, ("k1", 0): 2.0, ("k2", 0): 3.0})
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = damage
    path.write_bytes(b"\n".join(lines))
    before = path.read_bytes()
    with pytest.raises(JournalError, match=rf"history.jsonl: line {number} is damaged") as caught:
        Journal(path, HEADER)
    # Without its first line nobody could tell whose the others are.
    assert caught.value.hint.startswith("delete the file" if number == 1 else "delete that line")
    assert path.read_bytes() == before


def test_without_the_damaged_line_the_rest_is_used(tmp_path):
    path = written(tmp_path / "history.jsonl", {("k0", 0): 1.0, ("k1", 0): 2.0})
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:1] + lines[2:]))
    journal = Journal(path, HEADER)
    assert nlls(journal) == {("k1", 0): 2.0}
    journal.close()


def test_the_journal_of_another_version_of_the_search_is_refused(tmp_path):
    """The first one knew no formats, and named candidates one by one."""
    path = tmp_path / "history.jsonl"
    old = {"type": "header", **HEADER}
    path.write_text(json.dumps(old) + "\n" + '{"type": "candidate", "id": "k0", "iteration": 0}\n')
    with pytest.raises(JournalError, match=r"another version of the search \(format 1, this one writes 2\)") as caught:
        Journal(path, HEADER)
    assert caught.value.hint == "search into another folder, or delete this one"
    path.write_text(json.dumps({**old, "format": 3}) + "\n")
    with pytest.raises(JournalError, match=r"\(format 3, this one writes 2\)"):
        Journal(path, HEADER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "sha256:2"}, "weights: 'sha256:1' on disk, 'sha256:2' now"),
        (
            {"config": {"seed": 1, "shape": (1, 2), "books": None}},
            "config.seed: 0 on disk, 1 now",
        ),
        (
            {"config": {"seed": 0, "shape": (1, 2), "books": "x", "schedule": {"size": 3}}, "documents": "d"},
            "- config.books: not set on disk, 'x' now\n  - config.schedule.size: not set on disk, 3 now",
        ),
        ({"dtype": "float32"}, "dtype: not set on disk, 'float32' now"),
    ],
)
def test_the_journal_of_another_search_is_refused(tmp_path, change, message):
    path = written(tmp_path / "history.jsonl", {("k0", 0): 1.0})
    before = path.read_bytes()
    with pytest.raises(JournalError) as caught:
        Journal(path, {**HEADER, **change})
    assert isinstance(caught.value, LongRopeError)
    assert f"{path} belongs to another search" in str(caught.value)
    assert message in str(caught.value)
    assert "hint: search into another folder" in str(caught.value)
    assert path.read_bytes() == before


def test_another_name_of_the_same_model_and_books_is_no_other_search(tmp_path):
    path = written(tmp_path / "history.jsonl", {("k0", 0): 1.0})
    journal = Journal(path, {**HEADER, "model": "/moved/tiny", "config": {**HEADER["config"], "books": "../books"}})
    journal.close()
    assert nlls(journal) == {("k0", 0): 1.0}
    with pytest.raises(JournalError) as caught:  # and where something else differs, the name is no matter
        Journal(path, {**HEADER, "model": "/moved/tiny", "dtype": "float32"})
    assert "moved" not in str(caught.value)


def test_all_differences_are_named_at_once(tmp_path):
    path = written(tmp_path / "history.jsonl", {})
    with pytest.raises(JournalError) as caught:
        Journal(path, {"model": "other", "weights": "sha256:2", "config": HEADER["config"]})
    assert "2 problems" in str(caught.value)
    assert "model: 'tiny' on disk, 'other' now" in str(caught.value)
    assert "weights: 'sha256:1' on disk, 'sha256:2' now" in str(caught.value)


def test_a_first_line_that_is_no_header_belongs_to_another_search(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text('{"type": "evaluation", "key": "k", "document": 0, "nll": 1.0}\n')
    with pytest.raises(JournalError, match="another version of the search"):
        Journal(path, HEADER)


def test_the_time_of_all_sessions_is_known(tmp_path, monkeypatch):
    clock = iter([10.0, 14.0, 100.0, 103.0, 109.0, 500.0, 1000.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    first = Journal(tmp_path / "history.jsonl", HEADER)
    assert first.earlier == 0
    first.record("k0", 0, SCORE)
    first.close()  # 4 seconds
    killed = Journal(tmp_path / "history.jsonl", HEADER)
    assert killed.earlier == 4
    killed.record("k1", 0, SCORE)
    killed.sync()  # 3 seconds
    killed.record("k2", 0, SCORE)
    killed.sync()  # 6 seconds
    killed.record("k3", 0, SCORE)
    again = Journal(tmp_path / "history.jsonl", HEADER)
    again.close()  # it had nothing to do
    assert again.earlier == 13
    assert Journal(tmp_path / "history.jsonl", HEADER).earlier == 13


def test_an_empty_file_is_a_new_journal(tmp_path):
    path = tmp_path / "history.jsonl"
    path.touch()
    Journal(path, HEADER).close()
    assert json.loads(path.read_text())["type"] == "header"


def test_a_place_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(JournalError, match=r"history.jsonl: cannot be read or written"):
        Journal(tmp_path / "file" / "history.jsonl", HEADER)
    (tmp_path / "history.jsonl").mkdir()
    with pytest.raises(JournalError, match=r"history.jsonl: cannot be read or written"):
        Journal(tmp_path / "history.jsonl", HEADER)


def test_without_a_path_nothing_is_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, HEADER)
    journal.record("k0", 0, SCORE)
    journal.generation(0, 0, lambda: GENOMES)
    journal.close()
    assert nlls(journal) == {("k0", 0): 1.0}
    assert journal.resumed == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["two years of work", '{"type": "thesis"', "one line\nand a half"])
def test_a_file_that_is_not_ours_is_left_as_it_is(tmp_path, text):
    """In its place or behind a link there: no end is cut off a line of it."""
    own, path, link = tmp_path / "thesis.txt", tmp_path / "history.jsonl", tmp_path / "link.jsonl"
    own.write_text(text)
    path.write_text(text)
    link.symlink_to(own)
    for place, reason in ((path, "line 1 is damaged"), (link, "symbolic link")):
        with pytest.raises(JournalError, match=reason):
            Journal(place, HEADER)
    assert [own.read_text(), path.read_text()] == [text, text]


def test_a_header_that_was_cut_off_is_written_again(tmp_path):
    path = written(tmp_path / "history.jsonl", {})
    whole = path.read_bytes()
    header = whole[: whole.index(b"\n") + 1]
    for end in range(len(header)):
        path.write_bytes(header[:end])
        Journal(path, HEADER).close()
        assert path.read_bytes() == header
