"""The command line. Thin: each command gathers its options and calls one function of the package.

Nothing heavy is imported until a command runs, so `--help` answers at once.
"""

import errno
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
from click import Choice, argument, option

from longrope2 import __version__
from longrope2.calibration.config import CalibrationConfig
from longrope2.command_options import (
    FILE,
    FOLDER,
    LENGTH,
    NAME,
    NAMES,
    PLACE,
    again_option,
    corpus_option,
    factors_option,
    json_option,
    model_argument,
    options_of,
    original_option,
    switch_length_option,
    taken,
    wandb_option,
)
from longrope2.console import alarm, say, show_json, show_table, warn
from longrope2.data.config import Mix, RecallConfig, TokeniseConfig
from longrope2.distributed import is_main_process, wait_to_speak, world
from longrope2.errors import LongRopeError
from longrope2.evaluation.config import EvaluationConfig, evaluation_config
from longrope2.export.config import ExportConfig, VerifyConfig
from longrope2.generation.config import ChatConfig, GenerateConfig
from longrope2.malloc import keep_freed_memory
from longrope2.methods import ClosedForm
from longrope2.options import build
from longrope2.records import ComparisonRecord, LeaderboardRecord, Table
from longrope2.search.config import SearchConfig, search_config
from longrope2.training.config import EstimateConfig, TrainConfig, train_config


def _show(values: Any, *tables: Table, lines: Iterable[str] = (), as_json: bool) -> None:
    """Print what a stage gave: its values for programs, or tables for people, and the lines below them."""
    if as_json:
        show_json(values)
        return
    for table in tables:
        show_table(table)
    for line in lines:
        print(line)


class InOrder(click.Group):
    """Lists its commands in the order of use, which is that of this file."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """As they were defined."""
        return list(self.commands)


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="longrope2")
def cli() -> None:
    """Extend the context window of any RoPE language model and keep its short-context quality.

    MODEL is a folder with config.json, a .gguf file, a hub id (owner/name), or the word 'tiny': a small base
    model that comes with the package. Lengths are written 32768, 32k or 1M.

    To begin: `longrope2 inspect tiny`, and `longrope2 extend -o runs/demo` for all stages in one.
    """


@cli.command()
@model_argument
@option("--target-length", type=LENGTH, help="Window to reach, e.g. 128k; default: 16 times its own.")
@original_option
@json_option
@option("--factors", type=FILE, help="Show the factors of this file, too; they give the target.")
@option("--plot", type=FILE, help="Also draw it (png, pdf, svg).")
def inspect(
    model: str,
    target_length: int | None,
    original_length: int | None,
    as_json: bool,
    factors: Path | None,
    plot: Path | None,
) -> None:
    """Show a model's RoPE and what every known method does to it.

    For each dimension: its period, how much of it training has seen, and its factor by method. Reads the config alone.
    """
    from longrope2.inspection import inspect
    from longrope2.models import describe

    result = inspect(describe(model, original_length=original_length), target_length, factors)
    for remark in result.remarks:
        warn(remark)
    if plot is not None:
        from longrope2.figures import draw_inspection

        draw_inspection(result, plot)
        say(f"wrote {plot}")
    _show(result, result.table(), as_json=as_json)


@cli.command()
@model_argument
@option("-o", "--output", required=True, type=FILE, help="Factors file to write.")
@option(
    "--from",
    "source",
    metavar="collection[/NAME]",
    help="Take them from the collection that comes with the package, in place of a method.",
)
@options_of(ClosedForm, from_file=True)
@original_option
@again_option
def factors(
    model: str, output: Path, source: str | None, original_length: int | None, extend_again: bool, **options: Any
) -> None:
    """Write factors of a closed form, or of the collection."""
    from longrope2.models import describe, rescale_model

    info = describe(model, original_length=original_length)
    if source is not None:
        from longrope2.collection import take_collected

        result = take_collected(info, source, options, extend_again=extend_again)
    else:
        form = build(ClosedForm, "factors", options)
        result = rescale_model(info, form.method, form.target_length, extend_again=extend_again, **form.given())
    for oddity in result.oddities():
        warn(oddity)
    if options["single"]:
        result = result.long_everywhere()
    result.save(output)
    say(f"wrote {output}: {result.method}, {result.original_length:,} → {result.target_length:,} tokens")


@cli.command()
@json_option
def collection(as_json: bool) -> None:
    """List the factors that come with the package.

    Published ones and our own, each with its model, lengths, temperature, how it was found and what it scored.
    """
    from longrope2.collection import collection, collection_table

    entries = collection()
    _show(entries, collection_table(entries), as_json=as_json)


@cli.command()
@model_argument
@option("-o", "--output", required=True, type=FOLDER, help="For factors.json, the journal and figures.")
@options_of(SearchConfig)
@original_option
@again_option
@wandb_option
@json_option
def search(
    model: str,
    output: Path,
    original_length: int | None,
    extend_again: bool,
    wandb: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Search the critical dimension and factors by needle perplexity.

    Run the same command again after an interruption to continue. On several GPUs:
    torchrun --nproc-per-node 8 -m longrope2 search …
    """
    with _resumable(), world() as here:
        from longrope2.models import describe
        from longrope2.search.record import search_table
        from longrope2.search.run import run_search

        info, config = describe(model, original_length=original_length), search_config(**options)
        found = run_search(info, config, output, here, extend_again=extend_again, wandb=wandb)
    if here.is_main:
        _show(found.record, search_table(output, *found), as_json=as_json)


