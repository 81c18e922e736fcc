"""The command line: one file a command; it parses, calls one function and shows one result.

Talk goes to stderr and results to stdout. Exit codes: 0 done, 1 a gate failed, 2 bad input,
130 interrupted. Nothing here loads torch before a command has parsed its options.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from quantkit.cli.calib import calib_app
from quantkit.cli.calibrate import calibrate
from quantkit.cli.compare import compare
from quantkit.cli.diagnose import diagnose
from quantkit.cli.doctor import doctor
from quantkit.cli.export import export
from quantkit.cli.group import OneLineErrors
from quantkit.cli.report import report
from quantkit.cli.sensitivity import sensitivity
from quantkit.cli.stats import stats
from quantkit.cli.sweep import sweep
from quantkit.cli.train import train

app = typer.Typer(
    cls=OneLineErrors,
    name="quantkit",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _command in (
    stats, calibrate, sensitivity, sweep, export, diagnose, compare, train, report, doctor,
):  # fmt: skip
    app.command()(_command)
app.add_typer(calib_app, name="calib")


def _version(wanted: bool) -> None:
    """Prints the version and leaves, where it was asked for."""
    if wanted:
        try:
            typer.echo(f"quantkit {metadata.version('quantkit')}")
        except metadata.PackageNotFoundError:
            typer.echo("quantkit (not installed)")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def quantkit(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Where a transformer's outliers are, what they cost at low bit-widths, and a quantized ONNX
    model that keeps its accuracy.

    MODEL is a local transformers folder, a hub id, a .gguf file, or the name of a shipped model
    (smollm2). Every command writes its results below reports/ and says where.

    \b
    Examples:
      quantkit doctor
      quantkit stats smollm2 --samples 8
      quantkit calibrate smollm2 --method mse
      quantkit sweep ./my-model --bits 16,8,6,4 --granularity tensor,head
      quantkit compare
      quantkit compare ./baseline ./diff
      quantkit train pair.toml
      quantkit report reports/stats-* reports/sweep-*
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def main() -> None:
    """The entry point."""
    app()


__all__ = ["app", "main"]
