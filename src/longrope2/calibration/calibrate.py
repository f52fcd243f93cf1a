"""`longrope2 calibrate`: needle answers under the original RoPE and under the long one, length by length."""

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from longrope2.books import read_books
from longrope2.calibration.config import CalibrationConfig
from longrope2.calibration.rule import recommend
from longrope2.console import ProgressLine, quiet, say, warn
from longrope2.errors import DataError, FactorsError, LongRopeError, MissingExtraError
from longrope2.factors import RescaleFactors
from longrope2.figures import draw_calibration
from longrope2.files import package_versions
from longrope2.generation.saved import carries_factors, read_factors, store_switch_length
from longrope2.journal import JournalFile
from longrope2.models import LoadedModel, check_factors, describe, load, load_tokenizer, weights_fingerprint
from longrope2.needles import NeedleDocument, documents_digest, make_needles
from longrope2.options import identity
from longrope2.perplexity import Score, Scorer, scoring
from longrope2.records import CalibrationRecord, MeasuredDocument, MeasuredLength, MeasuredSide, Table
from longrope2.runfolder import RunFolder

RESULT, SCORES = "calibration.json", "scores.jsonl"
_folder = partial(RunFolder, command="calibrate", verb="calibrating", marks=(RESULT, SCORES))


def calibration_table(record: CalibrationRecord) -> Table:
    """One row per length, and the conclusions below."""
    rows = [
        [
            f"{point.length:,}",
            *(
                text
                for side in (point.original, point.long)
                for text in (f"{side.nll:.3f}", f"{side.exact:.0%}", f"{side.worst:.0%}")
            ),
            f"{point.gain:+.3f} ± {point.gain_error:.3f}",
        ]
        for point in record.points
    ]
    measures = [f"{side} {what}" for side in ("original", "long") for what in ("NLL", "exact", "worst")]
    return Table(
        title=f"{record.model}: answers of needle documents under the original RoPE and the long one ({record.method})",
        columns=["tokens", *measures, "long better by"],
        rows=rows,
        caption="NLL: nats per answer token; exact: answers right in every token; worst: the same at the depth where "
        f"it is least; ±: one standard error over {record.config['documents']} documents\n{record.in_words()}",
    )


def calibrate(
    model: str, config: CalibrationConfig, output: Path | None = None, *, factors: Path | None = None
) -> CalibrationRecord:
    """Measure the best length to switch at, with the factors of a file or the model's own.

    The result goes into the folder `output`; an interrupted run continues there.
    """
    given = None if factors is None else RescaleFactors.load(factors)
    info = describe(model, original_length=given.original_length if given else None)
    if config.store and (given is not None or not (Path(info.location) / "config.json").is_file()):
        raise LongRopeError(
            "--store writes into the config.json of a folder that has its own factors",
            hint="omit --store and pass the switch length to `longrope2 generate --switch-length`",
        )
    # Before an 8B model is loaded for nothing.
    if given is not None:
        require_switch(given)
        check_factors(given, info)
    elif not carries_factors(info):
        raise FactorsError(f"no factors were given, and {model} has none of its own", hint="pass --factors FILE")
    config.check(given.target_length if given else info.reading.window, load_tokenizer(info))
    _folder(output, beside=factors).check()
    loaded = load(info)
    try:
        result = measure(loaded, given or read_factors(info.reading), config, output)
    except torch.OutOfMemoryError as error:
        raise LongRopeError(
            f"out of memory ({loaded.model.dtype} on {loaded.model.device})", hint="name shorter --lengths"
        ) from error
    if output is not None:
        result.save(output / RESULT)
        (output / SCORES).unlink(missing_ok=True)  # they are in the result
        _draw(output, result)
    if config.store:
        store_switch_length(Path(info.location), result.switch_length)
        say(f"stored switch length {result.switch_length:,} in {info.location}")
    return result


def measure(
    loaded: LoadedModel, factors: RescaleFactors, config: CalibrationConfig, output: Path | None = None
) -> CalibrationRecord:
    """Score both RoPEs at every length, and recommend a switch length.

    Each score is written to the folder `output` at once; a resumed run reads it from there.
    """
    require_switch(factors)
    config.check(factors.target_length, loaded.tokenizer)
    subject: dict[str, Any] = {
        "model": loaded.info.name,
        "revision": loaded.info.revision,
        "config": identity(config),
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
    header = {
        **subject,
        "factors": factors.to_json(),
        "weights": weights_fingerprint(loaded.info),
        "documents": documents_made,
    }
    alone = _folder(output).alone()
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
    return CalibrationRecord(
        **vars(recommend(points, factors.original_length)),
        method=factors.method,
        original_length=factors.original_length,
        target_length=factors.target_length,
        points=tuple(points),
        factors=factors.to_json(),
        versions=package_versions("torch", "transformers"),
        **subject,
    )


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
            note=quiet,  # a book that serves again is not worth a line at each of a dozen lengths
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


def _point(length: int, depths: Sequence[float], scores: Mapping[str, list[Score]]) -> MeasuredLength:
    """One length: both sides, and their paired difference with its standard error."""
    sides = {side: _side(depths, found) for side, found in scores.items()}
    pairs = zip(sides["original"].by_document, sides["long"].by_document, strict=True)
    differences = [original.nll - long.nll for original, long in pairs]
    return MeasuredLength(
        length=length,
        gain=statistics.fmean(differences),
        gain_error=statistics.stdev(differences) / math.sqrt(len(differences)),
        **sides,
    )


def _side(depths: Sequence[float], scores: Sequence[Score]) -> MeasuredSide:
    wanted = islice(cycle(depths), len(scores))  # as make_needles takes them
    documents = tuple(
        MeasuredDocument(depth=depth, nll=score.nll / score.num_tokens, exact=bool(score.exact))
        for depth, score in zip(wanted, scores, strict=True)
    )
    nll = [document.nll for document in documents]
    return MeasuredSide(
        nll=statistics.fmean(nll),
        nll_error=statistics.stdev(nll) / math.sqrt(len(nll)),
        exact=statistics.fmean(document.exact for document in documents),
        worst=min(
            statistics.fmean(document.exact for document in documents if document.depth == depth)
            for depth in {document.depth for document in documents}
        ),
        by_document=documents,
    )


def _draw(output: Path, result: CalibrationRecord) -> None:
    try:
        draw_calibration(result, output / "calibration.png")
    except MissingExtraError as error:
        warn(f"no figure: {error}")
