"""Decoding across the switch: the slowest token with `shadow` and with `recompute`, and the memory they take.

    python benchmarks/switch_8b.py           # LLaMA-3-8B shape, random weights, one GPU: switch-8b
    python benchmarks/switch_8b.py --tiny    # the tiny model on the CPU: switch-tiny-cpu

The goal: with `shadow` no token takes more than three times the median one. Each run does the same work token by
token, so a token's time is the median of its times in all runs: what only one run shows came from elsewhere. The
slowest of every run is reported as well.
"""

import statistics
from typing import Any

from common import peak_gib, report, reset_peak
from decoding import (
    Setting,
    build,
    cache_gib,
    decode_arguments,
    num_repeats,
    prompt_of,
    seconds_per_token,
)

from longrope2.generation.config import Strategy
from longrope2.generation.switch import switching

LIMIT = 3.0
STEPS_AROUND = 48
"""Plain steps before the work ahead begins, and after the switch."""


def across(model: Any, setting: Setting, strategy: Strategy, steps_before: int, repeats: int) -> dict[str, Any]:
    """Decode from `steps_before` tokens before the switch to some after it; the first run only warms up."""
    switching(model, setting.factors, strategy=strategy, shadow_chunk=setting.shadow_chunk)
    prompt = prompt_of(model, setting.switch_length - steps_before)
    new = steps_before + 1 + STEPS_AROUND
    runs = []
    for repeat in range(repeats + 1):
        reset_peak()
        gaps, output = seconds_per_token(model, prompt, new)
        if repeat:
            runs.append(gaps)
    first, *steps = (statistics.median(times) for times in zip(*runs, strict=True))
    extra = model.longrope2.extra_tokens
    busy = [seconds for seconds, tokens in zip(steps, extra[1:], strict=True) if tokens]
    idle = [seconds for seconds, tokens in zip(steps, extra[1:], strict=True) if not tokens]
    median = statistics.median(steps)
    result = {
        "prompt": prompt.shape[1],
        "new_tokens": new,
        "first_token_seconds": first,
        "median_seconds": median,
        "median_seconds_without_extra_work": statistics.median(idle),
        "median_seconds_with_extra_work": statistics.median(busy),
        "slowest_seconds": max(steps),
        "slowest_over_median": max(steps) / median,
        "slowest_seconds_by_run": [max(gaps[1:]) for gaps in runs],
        "slowest_over_median_by_run": [max(gaps[1:]) / statistics.median(gaps[1:]) for gaps in runs],
        "steps_with_extra_work": len(busy),
        "most_extra_tokens_in_a_step": max(extra[1:]),
        "extra_tokens_with_the_prompt": extra[0],
        "extra_tokens": sum(extra),
        "cache_gib_at_the_end": cache_gib(output.past_key_values),
        "peak_gib": peak_gib(),
        "seconds_by_token": [first, *steps],
    }
    shown = {name: value for name, value in result.items() if name != "seconds_by_token"}
    print(strategy, steps_before, "tokens before the switch:", shown, flush=True)
    return result


def main() -> None:
    options = decode_arguments(__doc__).parse_args()
    model, setting = build(options)
    before = setting.shadow_steps + STEPS_AROUND
    measured = {name: across(model, setting, name, before, num_repeats(options)) for name in ("recompute", "shadow")}
    # A prompt that ends just before the switch: what chunks cannot do in time is done with the prompt.
    near = {name: across(model, setting, name, 3, num_repeats(options)) for name in ("recompute", "shadow")}
    shadow, recompute = measured["shadow"], measured["recompute"]
    per_token = shadow["cache_gib_at_the_end"] / (shadow["prompt"] + shadow["new_tokens"] - 1)
    report(
        options,
        name=f"switch-{setting.suffix}",
        value=shadow["slowest_seconds"],
        unit="seconds of the slowest token",
        peer="recompute (the paper's way)",
        peer_value=recompute["slowest_seconds"],
        slowest_over_median=shadow["slowest_over_median"],
        limit=LIMIT,
        within_limit=shadow["slowest_over_median"] <= LIMIT,
        worst_run_slowest_over_median=max(shadow["slowest_over_median_by_run"]),
        peer_slowest_over_median=recompute["slowest_over_median"],
        switch_length=setting.switch_length,
        shadow_chunk=setting.shadow_chunk,
        one_cache_gib_at_the_switch=per_token * setting.switch_length,
        two_caches_gib_at_the_switch=2 * per_token * setting.switch_length,
        repeats=num_repeats(options),
        clock=setting.clock,
        strategies=measured,
        three_tokens_before_the_switch=near,
    )


if __name__ == "__main__":
    main()
