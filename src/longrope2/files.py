"""Files and folders that are whole or absent, a folder for one process at a time, and what made an artefact."""

import errno
import glob
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import stat
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import xxhash

from longrope2.errors import LongRopeError

if sys.platform != "win32":  # where nobody is kept out
    import fcntl

PARTIAL = ".partial-"
"""In the names of the folders that hold what is under way."""
NEW, OLD, MARK = "new", "old", "mark-"
"""In such a folder: what is written, what it replaces, and the file by which the folder is known as ours."""
FULL = (errno.ENOSPC, errno.EDQUOT)
ATTEMPTS, PAUSE = 5, 0.1
"""How often to try for a lock, and the seconds between."""
_PLAIN_LIST = re.compile(r"\[\n\s*([^\[\]{}]*?)\n\s*\]")
_BREAK = re.compile(r"\n\s*")
MOST_BYTES, MOST_LEVELS = 1 << 28, 100
"""Of a JSON file, or of a line of JSON: more is not read."""
_LONG_KEY = re.compile(rf"""(?<![\w-])((?:"[^"\n]*+"|'[^'\n]*+'|[\w-]++)[ \t]*+\.[ \t]*+){{{MOST_LEVELS}}}""")
_LARGE, _SURROGATE = re.compile(r"\d{19}|[eE]\+?\d{3}"), re.compile(r"\\u[dD][89a-fA-F]")


@contextmanager
def atomic_path(path: Path, *, refusal: str = "") -> Iterator[Path]:
    """Yield a temporary path; what is written there takes the final name only if the block succeeds.

    With a refusal, which says what the other one is doing, only one process at a time may write the file.
    """
    with _under_way(path, refusal) as place:
        temporary = place / f"{NEW}{path.suffix}"
        temporary.touch()
        yield temporary
        _settle(temporary)
        with writing_to(path):
            temporary.replace(path)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder; it takes the final name, and the old one goes, only if the block succeeds.

    Of a link only the link goes: what it points to may be anything.
    """
    with _under_way(folder, "another process is writing it", is_folder=True) as place:
        temporary = place / NEW
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _settle(file)
        with writing_to(folder):
            if os.path.lexists(folder):
                folder.rename(place / OLD)
            temporary.rename(folder)


def _settle(file: Path) -> None:
    """See to it that a file is on disk, and open to those whom the user's new files are open to."""
    file.chmod(0o666 & ~umask())
    with file.open("rb") as written:
        os.fsync(written.fileno())


@contextmanager
def _under_way(path: Path, refusal: str = "", *, is_folder: bool = False) -> Iterator[Path]:
    """A new folder beside `path` for what will take its name; held while the block lasts, and gone after it.

    Others may write into the folder of `path`, too. So the name cannot be guessed, and nobody else may enter.
    """
    with writing_to(path):
        if path.exists() and not (path.is_dir() if is_folder else path.is_file()):
            # A rename would replace a device or a pipe, and take away a file where a folder is meant.
            kind = errno.EISDIR if path.is_dir() else errno.ENOTDIR
            raise OSError(kind, os.strerror(kind) if is_folder or path.is_dir() else "not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        held, place = _claimed(path, refusal)
    with held:
        try:
            with naming(path, place / NEW), _noticing_loss(place):
                yield place
        finally:
            _remove(place)


def _claimed(path: Path, refusal: str) -> tuple[IO[bytes], Path]:
    """A new folder and its mark: a locked file whose name is the folder's own inode number.

    By that number a folder that a kill has left is known again. A link, a copy or one from an archive cannot have it.
    """
    attempts = 0
    while True:
        place = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}{PARTIAL}"))
        try:
            mark = place / f"{MARK}{place.stat().st_ino}"
            held = mark.open("xb")
        except FileNotFoundError:  # just now another process took it for what a kill has left
            continue
        if not _locked(held.fileno()) or not mark.exists():
            held.close()  # the same, a moment later
            continue
        # Where there are no locks, nobody knows whose the others are.
        others = path.parent.glob(f".{glob.escape(path.name)}{PARTIAL}*") if is_locked(mark) else ()
        if not sweep(other for other in others if other.name != place.name) or not refusal:
            if sys.platform == "win32":  # which removes no open file
                held.close()
            return held, place
        _remove(place)
        held.close()
        attempts += 1
        if attempts == ATTEMPTS:
            raise LongRopeError(f"{path}: {refusal}", hint="wait for it, or name another place")
        time.sleep(PAUSE * (0.5 + os.urandom(1)[0] / 256))  # two that came at once must not meet again


