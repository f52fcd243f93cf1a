"""Weights over many processes (FSDP2), and rows over some of them (Ulysses sequence parallelism)."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from longrope2.attention import exchanging
from longrope2.distributed import World
from longrope2.errors import LongRopeError
from longrope2.models import decoder_layers
from longrope2.training.mixed import Batch, MixedWindowModel


def shard(mixed: MixedWindowModel, here: World, device: str) -> None:
    """Spread weights, gradients and optimizer state over all processes, layer by layer, on devices of this type.

    A model in host memory may be larger than a device: no more than a layer of it is there as a whole.

    Master weights stay as they are; on GPUs they are gathered, and layers computed, in bfloat16. A single GPU computes
    in bfloat16 the same way, so it is made a world of one process. So is a CPU where some weights are bfloat16.
    """
    is_half = device == "cuda" or any(p.dtype == torch.bfloat16 for p in mixed.parameters())
    if here.num_processes == 1 and not is_half:
        return
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (here.num_processes,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if is_half else None, reduce_dtype=torch.float32)
    if here.num_processes > 1 and not mixed.simply:
        raise LongRopeError(
            f"'{mixed.model.config.model_type}' models are trained document by document, by one process alone",
            hint="train on one GPU",
        )
    for layer in decoder_layers(mixed.model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(mixed, mesh=mesh, mp_policy=policy)


def own_part(batch: Batch, here: World) -> Batch:
    """The part of a row that this process holds; boundaries stay those of the whole row."""
    if here.group_size == 1:
        return batch
    length = batch.tokens.shape[1]
    if length % here.group_size:
        raise LongRopeError(
            f"rows of {length:,} tokens cannot be shared evenly by {here.group_size} processes",
            hint="choose a target length that the sequence-parallel size divides",
        )
    size = length // here.group_size
    part = slice(here.member * size, (here.member + 1) * size)
    return Batch(
        tokens=batch.tokens[:, part],
        positions=batch.positions[:, part],
        labels=batch.labels[:, part],
        long_rows=batch.long_rows,
        boundaries=batch.boundaries,
    )


@contextmanager
def sequence_parallel(here: World) -> Iterator[None]:
    """Let the processes of each group share attention inside the block."""
    exchange = None
    if here.group_size > 1:
        ranks = range(here.num_processes)
        groups = [list(ranks[i : i + here.group_size]) for i in range(0, here.num_processes, here.group_size)]
        own, _ = dist.new_subgroups_by_enumeration(groups)
        exchange = Ulysses(own, here)
    with exchanging(exchange) if exchange else nullcontext():
        yield


class Ulysses:
    """All-to-all between parts of the sequence and parts of the heads."""

    def __init__(self, group: "dist.ProcessGroup", here: World) -> None:
        self._group = group
        self._size = here.group_size
        self._member = here.member

    def to_heads(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """[B, H, S/n, D] → [B, H/n, S, D]; key/value heads fewer than processes are repeated."""
        if query.shape[1] % self._size:
            raise LongRopeError(
                f"{query.shape[1]} attention heads cannot be shared evenly by {self._size} processes",
                hint="choose a sequence-parallel size that divides the number of heads",
            )
        if key.shape[1] % self._size:
            repeats = self._size // key.shape[1] if self._size % key.shape[1] == 0 else query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        if sinks is not None:
            sinks = sinks.chunk(self._size)[self._member]
        query, key, value = (self._exchange(x, scatter=1, gather=2) for x in (query, key, value))
        return query, key, value, sinks

    def to_sequence(self, output: Tensor) -> Tensor:
        """[B, H/n, S, D] → [B, H, S/n, D]."""
        return self._exchange(output, scatter=2, gather=1)

    def _exchange(self, x: Tensor, *, scatter: int, gather: int) -> Tensor:
        parts = torch.stack([part.contiguous() for part in x.chunk(self._size, scatter)])
        received = all_to_all_single_autograd(parts.reshape(-1), None, None, self._group).reshape(parts.shape)
        return torch.cat(list(received.unbind(0)), dim=gather)
