"""A search from a model and books to a folder of results; resumable, on one process or many."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longrope2 import __version__
from longrope2.books import read_books
from longrope2.console import ProgressLine, quiet, say, warn
from longrope2.distributed import World
from longrope2.errors import LongRopeError, counted
from longrope2.factors import RescaleFactors
from longrope2.files import package_versions
from longrope2.methods import METHODS
from longrope2.models import LoadedModel, ModelInfo, load, rescale_model, weights_fingerprint
from longrope2.needles import NeedleDocument, PlainDocument, documents_digest, make_needles, make_plain, most_keys
from longrope2.options import stated
from longrope2.perplexity import Score, Scorer, scoring, total
from longrope2.records import (
    HELD_OUT,
    IN_SAMPLE,
    SEARCHED,
    FinalistScore,
    SearchRecord,
    SearchScore,
    WindowScore,
    as_json,
)
from longrope2.runfolder import RunFolder
from longrope2.search.config import Bounds, SearchConfig, check
from longrope2.search.evolution import Outcome, evolve
from longrope2.search.journal import Journal
from longrope2.search.progress import Reporter
from longrope2.search.record import RECORD, iterations, measurement, write_search
from longrope2.search.space import Genome, SearchSpace
from longrope2.tracking import Tracking

HISTORY = "history.jsonl"
# TensorBoard's folder, too: it stays when a damaged journal was removed, as the message asks for.
run_folder = partial(RunFolder, command="search", verb="searching", marks=(RECORD, HISTORY, "tensorboard"))
CLOSED_FORMS = tuple(name for name in METHODS if name != "longrope2")
"""What the result is compared with, each on all documents that were held out."""
WINDOW_FRACTIONS = (0.25, 0.5, 1.0)
"""Where the base model is tried within its own window before anything is searched."""
FAILING_NLL = 1.0
"""Nats per answer token above which a model does not retrieve."""

Document = NeedleDocument | PlainDocument
Evaluate = Callable[[Sequence[tuple[Genome, int]]], list[Score]]
"""Scores of (genome, index of a document) tasks."""


class Searched(NamedTuple):
    """What a search found, and its record."""

    factors: RescaleFactors
    record: SearchRecord


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One length of a search."""

    number: int
    space: SearchSpace
    documents: range
    """Indices of the documents searched on, among those of all stages."""
    kinds: Sequence[int]
    """Which of them are alike (see Race)."""
    tokens: int
    """Scored in all of them together."""

    @property
    def length(self) -> int:
        """Tokens of its documents."""
        return self.space.target_length


