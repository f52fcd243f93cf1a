"""RULER's metrics: a reference counts when it occurs in the answer, whatever its case."""

import re
from collections.abc import Sequence

from longrope2.evaluation.ruler.tasks import TASKS

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f]")


def score(task: str, prediction: str, outputs: Sequence[str]) -> float:
    """The score of one answer, 0 to 1: the share of the references found in it; for QA, whether any is found."""
    answer = clean(prediction).lower()
    found = [output.lower() in answer for output in outputs]
    return float(any(found)) if TASKS[task].metric == "part" else sum(found) / len(found)


def clean(prediction: str) -> str:
    """The answer as it is compared: control characters become newlines."""
    return CONTROL_CHARACTERS.sub("\n", prediction.strip()).strip()
