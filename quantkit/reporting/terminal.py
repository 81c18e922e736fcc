"""The tables that the command line prints, as plain text."""

from __future__ import annotations

from pathlib import Path

from quantkit.reporting.collect import collect
from quantkit.reporting.tables import (
    export_table,
    parity_table,
    ranges_table,
    sweep_table,
    topk_table,
)
from quantkit.reporting.text import plain_table, printable


def topk_text(run_folder: Path) -> str:
    """Returns the top-k table of a run folder, or "" where it has no `stats.json`."""
    table = topk_table(collect([run_folder]))
    return plain_table(table) if table.rows else ""


def sweep_text(run_folder: Path) -> str:
    """Returns the sweep table of a run folder, or "" where it has no `sweep.json`."""
    run = collect([run_folder])
    table = sweep_table(run, intervals=False)
    if not table.rows:
        return ""
    headlines = [found.result.headline for found in run.sweeps if found.result.headline]
    return plain_table(table) + "".join(f"{printable(line)}\n" for line in headlines)


def terminal_tables(run_folder: Path) -> str:
    """Returns both tables, those that the run folder has."""
    texts = (topk_text(run_folder), sweep_text(run_folder))
    return "\n".join(text for text in texts if text)


def ranges_text(run_folder: Path) -> str:
    """Returns the table of calibrated ranges, or "" where there is no `ranges.json`."""
    table = ranges_table(collect([run_folder]))
    return plain_table(table) if table.rows else ""


def export_text(run_folder: Path) -> str:
    """Returns the tables of exports and of their parity, or "" where there is no `export.json`."""
    run = collect([run_folder])
    tables = (export_table(run), parity_table(run))
    return "\n".join(plain_table(table) for table in tables if table.rows)
