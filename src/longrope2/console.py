"""What people see in a terminal: data on stdout, everything else on stderr."""

import json
import sys
import time
from typing import Any

from longrope2.records import Table, as_json


def show_json(value: Any) -> None:
    """Print a record, or any plain value, as JSON on stdout."""
    print(json.dumps(as_json(value), indent=1, ensure_ascii=False, allow_nan=False))


def show_table(shown: Table) -> None:
    """Print a table on stdout; numbers align right, cells are never cut when the output is not a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in shown.columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in shown.rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
    # Outside the table, whose own title and caption would be squeezed into its width.
    console.print(shown.title)
    console.print(table)
    if shown.caption:
        console.print(shown.caption)


def say(message: str) -> None:
    """Print a line for people on stderr."""
    print(message, file=sys.stderr, flush=True)


def quiet(*_: object) -> None:
    """Say nothing, as all processes but the main one."""


def warn(message: str) -> None:
    """Print a warning on stderr."""
    say(f"warning: {message}")


def alarm(message: str) -> None:
    """Print on stderr, in red on a terminal, what must not be passed over."""
    say(f"\033[1;31m{message}\033[0m" if sys.stderr.isatty() else message)


def terminal_width() -> int:
    """Columns to fill; generous when the output is a pipe or a file."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 200


class ProgressLine:
    """One line on stderr that says how far a job is and when it will end.

    A terminal sees it rewritten in place; a log file gets a new line at most every few seconds.
    """

    def __init__(self, total: int, label: str, *, log_every: float = 5.0) -> None:
        self._total = total
        self._label = label
        self._log_every = log_every
        self._started = self._printed = time.monotonic()
        self._live = sys.stderr.isatty()
        self._done = 0.0

    def advance(self, count: int = 1, text: str = "") -> None:
        """Report that `count` more is done."""
        self.update(self._done + count, text)

    def update(self, done: float, text: str = "", *, always: bool = False) -> None:
        """Report that `done` of the total is done; with `always`, a log gets this line in any case."""
        self._done = done
        now = time.monotonic()
        finished = done >= self._total
        if not self._live and not finished and not always and now - self._printed < self._log_every:
            return
        self._printed = now
        elapsed = now - self._started
        if finished:
            clock = f"{duration(elapsed)} taken"
        elif done:
            clock = f"{duration(elapsed)}, {duration(elapsed / done * (self._total - done))} left"
        else:
            clock = duration(elapsed)
        line = f"{self._label} {int(done)}/{self._total} [{clock}] {text}".rstrip()
        if self._live:
            end = "\n" if finished else ""
            print(f"\r\x1b[2K{line}", end=end, file=sys.stderr, flush=True)
        else:
            say(line)


UNITS = (("year", 31_557_600), ("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1))


def roughly(seconds: float) -> str:
    """A time in the unit that people would use: 40 seconds, 3 hours, 178 days."""
    name, size = next((unit for unit in UNITS if seconds >= 1.95 * unit[1]), UNITS[-1])
    count = seconds / size
    shown = f"{count:.0f}" if count >= 9.5 or name == "second" else f"{count:.1f}".removesuffix(".0")
    return f"{shown} {name}{'' if shown == '1' else 's'}"


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
