"""Turn training.json and evaluation.json of a tiny base into its model card, README.md.

    python recipes/tiny/card.py tiny-base --beside tiny-base-uniform

No number of the card is written by hand; `--beside` adds the same tables for a second base.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from recall import PARETO_EXPONENT, PARETO_MINIMUM, TEMPLATES

from longrope2.files import write_text

LAWS = {
    "skewed": f"Pareto (minimum {PARETO_MINIMUM} tokens, exponent {PARETO_EXPONENT}), cut off at the window",
    "uniform": "uniform over the window",
    "short": f"Pareto (minimum {PARETO_MINIMUM} tokens, exponent {PARETO_EXPONENT}), cut off at a quarter of "
    "the window",
}
FRONT_MATTER = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [longrope2, long-context, rope, test-model]
---
"""


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def percent(rate: float) -> str:
    """A rate as a whole percentage; 100% is only said of a clean sweep."""
    shown = round(100 * rate, 1)
    return "100%" if rate == 1 else f"{min(shown, 99.9):g}%"


def what_it_is(training: dict) -> str:
    config = training["config"]
    return f"""# A tiny base model for context extension

A LLaMA of {training["parameters"]:,} parameters with a window of {config["window"]} tokens, trained from
nothing to do two things: continue old novels, badly, and repeat a seven-digit number hidden anywhere in its
window, reliably. Beyond the window it fails. That makes it a test bed for RoPE rescaling: an extension to
{16 * config["window"]:,} tokens can be searched, trained and measured in minutes, on a CPU if need be.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```

Layers {config["num_layers"]}, hidden size {config["hidden_size"]}, {config["num_heads"]} heads of
{config["hidden_size"] // config["num_heads"]}, {config["num_key_value_heads"]} key-value heads, MLP
{config["intermediate_size"]}, RoPE base {config["rope_theta"]:,.0f}, tied embeddings, bfloat16. Vocabulary of
{config["vocab_size"]:,}: byte-level BPE in which every digit is a token of its own; `<s>` opens each
document, `</s>` ends it.
"""


def how_it_was_trained(training: dict) -> str:
    config, distances, last = training["config"], training["distances"], training["log"][-1]
    rows = []
    for number, stage in enumerate(config["stages"], 1):
        lengths = ", ".join(str(length) for length in sorted(set(stage["lengths"])))
        needles = ", ".join(str(count) for count in stage["needle_counts"])
        rows.append([number, f"{stage['steps']:,}", lengths, needles])
    width, total = distances["bin_width"], sum(distances["counts"])
    shares = [100 * count / total for count in distances["counts"]]
    bars = [
        f"{i * width:4d} – {(i + 1) * width - 1:4d}  {share:5.1f}%  {'█' * round(share)}"
        for i, share in enumerate(shares)
        if i * width < config["window"]
    ]
    seconds = sum(training["seconds"].values())
    versions = ", ".join(f"{name} {version}" for name, version in training["versions"].items())
    titles = ", ".join(book["title"] for book in training["books"])
    stages = table(["stage", "steps", "row lengths", "needles per document, drawn evenly"], rows)
    return f"""## Training

{training["trained_tokens"] / 1e6:,.0f} million tokens in {seconds:.0f} s on {training["device"]}
({versions}), seed {config["seed"]}. Half of each batch of {config["tokens_per_step"]:,} tokens is book
text, half recall documents, whose answer tokens weigh {config["answer_weight"]:g} times as much:

{stages}

AdamW {config["learning_rate"]:g} {tuple(config["betas"])}, weight decay {config["weight_decay"]:g}, warm-up
{config["warmup_steps"]} steps, cosine decay over the last stage. At the end the loss was
{last["text_loss"]:.2f} nats per token of book text and {last["answer_loss"]:.4f} per digit of the answers.

Distance from the number to its repetition: {LAWS[config["distances"]]}; median {distances["quartiles"][1]},
longest {distances["longest"]} tokens. Share of the recall documents by distance:

```
{chr(10).join(bars)}
```

Books ({training["book_tokens"]:,} tokens): {titles}.

To make it again, with a folder of these books as .txt files (without `--books` the package's training books
are read, which are fewer):

    python recipes/tiny/train.py --books BOOKS --distances {config["distances"]} --seed {config["seed"]} \\
        --output FOLDER
"""


