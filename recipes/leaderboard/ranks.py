"""What, measured before training or after a little of it, predicts the needles found after all of it?

    python recipes/leaderboard/ranks.py -o results/smollm2/ranks-32k.json

Reads the finished rows of run.py that were trained alike, and what benchmarks/search_smollm2.py has measured on the
same factors. Prints Spearman's rank correlation of each measure with the share of needles found.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from longrope2.files import write_json
from longrope2.intervals import rank_correlation

RESULTS = Path(__file__).parents[2] / "results"
LENGTH, TOKENS = 32 * 1024, 20_054_016
STEP_TOKENS = 131_072
Row = dict[str, Any]


def trained_alike(folder: Path) -> dict[str, Row]:
    """The finished rows on the same mix, seed and number of tokens."""
    rows = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {
        name: row
        for name, row in rows.items()
        if (row["mix"], row.get("seed", 0), row["target_length"], row["cost"]["tokens"])
        == ("mix-32k", 0, LENGTH, TOKENS)
    }


def check_questions(rows: dict[str, Row]) -> None:
    """Stop if rows were asked for needles in other documents than most."""
    asked = {name: row["values"][f"niah/niah/{LENGTH}"]["asked"] for name, row in rows.items()}
    usual, _ = Counter(asked.values()).most_common(1)[0]
    if others := [name for name, digest in asked.items() if digest != usual]:
        raise SystemExit(f"{', '.join(others)}: measured on other needles than the rest; see README.md for the books")


def score(row: Row, suite: str) -> float | None:
    """A suite's score at the full length."""
    found = [entry["score"] for entry in row["scores"] if (entry["suite"], entry["length"]) == (suite, LENGTH)]
    return found[0] if found else None


def long_loss(row: Row, first: int, last: int) -> float:
    """The mean loss of long rows between two counts of tokens; the rows are the same for all."""
    losses = [loss for step, _, loss in row["losses"] if first < step * STEP_TOKENS <= last and loss is not None]
    return float(np.mean(losses))


def objectives(measured: list[Row], row: Row, part: str) -> float | None:
    """Nats per digit of these factors before training, if they were measured."""
    wanted = (row["factors"]["long"], row["factors"]["long_attention_factor"])
    for entry in measured:
        same = np.allclose(entry["factors"], wanted[0], atol=1e-9) and abs(entry["temperature"] - wanted[1]) < 1e-9
        if same and part in entry:
            return float(np.mean(entry[part]["nll"]))
    return None


def measures(rows: dict[str, Row], measured: list[Row], brief: dict[str, Row]) -> dict[str, dict[str, float]]:
    """Each measure by row, where it is known. Lower should mean better, so needles and factors count negatively."""
    made: dict[str, Callable[[str, Row], float | None]] = {
        "needle loss at the start": lambda _, row: objectives(measured, row, "start"),
        "needle loss at ten depths": lambda _, row: objectives(measured, row, "depths"),
        "needle loss, eight needles": lambda _, row: objectives(measured, row, "keys"),
        "temperature": lambda _, row: row["factors"]["long_attention_factor"],
        "factor at dimension 20, negative": lambda _, row: -row["factors"]["long"][20],
        "loss of long rows, first 1M tokens": lambda _, row: long_loss(row, 0, 1 << 20),
        "loss of long rows, 1M to 2M tokens": lambda _, row: long_loss(row, 1 << 20, 1 << 21),
        "loss of long rows, last 2M tokens": lambda _, row: long_loss(row, TOKENS - (1 << 21), TOKENS),
        "perplexity of books after training": lambda _, row: score(row, "perplexity"),
        "needles after 1.6M tokens, negative": lambda name, _: (
            -score(brief[f"brief-{name}"], "niah") if f"brief-{name}" in brief else None  # type: ignore[operator]
        ),
    }
    values = {label: {name: make(name, row) for name, row in rows.items()} for label, make in made.items()}
    return {
        label: {name: value for name, value in by_row.items() if value is not None} for label, by_row in values.items()
    }


def correlation(values: dict[str, float], needles: dict[str, float]) -> Row | None:
    """Spearman's correlation of a measure with the needles missed, its p-value and a bootstrap interval over rows."""
    found = rank_correlation(list(values.values()), [-needles[name] for name in values])
    if found is None:
        return None
    spearman, p, low, high = found
    return {
        "rows": len(values), "spearman": round(spearman, 3), "p": round(p, 4), "low": round(low, 3),
        "high": round(high, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    folder = RESULTS / "smollm2" / "rows"
    rows = trained_alike(folder)
    brief = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("brief-*.json")}
    check_questions(rows | brief)
    path = RESULTS / "search" / "smollm2" / "search-smollm2-32k.json"
    measured = json.loads(path.read_text(encoding="utf-8"))["rows"]
    needles = {name: value for name, row in rows.items() if (value := score(row, "niah")) is not None}
    cold = {name: row for name, row in rows.items() if row["factors"]["long_attention_factor"] == 1}
    found = {}
    for group, chosen in {"all rows": rows, "rows at temperature 1": cold}.items():
        print(group)
        found[group] = {
            label: correlation(values, needles) for label, values in measures(chosen, measured, brief).items()
        }
        for label, entry in found[group].items():
            print(f"{label:>36}: {entry}")
    if options.output:
        write_json(options.output, {"needles": needles, "correlations": found})


if __name__ == "__main__":
    main()
