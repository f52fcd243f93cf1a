"""Where to switch: needle retrieval with the original and with the long RoPE, length by length."""

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from longrope2.books import read_books
from longrope2.console import ProgressLine, say, show_json, show_table, warn
from longrope2.errors import (
    DataError,
    FactorsError,
    LongRopeError,
    MissingExtraError,
    all_problems,
    below_minimum,
    out_of_range,
)
from longrope2.factors import RescaleFactors
from longrope2.figures import draw_calibration
from longrope2.files import check_writable, only_one, package_versions, write_json
from longrope2.generation.saved import carries_factors, read_factors, store_switch_length
from longrope2.journal import JournalFile
from longrope2.models import LoadedModel, check_factors, describe, load, load_tokenizer, weights_fingerprint
from longrope2.needles import (
    MOST_DOCUMENTS,
    NeedleDocument,
    check_length,
    depth_problems,
    documents_digest,
    make_needles,
)
from longrope2.perplexity import Score, Scorer, scoring

FRACTIONS = (0.25, 0.5, 0.75, 0.875, 1.0, 1.25, 1.5, 2.0)
"""The lengths measured unless others are named, in original windows."""
CONFIDENCE, TOLERANCE = 2.0, 0.01
"""Results count as the same within so many standard errors and nats per token: a model that is sure of its answers
has errors so small that the former alone would tell 0.00002 from 0.00004."""
RESULT, SCORES = "calibration.json", "scores.jsonl"
RETRIEVES = 0.5
"""The share of exact answers, at the depth where it is least, from which on a RoPE retrieves."""


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """What is measured; saved with the result."""

    lengths: tuple[int, ...] | None = None
    """None: the fractions above. The original window is always among them."""
    documents: int = 20
    """At each length; depths are taken in turn."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    books: str | None = None
    seed: int = 0

    def check(self, target_length: int, tokenizer: Any) -> None:
        """Refuse what cannot be measured."""
        problems = below_minimum(self, seed=0) + out_of_range(self, documents=(2, MOST_DOCUMENTS))
        problems += depth_problems(self.depths, documents=self.documents)
        beyond = [length for length in self.lengths or () if length > target_length]
        if beyond:
            problems.append(f"lengths {beyond} are beyond the target length {target_length} of the factors")
        if problems:
            raise LongRopeError(all_problems("calibration", problems), hint="see `longrope2 calibrate --help`")
        read_books(self.books, held_out=True)  # refuses what is not there, and reads nothing yet
        if self.lengths:
            check_length(tokenizer, min(self.lengths))

    def all_lengths(self, factors: RescaleFactors) -> list[int]:
        """The lengths to measure, the original window included."""
        window = factors.original_length
        wanted = self.lengths or [round(fraction * window) for fraction in FRACTIONS]
        return sorted({length for length in (*wanted, window) if length <= factors.target_length})


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A switch length, and how far the measurement can tell it from others."""

    switch_length: int
    lowest: int
    highest: int
    """The measured lengths that are as good, within the error."""


def is_more(difference: float, error: float) -> bool:
    """Whether a difference in NLL is beyond its error, and large enough to matter."""
    return difference > CONFIDENCE * error + TOLERANCE


def recommend(gains: Mapping[int, tuple[float, float]], original_length: int) -> Recommendation:
    """The rule. `gains`: by length, the answer's NLL under the original RoPE less that under the long one.

    Each gain comes with its standard error. A switch length S pays the original RoPE's NLL at the measured
    lengths up to S and the long one's beyond. Of all measured lengths that are as good as the best one, within
    the errors, the one nearest to the original window is taken: the paper's choice stands unless the numbers
    speak against it.
    """
    lengths = sorted(gains)

    def excess(worse: int, better: int) -> tuple[float, float]:
        """How much more NLL one switch length pays than another, and the error of that."""
        low, high = sorted((worse, better))
        between = [gains[length] for length in lengths if low < length <= high]
        sign = 1 if worse > better else -1
        return sign * sum(gain for gain, _ in between), math.hypot(*(error for _, error in between))

    best = min(lengths, key=lambda length: excess(length, lengths[0])[0])
    as_good = []
    for length in lengths:
        more, error = excess(length, best)
        if not is_more(more, error):
            as_good.append(length)
    nearest = min(as_good, key=lambda length: abs(length - original_length))
    return Recommendation(switch_length=nearest, lowest=min(as_good), highest=max(as_good))


