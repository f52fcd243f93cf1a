"""LongBench: its question answering, classification and code completion tasks, from its files, by its metrics.

Wording is benchmark data. As its authors do, none of these prompts is put into a chat template.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from longrope2.evaluation.suite import (
    AnswerScorer,
    Published,
    Sample,
    Setup,
    Suite,
    data_folder,
    read_rows,
    truncate_middle,
)

NAME = "longbench"


@dataclass(frozen=True, kw_only=True)
class LongBenchTask:
    """One of its tasks."""

    prompt: str
    new_tokens: int
    metric: str


@dataclass(frozen=True, kw_only=True)
class LongBenchRow(Published):
    """A line of a task's file."""

    input: str
    context: str
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ClassifiedRow(LongBenchRow):
    """The same where the answer is one of several classes."""

    all_classes: tuple[str, ...]


TASKS = {
    "triviaqa": LongBenchTask(
        prompt="Answer the question based on the given passage. Only give me the answer and do not output any other "
        "words. The following are some examples.\n\n{context}\n\n{input}",
        new_tokens=32,
        metric="F1",
    ),
    "trec": LongBenchTask(
        prompt="Please determine the type of the question below. Here are some examples of questions.\n\n"
        "{context}\n{input}",
        new_tokens=64,
        metric="class right",
    ),
    "lcc": LongBenchTask(
        prompt="Please complete the code given below. \n{context}Next line of code:\n",
        new_tokens=64,
        metric="edit similarity",
    ),
    "repobench-p": LongBenchTask(
        prompt="Please complete the code given below. \n{context}{input}Next line of code:\n",
        new_tokens=64,
        metric="edit similarity",
    ),
}


def source(task: str) -> str:
    """Where a task's file comes from."""
    return f"{task}.jsonl is in data.zip of huggingface.co/datasets/THUDM/LongBench; put it into --data DIR"


def f1(prediction: str, references: Sequence[str]) -> float:
    """Overlap of words on the first line, without articles and punctuation; the best over the references."""
    return max((_word_f1(_first_line(prediction), reference) for reference in references), default=0.0)


def _word_f1(prediction: str, reference: str) -> float:
    found, expected = _words(prediction), _words(reference)
    common = (Counter(found) & Counter(expected)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(found), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def class_right(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """One over the classes named on the first line, if the right one is among them; the best over the references."""
    line = _first_line(prediction)
    return max((_class_score(line, reference, classes) for reference in references), default=0.0)


def _class_score(line: str, reference: str, classes: Sequence[str]) -> float:
    named = [name for name in classes if name in line]
    # A name that is only a part of the right one does not count. The published metric drops such names from the list
    # it walks along, and so misses the one after each; its scores are what ours are compared with.
    place = 0
    while place < len(named):
        if named[place] in reference and named[place] != reference:
            named.remove(named[place])
        place += 1
    return 1 / len(named) if reference in named else 0.0


def edit_similarity(prediction: str, references: Sequence[str]) -> float:
    """How alike the first line of code and the right one are, in hundredths; the best over the references."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    ratios = (difflib.SequenceMatcher(None, line, reference).ratio() for reference in references)
    return max((round(100 * ratio) / 100 for ratio in ratios), default=0.0)


def _first_line(prediction: str) -> str:
    return prediction.lstrip("\n").split("\n")[0]


def longbench_samples(setup: Setup, task: str, length: int) -> list[Sample]:
    """The samples of a task's file, cut in their middle to fit."""
    described = TASKS[task]
    path = data_folder(setup.data, NAME, source(task)) / f"{task}.jsonl"
    kind = ClassifiedRow if described.metric == "class right" else LongBenchRow
    samples = []
    for index, row in enumerate(read_rows(path, kind, source=source(task))):
        if index == setup.samples:
            break
        score: AnswerScorer = edit_similarity
        if described.metric == "F1":
            score = f1
        elif isinstance(row, ClassifiedRow):
            score = partial(class_right, classes=row.all_classes)
        prompt = described.prompt.format(context=row.context, input=row.input)
        samples.append(
            Sample(
                suite=NAME,
                task=task,
                length=length,
                index=index,
                prompt=truncate_middle(setup.tokenizer, prompt, length - described.new_tokens),
                references=row.answers,
                max_new_tokens=described.new_tokens,
                score=score,
            )
        )
    return samples


SUITE = Suite(
    name=NAME,
    title="LongBench",
    tasks=tuple(TASKS),
    make=longbench_samples,
    metrics={name: task.metric for name, task in TASKS.items()},
    heads={"triviaqa": "TriviaQA", "trec": "TREC", "lcc": "LCC", "repobench-p": "RepoBench-P"},
    row="`triviaqa`, `trec`, `lcc`, `repobench-p` | F1; class; edit similarity | longest | its files",
    files="`triviaqa.jsonl`, `trec.jsonl`, `lcc.jsonl`, `repobench-p.jsonl`",
)
