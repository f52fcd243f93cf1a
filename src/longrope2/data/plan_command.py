"""`longrope2 data plan`: sources from the command line or a TOML file, a plan into a file, its composition printed."""

import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from longrope2.console import say, show_json, warn
from longrope2.data.buckets import Bucket, PlanConfig
from longrope2.data.composition import show
from longrope2.data.corpus import default_cache, tokenise
from longrope2.data.marks import document_marks, tokenizer_fingerprint
from longrope2.data.plan import Plan
from longrope2.data.planning import check_sources, make_plan
from longrope2.data.sources import Source, beside
from longrope2.errors import DataError, all_problems
from longrope2.files import check_writable
from longrope2.models import describe, load_tokenizer

UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
PLAN_KEYS = {
    "target_length": int,
    "original_length": int,
    "rows": int,
    "tokens": (int, str),
    "seed": int,
    "repeat": bool,
    "over_long": str,
    "max_padding": (int, float),
}


def run_plan(
    model: str,
    output: Path,
    *,
    sources: Sequence[str] = (),
    config: Path | None = None,
    buckets: str | None = None,
    cache: Path | None = None,
    as_json: bool = False,
    **options: Any,
) -> Plan:
    """Plan, write the plan, and print its composition; an option that is None leaves the file's or the default."""
    settings, listed, ranges = read_config(config) if config else ({}, [], ())
    given = {name: value for name, value in options.items() if value is not None}
    if given.keys() & {"tokens", "rows"}:
        # Two ways to say one thing: the flag replaces whichever the file chose.
        settings = {name: value for name, value in settings.items() if name not in ("tokens", "rows")}
    settings |= given
    chosen = [Source.parse(text) for text in sources] or listed
    if not chosen:
        raise DataError("no source given", hint="name one or more with --source PATH, or in a file with --config")
    if buckets is not None:
        ranges = parse_buckets(buckets)
    info = describe(model, original_length=settings.get("original_length"))
    resolved = _resolve({**settings, "original_length": info.rope.original_length, "buckets": ranges})
    # Before any is tokenised, which takes long.
    check_sources(chosen, resolved)
    check_writable(output)
    tokenizer = load_tokenizer(info)
    marks = document_marks(tokenizer)
    cache = cache or default_cache()
    corpora = [tokenise(source, tokenizer, cache) for source in chosen]
    plan = make_plan(resolved, chosen, corpora, marks=marks, tokenizer=tokenizer_fingerprint(tokenizer))
    plan.save(output)
    for warning in plan.report["warnings"]:
        warn(warning)
    say(f"wrote {output}: {len(plan):,} rows; tokenised sources in {cache}")
    if as_json:
        show_json(plan.report)
    else:
        show(plan.report)
    return plan


def read_config(path: Path) -> tuple[dict[str, Any], list[Source], tuple[Bucket, ...]]:
    """Settings, sources and buckets of a TOML file: [plan], [[source]] and [[bucket]]."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})", hint="check the spelling") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise DataError(f"{path}: not valid TOML ({error})", hint="see docs/data.md for an example") from error
    problems = [f"unknown key {key!r}" for key in values if key not in ("plan", "source", "bucket")]
    settings = values.get("plan", {})
    problems += _wrong_entries("plan", settings, PLAN_KEYS)
    tables: dict[str, list[Any]] = {}
    for name in ("source", "bucket"):
        tables[name] = values.get(name, [])
        if not isinstance(tables[name], list) or not all(isinstance(table, dict) for table in tables[name]):
            problems.append(f"{name} must be a list of tables; write [[{name}]]")
            tables[name] = []
    sources = []
    for table in tables["source"]:
        try:
            sources.append(Source.from_dict(beside(path.parent, table)))
        except DataError as error:
            problems.append(error.message)
    kinds = {"up_to": int, "above": int, "quota": (int, float), "name": str}
    for number, table in enumerate(tables["bucket"], start=1):
        problems += _wrong_entries(f"bucket {number}", table, kinds)
        problems += [f"bucket {number}: {key} is missing" for key in ("up_to", "quota") if key not in table]
    if problems:
        raise DataError(
            all_problems(str(path), problems),
            hint=f"[plan] knows {', '.join(PLAN_KEYS)}; [[source]] knows "
            f"{', '.join(field.name for field in fields(Source))}; [[bucket]] knows {', '.join(kinds)}",
        )
    return dict(settings), sources, _chain(tables["bucket"])


def parse_buckets(text: str) -> tuple[Bucket, ...]:
    """`8k:3,100k:3,200k:4`: the end of each bucket and its quota; lengths in binary units, as windows are."""
    tables = []
    for part in text.split(","):
        end, _, quota = part.strip().lower().partition(":")
        unit = {"k": 1 << 10, "m": 1 << 20}.get(end[-1:], 1)
        try:
            tables.append({"up_to": int(end[:-1] if unit > 1 else end) * unit, "quota": float(quota)})
        except ValueError:
            raise DataError(
                f"{part.strip()!r} is not a bucket", hint="write LENGTH:QUOTA,…, such as 8k:3,100k:3,200k:4"
            ) from None
    return _chain(tables)


def parse_tokens(value: int | str) -> int:
    """A number of tokens: 500000, 500k, 20M or 10B, in decimal units, as training runs are counted."""
    text = str(value).strip().lower().replace("_", "").replace(",", "")
    unit = UNITS.get(text[-1:], 1)
    try:
        return round(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        raise DataError(f"{value!r} is not a number of tokens", hint="write 500000, 20M or 10B") from None


def _resolve(settings: dict[str, Any]) -> PlanConfig:
    """The configuration, its tokens turned into rows."""
    if "target_length" not in settings:
        raise DataError("target_length is missing", hint="say --target-length, e.g. 128k")
    tokens = settings.pop("tokens", None)
    if tokens is not None:
        if settings.get("rows") is not None:
            raise DataError("both tokens and rows are given", hint="give one of them")
        settings["rows"] = parse_tokens(tokens) // max(settings["target_length"], 1)  # less is refused below
    return PlanConfig(**settings)


def _chain(tables: Sequence[dict[str, Any]]) -> tuple[Bucket, ...]:
    """Buckets where each begins at the end of the one before, unless it says otherwise."""
    buckets: list[Bucket] = []
    for table in tables:
        begin = buckets[-1].up_to if buckets else 0
        buckets.append(Bucket(**{"above": begin, **table}))
    return tuple(buckets)


def _wrong_entries(subject: str, values: Any, kinds: dict[str, Any]) -> list[str]:
    """Unknown keys and values of the wrong type."""
    if not isinstance(values, dict):
        return [f"{subject} must be a table, got {values!r}"]
    problems = [f"{subject}: unknown key {key!r}" for key in values if key not in kinds]
    for key, value in values.items():
        kind = kinds.get(key)
        # True is an int in Python, but not here.
        if kind is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            problems.append(f"{subject}: {key} must not be {value!r}")
    return problems