def search(
    loaded: LoadedModel,
    config: SearchConfig,
    output: Path | None,
    here: World,
    *,
    compare_with: Sequence[str] = CLOSED_FORMS,
    wandb: str | None = None,
) -> Searched:
    """Run or resume a search; writes into `output`, on the main process, unless it is None."""
    check(config, loaded.info.rope)
    # Within its window the model stays as it is now, also where it was rescaled before.
    baseline = rescale_model(loaded.info, "none", config.target_length, extend_again=True)
    say_here = say if here.is_main else quiet
    stages, documents = _prepare(loaded, config, baseline, note=say_here)
    last = stages[-1]
    held_out = range(last.documents.stop, len(documents))
    header = _header(loaded, config, documents)
    chance = _chance([documents[index] for index in last.documents])
    started = time.monotonic()
    own = output if here.is_main else None

    def scores_of(genome: Genome, indices: range) -> list[Score]:
        return [journal.known.scores[genome.key(), index] for index in indices]

    def measured(genome: Genome, indices: range) -> dict[str, Any]:
        return vars(measurement(scores_of(genome, indices), sum(_keys(documents[index]) for index in indices)))

    try:
        with ExitStack() as stack, run_folder(own).alone(), closing(Journal(own and own / HISTORY, header)) as journal:
            tracking = None
            if own is not None:
                tracking = stack.enter_context(closing(Tracking(own, wandb=wandb, settings=header["config"])))
            journal.known = here.gather(journal.known)[0]
            if journal.resumed:
                say_here(f"resuming: {counted(journal.resumed, 'evaluation')} found in {output}")
            with scoring(loaded.model, baseline, objective=config.objective) as scorer:
                # The whole first group: processes that share a model can only run it together.
                window = _try_own_window(loaded, config, scorer, baseline, here) if here.rank == 0 else []
            with scoring(loaded.model, baseline, objective=config.objective, compiled=config.compiled) as scorer:
                reporter = Reporter(config, len(stages), chance, journal, tracking) if here.is_main else None
                evaluate = _evaluator(
                    scorer, last.space, documents, journal, here, scored=reporter.scored if reporter else quiet
                )
                outcomes = _run_stages(stages, config, evaluate, journal, here, reporter)
                forms = {name: last.space.closed_form(name) for name in compare_with}
                finalists = outcomes[-1].finalists()
                if config.space == "wide":  # which holds them, so that it may never end below one
                    finalists += map(last.space.at_fixed_temperature, forms.values())
                measured_on = held_out or last.documents
                tasks = [(genome, index) for genome in (*finalists, *forms.values()) for index in measured_on]
                line = ProgressLine(len(tasks), "finalists and closed forms, evaluations")
                advance = line.advance if here.is_main else quiet
                _evaluator(scorer, last.space, documents, journal, here, scored=advance)(tasks)
                winner = min(finalists, key=lambda genome: total(scores_of(genome, measured_on)).nll)
                # A closed form may have been stopped before it had seen all documents.
                in_sample = [(winner, index) for index in last.documents]
                _evaluator(scorer, last.space, documents, journal, here, scored=quiet)(in_sample)
    except torch.OutOfMemoryError as error:
        raise LongRopeError(
            f"out of memory at {config.target_length:,} tokens ({loaded.model.dtype} on {loaded.model.device})",
            hint="use a shorter target, a GPU with more memory, or --tensor-parallel over several",
        ) from error

    versions = package_versions("torch", "transformers")
    identity = {name: header[name] for name in ("model", "revision", "weights", "config")}
    factors = last.space.rescale_factors(winner, {**identity, "versions": versions})
    rows = [(SEARCHED, winner, IN_SAMPLE, last.documents), (SEARCHED, winner, HELD_OUT, held_out)]
    part = HELD_OUT if held_out else IN_SAMPLE
    rows += [(name, genome, part, measured_on) for name, genome in forms.items()]
    ends = [outcome.history[-1] for outcome in outcomes]
    record = SearchRecord(
        **{name: value for name, value in header.items() if name != "version"},
        versions=versions,
        critical_dimension=winner.critical_dimension or None,
        best=as_json(winner),
        chance=chance,
        scores=tuple(
            SearchScore(method=name, part=part, **measured(genome, indices))
            for name, genome, part, indices in rows
            if indices
        ),
        finalists=tuple(
            FinalistScore(genome=as_json(genome), **measured(genome, measured_on))
            for genome in outcomes[-1].finalists()
        ),
        own_window=tuple(window),
        convergence=iterations([(stage.length, stage.tokens) for stage in stages], outcomes),
        document_evaluations=sum(end.evaluations for end in ends),
        exhaustive_evaluations=sum(end.exhaustive_evaluations for end in ends),
        seconds=journal.earlier + time.monotonic() - started,
        resumed_evaluations=journal.resumed,
        processes=here.size,
        device=_device_name(loaded.model.device),
    )
    if output and here.is_main:
        write_search(output, factors, record)
    return Searched(factors, record)


