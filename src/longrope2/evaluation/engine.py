"""Prompts to answers, texts to likelihoods: in batches, on one process or many, each kept as soon as it is known.

Batches depend on the samples alone, never on the number of processes or on what is known already, and one that was
interrupted runs again as a whole. Rounding depends on who shares a batch; so a resumed run ends with the same answers.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from longrope2.console import ProgressLine
from longrope2.distributed import World
from longrope2.errors import DataError
from longrope2.evaluation.results import digest
from longrope2.evaluation.suite import Prompt, Sample, TextSpan, prompt_tokens
from longrope2.journal import JournalFile

if TYPE_CHECKING:
    from longrope2.perplexity import Score

# A forward without a cache keeps a GPU busy with this many; more would only cost memory.
SCORED_TOKENS = 1 << 15

Item = TypeVar("Item")
Value = TypeVar("Value")


class Backend(Protocol):
    """What the engine needs of whatever runs the model."""

    tokenizer: Any
    window: int
    """The longest sequence the model is made for."""
    batch_rows: int
    """How many prompts a batch may hold, and how many tokens:"""
    on_read: Callable[[int], None]
    """Called with the tokens of each prompt that was read, while a batch goes on."""

    def batch_tokens(self) -> int:
        """As many as memory allows."""

    def answer(self, prompts: Sequence[Prompt]) -> list[str]:
        """Greedy continuations, up to the end of text, a stop string or their limit."""

    def score(self, spans: Sequence[TextSpan]) -> "list[Score]":
        """The likelihood of texts."""


class EvaluationJournal(JournalFile):
    """Answers and likelihoods on disk, by what they depend on."""

    job, verb = "evaluation", "evaluate"

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self.answers: dict[str, str] = {}
        self.scores: dict[str, Score] = {}
        self.batch_tokens: int | None = None
        """What the batches so far were made for."""
        super().__init__(path, header)

    def write(self, kind: str, **fields: Any) -> None:
        """Keep an entry."""
        self.append({"type": kind, **fields})

    def take(self, entry: dict[str, Any]) -> None:
        """Know what was found on disk."""
        from longrope2.perplexity import Score  # with torch, which suites are described without

        if entry["type"] == "answer":
            self.answers[entry["id"]] = str(entry["answer"])
        elif entry["type"] == "likelihood":
            nll = math.inf if entry["nll"] is None else float(entry["nll"])
            self.scores[entry["id"]] = Score(nll, int(entry["tokens"]), bool(entry["exact"]))
        elif entry["type"] == "batches":
            self.batch_tokens = int(entry["tokens"])


class EvaluationEngine:
    """Runs samples through a backend."""

    def __init__(
        self,
        backend: Backend,
        journal: EvaluationJournal,
        here: World,
        *,
        batch_tokens: int | None = None,
        beyond_window: bool = False,
    ) -> None:
        """The journal holds something on the main process only; `batch_tokens` defaults to what fits."""
        self.backend, self.here = backend, here
        self._journal, self._beyond_window = journal, beyond_window
        known = here.gather((journal.answers, journal.scores, journal.batch_tokens))[0]
        self._answers, self._scores, before = known
        # Free memory differs from process to process and from run to run; batches must not.
        self._batch_tokens: int = batch_tokens or before or min(here.gather(backend.batch_tokens()))
        if self._batch_tokens != before:
            journal.write("batches", tokens=self._batch_tokens)

    def answers(self, samples: Sequence[Sample], label: str) -> list[str]:
        """The model's answer to each sample."""
        ids = [self._identity(sample) for sample in samples]

        def compute(batch: Sequence[int]) -> list[str]:
            return self.backend.answer(self._prompts([samples[index] for index in batch]))

        def keep(index: int, answer: str) -> None:
            sample = samples[index]
            self._journal.write(
                "answer",
                id=ids[index],
                sample=sample.key,
                answer=answer,
                references=list(sample.references),
                score=sample.score and sample.score(answer, sample.references),
                **({"details": dict(sample.details)} if sample.details else {}),
            )

        self._run(
            plan_answers(samples, self._batch_tokens, self.backend.batch_rows),
            ids,
            self._answers,
            [sample.length for sample in samples],
            compute,
            keep,
            label,
        )
        return [self._answers[identity] for identity in ids]

    def scores(self, spans: Sequence[TextSpan], label: str) -> "list[Score]":
        """The likelihood of each span."""
        ids = [span.digest() for span in spans]

        def compute(batch: Sequence[int]) -> "list[Score]":
            return self.backend.score([spans[index] for index in batch])

        def keep(index: int, score: "Score") -> None:
            nll = score.nll if math.isfinite(score.nll) else None
            self._journal.write(
                "likelihood", id=ids[index], sample=label, nll=nll, tokens=score.num_tokens, exact=score.exact
            )

        lengths = [len(span.token_ids) for span in spans]
        self._run(
            plan_scores(spans, min(SCORED_TOKENS, self._batch_tokens)), ids, self._scores, lengths, compute, keep, label
        )
        return [self._scores[identity] for identity in ids]

    def _identity(self, sample: Sample) -> str:
        """What the answer depends on: the question, and whether it may go on beyond the window."""
        cannot_differ = not (sample.may_be_cut and self._beyond_window)
        return sample.digest() if cannot_differ else digest(sample.digest(), "beyond the window")

    def _prompts(self, samples: Sequence[Sample]) -> list[Prompt]:
        tokens = prompt_tokens(self.backend.tokenizer, samples)
        return [self._prompt(*pair) for pair in zip(samples, tokens, strict=True)]

    def _prompt(self, sample: Sample, tokens: Sequence[int]) -> Prompt:
        """Tokens of a sample, and as many new ones as the window has room for; the last one is never run."""
        room = self.backend.window + 1 - len(tokens)
        if self._beyond_window:
            room = sample.max_new_tokens
        if room < 1:
            raise DataError(
                f"{sample.key}: its prompt has {len(tokens):,} tokens, the model's window {self.backend.window:,}",
                hint="choose shorter lengths, or use --beyond-window",
            )
        return Prompt(token_ids=tokens, max_new_tokens=min(sample.max_new_tokens, room), stop=sample.stop)

    def _run(
        self,
        batches: Sequence[Sequence[int]],
        ids: Sequence[str],
        known: dict[str, Value],
        sizes: Sequence[int],
        compute: Callable[[Sequence[int]], list[Value]],
        keep: Callable[[int, Value], None],
        label: str,
    ) -> None:
        """Compute the batches that hold anything unknown, one a process at a time."""
        todo = [batch for batch in batches if any(ids[index] not in known for index in batch)]
        if not todo:
            return
        # Counted in thousand tokens: what a sample costs depends on its length.
        total = sum(sizes[index] for batch in todo for index in batch)
        line = ProgressLine(math.ceil(total / 1000), f"{label}: thousand tokens") if self.here.is_main else None
        done = read = 0

        def inside(tokens: int) -> None:
            """A batch of long prompts takes minutes; the line moves with each piece of one that was read."""
            nonlocal read
            read += tokens
            if line is not None:
                line.update(min(done + read, total - 1) / 1000)

        self.backend.on_read = inside
        for begin in range(0, len(todo), self.here.size):
            turn = todo[begin : begin + self.here.size]
            mine = compute(turn[self.here.rank]) if self.here.rank < len(turn) else []
            for batch, values in zip(turn, self.here.gather(mine), strict=False):
                for index, value in zip(batch, values, strict=True):
                    done += sizes[index]
                    if ids[index] not in known:
                        known[ids[index]] = value
                        keep(index, value)
            self._journal.sync()
            if line is not None:
                line.update(done / 1000 if done < total else math.ceil(total / 1000))
            read = 0


