"""A model's RoPE at a glance: periods, coverage, critical dimensions, and every method's factors."""

from typing import Any

from longrope2.console import show_table, terminal_width
from longrope2.methods import METHODS, rescale
from longrope2.models import ModelInfo

DEFAULT_RATIO = 16
"""The target that `inspect` assumes when none is named, in original windows (8k → 128k)."""


def inspection(info: ModelInfo, target_length: int | None = None) -> dict[str, Any]:
    """Everything `longrope2 inspect` shows, as JSON values."""
    rope, reading = info.rope, info.reading
    target_length = target_length or DEFAULT_RATIO * rope.original_length
    factors = {name: rescale(name, rope, target_length) for name in METHODS if name != "none"}
    return {
        "model": info.name,
        "family": reading.family,
        "rotary_dim": rope.rotary_dim,
        "theta": rope.theta,
        "original_length": rope.original_length,
        "window": reading.window,
        "target_length": target_length,
        "extension_ratio": rope.extension_ratio(target_length),
        "critical_dimension": rope.critical_dimension,
        "ten_period_dimension": rope.ten_period_dimension,
        "default_real_critical_dimension": rope.middle_dimension,
        "num_layers": reading.num_layers,
        "full_attention_layers": reading.layer_types.count("full_attention"),
        "sliding_window": reading.sliding_window,
        "rescaled_by": reading.rescaled.method if reading.rescaled else None,
        "remarks": list(reading.remarks),
        "periods": list(rope.periods),
        "coverage": list(rope.coverage),
        "first_unseen_position": list(rope.first_unseen_position(target_length)),
        "methods": {name: list(value.long) for name, value in factors.items()},
        "attention_factors": {name: value.long_attention_factor for name, value in factors.items()},
    }


def show(result: dict[str, Any]) -> None:
    """Print an inspection as a table, one row per dimension."""
    fixed = ["i", "period", "turns", "unseen"]
    # Methods that a narrow terminal cannot hold are in --json; the best known ones come first.
    room = (terminal_width() - 42) // 11
    preferred = ["pi", "ntk", "yarn", "llama3", "ntk-rcd", "yarn-rcd"]
    names = preferred + [name for name in result["methods"] if name not in preferred]
    names = names[: max(room, 2)]
    rows = []
    for i, period in enumerate(result["periods"]):
        unseen = result["first_unseen_position"][i]
        mark = {result["ten_period_dimension"]: " ten", result["critical_dimension"]: " tcd"}.get(i, "    ")
        rows.append(
            [
                f"{i}{mark}",
                f"{period:,.1f}",
                f"{result['coverage'][i]:,.2f}",
                "-" if unseen is None else f"{unseen:,}",
                *(f"{result['methods'][name][i]:.3f}" for name in names),
            ]
        )
    hidden = len(result["methods"]) - len(names)
    show_table(_headline(result), fixed + names, rows, caption=_caption(result, hidden))


def _headline(result: dict[str, Any]) -> str:
    lines = [
        f"{result['model']} ({result['family']}): rotary dimension {result['rotary_dim']}, "
        f"theta {result['theta']:,.0f}, trained window {result['original_length']:,} tokens",
        f"target {result['target_length']:,} tokens, {result['extension_ratio']:g}×; critical dimension "
        f"{result['critical_dimension']} (tcd), search from {result['ten_period_dimension']} (ten periods)",
    ]
    if result["rescaled_by"]:
        lines.append(f"already rescaled by {result['rescaled_by']} to {result['window']:,} tokens")
    if result["sliding_window"]:
        lines.append(
            f"{result['full_attention_layers']} of {result['num_layers']} layers see everything, "
            f"the others {result['sliding_window']:,} tokens"
        )
    return "\n".join(lines)


def _caption(result: dict[str, Any], hidden: int) -> str:
    caption = (
        "turns: how many periods a dimension completes within the trained window; "
        "unseen: first position whose angle training never reached; then λ by method "
        f"(-rcd at dimension {result['default_real_critical_dimension']})"
    )
    return caption + (f"; {hidden} more methods with --json" if hidden else "")