def calibrate(
    loaded: LoadedModel, factors: RescaleFactors, config: CalibrationConfig, output: Path | None = None
) -> dict[str, Any]:
    """Measure, and recommend a switch length; all of it as JSON values.

    What is scored goes into the folder `output` at once, and is taken from there by a run that goes on.
    """
    _require_switch(factors)
    config.check(factors.target_length, loaded.tokenizer)
    subject = {
        "model": loaded.info.name,
        "revision": loaded.info.revision,
        "config": asdict(config),
        "factors": factors.to_json(),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
    }
    lengths = config.all_lengths(factors)
    # The longest first: whatever else is wrong shows there, before short lengths are passed over as too short.
    found = {length: _documents(loaded, config, length, factors.original_length) for length in reversed(lengths)}
    by_length = {length: found[length] for length in lengths if found[length]}
    sides = one_sided(factors)
    progress = ProgressLine(sum(map(len, by_length.values())) * len(sides), "calibrate")
    done, points = 0, []
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
                    done += 1
                    progress.update(done, f"{length:,} tokens")
            points.append(_point(length, config.depths, scores))
    return {
        "method": factors.method,
        "original_length": factors.original_length,
        "target_length": factors.target_length,
        **_conclusions(points, factors.original_length),
        "points": points,
        **subject,
        "versions": package_versions("torch", "transformers"),
    }


class _Journal:
    """Scores as they come; without a folder nothing is kept."""

    def __init__(self, output: Path | None, header: dict[str, Any]) -> None:
        self.scores: dict[str, Score] = {}
        path = output and output / SCORES
        self._file = JournalFile(path, header, job="calibration", verb="calibrate", take=self._take)
        if self.scores:
            say(f"resuming: {len(self.scores):,} scores found in {output}")

    def keep(self, key: str, score: Score) -> None:
        self.scores[key] = score
        self._file.append({"type": "score", "key": key, **asdict(score)})

    def close(self) -> None:
        self._file.close()

    def _take(self, entry: dict[str, Any]) -> None:
        self.scores[str(entry["key"])] = Score(float(entry["nll"]), int(entry["num_tokens"]), bool(entry["exact"]))


def one_sided(factors: RescaleFactors) -> dict[str, RescaleFactors]:
    """The same factors with one side at every length: the original RoPE, or the long one."""
    return {
        "original": replace(factors, long=factors.short, long_attention_factor=factors.short_attention_factor),
        "long": factors.long_everywhere(),
    }


