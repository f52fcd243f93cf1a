"""A search from a model and books to a folder of results; resumable, on one process or many."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from longrope2 import __version__
from longrope2.books import read_books
from longrope2.console import ProgressLine, say, show_json, show_table, warn
from longrope2.distributed import World, world
from longrope2.errors import LongRopeError, MissingExtraError, all_problems, out_of_range, unknown_choices
from longrope2.factors import RescaleFactors
from longrope2.figures import draw_convergence, draw_factors
from longrope2.files import only_one, package_versions, write_json
from longrope2.methods import METHODS, rescale
from longrope2.models import LoadedModel, describe, load, rescale_model, weights_fingerprint
from longrope2.needles import MOST_DOCUMENTS, NeedleDocument, depth_problems, documents_digest, make_needles
from longrope2.perplexity import Objective, Score, Scorer, scoring, total
from longrope2.rope import RopeSpec
from longrope2.search.evolution import EvolutionConfig, Progress, evolve
from longrope2.search.journal import Journal
from longrope2.search.space import Genome, SearchSpace, default_attention_factor

WINDOW_FRACTIONS = (0.25, 0.5, 1.0)
"""Where the base model is tried within its own window before anything is searched."""
HELD_OUT_SEED = 1_000_000
"""How far the seed of held-out documents lies from that of the searched ones."""
FAILING_NLL = 1.0
"""Nats per answer token above which a model does not retrieve."""
RANGES = {
    "documents": (1, MOST_DOCUMENTS),
    "held_out": (0, MOST_DOCUMENTS),
    "lower": (0.01, 1000.0),
    "upper": (0.01, 1000.0),
    "grid": (1e-6, 0.25),
    "attention_factor": (0.01, 100.0),
}
"""What may be searched: far more than is sensible, and nothing that overflows."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Everything that decides the result, besides the model; saved with every run."""

    target_length: int
    documents: int = 10
    held_out: int = 0
    """Other documents, on which the winner and every closed form are scored at the end."""
    books: str | None = None
    """Where books come from; None means the package's held-out ones."""
    depth: float | tuple[float, ...] = 0.0
    """Where the needle stands: 0 is the start, as in the paper. Several are taken in turn, document by document."""
    objective: Objective = "needle"
    space: Literal["paper", "wide"] = "paper"
    dimensions: Literal["critical", "all"] = "critical"
    method: Literal["longrope2", "longrope"] = "longrope2"
    lower: float = 1.0
    upper: float = 2.0
    grid: float = 0.01
    mutation_probability: float = 0.3
    attention_factor: float | None = None
    """None: 1 for longrope2, which names none; √(1 + ln s/ln L_train) for longrope."""
    compiled: bool = False
    """Fuse what stands between matrix products: for long searches on a GPU."""
    evolution: EvolutionConfig = field(default_factory=EvolutionConfig)

    def __post_init__(self) -> None:
        """One depth is one depth, however it was given: a journal is known by its settings."""
        if not isinstance(self.depth, int | float):
            object.__setattr__(self, "depth", self.depth[0] if len(self.depth) == 1 else tuple(self.depth))

    def problems(self) -> list[str]:
        """What is wrong with it, in words."""
        found = self.evolution.problems() + unknown_choices(self) + out_of_range(self, **RANGES)
        depths = (self.depth,) if isinstance(self.depth, int | float) else self.depth
        found += depth_problems(depths, documents=self.documents, held_out=self.held_out)
        if not 0 < self.mutation_probability <= 1:
            found.append(f"mutation_probability must lie in (0, 1], got {self.mutation_probability}")
        if self.lower > self.upper:
            found.append(f"lower must not be above upper, got {self.lower} and {self.upper}")
        if self.method == "longrope" and (self.space, self.objective) != ("paper", "plain"):
            found.append("method longrope is defined with objective plain and space paper")
        if self.method == "longrope" and (self.lower, self.upper) != (SearchConfig.lower, SearchConfig.upper):
            found.append("method longrope has bounds of its own, 1 and 1.25 s; leave lower and upper out")
        if self.space == "wide" and self.dimensions == "all":
            found.append("space wide shapes the left side itself; dimensions all goes with space paper")
        return found


