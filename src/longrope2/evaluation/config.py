"""What to evaluate, checked as far as nothing needs to be loaded for it."""

from dataclasses import dataclass
from pathlib import Path

from longrope2.books import read_books
from longrope2.errors import LongRopeError, all_problems, below_minimum, chosen, out_of_range
from longrope2.evaluation.suites import SUITES

SHORTEST = 4096
LARGEST_SEED = 2**32 - 1
"""Of numpy's old generator, with which RULER draws."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What to run."""

    suites: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    """Tokens of prompt and answer; none means 4k, 8k, … up to the model's window."""
    tasks: tuple[str, ...] = ()
    """None means all tasks of a suite."""
    samples: int | None = None
    """Per task and length, per cell for niah; None means as many as each suite usually has."""
    seed: int = 42
    data: str | None = None
    """Folder of the benchmarks' own files."""
    books: str | None = None
    """What niah and perplexity are made of; None means the package's books."""
    chat: bool = False
    beyond_window: bool = False
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        problems = below_minimum(self, samples=1, batch_tokens=1)
        if not self.suites:
            problems.append(f"no suite is named; there are {', '.join(SUITES)}")
        problems += out_of_range(self, seed=(0, LARGEST_SEED))
        for name in self.suites:
            most = SUITES[name].most_samples if name in SUITES else None
            if most is not None and (self.samples or 0) > most:
                problems.append(f"samples must be at most {most} for {name}, got {self.samples}")
        if self.data_path is not None and not self.data_path.is_dir():
            problems.append(f"{self.data}: no such folder")
        if problems:
            raise LongRopeError(all_problems("evaluation", problems), hint="see `longrope2 evaluate --help`")
        if self.books is not None:
            read_books(self.books)  # refuses what is not there, and reads nothing yet
        chosen("suite", self.suites, SUITES)
        for task in self.tasks:
            self._owner(task)

    @property
    def data_path(self) -> Path | None:
        """The folder of data files."""
        return None if self.data is None else Path(self.data)

    def tasks_of(self, suite: str) -> tuple[str, ...]:
        """The tasks of a suite that were named; all of them where none was."""
        named = tuple(task for task in dict.fromkeys(self.tasks) if self._owner(task) == suite)
        return named or SUITES[suite].tasks

    def _owner(self, task: str) -> str:
        """The suite that a task belongs to: the one that has it, or the one that takes any."""
        owners = [name for name in self.suites if task in SUITES[name].tasks]
        owners += [name for name in self.suites if SUITES[name].any_task]
        if not owners:
            chosen("task", [task], [known for name in self.suites for known in SUITES[name].tasks])
        return owners[0]


def lengths_for(config: EvaluationConfig, window: int) -> tuple[int, ...]:
    """The lengths to run, longest first; refuses those beyond the window unless asked for."""
    lengths = sorted(set(config.lengths), reverse=True)
    if not lengths:
        powers = [SHORTEST << shift for shift in range(16) if SHORTEST << shift <= window]
        lengths = sorted(powers or [window], reverse=True)
    if lengths[0] > window and not config.beyond_window:
        raise LongRopeError(
            f"length {lengths[0]:,} is beyond the model's window of {window:,} tokens",
            hint="choose shorter --lengths, give --factors that reach it, or say --beyond-window",
        )
    return tuple(lengths)
