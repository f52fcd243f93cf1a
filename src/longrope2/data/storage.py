"""Files on a disk or in an object store, by one name: a path, or a URL that fsspec or Arrow knows."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from longrope2.errors import DataError, damage, require
from longrope2.files import atomic_path

URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]+)://.+")
ARROW_SYSTEMS = ("s3", "gs")
"""Stores that Arrow reaches by itself where fsspec lacks a package for them."""


def file_system(place: str) -> tuple[Any, str]:
    """The file system of a path or URL, as fsspec has them, and the path there."""
    import fsspec

    found = URL.fullmatch(place)
    if found is None:
        return fsspec.filesystem("file"), str(Path(place).expanduser().absolute())
    protocol = found["protocol"]
    with damage(f"{place}: cannot be reached", hint="check the address and the credentials", kind=DataError):
        try:
            # Instances are cached, and may hold connections that a fork must not share.
            return fsspec.url_to_fs(place)
        except ImportError as error:
            if protocol not in ARROW_SYSTEMS:
                raise DataError(f"{place}: {error}", hint=f"install the package of fsspec for {protocol}://") from error
        from fsspec.implementations.arrow import ArrowFSWrapper

        arrow = require("pyarrow.fs", extra="train", purpose=f"{protocol}://")
        # A small file is then written by one request, which can be repeated, instead of three that cannot.
        options = f"{'&' if '?' in place else '?'}allow_delayed_open=true" if protocol == "s3" else ""
        system, path = arrow.FileSystem.from_uri(place + options)
        return ArrowFSWrapper(system), path


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

    def names(self) -> set[str]:
        """The files that it holds."""
        system, path = self._found
        system.invalidate_cache()  # others may have written there
        try:
            return {Path(name).name for name in system.ls(path, detail=False)}
        except FileNotFoundError:
            return set()

    def size(self, name: str) -> int:
        """Bytes of a file."""
        system, path = self._found
        return int(system.size(f"{path}/{name}"))

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