def _prepare(
    loaded: LoadedModel, config: SearchConfig, baseline: RescaleFactors, *, note: Callable[[str], None]
) -> tuple[list[Stage], list[Document]]:
    """The stages of a search and the documents of all; held-out ones, of the target length, come last."""
    stages: list[Stage] = []
    documents: list[Document] = []
    for number, length in enumerate(config.stages(baseline.spec)):
        is_last = length == config.target_length
        count = config.documents + (config.held_out if is_last else 0)
        made = search_documents(loaded, config, length, count=count, note=note)
        stages.append(
            Stage(
                number=number,
                space=_space(config, baseline, length),
                documents=range(len(documents), len(documents) + config.documents),
                kinds=config.kinds(_keys(made[0])),
                tokens=sum(_scored_tokens(document) for document in made[: config.documents]),
            )
        )
        documents += made
    return stages, documents


def _run_stages(
    stages: Sequence[Stage],
    config: SearchConfig,
    evaluate: Evaluate,
    journal: Journal,
    here: World,
    reporter: Reporter | None,
) -> list[Outcome]:
    """Search length by length; the best of one are in the first population of the next."""
    outcomes: list[Outcome] = []
    carried: list[Genome] = []
    for stage in stages:
        if reporter is not None:
            reporter.begin(stage.number, stage.length, stage.tokens)

        def nlls(tasks: Sequence[tuple[Genome, int]], stage: Stage = stage) -> list[float]:
            placed = [(genome, stage.documents[document]) for genome, document in tasks]
            return [score.nll for score in evaluate(placed)]

        def generation(iteration: int, make: Callable[[], list[Genome]], stage: Stage = stage) -> list[Genome]:
            found: list[Genome] = here.gather(journal.generation(stage.number, iteration, make))[0]
            return found

        if outcomes:
            best = math.ceil(config.evolution.parents / 2)
            earlier, ratio = outcomes[-1].ranking()[:best], stages[stage.number - 1].space.ratio
            carried = [stage.space.carry(genome, ratio) for genome in earlier]
        outcomes.append(
            evolve(
                stage.space,
                config.evolution,
                len(stage.documents),
                nlls,
                kinds=stage.kinds,
                carried=carried,
                stage=stage.number,
                generation=generation,
                report=reporter.iteration if reporter is not None else quiet,
            )
        )
    return outcomes


def run_search(
    info: ModelInfo,
    config: SearchConfig,
    output: Path | None,
    here: World,
    *,
    extend_again: bool,
    wandb: str | None = None,
) -> Searched:
    """Check everything, then load the model and search, into `output` unless it is None."""
    if wandb and output is None:
        raise LongRopeError("wandb needs a folder for the search", hint="give one as `output`")
    info.refuse_rescaled(extend_again=extend_again)
    check(config, info.rope)  # before an 8B model is loaded for nothing
    here = here.groups_of(config.tensor_parallel)
    run_folder(output if here.is_main else None).check()
    loaded = load(info, device=here.device(), tensor_parallel=config.tensor_parallel)
    return search(loaded, config, output, here, wandb=wandb)


def _space(config: SearchConfig, baseline: RescaleFactors, length: int) -> SearchSpace:
    """Where to search at a length; the short side of all it makes is that of `baseline`."""
    spec = baseline.spec
    bounds = {f.name: getattr(config, f.name) for f in fields(Bounds)}
    return SearchSpace(
        **{**bounds, "target_length": length},
        spec=spec,
        kind=config.space,
        attention_factor=config.temperature(spec, length),
        short=baseline.short,
        short_attention_factor=baseline.short_attention_factor,
    )


def search_documents(
    loaded: LoadedModel, config: SearchConfig, length: int, *, count: int, note: Callable[[str], None]
) -> Sequence[Document]:
    """The documents of a search, which depend on the tokenizer, the books and the seed alone."""
    books = read_books(config.books, held_out=True)
    options: dict[str, Any] = {"length": length, "count": count, "seed": config.evolution.seed, "note": note}
    if config.objective == "plain":
        return make_plain(loaded.tokenizer, books, **options)
    keys = min(config.keys, most_keys(loaded.tokenizer, length))
    return make_needles(loaded.tokenizer, books, depth=config.depths, keys=keys, from_start=True, **options)


