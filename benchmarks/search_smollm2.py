"""Racing against the paper's exhaustive schedule: SmolLM2-135M, 8k → 32k, the same seed, the same documents.

    python benchmarks/search_smollm2.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf --books PG19_VALIDATION

Both searches write into --runs and resume there, since an exhaustive one takes long.
"""

import math
from dataclasses import asdict
from pathlib import Path

import torch
from common import arguments, report

from longrope2.distributed import world
from longrope2.methods import rescale
from longrope2.models import load
from longrope2.perplexity import scoring, total
from longrope2.search.config import SearchConfig
from longrope2.search.evolution import EvolutionConfig
from longrope2.search.record import search_result
from longrope2.search.run import needle_documents, search


def flat_grid(loaded, config, documents) -> dict[str, float]:
    """Flat factors f·s from a critical dimension on: the coarse grid that a search has to beat."""
    rope, ratio = loaded.info.rope, loaded.info.rope.extension_ratio(config.target_length)
    found = {}
    with scoring(loaded.model, rescale("none", rope, config.target_length)) as scorer:
        for c in (14, 17, 20):
            for f in (1.0, 1.25, 1.5, 2.0):
                factors = rescale(
                    "longrope2", rope, config.target_length, critical_dimension=c, right_factors=[f * ratio]
                )
                scores = [scorer(factors, [document])[0] for document in documents]
                found[f"d_rcd {c}, {f:g}·s"] = total(scores).perplexity
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model")
    parser.add_argument("--books", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/search-smollm2"))
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--target-length", type=int, default=32_768)
    options = parser.parse_args()

    loaded = load(options.model)
    results = {}
    for race in ("statistical", "off"):
        config = SearchConfig(
            target_length=options.target_length,
            books=options.books,
            compiled=True,
            evolution=EvolutionConfig(iterations=options.iterations, race=race),
        )
        with world() as here:
            search(loaded, config, options.runs / race, here)
        results[race] = search_result(options.runs / race)
        print(race, results[race]["perplexity"], results[race]["document_evaluations"], flush=True)
    documents = needle_documents(loaded, config, config.target_length, note=print)
    grid = flat_grid(loaded, config, documents)
    raced, exhaustive = results["statistical"], results["off"]
    report(
        options,
        name="search-smollm2-32k",
        value=raced["document_evaluations"],
        unit="document evaluations",
        peer="the same search without racing (the paper's schedule)",
        peer_value=exhaustive["document_evaluations"],
        iterations=options.iterations,
        perplexity=raced["perplexity"],
        peer_perplexity=exhaustive["perplexity"],
        perplexity_ratio=raced["perplexity"] / exhaustive["perplexity"],
        nll=math.log(raced["perplexity"]),
        peer_nll=math.log(exhaustive["perplexity"]),
        critical_dimension=raced["critical_dimension"],
        peer_critical_dimension=exhaustive["critical_dimension"],
        closed_form_perplexity=raced["closed_form_perplexity"],
        flat_grid_perplexity=grid,
        seconds=raced["seconds"],
        peer_seconds=exhaustive["seconds"],
        config=asdict(config),
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    )


if __name__ == "__main__":
    main()
