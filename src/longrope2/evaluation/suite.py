"""What a suite gets (`Setup`), asks (`Sample`), gives (`SuiteOutcome`) and is (`Suite`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrope2.books import read_jsonl
from longrope2.chat import user_turn
from longrope2.codec import opens_with_bos
from longrope2.errors import DataError
from longrope2.evaluation.results import accuracy, digest, with_averages
from longrope2.records import Grid, Kind, Measured

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longrope2.evaluation.engine import EvaluationEngine

MARKER = "[the task stands here]"
ROOMY = 1 << 14
"""Tokens that have room for the smallest sample of every task, whatever the tokenizer."""
AnswerScorer = Callable[[str, Sequence[str]], float]
"""(prediction, references) → a score from 0 to 1."""


class Published:
    """A line of a file that others publish: what it holds beyond the fields here is passed over."""

    EXTRA = "ignore"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question to a model."""

    suite: str
    task: str
    length: int
    """Tokens of the prompt and its answer together, at most."""
    index: int
    prompt: str | tuple[int, ...]
    """Text, or tokens where the length has to be exact."""
    references: tuple[str, ...]
    max_new_tokens: int
    score: AnswerScorer | None = field(compare=False)
    """None where another program scores the answers."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these."""
    details: Mapping[str, Any] = field(default_factory=dict)
    may_be_cut: bool = False
    """Whether prompt and answer may take more than `length`, so that the window may end the answer."""

    @property
    def key(self) -> str:
        """Its place, for people."""
        return f"{self.suite}/{self.task}/{self.length}/{self.index}"

    def digest(self) -> str:
        """What the answer depends on: the prompt and where it ends."""
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        return digest("answer", prompt, self.max_new_tokens, self.stop)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Tokens to continue greedily."""

    token_ids: Sequence[int]
    max_new_tokens: int
    stop: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class TextSpan:
    """Tokens to score: those from `start` on, given what stands before them."""

    token_ids: Sequence[int]
    start: int
    only: tuple[int, ...] | None = None
    """The places of those that count, in order, where it is not all of them."""

    @property
    def places(self) -> Sequence[int]:
        """Where the tokens to score stand."""
        return range(self.start, len(self.token_ids)) if self.only is None else self.only

    def digest(self) -> str:
        """What the likelihood depends on."""
        places = self.start if self.only is None else list(self.only)
        return digest("likelihood", list(self.token_ids), places)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the user asked for, as far as a suite cares."""

    tokenizer: Any
    lengths: tuple[int, ...]
    """Longest first."""
    tasks: tuple[str, ...]
    """Of this suite."""
    named: bool
    """Whether the user named these tasks, rather than taking all."""
    samples: int | None
    """Per task and length, or cell; None is the suite's own number."""
    seed: int
    data: Path | None
    books: str | None
    chat: bool
    note: Callable[[str], None]
    """Takes what people should know while it runs."""
    cache: Path
    """Where samples that take long to make are kept."""
    judge: str | None = None
    """The model that says which tokens count, for a suite that needs one."""

    @property
    def trial(self) -> "Setup":
        """The same for a first sample that is soon made, in order to see whether there can be one."""
        return replace(self, samples=1, lengths=tuple(min(length, ROOMY) for length in self.lengths))


