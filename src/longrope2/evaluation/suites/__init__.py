"""Every suite, one file each: whatever needs a suite's name, title, tasks, columns or cost asks here."""

from collections.abc import Iterable

from longrope2.evaluation.suite import Suite
from longrope2.evaluation.suites import (
    babilong,
    infinitebench,
    loft,
    longbench,
    longppl,
    niah,
    passkey,
    perplexity,
    ruler,
    short,
)
from longrope2.records import Measured

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        ruler.SUITE,
        *niah.SUITES,
        passkey.SUITE,
        babilong.SUITE,
        perplexity.SUITE,
        longppl.SUITE,
        infinitebench.SUITE,
        longbench.SUITE,
        loft.SUITE,
        short.SUITE,
    )
}
"""In the order of tables."""


def suites_of(scores: Iterable[Measured]) -> list[Suite]:
    """The suites that scores belong to."""
    present = {score.suite for score in scores}
    return [suite for suite in SUITES.values() if suite.name in present]


def summarised() -> list[Suite]:
    """Those in the report's summary; the ones it draws as heatmaps come first."""
    return sorted((suite for suite in SUITES.values() if suite.summary), key=lambda suite: not suite.has_grid)


def listed() -> str:
    """All of them in a sentence."""
    names = [f"{suite.name} ({suite.note})" if suite.note else suite.name for suite in SUITES.values()]
    return f"{', '.join(names[:-1])}, and {names[-1]}"
