"""What a search says while it runs: a line for people, its time in the journal, TensorBoard."""

from pathlib import Path

from longrope2.console import ProgressLine
from longrope2.search.evolution import EvolutionConfig, Progress
from longrope2.search.journal import Journal
from longrope2.search.record import perplexity, shown

RACED = 0.25
"""The share of evaluations that racing leaves over, about; for the first estimate of how long a search takes."""
LOG_SECONDS = 60.0
"""Between lines in a log; a document of 128k tokens takes an 8B model ten seconds."""


class Reporter:
    """Tells of each iteration, and of what is scored meanwhile; for the main process of a search."""

    def __init__(
        self, config: EvolutionConfig, num_documents: int, tokens: int, output: Path | None, journal: Journal
    ) -> None:
        self._line = ProgressLine(config.iterations + 1, "search", log_every=LOG_SECONDS)
        self._iteration = self._scored = 0
        self._expected = config.population * num_documents * (RACED if config.race == "statistical" else 1.0)
        self._journal = journal
        self._tokens = tokens
        self._events = None
        if output is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._events = SummaryWriter(str(output / "tensorboard"))
            except ImportError:
                pass

    def scored(self, count: int) -> None:
        """So many candidates were scored on a document."""
        self._scored += count
        part = "first population" if self._iteration == 0 else f"iteration {self._iteration}"
        share = min(self._scored / self._expected, 0.99)
        self._line.update(self._iteration + share, f"{part}: {self._scored:,} scored")

    def __call__(self, progress: Progress) -> None:
        """An iteration is done."""
        self._journal.sync()
        self._iteration = progress.iteration + 1
        self._expected, self._scored = max(self._scored, 1), 0
        value = perplexity(progress.best_nll, self._tokens)
        saved = 1 - progress.evaluations / progress.exhaustive_evaluations
        self._line.update(
            self._iteration,
            f"best perplexity {shown(value)}, d_rcd {progress.best.critical_dimension}, "
            f"{progress.evaluations:,} evaluations, {saved:.0%} saved by racing",
            always=True,
        )
        if self._events is not None and value is not None:
            self._events.add_scalar("search/perplexity", value, progress.iteration)
            self._events.add_scalar("search/critical_dimension", progress.best.critical_dimension, progress.iteration)
            self._events.add_scalar("search/evaluations", progress.evaluations, progress.iteration)
            self._events.flush()
