"""Layer inputs in host memory: they leave the GPU as layers finish, and come back one layer ahead of their use."""

import math
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
CHUNK = 1 << 27
"""Numbers in one piece: torch rounds what it pins up to a power of two, so that 3 GiB in one piece would take 4."""
RESERVED = 0.94
"""The share of memory, of a GPU or its machine, that tensors can really use."""


@dataclass
class _Moved:
    host: list[Tensor]
    """Its numbers in pinned pieces."""
    shape: torch.Size
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


def host_share(num_processes: int) -> float:
    """Bytes of this machine's memory for each of its processes, of which every GPU has one."""
    return host_memory() / max(min(num_processes, torch.cuda.device_count()), 1)


class HostInputs:
    """Moves what checkpointed layers keep to host memory and back; on a GPU beside the computation.

    Inputs that would take more than `room` bytes there stay on the GPU: those of the last layers, which a backward pass
    needs first.
    """

    def __init__(self, room: float = math.inf) -> None:
        self._room = room
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
        held = sum(piece.nbytes for moved in self._moved for piece in moved.host)
        if tensor.numel() < LEAST or held + tensor.nbytes > self._room:
            return tensor
        pieces = tensor.detach().reshape(-1).split(CHUNK)
        host = [torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.is_cuda) for piece in pieces]
        if tensor.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(tensor.device)
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            for there, piece in zip(host, pieces, strict=True):
                there.copy_(piece, non_blocking=True)
        if self._stream is not None:
            pieces[0].record_stream(self._stream)
        self._moved.append(_Moved(host, tensor.shape, len(self._moved), tensor.device))
        return self._moved[-1]

    def _unpack(self, kept: "Tensor | _Moved") -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        tensor = self._fetch(kept)
        if self._stream is not None:
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
            with torch.cuda.stream(self._stream):
                moved.back = torch.empty(moved.shape, dtype=moved.host[0].dtype, device=moved.device)
                for piece, there in zip(moved.host, moved.back.view(-1).split(CHUNK), strict=True):
                    there.copy_(piece, non_blocking=True)
        return moved.back
