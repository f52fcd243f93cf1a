"""Sentences of any beginning of a haystack are those nltk would find in it, and keys those of the full list."""

import json
import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.tokenize.punkt import PunktSentenceTokenizer

from longrope2.errors import DataError, MissingExtraError
from longrope2.evaluation.ruler import haystack, hiding
from longrope2.evaluation.ruler.haystack import Haystack, find_breaks

# Without trained parameters it knows no abbreviations, but breaks sentences by the same rules.
SPLITTER = PunktSentenceTokenizer()
TOKENS = [
    "Yes.",
    "No",
    "he",
    '"Go!"',
    "(It",
    "is.)",
    'end."He',
    "etc.",
    "J.",
    "...",
    "a",
    "Why?!",
    ")",
    "''",
    "--",
    '"',
    "12.",
    "Oh!!",
    "so.'!",
    "?",
]


def by_nltk(words_, count):
    repeated = words_ * (count // len(words_) + 1)
    return SPLITTER.tokenize(" ".join(repeated[:count]).strip())


@given(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=90), st.booleans(), st.integers(1, 300))
@settings(max_examples=200)
def test_sentences_of_every_beginning(tokens, spaced, count):
    words_ = ["", *tokens, ""] if spaced else tokens
    pile = Haystack(words_, find_breaks(words_, SPLITTER))
    assert pile.sentences(count) == by_nltk(words_, count)


def test_a_real_book_at_any_cut():
    words_ = haystack.haystack_text(None)[:40_000].split()
    pile = Haystack(words_, find_breaks(words_, SPLITTER))
    for count in random.Random(0).sample(range(1, 3 * len(words_)), 25):
        assert pile.sentences(count) == by_nltk(words_, count)


def test_the_packages_sentences_fit_its_books():
    table = json.loads(haystack.lzma.decompress(haystack.package_file().read_bytes()))
    assert table["books"] == haystack.haystack_fingerprint(None)
    pile = haystack.load_haystack(None)
    sentences = pile.sentences(50_000)
    text = "".join(sentences).replace(" ", "")
    assert len(text) > 200_000
    assert "".join(haystack.haystack_text(None).split()).startswith(text)
    # Trained parameters distinguish titles and initials from ends; the rest ends as sentences do.
    assert not any(s.endswith((" Mr.", " Mrs.", " Dr.", " St.")) for s in sentences)
    assert np.mean([s.endswith((".", "?", "!", '"', "'", ")", "_")) for s in sentences]) > 0.99
    assert 12 < 50_000 / len(sentences) < 40


def test_essays_are_read_from_their_file(tmp_path, monkeypatch):
    monkeypatch.setattr(haystack, "_punkt", lambda: SPLITTER)
    file = tmp_path / "PaulGrahamEssays.json"
    file.write_text(json.dumps({"text": "One day.\n\nTwo  days. Three"}))
    assert haystack.load_haystack(file).sentences(7) == ["One day.", "Two days.", "Three One day."]
    (tmp_path / "essay.txt").write_text("Four. Five")
    assert haystack.load_haystack(tmp_path / "essay.txt").sentences(2) == ["Four.", "Five"]


@pytest.mark.parametrize("content", ["[]", '{"text": 1}', '{"text": " "}', "{"])
def test_a_file_without_essays_is_named(tmp_path, content):
    file = tmp_path / "essays.json"
    file.write_text(content)
    with pytest.raises(DataError, match=r"essays\.json"):
        haystack.load_haystack(file)


def test_without_punkt_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    file = tmp_path / "a.txt"
    file.write_text("One. Two.")
    with pytest.raises(DataError, match="punkt_tab") as error:
        haystack.load_haystack(file)
    assert "nltk.downloader" in error.value.hint


def test_without_wonderwords_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(MissingExtraError, match="wonderwords"):
        haystack.word_list.__wrapped__("noun")


def test_compounds_are_the_sorted_set():
    firsts, seconds = ["old", "old-fashioned", "olden", "a", "a-b"], ["b-c", "c", "eye", "fat", "z z", "fashioned"]
    expected = sorted({f"{first}-{second}" for first in firsts for second in seconds})
    assert list(haystack.Compounds(firsts, seconds)) == expected
    assert haystack.Compounds(firsts, seconds)[-1] == expected[-1]


def test_keys_come_from_all_adjectives_and_nouns():
    keys = haystack.adjective_nouns()
    assert len(keys) == 6_171_620  # of the full set, which takes long to build
    few = [keys[i] for i in random.Random(1).sample(range(len(keys)), 2000)]
    assert sorted(few) == [keys[i] for i in sorted(random.Random(1).sample(range(len(keys)), 2000))]


def test_depths_are_numpys():
    assert list(np.round(np.linspace(0, 100, num=40, endpoint=True)).astype(int)) == hiding.DEPTHS
