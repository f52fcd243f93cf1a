"""The paper's comparison and ablations, row by row: each method's factors, training and scores.

    python recipes/leaderboard/run.py smollm2 SmolLM2-135M-Instruct.Q4_1.gguf --data DATA -o runs/smollm2 yarn@32k

A row is METHOD@LENGTH, METHOD@LENGTH-seed1 for another seed of its training, or a name of its own (rows.py). DATA holds
books/train, books/search and books/validation (text files), short/ (files of the short tasks) and RULER's question
files. Everything resumes: a row that was interrupted goes on with the same command, and what is done is not done again.
--expect says what a row takes on an H200, part by part; --within starts only the parts that end in time. Each finished
part is in OUTPUT/<row>.json with the row's scores, cost and factors.
"""

import argparse
import fcntl
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rows import BASES, BOARD, FAR, METHODS, Base, K, Mix, Row, label

from longrope2 import RescaleFactors, evaluate, rescale, train
from longrope2.books import read_books
from longrope2.calibration.config import CalibrationConfig
from longrope2.console import roughly, say
from longrope2.data.config import RecallConfig
from longrope2.data.plan import plan_documents
from longrope2.data.recall import write_recall
from longrope2.distributed import World
from longrope2.errors import LongRopeError
from longrope2.evaluation.config import EvaluationConfig
from longrope2.evaluation.engine import EvaluationJournal
from longrope2.evaluation.evaluate import evaluate as run_suites
from longrope2.evaluation.results import RESULTS
from longrope2.evaluation.ruler import TASKS as RULER_TASKS
from longrope2.evaluation.suite import Prompt, TextSpan
from longrope2.files import atomic_folder, write_json, write_text
from longrope2.models import describe, load, load_tokenizer, skeleton
from longrope2.perplexity import Score
from longrope2.pipeline.forecast import Machine, calibration_needs, evaluation_needs, gpu_machine, search_needs
from longrope2.records import EvaluationRecord, Results
from longrope2.search.config import search_config
from longrope2.training.estimate import GPUS, ModelShape, assumed_work, estimate, shape_of
from longrope2.training.log import LOG, read_steps
from longrope2.training.train import MODEL

BATCH_TOKENS = 1 << 20  # of answers under way; fixed, since rounding depends on who shares a batch
SAVE_EVERY = 40
RECOMPUTED = 128 * 1024
"""Rows of so many tokens do not fit otherwise."""
PLANNED_ON = "h200"
SHORT_TOKENS = {  # of a short task: about as many are read
    "lambada": 5_153 * 90, "hellaswag": 2_000 * 4 * 1_100, "piqa": 1_838 * 2 * 50, "arc": 2_376 * 4 * 40,
    "mmlu": 57 * 40 * 4 * 700, "truthfulqa": 817 * 8 * 250,
}  # fmt: skip
MEASURED = {"train": 1.4, "paper": 1.3, "wide": 4.9}
"""How much longer parts took on SmolLM2 at 32k, alone on an H200, than compute says; the last two are searches."""
RULER_ANSWER = 0.09
"""Seconds that each of RULER's answers took there, beyond compute."""
FIRST_STEPS = 30.0
"""Seconds for compiling, loading and saving."""
FEW_RULER_TASKS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
"""From FAR on: those in which SmolLM2 as it is has more than 20% in its window, but for one that all methods answer."""
TASKS = {"truthfulqa": "truthfulqa_mc2", "lambada": "lambada_openai", "arc": "arc_easy"}
ALONE = World(process=0, num_processes=1, local_process=0)
NEEDLES = {"needles": "niah", "wordings": "niah_wordings", "multikey": "niah_multikey", "multivalue": "niah_multivalue"}


