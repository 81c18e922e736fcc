"""How errors leave the command line: one line on stderr and an exit code, in one place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from quantkit.cli.complete import answer_shells
from quantkit.cli.help import help_page, help_text
from quantkit.errors import GateError, InputError, QuantkitError, suggest
from quantkit.processes import may_talk

INTERRUPTED = 130
BAD_INPUT = 2
GATE_FAILED = 1
SETTINGS = {"help_option_names": ["-h", "--help"]}
"""Of every command and group."""


def fail(message: str, code: int) -> typer.Exit:
    """Prints `error: ...` on one line of stderr; returns the exit to raise.

    Of several processes that share a job the first one prints: the others' errors reach it.
    """
    line = "".join(c for c in " ".join(message.split()) if c.isprintable())
    if may_talk():
        typer.echo(f"error: {line}", err=True)
    return typer.Exit(code)


def interrupted() -> typer.Exit:
    """Says that work was interrupted; returns the exit to raise."""
    if may_talk():
        typer.echo(
            "interrupted: finished work is kept; the same command goes on from there.", err=True
        )
    return typer.Exit(INTERRUPTED)


class OneLineErrors(TyperGroup):
    """A command group whose errors take one line each."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text(self, ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command that is named.

        Raises:
            InputError: there is none; the nearest is suggested.
        """
        if args and not ctx.resilient_parsing and args[0] not in self.commands:
            raise InputError(f"no command {args[0]!r}.{suggest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)

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
            raise interrupted() from error

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
        answer_shells()
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
            if not hasattr(error, "format_message"):
                raise
            code = fail(_usage_error(error), BAD_INPUT).exit_code
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def _usage_error(error: Any) -> str:
    """Returns what is wrong with a command line, what was meant, and where its help is."""
    ctx = getattr(error, "ctx", None)
    path = "quantkit" if ctx is None else ctx.command_path
    name = getattr(error, "option_name", None)
    if ctx is None:
        said = error.format_message()
    elif name is not None and hasattr(error, "possibilities"):
        options = [word for param in ctx.command.get_params(ctx) for word in param.opts]
        long = [word for word in options if word.startswith("--")]
        said = f"no option {name}.{suggest(name, long)}"
    elif hasattr(error, "param_type"):  # something that is required is missing
        example = next(iter(help_page(ctx.command, ctx).examples), "")
        said = error.format_message() + (f" For example: {example}" if example else "")
    elif (kind := _kind(getattr(error, "param", None))) is not None:
        said = f"{error.param.opts[0]} takes {kind}."
    else:
        said = error.format_message()
    return f"{said} ({path} --help)"


def _kind(param: Any) -> str | None:
    """Returns what an option of numbers takes; None for another one."""
    described = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    return {int: "a whole number", float: "a number"}.get(described) if described else None
