"""A search from a model and books to a folder of results; resumable, on one process or many."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from longrope2 import __version__
from longrope2.books import read_books
from longrope2.console import ProgressLine, say, warn
from longrope2.distributed import World, world
from longrope2.errors import LongRopeError
from longrope2.factors import RescaleFactors
from longrope2.files import check_writable, only_one, package_versions, refuse_foreign
from longrope2.methods import METHODS
from longrope2.models import LoadedModel, describe, load, rescale_model, weights_fingerprint
from longrope2.needles import NeedleDocument, documents_digest, make_needles
from longrope2.perplexity import Objective, Score, Scorer, scoring, total
from longrope2.search.config import SearchConfig, check
from longrope2.search.evolution import EvolutionConfig, evolve
from longrope2.search.journal import Journal
from longrope2.search.progress import Reporter
from longrope2.search.record import RECORD, outcome_record, perplexity, show_record, write_record
from longrope2.search.space import Bounds, Genome, SearchSpace, default_attention_factor

HISTORY = "history.jsonl"
WINDOW_FRACTIONS = (0.25, 0.5, 1.0)
"""Where the base model is tried within its own window before anything is searched."""
HELD_OUT_SEED = 1_000_000
"""How far the seed of held-out documents lies from that of the searched ones."""
FAILING_NLL = 1.0
"""Nats per answer token above which a model does not retrieve."""


def search(loaded: LoadedModel, config: SearchConfig, output: Path | None, here: World) -> RescaleFactors:
    """Run or resume a search; writes into `output`, on the main process, unless it is None."""
    check(config, loaded.info.rope)
    # Within its window the model goes on as it does now, also where it was rescaled before.
    baseline = rescale_model(loaded.info, "none", config.target_length, extend_again=True)
    space = _space(config, baseline)
    say_here = say if here.is_main else _quiet
    searched = needle_documents(loaded, config, config.target_length, note=say_here)
    held_out = _held_out_documents(loaded, config, note=say_here)
    documents = searched + held_out
    header = _header(loaded, config, documents)
    tokens, held_out_tokens = (
        sum(_scored_tokens(document, config.objective) for document in part) for part in (searched, held_out)
    )
    started = time.monotonic()
    try:
        with _open_journal(output, header, here) as journal:
            if journal.resumed:
                say_here(f"resuming: {journal.resumed:,} evaluations found in {output}")
            with scoring(loaded.model, baseline, objective=config.objective) as scorer:
                # The whole first group: processes that share a model can only run it together.
                window = _try_own_window(loaded, config, scorer, baseline, here) if here.rank == 0 else []
            with scoring(loaded.model, baseline, objective=config.objective, compiled=config.compiled) as scorer:
                reporter = Reporter(config.evolution, len(searched), tokens, output, journal) if here.is_main else None
                evaluate = _evaluator(
                    scorer, space, documents, journal, here, scored=reporter.scored if reporter else _quiet
                )
                report = reporter or _quiet
                outcome = evolve(space, config.evolution, len(searched), evaluate, journal=journal, report=report)
                forms = {name: space.closed_form(name) for name in METHODS if name != "longrope2"}
                line = ProgressLine(len(forms) * len(documents) + len(held_out), "closed forms, evaluations")
                counted = line.advance if here.is_main else _quiet
                evaluate = _evaluator(scorer, space, documents, journal, here, scored=counted)
                methods = _totals(forms, range(len(searched)), evaluate)
                unseen = _totals({"searched": outcome.best, **forms}, range(len(searched), len(documents)), evaluate)
    except torch.OutOfMemoryError as error:
        raise LongRopeError(
            f"out of memory at {config.target_length:,} tokens ({loaded.model.dtype} on {loaded.model.device})",
            hint="use a shorter target, a GPU with more memory, or --tensor-parallel over several",
        ) from error
    versions = package_versions("torch", "transformers")
    identity = {name: header[name] for name in ("model", "revision", "weights", "config")}
    factors = space.rescale_factors(outcome.best, {**identity, "versions": versions})
    if output and here.is_main:
        record = {
            **header,
            "versions": versions,
            **outcome_record(outcome, tokens),
            "own_window": window,
            "closed_form_perplexity": {name: perplexity(nll, tokens) for name, nll in methods.items()},
            "held_out_perplexity": {name: perplexity(nll, held_out_tokens) for name, nll in unseen.items()}
            if held_out
            else None,
            "seconds": journal.earlier + time.monotonic() - started,
            "resumed_evaluations": journal.resumed,
            "processes": here.size,
            "device": _device_name(loaded.model.device),
        }
        write_record(output, factors, record)
    return factors


def run_search(
    model: str,
    output: Path,
    *,
    original_length: int | None,
    extend_again: bool,
    tensor_parallel: int,
    objective: Objective | None,
    as_json: bool,
    **options: Any,
) -> None:
    """`longrope2 search`: load, search, and print what was found."""
    schedule = {f.name: options.pop(f.name) for f in fields(EvolutionConfig) if f.name in options}
    config = SearchConfig(
        objective=objective or ("plain" if options["method"] == "longrope" else "needle"),
        evolution=EvolutionConfig(**schedule),
        **options,
    )
    info = describe(model, original_length=original_length)
    info.refuse_rescaled(extend_again=extend_again)
    check(config, info.rope)  # before an 8B model is loaded for nothing
    with world(group_size=tensor_parallel) as here:
        if here.is_main:
            check_output(output)
        loaded = load(info, device=here.device(), tensor_parallel=tensor_parallel)
        factors = search(loaded, config, output, here)
        if here.is_main:
            show_record(output, factors, as_json=as_json)


def check_output(output: Path) -> None:
    """Refuse a folder that holds other things, or cannot be written to."""
    # TensorBoard's folder, too: it stays when a damaged journal was removed, as the message asks for.
    refuse_foreign(output, "search", HISTORY, RECORD, "tensorboard")
    check_writable(output / RECORD)


def _space(config: SearchConfig, baseline: RescaleFactors) -> SearchSpace:
    """Where to search; the short side of all it makes is that of `baseline`."""
    spec = baseline.spec
    return SearchSpace(
        **{f.name: getattr(config, f.name) for f in fields(Bounds)},
        spec=spec,
        kind=config.space,
        attention_factor=config.attention_factor or default_attention_factor(config.method, spec, config.target_length),
        short=baseline.short,
        short_attention_factor=baseline.short_attention_factor,
    )


def needle_documents(
    loaded: LoadedModel,
    config: SearchConfig,
    length: int,
    *,
    count: int | None = None,
    seed: int | None = None,
    note: Callable[[str], None],
) -> list[NeedleDocument]:
    """The documents of a search, which depend on the tokenizer, the books and the seed alone."""
    return make_needles(
        loaded.tokenizer,
        read_books(config.books, held_out=True),
        length=length,
        count=count or config.documents,
        seed=config.evolution.seed if seed is None else seed,
        depth=config.depth,
        note=note,
    )


def _held_out_documents(
    loaded: LoadedModel, config: SearchConfig, *, note: Callable[[str], None]
) -> list[NeedleDocument]:
    """Documents of another seed from the same books: keys, values and places are drawn anew."""
    if not config.held_out:
        return []
    seed = config.evolution.seed + HELD_OUT_SEED
    return needle_documents(loaded, config, config.target_length, count=config.held_out, seed=seed, note=note)


def _header(loaded: LoadedModel, config: SearchConfig, documents: Sequence[NeedleDocument]) -> dict[str, Any]:
    """What must agree for a journal's evaluations to be worth anything here."""
    return {
        "version": __version__,
        "model": loaded.info.name,
        "revision": loaded.info.revision,
        "weights": weights_fingerprint(loaded.info),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "documents": documents_digest(documents),
        "config": asdict(config),
    }


