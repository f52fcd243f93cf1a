"""The paper's comparison and ablations, row by row: each method's factors, training and scores.

    python recipes/smollm2/run.py SmolLM2-135M-Instruct.Q4_1.gguf --data DATA -o runs/smollm2 yarn wide

DATA holds books/train, books/search and books/validation (text files), short/ (HellaSwag, MMLU, TruthfulQA) and RULER's
question files. Everything resumes: a row that was interrupted goes on with the same command, and what is done is not
done again. Each finished row leaves its scores, cost and factors in OUTPUT/<row>.json.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from longrope2 import RescaleFactors, evaluate, rescale, search_factors, train
from longrope2.data.config import RecallConfig
from longrope2.data.plan import plan_documents
from longrope2.data.recall import write_recall
from longrope2.evaluation.results import RESULTS
from longrope2.files import atomic_folder, write_json
from longrope2.models import describe, load, load_tokenizer
from longrope2.records import EvaluationRecord, Results
from longrope2.training.log import LOG, read_steps

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "results"
K = 1024
BATCH_ROWS = 4  # 131k tokens a step at 32k
LEARNING_RATE = 3e-4
BATCH_TOKENS = 1 << 20  # of answers under way; fixed, since rounding depends on who shares a batch
RECALL = {  # by the name that the mixes have for it: tokens of a document, documents, needles in each
    "recall-8k": (8 * K, 256, 32),
    "recall-32k": (32 * K, 320, 128),
    "recall-64k": (64 * K, 80, 256),
}
SEARCH = {"compiled": True}

Make = Callable[["Bench", int, Path], RescaleFactors]


def closed(method: str, **options: Any) -> Make:
    """A closed form, at the critical dimension that the search of the paper's space has found where it needs one."""

    def make(bench: "Bench", length: int, folder: Path) -> RescaleFactors:
        if method.endswith("-rcd"):
            found = bench.factors("paper").critical_dimension
            return rescale(bench.base, method, length, critical_dimension=found, **options)
        return rescale(bench.base, method, length, **options)

    return make


def searched(**options: Any) -> Make:
    """What `longrope2 search` finds on books that nothing is measured on."""

    def make(bench: "Bench", length: int, folder: Path) -> RescaleFactors:
        books = str(bench.data / "books" / "search")
        return search_factors(bench.base, length, folder / "search", books=books, **(SEARCH | options))

    return make


def same_as(row: str, **changes: Any) -> Make:
    """The factors of another row, but for these changes."""

    def make(bench: "Bench", length: int, folder: Path) -> RescaleFactors:
        return replace(bench.factors(row), **changes)

    return make


def published(row: str) -> Make:
    """The factors of a finished row in results/, whatever a search would find today."""

    def make(bench: "Bench", length: int, folder: Path) -> RescaleFactors:
        content = json.loads((KEPT / "smollm2" / "rows" / f"{row}.json").read_text(encoding="utf-8"))
        return RescaleFactors.from_json(content["factors"], source=row)

    return make


def found(variant: str, seed: int, **changes: Any) -> Make:
    """What a search in results/ found (benchmarks/search_smollm2.py), but for these changes."""

    def make(bench: "Bench", length: int, folder: Path) -> RescaleFactors:
        path = KEPT / "search" / "smollm2" / f"search-smollm2-{length // K}k.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        (row,) = (row for row in rows if (row["name"], row["seed"]) == (variant, seed))
        return replace(
            rescale(bench.base, "none", length),
            method="longrope2",
            long=tuple(row["factors"]),
            critical_dimension=row["critical_dimension"],
            **{"long_attention_factor": row["temperature"], **changes},
        )

    return make


LONG = ("needles", "perplexity")
SHORT = ("hellaswag", "truthfulqa", "mmlu")
ALL = (*LONG, *SHORT, "ruler")


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
    """The file that says what it is trained on."""
    seed: int = 0
    """Of what is drawn from it, and in which order."""
    steps: int = 80
    learning_rate: float = LEARNING_RATE
    training: Mapping[str, Any] = field(default_factory=dict)
    """Further options of `longrope2 train`."""
    evaluations: tuple[str, ...] = LONG
    lengths: tuple[int, ...] = (4 * K, 8 * K, 16 * K, 32 * K, 64 * K)
    """To evaluate at, as far as the row's own."""


