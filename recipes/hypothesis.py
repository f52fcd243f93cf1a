"""Where the critical dimension of a model really lies: needle perplexity over d_rcd and the factor beyond it, and what
the search of the paper's space finds with several seeds, with factors up to the largest ratio.

    python recipes/hypothesis.py skewed uniform short --documents 20 --target-length 512 \\
        --ratios 1,1.5,2,3,4,6,8 -o results/tiny/hypothesis
    python recipes/hypothesis.py SmolLM2.gguf --target-length 16384 --ratios 1,1.25,1.5,2,3 --books BOOKS \\
        -o results/smollm2

Models are folders, files or `tiny`; each leaves OUTPUT/hypothesis-NAME-LENGTH.json, and is skipped when that is there.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from longrope2 import rescale, search_factors
from longrope2.books import read_books
from longrope2.console import ProgressLine
from longrope2.figures import figure
from longrope2.files import package_versions, write_json
from longrope2.malloc import keep_freed_memory
from longrope2.models import LoadedModel, describe, load
from longrope2.needles import make_needles
from longrope2.perplexity import scoring
from longrope2.records import HELD_OUT, IN_SAMPLE, SEARCHED, SearchRecord
from longrope2.search.record import RECORD

SEED = 7  # of the documents, which are the same for every model with the same tokenizer


def landscape(loaded: LoadedModel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Needle NLL of each document for NTK up to d_rcd and f·s from there on."""
    spec = loaded.info.rope
    held_out = True if options.books is None else None
    books = read_books(options.books, held_out=held_out)
    documents = make_needles(
        loaded.tokenizer, books, length=options.target_length, count=options.documents, seed=SEED, depth=0.0
    )
    dimensions = range(max(spec.ten_period_dimension - 2, 1), spec.critical_dimension + 3)
    cells = [(dimension, ratio) for dimension in dimensions for ratio in options.ratios]
    line, found = ProgressLine(len(cells), "landscape"), []
    first = rescale(loaded.info, "none", options.target_length)
    with scoring(loaded.model, first) as scorer:
        for number, (dimension, ratio) in enumerate(cells, start=1):
            factors = rescale(
                loaded.info,
                "longrope2",
                options.target_length,
                critical_dimension=dimension,
                right_factors=[ratio * options.target_length / spec.original_length],
                attention_factor=options.temperature,
            )
            scores = [scorer(factors, [document])[0] for document in documents]
            nll = [score.nll / score.num_tokens for score in scores]
            exact = sum(score.exact for score in scores) / len(scores)
            found.append({"critical_dimension": dimension, "ratio": ratio, "nll": nll, "exact": exact})
            line.update(number, f"d_rcd {dimension}, {ratio}·s: perplexity {math.exp(fmean(nll)):.3f}")
    return found


def searches(model: str, name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What the search finds, seed by seed."""
    found = []
    for seed in range(options.seeds):
        folder = options.output / "searches" / f"{name}-{options.target_length}-{seed}"
        factors = search_factors(
            model,
            options.target_length,
            folder,
            books=options.books,
            documents=options.documents,
            iterations=options.iterations,
            attention_factor=options.temperature,
            upper=max(options.ratios),
            seed=seed,
        )
        scores = {(row.method, row.part): row.perplexity for row in SearchRecord.load(folder / RECORD).scores}
        found.append(
            {
                "seed": seed,
                "critical_dimension": factors.critical_dimension,
                "factors": list(factors.long),
                "perplexity": scores[SEARCHED, IN_SAMPLE],
                "held_out_perplexity": {name: value for (name, part), value in scores.items() if part == HELD_OUT},
            }
        )
    return found


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Needle NLL over d_rcd and the factors from it on, a panel for each model; × is theory, circles are searches."""
    with figure(path, 1, len(found), (3.6 * len(found) + 0.8, 3.4)) as drawing:
        axes = drawing.axes[0]
        for axis, content in zip(axes, found, strict=True):
            cells = {(cell["critical_dimension"], cell["ratio"]): fmean(cell["nll"]) for cell in content["landscape"]}
            dimensions, ratios = (sorted({key[side] for key in cells}) for side in (0, 1))
            rows = [[cells[dimension, ratio] for dimension in dimensions] for ratio in ratios]
            image = axis.imshow(rows, cmap="viridis_r", vmin=0, vmax=math.log(10), aspect="auto", origin="lower")
            axis.plot(dimensions.index(content["theory"]), 0, "X", color="white", markeredgecolor="black", markersize=9)
            for search in content["searches"]:
                right = search["factors"][search["critical_dimension"] :]
                height = np.interp(fmean(right) / content["extension_ratio"], ratios, range(len(ratios)))
                place = search["critical_dimension"] - dimensions[0]
                axis.plot(place, height, "o", color="red", markersize=5, fillstyle="none")
            axis.set_xticks(range(0, len(dimensions), 2), dimensions[::2])
            axis.set_yticks(range(len(ratios)), [f"{ratio:g}·s" for ratio in ratios])
            axis.set_xlabel("critical dimension")
            axis.set_title(content["model"])
            axis.grid(visible=False)
        axes[0].set_ylabel("factors from there on")
        drawing.figure.colorbar(image, ax=axes[-1], label="nats per digit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--target-length", type=int, required=True)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--ratios", type=lambda text: [float(part) for part in text.split(",")], default="1,1.25,1.5,2")
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--books")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    keep_freed_memory()
    found = []
    for model in options.models:
        info = describe(model)
        name = Path(info.name).name
        path = options.output / f"hypothesis-{name}-{options.target_length}.json"
        if not path.exists():
            content = {
                "model": name,
                "target_length": options.target_length,
                "extension_ratio": options.target_length / info.rope.original_length,
                "temperature": options.temperature,
                "theory": info.rope.critical_dimension,
                "ten_periods": info.rope.ten_period_dimension,
                "largest_ratio": max(options.ratios),
                "landscape": landscape(load(info), options),
                "searches": searches(model, name, options),
                "versions": package_versions("torch", "transformers"),
            }
            write_json(path, content)
        found.append(json.loads(path.read_text(encoding="utf-8")))
    draw(found, options.output / f"hypothesis-{options.target_length}.png")


if __name__ == "__main__":
    main()
