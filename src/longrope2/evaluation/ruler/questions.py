"""Questions about documents, the right ones hidden among others: SQuAD and HotpotQA."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from longrope2.errors import DataError
from longrope2.evaluation.ruler.haystack import read_json
from longrope2.evaluation.ruler.sizing import Draft, Maker
from longrope2.evaluation.ruler.tasks import DOCUMENT, TASKS, RulerTask
from longrope2.evaluation.suite import Frame

ORIGINS = {
    "squad": "SQuAD 2.0's dev-v2.0.json, from https://rajpurkar.github.io/SQuAD-explorer",
    "hotpotqa": "HotpotQA's hotpot_dev_distractor_v1.json, from https://hotpotqa.github.io",
}


@dataclass(frozen=True)
class RulerQuestion:
    """A question with its answers; documents are numbers in the sorted list of all."""

    text: str
    answers: list[str]
    documents: list[int]
    related: list[int]  # more of the same article


def unavailable(qa_files: Mapping[str, Path]) -> dict[str, str]:
    """The tasks that cannot be made with these files (task → path), and what each one lacks."""
    return {
        name: f"needs {ORIGINS[task.question_file]}"
        for name, task in TASKS.items()
        if task.question_file is not None and name not in qa_files
    }


class QuestionMaker(Maker):
    """Prompts of the QA tasks, one question after another; sizes are documents."""

    def __init__(self, task: RulerTask, *, seed: int, frame: Frame, file: Path) -> None:
        assert task.question_file is not None
        self._questions, self._documents = read_questions(task.question_file, file)
        self._task, self._seed, self._frame = task, seed, frame
        self._random = Random(seed)  # noqa: S311
        self.step = 10

    def least(self, index: int) -> int:
        """The question's own documents, one of which has the answer."""
        return len(self._questions[index].documents)

    def draw(self, size: int, index: int) -> Draft:
        """The question of this index among `size` documents."""
        question = self._questions[index]
        numbers = self._choose(question, max(size, self.least(index)))
        chosen = [self._documents[number] for number in numbers]
        Random(self._seed).shuffle(chosen)  # noqa: S311
        context = "\n\n".join(DOCUMENT.format(number=i, document=text) for i, text in enumerate(chosen, start=1))
        text = self._task.template.format(context=context, query=question.text)
        return Draft(self._frame(text), self._task.answer_prefix, question.answers)

    def _choose(self, question: RulerQuestion, size: int) -> list[int]:
        total = len(self._documents)
        if size >= total:
            return [number % total for number in range(size)]
        own, related = question.documents, question.related
        if size - len(own) <= len(related):
            return own + self._random.sample(related, size - len(own))
        taken = {*own, *related}
        others = [number for number in range(total) if number not in taken]
        return own + related + self._random.sample(others, size - len(own) - len(related))


@lru_cache(maxsize=2)
def read_questions(kind: str, file: Path) -> tuple[list[RulerQuestion], list[str]]:
    """All answerable questions of a file in its order, and all its documents, sorted."""
    content = read_json(file)
    try:
        return _squad(content) if kind == "squad" else _hotpotqa(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: not in the format of {kind}", hint=f"give {ORIGINS[kind]}") from error


def _squad(content: Any) -> tuple[list[RulerQuestion], list[str]]:
    articles = [article["paragraphs"] for article in content["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    numbers = {document: number for number, document in enumerate(documents)}
    questions = []
    for article in articles:
        of_article = [numbers[paragraph["context"]] for paragraph in article]
        for paragraph in article:
            own = numbers[paragraph["context"]]
            related = [number for number in of_article if number != own]
            questions += [
                RulerQuestion(asked["question"], [answer["text"] for answer in asked["answers"]], [own], related)
                for asked in paragraph["qas"]
                if not asked["is_impossible"]
            ]
    return questions, documents


def _hotpotqa(content: Any) -> tuple[list[RulerQuestion], list[str]]:
    contexts = [[f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]] for asked in content]
    documents = sorted({document for context in contexts for document in context})
    numbers = {document: number for number, document in enumerate(documents)}
    questions = [
        RulerQuestion(asked["question"], [asked["answer"]], [numbers[document] for document in context], [])
        for asked, context in zip(content, contexts, strict=True)
    ]
    return questions, documents