def evaluation(name: str, row: Row) -> dict[str, Any]:
    """Options of `longrope2 evaluate`."""
    lengths = tuple(length for length in row.lengths if length <= row.length)
    match name:
        case "needles":
            return {"suites": (NEEDLES[name],), "lengths": lengths, "samples": 10}
        case "multikey" | "multivalue":  # of four numbers, a document tells more
            return {"suites": (NEEDLES[name],), "lengths": lengths, "samples": 5 if row.length >= FAR else 10}
        case "wordings":  # five of each wording at each depth
            return {"suites": (NEEDLES[name],), "lengths": lengths, "samples": 20}
        case "perplexity":
            return {"suites": ("perplexity",), "tasks": ("full",), "lengths": lengths, "samples": 20}
        case "longppl":
            return {"suites": ("longppl",), "lengths": lengths, "samples": 20}
        case "ruler":
            return {"suites": ("ruler",), "lengths": lengths, "samples": 20, "tasks": ruler_tasks(row)}
        case "babilong":
            return {"suites": ("babilong",), "lengths": lengths, "samples": 20 if row.length >= FAR else 40}
        case "mmlu":  # of each of its 57 subjects
            return {"suites": ("short",), "tasks": ("mmlu",), "samples": 40}
        case "lambada" | "piqa" | "arc":  # all of it
            return {"suites": ("short",), "tasks": (TASKS.get(name, name),)}
    return {"suites": ("short",), "tasks": (TASKS.get(name, name),), "samples": 2000}


def ruler_tasks(row: Row) -> tuple[str, ...]:
    """All, where nothing speaks against it."""
    if row.length >= FAR:
        return FEW_RULER_TASKS
    if min(row.lengths) < 4 * K:  # some questions of qa_2 take more than 2k tokens
        return tuple(task for task in RULER_TASKS if task != "qa_2")
    return ()


class Silent:
    """Stands in for a model: what it is asked is all that is wanted."""

    batch_rows = 1

    def __init__(self, tokenizer: Any, *, window: int) -> None:
        self.tokenizer, self.window = tokenizer, window
        self.on_read: Any = None

    def batch_tokens(self) -> int:
        return self.window

    def answer(self, prompts: Sequence[Prompt]) -> list[str]:
        return [""] * len(prompts)

    def score(self, spans: Sequence[TextSpan]) -> list[Score]:
        raise NotImplementedError