def _header(loaded: LoadedModel, config: SearchConfig, documents: Sequence[Document]) -> dict[str, Any]:
    """What must agree for a journal's evaluations to be worth anything here."""
    elastic = {entry.name for entry in stated(SearchConfig) if entry.option.elastic}
    return {
        "version": __version__,
        "model": loaded.info.name,
        "revision": loaded.info.revision,
        "weights": weights_fingerprint(loaded.info),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "documents": documents_digest(documents),
        "stages": tuple(config.stages(loaded.info.rope)),
        "config": {name: value for name, value in asdict(config).items() if name not in elastic},
    }


def _scored_tokens(document: Document) -> int:
    """All of a plain document but the first; of one with needles those of the answers."""
    return document.answer_tokens if isinstance(document, NeedleDocument) else len(document.token_ids) - 1


def _keys(document: Document) -> int:
    return len(document.needles) if isinstance(document, NeedleDocument) else 0


def _chance(documents: Sequence[Document]) -> float | None:
    """The perplexity of guessing an answer's digits: 10 where each is a token; None without answers."""
    needles = [document for document in documents if isinstance(document, NeedleDocument)]
    if not needles:
        return None
    digits = sum(len(needle.value) for document in needles for needle in document.needles)
    return float(10 ** (digits / sum(map(_scored_tokens, needles))))


def _try_own_window(
    loaded: LoadedModel, config: SearchConfig, scorer: Scorer, baseline: RescaleFactors, here: World
) -> list[WindowScore]:
    """How well the untouched model does within its own window: what it lacks there no factor can give."""
    if config.objective == "plain":
        return []
    results = []
    for fraction in WINDOW_FRACTIONS:
        length = round(loaded.info.rope.original_length * fraction)
        try:
            documents = search_documents(loaded, config, length, count=min(config.documents, 4), note=quiet)
        except LongRopeError:
            continue  # a tiny window may be too short for the template
        scores = scorer(baseline, documents)
        found = measurement(scores, sum(map(_keys, documents)))
        results.append(WindowScore(length=length, **vars(found)))
        if not here.is_main:
            continue
        nll = total(scores)
        exact = f"{found.exact}/{found.answers} exact"
        say(f"within its window, {length:,} tokens: perplexity {nll.perplexity:.3f}, {exact}")
        if nll.nll / nll.num_tokens > FAILING_NLL:
            warn(
                f"the model hardly retrieves at {length:,} tokens, inside its own window of "
                f"{loaded.info.rope.original_length:,}: expect no better beyond it"
            )
    return results


def _evaluator(
    scorer: Scorer,
    space: SearchSpace,
    documents: Sequence[Document],
    journal: Journal,
    here: World,
    *,
    scored: Callable[[int], None],
) -> Evaluate:
    """Scores of (genome, document) tasks: from the journal, or computed, one task a process at a time.

    One document at a time, so that a result never depends on what else was scored with it. `scored` hears how many
    tasks are done.
    """

    def evaluate(tasks: Sequence[tuple[Genome, int]]) -> list[Score]:
        known = journal.known.scores
        # Once each: what a search found may rotate just as a closed form does.
        unique = {(genome.key(), document): (genome, document) for genome, document in tasks}
        missing = [task for key, task in unique.items() if key not in known]
        if len(missing) < len(tasks):
            scored(len(tasks) - len(missing))
        for begin in range(0, len(missing), here.size):
            turn = missing[begin : begin + here.size]
            score: Score | None = None
            if here.rank < len(turn):
                genome, document = turn[here.rank]
                score = scorer(space.rescale_factors(genome), [documents[document]])[0]
            for (genome, document), found in zip(turn, here.gather(score), strict=False):
                journal.record(genome.key(), document, found)
            scored(len(turn))
        return [known[genome.key(), document] for genome, document in tasks]

    return evaluate


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
