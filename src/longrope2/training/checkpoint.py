"""Checkpoints that are whole or not there: DCP shards in a folder that gets its name last.

A checkpoint is `step-00000120/`: DCP's shards, and `checkpoint.json` with what else the loop needs. Shards are written
in the background, under a temporary name, while training goes on. The folder gets its name when every byte is on disk,
so one with the right name is complete; a damaged one (a disk that lies, a copy that broke off) is found by its
checksums and passed over for the one before it.
"""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from longrope2.console import warn
from longrope2.distributed import World
from longrope2.errors import LongRopeError
from longrope2.files import PARTIAL, atomic_folder, file_digest, sweep
from longrope2.records import CheckpointRecord, RecordError

FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d{8})")
RECORD = "checkpoint.json"


class _Writer(FileSystemWriter):
    """DCP's own, but for the folder, which its index would name: loading does not need it."""

    def storage_meta(self) -> None:
        """Nothing."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int, here: World, in_background: bool = True) -> None:
        self._folder = folder
        self._keep = keep
        # Writing in the background begins with a copy in host memory, which may be taken by the state itself.
        self._in_background = in_background
        self._here = here
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[Future[None], Path] | None = None
        # Its own group: background writing must not meet the collectives of training.
        self._group = dist.new_group(backend="gloo") if here.num_processes > 1 else None

    def save(self, record: CheckpointRecord, model: nn.Module, optimizer: Optimizer) -> None:
        """Begin to write the state after a step; the checkpoint before is finished first."""
        self.finish()
        final = self._folder / step_name(record.step)
        writing, temporary = ExitStack(), None
        if self._here.is_main:
            sweep(self._folder.glob(f".step-*{PARTIAL}*"))  # of a run that was killed
            with _disk_errors(final):
                temporary = writing.enter_context(atomic_folder(final))
        temporary = self._here.gather(temporary)[0]
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        options: dict[str, Any] = {
            "storage_writer": _Writer(temporary), "process_group": self._group, "no_dist": self._group is None,
        }  # fmt: skip
        future: Any = Future()
        if self._in_background:
            future = async_save(state, **options)
        else:
            try:
                future.set_result(save(state, **options))
            except BaseException as error:  # DCP's are not of class Exception
                future.set_exception(error)
        completed = self._writer.submit(self._complete, future, writing, temporary, record)
        self._pending = (completed, final)

    def finish(self) -> None:
        """Wait for the checkpoint under way."""
        if self._pending is None:
            return
        (completed, final), self._pending = self._pending, None
        with _disk_errors(final):
            completed.result()
        self._here.gather(None)

    def _complete(self, shards: "Future[Any]", writing: ExitStack, temporary: Path, record: CheckpointRecord) -> None:
        """In the background: when all shards are there, name the checkpoint and remove old ones."""
        with writing:
            shards.result()
            if not self._here.is_main:  # the main process's shards are done when everybody's are
                return
            replace(record, files=_checksums(temporary)).save(temporary / RECORD)
        self._remove_old(record.step)

    def load_latest(self, model: nn.Module, optimizer: Optimizer) -> CheckpointRecord | None:
        """Restore the newest whole checkpoint and return its record; None where there is none."""
        # What the main process sees: on a network file system others may see it later.
        for step in reversed(self._here.gather(self._steps())[0]):
            folder = self._folder / step_name(step)
            problem = self._here.gather(_problem(folder, step) if self._here.is_main else None)[0]
            if problem is not None:
                if self._here.is_main:
                    warn(f"{folder} is damaged ({problem}) and skipped")
                continue
            weights, moments = get_state_dict(model, optimizer)
            state: dict[str, Any] = {"model": weights, "optimizer": moments}
            load(state, checkpoint_id=folder, no_dist=self._group is None)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=StateDictOptions(strict=True),
            )
            record = CheckpointRecord.load(folder / RECORD)
            if self._here.is_main:
                self._remove_old(step)  # a kill may have come before, or in the middle
            return record
        return None

    def _remove_old(self, newest: int) -> None:
        # Later ones were passed over as damaged; they must not count, or good ones would go in their place.
        for old in [step for step in self._steps() if step <= newest][: -self._keep]:
            if not (self._folder / step_name(old)).is_symlink():  # what it points to may be anything
                shutil.rmtree(self._folder / step_name(old))

    def _steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        names = (NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in names if match)


def step_name(step: int) -> str:
    """The name of the checkpoint after this many steps."""
    return f"step-{step:08d}"


@contextmanager
def _disk_errors(final: Path) -> Iterator[None]:
    """Report a full disk with a hint; what was saved before stays."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        raise LongRopeError(
            f"{final}: the checkpoint cannot be written ({_cause(error)})",
            hint="free some space and start again; the checkpoint before it is untouched",
        ) from error


def _cause(error: BaseException) -> str:
    """What happened, in a line: DCP wraps it with a traceback, and torch gives an error of its own on a full disk."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return str(cause or error).partition("\n")[0]


def _checksums(folder: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.name != RECORD}


def _problem(folder: Path, step: int) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        record = CheckpointRecord.load(folder / RECORD)
        if record.step != step:
            return f"{RECORD} is of step {record.step}"
        for name, expected in record.files.items():
            if file_digest(folder / name) != expected:
                return f"{name} has changed"
    except OSError as error:
        return str(error)
    except RecordError as error:
        return error.message
    return None
