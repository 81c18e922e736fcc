"""`quantkit completion`: the lines that teach a shell our words."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from quantkit.cli.complete import one_of, script_of
from quantkit.errors import InputError, suggest

SHELLS: Final = ("bash", "zsh", "fish", "powershell")


def completion(
    shell: Annotated[
        str,
        typer.Argument(
            metavar="SHELL",
            help=f"Whose script is printed: {', '.join(SHELLS)}.",
            autocompletion=one_of(*SHELLS),
        ),
    ],
) -> None:
    """Print the script by which a shell completes our words.

    Those are commands, options, models, calibration sets and recipes.

    Bash: source <(quantkit completion bash), in ~/.bashrc to have it always. Zsh: the same with
    zsh, after compinit. Fish: quantkit completion fish | source. PowerShell: quantkit completion
    powershell | Out-String | Invoke-Expression.

    Examples:
      quantkit completion bash
      quantkit completion zsh
    """
    if shell not in SHELLS:
        raise InputError(f"no completion for {shell!r}.{suggest(shell, SHELLS)}")
    typer.echo(script_of(shell))
