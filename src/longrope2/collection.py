"""Published factors and our own, to take without a search: one JSON file each, in the folder `collected`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from longrope2.console import warn
from longrope2.errors import FactorsError
from longrope2.factors import RescaleFactors
from longrope2.figures import length_label
from longrope2.models import ModelInfo
from longrope2.records import Record, Table
from longrope2.rope import RopeSpec

COLLECTED = Path(__file__).parent / "collected"
SOURCE = "collection"
"""What `factors --from` takes; with /NAME for one of the entries."""
ADD = "docs/collection.md says how to add factors"
SHAPE = ("rotary_dim", "theta", "original_length")
PAGE_HEADING = "## Entries\n"
"""Of docs/collection.md; everything below it is generated."""


@dataclass(frozen=True, kw_only=True)
class CollectedScore:
    """One measured number; `setting` says of what, and `by` whose measurement it is."""

    metric: str
    length: int
    score: float
    low: float | None = None
    high: float | None = None
    setting: str
    by: str

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" ({self.low:.3g}–{self.high:.3g})"
        return f"{self.metric} at {length_label(self.length)}: {self.score:.4g}{interval}, {self.setting}; {self.by}"


@dataclass(frozen=True, kw_only=True)
class CollectedFactors(Record):
    """A file of the collection."""

    FORMAT: ClassVar[str] = "longrope2.collected"

    name: str
    """Also that of the file."""
    model: str
    """Hub id of the model that they are for."""
    revision: str | None
    """Of that model: a commit of the hub, or the digest of a config; None where it is not known."""
    found: str
    """How they were found."""
    source: str
    """Where they are published: a link, or a file of this repository."""
    scores: tuple[CollectedScore, ...]
    values: dict[str, Any]
    """The content of a factors file."""

    @cached_property
    def factors(self) -> RescaleFactors:
        """The factors themselves, with where they come from."""
        factors = RescaleFactors.from_json(dict(self.values), source=f"{SOURCE}/{self.name}")
        origin = {"model": self.model, "revision": self.revision, "collection": self.name, "source": self.source}
        return replace(factors, provenance={**factors.provenance, **origin})

    def mismatches(self, rope: RopeSpec) -> list[str]:
        """Where its RoPE is another one than a model's."""
        return [
            f"{name} {getattr(self.factors, name):g}, not {getattr(rope, name):g}"
            for name in SHAPE
            if getattr(self.factors, name) != getattr(rope, name)
        ]

    def is_named_as(self, model: str) -> bool:
        """Whether a folder, file or hub id has the name of its model."""
        mine, other = (_plain_name(each) for each in (self.model, model))
        return other.startswith(mine)

    def row(self) -> list[str]:
        """For the table."""
        factors = self.factors
        short, long = factors.short_attention_factor, factors.long_attention_factor
        temperature = f"{long:.4g}" if short == long else f"{short:.4g} / {long:.4g}"
        lengths = f"{length_label(factors.original_length)} → {length_label(factors.target_length)}"
        shape = f"{factors.rotary_dim}, {factors.theta:,.0f}"
        return [self.name, self.model.rpartition("/")[2], lengths, shape, temperature, factors.method]


def collection() -> list[CollectedFactors]:
    """All entries, by name."""
    return [CollectedFactors.load(path, hint=ADD) for path in sorted(COLLECTED.glob("*.json"))]


def collection_table(entries: Sequence[CollectedFactors]) -> Table:
    """One row each, and what is known of it below."""
    notes = [f"{each.name}: {'. '.join([each.found, *map(str, each.scores)])}" for each in entries]
    return Table(
        title="factors to take with: longrope2 factors MODEL --from collection -o FILE",
        columns=["name", "model", "window", "rotary dim, base", "temperature", "method"],
        rows=[each.row() for each in entries],
        caption="\n".join(notes),
    )