def sweep(partial: Iterable[Path]) -> bool:
    """Remove what kills have left of folders under way; returns whether processes hold others.

    Only what is certainly ours goes: not a link, owned by this user, with the mark of that very folder.
    """
    is_any_held = False
    for place in list(partial):
        with suppress(OSError), _marked(place) as (folder, mark):
            if not _locked(mark):
                is_any_held = True
            elif sys.platform != "win32" and os.fstat(folder).st_uid == os.geteuid():
                _clear(place, folder)
        with suppress(OSError):
            place.rmdir()  # an empty one: the kill came before it had its mark, or after
    return is_any_held


def _remove(place: Path) -> None:
    """Remove a folder under way."""
    if sys.platform == "win32":
        shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError), _marked(place) as (folder, _):
        _clear(place, folder)


@contextmanager
def _marked(place: Path) -> Iterator[tuple[int, int]]:
    """The handles of a folder under way and of its mark; OSError for a link, a file or any other folder."""
    if sys.platform == "win32":  # which opens no folders
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        mark = os.open(f"{MARK}{os.fstat(folder).st_ino}", os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
        try:
            yield folder, mark
        finally:
            os.close(mark)
    finally:
        os.close(folder)


def _clear(place: Path, folder: int) -> None:
    """Remove a folder under way, its mark last; what was about to be replaced gets its name back first."""
    if {NEW, OLD} <= set(os.listdir(folder)):
        target = place.with_name(place.name[1:].rpartition(PARTIAL)[0])
        if os.path.lexists(target):
            return  # something else has taken the name: neither may go
        os.rename(OLD, target, src_dir_fd=folder)
    for name in sorted(os.listdir(folder), key=lambda name: name.startswith(MARK)):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    place.rmdir()


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Have errors of the system name this file: those of a full disk name none, and others its temporary name."""
    try:
        yield
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else ""
        if error.errno in FULL and not name:
            error.filename = str(path)
        elif temporary is not None and name.startswith(str(temporary)):
            error.filename = f"{path}{name.removeprefix(str(temporary)).removeprefix(path.suffix)}"
        raise


def umask() -> int:
    """What new files of the user are denied: mkstemp and safetensors make private ones, which an artefact is not."""
    mask = os.umask(0o077)  # until the next line: other threads may make files
    os.umask(mask)
    return mask


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold."""
    is_new = not path.parent.exists()
    with _under_way(path):
        pass
    if is_new:
        with suppress(OSError):  # somebody else is at work there
            path.parent.rmdir()  # the work may fail before it has anything to put there


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Report an error of the system as one of writing to this path."""
    try:
        yield
    except OSError as error:
        hint = "free some space, or write elsewhere"
        if error.errno not in FULL:
            hint = "give another path, or make this one writable"
        raise LongRopeError(f"{path}: cannot be written ({error.strerror or error})", hint=hint) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def open_to_append(path: Path, *, buffering: int = -1) -> IO[str]:
    """Open a text file for more lines, never through a link; a pipe is refused instead of waited for."""

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)

    return open(path, "a", buffering, encoding="utf-8", opener=opened)


CHECKSUM = "checksum"
_SEALED = re.compile(rb'(.*), "sum": "([0-9a-f]{16})"\}', re.DOTALL)
"""A line with its checksum."""


def checksum(value: Any) -> str:
    """Of plain values, whatever their order and layout in a file; finds damage, and no forgery."""
    plain = json.loads(json.dumps(value))  # keys become text, tuples lists
    return f"xxh3:{xxhash.xxh3_64_hexdigest(json.dumps(plain, sort_keys=True).encode())}"


def fingerprint(value: Any) -> str:
    """A hash by which inputs are compared; it stays as it is, since runs of earlier versions are known by it."""
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Of every byte of a file, as fast as a disk reads; of a pipe or a device one that no file has."""
    if not stat.S_ISREG(path.stat().st_mode):
        return "not a file"  # and reading it would never end
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return f"xxh3:{digest.hexdigest()}"


def bytes_digest(content: Any) -> str:
    """Of anything that has bytes."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(content)}"


def sealed_line(value: Any) -> str:
    """A line of JSON with its checksum, for files to which lines are added one by one."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return f'{text[:-1]}, "sum": "{xxhash.xxh3_64_hexdigest(text.encode())}"}}\n'


def is_sealed(line: bytes) -> bool:
    """Whether a line has a checksum, right or wrong; earlier releases wrote none."""
    return b', "sum": ' in line


def unsealed(line: bytes) -> bytes:
    """The JSON of such a line, without its end; ValueError where it is not what was written."""
    found = _SEALED.fullmatch(line)
    if found is None:
        raise ValueError("no checksum: from an earlier version, or damaged")
    text = found[1] + b"}"
    if xxhash.xxh3_64_hexdigest(text).encode() != found[2]:
        raise ValueError("its content is not what its checksum says")
    return text


_OUTSIDE = re.compile(r"(file:)?[/~].*|(.*/)?\.\.(/.*)?")
_LOGIN = re.compile(r"(?<=://)[^/?@\s]*@")


def public(value: Any) -> Any:
    """Plain values without the folders of this machine and the passwords of stores.

    Of a path that is absolute, or leads out of the working folder, the last part is left.
    """
    if isinstance(value, str):
        return Path(value).name or value if _OUTSIDE.fullmatch(value) else _LOGIN.sub("", value)
    if isinstance(value, dict):
        return {key: public(item) for key, item in value.items()}
    return [public(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; NaN and infinity are refused, since JSON has neither."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    # A number a line makes lists that nobody reads; a line break stands between values only, never within a string.
    text = _PLAIN_LIST.sub(lambda found: f"[{_BREAK.sub(' ', found[1])}]", text)
    write_text(path, text + "\n")


def read_json(path: Path, *, lenient: bool = False) -> Any:
    """The content of a JSON file; OSError where it cannot be read, ValueError as `parse_json`."""
    return parse_json(read_bounded(path), lenient=lenient)


def read_bounded(path: Path, *, first_line: bool = False) -> bytes:
    """A file, or its first line; OSError where it cannot be read, ValueError for a pipe, a device or too many bytes."""
    status = path.stat()
    # Opening a pipe would wait for its other end; a folder raises an OSError below.
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_size > MOST_BYTES and not first_line:
        raise ValueError(f"{status.st_size:,} bytes, at most {MOST_BYTES:,} expected")
    with path.open("rb") as file:
        return next(bounded_lines(file), b"") if first_line else file.read()


def parse_toml(text: str) -> dict[str, Any]:
    """TOML that may be hostile; ValueError says in one line what is wrong."""
    if _LONG_KEY.search(text):  # for which tomllib takes gigabytes
        raise ValueError(f"a key of more than {MOST_LEVELS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file; ValueError for one that no text has, before it fills the memory."""
    for number in itertools.count(1):
        line = file.readline(MOST_BYTES + 1)
        if len(line) > MOST_BYTES:
            raise ValueError(f"line {number:,} has more than {MOST_BYTES:,} bytes")
        if not line:
            return
        yield line


def parse_json(text: bytes | str, *, lenient: bool = False) -> Any:
    """JSON that may be damaged or hostile; ValueError says in one line what is wrong.

    Refused is also what Python reads, but stumbles over later: deep nesting, half a character, and, unless `lenient` as
    files of models need it, NaN and integers of more than 64 bits.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        if lenient:
            value = json.loads(text)
        else:
            # In Python, so only where a number may be too large.
            numbers: dict[str, Any] = {"parse_int": _integer, "parse_float": _real} if _LARGE.search(text) else {}
            value = json.loads(text, parse_constant=_real, **numbers)
        if text.count("[") + text.count("{") > MOST_LEVELS and _is_deeper(value, MOST_LEVELS):
            raise RecursionError
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"nested more than {MOST_LEVELS} levels deep") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"half a character ({error.object[error.start]!a})") from None
    return value


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number that JSON has")
    return value


def _integer(text: str) -> int:
    value = int(text)
    if value.bit_length() > 64:
        raise ValueError(f"an integer of {len(text)} digits")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    inside = [value]
    for _ in range(levels):
        inside = [
            item
            for outer in inside
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return any(isinstance(item, dict | list) for item in inside)


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
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # through a link, the file would be made elsewhere
        handle = os.open(folder / file, flags, 0o666) if file else os.open(folder, os.O_RDONLY)
    try:
        for _ in range(ATTEMPTS):
            if _locked(handle):
                try:
                    with naming(folder), _noticing_loss(folder):
                        yield
                except BaseException:
                    with suppress(OSError):
                        if not file:  # a folder of this work alone, and nothing may have come into it
                            folder.rmdir()
                    raise
                return
            time.sleep(PAUSE)  # somebody who only looks is gone by then
    finally:
        os.close(handle)
    raise LongRopeError(f"{folder}: {refusal}", hint=hint)


@contextmanager
def _noticing_loss(folder: Path) -> Iterator[None]:
    """Report what fails because the folder that it was at work in has been removed."""
    try:
        yield
    except FileNotFoundError as error:
        if not isinstance(error.filename, str | bytes) or folder.exists():
            raise
        if not Path(os.fsdecode(error.filename)).absolute().is_relative_to(folder.absolute()):
            raise
        raise LongRopeError(
            f"{folder}: removed while this was at work there ({error})",
            hint="run the same command again: it begins anew",
        ) from error


def is_locked(path: Path) -> bool:
    """Whether a process holds this file, or folder, for itself right now."""
    if sys.platform == "win32":
        return False
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its other end
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
