"""LOFT: retrieval from a corpus that stands whole in the prompt, from its published files, by its metrics.

Wording is benchmark data.
"""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from longrope2.errors import DataError
from longrope2.evaluation.engine import EvaluationEngine
from longrope2.evaluation.results import with_averages
from longrope2.evaluation.suite import (
    Published,
    Sample,
    Setup,
    Suite,
    SuiteOutcome,
    answered,
    by_task,
    chat_frame,
    data_folder,
    read_rows,
)

NAME = "loft"
NEW_TOKENS = 512
STOP = ("======",)
LENGTHS = {1 << 15: "32k", 1 << 17: "128k", 1 << 20: "1m"}
FORMATTING = """
Your final answer should be a list of IDs, in the following format:
Final Answer: [id1, id2, ...]
If there is only one ID, it should be in the format:
Final Answer: [id1]

If there is no perfect answer output the closest one. Do not give an empty final answer.
"""
CLOSEST = "If there is no perfect answer output the closest one. Do not give an empty final answer."


@dataclass(frozen=True, kw_only=True)
class LoftTask:
    """How one of its datasets is asked."""

    instruction: str
    query: str
    titled: bool
    """Whether documents are named by their titles; the others are quoted."""
    top: int = 1
    """How many answers count: recall at 1, or all of the first two."""


CAREFULLY = "You need to read carefully and understand all of them."
CLAIMS = LoftTask(
    instruction=f"You will be given a list of passages. {CAREFULLY} Then you will be given a claim, and your goal is "
    "to find all passages from the list that can help verify the claim as true of false. Print out the ID and TITLE "
    "of each passage.",
    query="Which passage is most relevant to the claim, and can help verify the claim as true or false? Print out the "
    f"TITLE and ID of the document. Then format the IDs into a list.\n{CLOSEST}\nclaim: {{query}}\n"
    "The following passages can help verify this sentence:",
    titled=True,
)
TASKS = {
    "arguana": LoftTask(
        instruction=f"You will be given a list of statements. {CAREFULLY} Then you will be given a claim, and your "
        "goal is to find all statements from the list that can counterargue the claim.",
        query="Given a claim, which statements provide a counterargument? Print out the CONTENT and ID of each "
        f"statement. Then format the IDs into a list.\n{CLOSEST}\nclaim: {{query}}\n"
        "The following statements can counterargue the claim:",
        titled=False,
    ),
    "fever": CLAIMS,
    "hotpotqa": LoftTask(
        instruction=f"You will be given a list of documents. {CAREFULLY} Then you will be given a query that may "
        "require you to use 1 or more documents to find the answer. Your goal is to find all documents from the list "
        "that can help answer the query. Print out the ID and TITLE of each document.",
        query="Which documents can help answer the query? Print out the TITLE and ID of each document. Then format "
        f"the IDs into a list.\n{CLOSEST}\nquery: {{query}}\nThe following documents can help answer the query:",
        titled=True,
        top=2,
    ),
    "msmarco": LoftTask(
        instruction=f"You will be given a list of documents. {CAREFULLY} Then you will be given a query, and your "
        "goal is to find all documents from the list that can help answer the query. Print out the ID and CONTENT of "
        "each document.",
        query="Which document is most relevant to answering the query? Print out the CONTENT and ID of the document. "
        f"Then format the IDs into a list.\n{CLOSEST}\nquery: {{query}}\n"
        "The following documents can answer the query:",
        titled=False,
    ),
    "nq": LoftTask(
        instruction=f"You will be given a list of documents. {CAREFULLY} Then you will be given a query, and your "
        "goal is to find all documents from the list that can help answer the query. Print out the ID and TITLE of "
        "each document.",
        query="Which document is most relevant to answer the query? Print out the TITLE and ID of the document. Then "
        f"format the IDs into a list.\n{CLOSEST}\nquery: {{query}}\n"
        "The following documents can help answer the query:",
        titled=True,
    ),
    "quora": LoftTask(
        instruction=f"You will be given a list of questions. {CAREFULLY} Then you will be given a new question, and "
        "your goal is to find all questions from the list that are near duplicates of the new question. Print out the "
        "ID and CONTENT of each question.",
        query="Given the following query, which existing question is most similar to it? Print out the CONTENT and ID "
        f"of the question. Then format the IDs into a list.\n{CLOSEST}\nquery: {{query}}\n"
        "The following existing questions are most similar to the given query:",
        titled=False,
    ),
    "scifact": CLAIMS,
}
METRICS = {name: "recall@1" if task.top == 1 else f"mrecall@{task.top}" for name, task in TASKS.items()}


def source(task: str) -> str:
    """Where a task's files come from."""
    return f"unpack https://storage.googleapis.com/loft-bench/retrieval/{task}.zip into --data DIR ({task}/128k/…)"


def find_folder(data: Path | None, task: str) -> Path:
    """The folder of a task, which has one for each length."""
    base = data_folder(data, NAME, source(task))
    places = [base / task, base / "retrieval" / task, base / "data" / "retrieval" / task]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise DataError(f"{places[0]}: no such folder", hint=source(task))
    return found


def recall(prediction: str, references: Sequence[str], *, top: int, size: int) -> float:
    """Recall at 1; for more, whether all that could be among the first k are.

    An answer with an ID that is not in the corpus counts as none, as in LOFT's own inference.
    """
    answers = [str(answer).strip() for answer in final_answer(prediction)]
    if any(not answer.isdecimal() or int(answer) >= size for answer in answers):
        return 0.0
    found = len(set(answers[:top]) & set(references))
    return found / len(references) if top == 1 else float(found == min(top, len(references)))


