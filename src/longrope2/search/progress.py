"""What a search says while it runs: a line for people, its time in the journal, and what `tracking.py` hands on."""

from longrope2.console import ProgressLine, say, warn
from longrope2.errors import counted
from longrope2.search.config import SearchConfig
from longrope2.search.evolution import Progress
from longrope2.search.journal import Journal
from longrope2.search.racing import LEFT_BY_RACING
from longrope2.search.record import perplexity, shown
from longrope2.tracking import Tracking

LOG_SECONDS = 60.0
"""Between lines in a log; a document of 128k tokens takes an 8B model ten seconds."""


class Reporter:
    """Reports each iteration, and what is scored meanwhile; for the main process of a search."""

    def __init__(
        self, config: SearchConfig, num_stages: int, chance: float | None, journal: Journal, tracking: Tracking | None
    ) -> None:
        schedule = config.evolution
        self._line = ProgressLine(num_stages * (schedule.iterations + 1), "search", log_every=LOG_SECONDS)
        self._config, self._journal, self._chance = config, journal, chance
        self._per_stage = schedule.iterations + 1
        self._expected = schedule.population * config.documents * LEFT_BY_RACING[schedule.race]
        self._stage = self._length = self._tokens = self._iteration = self._scored = 0
        self._evaluations = 0
        self._guessing = False
        self._tracking = tracking
        if tracking is not None:
            tracking.begin(0)

    def begin(self, stage: int, length: int, tokens: int) -> None:
        """A stage starts, on documents of `length` tokens, of which `tokens` are scored in all."""
        self._stage, self._length, self._tokens = stage, length, tokens

    @property
    def _place(self) -> str:
        part = "first population" if self._iteration % self._per_stage == 0 else f"iteration {self._iteration}"
        return f"{self._length:,} tokens, {part}"

    def scored(self, count: int) -> None:
        """Count candidates that were scored on a document."""
        self._scored += count
        share = min(self._scored / self._expected, 0.99)
        done = self._stage * self._per_stage + self._iteration + share
        self._line.update(done, f"{self._place}: {self._scored:,} scored")

    def iteration(self, progress: Progress) -> None:
        """An iteration is done."""
        value = perplexity(progress.best_nll, self._tokens)
        self._journal.report(
            self._stage,
            progress.iteration,
            length=self._length,
            perplexity=value,
            critical_dimension=progress.best.critical_dimension,
            evaluations=progress.evaluations,
        )
        self._journal.sync()
        self._expected, self._scored = max(self._scored, 1), 0
        self._iteration = (progress.iteration + 1) % self._per_stage
        done = self._stage * self._per_stage + progress.iteration + 1
        saved = 1 - progress.evaluations / progress.exhaustive_evaluations
        self._line.update(
            done,
            f"{self._length:,} tokens: best perplexity {shown(value)}, d_rcd {progress.best.critical_dimension}, "
            f"{counted(progress.evaluations, 'evaluation')}, {saved:.0%} saved by racing",
            always=True,
        )
        self._compare_with_chance(value)
        if self._tracking is not None and value is not None:
            found = {
                "perplexity": value,
                "critical_dimension": progress.best.critical_dimension,
                "evaluations": progress.evaluations,
            }
            self._tracking.log({f"search/{name}": number for name, number in found.items()}, done - 1)

    def _compare_with_chance(self, value: float | None) -> None:
        """Say where no candidate does better than guessing, and where that ends."""
        if self._chance is None:
            return
        guessing = value is None or value >= self._chance
        if guessing and not self._guessing:
            warn(
                f"all candidates are worse than guessing digits: the best has a perplexity of {shown(value)} at "
                f"{self._length:,} tokens, guessing {self._chance:.3g}. The objective says little there"
                f"{self._advice()}"
            )
        if self._guessing and not guessing:
            say(f"a candidate is better than guessing digits: {shown(value)}, guessing {self._chance:.3g}")
        self._guessing = guessing

    def _advice(self) -> str:
        """What brings a signal back that this search does without: a temperature, alone or in the wide space."""
        if self._config.attention_factor != 1.0:
            return ""
        return "; a temperature brings a signal back: --attention-factor searched, or --space wide"
