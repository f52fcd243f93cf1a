"""Files of short tasks on disk, for machines without a connection: as their authors publish them, to the harness.

The harness takes a task's description with other data in it; so each file is read, checked and written again as the
task expects it, and a description that includes the harness's own points there.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from longrope2.errors import DataError
from longrope2.evaluation.suite import read_rows

HELLASWAG = {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": [str], "label": str | int}
MMLU = {"question": str, "subject": str, "choices": [str], "answer": int}
GSM8K = {"question": str, "answer": str}
Rows = list[dict[str, Any]]


def local_tasks(data: Path, tasks: Iterable[str], folder: Path, notes: list[str]) -> dict[str, list[str]]:
    """Descriptions, written into `folder`, of those tasks whose files lie in `data` (or short/ in it)."""
    source = data / "short" if (data / "short").is_dir() else data
    made = {task: MAKERS[task](source, folder / task, notes) for task in tasks if task in MAKERS}
    return {task: [str(path) for path in paths] for task, paths in made.items() if paths}


def _file(source: Path, name: str) -> Path | None:
    return next((path for path in (source / name, source / f"{name}.gz") if path.is_file()), None)


def _rows(path: Path, shape: dict[str, Any], choices: str = "", right: str = "") -> Rows:
    """Rows of a file; with `choices`, one of the four is `right`."""
    hint = f"check {path.name}: it should be as its authors publish it"
    rows = list(read_rows(path, shape, source=hint))
    for number, row in enumerate(rows if choices else (), 1):
        if len(row[choices]) != 4 or str(row[right]) not in list("0123"):
            raise DataError(f"{path}, question {number}: {right} names none of four {choices}", hint=hint)
    return rows


def _write(path: Path, rows: Rows) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _described(task: str) -> Path:
    """The harness's own description, found without its index of all tasks, which takes many seconds to build."""
    import lm_eval.tasks

    place = {"gsm8k": "gsm8k", "hellaswag": "hellaswag", "truthfulqa_mc2": "truthfulqa"}.get(task, "mmlu/default")
    return Path(lm_eval.tasks.__file__).parent / place / f"{task}.yaml"


def _describe(folder: Path, task: str, splits: dict[str, Rows], **fields: Any) -> Path:
    """A description that is the harness's own, but for the data."""
    files = {split: _write(folder / f"{task}-{split}.jsonl", rows) for split, rows in splits.items()}
    path = folder / f"{task}.yaml"
    described = {
        "include": str(_described(task)),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
        **fields,
    }
    path.write_text(json.dumps(described), encoding="utf-8")  # JSON is YAML too
    return path


def _hellaswag(source: Path, folder: Path, notes: list[str]) -> list[Path]:
    path, train = _file(source, "hellaswag_val.jsonl"), _file(source, "hellaswag_train.jsonl")
    if path is None:
        return []
    rows = _rows(path, HELLASWAG, "endings", "label")
    if train is not None:
        return [
            _describe(folder, "hellaswag", {"train": _rows(train, HELLASWAG, "endings", "label"), "validation": rows})
        ]
    notes.append("hellaswag: examples come from the validation file, since there is no hellaswag_train.jsonl")
    # As a test split: only from there does the harness keep a question out of its own examples.
    names = {"training_split": None, "validation_split": None, "test_split": "test", "fewshot_split": "test"}
    return [_describe(folder, "hellaswag", {"test": rows}, **names)]


def _gsm8k(source: Path, folder: Path, notes: list[str]) -> list[Path]:
    test, train = _file(source, "gsm8k_test.jsonl"), _file(source, "gsm8k_train.jsonl")
    if test is None or train is None:
        return []
    return [_describe(folder, "gsm8k", {"train": _rows(train, GSM8K), "test": _rows(test, GSM8K)})]


def _mmlu(source: Path, folder: Path, notes: list[str]) -> list[Path]:
    """One description for each subject."""
    test, dev = _file(source, "mmlu_test.jsonl"), _file(source, "mmlu_dev.jsonl")
    if test is None or dev is None:
        return []
    examples = _by_subject(_rows(dev, MMLU, "choices", "answer"))
    subjects = _by_subject(_rows(test, MMLU, "choices", "answer"))
    lacking = [name for name in subjects if name not in examples or not _described(f"mmlu_{name}").is_file()]
    if lacking:
        raise DataError(f"{test}: subjects without examples in {dev.name}, or unknown: {', '.join(lacking)}")
    if len(subjects) < 57:
        notes.append(f"mmlu: {len(subjects)} of its 57 subjects")
    return [
        _describe(folder, f"mmlu_{subject}", {"test": rows, "dev": examples[subject]})
        for subject, rows in subjects.items()
    ]


def _by_subject(rows: Rows) -> dict[str, Rows]:
    ordered = sorted(rows, key=lambda row: str(row["subject"]))
    return {subject: list(group) for subject, group in groupby(ordered, key=lambda row: str(row["subject"]))}


def _truthfulqa(source: Path, folder: Path, notes: list[str]) -> list[Path]:
    path = _file(source, "TruthfulQA.csv")
    if path is None:
        return []
    rows = []
    for number, row in enumerate(_csv_rows(path), 2):
        try:
            right, wrong = (_answers(row[name]) for name in ("Correct Answers", "Incorrect Answers"))
            best = row["Best Answer"].strip()
            question = row["Question"].strip()
        except (KeyError, AttributeError) as error:
            raise DataError(f"{path}, row {number}: not as TruthfulQA.csv is published ({error})") from error
        # The harness takes the choices up to the first wrong one for the right ones.
        wrong = [answer for answer in wrong if answer not in right]
        if not right or not wrong:
            raise DataError(f"{path}, row {number}: a right and a wrong answer expected")
        rows.append(
            {
                "question": question,
                "mc1_targets": {"choices": [best, *wrong], "labels": [1] + [0] * len(wrong)},
                "mc2_targets": {"choices": right + wrong, "labels": [1] * len(right) + [0] * len(wrong)},
            }
        )
    if not rows:
        raise DataError(f"{path}: no rows")
    notes.append("truthfulqa_mc2: choices are made from TruthfulQA.csv, each answer once")
    return [_describe(folder, "truthfulqa_mc2", {"validation": rows})]


def _csv_rows(path: Path) -> list[dict[str, str]]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({error})", hint="check that the file is whole") from error


def _answers(text: str) -> list[str]:
    """The answers of a cell, each once: a few questions list one twice."""
    return list(dict.fromkeys(answer.strip() for answer in text.split(";") if answer.strip()))


MAKERS: dict[str, Callable[[Path, Path, list[str]], list[Path]]] = {
    "hellaswag": _hellaswag,
    "gsm8k": _gsm8k,
    "mmlu": _mmlu,
    "truthfulqa_mc2": _truthfulqa,
}
