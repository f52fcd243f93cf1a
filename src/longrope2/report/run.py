"""`longrope2 report`: a run's folder becomes a page with figures and their data."""

import csv
import webbrowser
from pathlib import Path

from longrope2 import ledger
from longrope2.console import say, warn
from longrope2.errors import MissingExtraError
from longrope2.files import atomic_path, write_text
from longrope2.report.charts import Chart, charts
from longrope2.report.gather import gather
from longrope2.report.page import page
from longrope2.report.summary import summarise


def write_report(folder: Path) -> Path:
    """Write the page of what a run has so far, its figures as PNG and their data as CSV; returns the page's path."""
    data = gather(folder)
    summary = summarise(data)
    drawn = charts(data, summary)
    path = folder / ledger.PAGE
    for chart in drawn:
        _write_data(chart, path.with_name(f"{chart.name}.csv"))
    try:
        for chart in drawn:
            chart.draw(path.with_name(f"{chart.name}.png"))
    except MissingExtraError as error:
        warn(str(error))
    write_text(path, page(data, summary, drawn))
    return path


def run_report(folder: Path, *, open_page: bool) -> None:
    """`longrope2 report`."""
    path = write_report(folder)
    say(f"wrote {path}")
    if open_page and not webbrowser.open(path.absolute().as_uri()):
        warn("no browser was found to open it with")


def _write_data(chart: Chart, path: Path) -> None:
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(chart.columns)
        writer.writerows(chart.rows)
