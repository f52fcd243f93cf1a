"""What people see in a terminal: data on stdout, everything else on stderr."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def show_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    print(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


def show_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str | None = None
) -> None:
    """Print a table on stdout; numbers align right, cells are never cut when the output is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.caption_justify = "left"
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)


def say(message: str) -> None:
    """Print a line for people on stderr."""
    print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print a warning on stderr."""
    say(f"warning: {message}")


def terminal_width() -> int:
    """Columns to fill; generous when the output is a pipe or a file."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 200
