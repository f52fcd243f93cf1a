"""The options of a calibration, and their limits."""

from dataclasses import dataclass
from typing import Any

from longrope2.books import read_books
from longrope2.errors import LongRopeError, all_problems
from longrope2.factors import RescaleFactors
from longrope2.needles import MOST_NEEDLES, check_length, depth_problems
from longrope2.options import Length, broken_limits, option, wrong_types

FRACTIONS = (0.25, 0.5, 0.75, 0.875, 1.0, 1.25, 1.5, 2.0)
"""The lengths measured unless others are named, in original windows."""


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """What is measured; saved with the result."""

    lengths: tuple[Length, ...] | None = option(None, "E.g. 2k,4k,6k,8k,10k; default: 1/4 to 2 windows.")
    """The original window is always among them."""
    documents: int = option(
        20, "Needle documents at each length; 5 or more, one for each depth.", least=2, most=MOST_NEEDLES
    )
    """Depths are taken in turn."""
    depths: tuple[float, ...] = option((0.0, 0.25, 0.5, 0.75, 1.0), "Positions of the needles.", command=False)
    books: str | None = option(None, "Folder, file or hub dataset; default: the package's books.", metavar="SOURCE")
    seed: int = option(0, "The same seed gives the same result.", least=0)
    store: bool = option(
        False, "Write the recommended length into the model's config.json.", elastic=True, recipe=False
    )

    def check(self, target_length: int, tokenizer: Any) -> None:
        """Refuse what cannot be measured."""
        problems = wrong_types(self) or broken_limits(self) + self._conflicts(target_length)
        if problems:
            raise LongRopeError(all_problems("calibration", problems), hint="see `longrope2 calibrate --help`")
        read_books(self.books, held_out=True)  # refuses what is not there, and reads nothing yet
        if self.lengths:
            check_length(tokenizer, min(self.lengths))

    def _conflicts(self, target_length: int) -> list[str]:
        found = depth_problems(self.depths, documents=self.documents)
        beyond = [length for length in self.lengths or () if length > target_length]
        if beyond:
            found.append(f"lengths {beyond} are beyond the target length {target_length} of the factors")
        return found

    def all_lengths(self, factors: RescaleFactors) -> list[int]:
        """The lengths to measure, the original window included."""
        window = factors.original_length
        wanted = self.lengths or [round(fraction * window) for fraction in FRACTIONS]
        return sorted({length for length in (*wanted, window) if length <= factors.target_length})
