"""The model card of an export: what was done, with which factors, and how each engine runs it."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from longrope2 import __version__
from longrope2.errors import LongRopeError
from longrope2.export.config import profile_of
from longrope2.export.engines import Format, guidance
from longrope2.factors import RescaleFactors
from longrope2.files import read_json
from longrope2.records import Measured, RecordError, parse

RESULTS_HINT = "give results.json of `longrope2 evaluate`, or any other object of numbers"
TAGS = "tags: [longrope2, long-context]"
"""A line that every card has, and by which it is known again."""
PROMISES = {
    "dual": "`dual`: the original RoPE up to {original} tokens and the rescaled one beyond, where an engine can",
    "static-long": "`static-long`: the rescaled RoPE in every sequence, the same in every engine; answers to "
    "prompts of up to {original} tokens are not those of the original RoPE",
}


def card(
    model: str,
    factors: RescaleFactors,
    *,
    family: str,
    where: str,
    format: Format,
    dtype: str,
    folded: float,
    source_card: str | None = None,
    results: Any = None,
) -> str:
    """README.md of an export. `folded` is what queries were multiplied by; `where` names it in command lines."""
    original, target = f"{factors.original_length:,}", f"{factors.target_length:,}"
    parts = [
        "---",
        *_kept_metadata(source_card),
        "library_name: transformers" if format == "huggingface" else "library_name: gguf",
        TAGS,
        "---",
        f"# {Path(where).stem if format == 'gguf' else Path(where).name}",
        "",
        f"{model} with its context window extended from {original} to {target} tokens by rescaled RoPE "
        f"(method `{factors.method}`), exported by longrope2 {__version__}.",
        "",
        f"- Profile {PROMISES[profile_of(factors)].format(original=original)}.",
        f"- Weights: {dtype}" + (f"; queries multiplied by {folded:.6g} (--fold-temperature)." if folded != 1 else "."),
        f"- Attention factor: {factors.short_attention_factor:.6g} for short sequences, "
        f"{factors.long_attention_factor:.6g} for long ones.",
        f"- Base of RoPE {factors.theta:,.0f}, rotary dimension {factors.rotary_dim}"
        + (f", critical dimension {factors.critical_dimension}." if factors.critical_dimension is not None else "."),
        "",
        "## Serving",
        "",
        "| engine | command | what it does |",
        "|---|---|---|",
        *(f"| {name} | `{command}` | {text} |" for name, command, text in guidance(factors, family, where, format)),
        "",
        f"Check it on your machine: `longrope2 verify {quote(where)}`.",
        "",
        "## Results",
        "",
        *(_results_table(results) if results else ["None were given with the export."]),
        "",
        "## Factors",
        "",
        "| dimension | short | long |",
        "|---|---|---|",
        *(
            f"| {i} | {short:.6g} | {long:.6g} |"
            for i, (short, long) in enumerate(zip(factors.short, factors.long, strict=True))
        ),
        "",
    ]
    return "\n".join(parts)


def is_card(path: Path) -> bool:
    """Whether a file is the card of an export."""
    return path.is_file() and TAGS in path.read_text(encoding="utf-8", errors="replace").splitlines()


def read_results(path: Path) -> Any:
    """The content of a results file: any JSON object."""
    try:
        results = read_json(path, lenient=True)
    except (OSError, ValueError) as error:
        raise LongRopeError(f"{path}: not a readable JSON file ({error})", hint=RESULTS_HINT) from error
    if not isinstance(results, dict) or not results:
        raise LongRopeError(f"{path}: expected a JSON object with results", hint=RESULTS_HINT)
    return results


def _kept_metadata(source_card: str | None) -> list[str]:
    """The licence of the source model, which an extension does not change."""
    found = re.match(r"---\n(.*?)\n---\n", source_card or "", flags=re.S)
    return re.findall(r"^license(?:_name|_link)?:.*$", found[1], flags=re.M) if found else []


def _results_table(results: Mapping[str, Any]) -> list[str]:
    """Of `longrope2 evaluate`, its scores; of any other file, every value in it."""
    try:
        scores = parse(tuple[Measured, ...], results.get("scores"), "scores")
    except RecordError:
        return ["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in _leaves(results, ()))]
    return [
        "| suite | task | length | score | 95% interval | samples |",
        "|---|---|---|---|---|---|",
        *map(_score_row, scores),
    ]


def _score_row(score: Measured) -> str:
    cells = [
        score.suite,
        f"{score.task} ({score.metric})",
        "-" if score.length is None else f"{score.length:,}",
        _number(score.score),
        f"{_number(score.low)} to {_number(score.high)}",
        str(score.samples),
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from _leaves(inner, (*path, str(key)))
    elif value is not None:
        text = _number(value) if isinstance(value, float) else str(value)
        yield " · ".join(path), text.replace("|", "\\|").replace("\n", " ")
