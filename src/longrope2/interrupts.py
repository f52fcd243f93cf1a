"""Ctrl-C: a training step under way is finished and saved first, and no interruption is lost.

Python raises KeyboardInterrupt wherever it happens to be. Some extension modules swallow it while they are imported, or
raise another error instead, so this module remembers that it came. It is light: it stands around other imports.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from longrope2.distributed import is_main_process

NOTICE = b"\nfinishing this step to save it; Ctrl-C again stops at once\n"


class Interrupts:
    """Whether the user wants to stop."""

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

    Blocks may be nested and are then one. A program that ignores interruptions, or handles them itself, keeps its way.
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