@cli.command()
@model_argument
@argument("source", required=False, metavar="[-]")
@factors_option
@options_of(GenerateConfig)
def generate(model: str, source: str | None, factors: Path | None, **options: Any) -> None:
    """Continue a prompt, exactly, across the switch between RoPEs.

    The original RoPE is used up to the switch length, the long one beyond. The prompt is --prompt, --prompt-file, or -
    for stdin. Text goes to stdout; when the switch happened and what it cost goes to stderr.
    """
    from longrope2.generation.generate import generate, read_prompt

    config = build(GenerateConfig, "generation", options)
    prompt = read_prompt(config, source)
    on_text = partial(print, end="", flush=True) if config.stream else None
    result = generate(model, prompt, config, factors_file=factors, on_text=on_text)
    if not config.stream:
        print(result.text, flush=True)
    for remark in result.remarks:
        say(remark)
    if result.interrupted:
        raise KeyboardInterrupt


@cli.command()
@model_argument
@factors_option
@options_of(ChatConfig)
def chat(model: str, factors: Path | None, **options: Any) -> None:
    """Talk to a model in the terminal, exactly, across the switch.

    Each line is a message: /file PATH adds a text file to the next one, /clear begins again, /exit or Ctrl-D ends.
    Ctrl-C stops an answer.
    """
    from longrope2.generation.generate import HELP, Chat, run_chat

    talk = Chat(model, build(ChatConfig, "chat", options), factors_file=factors)
    if sys.stdin.isatty():
        say(HELP)
    run_chat(talk, _messages(), partial(print, end="", flush=True))


