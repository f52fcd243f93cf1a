"""What to evaluate, checked as far as nothing needs to be loaded for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrope2.books import read_books
from longrope2.errors import LongRopeError, all_problems, chosen
from longrope2.options import Length, broken_limits, build, option, wrong_types

if TYPE_CHECKING:
    from longrope2.evaluation.suite import Suite

SHORTEST = 4096
"""Of the lengths that suites have by default, as in RULER."""
LARGEST_SEED = 2**32 - 1
"""Of numpy's old generator, with which RULER draws."""


def _suites() -> "Mapping[str, Suite]":
    from longrope2.evaluation.suites import SUITES  # not at the top: `--help` reads this module

    return SUITES


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What to run."""

    suites: tuple[str, ...] = option(help="One or more, comma-separated.", flag="--suite", choices=_suites)
    lengths: tuple[Length, ...] = option(
        (), "Tokens of prompt and answer, e.g. 4k,8k.", usual="4k, 8k, 16k, … up to the window", least=1
    )
    samples: int | None = option(
        None, "Samples per task and length (niah: per cell).", usual="the suite's", metavar="N", least=1
    )
    tasks: tuple[str, ...] = option((), "Only these tasks of the suites.", usual="all")
    data: str | None = option(None, "The benchmarks' own files: see docs/evaluation.md.", metavar="FOLDER")
    books: str | None = option(None, "Books for suites that need some.", usual="the package's books", metavar="SOURCE")
    judge: str | None = option(
        None, "longppl: the model that finds the key tokens.", usual="MODEL without factors", metavar="MODEL"
    )
    chat: bool = option(False, "Put prompts into the tokenizer's chat template.")
    seed: int = option(42, "The same seed asks the same questions.", least=0, most=LARGEST_SEED)
    beyond_window: bool = option(False, "Allow lengths beyond the window.", recipe=False)
    batch_tokens: Length | None = option(None, "Tokens in a batch.", usual="by free memory", least=1)

    def __post_init__(self) -> None:
        suites = _suites()
        problems = wrong_types(self) or broken_limits(self)
        if not self.suites:
            problems.append(f"no suite is named; there are {', '.join(suites)}")
        for name in self.suites:
            most = suites[name].most_samples if name in suites else None
            if most is not None and (self.samples or 0) > most:
                problems.append(f"samples must be at most {most} for {name}, got {self.samples}")
        if self.data_path is not None and not self.data_path.is_dir():
            problems.append(f"{self.data}: no such folder")
        if problems:
            raise LongRopeError(all_problems("evaluation", problems), hint="see `longrope2 evaluate --help`")
        if self.books is not None:
            read_books(self.books)  # refuses what is not there, and reads nothing yet
        chosen("suite", self.suites, suites)
        for task in self.tasks:
            self._owner(task)

    @property
    def data_path(self) -> Path | None:
        """The folder of data files."""
        return None if self.data is None else Path(self.data)

    def tasks_of(self, suite: str) -> tuple[str, ...]:
        """The tasks of a suite that were named; all of them where none was."""
        named = tuple(task for task in dict.fromkeys(self.tasks) if self._owner(task) == suite)
        return named or _suites()[suite].tasks

    def _owner(self, task: str) -> str:
        """The suite that a task belongs to: the one that has it, or the one that takes any."""
        suites = _suites()
        owners = [name for name in self.suites if task in suites[name].tasks]
        owners += [name for name in self.suites if suites[name].any_task]
        if not owners:
            chosen("task", [task], [known for name in self.suites for known in suites[name].tasks])
        return owners[0]


def evaluation_config(**options: Any) -> EvaluationConfig:
    """A configuration from options, as command line and Python give them."""
    return build(EvaluationConfig, "evaluation options", options)


def lengths_for(config: EvaluationConfig, window: int) -> tuple[int, ...]:
    """The lengths to run, longest first; refuses those beyond the window unless asked for."""
    lengths = sorted(set(config.lengths), reverse=True)
    if not lengths:
        powers = [SHORTEST << shift for shift in range(16) if SHORTEST << shift <= window]
        lengths = sorted(powers or [window], reverse=True)
    if lengths[0] > window and not config.beyond_window:
        raise LongRopeError(
            f"length {lengths[0]:,} is beyond the model's window of {window:,} tokens",
            hint="choose shorter --lengths, give --factors that reach it, or use --beyond-window",
        )
    return tuple(lengths)
