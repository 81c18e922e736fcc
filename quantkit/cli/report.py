"""`quantkit report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.reporting import write_report


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", show_default=False, help="Folders that commands wrote."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            show_default=False,
            help="Folder to write to. Default: the run folder; with several, reports/report.",
        ),
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Write one HTML page from the files of earlier runs.

    The page is self-contained; a Markdown twin, report.md, lies beside it, and so do the charts
    that it shows: sweep-TASK.svg, pair-*.svg, training-*.svg. The paths of all files are printed.
    Statistics of a baseline and a differential model with a sweep over both make a page on the
    pair, beside the paper's own figures.

    Reads stats.json, ranges.json, calibration.json, sensitivity.json, sweep.json, export.json,
    auto.json, training.json, curves.jsonl, and sweep-seeds.json and training-seeds.json (other
    models, of several seeds), in and below the folders. A report that stands there already is
    replaced, and charts of it that the new one has not are removed, unless somebody changed them.

    \b
    Examples:
      quantkit report reports/compare-*
      quantkit report reports/stats-a reports/stats-b --out reports/both
    """
    if out is None:
        one = runs[0] if runs[0].is_dir() else runs[0].parent
        out = one if len(runs) == 1 else Path("reports") / "report"
    written = write_report(runs, out)
    if not quiet:
        typer.echo("\n".join(map(str, written)))