def _messages() -> Iterator[str]:
    """The lines of stdin, asked for where a person types them."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):  # where it is there, input() can be edited
        import readline  # noqa: F401
    with suppress(EOFError):
        while True:
            yield input("> ")


@cli.command()
@model_argument
@factors_option
@options_of(CalibrationConfig)
@option("-o", "--output", type=FOLDER, help="For calibration.json and calibration.png; default: only print.")
@json_option
def calibrate(model: str, factors: Path | None, output: Path | None, as_json: bool, **options: Any) -> None:
    """Measure the best length to switch RoPE at.

    Compares needle retrieval with the original and with the long RoPE, on the same documents. With -o, run it again
    after an interruption, with the same options, and it goes on where it was.
    """
    with _resumable() if output else nullcontext():
        from longrope2.calibration.calibrate import calibrate, calibration_table

        config = build(CalibrationConfig, "calibration options", options)
        result = calibrate(model, config, output, factors=factors)
    _show(result, calibration_table(result), as_json=as_json)


@cli.group(cls=InOrder)
def data() -> None:
    """Prepare documents for training."""


@data.command()
@argument("sources", nargs=-1, required=True, metavar="[NAME=]SOURCE...")
@option("--model", required=True, type=NAME, help="Model whose tokenizer is used.")
@option("-o", "--output", required=True, type=NAME, metavar="DATASET", help="Folder to write, here or in a store.")
@options_of(TokeniseConfig)
@option("--dry-run", is_flag=True, help="Only sample the sources, and forecast tokens, hours and gigabytes.")
@json_option
def tokenise(sources: tuple[str, ...], model: str, output: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Tokenise documents into shards, on all cores or on a cluster.

    SOURCE is a .txt, .jsonl (also .gz, .zst) or .parquet file, a folder of them, a pattern with *, or a hub dataset as
    owner/name:split; s3://, gs:// and hf:// are read, too. `data plan` takes DATASET, or DATASET:NAME, as a source.

    Run the same command again after an interruption, and it makes the shards that are missing.
    """
    with _resumable():
        from longrope2.data.tokenise import forecast_dataset, forecast_line, summary, summary_tables, tokenise_sources

        config = build(TokeniseConfig, "tokenising", options)
        if dry_run:
            forecast = forecast_dataset(model, sources, config)
            tables = summary_tables(forecast.sources)
            _show(forecast, *tables, lines=[forecast_line(forecast)], as_json=as_json)
            return
        record = tokenise_sources(model, sources, output, config)
        _show(record, *summary_tables(summary(record)), as_json=as_json)


@data.command()
@model_argument
@option("-o", "--output", required=True, type=FILE, help="Plan to write, e.g. plan.jsonl.")
@option("--config", type=FILE, help="TOML: [plan], [[source]], [[bucket]].")
@options_of(Mix, from_file=True)
@corpus_option
@json_option
def plan(model: str, output: Path, config: Path | None, cache: Path | None, as_json: bool, **options: Any) -> None:
    """Pack documents into training rows of the target length.

    Documents up to the trained window go into short rows, longer ones into long rows. Sources are tokenised once.
    """
    from longrope2.data.composition import composition_tables
    from longrope2.data.plan import plan_documents

    made = plan_documents(model, output, config=config, cache=cache, **options)
    _show(made.report, *composition_tables(made.report), as_json=as_json)


@data.command()
@model_argument
@option("-o", "--output", required=True, type=FILE, help="Source to write, e.g. recall.jsonl.")
@options_of(RecallConfig)
def recall(model: str, output: Path, **options: Any) -> None:
    """Write documents that hide numbers and ask for them later.

    They are books with such sentences in them, a source for `data plan`. Each has exactly the length named, so that
    one of the target length fills a row.
    """
    from longrope2.data.recall import write_recall
    from longrope2.models import describe, load_tokenizer

    write_recall(load_tokenizer(describe(model)), RecallConfig(**options), output)
    say(f"wrote {output}")


@cli.command()
@model_argument
@option("--factors", type=FILE, help="File written by `search` or `factors`.")
@option("--plan", type=FILE, help="File written by `data plan`.")
@option("-o", "--output", type=FOLDER, help="For checkpoints, the log and model/.")
@options_of(TrainConfig)
@option("--cache", type=FOLDER, help="Where `data plan` keeps its tokens; default: the same as there.")
@wandb_option
@option("--estimate", is_flag=True, help="Only print the memory and time it would take.")
@options_of(EstimateConfig)
@original_option
@json_option
def train(model: str, output: Path | None, estimate: bool, as_json: bool, **options: Any) -> None:
    """Train a model with both RoPEs, short and long rows mixed.

    Short rows are seen with the original RoPE, long ones with the rescaled. FOLDER/model is then a plain transformers
    model with the extended window. Run it again after an interruption, with the same options, and it goes on where it
    was. On several GPUs: torchrun --nproc-per-node 8 -m longrope2 train …
    """
    wanted, config = EstimateConfig(**taken(EstimateConfig, options)), train_config(**taken(TrainConfig, options))
    if estimate:
        from longrope2.training.estimate import estimate_run, estimate_tables

        result = estimate_run(model, config, wanted, plan=options["plan"], original_length=options["original_length"])
        _show(result, *estimate_tables(result), as_json=as_json)
        return
    given = {"--factors": options["factors"], "--plan": options["plan"], "--output": output}
    if output is None or None in given.values():
        raise click.UsageError(f"missing: {', '.join(name for name, path in given.items() if path is None)}")
    with _resumable(), world() as here:
        from longrope2.training.log import training_table
        from longrope2.training.train import MODEL, train

        record = train(model, config, output, here, **options)
    if here.is_main:
        _show(record, training_table(record, output / MODEL), as_json=as_json)


