"""The page: one HTML file with its style, figures and few lines of script inside; nothing is fetched."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from longrope2 import __version__, ledger
from longrope2.console import duration
from longrope2.export.engines import Format, guidance
from longrope2.factors import RescaleFactors
from longrope2.figures import COLOURS, length_label
from longrope2.report.charts import Chart, stage_seconds
from longrope2.report.summary import BY_LENGTH, SHORT_HEADS, Summary, label

Data = Mapping[str, Any]
# Beyond the colours that methods have in every figure.
SERIES = {
    **COLOURS,
    "ntk-rcd": COLOURS["ntk"],
    "yarn-rcd": COLOURS["yarn"],
    "none": "var(--ink)",
    "ntk-aware": "#882255",
    "dynamic-ntk": "#999933",
    "ntk-by-parts": "#44AA99",
    ledger.BASE: "var(--quiet)",
    ledger.SEARCHED: "#CC79A7",
    "rows-short": "var(--quiet)",
    "rows-long": COLOURS["longrope2"],
    "time": COLOURS["longrope2"],
}


def page(data: Data, summary: Summary, charts: Sequence[Chart]) -> str:
    """The whole page."""
    title = f"{_public(data['model'])}: {summary.title.rpartition(', ')[2]}"
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(_subtitle(data))}</p>{_note(summary)}</header>",
        _cards(data, summary),
        _results(summary),
        '<div class="charts">' + "".join(_figure(chart) for chart in charts) + "</div>",
        _costs(data),
        _serving(data),
        _configuration(data),
        f"<footer>Made by longrope2 {__version__} from the files in this run's folder. "
        "Each figure lies beside this page as PNG, its data as CSV.</footer>",
        '<div id="tip" role="status"></div>',
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + f"\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def _style() -> str:
    here = Path(__file__).parent / "page.css"
    series = "".join(f".s-{name}{{stroke:{colour};fill:{colour}}}" for name, colour in SERIES.items())
    return series + here.read_text(encoding="utf-8")


# A touch shows what the mouse sees by hovering: phones show no titles.
SCRIPT = """
const tip = document.getElementById("tip");
document.addEventListener("click", event => {
  const title = event.target.querySelector && event.target.querySelector(":scope > title");
  const mark = title && event.target.closest("svg") !== event.target;
  tip.textContent = mark ? title.textContent : "";
  tip.style.display = mark ? "block" : "none";
});
"""


def _public(model: str) -> str:
    """A model's name without the folders of this machine."""
    return Path(model).name if Path(model).is_absolute() or model.startswith(".") else model


def _subtitle(data: Data) -> str:
    running = [name for name, entry in data["steps"].items() if entry["state"] != ledger.DONE]
    done = list(dict.fromkeys(name.partition("/")[0] for name in data["steps"] if name not in running))
    text = f"Done: {', '.join(done) or 'nothing yet'}."
    if set(running) - {"report"}:
        text += f" Not finished: {', '.join(running)}."
    if data["outdated"]:
        text += f" Left out, made with other options: {', '.join(data['outdated'])}."
    return text


def _note(summary: Summary) -> str:
    return f"<p>{escape(summary.note[:1].upper() + summary.note[1:])}.</p>" if summary.note else ""


def _cards(data: Data, summary: Summary) -> str:
    cards = []
    factors = data["factors"]
    if factors:
        cards.append((f"{factors['target_length'] / factors['original_length']:g}×",
                      f"window, {factors['original_length']:,} → {factors['target_length']:,} tokens"))  # fmt: skip
    ours = next((m for m in (ledger.AFTER_TRAINING, ledger.SEARCHED) if m in summary.methods), None)
    if ours:
        cards += list(_score_cards(summary, ours))
    seconds = sum(stage_seconds(data).values())
    if seconds:
        cards.append((duration(seconds), "hours:minutes:seconds" if seconds >= 3600 else "minutes:seconds, all stages"))
    return '<section class="cards">' + "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(text)}</span></div>' for value, text in cards
    ) + "</section>"  # fmt: skip


def _score_cards(summary: Summary, ours: str) -> Iterator[tuple[str, str]]:
    for suite in BY_LENGTH:
        own = summary.methods[ours]["by_length"].get(suite)
        if not own:
            continue
        longest = max(own, key=int)
        others = {
            name: found["by_length"].get(suite, {}).get(longest)
            for name, found in summary.methods.items()
            if name not in (ledger.AFTER_TRAINING, ledger.SEARCHED, ledger.BASE)
        }
        known = {name: value for name, value in others.items() if value is not None}
        best = max(known, key=lambda name: known[name], default=None)
        beside = f"; best closed form, {label(best)}: {known[best]:.1f}%" if best else ""
        yield f"{own[longest]:.1f}%", f"{SHORT_HEADS[suite]} at {length_label(int(longest))}{beside}"
    for key, text in (("perplexity_retention", "of the short perplexity kept"), ("short_retention", "of short tasks")):
        if summary.methods[ours][key] is not None:
            yield f"{summary.methods[ours][key]:.1f}%", text


