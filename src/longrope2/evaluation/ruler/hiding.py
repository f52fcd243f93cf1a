"""Needles in a haystack of noise, of an essay or of other needles."""

import uuid
from random import Random

from longrope2.evaluation.ruler.haystack import Haystack, adjective_nouns
from longrope2.evaluation.ruler.sizing import Draft, Maker
from longrope2.evaluation.ruler.tasks import NEEDLE, NOISE, Needle, RulerTask
from longrope2.evaluation.suite import Frame

DEPTHS = [round(100 * i / 39) for i in range(40)]  # in percent, one of which each needle has in an essay


class NeedleMaker(Maker):
    """Prompts of the eight needle tasks; sizes are words of an essay, or lines."""

    def __init__(self, task: RulerTask, *, length: int, seed: int, frame: Frame, haystack: Haystack | None) -> None:
        assert task.needles is not None
        self._task, self._setup, self._frame, self._essay = task, task.needles, frame, haystack
        self._seed = seed
        self._random = Random(seed)  # noqa: S311
        self.step = 500 if haystack is not None else 25 if length >= 4096 else 5

    def least(self, index: int) -> int:
        """One place for each needle."""
        return self._setup.keys * self._setup.values

    def draw(self, size: int, index: int) -> Draft:
        """A prompt with its needles in place."""
        setup = self._setup
        keys, values = [], []
        for _ in range(setup.keys):
            keys.append(self._one_of(setup.key))
            values.append([self._one_of(setup.value) for _ in range(setup.values)])
        needles = [self._needle(key, value) for key, of_key in zip(keys, values, strict=True) for value in of_key]
        Random(self._seed).shuffle(needles)  # noqa: S311
        context = self._lines(needles, size) if self._essay is None else self._text(needles, size, self._essay)

        asked = self._random.sample(range(setup.keys), setup.queries)
        queries = [keys[i] for i in asked]
        query = ", ".join(queries[:-1]) + ", and " + queries[-1] if len(queries) > 1 else queries[0]
        kind = setup.value[:-1] if setup.single_answer else setup.value
        text = self._task.template.format(kind=kind, context=context, query=query)
        prefix = self._task.answer_prefix.format(kind=kind, query=query)
        return Draft(self._frame(text), prefix, [value for i in asked for value in values[i]])

    def _text(self, needles: list[str], size: int, essay: Haystack) -> str:
        """An essay with the needles between its sentences."""
        sentences = essay.sentences(size)
        depths = self._random.sample(DEPTHS, len(needles))
        places = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
        pieces, start = [], 0
        for needle, place in zip(needles, places, strict=True):
            # A piece may be empty and still brings its space: RULER has it so.
            pieces += [" ".join(sentences[start:place]), needle]
            start = place
        return " ".join([*pieces, " ".join(sentences[start:])])

    def _lines(self, needles: list[str], size: int) -> str:
        """Lines of noise, or of needles that no question asks for, with the needles between them."""
        setup = self._setup
        if setup.haystack == "noise":
            lines = [NOISE] * size
        else:
            lines = [self._needle(self._one_of(setup.key), self._one_of(setup.value)) for _ in range(size)]
        places = sorted(self._random.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self._setup.value, key=key, value=value)

    def _one_of(self, kind: Needle) -> str:
        if kind == "numbers":
            return str(self._random.randint(10**6, 10**7 - 1))
        if kind == "words":
            return self._random.choice(adjective_nouns())
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))
