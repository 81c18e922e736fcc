"""The commands in their groups, and what `quantkit` alone says."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated, Any, Final

import typer

from quantkit.cli.calib import calib_app
from quantkit.cli.calibrate import calibrate
from quantkit.cli.compare import compare
from quantkit.cli.completion import completion
from quantkit.cli.diagnose import diagnose
from quantkit.cli.doctor import doctor
from quantkit.cli.export import export
from quantkit.cli.group import SETTINGS, OneLineErrors
from quantkit.cli.help import OneCommand
from quantkit.cli.models import models
from quantkit.cli.report import report
from quantkit.cli.sensitivity import sensitivity
from quantkit.cli.stats import stats
from quantkit.cli.sweep import sweep
from quantkit.cli.train import train

_GROUPS: Final[dict[str, tuple[Any, ...]]] = {
    "Measure": (stats, calib_app, calibrate, sensitivity, sweep),
    "Ship": (export, diagnose),
    "Report": (compare, report),
    "Train": (train,),
    "Look": (doctor, models, completion),
}

app = typer.Typer(
    cls=OneLineErrors,
    name="quantkit",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
)
for _title, _commands in _GROUPS.items():
    for _command in _commands:
        if _command is calib_app:
            app.add_typer(calib_app, name="calib", rich_help_panel=_title)
        else:
            app.command(cls=OneCommand, rich_help_panel=_title)(_command)


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
    (quantkit models). Every command writes its results below reports/ and says where.

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


__all__ = ["app"]
