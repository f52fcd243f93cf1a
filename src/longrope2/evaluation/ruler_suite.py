"""RULER as a suite: its samples from the cache, its files from --data, its notes into the table."""

from functools import partial
from pathlib import Path

from longrope2.errors import DataError
from longrope2.evaluation.engine import Engine
from longrope2.evaluation.results import Outcome, answered, by_task, with_averages
from longrope2.evaluation.ruler import TASKS, make_all, score, unavailable
from longrope2.evaluation.samples import Sample
from longrope2.evaluation.suites import Setup, Suite, data_folder

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


def run(setup: Setup, engine: Engine) -> Outcome:
    """All lengths, longest first; what cannot be made for want of a file is left out, and said to be."""
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
    for note in notes:
        setup.note(note)
    measured = []
    for length in setup.lengths:
        samples = ruler_samples(setup, engine, tasks, length, essays, files, _find(folder, WORDS))
        measured += by_task(samples, answered(samples, engine, f"ruler {length:,}"), METRICS)
    return Outcome(measured=with_averages(measured), notes=notes)


def ruler_samples(
    setup: Setup,
    engine: Engine,
    tasks: list[str],
    length: int,
    haystack: Path | None,
    qa_files: dict[str, Path],
    english_words: Path | None,
) -> list[Sample]:
    """The samples of one length, made by the main process and read by the others."""

    def make() -> list[Sample]:
        made = make_all(
            tasks,
            tokenizer=setup.tokenizer,
            lengths=[length],
            count=setup.samples or COUNT,
            cache=setup.cache,
            seed=setup.seed,
            haystack=haystack,
            qa_files=qa_files,
            english_words=english_words,
            chat_template=setup.chat,
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
            for task in tasks
            for sample in made[task, length]
        ]

    samples = make() if engine.here.is_main else []
    engine.here.gather_all(None)  # the others wait for the files
    return samples or make()


SUITE = Suite(name=NAME, tasks=tuple(TASKS), run=run)