@contextmanager
def _open_journal(output: Path | None, header: dict[str, Any], here: World) -> Iterator[Journal]:
    """What is known of a search, on every process; meanwhile no other search may work in its folder."""
    folder = output if here.is_main else None
    with (
        only_one(folder, "another process is searching there"),
        closing(Journal(folder and folder / HISTORY, header)) as journal,
    ):
        journal.known = here.gather(journal.known)[0]
        yield journal


def _scored_tokens(document: NeedleDocument, objective: Objective) -> int:
    length = len(document.token_ids)
    return length - document.answer_start if objective == "needle" else length - 1


def _try_own_window(
    loaded: LoadedModel, config: SearchConfig, scorer: Scorer, baseline: RescaleFactors, here: World
) -> list[dict[str, Any]]:
    """How well the untouched model does within its own window: what it lacks there no factor can give."""
    if config.objective == "plain":
        return []
    results = []
    for fraction in WINDOW_FRACTIONS:
        length = round(loaded.info.rope.original_length * fraction)
        try:
            documents = needle_documents(loaded, config, length, count=min(config.documents, 4), note=_quiet)
        except LongRopeError:
            continue  # a tiny window may be too short for the template
        scores = scorer(baseline, documents)
        nll, exact = total(scores), sum(score.exact for score in scores)
        results.append(
            {
                "length": length,
                "perplexity": perplexity(nll.nll, nll.num_tokens),
                "exact": exact,
                "documents": len(documents),
            }
        )
        if not here.is_main:
            continue
        say(f"within its window, {length:,} tokens: perplexity {nll.perplexity:.3f}, {exact}/{len(scores)} exact")
        if nll.nll / nll.num_tokens > FAILING_NLL:
            warn(
                f"the model hardly retrieves at {length:,} tokens, inside its own window of "
                f"{loaded.info.rope.original_length:,}: expect no better beyond it"
            )
    return results


