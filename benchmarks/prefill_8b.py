"""Needle NLL of one 128k document on a LLaMA-3-8B shape with random weights, against plain transformers.

The peer is transformers' own forward under the same attention kernel (cuDNN), asked for the answer's logits alone:
the fastest way to use it.
"""

import time
from collections.abc import Callable

import torch
from common import arguments, report
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from longrope2.families import read_config
from longrope2.methods import rescale
from longrope2.needles import Needle, NeedleDocument
from longrope2.perplexity import scoring

ANSWER_TOKENS = 7


def best_seconds(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Seconds of the fastest run and peak GiB, after one to warm up."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times), torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=options.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    tokens = torch.randint(1000, 100_000, (options.length,))
    answer = options.length - ANSWER_TOKENS, options.length
    needle = Needle(key="k", value="1", depth=0.0, start=1, answer=answer)
    document = NeedleDocument(token_ids=tuple(tokens.tolist()), needles=(needle,), book="random", book_start=0)
    factors = rescale("yarn", read_config(config.to_dict()).rope, options.length)

    measured = {}
    for name, compiled in (("plain", False), ("compiled", True)):
        with scoring(model, factors, compiled=compiled) as scorer:
            seconds, memory = best_seconds(lambda scorer=scorer: scorer(factors, [document]), options.repeats)
        measured[name] = {"seconds": seconds, "peak_gib": memory}
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
