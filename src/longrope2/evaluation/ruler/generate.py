"""Samples of one task at one length."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrope2.errors import DataError, counted
from longrope2.evaluation.ruler.counting import CommonWordsMaker, frequent_words
from longrope2.evaluation.ruler.haystack import load_haystack
from longrope2.evaluation.ruler.hiding import NeedleMaker
from longrope2.evaluation.ruler.questions import ORIGINS, QuestionMaker, read_questions
from longrope2.evaluation.ruler.sizing import Draft, Maker, TokenCounter, fitting
from longrope2.evaluation.ruler.tasks import TASKS, RulerTask
from longrope2.evaluation.ruler.tracking import TrackingMaker
from longrope2.evaluation.suite import Frame, chat_frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class RulerSample:
    """A prompt in two parts and what its answer should hold."""

    index: int
    task: str
    input: str
    answer_prefix: str  # the opening of the answer, which the model continues
    outputs: list[str]
    length: int  # tokens of the prompt (without a BOS) and of the longest answer

    @property
    def prompt(self) -> str:
        """All that the model reads."""
        return self.input + self.answer_prefix


@dataclass(frozen=True, kw_only=True)
class Request:
    """All that decides what the samples of a task are."""

    count: int
    seed: int
    counter: TokenCounter
    frame: Frame
    haystack: str | Path | None
    english_words: Path | None
    task: str = ""
    length: int = 0
    qa_file: Path | None = None

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", *, chat_template: bool, **options: Any) -> "Request":
        """What samples of all tasks and lengths have in common."""
        frame = chat_frame(tokenizer) if chat_template else Frame()
        return cls(counter=TokenCounter.of(tokenizer), frame=frame, **options)


def make_samples(
    task: str,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    length: int,
    count: int,
    seed: int = 42,
    haystack: str | Path | None = None,
    qa_file: Path | None = None,
    english_words: Path | None = None,
    chat_template: bool = False,
) -> list[RulerSample]:
    """The first `count` samples of a task whose prompt and answer take at most `length` tokens.

    `haystack` is RULER's PaulGrahamEssays.json or any books (None: the package's); `english_words` is RULER's
    english_words.json, which only cwe near 128k needs (None: words of the package's books).
    """
    check(task, length=length, count=count, qa_file=qa_file)
    common = Request.of(
        tokenizer, chat_template=chat_template, count=count, seed=seed, haystack=haystack, english_words=english_words
    )
    return make(replace(common, task=task, length=length, qa_file=qa_file))


def check(task: str, *, length: int, count: int, qa_file: Path | None) -> None:
    """Refuse what is plainly wrong, before anything is made."""
    if task not in TASKS:
        raise DataError(f"RULER has no task '{task}'", hint=f"one of {', '.join(TASKS)}")
    questions = TASKS[task].question_file
    if questions is not None and qa_file is None:
        raise DataError(f"{task} needs a file of questions, and none is given", hint=f"give {ORIGINS[questions]}")
    if length <= TASKS[task].tokens_to_generate:
        raise DataError(
            f"{task}: a length of {length} tokens, and its answer alone may take {TASKS[task].tokens_to_generate}",
            hint="ask for a greater length",
        )
    if count < 1:
        raise DataError(f"{count} samples asked for, at least 1 expected", hint="ask for more")
    if questions is not None and qa_file is not None:
        known, _ = read_questions(questions, qa_file)
        if count > len(known):
            raise DataError(
                f"{qa_file}: {counted(len(known), 'question')}, {count:,} asked for", hint="ask for fewer samples"
            )


def make(request: Request) -> list[RulerSample]:
    """The samples of a request, in any process."""
    try:
        return [
            RulerSample(
                index=index,
                task=request.task,
                input=draft.input,
                answer_prefix=draft.answer_prefix,
                outputs=draft.outputs,
                length=length,
            )
            for index, (draft, length) in enumerate(_drafts(request))
        ]
    except DataError as error:
        raise DataError(f"{request.task} at {request.length:,} tokens: {error.message}", hint=error.hint) from error


def _drafts(request: Request) -> Iterator[tuple[Draft, int]]:
    task, length, count = TASKS[request.task], request.length, request.count
    if request.task == "fwe":
        return frequent_words(request.counter, length=length, seed=request.seed, frame=request.frame, count=count)
    maker = _maker(task, request)
    return fitting(maker, request.counter, length=length, new_tokens=task.tokens_to_generate, count=count)


def _maker(task: RulerTask, request: Request) -> Maker:
    seed, frame, length = request.seed, request.frame, request.length
    if task.needles is not None:
        haystack = load_haystack(request.haystack) if task.needs_essay else None
        return NeedleMaker(task, length=length, seed=seed, frame=frame, haystack=haystack)
    if task.question_file is not None:
        assert request.qa_file is not None
        return QuestionMaker(task, seed=seed, frame=frame, file=request.qa_file)
    if task.name == "vt":
        return TrackingMaker(length=length, seed=seed, frame=frame, count_tokens=request.counter)
    return CommonWordsMaker(length=length, seed=seed, frame=frame, english_words=request.english_words)
