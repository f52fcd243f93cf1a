"""Ctrl-C while training: the step under way is finished and saved first, and no interruption is lost.

Python turns Ctrl-C into an exception wherever it happens to be. Some extension modules, while they are imported,
swallow it or make another error of it; so that it came is kept here. Light to import: it stands around other imports.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from longrope2.distributed import is_main_process

NOTICE = b"\nfinishing this step to save it; Ctrl-C again stops at once\n"


class Interrupts:
    """Whether somebody wants to stop."""

    def __init__(self) -> None:
        self.asked = False
        self._deferring = False

    def receive(self, *_: object) -> None:
        """Take a signal: end at once, or as soon as the step is done."""
        again, self.asked = self.asked, True
        if again or not self._deferring:
            raise KeyboardInterrupt
        if is_main_process():
            os.write(2, NOTICE)  # print is not allowed here: it may be what was interrupted

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block, the first signal only sets `asked`."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Receive interruptions; a block in which one came ends with KeyboardInterrupt, whatever became of it there.

    Blocks may be nested and are then one. Whoever ignores interruptions, or handles them in a way of their own, is left
    to it.
    """
    handler = signal.getsignal(signal.SIGINT)
    outer = getattr(handler, "__self__", None)
    if isinstance(outer, Interrupts):
        yield outer
        return
    ours = Interrupts()
    receives = handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if receives:
        signal.signal(signal.SIGINT, ours.receive)
    try:
        yield ours
    except Exception as error:
        if ours.asked:
            raise KeyboardInterrupt from error
        raise
    finally:
        if receives:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if ours.asked:
        raise KeyboardInterrupt