@dataclass(frozen=True, kw_only=True)
class SuiteOutcome:
    """What a suite found."""

    measured: list[Measured]
    notes: list[str] = field(default_factory=list)
    """What a reader of the numbers must know."""
    grid: Grid | None = None
    """Scores by length and depth, for the heatmap."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark: all that anything else needs to know of it."""

    name: str
    title: str
    """At the head of its tables."""
    tasks: tuple[str, ...]
    """All it has, or for one that takes any, those it runs by default."""
    make: Callable[[Setup, str, int], list[Sample]] | None = None
    """The samples of a task at a length, for a suite that only asks questions, each on its own."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """What the score of each task is called."""
    run: "Callable[[Setup, EvaluationEngine], SuiteOutcome] | None" = None
    """Measures, where asking is not all there is to it."""
    row: str
    """Of the table in docs/evaluation.md: its tasks, how they are scored, lengths, samples."""
    files: str = ""
    """What it looks for in --data, in the other table there."""
    check: Callable[[Setup], object] | None = None
    """Refuses lengths and files that it cannot run with, where making a first sample would not."""
    any_task: bool = False
    """Whether it takes names beyond `tasks`."""
    samples: int | None = None
    """Of a task at one length, unless another number is asked for; None where its files decide."""
    cells: int = 1
    """Places at each length that have this many."""
    most_samples: int | None = None
    """Where it cannot make as many as are asked for."""
    every_length: bool = False
    """Whether it runs at every length, so that tables have lengths as columns, rather than at one."""
    is_perplexity: bool = False
    """Whether its numbers are perplexities rather than percentages, with a table for each task."""
    is_retention: bool = False
    """Whether it measures what a model keeps of the original's abilities."""
    scores_texts: bool = False
    """Whether it needs likelihoods, which vLLM does not give, rather than answers alone."""
    has_grid: bool = False
    """Whether it also gives scores by length and depth, drawn as a heatmap."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """Tasks as the paper's tables have them, where that is not their name."""
    figure: str = ""
    """What a figure of its averages by length has beside its axis; none is drawn without."""
    summary: str = ""
    """Its name in the report's summary; it has no place there without."""
    note: str = ""
    """What `evaluate --help` adds to its name."""

    def measure(self, setup: Setup, engine: "EvaluationEngine") -> SuiteOutcome:
        """All that is asked for."""
        if self.run is not None:
            return self.run(setup, engine)
        assert self.make is not None
        measured: list[Measured] = []
        for length in setup.lengths if self.every_length else setup.lengths[:1]:
            samples = [sample for task in setup.tasks for sample in self.make(setup, task, length)]
            scores = answered(samples, engine, f"{self.name} {length:,}")
            measured += by_task(samples, scores, self.metrics)
        return SuiteOutcome(measured=with_averages(measured))

    def refuse(self, setup: Setup) -> None:
        """Refuse lengths and files that it cannot run with, before a model is loaded for nothing."""
        if self.check is not None:
            self.check(setup)
        elif self.make is not None:
            for task in setup.tasks:
                self.make(setup.trial, task, setup.trial.lengths[-1 if self.every_length else 0])

    def sequences(self, samples: int | None, tasks: Sequence[str], lengths: Sequence[int]) -> dict[int, float] | None:
        """How many sequences of each length a model has to read, for a forecast; None where its files decide."""
        if self.samples is None:
            return None
        count = (samples or self.samples) * self.cells
        if self.is_perplexity:  # as much of a book at every length; a sliding window reads each token twice
            return {length: 2 * count * max(lengths) / length for length in lengths}
        return dict.fromkeys(lengths, count * len(tasks))


def answered(samples: Sequence[Sample], engine: "EvaluationEngine", label: str) -> list[float]:
    """Run samples and score the answers."""
    scores = []
    for sample, answer in zip(samples, engine.answers(samples, label), strict=True):
        assert sample.score is not None
        scores.append(sample.score(answer, sample.references))
    return scores


def by_task(
    samples: Sequence[Sample], scores: Sequence[float], metrics: Mapping[str, str], *, together: int = 1
) -> list[Measured]:
    """One number for each task and length, in the order of the samples.

    So many neighbours count as one, with their mean: questions about the same text are not independent.
    """
    found: list[Measured] = []
    pairs = list(zip(samples, scores, strict=True))
    for (suite, task, length), group in groupby(pairs, key=lambda pair: (pair[0].suite, pair[0].task, pair[0].length)):
        own, answers = zip(*group, strict=True)
        asked = digest([sample.digest() for sample in own])
        means = [sum(answers[begin : begin + together]) / together for begin in range(0, len(answers), together)]
        found.append(accuracy(means, suite=suite, task=task, length=length, metric=metrics[task], asked=asked))
    return found


