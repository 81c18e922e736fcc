"""`quantkit models`: what can be named in one word; found without loading a model or torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Final

import typer

from quantkit.cli import options
from quantkit.cli.named_models import NAMED
from quantkit.reporting.text import Table, plain_table, size

_OTHERS: Final = (
    "a local transformers folder",
    "a hub id, such as org/model (needs a network, or the hub's cache)",
    "a .gguf file",
    "timm:NAME, for a model of timm",
    "an .onnx file, for export and diagnose",
)


def models(as_json: options.Json = False) -> None:
    """List the models that have a name of one word.

    And what else MODEL can be. Loads none of them.

    Examples:
      quantkit models
      quantkit models --json
    """
    paths = {name: model.path for name, model in NAMED.items()}
    if as_json:
        found = [
            {
                "name": name,
                **asdict(model),
                "install": model.install,
                "installed": path is not None,
                "bytes": None if path is None else path.stat().st_size,
            }
            for (name, model), path in zip(NAMED.items(), paths.values(), strict=True)
        ]
        typer.echo(json.dumps(found, indent=1))
        return
    rows = tuple(
        (
            name,
            model.kind,
            "comes with quantkit" if not model.install else "installed" if path else model.install,
            f"{model.parameters / 1e6:,.1f} M",
            "" if path is None else size(path.stat().st_size),
        )
        for (name, model), path in zip(NAMED.items(), paths.values(), strict=True)
    )
    columns = ("name", "what", "there, or how to get it", "parameters", "file")
    table = Table(title="Models by name", columns=columns, rows=rows, text_columns=3)
    typer.echo(plain_table(table), nl=False)
    typer.echo("MODEL can also be:")
    typer.echo("\n".join(f"  {other}" for other in _OTHERS))
