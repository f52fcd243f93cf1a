"""Length buckets with token quotas, and everything else that decides a plan besides the documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from longrope2.errors import DataError, all_problems, unknown_choices

RowKind = Literal["short", "long"]
OverLong = Literal["cut", "drop"]

# The paper's edges, 100k and 200k, for its window of 128k; other windows get the same proportions.
MIDDLE_EDGE = 100 / 128
TOP_EDGE = 200 / 128
SHORTEST = 8
"""Tokens that have room for BOS, EOS and some of a document."""
MOST_ROWS = 10**8
"""More than any training takes, and than memory holds."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Documents longer than `above` and of at most `up_to` tokens, their BOS and EOS included."""

    above: int = 0
    up_to: int
    quota: float
    """Share of the plan's tokens, relative to the other buckets."""
    name: str = ""
    """As it stands in plans and reports; empty: its range."""

    @property
    def label(self) -> str:
        """The name, or the range where it has none."""
        return self.name or f"{self.above + 1}-{self.up_to}"


def default_buckets(original_length: int, target_length: int) -> tuple[Bucket, ...]:
    """The paper's: up to L_train, to 100k, to 200k at a window of 128k, with quotas 3 : 3 : 4 (table 1)."""
    short = Bucket(up_to=original_length, quota=3)
    middle, top = round(target_length * MIDDLE_EDGE), round(target_length * TOP_EDGE)
    if middle <= original_length:
        # Too small an extension for a bucket between the window and the top one.
        return short, Bucket(above=original_length, up_to=top, quota=7)
    return (
        short,
        Bucket(above=original_length, up_to=middle, quota=3),
        Bucket(above=middle, up_to=top, quota=4),
    )


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Everything that decides a plan, besides the documents; saved with every plan."""

    target_length: int
    """Tokens of every row."""
    original_length: int
    """The trained window, L_train: documents up to it go into short rows, longer ones into long rows."""
    rows: int | None = None
    """Rows wanted; None: as many as one epoch of the documents fills at these quotas."""
    buckets: tuple[Bucket, ...] = ()
    """In rising order; empty: the paper's."""
    seed: int = 0
    repeat: bool = False
    """Draw documents again when a bucket runs out of them."""
    over_long: OverLong = "cut"
    """Documents above the last bucket: cut into equal pieces that fit it, or left out."""
    max_padding: float = 0.01
    """Largest share of padding in a short row; more than that is filled with a document that is cut off."""

    def __post_init__(self) -> None:
        if not self.buckets:
            object.__setattr__(self, "buckets", default_buckets(self.original_length, self.target_length))
        if problems := self.problems():
            raise DataError(
                all_problems("plan", problems), hint="see `longrope2 data plan --help` for what each option means"
            )

    def problems(self) -> list[str]:
        """What is wrong with it, in words."""
        found = []
        if self.original_length < SHORTEST:
            found.append(f"original_length must be at least {SHORTEST}, got {self.original_length}")
        if self.target_length <= self.original_length:
            found.append(
                f"target_length must be above the trained window of {self.original_length:,}, "
                f"got {self.target_length:,}"
            )
        if self.rows is not None and self.rows < 1:
            found.append("not one row wanted; the number of tokens must be at least target_length")
        if self.rows is not None and self.rows > MOST_ROWS:
            found.append(f"at most {MOST_ROWS:,} rows can be planned, got {self.rows:,}")
        if self.repeat and self.rows is None:
            found.append("repeat needs a number of tokens, since documents that repeat never end")
        if self.seed < 0:
            found.append(f"seed must not be negative, got {self.seed}")
        found += unknown_choices(self)
        if not 0 <= self.max_padding < 1:
            found.append(f"max_padding must lie in [0, 1), got {self.max_padding}")
        return found + self._bucket_problems()

    def _bucket_problems(self) -> list[str]:
        found = []
        end = 0
        for bucket in self.buckets:
            subject = f"bucket {bucket.label}"
            if not (math.isfinite(bucket.quota) and bucket.quota > 0):
                found.append(f"{subject}: quota must be positive, got {bucket.quota}")
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


def apportion(rows: int, quotas: Sequence[float]) -> list[int]:
    """Split a number of rows by quotas; no share is off by a whole row, and the sum is exact."""
    ideal = [rows * quota / math.fsum(quotas) for quota in quotas]
    shares = [math.floor(share) for share in ideal]
    by_remainder = sorted(range(len(quotas)), key=lambda index: (shares[index] - ideal[index], index))
    for index in by_remainder[: rows - sum(shares)]:
        shares[index] += 1
    return shares


def rows_within(available: Sequence[int], quotas: Sequence[float]) -> int:
    """The most rows whose split by quotas every bucket can serve."""
    total = math.fsum(quotas)
    rows = math.floor(min((have + 1) * total / quota for have, quota in zip(available, quotas, strict=True)))
    while rows and any(n > have for n, have in zip(apportion(rows, quotas), available, strict=True)):
        rows -= 1
    return rows