@dataclass(kw_only=True)
class Bench:
    """Where things are, and what is done with a row."""

    family: Base
    model: str
    data: Path | None
    """None: the package's own books, and nothing else."""
    output: Path
    calibration: dict[str, Any] = field(default_factory=dict)
    """Options of `longrope2 calibrate`."""
    training: dict[str, Any] = field(default_factory=lambda: {"compiled": torch.cuda.is_available()})
    """Of `longrope2 train`, for all rows: what does not change what is learned."""

    def books(self, part: str) -> str | None:
        """Those to train, to search, or to measure on; None: the package's held-out ones."""
        if self.data is not None:
            return str(self.data / "books" / part)
        return None if part == "validation" else str(self.package_books)

    @cached_property
    def package_books(self) -> Path:
        """Those of the package that nothing is measured on."""
        folder = self.output / "books"
        if not folder.exists():
            with atomic_folder(folder) as temporary:
                for book in read_books(held_out=False):
                    write_text(temporary / f"{book.title}.txt", book.text)
        return folder

    @cached_property
    def unpacked(self) -> str:
        """The model as a plain folder: a GGUF file takes half a minute to read, each time."""
        folder = self.output / "base-model"
        if not folder.exists():
            loaded = load(self.model, device="cpu", dtype=torch.float32)
            with atomic_folder(folder) as temporary:
                loaded.model.save_pretrained(temporary)
                loaded.tokenizer.save_pretrained(temporary)
        return str(folder)

    @cached_property
    def base(self) -> str:
        """The original of all rows: the model, or what a training within its window has made of it."""
        folder = self.output / "repaired-model"
        if self.family.repair is None or folder.exists():
            return self.unpacked if self.family.repair is None else str(folder)
        repair, window = self.family.repair, self.family.window
        # Factors of one, which a training needs; its result says so in its config, which the original must not.
        factors = replace(rescale(self.unpacked, "none", 2 * window), target_length=window)
        mix = Mix(window=window, target=window, rows=repair.steps * repair.batch_rows)
        product = train(
            self.unpacked,
            factors,
            self.plan(mix, f"mix-{label(window)}", 0, self.unpacked),
            self.output / "repair",
            cache=self.output / "tokens",
            steps=repair.steps,
            batch_rows=repair.batch_rows,
            learning_rate=repair.learning_rate,
            window="single",
            save_every=SAVE_EVERY,
            save_dtype="float32",
            **self.training,
        )
        repaired, loaded = load(str(product), device="cpu"), load(self.unpacked, device="cpu", dtype=torch.float32)
        loaded.model.load_state_dict(repaired.model.state_dict())
        with atomic_folder(folder) as temporary:
            loaded.model.save_pretrained(temporary)
            loaded.tokenizer.save_pretrained(temporary)
        return str(folder)

    def factors(self, name: str) -> RescaleFactors:
        """Factors of a row, made if they are not there."""
        row, path = self.family.row(name), self.output / name / "factors.json"
        if not path.exists():
            assert row.make is not None
            started = time.monotonic()
            factors = row.make(self, row, self.output / name)
            write_json(self.output / name / "factors-cost.json", {"seconds": time.monotonic() - started})
            factors.save(path)
        return RescaleFactors.load(path)

    def source(self, name: str, mix: Mix, model: str) -> str:
        """What a mix calls by this name; documents with questions are made if they are not there."""
        books = str(self.books("train"))
        if name == "books":
            return books
        path = self.output / f"{name}.jsonl"
        if not path.exists():
            length, documents, needles = mix.recall[name]
            config = RecallConfig(lengths=(length,), documents=documents, needles=needles, books=books)
            write_recall(load_tokenizer(describe(model)), config, path)
        return str(path)

    def plan(self, mix: Mix, name: str, seed: int, model: str) -> Path:
        """The rows that every method of a table is trained on."""
        path = self.output / f"plan-{name}-{seed}.jsonl"
        if not path.exists():
            config = self.output / f"{name}.toml"
            config.parent.mkdir(parents=True, exist_ok=True)
            named = re.compile('path = "(.+?)"')
            placed = named.sub(lambda found: f"path = {json.dumps(self.source(found[1], mix, model))}", mix.text())
            config.write_text(placed, encoding="utf-8")
            plan_documents(model, path, config=config, seed=seed, cache=self.output / "tokens")
        return path

    def train(self, name: str) -> str:
        """The trained model of a row."""
        row = self.family.row(name)
        if row.make is None:
            return self.base
        factors, mix, mix_name = self.factors(name), self.family.mix(row), row.mix
        switch = factors.original_length
        if switch != self.family.window:  # documents up to the switch are the short ones
            mix, mix_name = replace(mix, window=switch, short_documents=None), f"{mix_name}-{switch}"
        product = train(
            self.base,
            factors,
            self.plan(mix, mix_name, row.seed, self.base),
            self.output / name / "train",
            original_length=switch,
            cache=self.output / "tokens",
            steps=row.steps,
            batch_rows=row.rows_of_step,
            learning_rate=row.learning_rate,
            window=row.window,
            **row.training,
            save_every=SAVE_EVERY,
            recompute=row.length >= RECOMPUTED,
            **self.training,
        )
        return str(product)

    def measure(self, name: str, model: str, which: str) -> None:
        """One evaluation of a row."""
        row = self.family.row(name)
        # The model as it is gets the documents of all others, and with them lengths that it was not made for.
        options = evaluation(which, row) | {"beyond_window": row.make is None}
        if which == "longppl":
            options["judge"] = self.base
        evaluate(
            model,
            output=self.output / name / which,
            name=name,
            data=self.data and str(self.data),
            books=self.books("validation"),
            cache=self.output / "samples",
            batch_tokens=BATCH_TOKENS,
            **options,
        )

    def prepare(self, name: str, only: set[str] | None) -> None:
        """Make the samples that evaluations of a row keep, which needs no GPU and no trained model."""
        row, model = self.family.row(name), self.unpacked
        backend = Silent(load_tokenizer(describe(model)), window=row.length)
        for which in row.evaluations:
            if which in ("ruler", *NEEDLES) and (only is None or which in only):
                sources = {"books": self.books("validation"), "data": self.data and str(self.data)}
                config = EvaluationConfig(**evaluation(which, row), **sources)
                journal = EvaluationJournal(None, {})
                run_suites(backend, config, model, journal, ALONE, cache=self.output / "samples")

    def run(self, name: str, only: set[str] | None, until: float | None = None) -> None:
        """All of a row, or what is expected to end by this time of the monotonic clock; and its file."""
        row = self.family.row(name)
        left = {} if until is None else self.expected(name)
        for part in ("repair", "factors", "train", *row.evaluations):
            if only is not None and part in row.evaluations and part not in only:
                continue
            if until is not None and part in left and time.monotonic() + left[part] > until:
                say(f"{name}: {part} takes about {roughly(left[part])}, which is not left")
                if part not in row.evaluations:
                    break
                continue
            if part == "repair":
                model = self.base
            elif part == "factors" and row.make is not None:
                self.factors(name)
            elif part == "train":
                model = self.train(name)
            elif part in row.evaluations:
                self.measure(name, model, part)
        found = [self.output / name / which / RESULTS for which in row.evaluations]
        self.output.mkdir(parents=True, exist_ok=True)
        with (self.output / f".{name}.lock").open("w") as lock:  # parts of a row may end at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            results = [EvaluationRecord.load(path) for path in found if path.exists()]
            if results:
                write_json(self.output / f"{name}.json", self._summary(name, results))

    def expected(self, name: str) -> dict[str, float]:
        """Seconds on one H200 of each part of a row that is not done: rough, from compute."""
        return {part: seconds for part, seconds in self._parts(name) if not self._is_done(name, part)}

    def _is_done(self, name: str, part: str) -> bool:
        if part == "repair":
            return (self.output / "repaired-model").exists()
        places = {"factors": "factors.json", "train": f"train/{MODEL}"}
        return (self.output / name / places.get(part, f"{part}/{RESULTS}")).exists()

    def _parts(self, name: str) -> Iterator[tuple[str, float]]:
        family, row = self.family, self.family.row(name)
        info = describe(self.model)
        shape = shape_of(skeleton(info), info)
        machine = gpu_machine(PLANNED_ON, GPUS[PLANNED_ON], shape.head_dim)

        def training(steps: int, batch_rows: int, target: int) -> float:
            work = assumed_work(original_length=family.window, target_length=target, rows=batch_rows, steps=steps)
            recompute = target >= RECOMPUTED
            found = estimate(shape, work, gpus=1, gpu=PLANNED_ON, recompute=recompute, compiled=True)
            return FIRST_STEPS + MEASURED["train"] * float(found["seconds"])

        if family.repair is not None:
            yield "repair", training(family.repair.steps, family.repair.batch_rows, family.window)
        if row.make is not None:
            yield "factors", self._factor_seconds(name, shape, machine)
            target = family.mix(row).target
            done = len(read_steps(self.output / name / "train" / LOG))
            yield "train", training(max(row.steps - done, 1), row.rows_of_step, target)
        for which in row.evaluations:
            if which in SHORT_TOKENS:
                yield which, FIRST_STEPS + 10 * shape.linear_flops(SHORT_TOKENS[which]) / machine.matmul
            else:
                config = EvaluationConfig(**evaluation(which, row), beyond_window=True)
                seconds = evaluation_needs(config, row.length, shape, machine).seconds or 0.0
                if which == "ruler":
                    answers = len(config.tasks_of("ruler")) * len(config.lengths) * (config.samples or 0)
                    seconds += RULER_ANSWER * answers
                yield which, FIRST_STEPS + seconds

    def _factor_seconds(self, name: str, shape: ModelShape, machine: Machine) -> float:
        """Of a search, a calibration, and what has to be there before."""
        row = self.family.row(name)
        needs = getattr(row.make, "needs", {})
        seconds = 0.0
        if (other := needs.get("row")) and not self._is_done(row.peer(other), "factors"):
            seconds += self._factor_seconds(row.peer(other), shape, machine)
        if "search" in needs:
            config = search_config(target_length=row.length, **needs["search"])
            found = search_needs(config, describe(self.model).rope, shape, machine).seconds
            seconds += MEASURED[config.space] * (found or 0.0)
        if "calibration" in needs:
            rope, config = describe(self.model).rope, CalibrationConfig(**self.calibration)
            seconds += calibration_needs(config, rope, row.length, shape, machine).seconds or 0.0
        return seconds

    def _summary(self, name: str, results: list[EvaluationRecord]) -> dict[str, Any]:
        """All evaluations of a row as one, as `longrope2 compare` takes it, with what it cost."""
        row, folder = self.family.row(name), self.output / name
        log = read_steps(folder / "train" / LOG) if row.steps else []
        together = Results(
            name=row.title,
            model=self.family.title,
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


def measure_beside(bench: Bench, options: argparse.Namespace, only: set[str] | None, until: float | None) -> int:
    """Train rows one after the other, and measure those that are trained in processes beside it; how many failed.

    The longest part of a row comes first, or the other processes would wait for it in the end.
    """

    def measured(name: str, part: str) -> bool:
        command = [sys.executable, __file__, options.base, options.model, name, "--only", part]
        command += ["-o", str(options.output), *(["--data", str(options.data)] if options.data else [])]
        command += [] if until is None else ["--within", str(until - time.monotonic())]
        if ended := subprocess.run(command, check=False).returncode:
            say(f"{name}: {part} failed with exit code {ended}; the same command tries it again")
        return ended == 0

    with ThreadPoolExecutor(options.beside) as pool:
        try:
            parts = []
            for name in options.rows:
                bench.run(name, set(), until)
                left = bench.expected(name)
                if left.keys().isdisjoint(("repair", "factors", "train")):
                    longest_first = sorted(left, key=left.__getitem__, reverse=True)
                    wanted = [part for part in longest_first if only is None or part in only]
                    parts += [pool.submit(measured, name, part) for part in wanted]
            return sum(not part.result() for part in parts)
        finally:
            pool.shutdown(cancel_futures=True)


def expectation(bench: Bench, names: list[str]) -> list[str]:
    """What is left of rows, in seconds, as people plan with it."""
    lines, total = [f"{bench.family.title}: expected seconds on one {PLANNED_ON.upper()}"], 0.0
    for name in names:
        parts = bench.expected(name)
        total += sum(parts.values())
        listed = ", ".join(f"{part} {seconds:,.0f}" for part, seconds in parts.items() if seconds >= 0.5)
        lines.append(f"{name}: {sum(parts.values()):,.0f} ({listed or 'done'})")
    shared = "what rows share, such as a search or a repair, is counted once for each"
    return [*lines, f"together about {roughly(total)}; {shared}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", choices=BASES)
    parser.add_argument("model")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"METHOD@LENGTH: METHOD is {', '.join(METHODS)}")
    parser.add_argument("--data", type=Path, help="default: the package's books, without the files of other tasks")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--only", help=f"these evaluations, separated by commas; those of a leaderboard: {','.join(BOARD)}"
    )
    parser.add_argument(
        "--expect", action="store_true", help="only print what is left, in seconds; without ROW: of all"
    )
    parser.add_argument(
        "--within", type=float, metavar="SECONDS", help="start only parts that are expected to end in time"
    )
    parser.add_argument(
        "--beside", type=int, metavar="N", help="measure in N processes, beside the training of the next rows"
    )
    parser.add_argument(
        "--samples", action="store_true", help="only make samples of RULER and needles, beside a training, say"
    )
    options = parser.parse_intermixed_args()
    bench = Bench(family=BASES[options.base], model=options.model, data=options.data, output=options.output)
    until = None if options.within is None else time.monotonic() + options.within
    only = set(options.only.split(",")) if options.only else None
    try:
        if options.expect:
            print("\n".join(expectation(bench, options.rows or bench.family.names)))
        elif options.samples:
            for name in options.rows:
                bench.prepare(name, only)
        elif options.beside:
            return int(measure_beside(bench, options, only, until) > 0)
        else:
            for name in options.rows:
                bench.run(name, only, until)
    except LongRopeError as error:
        say(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
