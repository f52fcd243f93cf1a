"""What a search says while it runs: a line for people, its time in the journal, TensorBoard."""

from pathlib import Path

from longrope2.console import ProgressLine
from longrope2.search.evolution import Progress
from longrope2.search.journal import Journal
from longrope2.search.record import perplexity, shown


class Reporter:
    """Tells of each iteration; for the main process of a search."""

    def __init__(self, iterations: int, tokens: int, output: Path | None, journal: Journal) -> None:
        self._line = ProgressLine(iterations + 1, "search", log_every=0)
        self._journal = journal
        self._tokens = tokens
        self._events = None
        if output is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._events = SummaryWriter(str(output / "tensorboard"))
            except ImportError:
                pass

    def __call__(self, progress: Progress) -> None:
        """An iteration is done."""
        self._journal.sync()
        value = perplexity(progress.best_nll, self._tokens)
        saved = 1 - progress.evaluations / progress.exhaustive_evaluations
        self._line.update(
            progress.iteration + 1,
            f"best perplexity {shown(value)}, d_rcd {progress.best.critical_dimension}, "
            f"{progress.evaluations:,} evaluations, {saved:.0%} saved by racing",
        )
        if self._events is not None and value is not None:
            self._events.add_scalar("search/perplexity", value, progress.iteration)
            self._events.add_scalar("search/critical_dimension", progress.best.critical_dimension, progress.iteration)
            self._events.add_scalar("search/evaluations", progress.evaluations, progress.iteration)
            self._events.flush()
