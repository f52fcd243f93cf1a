"""The options of `data tokenise`, `data plan` and `data recall`: sources, lengths, buckets, rows, recall documents."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from longrope2.errors import DataError, all_problems
from longrope2.files import parse_toml, read_bounded
from longrope2.options import (
    Length,
    Stated,
    broken_limits,
    build,
    option,
    parse_length,
    required,
    stated,
    wrong_entries,
    wrong_types,
)
from longrope2.records import RowKind

PACKAGE_BOOKS = "books"
"""The word for the package's own books, without those held out for searching and testing. It means them always: a
folder of that name is written ./books."""
LARGEST_UPSAMPLE = 16
"""Beyond it the longest document always comes first, and length ** upsample soon overflows."""
# The paper's edges, 100k and 200k, for its window of 128k; other windows get the same proportions.
MIDDLE_EDGE = 100 / 128
TOP_EDGE = 200 / 128
SHORTEST = 8
"""Tokens that have room for BOS, EOS and some of a document."""
LONGEST_ROW = 2**31 - 1
"""Places in a plan are numbers of 32 bits."""
MOST_ROWS = 10**8
"""More than any training takes, and than memory holds."""
UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
WEIGHTED = re.compile(r"(?P<path>.+)=(?P<weight>[^=/\\]+)")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of documents and its part in the mix."""

    path: str = option(
        help="A folder of .txt, a .txt, .jsonl, .jsonl.gz or .parquet file, a hub dataset (owner/name:split), "
        "a dataset of `data tokenise`, or books."
    )
    weight: float = option(
        1.0, "Share of the tokens of each bucket, relative to the other sources that fill it.", above=0
    )
    upsample: float = option(
        0.0,
        "Within a bucket, documents are drawn in proportion to length ** upsample; 0 draws all alike.",
        least=0,
        most=LARGEST_UPSAMPLE,
    )
    text_column: str = option("text", "Column that holds the text, in .jsonl, .parquet and hub datasets.")
    name: str = option("", "Name in reports; empty: the path.")
    buckets: tuple[str, ...] = option((), "Names of the buckets that this source fills; empty: all.")
    cut: Length | tuple[Length, ...] = option(
        (),
        "Cut each text into documents of these lengths in tokens, taken in turn; empty: a text is a document.",
        least=SHORTEST,
    )

    def __post_init__(self) -> None:
        if isinstance(self.cut, int):
            object.__setattr__(self, "cut", (self.cut,))

    @property
    def label(self) -> str:
        """The name, or the path where it has none."""
        return self.name or self.path

    @property
    def cut_lengths(self) -> tuple[int, ...]:
        """`cut`, also where one length was given for all."""
        return (self.cut,) if isinstance(self.cut, int) else self.cut

    def problems(self) -> list[str]:
        """Problems with this source, one message each."""
        found = wrong_types(self) or broken_limits(self)
        if isinstance(self.path, str) and not self.path.strip():
            return ["a source has no path", *found]
        return [f"source {self.label!r}: {problem}" for problem in found]

    @classmethod
    def parse(cls, text: str) -> "Source":
        """PATH or PATH=WEIGHT, as on the command line."""
        match = None if Path(text).exists() else WEIGHTED.fullmatch(text)
        if match is None:
            return cls(path=text)
        try:
            return cls(path=match["path"], weight=float(match["weight"]))
        except ValueError:
            raise DataError(
                f"source {text!r}: {match['weight']!r} is not a weight", hint="write PATH or PATH=2.5"
            ) from None


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Documents longer than `above` and of at most `up_to` tokens, their BOS and EOS included."""

    above: Length = option(0, "Documents in this bucket have more tokens.", usual="where the bucket before it ends")
    up_to: Length = option(help="Most tokens of a document in this bucket.")
    quota: float = option(help="Share of the plan's tokens, relative to the other buckets.", above=0)
    name: str = option("", "Name in plans and reports; empty: its range.")

    @property
    def label(self) -> str:
        """The name, or the range where it has none."""
        return self.name or f"{self.above + 1}-{self.up_to}"


def default_buckets(original_length: int, target_length: int) -> tuple[Bucket, ...]:
    """The paper's: up to L_train, to 100k, to 200k at a window of 128k, with quotas 3 : 3 : 4 (table 1)."""
    short = Bucket(up_to=original_length, quota=3)
    if target_length == original_length:
        return (short,)
    middle, top = round(target_length * MIDDLE_EDGE), round(target_length * TOP_EDGE)
    if middle <= original_length:
        # Too small an extension for a bucket between the window and the top one.
        return short, Bucket(above=original_length, up_to=top, quota=7)
    return (
        short,
        Bucket(above=original_length, up_to=middle, quota=3),
        Bucket(above=middle, up_to=top, quota=4),
    )