def plan_answers(samples: Sequence[Sample], batch_tokens: int, batch_rows: int) -> list[list[int]]:
    """Indices of samples that share a batch: of one length and of answers as long, as many as fit; longest first.

    Longest first, so that memory runs out at once or never. A batch runs until its longest answer is there. All tasks'
    first samples come before their second ones, so that more samples change no batch that is known already, except the
    last of its kind.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for index in sorted(range(len(samples)), key=lambda index: samples[index].index):
        sample = samples[index]
        alike.setdefault((sample.length, sample.max_new_tokens), []).append(index)
    batches = []
    for (length, _), indices in sorted(alike.items(), reverse=True):
        rows = min(max(1, batch_tokens // length), batch_rows)
        batches += [indices[begin : begin + rows] for begin in range(0, len(indices), rows)]
    return batches


def plan_scores(spans: Sequence[TextSpan], batch_tokens: int) -> list[list[int]]:
    """Indices of spans that share a forward: of like length, longest first; equal questions lie side by side."""
    order = sorted(range(len(spans)), key=lambda i: (-len(spans[i].token_ids), hash(tuple(spans[i].token_ids[:-1])), i))
    batches: list[list[int]] = []
    for index in order:
        widest = len(spans[batches[-1][0]].token_ids) if batches else 0
        if not batches or (len(batches[-1]) + 1) * widest > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches
