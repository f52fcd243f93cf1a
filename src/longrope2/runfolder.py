"""The folder of a run: one process at a time, never among other files, and resumed only with the same options."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

from longrope2.errors import LongRopeError, all_problems
from longrope2.files import PARTIAL, check_writable, is_locked, only_one, sweep

Values = Mapping[str, Any]
NAMES = {"model": "weights", "config.books": "documents"}
"""Entries of an identity that only name what another identifies by its content: a folder may have been moved, or its
path spelled another way."""


@dataclass(frozen=True)
class RunFolder:
    """A folder that a command writes into; without a path, as on processes that write nothing, all is allowed."""

    path: Path | None
    command: str
    verb: str
    """What a process does there: "another process is … there"."""
    marks: tuple[str, ...]
    """Names that show a folder to be this command's, the file of its result first."""
    _: KW_ONLY
    beside: str | Path | None = None
    """The file that a run is made from: it may lie where the results go."""
    lock: str = ""
    """The file that is locked, where it is not the folder itself."""

    def refuse_foreign(self) -> None:
        """Refuse a file, and a folder that holds other things."""
        if self.path is None or not self.path.exists():
            return
        if not self.path.is_dir():
            raise LongRopeError(f"{self.path} is a file, a folder is needed", hint="name a folder, new or empty")
        if self._is_foreign(self.path):
            raise LongRopeError(
                f"{self.path}: neither empty nor a run of `longrope2 {self.command}`",
                hint="use another folder, or an empty one",
            )

    def _is_foreign(self, path: Path) -> bool:
        if any((path / mark).exists() for mark in self.marks):
            return False
        known = None if self.beside is None else Path(self.beside).resolve()
        # Hidden files are a lock, what a kill left at the very start, or a system's own.
        return any(not inside.name.startswith(".") and inside.resolve() != known for inside in path.iterdir())

    def check(self) -> Self:
        """Refuse a folder that cannot take the results, before the work that makes them."""
        self.refuse_foreign()
        if self.path is not None:
            check_writable(self.path / self.marks[0])
        return self

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes out until this one ends, and remove what kills have left of files under way."""
        with only_one(self.path, f"another process is {self.verb} there", file=self.lock):
            if self.path is not None and self.is_at_work():  # without locks, nobody knows whose they are
                sweep(self.path.rglob(f".*{PARTIAL}*"))
            yield

    def is_at_work(self) -> bool:
        """Whether a process works there right now."""
        return self.path is not None and is_locked(self.path / self.lock)


def differences(before: Values, now: Values) -> dict[str, tuple[Any, Any]]:
    """What is not the same, by dotted name: the value before, and the one now."""
    old, new = _flat(before), _flat(json.loads(json.dumps(now)))  # tuples are lists in a file
    found = {name: (old.get(name), new.get(name)) for name in {**new, **old} if old.get(name) != new.get(name)}
    return {name: values for name, values in found.items() if name not in NAMES or NAMES[name] in found}


def require_same(
    before: Values, now: Values, subject: str, *, hint: str, error: type[LongRopeError] = LongRopeError
) -> None:
    """Refuse to go on with what was made with other options, or from something else, and name every difference."""
    found = [
        f"{name}: {_shown(old)} on disk, {_shown(new)} now" for name, (old, new) in differences(before, now).items()
    ]
    if found:
        raise error(all_problems(subject, found), hint=hint)


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def _flat(values: Values, prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted names, so that a difference can be named."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
