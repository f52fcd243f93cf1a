"""Files and folders that are whole or absent, a folder for one process at a time, and what made an artefact."""

import errno
import glob
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from longrope2.errors import LongRopeError

if sys.platform != "win32":  # where nobody is kept out
    import fcntl

PARTIAL = ".partial-"
"""In the names of files under way."""
ATTEMPTS, PAUSE = 5, 0.1
"""How often to try for a lock, and the seconds between."""
_PLAIN_LIST = re.compile(r"\[\n\s*([^\[\]{}]*?)\n\s*\]")
_BREAK = re.compile(r"\n\s*")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it takes the final name only if the block succeeds.

    What kills have left of earlier ones is swept away.
    """
    with _temporary(path) as temporary:
        if is_locked(temporary):  # where there are no locks, nobody knows whose the others are
            sweep(path.parent.glob(f".{glob.escape(path.name)}{PARTIAL}*"))
        temporary.chmod(0o666 & ~umask())
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        try:
            temporary.replace(path)
        except OSError as error:
            raise _unwritable(path, error) from error


def sweep(partial: Iterable[Path]) -> None:
    """Remove what kills have left of files under way: those that no process holds."""
    for path in partial:
        with suppress(OSError), path.open("rb") as left:
            if _locked(left.fileno()):
                path.unlink()


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder beside `folder`; it takes the final name, and the old one goes, only if the block succeeds.

    What a kill has left of an earlier one is swept away. A link stays one: what it points to is replaced.
    """
    folder = Path(os.path.realpath(folder))  # where resolve raises an error of its own for links in a circle
    temporary, replaced = (folder.with_name(f".{folder.name}.{state}") for state in ("partial", "replaced"))
    with only_one(temporary, "another process is writing it", hint="wait for it, or name another place"):
        try:
            _bring_back(folder, replaced)
            shutil.rmtree(replaced, ignore_errors=True)
            for left in temporary.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield temporary
            for file in (file for file in temporary.rglob("*") if file.is_file()):
                file.chmod(0o666 & ~umask())
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            if folder.exists():
                folder.rename(replaced)
            temporary.rename(folder)
            shutil.rmtree(replaced, ignore_errors=True)
        except BaseException:
            _bring_back(folder, replaced)
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _bring_back(folder: Path, replaced: Path) -> None:
    """Give a folder its name again if somebody was stopped between taking it away and putting the new one there."""
    if replaced.exists() and not folder.exists():
        replaced.rename(folder)


def umask() -> int:
    """What new files of the user are denied: mkstemp and safetensors make private ones, which an artefact is not."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold."""
    is_new = not path.parent.exists()
    with _temporary(path):
        pass
    if is_new:
        with suppress(OSError):  # somebody else is at work there
            path.parent.rmdir()  # the work may fail before it has anything to put there


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """An empty file beside `path`, whose folder is made where it is missing; locked, and gone in the end."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = _locked_file(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    with handle:
        if sys.platform == "win32":  # which renames no open file
            handle.close()
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def _locked_file(path: Path) -> tuple[IO[bytes], Path]:
    while True:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}{PARTIAL}", suffix=path.suffix)
        handle = os.fdopen(number, "r+b")
        if _locked(number) and Path(name).exists():
            return handle, Path(name)
        handle.close()  # just now somebody who writes the same file took it for what a kill has left


def _unwritable(path: Path, error: OSError) -> LongRopeError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LongRopeError(f"{path}: cannot be written ({reason})", hint="free some space, or write elsewhere")
    return LongRopeError(f"{path}: cannot be written ({reason})", hint="give another path, or make this one writable")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; NaN and infinity are refused, since JSON has neither."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    # A number a line makes lists that nobody reads; a line break stands between values only, never within a string.
    text = _PLAIN_LIST.sub(lambda found: f"[{_BREAK.sub(' ', found[1])}]", text)
    write_text(path, text + "\n")


@contextmanager
def only_one(
    folder: Path | None, refusal: str, *, hint: str = "wait for it, or use another folder", file: str = ""
) -> Iterator[None]:
    """Keep a second process out of a folder; whatever ends this one, also a kill, lets the next in.

    What is locked is a file there, or without one the folder itself, which some network file systems cannot lock.
    Without a folder nobody is kept out of anything.
    """
    if folder is None or sys.platform == "win32":
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / file, os.O_RDWR | os.O_CREAT, 0o666) if file else os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        for _ in range(ATTEMPTS):
            if _locked(handle):
                try:
                    yield
                except BaseException as error:
                    if _has_lost(error, folder):
                        raise LongRopeError(
                            f"{folder}: removed while this was at work there ({error})",
                            hint="run the same command again: it begins anew",
                        ) from error
                    with suppress(OSError):
                        if not file:  # a folder of this work alone, and nothing may have come into it
                            folder.rmdir()
                    raise
                return
            time.sleep(PAUSE)  # somebody who only looks is gone by then
    finally:
        os.close(handle)
    raise LongRopeError(f"{folder}: {refusal}", hint=hint)


def _has_lost(error: BaseException, folder: Path) -> bool:
    """Whether something failed because somebody removed the folder that it was at work in."""
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str | bytes) or folder.exists():
        return False
    return Path(os.fsdecode(error.filename)).absolute().is_relative_to(folder.absolute())


def is_locked(path: Path) -> bool:
    """Whether a process holds this file, or folder, for itself right now."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False  # nobody ever was there
    try:
        return not _locked(handle)
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    """Take a lock, which ends when the handle is closed; True also where there are none to take."""
    if sys.platform != "win32":
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
    return True


def package_versions(*names: str) -> dict[str, str]:
    """Versions of this package and of the installed ones among `names`, for provenance."""
    versions = {}
    for name in ("longrope2", *names):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
