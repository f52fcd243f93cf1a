"""Steady decoding on either side of the switch, against transformers' own `generate` on the same model and prompt.

    python benchmarks/decode_8b.py             # LLaMA-3-8B shape, random weights, one GPU: decode-8b
    python benchmarks/decode_8b.py --static    # also with a static cache, which transformers compiles on a GPU
    python benchmarks/decode_8b.py --tiny      # the tiny model on the CPU: decode-tiny-cpu

The goal: at least 0.95 of its speed. Runs alternate between the two, so that a change of clock hits both.
"""

import statistics
from typing import Any

import torch
from common import report
from decoding import Setting, build, decode_arguments, num_repeats, prompt_of, seconds_per_token

from longrope2.generation.switch import switching

GOAL = 0.95
SETTLE = 8
"""The first tokens, which are not counted."""


def sides(setting: Setting) -> dict[str, int]:
    """A prompt length for each, far enough from the switch that no work for it falls into the steps measured."""
    return {"short": setting.switch_length // 2, "long": 2 * setting.switch_length}


def speeds(plain: Any, ours: Any, length: int, new: int, repeats: int, **options: Any) -> dict[str, Any]:
    """Tokens per second of both; the first run only warms up."""
    prompt, rates = prompt_of(ours, length), {"ours": [], "transformers": []}
    sequences = {}
    for repeat in range(repeats + 1):
        for name, model in (("transformers", plain), ("ours", ours)):
            gaps, output = seconds_per_token(model, prompt, new, **options)
            sequences[name] = output.sequences
            if repeat:
                rates[name].append(len(gaps[SETTLE:]) / sum(gaps[SETTLE:]))
    assert sum(ours.longrope2.extra_tokens) == 0, "work for the switch fell into a steady run"
    result = {
        "prompt": length,
        "new_tokens": new,
        "tokens_per_second": statistics.median(rates["ours"]),
        "peer_tokens_per_second": statistics.median(rates["transformers"]),
        # Equal only where both rotate alike, that is within the original window, and up to rounding.
        "same_tokens": float((sequences["ours"] == sequences["transformers"])[:, length:].float().mean()),
        "by_run": rates,
    }
    result["ratio"] = result["tokens_per_second"] / result["peer_tokens_per_second"]
    print(f"{length} tokens {options}:", result, flush=True)
    return result


def main() -> None:
    parser = decode_arguments(__doc__)
    parser.add_argument("--static", action="store_true", help="also with a static cache")
    parser.add_argument("--new-tokens", type=int, help="default: 128, for the tiny model 96")
    options = parser.parse_args()
    plain, setting = build(options)
    ours = switching(build(options)[0], setting.factors, strategy="shadow", shadow_chunk=setting.shadow_chunk)
    new = options.new_tokens or (96 if options.tiny else 128)
    measured = {side: speeds(plain, ours, length, new, num_repeats(options)) for side, length in sides(setting).items()}
    static = {}
    if options.static:
        for side, length in sides(setting).items():
            torch._dynamo.reset()  # a graph for each model and cache length, and only so many are kept
            static[side] = speeds(plain, ours, length, new, num_repeats(options), cache_implementation="static")
    worst = min(measured.values(), key=lambda result: result["ratio"])
    report(
        options,
        name=f"decode-{setting.suffix}",
        value=worst["tokens_per_second"],
        unit="tokens per second",
        peer="transformers' generate, the same model and prompt",
        peer_value=worst["peer_tokens_per_second"],
        more_is_better=True,
        goal=GOAL,
        reached=worst["ratio"] >= GOAL,
        sides=measured,
        static=static or None,
        repeats=num_repeats(options),
        clock=setting.clock,
    )


if __name__ == "__main__":
    main()