def _results(summary: Summary) -> str:
    if not summary.rows:
        return ""
    return (
        f"<section><h2>Results</h2>{_table(summary.columns, summary.rows)}<p>{escape(summary.caption)}.</p></section>"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, of_words: bool = False) -> str:
    kind = ' class="words"' if of_words else ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(chart: Chart) -> str:
    parts = "".join(
        f'<div class="panel">{f"<h3>{escape(heading)}</h3>" if heading else ""}{svg}</div>'
        for heading, svg in chart.svgs
    )
    links = f'<a href="{chart.name}.png">PNG</a> · <a href="{chart.name}.csv">CSV</a>'
    return (
        f'<section id="{chart.name}"{" class=wide" if len(chart.svgs) > 1 else ""}><h2>{escape(chart.title)}</h2>'
        f'<figure><div class="panels">{parts}</div>'
        f'<figcaption>{escape(chart.caption)} <span class="links">{links}</span></figcaption></figure></section>'
    )


def _costs(data: Data) -> str:
    """Time, tokens and machines."""
    rows = []
    for stage, seconds in stage_seconds(data).items():
        rows.append([stage, duration(seconds), _work(data, stage), _machine(data, stage)])
    table = _table(["stage", "time", "work", "machine"], rows, of_words=True)
    return f"<section><h2>Cost</h2>{table}</section>" if rows else ""


def _work(data: Data, stage: str) -> str:
    if stage == "search" and data["search"]:
        tokens = data["search"]["document_evaluations"] * data["target_length"]
        return f"{data['search']['document_evaluations']:,} evaluations, {tokens:,} tokens"
    if stage == "data" and data["plan"]:
        return f"{data['plan']['rows']:,} rows"
    if stage == "train" and data["log"]:
        return f"{len(data['log']):,} steps, {sum(line['tokens'] for line in data['log']):,} tokens"
    if stage == "evaluate":
        return f"{len(data['evaluations'])} evaluations"
    if stage == "export" and data["exports"]:
        return ", ".join(f"{entry['bytes'] / 1e6:,.0f} MB" for entry in data["exports"])
    return ""


def _machine(data: Data, stage: str) -> str:
    facts: Sequence[Data] = {
        "search": [data["search"]] if data["search"] else [],
        "train": [data["training"]] if data["training"] else [],
        "evaluate": list(data["evaluations"].values()),
    }.get(stage, [])
    return ", ".join(dict.fromkeys(f"{fact['processes']} × {fact['device']}" for fact in facts))


def _serving(data: Data) -> str:
    parts = []
    for entry in data["exports"]:
        content = entry["factors"] or data["factors"]
        format: Format = "gguf" if entry["place"].endswith(".gguf") else "huggingface"
        name = Path(entry["place"]).name
        rows = "".join(
            f"<tr><td>{escape(engine)}</td><td><code>{escape(command)}</code></td><td>{escape(text)}</td></tr>"
            for engine, command, text in guidance(RescaleFactors.from_json(content), entry["family"], name, format)
        )
        parts.append(
            f"<h3>{escape(name)}</h3><div class='scroll'><table class='words'><thead><tr><th>engine</th>"
            f"<th>command</th><th>what it does</th></tr></thead><tbody>{rows}</tbody></table></div>"
        )
    if not parts:
        return ""
    return "<section><h2>Serving</h2>" + "".join(parts) + _verified(data) + "</section>"


def _verified(data: Data) -> str:
    rows = [
        [finding["engine"], finding["mode"], finding["verdict"],
         "" if finding["max_error"] is None else f"{finding['max_error']:.1e}", finding["note"]]
        for findings in (data["verified"] or {}).values()
        for finding in findings
    ]  # fmt: skip
    table = _table(["engine", "sequences", "verdict", "largest error", "note"], rows, of_words=True)
    return f"<h3>Verified</h3>{table}" if rows else ""


def _configuration(data: Data) -> str:
    facts = {
        "model": _public(data["model"]),
        "revision": data["revision"],
        "weights": (data["search"] or {}).get("weights"),
        "versions": data["versions"],
        "seeds": {
            "search": (data["search"] or {}).get("config", {}).get("evolution", {}).get("seed"),
            "plan": (data["plan"] or {}).get("seed"),
            "train": ((data["training"] or {}).get("config", {}).get("train") or {}).get("seed"),
        },
    }
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value if isinstance(value, str) else json.dumps(value))}</td></tr>"
        for name, value in facts.items()
        if value is not None
    )
    recipe = {**data["recipe"], "model": _public(data["model"])}
    return (
        f'<section><h2>Configuration</h2><div class="scroll"><table class="words">{rows}</table></div>'
        "<details><summary>Recipe</summary><pre>"
        f"{escape(json.dumps(recipe, indent=1, ensure_ascii=False))}</pre></details></section>"
    )
