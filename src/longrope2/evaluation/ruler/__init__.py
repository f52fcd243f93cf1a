"""RULER: the samples NVIDIA's generator makes, to the byte, and its scores.

For the same seed, tokenizer, haystack and QA files, `input`, `outputs` and `length` are equal.
"""

from longrope2.evaluation.ruler.cache import make_all
from longrope2.evaluation.ruler.generate import RulerSample, make_samples
from longrope2.evaluation.ruler.questions import unavailable
from longrope2.evaluation.ruler.tasks import TASKS, RulerTask, score

__all__ = ["TASKS", "RulerSample", "RulerTask", "make_all", "make_samples", "score", "unavailable"]
