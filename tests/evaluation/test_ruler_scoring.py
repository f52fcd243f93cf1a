"""RULER's metrics by hand."""

import pytest

from longrope2.evaluation.ruler import score
from longrope2.evaluation.ruler.tasks import clean


@pytest.mark.parametrize(
    ("task", "prediction", "outputs", "expected"),
    [
        ("niah_single_1", " 7374122.", ["7374122"], 1.0),
        ("niah_single_1", " 737412", ["7374122"], 0.0),
        ("niah_multivalue", "1, 22 and 333", ["1", "22", "4444", "555"], 0.5),
        ("niah_single_3", "It is 448AAA9E-66B2.", ["448aaa9e-66b2"], 1.0),
        ("vt", "ABCDE FGHIJ", ["ABCDE", "FGHIJ", "KLMNO", "PQRST", "UVWXY"], 0.4),
        ("cwe", "1. tights 2. solve", ["tights", "solve", "angry"], 2 / 3),
        ("fwe", "", ["a", "b", "c"], 0.0),
        ("qa_1", "It lies in france", ["France", "France", "the kingdom"], 1.0),  # any reference, not their share
        ("qa_2", "no", ["yes"], 0.0),
        ("qa_1", "10th\x00and 11th", ["10th and 11th"], 0.0),
        ("qa_1", "10th\x00and 11th", ["10th\nAND 11th"], 1.0),
    ],
)
def test_scores(task, prediction, outputs, expected):
    assert score(task, prediction, outputs) == pytest.approx(expected)


def test_control_characters_become_newlines_and_ends_are_stripped():
    assert clean(" \x01a\tb\x1fc\x7f \n") == "a\nb\nc\x7f"