def check(config: SearchConfig, spec: RopeSpec) -> None:
    """Refuse what cannot be searched."""
    problems = config.problems()
    if spec.original_length <= 2 * math.pi:  # where NTK, and with it a first population, is not defined
        problems.append(f"the original length must be at least 7 tokens, got {spec.original_length}")
    if problems:
        raise LongRopeError(all_problems("search configuration", problems), hint="see `longrope2 search --help`")
    rescale("none", spec, config.target_length)  # refuses a target within the window


def search(loaded: LoadedModel, config: SearchConfig, output: Path | None, here: World) -> RescaleFactors:
    """Run or resume a search; writes into `output`, on the main process, unless it is None."""
    spec = loaded.info.rope
    check(config, spec)
    # Within its window the model goes on as it does now, also where it was rescaled before.
    baseline = rescale_model(loaded.info, "none", config.target_length, extend_again=True)
    space = SearchSpace(
        spec=spec,
        target_length=config.target_length,
        kind=config.space,
        dimensions=config.dimensions,
        method=config.method,
        lower=config.lower,
        upper=config.upper,
        grid=config.grid,
        mutation_probability=config.mutation_probability,
        attention_factor=config.attention_factor or default_attention_factor(config.method, spec, config.target_length),
        short=baseline.short,
        short_attention_factor=baseline.short_attention_factor,
    )
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
                evaluate = _evaluator(scorer, space, documents, journal, here)
                reporter = _Reporter(config.evolution.iterations, tokens, output, journal) if here.is_main else _quiet
                outcome = evolve(space, config.evolution, len(searched), evaluate, journal=journal, report=reporter)
                say_here("scoring closed-form methods on the same documents")
                forms = {name: space.closed_form(name) for name in METHODS if name != "longrope2"}
                methods = _totals(forms, range(len(searched)), evaluate)
                unseen = _totals({"searched": outcome.best, **forms}, range(len(searched), len(documents)), evaluate)
    except torch.OutOfMemoryError as error:
        raise LongRopeError(
            f"out of memory at {config.target_length:,} tokens ({loaded.model.dtype} on {loaded.model.device})",
            hint="use a shorter target, a GPU with more memory, or --tensor-parallel over several",
        ) from error
    provenance = {
        "model": loaded.info.name,
        "revision": loaded.info.revision,
        "weights": header["weights"],
        "config": asdict(config),
        "versions": package_versions("torch", "transformers"),
    }
    factors = space.rescale_factors(outcome.best, provenance)
    if output and here.is_main:
        result = {
            **header,
            "versions": provenance["versions"],
            "perplexity": _perplexity(outcome.history[-1].best_nll, tokens),
            "critical_dimension": factors.critical_dimension,
            "best": outcome.best.to_json(),
            "scored_tokens": tokens,
            "own_window": window,
            "closed_form_perplexity": {name: _perplexity(nll, tokens) for name, nll in methods.items()},
            "held_out_perplexity": {name: _perplexity(nll, held_out_tokens) for name, nll in unseen.items()}
            if held_out
            else None,
            "convergence": [_convergence(progress, tokens) for progress in outcome.history],
            "document_evaluations": outcome.history[-1].evaluations,
            "exhaustive_evaluations": outcome.history[-1].exhaustive_evaluations,
            "seconds": journal.earlier + time.monotonic() - started,
            "resumed_evaluations": journal.resumed,
            "processes": here.size,
            "device": _device_name(loaded.model.device),
        }
        factors.save(output / "factors.json")
        write_json(output / "search.json", result)
        _draw(output, factors, result)
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
        loaded = load(info, device=here.device(), tensor_parallel=tensor_parallel)
        factors = search(loaded, config, output, here)
        if here.is_main:
            _show(output, factors, as_json=as_json)


def search_result(output: Path) -> dict[str, Any]:
    """What a finished search wrote into search.json."""
    result: dict[str, Any] = json.loads((output / "search.json").read_text(encoding="utf-8"))
    return result


