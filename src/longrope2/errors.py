"""The few exceptions a user may meet, each with a hint at the next step."""

import difflib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

LONGEST_REASON = 400
MOST_LISTED = 40
"""Names that a hint lists before it only counts them."""


class LongRopeError(Exception):
    """Something the user can fix: bad input, a missing package, a model that cannot be extended.

    The command line prints it as one message with its hint and exits with code 2.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class ModelError(LongRopeError):
    """The model cannot be found, read or extended."""


class FactorsError(LongRopeError):
    """A set of rescaling factors is wrong in itself or does not fit the model."""


class RotaryError(LongRopeError):
    """Factors could not be put into a live model, or did not take effect there."""


class DataError(LongRopeError):
    """Books, corpora or documents are missing, unreadable or too short."""


class MissingExtraError(LongRopeError):
    """A feature needs a package that is not installed."""


@contextmanager
def damage(subject: str, *, hint: str, kind: type[LongRopeError] = ModelError) -> Iterator[None]:
    """Report what a library raises for a file that is damaged or hostile, which may be anything."""
    try:
        yield
    except LongRopeError:
        raise
    except Exception as error:
        raise kind(f"{subject} ({first_line(error)})", hint=hint) from error


def first_line(error: BaseException) -> str:
    """What an error says, without what follows in further lines, or goes on for ever."""
    lines = str(error).strip().splitlines()
    return lines[0][:LONGEST_REASON] if lines else type(error).__name__


def counted(number: int, noun: str) -> str:
    """A number of things, in words: 1 document, 2,000 documents."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def all_problems(subject: str, problems: Sequence[str]) -> str:
    """One message that lists every problem found, so that the user can fix them in one go."""
    if len(problems) == 1:
        return f"{subject}: {problems[0]}"
    return f"{subject}: {len(problems)} problems\n" + "\n".join(f"  - {problem}" for problem in problems)


def chosen(kind: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names, in order and once each; an unknown one is refused with the nearest that exists."""
    known = list(known)
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            guess = f"did you mean '{near[0]}'? " if near else ""
            listed = f"there are {', '.join(known)}" if len(known) <= MOST_LISTED else f"there are {len(known):,}"
            raise LongRopeError(f"{kind} {name!r} is not known", hint=guess + listed)
    return names


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional package, or say which pip command brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise MissingExtraError(
            f"{purpose} needs the package '{error.name}', which is not installed",
            hint=f"pip install 'longrope2[{extra}]'",
        ) from error