def fitting_names(rope: RopeSpec, target_length: int) -> list[str]:
    """The entries that any model with this RoPE can take to this window.

    Those with one temperature come first: a default export of them keeps both RoPEs.
    """
    fitting = [
        each for each in collection() if not each.mismatches(rope) and each.factors.target_length == target_length
    ]
    fitting.sort(key=lambda each: each.factors.short_attention_factor != each.factors.long_attention_factor)
    return [each.name for each in fitting]


def take_collected(
    info: ModelInfo, source: str, options: Mapping[str, Any], *, extend_again: bool = False
) -> RescaleFactors:
    """What `factors --from` writes; refuses the options of a closed form."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if foreign := sorted(set(given) - {"--target-length", "--single"}):
        raise FactorsError(f"--from takes no {', '.join(foreign)}", hint="they are options of a closed form")
    entry = collected_for(info, source, options.get("target_length"))
    info.refuse_rescaled(extend_again=extend_again)
    if not entry.is_named_as(info.name):
        warn(f"{entry.name} was made for {entry.model}, which has the same RoPE; {info.name} is another model")
    return entry.factors


def collected_for(info: ModelInfo, source: str, target_length: int | None) -> CollectedFactors:
    """The entry for a model; FactorsError, with the nearest there are, where none fits or several do."""
    word, _, wanted = source.partition("/")
    entries = collection()
    if word != SOURCE or (wanted and wanted not in [each.name for each in entries]):
        names = ", ".join(each.name for each in entries)
        raise FactorsError(f"--from {source}: not known", hint=f"write {SOURCE}, or {SOURCE}/NAME, one of {names}")
    chosen = [each for each in entries if each.name == wanted] if wanted else entries
    fitting = [each for each in chosen if not each.mismatches(info.rope)]
    if not fitting:
        nearest = sorted(chosen, key=lambda each: (len(each.mismatches(info.rope)), not each.is_named_as(info.name)))
        listed = "; ".join(f"{each.name} ({', '.join(each.mismatches(info.rope))})" for each in nearest[:3])
        raise FactorsError(
            f"no factors of the collection fit {info.name}", hint=f"nearest: {listed}. `longrope2 search` finds its own"
        )
    named = fitting if wanted else [each for each in fitting if each.is_named_as(info.name)]
    if not named:
        listed = ", ".join(f"--from {SOURCE}/{each.name} (for {each.model})" for each in fitting)
        raise FactorsError(
            f"the collection has no factors of {info.name}",
            hint=f"these are of other models with the same RoPE: {listed}",
        )
    reaching = [each for each in named if target_length in (None, each.factors.target_length)]
    if len(reaching) != 1:
        problem = f"{len(reaching)} entries of the collection" if reaching else "no entry of the collection"
        lengths = ", ".join(
            f"--from {SOURCE}/{each.name} ({length_label(each.factors.target_length)})" for each in named
        )
        to = f" to {target_length:,} tokens" if target_length else ""
        raise FactorsError(f"{problem} for {info.name}{to}", hint=f"choose: {lengths}")
    return reaching[0]


def collection_page(page: str) -> str:
    """docs/collection.md with its generated part as it should be."""
    kept, heading, _ = page.partition(PAGE_HEADING)
    parts = []
    for each in collection():
        place = f"<{each.source}>" if each.source.startswith("http") else f"`{each.source}`"
        lines = [
            f"### {each.name}",
            "",
            f"- {each.found}.",
            f"- Model: `{each.model}`, revision {each.revision or 'not known'}.",
        ]
        _, _, lengths, shape, temperature, method = each.row()
        lines.append(f"- {lengths} tokens; rotary dimension and base {shape}; temperature {temperature}; {method}.")
        lines += [f"- Source: {place}", *(f"- {score}." for score in each.scores)]
        parts.append("\n".join(lines))
    return kept + heading + "\n" + "\n\n".join(parts) + "\n"


def _plain_name(model: str) -> str:
    """The last part of a name, in small letters and digits: files add a format, and people dashes."""
    return re.sub(r"[^a-z0-9]", "", model.partition("@")[0].rstrip("/").rpartition("/")[2].lower())
