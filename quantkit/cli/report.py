"""`quantkit report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.reporting import write_report


def report(
    run: Annotated[list[Path], options.argument("RUN", "Folders that commands wrote.")],
    against: Annotated[
        Path | None,
        options.option(
            "--against",
            panel="What is shown",
            metavar="RUN",
            show_default="none",
            help="An earlier run to put beside these, with every change marked.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        options.option(
            "--out",
            panel=options.OUTPUT,
            metavar="DIR",
            show_default="the run folder; of several, reports/report",
            help="Folder to write to.",
        ),
    ] = None,
    config: options.Config = None,
    quiet: options.Quiet = False,
) -> None:
    """Write one HTML page from the files of earlier runs.

    The page is self-contained; a Markdown twin, report.md, lies beside it with its charts in
    figures/. The paths of both are printed. Statistics of a baseline and a differential model
    with a sweep over both make a page on the pair, beside the paper's own figures.

    Reads stats.json, ranges.json, calibration.json, sensitivity.json, sweep.json, export.json,
    auto.json, diagnosis.json, training.json, curves.jsonl, and sweep-seeds.json and
    training-seeds.json (other models, of several seeds), in and below the folders. A report that
    stands there already is replaced, and charts of it that the new one has not are removed, unless
    somebody changed them.

    Examples:
      quantkit report reports/compare-*
      quantkit report reports/stats-a reports/stats-b --out reports/both
      quantkit report reports/sweep-new --against reports/sweep-old
    """
    if out is None:
        one = run[0] if run[0].is_dir() else run[0].parent
        out = one if len(run) == 1 else Path("reports") / "report"
    written = write_report(run, out, against=against)
    if not quiet:
        typer.echo("\n".join(map(str, written[:2])))