class Evaluate(click.Command):
    """Its help lists the suites there are, which are asked for only then."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """With the suites in their place."""
        from longrope2.evaluation.suites import listed

        template = self.help or ""
        self.help = template.format(suites=listed())
        super().format_help_text(ctx, formatter)
        self.help = template


@cli.command(cls=Evaluate)
@model_argument
@option("-o", "--output", required=True, type=FOLDER, help="For results.json, every answer and figures.")
@factors_option
@options_of(EvaluationConfig)
@option(
    "--backend",
    type=Choice(["torch", "vllm"]),
    default="torch",
    help="vllm: faster; takes a saved model, as it would be served.",
)
@switch_length_option
@option(
    "--cache", type=FOLDER, help="Where samples of RULER and needles are kept; default: samples/ in the output folder."
)
@option("--name", metavar="NAME", help="Row label in `longrope2 compare`; default: the method.")
@original_option
@json_option
def evaluate(model: str, output: Path, as_json: bool, **options: Any) -> None:
    """Measure a model: RULER, needles, perplexity, short tasks.

    Suites: {suites}.

    Run the same command again after an interruption to continue. On several GPUs:
    torchrun --nproc-per-node 8 -m longrope2 evaluate …
    """
    with _resumable(), world() as here:
        from longrope2.evaluation.evaluate import JOURNAL, run_evaluation
        from longrope2.evaluation.results import RESULTS
        from longrope2.evaluation.table import run_tables

        config = evaluation_config(**taken(EvaluationConfig, options))
        result = run_evaluation(model, config, output, here, **options)
    if here.is_main:
        notes = [f"note: {note}" for note in result.notes]
        _show(result, *run_tables(result.name, result.scores), lines=notes, as_json=as_json)
        if not as_json:
            say(f"wrote {output / RESULTS}; every answer is in {output / JOURNAL}")


@cli.command()
@argument("runs", nargs=-1, required=True, metavar="[NAME=]RUN...")
@option("-o", "--output", type=FOLDER, help="For markdown, JSON and figures; default: only print.")
@option("--base", metavar="NAME", help="The row that retention refers to; default: the one without factors.")
@option("--against", metavar="NAME", help="Also print the differences from that row, question by question.")
@option("--leaderboard", is_flag=True, help="Methods by measures: a table for each base and length, with ties.")
@json_option
def compare(
    runs: tuple[str, ...],
    output: Path | None,
    base: str | None,
    against: str | None,
    leaderboard: bool,
    as_json: bool,
) -> None:
    """Put evaluations side by side, methods as rows.

    RUN is a folder of `longrope2 evaluate` or a file like its results.json; NAME, if given, is its row's label. With
    --leaderboard, RUN may also be a folder of such files.
    """
    result: ComparisonRecord | LeaderboardRecord
    if leaderboard:
        from longrope2.evaluation.leaderboard import leaderboards, write_leaderboards

        if base is not None:
            raise LongRopeError(
                "--base is not for --leaderboard", hint="omit it: the original is the row without factors"
            )
        result = leaderboards(runs, against=against)
        if output is not None:
            write_leaderboards(result, output)
    else:
        from longrope2.evaluation.compare import compare, write_comparison

        result = compare(runs, base=base, against=against)
        if output is not None:
            write_comparison(result, output)
    _show(result, *result.tables, as_json=as_json)


@cli.command()
@model_argument
@factors_option
@option("-o", "--output", required=True, type=PLACE, help="Folder, or .gguf file with --format gguf.")
@options_of(ExportConfig)
def export(model: str, output: Path, factors: Path | None, **options: Any) -> None:
    """Write an extended model for the engines people serve with."""
    from longrope2.export.export import export

    export(model, output, build(ExportConfig, "export options", options), factors=factors)


@cli.command()
@argument("exported", type=PLACE)
@options_of(VerifyConfig)
@json_option
@click.pass_context
def verify(context: click.Context, /, exported: Path, as_json: bool, **options: Any) -> None:
    """Run an export in each engine and compare with our own forward.

    Below and above the original window. EXPORTED is a folder or a .gguf file, also one that others extended with
    longrope, yarn, llama3 or linear scaling. The exit code is 1 if an engine answers wrongly.
    """
    from longrope2.export.verify import verify

    result = verify(exported, build(VerifyConfig, "verify", options))
    _show(result.findings, result.table(), as_json=as_json)
    if result.wrong:
        context.exit(1)


@cli.command()
@model_argument
@option("--config-only", is_flag=True, help="Load no weights: check the config, and the rotary module that it makes.")
@json_option
@click.pass_context
def check(context: click.Context, /, model: str, config_only: bool, as_json: bool) -> None:
    """Check anyone's RoPE: what engines make of it, and its faults.

    Extended with any rope type: longrope, yarn, llama3, linear, dynamic, proportional, or not at all. The exit code is
    1 if the config has a fault, or if a current engine or the live model rotates otherwise than the config says; the
    corrected keys are printed.
    """
    from longrope2.checking.check import check

    result = check(model, config_only=config_only)
    _show(result, result.table(), lines=result.lines(), as_json=as_json)
    if result.wrong:
        context.exit(1)


@cli.command()
@argument("exported", type=PLACE)
@argument("name", type=NAME)
@option("--private", is_flag=True, help="Make a new repository private.")
def push(exported: Path, name: str, private: bool) -> None:
    """Upload an export to the hub as OWNER/NAME.

    EXPORTED is a folder or a .gguf file; check it with `longrope2 verify` first.
    """
    from longrope2.export.hub import push

    say(f"it is at {push(exported, name, private=private)}")


def _show_recipe(context: click.Context, _: click.Parameter, name: str | None) -> None:
    if name is not None:
        from longrope2.pipeline.recipe import find_recipe

        click.echo(find_recipe(name)[1], nl=False)
        context.exit()


@cli.command()
@argument("model", type=NAME, required=False)
@option("--target-length", type=LENGTH, help="Window to reach, e.g. 128k; default: the recipe's.")
@option("-o", "--output", required=True, type=FOLDER, help="For the results of every stage.")
@option(
    "--config",
    metavar="RECIPE",
    help="TOML file, or a recipe of the package: tiny-laptop, smollm2-32k, llama3-8b-128k, phi3-mini-128k.",
)
@option("--stages", type=NAMES, default="", show_default=False, help="E.g. search,evaluate; default: all.")
@corpus_option
@original_option
@again_option
@wandb_option
@option("--dry-run", is_flag=True, help="Print what would be done, with time, memory and disk.")
@option("--gpu", type=Choice(["h200", "h100", "a100"]), help="With --dry-run: the machine; default: this one.")
@option(
    "--show-recipe",
    metavar="NAME",
    is_eager=True,
    expose_value=False,
    callback=_show_recipe,
    help="Only print a recipe of the package: --show-recipe smollm2-32k > mine.toml",
)
@json_option
@click.pass_context
def extend(
    context: click.Context,
    /,
    model: str | None,
    output: Path,
    dry_run: bool,
    gpu: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Take a model to a longer window, from the search to a report.

    Stages: search, calibrate, data, train, evaluate, export, verify, report. MODEL defaults to the recipe's, or to
    tiny. Without texts to train on ([[source]] in a recipe), data and train are skipped; without a table [calibrate],
    that stage.

    Run the same command again after an interruption: finished stages are skipped, and stages whose options have
    changed run again. The exit code is 1 if an engine that was asked computes the export wrongly. On several GPUs:
    torchrun --nproc-per-node 8 -m longrope2 extend …
    """
    if gpu and not dry_run:
        raise LongRopeError("--gpu is for an estimate", hint="add --dry-run")
    with _resumable(), world() as here:
        from longrope2.pipeline.extend import Extension

        extension = Extension(model, output, **options)
        if dry_run:
            from longrope2.pipeline.forecast import forecast, forecast_table

            expected = forecast(extension, gpu)
            table = forecast_table(extension.setting, expected)
            _show(expected, table, lines=expected["notes"], as_json=as_json)
            return
        found = extension.run(here)
    if here.is_main:
        tables = [found.summary] if found.summary.rows else []
        page = [f"report: {found.page}"] if found.page else []
        _show(found.to_json(), *tables, lines=page, as_json=as_json)
        for remark in found.remarks:
            say(remark)
        for line in found.wrong:
            alarm(line)
    if found.wrong:
        context.exit(1)


