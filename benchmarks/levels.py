"""Does a level of `train --memory` learn what the plain one learns? Loss curves of the same rows, against two seeds.

    python benchmarks/levels.py MODEL --factors factors.json --plan plan.jsonl --cache CACHE [--steps 100] [--lora 16]

Curves are means over ten steps. A level is compared with `plain` curve by curve; the peer is `plain` with another seed,
which has the same rows in another order. Writes results/benchmarks/levels-NAME.json.
"""

import tempfile
from pathlib import Path
from statistics import fmean

from common import arguments, report

from longrope2 import train
from longrope2.training.config import LEVELS
from longrope2.training.log import LOG, read_steps

BLOCK = 10
"""Steps of a point of a curve."""


def curve(folder: Path) -> list[float]:
    losses = [line.loss for line in read_steps(folder / LOG)]
    return [fmean(losses[begin : begin + BLOCK]) for begin in range(0, len(losses), BLOCK)]


def apart(one: list[float], other: list[float]) -> dict[str, float]:
    """How far two curves lie apart, in nats: with the sign, and without."""
    gaps = [a - b for a, b in zip(one, other, strict=True)]
    return {"mean": fmean(gaps), "mean_absolute": fmean(map(abs, gaps)), "last": gaps[-1]}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("model")
    parser.add_argument("--factors", required=True)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--cache")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--lora", type=int)
    parser.add_argument("--levels", default=",".join(LEVELS), help="to compare with plain")
    options = parser.parse_args()
    chosen = ("plain", *options.levels.split(","))
    names = [name for name in LEVELS if name in chosen and (options.lora or name != "4bit")]
    runs = {"other seed": {"memory": "plain", "seed": 1}} | {name: {"memory": name} for name in names}
    curves = {}
    with tempfile.TemporaryDirectory() as place:
        for name, chosen in runs.items():
            folder = Path(place) / name.replace(" ", "-")
            train(
                options.model, options.factors, options.plan, folder, cache=options.cache, steps=options.steps,
                batch_rows=options.batch_rows, learning_rate=options.learning_rate, lora=options.lora,
                save_every=options.steps, **chosen,
            )  # fmt: skip
            curves[name] = curve(folder)
            print(name, [round(loss, 4) for loss in curves[name]], flush=True)
    found = {name: apart(each, curves["plain"]) for name, each in curves.items() if name != "plain"}
    levels = {name: entry for name, entry in found.items() if name != "other seed"}
    widest = max(levels, key=lambda name: levels[name]["mean_absolute"])
    report(
        options, name=f"levels-{Path(options.model).stem.lower()}{'-lora' if options.lora else ''}",
        value=levels[widest]["mean_absolute"], unit=f"nats, {widest} against plain", peer="plain with another seed",
        peer_value=found["other seed"]["mean_absolute"], steps=options.steps, batch_rows=options.batch_rows,
        learning_rate=options.learning_rate, lora=options.lora, apart=found, curves=curves,
    )  # fmt: skip


if __name__ == "__main__":
    main()
