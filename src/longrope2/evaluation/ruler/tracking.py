"""Variable tracking: a chain of assignments hidden in noise, after one worked example."""

from collections.abc import Callable
from itertools import pairwise
from random import Random
from string import ascii_uppercase
from typing import TYPE_CHECKING

from longrope2.evaluation.ruler.sizing import Draft, Maker, fitting
from longrope2.evaluation.ruler.tasks import NOISE, VARIABLE_TRACKING
from longrope2.evaluation.suite import Frame

if TYPE_CHECKING:
    import numpy as np

HOPS = 4
EXAMPLE_LENGTH = 500  # tokens
EXAMPLE_VALUE = "12345"  # replaced in each sample


class ChainMaker(Maker):
    """Prompts without an example, and the example itself; sizes are lines of noise."""

    def __init__(self, *, name_letters: int, step: int, random: Random, numbers: "np.random.RandomState") -> None:
        self._name_letters, self._random, self._numbers = name_letters, random, numbers
        self.step = step

    def least(self, index: int) -> int:
        """One line for each assignment."""
        return HOPS + 1

    def draw(self, size: int, index: int) -> Draft:
        """A prompt with its chain in place."""
        names = self._names()
        value = self._value()
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {name} = VAR {source} " for source, name in pairwise(names)]
        lines = [NOISE] * size
        places = sorted(self._random.sample(range(size), len(chain)))
        for already, (place, link) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + already, link)
        context = "\n".join(lines)
        text = VARIABLE_TRACKING.template.format(context=context, query=value)
        prefix = VARIABLE_TRACKING.answer_prefix.format(count=len(names), query=value)
        return Draft(text, prefix, names)

    def _value(self) -> str:
        return EXAMPLE_VALUE

    def _names(self) -> list[str]:
        while True:
            names = [random_name(self._random, self._name_letters) for _ in range(HOPS + 1)]
            if len(set(names)) == len(names):  # NVIDIA's generator stops with an error otherwise
                return names


class TrackingMaker(ChainMaker):
    """Prompts with the example, whose names and value are others in each sample."""

    def __init__(self, *, length: int, seed: int, frame: Frame, count_tokens: Callable[[str], int]) -> None:
        random = Random(seed)  # noqa: S311
        import numpy as np

        numbers = np.random.RandomState(seed)
        example = ChainMaker(name_letters=3, step=5, random=random, numbers=numbers)
        draft, _ = next(fitting(example, count_tokens, length=EXAMPLE_LENGTH, new_tokens=0, count=1))
        self._example = f"{draft.prompt} {' '.join(draft.outputs)}\n"
        self.trial_lacks = count_tokens(self._example)
        self._frame = frame
        super().__init__(name_letters=5, step=10 if length >= 4096 else 5, random=random, numbers=numbers)

    def trial(self, size: int) -> Draft:
        """A prompt without the example."""
        draft = super().draw(size, 0)
        return Draft(self._frame(draft.input), draft.answer_prefix, draft.outputs)

    def draw(self, size: int, index: int) -> Draft:
        """A prompt with an example that no other sample has."""
        draft = super().draw(size, index)
        return Draft(self._frame(f"{self._new_example()}\n{draft.input}"), draft.answer_prefix, draft.outputs)

    def _value(self) -> str:
        return str(self._numbers.randint(10_000, 99_999))

    def _new_example(self) -> str:
        example = self._example
        for name in self._example.split()[-HOPS - 1 :]:
            example = example.replace(name, random_name(self._random, len(name)))
        return example.replace(EXAMPLE_VALUE, self._value())


def random_name(random: Random, letters: int) -> str:
    """A variable's name."""
    return "".join(random.choices(ascii_uppercase, k=letters))
