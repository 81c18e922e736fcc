"""The two tables that the command line prints, as plain text."""

from __future__ import annotations

from pathlib import Path

from quantkit.reporting.collect import collect
from quantkit.reporting.tables import sweep_table, topk_table
from quantkit.reporting.text import plain_table


def topk_text(run_folder: Path) -> str:
    """Returns the top-k table of a run folder, or "" where it has no `stats.json`."""
    table = topk_table(collect([run_folder]))
    return plain_table(table) if table.rows else ""


def sweep_text(run_folder: Path) -> str:
    """Returns the sweep table of a run folder, or "" where it has no `sweep.json`."""
    run = collect([run_folder])
    table = sweep_table(run)
    if not table.rows:
        return ""
    headlines = [found.result.headline for found in run.sweeps if found.result.headline]
    return plain_table(table) + "".join(f"{line}\n" for line in headlines)


def terminal_tables(run_folder: Path) -> str:
    """Returns both tables, those that the run folder has."""
    texts = (topk_text(run_folder), sweep_text(run_folder))
    return "\n".join(text for text in texts if text)
