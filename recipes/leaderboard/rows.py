"""The rows of all tables: what a method's factors are, what it is trained on, and what is measured of it.

To add a method to the leaderboards, add its line to METHODS; README.md says the rest.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longrope2 import RescaleFactors, rescale, search_factors
from longrope2.calibration.calibrate import calibrate
from longrope2.calibration.config import CalibrationConfig
from longrope2.errors import LongRopeError, chosen

if TYPE_CHECKING:
    from run import Bench

KEPT = Path(__file__).parents[2] / "results"
K = 1024
LEARNING_RATE = 3e-4
STEP_TOKENS = 128 * K
SEARCH = {"compiled": torch.cuda.is_available()}
COLD = {"long_attention_factor": 1.0}

Make = Callable[["Bench", "Row", Path], RescaleFactors]
"""(bench, row, the row's folder) → factors."""


def needing(make: Make, name: str | None = None, **more: Any) -> Make:
    """The same, marked with what takes time: another row's factors, a search with these options, a calibration."""
    make.needs = {"row": name, **more}  # type: ignore[attr-defined]
    return make


def closed(method: str, *, cold: bool = False, **options: Any) -> Make:
    """A closed form, at the critical dimension that the search of the paper's space has found where it needs one."""

    def make(bench: "Bench", row: Row, folder: Path) -> RescaleFactors:
        if method.endswith("-rcd"):
            found = bench.factors(row.peer("paper")).critical_dimension
            return rescale(bench.base, method, row.length, critical_dimension=found, **options)
        factors = rescale(bench.base, method, row.length, **options)
        return replace(factors, **COLD) if cold else factors

    return needing(make, "paper" if method.endswith("-rcd") else None)


def searched(**options: Any) -> Make:
    """What `longrope2 search` finds on books that nothing is measured on."""

    def make(bench: "Bench", row: Row, folder: Path) -> RescaleFactors:
        books = bench.books("search")
        return search_factors(bench.base, row.length, folder / "search", books=books, **(SEARCH | options))

    return needing(make, search=options)


def same_as(name: str, **changes: Any) -> Make:
    """The factors of another row, but for these changes."""

    def make(bench: "Bench", row: Row, folder: Path) -> RescaleFactors:
        return replace(bench.factors(row.peer(name)), **changes)

    return needing(make, name)


def one_temperature(name: str) -> Make:
    """The factors of another row with its temperature in short sequences, too, as released longrope models have it:
    what plain transformers can run."""

    def make(bench: "Bench", row: Row, folder: Path) -> RescaleFactors:
        factors = bench.factors(row.peer(name))
        return replace(factors, short_attention_factor=factors.long_attention_factor)

    return needing(make, name)


def calibrated(name: str) -> Make:
    """The factors of another row with the switch where `longrope2 calibrate` puts it for the base: the row is trained
    and run with it. Never beyond the window, since the original RoPE is known to work only within."""

    def make(bench: "Bench", row: Row, folder: Path) -> RescaleFactors:
        factors = bench.factors(row.peer(name))
        path = bench.output / row.peer(name) / "factors.json"
        config = CalibrationConfig(books=bench.books("search"), **bench.calibration)
        found = calibrate(bench.base, config, folder / "calibration", factors=path)
        return replace(factors, original_length=found.within_window)

    return needing(make, name, calibration=True)


def published(name: str) -> Make:
    """The factors of a finished row in results/, whatever a search would find today."""

    def make(bench: "Bench", row: Row, folder: Path) -> RescaleFactors:
        content = json.loads((KEPT / "smollm2" / "rows" / f"{name}.json").read_text(encoding="utf-8"))
        return RescaleFactors.from_json(content["factors"], source=name)

    return make


def found(variant: str, seed: int, **changes: Any) -> Make:
    """What a search in results/ found (benchmarks/search_smollm2.py), but for these changes."""

    def make(bench: "Bench", row: Row, folder: Path) -> RescaleFactors:
        path = KEPT / "search" / "smollm2" / f"search-smollm2-{row.length // K}k.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        (entry,) = (entry for entry in rows if (entry["name"], entry["seed"]) == (variant, seed))
        return replace(
            rescale(bench.base, "none", row.length),
            method="longrope2",
            long=tuple(entry["factors"]),
            critical_dimension=entry["critical_dimension"],
            **{"long_attention_factor": entry["temperature"], **changes},
        )

    return make


LONG = ("needles", "perplexity")
SHORT = ("hellaswag", "truthfulqa", "mmlu")
ALL = (*LONG, *SHORT, "ruler")
BOARD = (
    "needles", "wordings", "multikey", "multivalue", "ruler", "babilong", "longppl", "perplexity", "lambada",
    "hellaswag", "piqa", "arc",
)  # fmt: skip
"""What a leaderboard has as columns."""
FAR = 128 * K
"""From here on reading a document takes seconds, and less is asked: other wordings say as much as the paper's."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What rows are made of: books and documents with questions, short and long."""

    window: int
    """Short rows have documents up to this many tokens."""
    target: int
    rows: int
    short_documents: int | None = None
    """With questions; None: enough for all short rows."""
    file: str | None = None
    """A file of this folder instead, for books alone."""

    @property
    def short_recall(self) -> str:
        """The name of the short documents with questions."""
        return f"recall-{label(self.window)}"

    @property
    def long_recall(self) -> str:
        """The name of the long ones."""
        return f"recall-{label(self.target)}"

    @property
    def recall(self) -> dict[str, tuple[int, int, int]]:
        """By name: tokens of a document, documents, needles in each."""
        if self.file is not None:
            return {}
        share = 10 if self.target > self.window else 3  # one row in so many
        short = self.short_documents or max(self.rows // share, 1) * self.target // self.window
        found = {self.short_recall: (self.window, short, max(self.window // 256, 1))}
        if self.target > self.window:
            found[self.long_recall] = (self.target, max(self.rows // 2, 1), self.target // 256)
        return found

    def text(self) -> str:
        """The file that `longrope2 data plan` reads, with names instead of paths."""
        folder, is_long = Path(__file__).parent, self.target > self.window
        if self.file is not None:
            return (folder / self.file).read_text(encoding="utf-8")
        pieces = [self.window - 3, self.window * 125 // 256, self.window - 3, self.window * 125 // 512]
        pieces += [self.target - 3, self.window - 3, self.target - 3] if is_long else []
        parts = ["mix.toml", "mix-long.toml"] if is_long else ["mix.toml"]
        return "".join((folder / part).read_text(encoding="utf-8") for part in parts).format(
            window=self.window,
            target=self.target,
            rows=self.rows,
            cut=pieces,
            book_buckets=json.dumps(["short", "long"] if is_long else ["short"]),
            short_recall=self.short_recall,
            long_recall=self.long_recall,
            short_top=self.window - 1,
            long_top=self.target - 1,
        )


def label(length: int) -> str:
    """A length as it stands in names: 32k, or the tokens where that is not exact."""
    return f"{length // K}k" if length % K == 0 else str(length)


MIXES = {
    "mix-32k": Mix(window=8 * K, target=32 * K, rows=640),
    "mix-64k": Mix(window=8 * K, target=64 * K, rows=160, short_documents=256),
    "books-32k": Mix(window=8 * K, target=32 * K, rows=640, file="books-32k.toml"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table."""

    title: str
    table: str
    make: Make | None
    """None: the model as it is."""
    window: str = "mixed"
    length: int = 32 * K
    mix: str = "mix-32k"
    """What it is trained on: a name of MIXES."""
    seed: int = 0
    """Of what is drawn from it, and in which order."""
    steps: int = 80
    learning_rate: float = LEARNING_RATE
    training: Mapping[str, Any] = field(default_factory=dict)
    """Further options of `longrope2 train`."""
    evaluations: tuple[str, ...] = LONG
    lengths: tuple[int, ...] = (4 * K, 8 * K, 16 * K, 32 * K, 64 * K)
    """To evaluate at, as far as the row's own."""
    batch_rows: int | None = None
    """Of a step; None: 131k tokens of them."""
    suffix: str = ""
    """Of the names of rows beside it."""

    @property
    def rows_of_step(self) -> int:
        """As many as are trained on at once."""
        return self.batch_rows or STEP_TOKENS // self.length

    def peer(self, name: str) -> str:
        """The row of another method at the same length."""
        return name + self.suffix


MAIN = {"table": "main-32k", "steps": 153, "evaluations": ALL}
BOOKS = {"table": "books-32k", "mix": "books-32k", "steps": 153, "evaluations": ALL}
ABLATION = {"table": "ablations-32k", "steps": 153}  # compared with YaRN, NTK, paper and wide of the main table
TUNING = {"table": "tuning", "mix": "books-32k", "make": closed("yarn"), "window": "single", "steps": 40}
OTHERS = {"table": "methods-32k", "window": "single", "steps": 153, "evaluations": ALL}  # compared with YaRN
LORA = {"table": "lora-32k", "make": closed("yarn"), "window": "single", "steps": 76, "lengths": (8 * K, 32 * K)}
BESIDE = {"lora": 16, "also": ("norms", "embeddings")}
OTHER_ROWS = {"table": "seeds-32k", "steps": 153, "seed": 1}
LONGEST = {"table": "main-64k", "mix": "mix-64k", "length": 64 * K}
SINGLE = {"window": "single"}
SMOLLM2_ROWS: dict[str, Row] = {
    "base": Row(title="original", table="main-32k", make=None, steps=0, evaluations=ALL),
    "yarn": Row(title="YaRN", make=closed("yarn"), **SINGLE, **MAIN),
    "ntk": Row(title="NTK", make=closed("ntk"), **SINGLE, **MAIN),
    "longrope": Row(title="LongRoPE", make=searched(method="longrope"), **SINGLE, **MAIN),
    "paper": Row(title="LongRoPE2 (paper)", make=searched(), **MAIN),
    "wide": Row(title="LongRoPE2 (wide)", make=searched(space="wide"), **MAIN),
    "yarn-books": Row(title="YaRN", make=closed("yarn"), **SINGLE, **BOOKS),
    "wide-books": Row(title="LongRoPE2 (wide)", make=same_as("wide"), **BOOKS),
    "yarn-rcd": Row(title="YaRN-rcd", make=closed("yarn-rcd"), **SINGLE, **ABLATION),
    "ntk-rcd": Row(title="NTK-rcd", make=closed("ntk-rcd"), **SINGLE, **ABLATION),
    "plain": Row(title="plain perplexity as objective", make=searched(objective="plain"), **ABLATION),
    "all": Row(title="all dimensions searched", make=searched(dimensions="all"), **ABLATION),
    "paper-single": Row(
        title="no mixed windows", make=same_as("paper"), evaluations=(*LONG, *SHORT), **SINGLE, **ABLATION
    ),
    "wide-cold": Row(title="temperature 1", make=same_as("wide", long_attention_factor=1.0), **ABLATION),
    "mrrope-uni": Row(title="MrRoPE-Uni", make=closed("mrrope-uni"), **OTHERS),
    "mrrope-pro": Row(title="MrRoPE-Pro", make=closed("mrrope-pro"), **OTHERS),
    "cope": Row(title="CoPE", make=closed("cope"), **OTHERS),
    "hardclip": Row(title="HardClip", make=closed("hardclip"), **OTHERS),
    "lora": Row(title="LoRA 16", training={"lora": 16}, **LORA),
    "lora-also": Row(title="LoRA 16, norms and embeddings", training=BESIDE, **LORA),
    "yarn-other": Row(title="YaRN, other rows", make=closed("yarn"), **SINGLE, **OTHER_ROWS),
    "paper-other": Row(title="LongRoPE2 (paper), other rows", make=same_as("paper"), **OTHER_ROWS),
    "yarn-64k": Row(title="YaRN", make=closed("yarn"), **SINGLE, **LONGEST),
    "paper-64k": Row(title="LongRoPE2 (paper)", make=searched(), **LONGEST),
    "wide-64k": Row(title="LongRoPE2 (wide)", make=searched(space="wide"), **LONGEST),
    "tune-1e-4": Row(title="1e-4", learning_rate=1e-4, **TUNING),
    "tune-3e-4": Row(title="3e-4", learning_rate=3e-4, **TUNING),
    "tune-1e-3": Row(title="1e-3", learning_rate=1e-3, **TUNING),
}


SETS: dict[str, tuple[str, Make]] = {  # factors to rank, besides those of finished rows
    "theory": ("theory: dimension 20, s", closed("longrope2", critical_dimension=20)),
    "paper-1": ("paper's space, seed 1", found("paper", 1)),
    "released-0": ("paper's space, released temperature", found("paper-released", 0)),
    "released-0-cold": ("the same, trained at 1", found("paper-released", 0, **COLD)),
    "searched-0-cold": ("paper's space, searched temperature, trained at 1", found("paper-searched", 0, **COLD)),
    "wide-0": ("wide, seed 0", found("wide", 0)),
    "wide-0-cold": ("wide, seed 0, trained at 1", found("wide", 0, **COLD)),
}
FINISHED = ("yarn", "ntk", "longrope", "paper", "wide", "yarn-rcd", "ntk-rcd", "plain", "all", "wide-cold")
RANKS = {"table": "ranks-32k"}
BRIEF = {"table": "brief-32k", "steps": 12, "evaluations": ("needles",), "lengths": (32 * K,)}
"""1.6M tokens: does it predict what 20M give? See ranks.py."""
SMOLLM2_ROWS |= {f"set-{name}": Row(title=title, make=make, steps=153, **RANKS) for name, (title, make) in SETS.items()}
SMOLLM2_ROWS |= {f"brief-set-{name}": Row(title=title, make=make, **BRIEF) for name, (title, make) in SETS.items()}
SMOLLM2_ROWS |= {
    f"brief-{name}": Row(title=row.title, make=published(name), window=row.window, **BRIEF)
    for name, row in ((name, SMOLLM2_ROWS[name]) for name in FINISHED)
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A line of every leaderboard."""

    title: str
    make: Make | None
    """None: the model as it is."""
    window: str = "mixed"
    """How it is trained: with both RoPEs, or with one (`single`) where its authors do so."""
    in_window: bool = False
    """Whether it is trained in rows of the original window, on the same number of tokens."""


METHODS: dict[str, Method] = {
    "original": Method(title="original", make=None),
    "pi": Method(title="PI", make=closed("pi"), **SINGLE),
    "ntk": Method(title="NTK", make=closed("ntk"), **SINGLE),
    "yarn": Method(title="YaRN", make=closed("yarn"), **SINGLE),
    "yarn-cold": Method(title="YaRN, temperature 1", make=closed("yarn", cold=True), **SINGLE),
    "yarn-rcd": Method(title="YaRN-rcd", make=closed("yarn-rcd"), **SINGLE),
    "longrope": Method(title="LongRoPE", make=searched(method="longrope"), **SINGLE),
    "cope": Method(title="CoPE", make=closed("cope"), **SINGLE),
    "mrrope-uni": Method(title="MrRoPE-Uni", make=closed("mrrope-uni"), **SINGLE),
    "mrrope-pro": Method(title="MrRoPE-Pro", make=closed("mrrope-pro"), **SINGLE),
    "drope": Method(title="DroPE", make=closed("drope"), in_window=True, **SINGLE),
    "paper": Method(title="LongRoPE2", make=searched()),
    "switched": Method(title="LongRoPE2, calibrated switch", make=calibrated("paper")),
    "released": Method(title="LongRoPE2, released temperature", make=searched(attention_factor="released")),
    "released-cold": Method(
        title="LongRoPE2, searched at the released temperature, trained at 1", make=same_as("released", **COLD)
    ),
    "released-switched": Method(
        title="LongRoPE2, released temperature, calibrated switch", make=calibrated("released")
    ),
    "released-both": Method(title="LongRoPE2, released temperature at every length", make=one_temperature("released")),
    "wide": Method(title="LongRoPE2 (wide)", make=searched(space="wide")),
    "wide-cold": Method(title="LongRoPE2 (wide), trained at temperature 1", make=same_as("wide", **COLD)),
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What all methods of a leaderboard are trained with."""

    steps: int
    batch_rows: int
    lengths: tuple[int, ...] = ()
    """To evaluate at."""
    learning_rate: float = LEARNING_RATE
    plan_rows: int | None = None
    """Of the plan; None: as many as are used."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further ones of `longrope2 train`."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A model to extend, and its leaderboards."""

    title: str
    window: int
    lengths: Mapping[int, Training]
    """By the length to reach."""
    repair: Training | None = None
    """A training within the window that comes first, since the weights have lost something; the result is the original
    of all rows."""
    rows: Mapping[str, Row] = field(default_factory=dict)
    """Rows with names of their own."""
    asked: tuple[str, ...] = BOARD
    """What is measured."""
    kept: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """By method and length: the search in results/ whose factors are taken, instead of making it again."""

    def row(self, name: str) -> Row:
        """The row of a name: METHOD@LENGTH, METHOD@LENGTH-seedN, or one of its own."""
        if name in self.rows:
            return self.rows[name]
        parts = re.fullmatch(r"(?P<method>[a-z0-9-]+)@(?P<length>\d+)k(?:-seed(?P<seed>\d+))?", name)
        if parts is None:
            raise LongRopeError(f"{name!r} is no row", hint=f"METHOD@LENGTH[-seedN] or: {', '.join(self.rows)}")
        chosen("method", [parts["method"]], METHODS)
        length, seed = int(parts["length"]) * K, int(parts["seed"] or 0)
        if length not in self.lengths:
            known = ", ".join(map(label, self.lengths))
            raise LongRopeError(f"{name}: {self.title} is not extended to {label(length)}", hint=f"to {known}")
        return self._board_row(parts["method"], length, seed)

    def _board_row(self, name: str, length: int, seed: int) -> Row:
        method, training, suffix = METHODS[name], self.lengths[length], f"@{label(length)}"
        rows = training.batch_rows * length // self.window if method.in_window else training.batch_rows
        make = found(self.kept[name, length], 0) if (name, length) in self.kept else method.make
        return Row(
            title=method.title,
            table=f"{self.title}, {label(length)}",
            make=same_as(name) if seed and make else make,
            window=method.window,
            length=length,
            mix=f"mix-{label(self.window if method.in_window else length)}",
            seed=seed,
            steps=training.steps if method.make else 0,
            learning_rate=training.learning_rate,
            training=training.options,
            evaluations=tuple(name for name in self.asked if length < FAR or name != "needles"),
            # Beyond its window the model as it is finds nothing, and answers to the last token that it may.
            lengths=tuple(n for n in training.lengths if method.make or length < 8 * K or n <= self.window),
            batch_rows=rows,
            suffix=suffix,
        )

    def mix(self, row: Row) -> Mix:
        """What a row is trained on, but for a calibrated switch."""
        if not row.suffix:
            return MIXES[row.mix]
        target = self.window if row.mix == f"mix-{label(self.window)}" else row.length
        planned = self.lengths[row.length].plan_rows if target == row.length else None
        return Mix(window=self.window, target=target, rows=planned or row.steps * row.rows_of_step)

    @property
    def names(self) -> list[str]:
        """All rows of the leaderboards with the first seed, and those with names of their own."""
        return [f"{method}@{label(length)}" for length in self.lengths for method in METHODS] + list(self.rows)


BASES: dict[str, Base] = {
    "tiny": Base(  # minutes a row on two CPU cores; attention alone learns, as in recipes/tiny-laptop.toml
        title="tiny",
        window=256,
        lengths={
            2 * K: Training(
                steps=60,
                batch_rows=4,
                learning_rate=6e-5,
                lengths=(256, 2 * K),
                options={"freeze": ("*mlp*", "*embed*"), "weight_decay": 0.0},
            ),
        },
        asked=("needles", "wordings", "multikey", "multivalue", "longppl", "perplexity"),
    ),
    "smollm2": Base(
        title="SmolLM2-135M-Instruct",
        window=8 * K,
        lengths={
            # 20M tokens, the same rows as SMOLLM2_ROWS
            32 * K: Training(steps=153, batch_rows=4, plan_rows=640, lengths=(4 * K, 8 * K, 16 * K, 32 * K)),
            # 15.7M
            128 * K: Training(steps=60, batch_rows=2, lengths=(8 * K, 32 * K, 128 * K)),
        },
        rows=SMOLLM2_ROWS,
        kept={
            ("paper", 32 * K): "paper",
            ("released", 32 * K): "paper-released",
            ("wide", 32 * K): "wide-keys",
            ("paper", 128 * K): "paper",
            ("wide", 128 * K): "wide-keys",
        },
    ),
    # The rates of the larger ones were not tuned.
    "tinyllama": Base(
        title="TinyLlama-1.1B-Chat, repaired",
        window=2 * K,
        lengths={  # 15.7M tokens
            32 * K: Training(steps=120, batch_rows=4, learning_rate=1e-4, lengths=(2 * K, 8 * K, 32 * K)),
        },
        repair=Training(steps=80, batch_rows=64, learning_rate=1e-4),  # 10.5M, in rows of 2k
    ),
    "qwen": Base(
        title="Qwen2.5-Coder-0.5B-Instruct",
        window=32 * K,
        lengths={  # 10.5M tokens
            128 * K: Training(steps=40, batch_rows=2, learning_rate=1e-4, lengths=(32 * K, 128 * K)),
        },
    ),
}