def _evaluator(
    scorer: Scorer,
    space: SearchSpace,
    documents: Sequence[NeedleDocument],
    journal: Journal,
    here: World,
    *,
    scored: Callable[[int], None],
) -> Callable[[Sequence[tuple[Genome, int]]], list[float]]:
    """NLL of (genome, document) tasks: from the journal, or computed, one task a process at a time.

    One document at a time, so that a result never depends on what else was scored with it. `scored` hears how many
    tasks are done.
    """

    def evaluate(tasks: Sequence[tuple[Genome, int]]) -> list[float]:
        # Once each: what a search found may rotate just as a closed form does.
        unique = {(genome.key(), document): (genome, document) for genome, document in tasks}
        missing = [task for key, task in unique.items() if key not in journal.known]
        if len(missing) < len(tasks):
            scored(len(tasks) - len(missing))
        for begin in range(0, len(missing), here.size):
            turn = missing[begin : begin + here.size]
            score: Score | None = None
            if here.rank < len(turn):
                genome, document = turn[here.rank]
                score = scorer(space.rescale_factors(genome), [documents[document]])[0]
            for (genome, document), found in zip(turn, here.gather(score), strict=False):
                journal.record(genome.key(), document, found.nll, tokens=found.num_tokens, exact=found.exact)
            scored(len(turn))
        return [journal.known[genome.key(), document] for genome, document in tasks]

    return evaluate


def _totals(
    genomes: Mapping[str, Genome],
    documents: Sequence[int],
    evaluate: Callable[[Sequence[tuple[Genome, int]]], Sequence[float]],
) -> dict[str, float]:
    """The NLL of each over some documents."""
    nlls = iter(evaluate([(genome, document) for genome in genomes.values() for document in documents]))
    return {name: sum(next(nlls) for _ in documents) for name in genomes}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _quiet(_: object) -> None:
    """Say nothing: only the main process talks."""
