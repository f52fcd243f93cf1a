"""Where an export goes: never over something by accident, never without room."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longrope2.errors import LongRopeError

MARGIN = 64 << 20
"""Bytes for tokenizer, config and the file system's own needs."""


def check_output(output: Path, *, source: str, force: bool, is_folder: bool, is_ours: Callable[[Path], bool]) -> None:
    """Raise unless `output` may be written: it is free, or an earlier export and `force` is given."""
    if output.exists() and Path(source).exists() and Path(source).resolve().is_relative_to(output.resolve()):
        raise LongRopeError(f"{output} is the model itself, or holds it", hint="write the export to another place")
    if is_folder and output.is_dir() and (output.is_mount() or Path.cwd().is_relative_to(output.resolve())):
        raise LongRopeError(
            f"{output} is a mount point, or the folder that you are in: it cannot be replaced as a whole",
            hint=f"name a folder in it, such as -o {output / 'model'}",
        )
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
            f"{output}: the export needs {(needed + MARGIN) / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free there",
            hint="make room, name another disk with -o, or write a smaller --dtype",
        )


@contextmanager
def room_ends(output: Path) -> Iterator[None]:
    """Tell of a disk that fills up, or a quota that is met, on the way; safetensors and numpy call it no ENOSPC."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's own words, with the path
        raise LongRopeError(
            f"{output}: cannot be written ({error})", hint="make room, or name another disk with -o"
        ) from error
