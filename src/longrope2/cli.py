"""The command line. Thin: each command gathers its options and calls one function of the package.

Nothing heavy is imported until a command runs, so `--help` answers at once.
"""

import sys
from pathlib import Path
from typing import Any

import click

from longrope2 import __version__
from longrope2.errors import LongRopeError

UNITS = {"k": 1 << 10, "m": 1 << 20}


class Length(click.ParamType):  # type: ignore[type-arg]
    """A number of tokens: 32768, 32k or 1M (binary units, as model windows are counted)."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse, or fail with the forms that are accepted."""
        text = str(value).strip().lower()
        unit = UNITS.get(text[-1:], 1)
        number = text[:-1] if unit > 1 else text
        try:
            tokens = int(number) * unit
        except ValueError:
            tokens = 0
        if tokens < 1:
            self.fail(f"{value!r} is not a length; write 32768, 32k or 1M", param, ctx)
        return tokens


class Floats(click.ParamType):  # type: ignore[type-arg]
    """Numbers separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        """Parse, or fail naming the part that is no number."""
        numbers = []
        for part in str(value).split(","):
            try:
                numbers.append(float(part))
            except ValueError:
                self.fail(f"{part.strip()!r} is not a number", param, ctx)
        return numbers


LENGTH = Length()
FLOATS = Floats()

model_argument = click.argument("model")
target_option = click.option("--target-length", type=LENGTH, metavar="N", help="Window to reach, e.g. 128k.")
original_option = click.option(
    "--original-length",
    type=LENGTH,
    metavar="N",
    help="The trained window, where the config is silent or wrong about it.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="longrope2")
def cli() -> None:
    """Extend the context window of any RoPE language model and keep its short-context quality.

    MODEL is a folder with config.json, a .gguf file, a hub id (owner/name), or the word 'tiny': a small base
    model that comes with the package.
    """


@cli.command()
@model_argument
@target_option
@original_option
@json_option
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw it (png, pdf, svg).")
def inspect(
    model: str, target_length: int | None, original_length: int | None, as_json: bool, plot: Path | None
) -> None:
    """Show a model's RoPE: periods, coverage, critical dimensions, every method's factors."""
    from longrope2.console import say, show_json, warn
    from longrope2.inspection import inspection, show
    from longrope2.models import describe

    result = inspection(describe(model, original_length=original_length), target_length)
    for remark in result["remarks"]:
        warn(remark)
    if plot is not None:
        from longrope2.figures import draw_inspection

        draw_inspection(result, plot)
        say(f"wrote {plot}")
    if as_json:
        show_json(result)
    else:
        show(result)


@cli.command()
@model_argument
@click.option("--target-length", type=LENGTH, metavar="N", required=True, help="Window to reach, e.g. 128k.")
@click.option("--method", required=True, metavar="NAME", help="pi, ntk, yarn, …: see `longrope2 inspect`.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE")
@click.option("--critical-dimension", type=int, metavar="I", help="d_rcd of the -rcd methods and longrope2.")
@click.option(
    "--right-factors",
    type=FLOATS,
    metavar="LIST",
    help="For longrope2: factors from d_rcd on, comma-separated, or one for all.",
)
@click.option("--attention-factor", type=float, metavar="A", help="For longrope2: temperature when long.")
@original_option
@click.option("--extend-again", is_flag=True, help="Accept a model that was extended before.")
def factors(
    model: str,
    target_length: int,
    method: str,
    output: Path,
    original_length: int | None,
    extend_again: bool,
    **options: Any,
) -> None:
    """Write the factors of a closed-form method to a file."""
    from longrope2.console import say, warn
    from longrope2.models import describe, rescale_model

    info = describe(model, original_length=original_length)
    given = {name: value for name, value in options.items() if value is not None}
    result = rescale_model(info, method, target_length, extend_again=extend_again, **given)
    for oddity in result.oddities():
        warn(oddity)
    result.save(output)
    say(f"wrote {output}: {method}, {result.original_length:,} → {result.target_length:,} tokens")


@cli.command()
@model_argument
@click.option("--target-length", type=LENGTH, metavar="N", required=True, help="Window to reach, e.g. 128k.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FOLDER")
@click.option("--books", metavar="SOURCE", help="Folder, file or hub dataset; default: the package's books.")
@click.option("--documents", default=10, show_default=True, help="Needle documents, a book each.")
@click.option("--depth", default=0.0, show_default=True, help="Where the needle stands: 0 start, 1 end.")
@click.option("--objective", type=click.Choice(["needle", "plain"]), help="Score the answer, or every token.")
@click.option(
    "--space",
    type=click.Choice(["paper", "wide"]),
    default="paper",
    show_default=True,
    help="The paper's, or also temperature and left shape, starting from every closed form.",
)
@click.option(
    "--dimensions",
    type=click.Choice(["critical", "all"]),
    default="critical",
    show_default=True,
    help="Search from d_rcd on, or every dimension.",
)
@click.option(
    "--method",
    type=click.Choice(["longrope2", "longrope"]),
    default="longrope2",
    show_default=True,
    help="longrope: the first version (all dimensions, plain perplexity).",
)
@click.option("--population", default=64, show_default=True)
@click.option("--iterations", default=40, show_default=True)
@click.option("--parents", default=32, show_default=True)
@click.option("--mutations", default=16, show_default=True, help="New individuals by mutation, an iteration.")
@click.option("--crossovers", default=16, show_default=True, help="New individuals by crossover, an iteration.")
@click.option("--mutation-probability", default=0.3, show_default=True)
@click.option("--lower", default=1.0, show_default=True, help="Least right-hand factor, in extension ratios.")
@click.option("--upper", default=2.0, show_default=True, help="Largest right-hand factor, in extension ratios.")
@click.option("--grid", default=0.01, show_default=True, help="Step between factors.")
@click.option("--attention-factor", type=float, metavar="A", help="Temperature of long sequences; default 1.")
@click.option(
    "--race",
    type=click.Choice(["statistical", "exact", "off"]),
    default="statistical",
    show_default=True,
    help="When to stop scoring a candidate; off is the paper's schedule.",
)
@click.option("--race-confidence", default=0.5, show_default=True, help="Standard errors; more is safer, slower.")
@click.option("--seed", default=0, show_default=True)
@click.option("--tensor-parallel", default=1, show_default=True, help="GPUs that share one copy of the model.")
@original_option
@click.option("--extend-again", is_flag=True, help="Accept a model that was extended before.")
@json_option
def search(model: str, output: Path, as_json: bool, **options: Any) -> None:
    """Search the critical dimension and the factors by needle perplexity.

    Run it again after an interruption, with the same options, and it goes on where it was. On several GPUs:
    torchrun --nproc-per-node 8 -m longrope2 search …
    """
    from longrope2.search.run import run_search

    run_search(model, output, as_json=as_json, **options)


@cli.group()
def data() -> None:
    """Prepare documents for training."""


@data.command()
@model_argument
@target_option
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE")
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="PATH[=WEIGHT]",
    help="Folder, file, hub dataset or 'books'; may be repeated. Replaces the sources of --config.",
)
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="TOML: [plan], [[source]], [[bucket]].")
@click.option("--tokens", metavar="N", help="Tokens to plan, e.g. 10B; default: what one epoch gives.")
@click.option("--buckets", metavar="LIST", help="Largest length and quota of each, e.g. 8k:3,100k:3,200k:4.")
@click.option("--seed", type=int, help="The same seed gives the same plan.  [default: 0]")
@click.option("--repeat", is_flag=True, default=None, help="Use documents again where a bucket runs out of them.")
@click.option(
    "--over-long", type=click.Choice(["cut", "drop"]), help="Documents above the last bucket.  [default: cut]"
)
@click.option(
    "--max-padding", type=float, metavar="SHARE", help="Largest share of padding in a short row.  [default: 0.01]"
)
@click.option("--cache", type=click.Path(path_type=Path), metavar="FOLDER", help="Where tokenised sources are kept.")
@original_option
@json_option
def plan(model: str, output: Path, **options: Any) -> None:
    """Choose and pack documents into rows of the target length, and say what is in them.

    Documents up to the trained window go into short rows, longer ones into long rows. Sources are tokenised once.
    """
    from longrope2.data.plan_command import run_plan

    run_plan(model, output, **options)


def main() -> None:
    """Run the command line; anything the user can mend becomes one message and exit code 2."""
    try:
        sys.exit(cli.main(standalone_mode=False))
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except LongRopeError as error:
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(str(error), err=True)
        sys.exit(2)
