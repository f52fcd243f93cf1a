"""How a process that computes on the CPU holds its memory."""

import ctypes
import sys

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let glibc keep what tensors have freed for the tensors to come.

    By default every large one is fetched from the system and given back, page by page, which takes a fifth of a
    training step; keeping it costs a tenth more memory. For whole programs, not for a library in someone else's.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # musl has none
            libc.mallopt(M_MMAP_MAX, 0)
            libc.mallopt(M_TRIM_THRESHOLD, -1)
