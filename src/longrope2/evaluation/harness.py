"""lm-evaluation-harness: the engine as its language model, and files on disk as its tasks.

The harness takes a task's description with other data in it. So each file, as its authors publish it, is read, checked
and written again as the task expects it, and a description that includes the harness's own points there.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import lm_eval.tasks
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from longrope2.chat import render_chat
from longrope2.errors import DataError, LongRopeError
from longrope2.evaluation.engine import EvaluationEngine
from longrope2.evaluation.suite import Published, Sample, TextSpan, read_rows
from longrope2.records import Kind, as_json

NEW_TOKENS = 256  # the harness's own default


@dataclass(frozen=True, kw_only=True)
class HellaSwagRow(Published):
    """A question of HellaSwag."""

    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: tuple[str, str, str, str]
    label: Literal["0", "1", "2", "3", 0, 1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class MmluRow(Published):
    """A question of MMLU."""

    question: str
    subject: str
    choices: tuple[str, str, str, str]
    answer: Literal[0, 1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class Gsm8kRow(Published):
    """A question of GSM8K."""

    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class LambadaRow(Published):
    """A passage of LAMBADA: whole, or with its last word apart."""

    text: str = ""
    context: str = ""
    continuation: str = ""


@dataclass(frozen=True, kw_only=True)
class PiqaRow(Published):
    """A question of PIQA."""

    goal: str
    sol1: str
    sol2: str
    label: Literal[0, 1]


@dataclass(frozen=True, kw_only=True)
class ArcChoices(Published):
    """The answers to choose from, and their letters or numbers."""

    text: tuple[str, ...]
    label: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ArcRow(Published):
    """A question of ARC."""

    question: str
    choices: ArcChoices
    answerKey: str  # noqa: N815


class EngineModel(TemplateLM):
    """Every process of ours asks for everything and gets everything: to the harness there is only one."""

    def __init__(self, engine: EvaluationEngine, *, max_length: int) -> None:
        super().__init__()
        self._engine, self.max_length = engine, max_length
        self.tokenizer = engine.backend.tokenizer
        self.label = "short"

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        end: int = self.tokenizer.eos_token_id
        return end

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's records."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Opened as the tokenizer opens a text, unless the text has its opening (a chat template's) already."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        ids: list[int] = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The tokenizer's own; an unfinished last message of the assistant goes on."""
        return render_chat(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        spans = [self._span(context, continuation) for _, context, continuation in requests]
        return [(-score.nll, bool(score.exact)) for score in self._engine.scores(spans, self.label)]

    def _span(self, context: Sequence[int], continuation: Sequence[int]) -> TextSpan:
        if not 0 < len(continuation) <= self.max_length:
            raise LongRopeError(f"{self.label}: an answer of {len(continuation)} tokens cannot be scored")
        # The last token is only predicted, so the window holds one more; what is too long loses its beginning.
        tokens = [*context, *continuation][-(self.max_length + 1) :]
        return TextSpan(token_ids=tokens, start=len(tokens) - len(continuation))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Whole texts, in windows that do not overlap."""
        spans, owners = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            for context, continuation in map(make_disjoint_window, windows):
                spans.append(self._span(context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._engine.scores(spans, self.label), strict=True):
            totals[owner] -= score.nll
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers."""
        return self._engine.answers([self._sample(i, *request.args) for i, request in enumerate(requests)], self.label)

    def _sample(self, index: int, context: str, options: dict[str, Any]) -> Sample:
        if options.get("do_sample") and options.get("temperature", 1) > 0:
            raise LongRopeError(f"{self.label}: it samples its answers, and answers here are greedy")
        stop = options.get("until") or []
        new_tokens = int(options.get("max_gen_toks") or options.get("max_new_tokens") or NEW_TOKENS)
        new_tokens = min(new_tokens, self.max_length // 2)
        tokens = self.tok_encode(context)[-(self.max_length - new_tokens) :]
        return Sample(
            suite="short",
            task=self.label.removeprefix("short "),
            length=self.max_length,
            index=index,
            prompt=tuple(tokens),
            references=(),
            max_new_tokens=new_tokens,
            score=None,  # by the harness
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )


def local_tasks(data: Path, tasks: Iterable[str], folder: Path, notes: list[str]) -> dict[str, list[str]]:
    """Descriptions, written into `folder`, of those tasks whose files lie in `data` (or short/ in it)."""
    source = data / "short" if (data / "short").is_dir() else data
    made = {task: MAKERS[task](source, folder / task, notes) for task in tasks if task in MAKERS}
    return {task: [str(path) for path in paths] for task, paths in made.items() if paths}


def _file(source: Path, name: str) -> Path | None:
    return next((path for path in (source / name, source / f"{name}.gz") if path.is_file()), None)


def _rows(path: Path, kind: type[Kind]) -> list[Kind]:
    return list(read_rows(path, kind, source=f"check {path.name}: it should be as its authors publish it"))


def _write(path: Path, rows: Sequence[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(as_json(row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _described(task: str) -> Path:
    """The harness's own description, found without its index of all tasks, which takes many seconds to build."""
    places = {"truthfulqa_mc2": "truthfulqa", "lambada_openai": "lambada", "arc_easy": "arc"}
    place = places.get(task, task if task in MAKERS else "mmlu/default")
    return Path(lm_eval.tasks.__file__).parent / place / f"{task}.yaml"


def _describe(folder: Path, task: str, splits: dict[str, Sequence[Any]], **fields: Any) -> Path:
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
    rows = _rows(path, HellaSwagRow)
    if train is not None:
        return [_describe(folder, "hellaswag", {"train": _rows(train, HellaSwagRow), "validation": rows})]
    notes.append("hellaswag: examples come from the validation file, since there is no hellaswag_train.jsonl")
    # As a test split: only from there does the harness keep a question out of its own examples.
    names = {"training_split": None, "validation_split": None, "test_split": "test", "fewshot_split": "test"}
    return [_describe(folder, "hellaswag", {"test": rows}, **names)]


def _gsm8k(source: Path, folder: Path, notes: list[str]) -> list[Path]:
    test, train = _file(source, "gsm8k_test.jsonl"), _file(source, "gsm8k_train.jsonl")
    if test is None or train is None:
        return []
    return [_describe(folder, "gsm8k", {"train": _rows(train, Gsm8kRow), "test": _rows(test, Gsm8kRow)})]


def _mmlu(source: Path, folder: Path, notes: list[str]) -> list[Path]:
    """One description for each subject."""
    test, dev = _file(source, "mmlu_test.jsonl"), _file(source, "mmlu_dev.jsonl")
    if test is None or dev is None:
        return []
    examples = _by_subject(_rows(dev, MmluRow))
    subjects = _by_subject(_rows(test, MmluRow))
    lacking = [name for name in subjects if name not in examples or not _described(f"mmlu_{name}").is_file()]
    if lacking:
        raise DataError(f"{test}: subjects without examples in {dev.name}, or unknown: {', '.join(lacking)}")
    if len(subjects) < 57:
        notes.append(f"mmlu: {len(subjects)} of its 57 subjects")
    return [
        _describe(folder, f"mmlu_{subject}", {"test": rows, "dev": examples[subject]})
        for subject, rows in subjects.items()
    ]


def _by_subject(rows: Iterable[MmluRow]) -> dict[str, list[MmluRow]]:
    ordered = sorted(rows, key=lambda row: row.subject)
    return {subject: list(group) for subject, group in groupby(ordered, key=lambda row: row.subject)}


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


def _lambada(source: Path, folder: Path, notes: list[str]) -> list[Path]:
    path = _file(source, "lambada_openai_test.jsonl")
    if path is None:
        return []
    texts = [row.text or f"{row.context} {row.continuation}" for row in _rows(path, LambadaRow)]
    for number, text in enumerate(texts, 1):
        if not all(text.rpartition(" ")):
            raise DataError(
                f"{path}, row {number}: a passage and its last word expected",
                hint="a row has text, or context and continuation",
            )
    return [_describe(folder, "lambada_openai", {"test": [{"text": text} for text in texts]})]


def _piqa(source: Path, folder: Path, notes: list[str]) -> list[Path]:
    path = _file(source, "piqa_val.jsonl")
    if path is None:
        return []
    return [_describe(folder, "piqa", {"validation": _rows(path, PiqaRow)}, training_split=None)]


def _arc_easy(source: Path, folder: Path, notes: list[str]) -> list[Path]:
    test, validation = _file(source, "arc_easy_test.jsonl"), _file(source, "arc_easy_val.jsonl")
    path = test or validation
    if path is None:
        return []
    if test is None:
        notes.append("arc_easy: the questions are those of the validation file, since there is no arc_easy_test.jsonl")
    rows = _rows(path, ArcRow)
    for number, row in enumerate(rows, 1):
        if row.answerKey not in row.choices.label or len(row.choices.text) != len(row.choices.label):
            raise DataError(
                f"{path}, row {number}: {row.answerKey!r} does not name one of its choices",
                hint="answerKey is one of choices.label, which has a label for each of choices.text",
            )
    return [_describe(folder, "arc_easy", {"test": rows}, training_split=None, validation_split=None)]


MAKERS: dict[str, Callable[[Path, Path, list[str]], list[Path]]] = {
    "hellaswag": _hellaswag,
    "gsm8k": _gsm8k,
    "mmlu": _mmlu,
    "truthfulqa_mc2": _truthfulqa,
    "lambada_openai": _lambada,
    "piqa": _piqa,
    "arc_easy": _arc_easy,
}