@cli.command()
@argument("file", type=Choice(["recipe", "factors"]))
def schema(file: str) -> None:
    """Print the JSON Schema of a recipe or of a factors file.

    Editors complete and check a recipe with it: docs/extend.md says how.
    """
    if file == "recipe":
        from longrope2.pipeline.recipe import recipe_schema

        show_json(recipe_schema())
    else:
        from longrope2.factors import factors_schema

        show_json(factors_schema())


@cli.command()
@argument("run", type=PLACE)
@option("--open", "open_page", is_flag=True, help="Open the page in a browser.")
def report(run: Path, open_page: bool) -> None:
    """Write the report of an `extend` run, finished or not.

    A page in one file, with each figure as PNG and its data as CSV beside it.
    """
    import webbrowser

    from longrope2.report.page import write_report

    path = write_report(run)
    say(f"wrote {path}")
    if open_page and not webbrowser.open(path.absolute().as_uri()):
        warn("no browser was found to open it with")


@cli.command()
@argument("run", type=PLACE)
@option("--once", is_flag=True, help="Print the progress once and exit.")
@option("--every", default=2.0, metavar="SECONDS", help="Time between two reads of the folder.")
def watch(run: Path, once: bool, every: float) -> None:
    """Show how far an `extend` run is, from its files alone."""
    from longrope2.watching import run_watch

    run_watch(run, once=once, every=every)


