"""Files on a disk or in an object store, by one name: a path, or a URL that fsspec or Arrow knows."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from longrope2.errors import DataError, damage, first_line, require
from longrope2.files import atomic_path

URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]+)://.+")
READERS = 16
"""Files that are read at a time where a little of each is needed: a store takes a while to answer."""
ARROW_OPTIONS = {
    # A small file is then written by one request, which can be repeated, instead of three that cannot.
    "s3": "allow_delayed_open=true",
    # For a quarter of an hour by default, also where there are no credentials.
    "gs": "retry_limit_seconds=60",
}
"""Stores that Arrow reaches by itself where fsspec lacks a package for them, with what is asked of it there."""
IN_STORE = re.compile(
    rf"(?P<user>(?P<protocol>{'|'.join(ARROW_OPTIONS)})://([^/?@]*@)?)(?P<bucket>[^/?]+)"
    r"(?P<path>.*?)(\?(?P<options>\w+=[^?]*))?"
)


def file_system(place: str) -> tuple[Any, str]:
    """The file system of a path or URL, as fsspec has them, and the path there."""
    import fsspec

    found = URL.fullmatch(place)
    if found is None:
        return fsspec.filesystem("file"), str(Path(place).expanduser().absolute())
    with damage(f"{place}: cannot be reached", hint="check the address and the credentials", kind=DataError):
        try:
            # Instances are cached, and may hold connections that a fork must not share.
            return fsspec.url_to_fs(place)
        except ImportError as error:
            store = IN_STORE.fullmatch(place)
            try:
                if store is not None:
                    return _arrow_system(store)
            except NotImplementedError:  # this Arrow was built without that store
                pass
            protocol = found["protocol"]
            is_extra = protocol in (metadata("fsspec").get_all("Provides-Extra") or ())
            hint = f"pip install 'fsspec[{protocol}]'" if is_extra else f"install the package for {protocol}://"
            raise DataError(f"{place}: {first_line(error)}", hint=hint) from error


def _arrow_system(store: re.Match[str]) -> tuple[Any, str]:
    from fsspec.implementations.arrow import ArrowFSWrapper

    arrow = require("pyarrow.fs", extra="train", purpose=f"{store['protocol']}://")
    options = "&".join(filter(None, [store["options"], ARROW_OPTIONS[store["protocol"]]]))
    # Without the path, whose characters an address would have to escape.
    system, bucket = arrow.FileSystem.from_uri(f"{store['user']}{store['bucket']}?{options}")
    return ArrowFSWrapper(system), f"{bucket}{store['path'].rstrip('/')}"


def url_of(path: str, system: Any, place: str) -> str:
    """The URL of another path in the file system of a place."""
    store = IN_STORE.fullmatch(place)
    if store is None:
        return str(system.unstrip_protocol(path))
    options = f"?{store['options']}" if store["options"] else ""
    return f"{store['user']}{path}{options}"


def files_below(system: Any, folder: str, depth: int | None = None) -> Iterator[dict[str, Any]]:
    """What fsspec says of each file in a folder and, to some depth, in the folders there.

    Not its `find`, which silently passes over a folder that cannot be listed.
    """
    from fsspec.implementations.arrow import ArrowFSWrapper

    if depth != 1 and isinstance(system, ArrowFSWrapper):
        # All at once: of a Google store, Arrow lists no folder that is not an object of its own, as few are.
        from pyarrow.fs import FileSelector, FileType

        for found in system.fs.get_file_info(FileSelector(folder, recursive=True)):
            if found.type is FileType.File:
                yield {"name": found.path, "size": found.size, "mtime": found.mtime}
        return
    for entry in system.ls(folder, detail=True):
        name = entry["name"].rstrip("/")
        if entry["type"] != "directory":
            yield entry
        elif name != folder and depth != 1:
            yield from files_below(system, name, depth and depth - 1)


@dataclass(frozen=True)
class Folder:
    """A folder of whole files, here or in an object store."""

    place: str

    @property
    def local(self) -> Path | None:
        """Its path, where it is on this machine."""
        return None if URL.fullmatch(self.place) else Path(self.place).expanduser()

    @cached_property
    def _found(self) -> tuple[Any, str]:
        return file_system(self.place)

    def sizes(self) -> dict[str, int]:
        """The files that it holds, and their bytes."""
        system, path = self._found
        system.invalidate_cache()  # others may have written there
        with damage(f"{self.place}: cannot be listed", hint="check the address and the credentials", kind=DataError):
            try:
                system.info(path)  # raises this error for every store, unlike `ls`
                return {Path(entry["name"]).name: int(entry["size"] or 0) for entry in system.ls(path, detail=True)}
            except FileNotFoundError:
                return {}

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """A file as one on this machine; FileNotFoundError where there is none."""
        if self.local is not None:
            yield self.local / name
            return
        with tempfile.TemporaryDirectory() as folder:
            self.fetch(name, Path(folder) / name)
            yield Path(folder) / name

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A path for what will be this file, whole, once the block has succeeded."""
        if self.local is not None:
            with atomic_path(self.local / name) as path:
                yield path
            return
        system, target = self._found
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder) / name
            with damage(f"{self.place}/{name}: cannot be written", hint="run the same command again", kind=DataError):
                system.put_file(str(Path(folder) / name), f"{target}/{name}")

    def fetch(self, name: str, target: Path) -> None:
        """Copy a file to this machine."""
        system, path = self._found
        try:
            system.get_file(f"{path}/{name}", str(target))
        except FileNotFoundError:
            raise
        except Exception as error:  # anything may come up from the network
            raise DataError(
                f"{self.place}/{name}: cannot be read ({error})", hint="check the connection, and run it again"
            ) from error
