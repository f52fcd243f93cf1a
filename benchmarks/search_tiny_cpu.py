"""A useful search on a laptop: the tiny model, 16 times its window, against the same without racing."""

import tempfile
from pathlib import Path

import torch
from common import arguments, report

from longrope2.distributed import world
from longrope2.models import load
from longrope2.search.config import SearchConfig
from longrope2.search.evolution import EvolutionConfig
from longrope2.search.record import search_result
from longrope2.search.run import search


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(2)
    loaded = load("tiny", device="cpu")
    results = {}
    for race in ("statistical", "off"):
        schedule = EvolutionConfig(population=16, parents=8, iterations=6, mutations=4, crossovers=4, race=race)
        config = SearchConfig(target_length=4096, documents=4, space="wide", evolution=schedule)
        with tempfile.TemporaryDirectory() as folder, world() as here:
            search(loaded, config, Path(folder), here)
            results[race] = search_result(Path(folder))
    raced, exhaustive = results["statistical"], results["off"]
    report(
        options,
        name="search-tiny-cpu",
        value=raced["seconds"],
        unit="seconds",
        peer="the same search without racing",
        peer_value=exhaustive["seconds"],
        perplexity=raced["perplexity"],
        peer_perplexity=exhaustive["perplexity"],
        document_evaluations=raced["document_evaluations"],
        peer_document_evaluations=exhaustive["document_evaluations"],
        closed_form_perplexity=raced["closed_form_perplexity"],
    )


if __name__ == "__main__":
    main()
