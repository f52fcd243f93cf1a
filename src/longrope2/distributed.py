"""One process or many: the few collective steps the package needs, the same code for both."""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from longrope2.errors import LongRopeError, first_line

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
PATIENCE = 5.0
"""Seconds in which torchrun has ended the other processes for certain, once one has failed."""
WAITING = timedelta(days=7)
"""For a process that works alone: tokenising may take hours, and torch would give up after half an hour."""
STOPPED = "stopped by SIGTERM: torchrun was stopped, or it ends all processes because one of them was lost"
RESUMES = "run the same command again: it goes on where it was"
_objects: Any = None  # the group of all processes through which they wait so long
_store: Any = None  # torchrun's, which outlives each of them


class LostProcessError(LongRopeError):
    """Another of the processes that work together has ended."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes that torchrun started; a single one when it did not.

    Processes that share one copy of a model form a group and act as one: `rank` and `size` count groups.
    """

    process: int
    num_processes: int
    local_process: int
    group_size: int = 1

    @property
    def rank(self) -> int:
        """Which group this process belongs to."""
        return self.process // self.group_size

    @property
    def size(self) -> int:
        """How many groups there are."""
        return self.num_processes // self.group_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.process == 0

    def groups_of(self, size: int) -> "World":
        """The same processes, `size` of them in each group."""
        if size < 1 or self.num_processes % size:
            raise LongRopeError(
                f"{self.num_processes} processes cannot form groups of {size}",
                hint=f"start with: torchrun --nproc-per-node {max(size, 1)} -m longrope2 …",
            )
        return replace(self, group_size=size)

    def device(self) -> "torch.device":
        """The device of this process."""
        import torch

        if not torch.cuda.is_available():
            return torch.device("cpu")
        if self.local_process >= (gpus := torch.cuda.device_count()):
            raise LongRopeError(
                f"process {self.local_process + 1} on this machine has no GPU: there are {gpus}",
                hint=f"start with: torchrun --nproc-per-node {gpus} -m longrope2 …",
            )
        return torch.device("cuda", self.local_process)

    @property
    def member(self) -> int:
        """The place of this process within its group."""
        return self.process % self.group_size

    def gather(self, value: Any) -> list[Any]:
        """Every group's value, in order, on every process."""
        return self.gather_all(value)[:: self.group_size]

    def gather_all(self, value: Any) -> list[Any]:
        """Every process's value, in order, on every process."""
        if self.num_processes == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.num_processes
        dist.all_gather_object(values, value, group=_objects)
        return values

    def main_first(self, make: Callable[[], T]) -> T:
        """What `make` gives, called in the main process before the others, which find the files that it wrote."""
        if not self.is_main:
            self.gather_all(None)
        made = make()
        if self.is_main:
            self.gather_all(None)
        return made


@contextmanager
def world() -> Iterator[World]:
    """Join the processes that torchrun started; may be used again and again."""
    process, count, local = _place()
    here = World(process=process, num_processes=max(count, 1), local_process=local)
    if here.num_processes == 1:
        yield here
        return
    import torch
    import torch.distributed as dist

    global _objects, _store
    # Objects travel through gloo, which every machine has; a model spread over GPUs talks through NCCL.
    # They stay joined until they end: torchrun's store serves one group of processes in its life.
    if not dist.is_initialized():
        # Weights are sharded on the current GPU, wherever they were loaded, and that would be the first one for all.
        if local < torch.cuda.device_count():
            torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        _objects = dist.new_group(backend="gloo", timeout=WAITING)
        _store = dist.distributed_c10d._get_default_store()
        atexit.register(dist.destroy_process_group)
        _report_termination()
    try:
        yield here
    except BaseException as error:  # DCP's are not of class Exception
        # Gloo raises plain RuntimeErrors that name its own source file.
        if not isinstance(error, dist.DistError) and "/gloo/transport/" not in str(error):
            raise
        message = f"the connection to the other processes is lost ({first_line(error)})"
        raise LostProcessError(message, hint=RESUMES) from error


def _report_termination() -> None:
    """Report SIGTERM, by which torchrun ends the processes that are left when one was lost.

    In a thread, since this one may be waiting for the lost process, in code that lets no handler of Python run.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if sys.platform == "win32" or not is_ours:
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def report() -> None:
        while signal.SIGTERM not in os.read(reading, 1):
            pass
        if _may_speak():
            os.write(2, f"\nerror: {STOPPED}\nhint: {RESUMES}\n".encode())
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=report, daemon=True).start()

    def receive(pipe: int, handler: Any) -> None:
        signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, handler)

    receive(writing, lambda *_: None)  # any function: with it, the signal goes into the pipe
    os.register_at_fork(after_in_child=lambda: receive(-1, signal.SIG_DFL))  # the pipe is not the child's


def is_main_process() -> bool:
    """Whether this process talks to the user, also before it has joined the others."""
    return _place()[0] == 0


def wait_to_speak(error: BaseException) -> str | None:
    """Wait for this process's turn to report an error; returns the prefix of its message, None if it is to be silent.

    Most errors meet all processes alike: the main one reports it and exits, and torchrun ends the others while they
    wait. A process whose error is its own outlives that and reports it, the first one of a machine before the rest.
    That another process was lost is reported by one that noticed, unless the lost one has reported why.
    """
    process, _, local = _place()
    if process and not isinstance(error, LostProcessError):
        time.sleep(PATIENCE if local == 0 else 2 * PATIENCE)
    if not _may_speak():
        return None
    return f"process {process}: " if process else ""


def _may_speak() -> bool:
    """Whether no other process has reported an error; once this is true, it is so for no other."""
    try:
        return _store is None or _store.add("longrope2/errors", 1) == 1
    except RuntimeError:  # the store was the first process's, and that is lost
        return True


def _place() -> tuple[int, int, int]:
    """Number of this process, number of all, and its number on this machine, as torchrun passes them to its workers."""
    process, count, local = (int(os.getenv(name) or 0) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return process, count, local