def _show(output: Path, factors: RescaleFactors, *, as_json: bool) -> None:
    result = search_result(output)
    if as_json:
        show_json(result)
        return
    rows = sorted(result["closed_form_perplexity"].items(), key=lambda row: row[1] or math.inf)
    unseen = result["held_out_perplexity"]
    show_table(
        f"{result['config']['objective']} perplexity at {factors.target_length:,} tokens, "
        f"{result['config']['documents']} documents",
        ["method", "perplexity", "d_rcd", *(["held out"] if unseen else [])],
        [
            [
                f"{factors.method} (searched)",
                _shown(result["perplexity"]),
                f"{factors.critical_dimension or '-'}",
                *([_shown(unseen["searched"])] if unseen else []),
            ],
            *([name, _shown(value), "-", *([_shown(unseen[name])] if unseen else [])] for name, value in rows),
        ],
        caption=f"{result['document_evaluations']:,} document evaluations of "
        f"{result['exhaustive_evaluations']:,} without racing; factors in {output / 'factors.json'}",
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
    """Other keys, values and places in the books than the searched documents have."""
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
        closing(Journal(folder and folder / "history.jsonl", header)) as journal,
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
                "perplexity": _perplexity(nll.nll, nll.num_tokens),
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
    scorer: Scorer, space: SearchSpace, documents: Sequence[NeedleDocument], journal: Journal, here: World
) -> Callable[[Sequence[tuple[Genome, int]]], list[float]]:
    """NLL of (genome, document) tasks: from the journal, or computed, one task a process at a time.

    One document at a time, so that a result never depends on what else was scored with it.
    """

    def evaluate(tasks: Sequence[tuple[Genome, int]]) -> list[float]:
        # Once each: what a search found may rotate just as a closed form does.
        unique = {(genome.key(), document): (genome, document) for genome, document in tasks}
        missing = [task for key, task in unique.items() if key not in journal.known]
        for begin in range(0, len(missing), here.size):
            turn = missing[begin : begin + here.size]
            score: Score | None = None
            if here.rank < len(turn):
                genome, document = turn[here.rank]
                score = scorer(space.rescale_factors(genome), [documents[document]])[0]
            for (genome, document), found in zip(turn, here.gather(score), strict=False):
                journal.record(genome.key(), document, found.nll, tokens=found.num_tokens, exact=found.exact)
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


class _Reporter:
    """Tells of each iteration: on stderr, in the journal its time, and where TensorBoard is installed as events."""

    def __init__(self, iterations: int, tokens: int, output: Path | None, journal: Journal) -> None:
        self._line = ProgressLine(iterations + 1, "search", log_every=0)
        self._journal = journal
        self._tokens = tokens
        self._events = None
        if output is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._events = SummaryWriter(str(output / "tensorboard"))
            except ImportError:
                pass

    def __call__(self, progress: Progress) -> None:
        self._journal.sync()
        perplexity = _perplexity(progress.best_nll, self._tokens)
        saved = 1 - progress.evaluations / progress.exhaustive_evaluations
        self._line.update(
            progress.iteration + 1,
            f"best perplexity {_shown(perplexity)}, d_rcd {progress.best.critical_dimension}, "
            f"{progress.evaluations:,} evaluations, {saved:.0%} saved by racing",
        )
        if self._events is not None and perplexity is not None:
            self._events.add_scalar("search/perplexity", perplexity, progress.iteration)
            self._events.add_scalar("search/critical_dimension", progress.best.critical_dimension, progress.iteration)
            self._events.add_scalar("search/evaluations", progress.evaluations, progress.iteration)
            self._events.flush()


def _convergence(progress: Progress, tokens: int) -> dict[str, Any]:
    return {
        "iteration": progress.iteration,
        "perplexity": _perplexity(progress.best_nll, tokens),
        "critical_dimension": progress.best.critical_dimension,
        "evaluations": progress.evaluations,
        "exhaustive_evaluations": progress.exhaustive_evaluations,
    }


def _perplexity(nll: float, tokens: int) -> float | None:
    """None where it overflows: JSON has no infinity."""
    value = Score(nll, tokens, exact=False).perplexity
    return value if math.isfinite(value) else None


def _shown(perplexity: float | None) -> str:
    return "overflow" if perplexity is None else f"{perplexity:.4f}"


def _draw(output: Path, factors: RescaleFactors, result: dict[str, Any]) -> None:
    try:
        draw_convergence(result["convergence"], output / "convergence.png")
        named = {name: rescale(name, factors.spec, factors.target_length) for name in ("pi", "ntk", "yarn")}
        draw_factors({**named, factors.method: factors}, output / "factors.png")
    except MissingExtraError as error:
        warn(str(error))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _quiet(_: object) -> None:
    """Say nothing: only the main process talks."""
