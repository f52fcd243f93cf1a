"""What the paper's run takes, LLaMA-3-8B to 128k: storage, hours and cost of each step on 8 and on 64 GPUs.

    python recipes/cluster/paper_run.py docs/paper-run.md     # writes the tables between the page's two marks

Tokenising and planning are at the rates of results/benchmarks, the other steps at those of `longrope2 extend --dry-run`
(rates measured on an H200). Training takes 1.7 times its estimate, as did the runs that could be compared.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from longrope2.models import ASSETS
from longrope2.pipeline.extend import Extension
from longrope2.pipeline.forecast import forecast
from longrope2.records import Table

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- from recipes/cluster/paper_run.py -->", "<!-- to here -->"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SIZES, GPU = (8, 64), "h100"
PRICE = 2.5
"""Dollars an hour of a GPU; an assumption."""
CORES_PER_GPU = 8
TOKENS = 10**10
TRAINING = 1.7
GB = 1e9


def benchmark(name: str) -> dict:
    return json.loads((ROOT / "results" / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def steps() -> list[tuple[str, float, float, bool]]:
    """Name, seconds of one GPU (or of all its cores), bytes on disk, and whether more GPUs make it faster."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        # Any tokenizer does: a forecast counts no texts.
        shutil.copytree(ASSETS / "tiny", model, ignore=shutil.ignore_patterns("*.safetensors"))
        (model / "config.json").write_text(json.dumps(CONFIG))
        extension = Extension(str(model), Path(folder) / "run", config="llama3-8b-128k", stages=(), cache=None)
        rows = {row["step"]: row for row in forecast(extension, GPU)["steps"]}
    core = benchmark("tokenising")["rates"]["1 workers"]
    planning = benchmark("planning")["measured"][-1]
    parameters = sum(row["disk_gib"] for name, row in rows.items() if name == "train") * 2**30
    evaluation = [row for name, row in rows.items() if name.startswith("evaluate")]
    return [
        ("tokenise", TOKENS / core / CORES_PER_GPU, 4.1 * TOKENS, True),
        ("plan", (planning["seconds"] + planning["seconds_to_save"]) * TOKENS / planning["tokens"], 0, False),
        ("search", rows["search"]["seconds"], rows["search"]["disk_gib"] * 2**30, True),
        ("train", TRAINING * rows["train"]["seconds"], parameters, True),
        (
            "evaluate",
            sum(row["seconds"] for row in evaluation),
            sum(r["disk_gib"] or 0 for r in evaluation) * 2**30,
            True,
        ),
    ]


def table() -> str:
    found = steps()
    rows = []
    totals = dict.fromkeys(SIZES, 0.0)
    for name, seconds, size, spreads in found:
        hours = {gpus: seconds / 3600 / (gpus if spreads else 1) for gpus in SIZES}
        for gpus in SIZES:
            totals[gpus] += hours[gpus]
        cells = [cell for gpus in SIZES for cell in (f"{hours[gpus]:,.2f}", f"{hours[gpus] * gpus * PRICE:,.0f}")]
        rows.append([name, f"{size / GB:,.0f}" if size >= GB else "under 1", *cells])
    cells = [cell for gpus in SIZES for cell in (f"{totals[gpus]:,.1f}", f"{totals[gpus] * gpus * PRICE:,.0f}")]
    rows.append(["all", f"{sum(size for _, _, size, _ in found) / GB:,.0f}", *cells])
    columns = ["step", "GB", *(f"{unit}, {gpus} GPUs" for gpus in SIZES for unit in ("hours", "dollars"))]
    title = f"LLaMA-3-8B to 128k on {GPU.upper()} GPUs at ${PRICE:.2f} an hour each, {CORES_PER_GPU} CPU cores for each"
    return Table(title=title, columns=columns, rows=rows).markdown()


def page(text: str) -> str:
    """A page with the table as it is now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="the page to write into")
    path = parser.parse_args().page
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