def inside_the_window(evaluation: dict) -> str:
    names = {"train": "trained wordings", "held_out": "wordings kept out of training"}
    parts = []
    for which, name in names.items():
        measured = [result for result in evaluation["retrieval"][which] if result["wordings"]]
        depths = list(measured[0]["exact_by_depth"])
        rows = [
            [
                result["length"],
                *(percent(result["exact_by_depth"][d]) for d in depths),
                percent(result["exact"]),
            ]
            for result in measured
        ]
        count = min(result["documents_per_depth"] for result in measured)
        parts.append(f"{name.capitalize()}, at least {count} documents per cell:\n")
        parts.append(table(["length \\ depth", *depths, "all"], rows) + "\n")
    bfloat16 = ""
    if (result := evaluation["retrieval_bfloat16"]) is not None:
        bfloat16 = f"; in bfloat16 {percent(result['exact'])} at {result['length']} tokens"
    text = evaluation["text"]
    return f"""## Inside the window

How often greedy decoding gives all seven digits, on books held out from training (computed in
float32{bfloat16}). Depth 0 is the start of the text.

{chr(10).join(parts)}
Perplexity on held-out books at {text["length"]} tokens: {text["perplexity"]:.1f}, or {text["nll"]:.3f} nats
per token.
"""


def beyond_the_window(evaluation: dict) -> str:
    rows = [
        [
            f"{result['length']:,}",
            f"{result['start']['nll']:.2f} / {percent(result['start']['exact'])}",
            f"{result['any_depth']['nll']:.2f} / {percent(result['any_depth']['exact'])}",
            f"{result['text_nll']:.2f}",
        ]
        for result in evaluation["beyond_window"]
    ]
    count = evaluation["beyond_window"][0]["start"]["documents"]
    header = ["tokens", "needle at the start", "needle anywhere", "end of plain text, NLL"]
    return f"""## Beyond the window, untouched

Answer NLL in nats and exact rate of {count} documents in the paper's wording:

{table(header, rows)}
"""


def extended(evaluations: dict[str, dict]) -> str:
    first = next(iter(evaluations.values()))["extension"]
    by_name = {
        base: {result["name"]: result for result in evaluation["extension"]["results"]}
        for base, evaluation in evaluations.items()
    }
    closed = [result["name"] for result in first["results"] if result["shape"] is None]
    best = [r["name"] for e in evaluations.values() for r in e["extension"]["finalists"]]
    names = list(dict.fromkeys([*closed, *best]))
    rows = [
        [name, *(f"{r[name]['nll']:.3f} / {percent(r[name]['exact'])}" for r in by_name.values())] for name in names
    ]
    fresh_rows = []
    for base, evaluation in evaluations.items():
        for finalist in evaluation["extension"]["finalists"]:
            cells = [f"{s['nll']:.3f} / {percent(s['exact'])}" for s in finalist["fresh"].values()]
            fresh_rows.append([f"{finalist['name']} ({base} distances)", *cells])
    depths = list(first["finalists"][0]["fresh"])
    header = ["factors", *(f"{base} distances" for base in evaluations)]
    return f"""## Extended {first["ratio"]:g} times by factors alone

{first["target_length"]:,} tokens, no training, needle at the start of the text; answer NLL / exact rate of
{first["results"][0]["documents"]} documents. "ntk below c, f·s" and "ramp a–c, f·s" are the best of a grid:
factors f·s from dimension c on; below it NTK's, or none up to a and a linear blend of 1/λ from there. The
grid and YaRN use the temperature 0.1·ln s + 1. The theoretical critical dimension is
{first["critical_dimension"]}; dimension {first["ten_period_dimension"]} completes ten periods.

{table(header, rows)}

The best closed form and the best of each shape on other documents, by depth of the needle:

{table(["factors", *depths], fresh_rows)}
"""


def make_card(folder: Path, beside: Path | None) -> str:
    """The text of README.md."""
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    evaluations = {}
    for place in (folder, beside):
        if place is not None:
            law = json.loads((place / "training.json").read_text(encoding="utf-8"))["config"]["distances"]
            evaluations[law] = json.loads((place / "evaluation.json").read_text(encoding="utf-8"))
    own = evaluations[training["config"]["distances"]]
    wordings = {which: len(texts) for which, texts in json.loads(TEMPLATES.read_text()).items()}
    limits = f"""## Limits

It has read little and understands nothing: only recall in wordings like its {wordings["train"]} trained ones
means anything, and {wordings["held_out"]} are kept aside to measure others. Do not use it to write text.
"""
    sections = [
        FRONT_MATTER + what_it_is(training),
        how_it_was_trained(training),
        inside_the_window(own),
        beyond_the_window(own),
        extended(evaluations),
        limits,
    ]
    return "\n".join(sections)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, write the card."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder with training.json and evaluation.json")
    parser.add_argument("--beside", type=Path, help="a second base, trained with another law of distances")
    options = parser.parse_args(arguments)
    write_text(options.model / "README.md", make_card(options.model, options.beside))
    return 0


if __name__ == "__main__":
    sys.exit(main())
