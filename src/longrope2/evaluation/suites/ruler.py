"""RULER as a suite: its samples from the cache, its files from --data, its notes into the table."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from longrope2.errors import DataError
from longrope2.evaluation.config import SHORTEST
from longrope2.evaluation.engine import EvaluationEngine
from longrope2.evaluation.results import with_averages
from longrope2.evaluation.ruler import TASKS, make_all, make_samples, score, unavailable
from longrope2.evaluation.ruler.generate import check as check_request
from longrope2.evaluation.suite import Sample, Setup, Suite, SuiteOutcome, answered, by_task, data_folder

NAME = "ruler"
COUNT = 100
ESSAYS = ("PaulGrahamEssays.json",)
WORDS = ("english_words.json",)
QUESTIONS = {
    "qa_1": ("squad.json", "dev-v2.0.json"),
    "qa_2": ("hotpotqa.json", "hotpot_dev_distractor_v1.json"),
}
METRICS = {name: "any reference found" if task.metric == "part" else "references found" for name, task in TASKS.items()}


def _find(folder: Path | None, names: tuple[str, ...]) -> Path | None:
    if folder is None:
        return None
    places = [folder / f"{name}{ending}" for name in names for ending in ("", ".gz")]
    return next((place for place in places if place.is_file()), None)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What the samples are made of."""

    tasks: list[str]
    """Those whose files are there."""
    notes: list[str]
    """What is left out, and what stands in for RULER's own files."""
    qa_files: dict[str, Path]
    options: dict[str, Any]
    """What both makers of samples take."""


def find_sources(setup: Setup) -> Sources:
    """The files in --data; tasks that lack a file are omitted, with a note."""
    folder = None if setup.data is None else data_folder(setup.data, NAME, "")
    files = {task: path for task, names in QUESTIONS.items() if (path := _find(folder, names))}
    essays = _find(folder, ESSAYS)
    lacking = {task: why for task, why in unavailable(files).items() if task in setup.tasks}
    tasks = [task for task in setup.tasks if task not in lacking]
    if not tasks:
        raise DataError(
            f"nothing of RULER can be run: {'; '.join(f'{t} {why}' for t, why in lacking.items())}",
            hint="put the files into --data DIR",
        )
    notes = [f"RULER without {task}: it {why}" for task, why in lacking.items()]
    if essays is None and any(TASKS[task].needs_essay for task in tasks):
        notes.append("RULER's haystack is the package's public-domain books (no PaulGrahamEssays.json in --data)")
    options = {
        "tokenizer": setup.tokenizer, "seed": setup.seed, "chat_template": setup.chat, "haystack": essays,
        "english_words": _find(folder, WORDS),
    }  # fmt: skip
    return Sources(tasks=tasks, notes=notes, qa_files=files, options=options)


def check(setup: Setup) -> None:
    """Refuse a length without room for a sample of some task, and files of another kind or with too few questions."""
    sources = find_sources(setup)
    length, count = setup.trial.lengths[-1], setup.samples or COUNT
    for task in sources.tasks:
        file = sources.qa_files.get(task)
        check_request(task, length=length, count=count, qa_file=file)
        # A question may have longer documents than the first one; all of them have room from the usual lengths on.
        tried = count if file is not None and length < SHORTEST else 1
        make_samples(task, length=length, count=tried, qa_file=file, **sources.options)


def run(setup: Setup, engine: EvaluationEngine) -> SuiteOutcome:
    """All lengths, longest first."""
    sources = find_sources(setup)
    for note in sources.notes:
        setup.note(note)
    measured = []
    for length in setup.lengths:
        samples = engine.here.main_first(partial(ruler_samples, setup, sources, length))
        measured += by_task(samples, answered(samples, engine, f"ruler {length:,}"), METRICS)
    return SuiteOutcome(measured=with_averages(measured), notes=sources.notes)


def ruler_samples(setup: Setup, sources: Sources, length: int) -> list[Sample]:
    """The samples of one length."""
    made = make_all(
        sources.tasks,
        lengths=[length],
        count=setup.samples or COUNT,
        cache=setup.cache,
        qa_files=sources.qa_files,
        **sources.options,
    )
    return [
        Sample(
            suite=NAME,
            task=task,
            length=length,
            index=sample.index,
            prompt=sample.prompt,
            references=tuple(sample.outputs),
            max_new_tokens=TASKS[task].tokens_to_generate,
            score=partial(score, task),
        )
        for task in sources.tasks
        for sample in made[task, length]
    ]


SUITE = Suite(
    name=NAME,
    title="RULER",
    tasks=tuple(TASKS),
    run=run,
    check=check,
    samples=COUNT,
    every_length=True,
    figure="RULER, mean over tasks (%)",
    summary="RULER",
    row="NVIDIA's 13, byte for byte | its own: references found (QA: any of them) | all | 100 a task",
    files="`PaulGrahamEssays.json` (else the package's books), `squad.json` or `dev-v2.0.json`, `hotpotqa.json` or "
    "`hotpot_dev_distractor_v1.json`, `english_words.json`",
)
