"""The search over lengths, spaces and seeds, and what each part of it is worth: SmolLM2-135M on one GPU.

    python benchmarks/search_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf --books TRAIN --test-books VALIDATION \
        --lengths 16k,32k --variants paper,wide --seeds 0,1,2

Every search writes into --runs and resumes there. What it found is then scored, beside every closed form and any
--factors, on documents from other books: with a needle at the start, as in the paper; at ten depths that no search
uses; and with eight needles each. Those documents are the same for all, so that methods and seeds can be compared
document by document.
"""

import json
import sys
from pathlib import Path
from typing import Any

from common import arguments

from longrope2 import RescaleFactors
from longrope2.books import read_books
from longrope2.cli import LENGTH
from longrope2.distributed import world
from longrope2.files import package_versions, write_json
from longrope2.methods import rescale
from longrope2.models import LoadedModel, load
from longrope2.needles import make_needles
from longrope2.perplexity import scoring
from longrope2.records import SearchRecord
from longrope2.search.config import search_config
from longrope2.search.record import FACTORS, RECORD, measurement
from longrope2.search.run import CLOSED_FORMS, search

SEVERAL = {"keys": 8, "depth": tuple(eighth / 8 for eighth in range(8)), "documents": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "paper-released": {"attention_factor": "released"},
    "paper-searched": {"attention_factor": "searched"},
    "paper-staged": {"staged": True},
    "paper-depths": {"depth": (0.0, 0.5, 0.25, 0.75)},
    "paper-keys": SEVERAL,
    "wide": {"space": "wide", "keys": 1, "depth": (0.0, 0.5, 0.25, 0.75), "documents": 10},
    "wide-keys": {"space": "wide", **SEVERAL},
    "wide-start": {"space": "wide", "keys": 1, "depth": 0.0, "documents": 10},
    "wide-direct": {"space": "wide", "staged": False},
}
"""What differs from the paper's space, one thing at a time, and from the wide one, whose defaults are `wide-keys`."""
TEST_SEED = 2026
DEPTHS = tuple((2 * tenth + 1) / 20 for tenth in range(10))
PARTS: dict[str, dict[str, Any]] = {
    "start": {"depth": 0.0, "keys": 1},
    "depths": {"depth": DEPTHS, "keys": 1},
    "keys": {"depth": DEPTHS, "keys": 8},
}


class Test:
    """Documents that no search has seen, and the scores of factors on them."""

    def __init__(self, loaded: LoadedModel, length: int, books: str, count: int, parts: list[str]) -> None:
        self.loaded, self.length = loaded, length
        shelf = list(read_books(books))
        options: dict[str, Any] = {"length": length, "count": count, "seed": TEST_SEED, "from_start": True}
        self.documents = {part: make_needles(loaded.tokenizer, shelf, **options, **PARTS[part]) for part in parts}

    def score(self, factors: RescaleFactors) -> dict[str, Any]:
        """Perplexity, interval and exact answers on each set, and each document's loss."""
        found: dict[str, Any] = {}
        with scoring(self.loaded.model, factors) as scorer:
            for part, documents in self.documents.items():
                scores = [scorer(factors, [document])[0] for document in documents]
                nll = [round(score.nll / score.num_tokens, 5) for score in scores]
                answers = sum(len(document.needles) for document in documents)
                found[part] = {**vars(measurement(scores, answers)), "nll": nll}
        return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model")
    parser.add_argument("--books", help="to search on; default: the package's")
    parser.add_argument("--test-books", help="to compare on; default: the package's")
    parser.add_argument("--runs", type=Path, default=Path("runs/search-smollm2"))
    parser.add_argument("--lengths", default="32k")
    parser.add_argument("--variants", default="paper,wide", help=", ".join(VARIANTS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--test", type=int, default=20, help="documents of each kind to compare on")
    parser.add_argument("--parts", default=",".join(PARTS), help="kinds of documents to compare on")
    parser.add_argument("--forms", default=",".join(CLOSED_FORMS), help="closed forms to compare with; may be empty")
    parser.add_argument("--factors", nargs="*", default=[], type=Path, help="other factors to score, where they fit")
    parser.add_argument("--schedule", type=json.loads, default={}, help="JSON of options for all searches")
    parser.add_argument("--done", action="store_true", help="search nothing, score what has been found")
    options = parser.parse_args()
    loaded = load(options.model)
    for text in options.lengths.split(","):
        length = LENGTH.convert(text, None, None)
        rows = []
        for seed in map(int, options.seeds.split(",")):
            for variant in options.variants.split(","):
                folder = options.runs / f"{variant}-{text}-{seed}"
                if options.done:
                    if (folder / RECORD).exists():
                        found_there = SearchRecord.load(folder / RECORD).to_json()
                        rows.append((variant, seed, RescaleFactors.load(folder / FACTORS), found_there))
                    continue
                config = search_config(
                    target_length=length, books=options.books, seed=seed, **{**VARIANTS[variant], **options.schedule}
                )
                with world() as here:
                    factors, record = search(loaded, config, folder, here, compare_with=())
                rows.append((variant, seed, factors, record.to_json()))
                print(f"{variant} {text} seed {seed}: {record.seconds:.0f} s", file=sys.stderr, flush=True)
        test = None
        if options.test:
            test = Test(loaded, length, options.test_books, options.test, options.parts.split(","))
        forms = [name for name in CLOSED_FORMS if test and name in options.forms.split(",")]
        rows += [(name, None, rescale(name, loaded.info.rope, length), None) for name in forms]
        others = [(path.stem, None, RescaleFactors.load(path), None) for path in options.factors]
        rows += [row for row in others if test and row[2].target_length == length]
        found = []
        for name, seed, factors, result in rows:
            entry = {"name": name, "seed": seed, "factors": list(factors.long)}
            entry |= {"critical_dimension": factors.critical_dimension, "temperature": factors.long_attention_factor}
            if result is not None:
                kept = ("scores", "own_window", "document_evaluations", "seconds", "convergence")
                entry |= {key: result[key] for key in kept}
            found.append(entry | ({} if test is None else test.score(factors)))
            write_json(
                options.output / f"search-smollm2-{text}.json",
                {"length": length, "versions": package_versions("torch", "transformers"), "rows": found},
            )
            if test is not None:
                shown = [
                    f"{part} {found[-1][part]['perplexity']:.3f} ({found[-1][part]['exact']} exact)"
                    for part in test.documents
                ]
                print(
                    f"{name:>14} {'-' if seed is None else seed} d_rcd {factors.critical_dimension} "
                    f"T {factors.long_attention_factor:.3f}: {', '.join(shown)} of {options.test} documents",
                    flush=True,
                )


if __name__ == "__main__":
    main()
