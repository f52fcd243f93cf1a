"""Layer inputs in host memory: they leave the GPU as layers finish, and come back one layer ahead of their use."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

LEAST = 1 << 20
"""Numbers below which a tensor stays where it is."""


@dataclass
class _Moved:
    host: Tensor
    place: int
    """Which layer input of the row it is."""
    device: torch.device
    back: Tensor | None = None
    """On its device again."""


def host_memory() -> int:
    """Bytes of memory that this machine has, or that its container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return total


class HostInputs:
    """Moves what checkpointed layers keep to host memory and back; on a GPU beside the computation."""

    def __init__(self) -> None:
        self._moved: list[_Moved] = []
        self._stream: torch.cuda.Stream | None = None

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpoint function whose inputs wait in host memory."""

        def checkpoint_from_host(function: Callable[..., Any], *inputs: Any) -> Any:
            # What the function itself saves is the checkpoint's own matter: its hooks go before these.
            with saved_tensors_hooks(self._pack, self._unpack):
                return checkpoint(function, *inputs)

        return checkpoint_from_host

    def _pack(self, tensor: Tensor) -> "Tensor | _Moved":
        if tensor.numel() < LEAST:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if tensor.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(tensor.device)
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self._stream):
                host.copy_(tensor.detach(), non_blocking=True)
            tensor.record_stream(self._stream)
        else:
            host.copy_(tensor.detach())
        self._moved.append(_Moved(host, len(self._moved), tensor.device))
        return self._moved[-1]

    def _unpack(self, kept: "Tensor | _Moved") -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        tensor = self._fetch(kept)
        if tensor.is_cuda and self._stream is not None:
            here = torch.cuda.current_stream(tensor.device)
            here.wait_stream(self._stream)
            tensor.record_stream(here)
        del self._moved[kept.place :]  # backward passes go from the last layer to the first
        if self._moved:
            self._fetch(self._moved[-1])
        kept.back = None
        return tensor

    def _fetch(self, moved: _Moved) -> Tensor:
        """Begin to bring a tensor back."""
        if moved.back is None:
            if self._stream is None:
                moved.back = moved.host
            else:
                with torch.cuda.stream(self._stream):
                    moved.back = moved.host.to(moved.device, non_blocking=True)
        return moved.back