MAIN = {"table": "main-32k", "steps": 153, "evaluations": ALL}
BOOKS = {"table": "books-32k", "mix": "books-32k", "steps": 153, "evaluations": ALL}
ABLATION = {"table": "ablations-32k", "steps": 153}  # compared with YaRN, NTK, paper and wide of the main table
TUNING = {"table": "tuning", "mix": "books-32k", "make": closed("yarn"), "window": "single", "steps": 40}
METHODS = {"table": "methods-32k", "window": "single", "steps": 153, "evaluations": ALL}  # compared with YaRN
LORA = {"table": "lora-32k", "make": closed("yarn"), "window": "single", "steps": 153}  # compared with YaRN
BESIDE = {"lora": 16, "also": ("norms", "embeddings")}
OTHER_ROWS = {"table": "seeds-32k", "steps": 153, "seed": 1}
LONGEST = {"table": "main-64k", "mix": "mix-64k", "length": 64 * K}
SINGLE = {"window": "single"}
ROWS: dict[str, Row] = {
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
    "mrrope-uni": Row(title="MrRoPE-Uni", make=closed("mrrope-uni"), **METHODS),
    "mrrope-pro": Row(title="MrRoPE-Pro", make=closed("mrrope-pro"), **METHODS),
    "cope": Row(title="CoPE", make=closed("cope"), **METHODS),
    "hardclip": Row(title="HardClip", make=closed("hardclip"), **METHODS),
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


COLD = {"long_attention_factor": 1.0}
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
BRIEF = {**RANKS, "steps": 12, "evaluations": ("needles",), "lengths": (32 * K,)}
"""1.6M tokens: does it predict what 20M give? See ranks.py."""
ROWS |= {f"set-{name}": Row(title=title, make=make, steps=153, **RANKS) for name, (title, make) in SETS.items()}
ROWS |= {f"brief-set-{name}": Row(title=title, make=make, **BRIEF) for name, (title, make) in SETS.items()}
ROWS |= {
    f"brief-{name}": Row(title=ROWS[name].title, make=published(name), window=ROWS[name].window, **BRIEF)
    for name in FINISHED
}


def evaluation(name: str, row: Row) -> dict[str, Any]:
    """Options of `longrope2 evaluate`."""
    lengths = tuple(length for length in row.lengths if length <= row.length)
    match name:
        case "needles":
            return {"suites": ["niah"], "lengths": lengths, "samples": 10}
        case "perplexity":
            return {"suites": ["perplexity"], "tasks": ("full",), "lengths": lengths, "samples": 20}
        case "ruler":
            return {"suites": ["ruler"], "lengths": lengths, "samples": 20}
        case "mmlu":  # of each of its 57 subjects
            return {"suites": ["short"], "tasks": ("mmlu",), "samples": 40}
    return {"suites": ["short"], "tasks": ({"truthfulqa": "truthfulqa_mc2"}.get(name, name),), "samples": 2000}


@dataclass(kw_only=True)
class Bench:
    """Where things are, and what is done with a row."""

    model: str
    data: Path
    output: Path

    @cached_property
    def base(self) -> str:
        """The model as a plain folder: a GGUF file takes half a minute to read, each time."""
        folder = self.output / "base-model"
        if not folder.exists():
            loaded = load(self.model, device="cpu", dtype=torch.float32)
            with atomic_folder(folder) as temporary:
                loaded.model.save_pretrained(temporary)
                loaded.tokenizer.save_pretrained(temporary)
        return str(folder)

    def factors(self, name: str) -> RescaleFactors:
        """Factors of a row, made if they are not there."""
        row, path = ROWS[name], self.output / name / "factors.json"
        if not path.exists():
            started = time.monotonic()
            factors = row.make(self, row.length, self.output / name)
            write_json(self.output / name / "factors-cost.json", {"seconds": time.monotonic() - started})
            factors.save(path)
        return RescaleFactors.load(path)

    def source(self, name: str) -> Path:
        """What a mix calls by this name; documents with questions are made if they are not there."""
        books = self.data / "books" / "train"
        if name == "books":
            return books
        path = self.output / f"{name}.jsonl"
        if not path.exists():
            length, documents, needles = RECALL[name]
            config = RecallConfig(lengths=(length,), documents=documents, needles=needles, books=str(books))
            write_recall(load_tokenizer(describe(self.base)), config, path)
        return path

    def plan(self, mix: str, seed: int) -> Path:
        """The rows that every method of a table is trained on."""
        path = self.output / f"plan-{mix}-{seed}.jsonl"
        if not path.exists():
            text = (HERE / f"{mix}.toml").read_text(encoding="utf-8")
            config = self.output / f"{mix}.toml"
            config.parent.mkdir(parents=True, exist_ok=True)
            named = re.compile('path = "(.+?)"')
            placed = named.sub(lambda found: f"path = {json.dumps(str(self.source(found[1])))}", text)
            config.write_text(placed, encoding="utf-8")
            plan_documents(self.base, path, config=config, seed=seed, cache=self.output / "tokens")
        return path

    def train(self, name: str) -> str:
        """The trained model of a row."""
        row = ROWS[name]
        if row.make is None:
            return self.base
        factors = self.factors(name)
        product = train(
            self.base,
            factors,
            self.plan(row.mix, row.seed),
            self.output / name / "train",
            cache=self.output / "tokens",
            steps=row.steps,
            batch_rows=BATCH_ROWS * 32 * K // row.length,
            learning_rate=row.learning_rate,
            window=row.window,
            **row.training,
            save_every=1000,
            compiled=True,
            recompute=False,
        )
        return str(product)

    def measure(self, name: str, model: str, which: str) -> None:
        """One evaluation of a row."""
        row = ROWS[name]
        # The model as it is gets the documents of all others, and with them lengths that it was not made for.
        options = evaluation(which, row) | {"beyond_window": row.make is None}
        evaluate(
            model,
            output=self.output / name / which,
            name=name,
            data=str(self.data),
            books=str(self.data / "books" / "validation"),
            cache=self.output / "samples",
            batch_tokens=BATCH_TOKENS,
            **options,
        )

    def run(self, name: str, only: set[str] | None) -> None:
        """All of a row, and its file."""
        row = ROWS[name]
        model = self.train(name)
        for which in row.evaluations:
            if only is None or which in only:
                self.measure(name, model, which)
        found = [self.output / name / which / RESULTS for which in row.evaluations]
        results = [EvaluationRecord.load(path) for path in found if path.exists()]
        if results:
            write_json(self.output / f"{name}.json", self._summary(name, results))

    def _summary(self, name: str, results: list[EvaluationRecord]) -> dict[str, Any]:
        """All evaluations of a row as one, as `longrope2 compare` takes it, with what it cost."""
        row, folder = ROWS[name], self.output / name
        log = read_steps(folder / "train" / LOG) if row.steps else []
        together = Results(
            name=row.title,
            model=Path(self.model).name,
            factors=self.factors(name).to_json() if row.make else None,
            notes=tuple(note for result in results for note in result.notes),
            scores=tuple(score for result in results for score in result.scores),
            values={place: values for result in results for place, values in result.values.items()},
            grids={suite: grid for result in results for suite, grid in result.grids.items()},
        )
        return {
            "row": name,
            "table": row.table,
            "window": row.window,
            "mix": row.mix if row.steps else None,
            "seed": row.seed,
            "target_length": row.length,
            "learning_rate": row.learning_rate,
            "training": dict(row.training),
            **together.to_json(),
            "versions": results[0].versions,
            "device": results[0].device,
            "cost": {
                "tokens": sum(line.tokens for line in log),
                "factors_seconds": json.loads((folder / "factors-cost.json").read_text())["seconds"] if row.make else 0,
                "train_seconds": sum(line.seconds for line in log),
                "train_memory_gib": max((line.memory_gib or 0.0 for line in log), default=0.0),
                "evaluate_seconds": sum(result.seconds for result in results),
            },
            "losses": [[line.step, line.loss_short, line.loss_long] for line in log],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows", nargs="+", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", help="these evaluations, separated by commas; default: all of the row")
    options = parser.parse_args()
    bench = Bench(model=options.model, data=options.data, output=options.output)
    for name in options.rows:
        bench.run(name, set(options.only.split(",")) if options.only else None)


if __name__ == "__main__":
    main()