def main() -> None:
    """Run the command line; an error that the user can fix becomes one message and exit code 2."""
    keep_freed_memory()
    threading.excepthook = _thread_failed
    _prepare_streams()
    try:
        sys.exit(cli.main(standalone_mode=False))
    except (click.Abort, KeyboardInterrupt) as error:
        if is_main_process():
            click.echo(str(error) or "interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        if wait_to_speak(error) is not None:
            error.show()
        sys.exit(error.exit_code)
    except LongRopeError as error:
        _report(error)
        sys.exit(2)
    except OSError as error:
        hint = _hint(error)
        if hint is None:
            raise
        place = "" if error.filename else f" (stdout, or a file in {tempfile.gettempdir()})"
        _report(LongRopeError(f"{error}{place}", hint=hint))
        sys.exit(2)


def _prepare_streams() -> None:
    """Keep output from ending a command: replace closed streams, such as a daemon's, and escape unknown characters."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # opened in this order, each gets its own number back
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - for good
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Keep TensorBoard's thread from printing a traceback of an error that its writer raises here anyway."""
    if not type(failure.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(failure)


def _hint(error: OSError) -> str | None:
    """A hint for an error of the operating system; None for an error of this program."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space and run the same command again"
    if error.filename is not None and error.errno == errno.ENAMETOOLONG:
        return "check that path: no name in it may be that long"
    if error.filename is not None and error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EROFS):
        return "check that path: whether it is a file or a folder, and its permissions"
    return None


@contextmanager
def _resumable() -> Iterator[None]:
    """Say, where a job is interrupted, that nothing is lost; also around the imports, where Ctrl-C may get lost."""
    from longrope2.interrupts import interrupts

    try:
        with interrupts():
            yield
    except KeyboardInterrupt as error:
        if is_main_process():
            click.echo(err=True)  # past a line of progress
        raise click.Abort("interrupted; the same command goes on where it was") from error


def _report(error: LongRopeError) -> None:
    if (prefix := wait_to_speak(error)) is not None:
        click.secho(f"{prefix}error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(str(error), err=True)
