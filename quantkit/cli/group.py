"""How errors leave the command line: one line on stderr and an exit code, in one place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from quantkit.errors import GateError, QuantkitError
from quantkit.processes import may_talk

INTERRUPTED = 130
BAD_INPUT = 2
GATE_FAILED = 1


def fail(message: str, code: int) -> typer.Exit:
    """Prints `error: ...` on one line of stderr; returns the exit to raise.

    Of several processes that share a job the first one prints: the others' errors reach it.
    """
    line = "".join(c for c in " ".join(message.split()) if c.isprintable())
    if may_talk():
        typer.echo(f"error: {line}", err=True)
    return typer.Exit(code)


class OneLineErrors(TyperGroup):
    """A command group whose errors take one line each."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; errors that quantkit raises on purpose become one line."""
        try:
            return super().invoke(ctx)
        except GateError as error:
            raise fail(str(error), GATE_FAILED) from error
        except QuantkitError as error:
            raise fail(str(error), BAD_INPUT) from error
        except BrokenPipeError:
            raise
        except OSError as error:
            if error.strerror is None:
                raise
            place = "" if error.filename is None else f"{error.filename}: "
            raise fail(f"{place}{error.strerror}.", BAD_INPUT) from error
        except KeyboardInterrupt as error:
            if may_talk():
                typer.echo(
                    "interrupted: finished work is kept; the same command goes on from there.",
                    err=True,
                )
            raise typer.Exit(INTERRUPTED) from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Parses and runs; a usage error becomes one line and exit code 2."""
        try:
            code = super().main(
                args=args,
                prog_name=prog_name or "quantkit",
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except Exception as error:
            # typer carries its own copy of click, so its usage errors are known by what they can do
            format_message = getattr(error, "format_message", None)
            if format_message is None:
                raise
            code = fail(f"{format_message()} (quantkit --help)", BAD_INPUT).exit_code
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code
