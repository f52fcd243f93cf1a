"""Frozen linear layers in 4 bits (QLoRA's NF4): 16 levels where normally distributed weights have their quantiles."""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

BLOCK = 64
"""Weights that share a scale."""
BYTES = 0.5 + 4 / BLOCK
"""Of a weight."""
LEVELS = (
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip


class FourBitLinear(nn.Module):
    """A linear layer that never learns.

    Its bytes are held as numbers of bfloat16, and never used as such: sharding gathers bfloat16 as it is and would cast
    anything else.
    """

    def __init__(self, layer: nn.Linear, device: torch.device | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        packed, scales = (x.to(layer.weight.device) for x in pack(layer.weight.detach().to(device)))
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """As the layer it was, with its weights rounded."""
        return F.linear(x, unpack(self.weight, self.scales, self.in_features).to(x.dtype), self.bias)


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [N, M] as the nearest levels, relative to the largest of a block, and the blocks' scales."""
    blocks = F.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    levels = _levels(weight.device)
    relative = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(relative, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten(1)
    return (codes[:, ::2] << 4 | codes[:, 1::2]).view(torch.bfloat16), scales.view(torch.bfloat16)


def unpack(packed: Tensor, scales: Tensor, length: int) -> Tensor:
    """The weights [N, `length`] in float32 that `pack` gave these bytes for."""
    pairs = packed.view(torch.uint8)
    codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten(1)
    values = _levels(packed.device)[codes.int()].unflatten(1, (-1, BLOCK))
    return (values * scales.view(torch.float32)[..., None]).flatten(1)[:, :length]


@lru_cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


def freeze_in_four_bits(model: nn.Module, device: torch.device | None = None) -> None:
    """Replace the linear layers that have low-rank additions, where they are; the work is done on `device`."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "base_layer")]
    for layer in layers:
        layer.base_layer = FourBitLinear(layer.base_layer, device)
