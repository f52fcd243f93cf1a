"""A text of up to a million tokens, read by `evaluate` and by `generate`: seconds, memory, distance from the floor.

    python benchmarks/reading.py smollm2 --length 1M      # read-smollm2-1024k
    python benchmarks/reading.py llama3-8b --length 512k  # read-llama3-8b-512k
    python benchmarks/reading.py tiny --length 4k         # a shape that runs on a CPU, to try the program

Random weights and tokens. The floor is the FLOPs of attention at the rate that its kernel reaches on a piece of the
text, and those of matrix products at the rate of large ones. The peer is transformers' own `generate` with a prefill in
chunks, at a length that it has memory for; ours at that length in the same run.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from common import arguments, peak_gib, report, reset_peak, synchronize
from decoding import prompt_of
from shapes import DEVICE, SHAPES, in_bfloat16

from longrope2.attention import causal_attention
from longrope2.evaluation.backend import TorchBackend
from longrope2.evaluation.suite import Prompt, TextSpan
from longrope2.families import read_config
from longrope2.generation.switch import switching
from longrope2.kernels import Heads
from longrope2.methods import rescale
from longrope2.models import cached_values
from longrope2.options import parse_length
from longrope2.pieces import READ_TOKENS

NEW_TOKENS = 8
MATRIX_FLOPS = 790e12
"""Of large matrix products in bfloat16 on an H200 (docs/training.md)."""


class NoTokenizer:
    """Stands in where only numbers are read."""

    eos_token_id = None

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens))


def timed(run: Callable[[], object]) -> dict[str, Any]:
    reset_peak()
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    found = {"seconds": time.perf_counter() - start, "peak_gib": peak_gib()}
    print(found, flush=True)
    return found


def kernel_flops(config: Any, length: int) -> float:
    """What attention reaches here on a square of a piece of the text, causal: FLOPs that count, a second."""
    size = min(length, READ_TOKENS)
    heads = Heads(torch.device(DEVICE), torch.bfloat16, config.num_attention_heads, config.num_key_value_heads,
                  config.head_dim)  # fmt: skip
    query, key, value = heads.random(size)
    with torch.no_grad():
        causal_attention(query, key, value, scale=0.1)
        found = timed(lambda: causal_attention(query, key, value, scale=0.1))
    return attention_flops(config, size) / config.num_hidden_layers / found["seconds"]


def attention_flops(config: Any, length: int) -> float:
    """Two products over half of all pairs, in every layer."""
    return 2.0 * length**2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--length", default="1M")
    parser.add_argument("--peer-length", default="128k", help="of what transformers reads")
    parser.add_argument("--peer-chunk", type=int, default=8192)
    parser.add_argument("--ways", default="answer,score,generate", help="how to read: as evaluate does, or generate")
    options = parser.parse_args()
    length = parse_length(options.length)
    peer_length = min(parse_length(options.peer_length), length)
    model = in_bfloat16(SHAPES[options.shape])
    config = model.config
    rate = kernel_flops(config, length)
    matrices = 2.0 * length * sum(p.numel() for p in model.base_model.layers.parameters())
    floor = attention_flops(config, length) / rate + matrices / MATRIX_FLOPS

    prompt = prompt_of(model, peer_length)
    plainly = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    chunks = {"prefill_chunk_size": options.peer_chunk}
    peer = timed(lambda: model.generate(prompt, **plainly, **chunks))

    factors = rescale("yarn", read_config(config.to_dict()).rope, length)
    model = switching(model, factors.long_everywhere())
    backend = TorchBackend(model, NoTokenizer(), window=length)
    backend._ends = set()
    at_peer = timed(lambda: model.generate(prompt, **plainly))
    tokens = prompt_of(model, length - NEW_TOKENS)[0].tolist()
    prompt = Prompt(token_ids=tokens, max_new_tokens=NEW_TOKENS)
    ways: dict[str, Callable[[], object]] = {
        "answer": lambda: backend.answer([prompt]),
        "score": lambda: backend.score([TextSpan(token_ids=tokens, start=1)]),
        "generate": lambda: backend._generate(prompt),
    }
    measured = {name: timed(ways[name]) for name in options.ways.split(",")}
    report(
        options, name=f"read-{options.shape}-{length // 1024}k", value=at_peer["seconds"], unit="seconds",
        peer=f"transformers, {peer_length // 1024}k tokens in chunks of {options.peer_chunk // 1024}k",
        peer_value=peer["seconds"], peer_length=peer_length, peer_peak_gib=peer["peak_gib"],
        at_peer_length_gib=at_peer["peak_gib"], length=length, new_tokens=NEW_TOKENS, measured=measured,
        attention_teraflops=rate / 1e12, floor_seconds=floor,
        over_floor={name: found["seconds"] / floor for name, found in measured.items()},
        cache_gib=cached_values(config) * 2 * length / 2**30,
    )  # fmt: skip


if __name__ == "__main__":
    main()