@dataclass(frozen=True)
class Frame:
    """What a chat template puts around the task; the answer prefix follows, as the opening of the model's turn."""

    before: str = ""
    after: str = ""

    def __call__(self, task_text: str) -> str:
        """The task as a prompt."""
        return self.before + task_text + self.after


def chat_frame(tokenizer: "PreTrainedTokenizerBase") -> Frame:
    """The frame of the tokenizer's own chat template: one user turn, then the opening of the assistant's."""
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template", hint="omit --chat: this is a base model")
    # The answer prefix opens the answer itself, so there is no room for thoughts before it.
    before, marker, after = user_turn(tokenizer, MARKER, enable_thinking=False).partition(MARKER)
    if not marker:
        raise DataError("the chat template does not show the user's message", hint="omit --chat")
    if opens_with_bos(tokenizer):
        # The tokenizer adds this one when the prompt is tokenized.
        before = before.removeprefix(str(tokenizer.bos_token))
    return Frame(before, after)


def prompt_tokens(tokenizer: Any, samples: Sequence[Sample]) -> list[list[int]]:
    """Prompts as the model gets them; texts all at once, since a tokenizer takes many on many cores."""
    texts = [sample.prompt for sample in samples if isinstance(sample.prompt, str)]
    encoded = iter(tokenizer(texts, verbose=False).input_ids if texts else ())
    return [next(encoded) if isinstance(sample.prompt, str) else list(sample.prompt) for sample in samples]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Text to tokens, opened as the tokenizer opens any; its warning about long ones is not wanted here."""
    ids: list[int] = tokenizer(text, verbose=False).input_ids
    return ids


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [place for place in (text.find(word) for word in stop) if place >= 0]
    return text[: min(ends)] if ends else text


def truncate_middle(tokenizer: Any, prompt: str, most: int) -> str:
    """At most this many tokens of a prompt: its two ends, which hold instruction and question."""
    ids = encode(tokenizer, prompt)
    half = most // 2
    while len(ids) > most:
        if half < 1:
            raise DataError(
                f"{max(most, 0)} tokens have no room for a prompt of {len(ids):,}", hint="ask for a greater length"
            )
        ends = (ids[:half], ids[-half:])
        shortened = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in ends)
        count = len(encode(tokenizer, shortened))
        if count <= most:
            return shortened
        half -= max(1, (count - most) // 2)  # at the seam, words may take more tokens than they did
    return prompt


def most_that_fit(count_tokens: Callable[[int], int], most: int, tokens: int) -> int:
    """The most parts, from 1 to `most`, with at most this many tokens.

    Parts take nearly the same number of tokens each, so a few counts suffice.
    """
    few = min(most, 32)
    least = count_tokens(1)
    each = max((count_tokens(few) - least) / max(few - 1, 1), 1.0)
    parts = min(most, max(int((tokens - least) / each) + 1, 1))
    while parts > 1 and (found := count_tokens(parts)) > tokens:
        parts = max(1, min(parts - 1, parts - int((found - tokens) / each)))
    while parts < most and count_tokens(parts + 1) <= tokens:
        parts += 1
    if least > tokens:
        raise DataError(
            "the shortest prompt and its answer do not fit", hint=f"ask for a length greater by {least - tokens}"
        )
    return parts


def read_rows(path: Path, kind: type[Kind], *, source: str) -> Iterator[Kind]:
    """The objects of a .jsonl or .jsonl.gz file that others publish; an error names the line and all its problems."""
    if not path.is_file():
        raise DataError(f"{path}: no such file", hint=source)
    empty = True
    for _, row in read_jsonl(path, kind, hint=source):
        empty = False
        yield row
    if empty:
        raise DataError(f"{path}: no rows", hint=source)


def data_folder(data: Path | None, suite: str, source: str) -> Path:
    """Where the files of a suite lie: its own folder in --data, or that folder itself."""
    if data is None:
        raise DataError(f"suite {suite} needs its data files", hint=source)
    own = data / suite
    return own if own.is_dir() else data
