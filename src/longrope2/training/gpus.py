"""What GPUs can do, as measured or published."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What one GPU can do in bfloat16, in TFLOP/s."""

    memory: float
    """GiB."""
    peak: float
    matmul: float
    attention: tuple[float, float]
    """Causal attention at long rows, forward and backward, with heads of less than 128 dimensions."""
    wide_attention: tuple[float, float]
    """The same with heads of 128 and more."""

    def attention_rates(self, head_dim: int) -> tuple[float, float]:
        """Forward and backward."""
        return self.wide_attention if head_dim >= 128 else self.attention


_HOPPER: dict[str, Any] = {"peak": 989, "matmul": 790, "attention": (460, 425), "wide_attention": (577, 531)}
GPUS: Mapping[str, Gpu] = {
    # Measured at 128k tokens with cuDNN attention; an H100 has the same cores.
    "h200": Gpu(memory=139, **_HOPPER),
    "h100": Gpu(memory=79, **_HOPPER),
    # Published rates of FlashAttention-2, and the same share of the peak for matrices as measured on Hopper.
    "a100": Gpu(memory=79, peak=312, matmul=250, attention=(190, 165), wide_attention=(200, 175)),
}


def known_gpu(device_name: str) -> Gpu | None:
    """The entry for a device as its driver names it."""
    return next((gpu for name, gpu in GPUS.items() if name in device_name.lower()), None)