def final_answer(prediction: str) -> list[Any]:
    """The list on the first line that has a final answer with one."""
    for line in re.sub(r"[*`]", "", prediction).strip().split("\n"):
        if "final answer" in line.lower() and "[" in line and "]" in line:
            listed = line[line.find("[") : line.rfind("]") + 1]
            try:
                answers = ast.literal_eval(re.sub(r"([a-zA-Z0-9])'([a-zA-Z0-9])", r"\1\\'\2", listed))
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return []
            return answers if isinstance(answers, list) else []
    return []


@dataclass(frozen=True, kw_only=True)
class LoftPassage(Published):
    """A line of corpus.jsonl."""

    pid: str
    title_text: str | None
    passage_text: str


@dataclass(frozen=True, kw_only=True)
class LoftQuery(Published):
    """A line of a file of queries."""

    query_text: str
    answers: tuple[tuple[Any, ...], ...]
    """Each begins with the pid of a right document."""


class LoftCorpus:
    """The files of one task at one length."""

    def __init__(self, folder: Path, task: str) -> None:
        self._task, self._source = TASKS[task], source(task)
        rows = list(read_rows(folder / "corpus.jsonl", LoftPassage, source=self._source))
        self.ids = {row.pid: str(number) for number, row in enumerate(rows)}
        self._documents = {row.pid: (_clean(row.title_text or "") or "None", _clean(row.passage_text)) for row in rows}
        self._examples = self._queries(folder / "few_shot_queries.jsonl")
        # The 100 queries its authors report on; older downloads have only the first ten.
        test = folder / "test_queries.jsonl"
        self.queries = self._queries(test if test.is_file() else folder / "dev_queries.jsonl")

    def _queries(self, path: Path) -> list[tuple[str, list[str]]]:
        """(text, right documents) of each query."""
        found: list[tuple[str, list[str]]] = []
        for row in read_rows(path, LoftQuery, source=self._source):
            right = [str(answer[0]) for answer in row.answers if answer]
            missing = [pid for pid in right if pid not in self.ids]
            if missing or not right or len(right) < len(row.answers):
                raise DataError(f"{path}, query {len(found) + 1}: its answers are not in the corpus", hint=self._source)
            found.append((row.query_text.strip(), right))
        return found

    def context(self) -> str:
        """Everything before the query: instructions, documents, examples."""
        parts = [self._task.instruction, FORMATTING]
        for pid, (title, passage) in self._documents.items():
            number = self.ids[pid]
            name = f"TITLE: {title} | " if self._task.titled else ""
            parts.append(f"ID: {number} | {name}CONTENT: {passage} | END ID: {number}")
        for example, (query, right) in enumerate(self._examples, 1):
            parts.append(f"====== Example {example} ======\n{self._task.query.format(query=query)}")
            for pid in right:
                title, passage = self._documents[pid]
                named = f"TITLE: {title}" if self._task.titled else f"CONTENT: {passage}"
                parts.append(f"{named} | ID: {self.ids[pid]}")
            parts.append(f"Final Answer: {[self.ids[pid] for pid in right]}")
        return "".join(f"{part}\n" for part in parts)

    def prompt(self, query: str) -> str:
        """What follows for one query."""
        return f"====== Now let's start! ======\n{self._task.query.format(query=query)}\n"


def _clean(text: str) -> str:
    # Its authors keep these two words, which safety filters stumble over, out of their prompts.
    return text.strip().replace("childhood abuse", "")


def loft_samples(setup: Setup, task: str, length: int) -> list[Sample]:
    """The queries of a task."""
    if length not in LENGTHS:
        known = ", ".join(LENGTHS.values())
        raise DataError(
            f"LOFT has corpora of {known} tokens, none of {length:,}", hint=f"longest of --lengths: {known}"
        )
    corpus = LoftCorpus(find_folder(setup.data, task) / LENGTHS[length], task)
    frame = chat_frame(setup.tokenizer) if setup.chat else str
    context = corpus.context()
    return [
        Sample(
            suite=NAME,
            task=task,
            length=length,
            index=index,
            prompt=frame(context + corpus.prompt(query)),
            references=tuple(corpus.ids[pid] for pid in right),
            max_new_tokens=NEW_TOKENS,
            score=partial(recall, top=TASKS[task].top, size=len(corpus.ids)),
            stop=STOP,
            may_be_cut=True,  # its authors count tokens by a tokenizer of their own
        )
        for index, (query, right) in enumerate(corpus.queries[: setup.samples])
    ]


def check(setup: Setup) -> None:
    """Refuse a length that it has no corpus of, and files that are missing."""
    for task in setup.tasks:
        loft_samples(replace(setup, samples=1), task, setup.lengths[0])


def run(setup: Setup, engine: EvaluationEngine) -> SuiteOutcome:
    """At the longest length."""
    measured = []
    for task in setup.tasks:
        samples = loft_samples(setup, task, setup.lengths[0])
        measured += by_task(samples, answered(samples, engine, f"loft {task}"), METRICS)
    return SuiteOutcome(measured=with_averages(measured))


SUITE = Suite(
    name=NAME,
    title="LOFT",
    tasks=tuple(TASKS),
    run=run,
    check=check,
    heads=dict(zip(TASKS, ("ArguAna", "FEVER", "HotPotQA", "MS MARCO", "NQ", "Quora", "SciFact"), strict=True)),
    row="`arguana`, `fever`, `hotpotqa`, `msmarco`, `nq`, `quora`, `scifact` | recall@1; HotpotQA mrecall@2 | "
    "longest: 32k, 128k or 1M | its files",
    files="`<task>/128k/corpus.jsonl`, `few_shot_queries.jsonl`, `test_queries.jsonl` or `dev_queries.jsonl`",
)
