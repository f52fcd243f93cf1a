"""Attention within the documents of a packed row: torch's kernel for all of them against each by itself (one GPU).

    python benchmarks/packing.py                     # rows of 128k: documents of 1k to 8k, and of all lengths up to 8k
    python benchmarks/packing.py --length 1k --tiny  # on a CPU, to try the program

Forward and backward of the heads of three models, random values; milliseconds and TFLOP/s, backward counted as 2.5
forwards. Documents go together, each by itself, or as training chooses for the row.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from common import arguments, report, synchronize
from shapes import DEVICE
from torch import Tensor

from longrope2.attention import one_by_one, packed_attention
from longrope2.kernels import Heads, varlen_attention
from longrope2.options import parse_length

HEADS = {"llama3-8b": (32, 8, 128), "phi3-mini": (32, 32, 96), "smollm2": (9, 3, 64)}
REPEATS = 3


def ends_of(length: int, document: int | None) -> list[int]:
    """Where documents of one size end, or of any size up to a sixteenth of the row."""
    if document is not None:
        return list(range(0, length + 1, document))
    ends, rng = [0], random.Random(0)
    while ends[-1] < length:
        ends.append(min(ends[-1] + rng.randint(length // 1024, length // 16), length))
    return ends


def milliseconds(attend: Callable[..., Tensor], tensors: Sequence[Tensor], *, training: bool) -> float:
    """Of one pass, after two that do not count."""
    leaves = [x.detach().requires_grad_(training) for x in tensors]

    def once() -> None:
        output = attend(*leaves)
        if training:
            torch.autograd.grad(output, leaves, output.detach())

    for repeat in range(2 + REPEATS):
        if repeat == 2:
            synchronize()
            start = time.perf_counter()
        once()
    synchronize()
    return (time.perf_counter() - start) / REPEATS * 1e3


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--length", default="128k")
    parser.add_argument("--documents", default="1k,2k,4k,8k", help="tokens of a document, besides mixed ones")
    parser.add_argument("--tiny", action="store_true", help="few heads, and documents by themselves alone")
    options = parser.parse_args()
    length = parse_length(options.length)
    shapes = {"tiny": (4, 2, 16)} if options.tiny else HEADS
    sizes = [parse_length(text) for text in options.documents.split(",") if parse_length(text) < length] + [None]
    points: list[dict[str, Any]] = []
    for name, (num_heads, num_kv_heads, head_dim) in shapes.items():
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        tensors = Heads(torch.device(DEVICE), dtype, num_heads, num_kv_heads, head_dim).random(length)
        scale = head_dim**-0.5
        for document in sizes:
            ends = ends_of(length, document)
            flops = 2 * sum((stop - start) ** 2 for start, stop in pairwise(ends)) * num_heads * head_dim
            ways: dict[str, Callable[..., Tensor]] = {"by themselves": partial(one_by_one, ends=ends, scale=scale)}
            if not options.tiny:
                ways["together"] = partial(varlen_attention, ends=ends, scale=scale)
                ways["chosen"] = partial(packed_attention, boundaries=[ends], scale=scale)
            for way, attend in ways.items():
                forward = milliseconds(attend, tensors, training=False)
                both = milliseconds(attend, tensors, training=True)
                points.append({
                    "shape": name, "document": document or "mixed", "way": way, "forward_ms": forward, "both_ms": both,
                    "forward_tflops": flops / forward / 1e9, "both_tflops": 3.5 * flops / both / 1e9,
                })  # fmt: skip
                print(points[-1], flush=True)
    shape = next(iter(shapes))
    found = {
        point["way"]: point["both_ms"] for point in points if (point["shape"], point["document"]) == (shape, "mixed")
    }
    report(
        options, name="packing", value=found.get("chosen", found["by themselves"]), unit="milliseconds",
        peer="all documents in one kernel", peer_value=found.get("together", found["by themselves"]),
        length=length, shape=shape, points=points,
    )  # fmt: skip


if __name__ == "__main__":
    main()
