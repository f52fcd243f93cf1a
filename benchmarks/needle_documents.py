"""Which documents rank factor sets best? Losses of many sets on single-needle and eight-needle documents.

    python benchmarks/needle_documents.py SmolLM2-135M-Instruct.Q4_1.gguf --books VALIDATION
    python benchmarks/needle_documents.py --stored results/search/smollm2/needle-documents-32k.json

The sets are those that were searched and trained at 32k (results/), some of them at another temperature, and mutations
of good ones. Reported is Spearman's rank correlation, over sets, of the loss on a few documents with that on all
single-needle ones: eleven depths, each weighing the same.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import arguments
from scipy.stats import spearmanr

from longrope2 import perplexity
from longrope2.books import read_books
from longrope2.files import write_json
from longrope2.methods import longrope_temperature, rescale
from longrope2.models import load
from longrope2.needles import NeedleDocument, make_needles
from longrope2.rope import RopeSpec
from longrope2.search.space import Genome, SearchSpace

RESULTS = Path(__file__).parent.parent / "results"
LENGTH, DOCUMENTS, KEYS, MUTANTS, DRAWS = 32_768, 16, 8, 16, 60
TRAINED = ("yarn", "ntk", "longrope", "paper", "wide", "yarn-rcd", "ntk-rcd", "plain", "all", "wide-cold")
DEPTHS = tuple((2 * tenth + 1) / 20 for tenth in range(10))


def factor_sets(spec: RopeSpec) -> dict[str, tuple[list[float], float]]:
    """Factors and temperature by name."""
    found: dict[str, tuple[list[float], float]] = {}
    for name in TRAINED:
        row = json.loads((RESULTS / "smollm2" / "rows" / f"{name}.json").read_text(encoding="utf-8"))["factors"]
        found[f"row-{name}"] = (row["long"], row["long_attention_factor"])
    found["theory"] = (list(rescale("longrope2", spec, LENGTH, critical_dimension=20).long), 1.0)
    path = RESULTS / "search" / "smollm2" / "search-smollm2-32k.json"
    searched = [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["seed"] is not None]
    for row in searched:
        name, factors, temperature = f"{row['name']}-{row['seed']}", row["factors"], row["temperature"]
        found[name] = (factors, temperature)
        if temperature != 1.0 and row["seed"] in (0, 2):
            found[f"{name}-cold"] = (factors, 1.0)
        if row["name"] == "paper" and row["seed"] in (0, 3):
            found[f"{name}-released"] = (factors, longrope_temperature(spec.extension_ratio(LENGTH), 8192))
    parts = rescale("ntk-by-parts", spec, LENGTH)
    found["form-ntk-by-parts"] = (list(parts.long), parts.long_attention_factor)
    space = SearchSpace(spec=spec, target_length=LENGTH, kind="wide", attention_factor=None)
    rng = np.random.default_rng(0)
    good = [row for row in searched if row["name"] in ("wide", "paper-searched", "paper-released")]
    for number in range(MUTANTS):
        row = good[number % len(good)]
        c, factors = row["critical_dimension"], tuple(row["factors"])
        genome = Genome(
            critical_dimension=c, right=factors[c:], left=factors[:c], shape="given",
            attention_factor=row["temperature"],
        )  # fmt: skip
        genome = space.mutate(space.mutate(genome, rng), rng)
        found[f"mutant-{number}"] = (list(genome.factors()), genome.attention_factor)
    return found


def measure(model: str, books: str | None, path: Path) -> dict[str, Any]:
    """Nats per digit of every answer, by set, kind of document, document and needle; kept as it goes."""
    loaded = load(model)
    shelf = list(read_books(books))

    def documents(seed: int, **options: Any) -> list[NeedleDocument]:
        return make_needles(
            loaded.tokenizer, shelf, length=LENGTH, count=DOCUMENTS, seed=seed, from_start=True, **options
        )

    made = {
        "start": documents(2026, depth=0.0),
        "depths": documents(2026, depth=DEPTHS),
        "keys": documents(77, depth=tuple(key / KEYS for key in range(KEYS)), keys=KEYS),
    }
    base = rescale("none", loaded.info.rope, LENGTH)
    depths = [[needle.depth for needle in document.needles] for document in made["keys"]]
    result: dict[str, Any] = {"length": LENGTH, "depths": depths, "rows": []}
    with perplexity.scoring(loaded.model, base) as scorer:
        for name, (factors, temperature) in factor_sets(loaded.info.rope).items():
            given = replace(base, long=tuple(factors), long_attention_factor=temperature, method="longrope2")
            row: dict[str, Any] = {"name": name, "factors": factors, "temperature": temperature}
            for part, few in made.items():
                scores = [scorer.answers(given, [document])[0] for document in few]
                row[part] = [[round(score.nll / score.num_tokens, 5) for score in document] for document in scores]
            result["rows"].append(row)
            write_json(path, result)
    return result


def correlations(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By how few documents of which kind: rank correlation with the truth, over all sets and over the better half."""
    losses = {
        part: np.array([np.mean(row[part], axis=1) for row in result["rows"]]) for part in ("start", "depths", "keys")
    }
    truth = (len(DEPTHS) * losses["depths"].mean(1) + losses["start"].mean(1)) / (len(DEPTHS) + 1)
    better = np.argsort(truth)[: len(truth) // 2]
    rng = np.random.default_rng(0)

    def over(sets: Any, few: Callable[[], Any]) -> float:
        return round(float(np.mean([spearmanr(few()[sets], truth[sets]).statistic for _ in range(DRAWS)])), 2)

    found = {}
    for part, table in losses.items():
        for count in (1, 2, 4, 8):

            def few(table: Any = table, count: int = count) -> Any:
                return table[:, rng.choice(DOCUMENTS, count, replace=False)].mean(1)

            found[f"{count} × {part}"] = {"all sets": over(slice(None), few), "better half": over(better, few)}
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--books", help="default: the package's")
    parser.add_argument("--stored", type=Path, help="measure nothing, report on this file")
    options = parser.parse_args()
    if options.stored:
        result = json.loads(options.stored.read_text(encoding="utf-8"))
    else:
        result = measure(options.model, options.books, options.output / "needle-documents-32k.json")
    print(f"{len(result['rows'])} sets")
    for name, found in correlations(result).items():
        print(f"{name:>12}: {found}")


if __name__ == "__main__":
    main()