def chained_buckets(tables: Sequence[Mapping[str, Any]]) -> tuple[Bucket, ...]:
    """Buckets where each begins at the end of the one before, unless it says otherwise."""
    buckets: list[Bucket] = []
    for table in tables:
        begin = buckets[-1].up_to if buckets else 0
        buckets.append(build(Bucket, "bucket", {"above": begin, **table}))
    return tuple(buckets)


def ending_at(length: int, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """The same buckets, where the one that reaches over a length ends there, and the next begins there."""
    found = list(buckets)
    for number, bucket in enumerate(found):
        if bucket.above < length < bucket.up_to:
            found[number] = replace(bucket, up_to=length)
            if number + 1 < len(found) and found[number + 1].above == bucket.up_to:
                found[number + 1] = replace(found[number + 1], above=length)
    return tuple(found)


def parse_buckets(text: str) -> tuple[Bucket, ...]:
    """`8k:3,100k:3,200k:4`: the end of each bucket and its quota; lengths in binary units, as windows are."""
    tables = []
    for part in text.split(","):
        end, _, quota = part.partition(":")
        try:
            tables.append({"up_to": parse_length(end), "quota": float(quota)})
        except ValueError:
            raise DataError(
                f"{part.strip()!r} is not a bucket", hint="write LENGTH:QUOTA,…, such as 8k:3,100k:3,200k:4"
            ) from None
    return chained_buckets(tables)


def parse_tokens(value: int | str) -> int:
    """A number of tokens: 500000, 500k, 20M or 10B, in decimal units, as training runs are counted."""
    text = str(value).strip().lower().replace("_", "").replace(",", "")
    unit = UNITS.get(text[-1:], 1)
    try:
        return round(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        raise DataError(f"{value!r} is not a number of tokens", hint="write 500000, 20M or 10B") from None


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Everything that decides a plan, besides the documents; saved with every plan."""

    target_length: Length = option(
        help="Window to reach, e.g. 128k, which is the length of rows; default: as --config says.",
        recipe=False,
        most=LONGEST_ROW,
    )
    """The trained window itself makes rows of that length: for DroPE, or for positions that are drawn."""
    original_length: Length = option(
        help="The trained window, if the config does not state it, or states it wrongly.", recipe=False, least=SHORTEST
    )
    rows: int | None = option(None, "Rows to plan; default: what one epoch gives at these quotas.", command=False)
    tokens: int | str | None = option(
        None, "Tokens to plan, e.g. 10B; default: what one epoch gives.", metavar="N", parse=parse_tokens
    )
    """Another way to say `rows`, which holds them then."""
    buckets: tuple[Bucket, ...] = option(
        (),
        "Largest length and quota of each, e.g. 8k:3,100k:3,200k:4.",
        metavar="LIST",
        recipe=False,
        parse=parse_buckets,
    )
    """In rising order; empty: the paper's."""
    seed: int = option(0, "The same seed gives the same plan.", least=0)
    repeat: bool = option(False, "Use documents again where a bucket runs out of them.")
    over_long: Literal["cut", "drop"] = option("cut", "What to do with documents longer than the last bucket.")
    """cut: into equal pieces that fit it."""
    max_padding: float = option(0.01, "Largest share of padding in a short row.", metavar="SHARE", least=0, below=1)
    """More than that is filled with a document that is cut off."""

    def __post_init__(self) -> None:
        problems = wrong_types(self) or [
            f"bucket {number}: {problem}"
            for number, bucket in enumerate(self.buckets, start=1)
            for problem in wrong_types(bucket)
        ]
        if not problems:
            if self.tokens is not None and self.rows is None:
                rows = parse_tokens(self.tokens) // max(self.target_length, 1)  # less is refused below
                object.__setattr__(self, "rows", rows)
                object.__setattr__(self, "tokens", None)
            if not self.buckets:
                object.__setattr__(self, "buckets", default_buckets(self.original_length, self.target_length))
            problems = self.problems()
        if problems:
            raise DataError(
                all_problems("plan", problems), hint="see `longrope2 data plan --help` for what each option means"
            )

    def problems(self) -> list[str]:
        """Problems with this configuration, one message each."""
        found = broken_limits(self)
        if self.target_length < self.original_length:
            found.append(
                f"target_length must not be below the trained window of {self.original_length:,}, "
                f"got {self.target_length:,}"
            )
        if self.tokens is not None:
            found.append("both tokens and rows are given; give one of them")
        if self.rows is not None and self.rows < 1:
            found.append("not one row wanted; the number of tokens must be at least target_length")
        if self.rows is not None and self.rows > MOST_ROWS:
            found.append(f"at most {MOST_ROWS:,} rows can be planned, got {self.rows:,}")
        if self.repeat and self.rows is None:
            found.append("repeat needs a number of tokens, since documents that repeat never end")
        return found + self._bucket_problems()

    def _bucket_problems(self) -> list[str]:
        found = []
        end = 0
        for bucket in self.buckets:
            subject = f"bucket {bucket.label}"
            found += [f"{subject}: {problem}" for problem in broken_limits(bucket)]
            if not 0 <= bucket.above < bucket.up_to:
                found.append(f"{subject}: must end above its start, got {bucket.above:,} to {bucket.up_to:,}")
            elif bucket.above < self.original_length < bucket.up_to:
                found.append(
                    f"{subject}: must not reach over the trained window of {self.original_length:,}, "
                    "since short and long rows are trained differently"
                )
            if bucket.above < end:
                found.append(f"{subject}: starts before the previous one ends, at {end:,}")
            end = max(end, bucket.up_to)
        if end < SHORTEST:  # longer documents are cut into pieces of the last one's size
            found.append(f"bucket {self.buckets[-1].label}: the last one must reach {SHORTEST} tokens, got {end}")
        labels = [bucket.label for bucket in self.buckets]
        found += [f"two buckets are called {label!r}" for label in sorted(set(labels)) if labels.count(label) > 1]
        return found

    def kind(self, bucket: int) -> RowKind:
        """Whether rows of a bucket keep documents apart under the original RoPE (short) or not (long)."""
        return "short" if self.buckets[bucket].up_to <= self.original_length else "long"

    @property
    def least_piece(self) -> int:
        """Tokens below which it is not worth to begin or to carry on a document; at 128k a thousandth of a row."""
        return max(1, self.target_length // 1024)

    def to_json(self) -> dict[str, Any]:
        """As a plan's file has it."""
        return {name: value for name, value in asdict(self).items() if name != "tokens"}


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Documents and how they are packed: all that decides a plan besides the tokenizer."""

    sources: tuple[Source, ...] = option(
        (),
        "Folder, file, hub dataset or 'books'; may be repeated. Replaces the sources of --config.",
        flag="--source",
        metavar="PATH[=WEIGHT]",
        repeated=True,
        parse=Source.parse,
    )
    plan: PlanConfig = option(PlanConfig)

    def check(self) -> None:
        """Refuse sources that are wrong in themselves, or that do not belong to the buckets; reads none of them."""
        if not self.sources:
            raise DataError("no source given", hint="name one or more with --source PATH, or in a file with --config")
        problems = [problem for source in self.sources for problem in source.problems()]
        labels = [source.label for source in self.sources]
        twice = [f"two sources are called {label!r}" for label in sorted(set(labels)) if labels.count(label) > 1]
        problems += twice
        known = [bucket.label for bucket in self.plan.buckets]
        problems += [
            f"source {source.label!r}: no bucket is called {name!r} (they are {', '.join(known)})"
            for source in self.sources
            for name in source.buckets
            if name not in known
        ]
        if problems:
            named = "give each source a name of its own (name = …)"
            hint = named if problems == twice else "docs/data.md explains each key"
            raise DataError(all_problems("sources", problems), hint=hint)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Which documents are kept: those of at most `up_to` tokens, and longer than the range before."""

    up_to: Length
    share: float


def parse_kept(text: str) -> tuple[Kept, ...]:
    """`8k:0.1,100k:0.5,200k:1`: the end of each range of lengths and the share of its documents to keep."""
    found = []
    for part in text.split(","):
        end, _, share = part.partition(":")
        try:
            found.append(Kept(up_to=parse_length(end), share=float(share)))
        except ValueError:
            raise DataError(
                f"{part.strip()!r} is not a range of lengths", hint="write LENGTH:SHARE,…, such as 8k:0.1,200k:1"
            ) from None
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class TokeniseConfig:
    """What decides the shards of a dataset, besides sources and tokenizer; and how they are made."""

    text_column: str = option("text", "Column that holds the text, in .jsonl, .parquet and hub datasets.")
    keep: tuple[Kept, ...] = option(
        (),
        "Share of documents to keep by their length in tokens, e.g. 8k:0.1,100k:0.5,200k:1. Longer ones are left out.",
        usual="all",
        metavar="LIST",
        parse=parse_kept,
    )
    seed: int = option(0, "The same seed keeps the same documents.", least=0)
    shard_size: float = option(256.0, "Text of a shard, in MB; its tokens take about as much.", metavar="MB", above=0)
    damaged: Literal["refuse", "skip"] = option(
        "refuse", "What to do with files and lines that cannot be read.", elastic=True
    )
    engine: Literal["local", "ray"] = option("local", "ray: on a Ray cluster; the shards are the same.", elastic=True)
    workers: int | None = option(None, "Processes.", usual="one for each core", least=1, elastic=True)

    def __post_init__(self) -> None:
        problems = wrong_types(self) or broken_limits(self)
        if not problems:
            ends = [kept.up_to for kept in self.keep]
            if ends != sorted(set(ends)):
                problems.append(f"keep: lengths must rise, got {ends}")
            problems += [
                f"keep: {kept.share:g} is not a share from 0 to 1" for kept in self.keep if not 0 <= kept.share <= 1
            ]
        if problems:
            raise DataError(all_problems("tokenising", problems), hint="see `longrope2 data tokenise --help`")


@dataclass(frozen=True, kw_only=True)
class RecallConfig:
    """What decides recall documents, besides tokenizer and books."""

    lengths: tuple[Length, ...] = option(help="Tokens of a document, e.g. 8k,128k.", least=64)
    """BOS and EOS included."""
    documents: int = option(100, "Documents of each length.", least=1)
    needles: int = option(8, "Numbers hidden and asked for in a document, if there is room.", least=1)
    books: str | None = option(
        None, "Folder, file or hub dataset; default: the package's training books.", metavar="SOURCE"
    )
    seed: int = option(0, "The same seed gives the same result.", least=0)

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if not problems:
            problems = broken_limits(self)
            if not self.lengths:
                problems.append("no length is named")
            twice = sorted({length for length in self.lengths if self.lengths.count(length) > 1})
            problems += [f"length {length} is named twice (for more of it, raise documents)" for length in twice]
        if problems:
            raise DataError(all_problems("recall documents", problems), hint="see `longrope2 data recall --help`")


def mix_of(values: Mapping[str, Any], *, original_length: int) -> Mix:
    """A mix from options, as command line and file give them."""
    return build(Mix, "plan", {**values, "original_length": original_length})


def read_mix(path: Path) -> dict[str, Any]:
    """The options that a TOML file gives: [plan], [[source]] and [[bucket]]."""
    try:
        values = parse_toml(read_bounded(path).decode())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})", hint="check the spelling") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise DataError(f"{path}: not valid TOML ({error})", hint="see docs/data.md for an example") from error
    problems = [f"unknown key {key!r}" for key in values if key not in ("plan", "source", "bucket")]
    settings = values.get("plan", {})
    if isinstance(settings, dict):
        problems += [f"plan: {problem}" for problem in wrong_entries(settings, _known(PlanConfig, "buckets"))]
    else:
        problems.append(f"plan must be a table, got {settings!r}")
    tables: dict[str, list[Any]] = {"source": values.get("source", []), "bucket": values.get("bucket", [])}
    for name, kind in (("source", Source), ("bucket", Bucket)):
        if not isinstance(tables[name], list) or not all(isinstance(table, dict) for table in tables[name]):
            problems.append(f"{name} must be a list of tables; write [[{name}]]")
            continue
        for number, table in enumerate(tables[name], start=1):
            subject = f"{name} {number}"
            problems += [f"{subject}: {problem}" for problem in wrong_entries(table, _known(kind))]
            problems += [f"{subject}: {key} is missing" for key in required(kind) if key not in table]
    if problems:
        kinds = {"[plan]": PlanConfig, "[[source]]": Source, "[[bucket]]": Bucket}
        known = [f"{name} knows {', '.join(entry.name for entry in stated(kind))}" for name, kind in kinds.items()]
        raise DataError(all_problems(str(path), problems), hint="; ".join(known))
    sources = [build(Source, "source", beside(path.parent, table)) for table in tables["source"]]
    return {**settings, "sources": tuple(sources), "buckets": chained_buckets(tables["bucket"])}


def _known(kind: type, *without: str) -> dict[str, Stated]:
    return {entry.name: entry for entry in stated(kind) if entry.name not in without}


def beside(folder: Path, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """A source's table whose path is looked for beside its config file first; it is still called as it stands there."""
    path = table.get("path")
    if not isinstance(path, str) or not path.strip() or path == PACKAGE_BOOKS:
        return table
    place = Path(path).expanduser()
    if place.is_absolute() or not (folder / place).exists():
        return table
    # Absolute: otherwise ./books would become the word.
    return {**table, "path": str((folder / place).absolute()), "name": table.get("name") or path}
