"""What every suite gets and gives."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrope2.errors import DataError, LongRopeError
from longrope2.evaluation.results import Outcome

if TYPE_CHECKING:
    from longrope2.evaluation.engine import Engine

MOST_LISTED = 40
ROOMY = 1 << 14
"""Tokens that have room for the smallest sample of every task, whatever the tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the user asked for, as far as a suite cares."""

    tokenizer: Any
    lengths: tuple[int, ...]
    """Longest first."""
    tasks: tuple[str, ...]
    """Of this suite."""
    named: bool
    """Whether the user named these tasks, rather than taking all."""
    samples: int | None
    """Per task and length, or cell; None is the suite's own number."""
    seed: int
    data: Path | None
    books: str | None
    chat: bool
    note: Callable[[str], None]
    """Takes what people should know while it runs."""
    cache: Path
    """Where samples that take long to make are kept."""

    @property
    def trial(self) -> "Setup":
        """The same for a first sample that is soon made, in order to see whether there can be one."""
        return replace(self, samples=1, lengths=tuple(min(length, ROOMY) for length in self.lengths))


def data_folder(data: Path | None, suite: str, source: str) -> Path:
    """Where the files of a suite lie: its own folder in --data, or that folder itself."""
    if data is None:
        raise DataError(f"suite {suite} needs its data files", hint=source)
    own = data / suite
    return own if own.is_dir() else data


def existing(path: Path, source: str) -> Path:
    """The same path, or an error that says where the file comes from."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder", hint=source)
    return path


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark."""

    name: str
    tasks: tuple[str, ...]
    """All it has; none where the names belong to another program."""
    run: "Callable[[Setup, Engine], Outcome]"
    any_task: bool = False
    """Whether it takes names beyond `tasks`."""
    most_samples: int | None = None
    """Where it cannot make as many as are asked for."""
    check: Callable[[Setup], object] | None = None
    """Refuses lengths and files that it cannot run with; called before a model is loaded for nothing."""


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