def run_calibrate(
    model: str,
    *,
    factors_file: Path | None,
    output: Path | None,
    store: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """`longrope2 calibrate`: measure, write, store if asked, and print."""
    factors = None if factors_file is None else RescaleFactors.load(factors_file)
    info = describe(model, original_length=factors.original_length if factors else None)
    config = CalibrationConfig(**{name: value for name, value in options.items() if value is not None})
    if store and (factors is not None or not (Path(info.location) / "config.json").is_file()):
        raise LongRopeError(
            "--store writes into the config.json of a folder that has its own factors",
            hint="leave out --store and pass the switch length to `longrope2 generate --switch-length`",
        )
    # Before an 8B model is loaded for nothing.
    if factors is not None:
        _require_switch(factors)
        check_factors(factors, info)
    elif not carries_factors(info):
        raise FactorsError(f"no factors were given, and {model} has none of its own", hint="pass --factors FILE")
    config.check(factors.target_length if factors else info.reading.window, load_tokenizer(info))
    if output is not None:
        check_writable(output / RESULT)
    loaded = load(info)
    try:
        result = calibrate(loaded, factors or read_factors(loaded.model.config), config, output)
    except torch.OutOfMemoryError as error:
        raise LongRopeError(
            f"out of memory ({loaded.model.dtype} on {loaded.model.device})", hint="name shorter --lengths"
        ) from error
    # On the screen first: a disk that is full takes nothing back.
    if as_json:
        show_json(result)
    else:
        show(result)
    if output is not None:
        write_json(output / RESULT, result)
        (output / SCORES).unlink(missing_ok=True)  # they are in the result
        _draw(output, result)
    if store:
        store_switch_length(Path(info.location), result["switch_length"])
        say(f"stored switch length {result['switch_length']:,} in {info.location}")


def show(result: Mapping[str, Any]) -> None:
    """Print a calibration as a table with its conclusions."""
    rows = [
        [
            f"{point['length']:,}",
            *(
                text
                for side in ("original", "long")
                for text in (f"{point[side]['nll']:.3f}", f"{point[side]['exact']:.0%}", f"{point[side]['worst']:.0%}")
            ),
            f"{point['gain']:+.3f} ± {point['gain_error']:.3f}",
        ]
        for point in result["points"]
    ]
    columns = ["tokens", *(f"{side} {what}" for side in ("original", "long") for what in ("NLL", "exact", "worst"))]
    show_table(
        f"{result['model']}: answers of needle documents under the original RoPE and the long one ({result['method']})",
        [*columns, "long better by"],
        rows,
        caption="NLL: nats per answer token; exact: answers right in every token; worst: the same at the depth where "
        f"it is least; ±: one standard error over {result['config']['documents']} documents\n" + conclusion(result),
    )


def conclusion(result: Mapping[str, Any]) -> str:
    """The recommendation in words."""
    stops, better = result["original_stops"], result["long_better_from"]
    lines = [
        "the original RoPE retrieves at every measured length"
        if stops is None
        else f"the original RoPE stops retrieving at {stops:,} tokens",
        "the long RoPE is not better at the longest measured length"
        if better is None
        else f"the long RoPE is better from {better:,} tokens on",
        f"recommended switch length: {result['switch_length']:,}",
    ]
    low, high = result["as_good_from"], result["as_good_to"]
    if low != high:
        lines[-1] += f" (of the measured lengths, those from {low:,} to {high:,} are as good within the error)"
    return "\n".join(lines)


def _require_switch(factors: RescaleFactors) -> None:
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


def _conclusions(points: Sequence[Mapping[str, Any]], original_length: int) -> dict[str, Any]:
    gains = {point["length"]: (point["gain"], point["gain_error"]) for point in points}
    found = recommend(gains, original_length)
    failing = [point["length"] for point in points if point["original"]["worst"] < RETRIEVES]
    better_from = None
    for length in sorted(gains, reverse=True):
        gain, error = gains[length]
        if not is_more(gain, error):
            break
        better_from = length
    if failing and failing[0] == points[0]["length"]:
        warn(
            f"under its original RoPE the model does not retrieve at {failing[0]:,} tokens, the shortest length "
            "measured: take the recommendation as a guess"
        )
    return {
        "switch_length": found.switch_length,
        "as_good_from": found.lowest,
        "as_good_to": found.highest,
        "original_stops": failing[0] if failing else None,
        "long_better_from": better_from,
    }


def _draw(output: Path, result: Mapping[str, Any]) -> None:
    try:
        draw_calibration(result, output / "calibration.png")
    except MissingExtraError as error:
        warn(f"no figure: {error}")


def _quiet(_: str) -> None:
    """Needles may serve books again; at a dozen lengths that need not be told each time."""
