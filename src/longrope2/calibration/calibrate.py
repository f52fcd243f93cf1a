"""The answers of needle documents under the original RoPE and under the long one, length by length."""

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from longrope2.books import read_books
from longrope2.calibration.config import CalibrationConfig
from longrope2.calibration.rule import conclude
from longrope2.console import ProgressLine, say
from longrope2.errors import DataError, FactorsError, LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.files import only_one, package_versions
from longrope2.journal import JournalFile
from longrope2.models import LoadedModel, weights_fingerprint
from longrope2.needles import NeedleDocument, documents_digest, make_needles
from longrope2.options import identity
from longrope2.perplexity import Score, Scorer, scoring

SCORES = "scores.jsonl"


def calibrate(
    loaded: LoadedModel, factors: RescaleFactors, config: CalibrationConfig, output: Path | None = None
) -> dict[str, Any]:
    """Measure, and recommend a switch length; all of it as JSON values.

    What is scored goes into the folder `output` at once, and is taken from there by a run that goes on.
    """
    require_switch(factors)
    config.check(factors.target_length, loaded.tokenizer)
    subject = {
        "model": loaded.info.name,
        "revision": loaded.info.revision,
        "config": identity(config),
        "factors": factors.to_json(),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
    }
    lengths = config.all_lengths(factors)
    # The longest first: whatever else is wrong shows there, before short lengths are passed over as too short.
    found = {length: _documents(loaded, config, length, factors.original_length) for length in reversed(lengths)}
    by_length = {length: found[length] for length in lengths if found[length]}
    sides = one_sided(factors)
    progress = ProgressLine(sum(map(len, by_length.values())) * len(sides), "calibrate")
    points = []
    documents_made = documents_digest(document for made in by_length.values() for document in made)
    header = {**subject, "weights": weights_fingerprint(loaded.info), "documents": documents_made}
    alone = only_one(output, "another process is calibrating there")
    with alone, closing(_Journal(output, header)) as journal, scoring(loaded.model, factors) as scorer:
        for length, documents in by_length.items():
            scores: dict[str, list[Score]] = {}
            for side, side_factors in sides.items():
                scores[side] = []
                for number, document in enumerate(documents):
                    key = f"{length}/{side}/{number}"
                    if key not in journal.scores:
                        journal.keep(key, _score(scorer, side_factors, document))
                    scores[side].append(journal.scores[key])
                    progress.advance(text=f"{length:,} tokens")
            points.append(_point(length, config.depths, scores))
    return {
        "method": factors.method,
        "original_length": factors.original_length,
        "target_length": factors.target_length,
        **conclude(points, factors.original_length),
        "points": points,
        **subject,
        "versions": package_versions("torch", "transformers"),
    }


class _Journal(JournalFile):
    """Scores as they come; without a folder nothing is kept."""

    job, verb = "calibration", "calibrate"

    def __init__(self, output: Path | None, header: dict[str, Any]) -> None:
        self.scores: dict[str, Score] = {}
        super().__init__(output and output / SCORES, header)
        if self.scores:
            say(f"resuming: {len(self.scores):,} scores found in {output}")

    def keep(self, key: str, score: Score) -> None:
        self.scores[key] = score
        self.append({"type": "score", "key": key, **asdict(score)})

    def take(self, entry: dict[str, Any]) -> None:
        self.scores[str(entry["key"])] = Score(float(entry["nll"]), int(entry["num_tokens"]), bool(entry["exact"]))


def one_sided(factors: RescaleFactors) -> dict[str, RescaleFactors]:
    """The same factors with one side at every length: the original RoPE, or the long one."""
    return {
        "original": replace(factors, long=factors.short, long_attention_factor=factors.short_attention_factor),
        "long": factors.long_everywhere(),
    }


def require_switch(factors: RescaleFactors) -> None:
    """Refuse factors that are one RoPE for every length."""
    if not factors.switches:
        raise FactorsError(
            f"these factors (method {factors.method!r}) are one RoPE for every length: there is nothing to switch",
            hint="calibrate a model with two, such as `longrope2 factors` and `longrope2 search` give",
        )


def _documents(
    loaded: LoadedModel, config: CalibrationConfig, length: int, original_length: int
) -> list[NeedleDocument]:
    """Nothing for a default length that is too short for the template; a length that was named must fit."""
    try:
        return make_needles(
            loaded.tokenizer,
            read_books(config.books, held_out=True),
            length=length,
            count=config.documents,
            seed=config.seed,
            depth=config.depths,
            note=_quiet,
        )
    except DataError:
        if config.lengths or length >= original_length:
            raise
        say(f"{length:,} tokens are too few for a needle document: not measured")
        return []


def _score(scorer: Scorer, factors: RescaleFactors, document: NeedleDocument) -> Score:
    # One document at a time, so that a result never depends on what else was scored with it.
    score = scorer(factors, [document])[0]
    if not math.isfinite(score.nll):
        raise LongRopeError(
            f"the model's logits are not finite at {len(document.token_ids):,} tokens",
            hint="its weights may be damaged, or too large for this dtype",
        )
    return score


def _point(length: int, depths: Sequence[float], scores: Mapping[str, list[Score]]) -> dict[str, Any]:
    """One length: both sides, and their paired difference with its standard error."""
    wanted = list(islice(cycle(depths), len(scores["long"])))  # as make_needles takes them
    nll = {side: [score.nll / score.num_tokens for score in found] for side, found in scores.items()}
    differences = [a - b for a, b in zip(nll["original"], nll["long"], strict=True)]
    point: dict[str, Any] = {
        "length": length,
        "gain": statistics.fmean(differences),
        "gain_error": statistics.stdev(differences) / math.sqrt(len(differences)),
    }
    for side, found in scores.items():
        point[side] = {
            "nll": statistics.fmean(nll[side]),
            "nll_error": statistics.stdev(nll[side]) / math.sqrt(len(found)),
            "exact": statistics.fmean(score.exact for score in found),
            "worst": _worst_depth(wanted, found),
            "by_document": [
                {"depth": depth, "nll": value, "exact": score.exact}
                for depth, value, score in zip(wanted, nll[side], found, strict=True)
            ],
        }
    return point


def _worst_depth(depths: Sequence[float], scores: Sequence[Score]) -> float:
    """The least share of exact answers over the depths."""
    return min(
        statistics.fmean(score.exact for at, score in zip(depths, scores, strict=True) if at == depth)
        for depth in set(depths)
    )


def _quiet(_: str) -> None:
    """Needles may serve books again; at a dozen lengths that need not be told each time."""
