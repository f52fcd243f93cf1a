"""Where an export goes: never over something by accident, never without room."""

import shutil
from collections.abc import Callable
from pathlib import Path

from longrope2.errors import LongRopeError

MARGIN = 64 << 20
"""Bytes for tokenizer, config and the file system's own needs."""


def check_output(output: Path, *, source: str, force: bool, is_folder: bool, is_ours: Callable[[Path], bool]) -> None:
    """Raise unless `output` may be written: it is free, or an earlier export and `force` is given."""
    if output.exists() and Path(source).exists() and output.resolve() == Path(source).resolve():
        raise LongRopeError(f"{output} is the model itself", hint="write the export to another place")
    if not output.exists() or (is_folder and output.is_dir() and not any(output.iterdir())):
        return
    if is_folder != output.is_dir():
        raise LongRopeError(f"{output} is a {'file' if is_folder else 'folder'}", hint="name another place with -o")
    if not is_ours(output):
        raise LongRopeError(
            f"{output} is not an export of longrope2, and is never replaced", hint="name another place with -o"
        )
    if not force:
        raise LongRopeError(f"{output} exists already", hint="--force replaces it")


def check_room(output: Path, needed: int) -> None:
    """Raise unless the disk has room for this many bytes."""
    place = next(parent for parent in output.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed + MARGIN:
        raise LongRopeError(
            f"{output}: the export needs {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free there",
            hint="make room, name another disk with -o, or write a smaller --dtype",
        )
