"""Needle NLL of one 128k document on a LLaMA-3-8B shape with random weights, against plain transformers.

The peer is transformers' own forward under the same attention kernel (cuDNN), asked for the answer's logits alone:
the fastest way to use it.
"""

import time
from collections.abc import Callable

import torch
from common import arguments, peak_gib, report, reset_peak
from shapes import in_bfloat16, llama3_8b
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from longrope2.families import read_config
from longrope2.methods import rescale
from longrope2.needles import Needle, NeedleDocument
from longrope2.perplexity import scoring

ANSWER_TOKENS = 7


def best_seconds(run: Callable[[], object], repeats: int) -> tuple[float, float | None]:
    """Seconds of the fastest run and peak GiB, after one to warm up."""
    run()
    torch.cuda.synchronize()
    reset_peak()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times), peak_gib()


def kernels(run: Callable[[], object], most: int = 12) -> dict[str, float]:
    """Seconds of the kernels that take most of a run, by name."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = sorted(profiler.key_averages(), key=lambda entry: -entry.self_device_time_total)
    return {entry.key[:100]: entry.self_device_time_total / 1e6 for entry in found[:most]}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="also note which kernels take the time")
    options = parser.parse_args()

    model = in_bfloat16(lambda: llama3_8b(options.layers))
    tokens = torch.randint(1000, 100_000, (options.length,))
    answer = options.length - ANSWER_TOKENS, options.length
    needle = Needle(key="k", value="1", depth=0.0, start=1, answer=answer)
    document = NeedleDocument(token_ids=tuple(tokens.tolist()), needles=(needle,), book="random", book_start=0)
    factors = rescale("yarn", read_config(model.config.to_dict()).rope, options.length)

    measured = {}
    for name, compiled in (("plain", False), ("compiled", True)):
        with scoring(model, factors, compiled=compiled) as scorer:
            seconds, memory = best_seconds(lambda scorer=scorer: scorer(factors, [document]), options.repeats)
            measured[name] = {"seconds": seconds, "peak_gib": memory}
            if options.profile:
                measured[name]["kernels"] = kernels(lambda scorer=scorer: scorer(factors, [document]))
        print(name, measured[name], flush=True)

    inputs = tokens[None].cuda()

    def transformers_forward() -> None:
        with torch.no_grad(), sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            model(inputs, use_cache=False, logits_to_keep=ANSWER_TOKENS + 1)

    model.set_attn_implementation("sdpa")
    peer_seconds, peer_memory = best_seconds(transformers_forward, options.repeats)
    best = min(measured.values(), key=lambda m: m["seconds"])
    report(
        options,
        name="prefill-8b-128k",
        value=best["seconds"],
        unit="seconds",
        peer="transformers, cuDNN attention, answer-only logits",
        peer_value=peer_seconds,
        peak_gib=best["peak_gib"],
        peer_peak_gib=peer_memory,
        length=options.length,
        variants=measured,
    )


if __name__ == "__main__":
    main()
