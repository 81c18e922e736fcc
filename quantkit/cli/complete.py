"""What the Tab key offers; a shell adds the files of the folder where nothing here begins so."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any, Final

from quantkit.cli.named_models import NAMED

VARIABLE: Final = "_QUANTKIT_COMPLETE"
"""By which a shell asks for the words that fit."""


def answer_shells() -> None:
    """Makes typer know the shells, where one asks: it does so itself for its own options alone."""
    if VARIABLE in os.environ:
        typers: Any = importlib.import_module("typer.completion")
        typers.completion_init()


def script_of(shell: str) -> str:
    """Returns the script that makes a shell ask."""
    typers: Any = importlib.import_module("typer.completion")
    found = typers.get_completion_script(prog_name="quantkit", complete_var=VARIABLE, shell=shell)
    return str(found)


def one_of(*words: object) -> Callable[[str], list[str]]:
    """Returns the completion of an option that takes one of these words."""

    def begun(incomplete: str) -> list[str]:
        return [word for word in map(str, words) if word.startswith(incomplete)]

    return begun


def models(incomplete: str) -> list[tuple[str, str]]:
    """Returns the shipped models that begin so, each with what it is."""
    return [
        (name, f"{model.kind}, {model.parameters / 1e6:.1f} million parameters")
        for name, model in NAMED.items()
        if name.startswith(incomplete)
    ]


def sets(incomplete: str) -> Iterable[str]:
    """Returns the calibration sets that begin so, those of the working directory among them."""
    from quantkit.calib_sets.find import set_names

    return [name for name in set_names() if name.startswith(incomplete)]
