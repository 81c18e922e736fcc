"""`--config FILE.toml`: options and arguments from a file; those of the command line win."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperArgument

from quantkit.errors import InputError, suggest
from quantkit.jobs.config_file import CONFIG_SCHEMA

_NOT_IN_FILES: Final = ("config", "help")


def read_config(context: typer.Context, path: str | None) -> str | None:
    """Makes the values of a config file the defaults of this command; returns the path.

    A value becomes the text that one would type, so that it is checked as such.

    Raises:
        InputError: no such file, not TOML, of another version or command, a key that is no option,
            a value that no option takes.
    """
    if path is None or context.resilient_parsing:
        return path
    plain = _read(path)
    command = " ".join(context.command_path.split()[1:])
    if plain.pop("command", None) != command:
        raise InputError(f'{path}: expected command = "{command}"; --config takes its own command.')
    params = {
        key: param
        for param in context.command.get_params(context)
        if param.name not in _NOT_IN_FILES
        for key in _keys(param)
    }
    values: dict[str, Any] = {}
    for key, value in plain.items():
        if key not in params:
            raise InputError(f"{path}: unknown key {key!r}.{suggest(key, params)}")
        name = params[key].name
        if name in values:
            raise InputError(f"{path}: {key!r} says again what another key says.")
        values[name] = _typed(params[key], value, f"{path}: {key}")
    context.default_map = values
    return path


def _read(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not TOML: {error}.") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:  # a zero byte in the path
        raise InputError(f"cannot read {path!r}: {error}.") from error
    try:
        plain = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        last = f"at line {len(text.splitlines())}, the last"
        said = str(error).replace("at end of document", last)
        raise InputError(f"{path} is not TOML: {said}.") from error
    found = plain.pop("schema", None)
    if found != CONFIG_SCHEMA:
        raise InputError(f'{path}: expected schema = "{CONFIG_SCHEMA}", got {found!r}.')
    return plain


def _keys(param: Any) -> list[str]:
    """Returns what a file calls it: an argument by its name, an option without its dashes."""
    if isinstance(param, TyperArgument):
        return [str(param.name).replace("_", "-")]
    return [option.removeprefix("--") for option in param.opts if option.startswith("--")]


def _typed(param: Any, value: Any, where: str) -> Any:
    """Returns what would have been typed for a value of the file."""
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise InputError(f"{where}: expected true or false, got {value!r}.")
        return value
    is_list = isinstance(value, list) and value and all(map(_is_word, value))
    if isinstance(param, TyperArgument) and param.nargs == -1:
        if is_list or _is_word(value):
            return list(map(str, value)) if is_list else [str(value)]
        raise InputError(f"{where}: expected a string, or a list of them, got {value!r}.")
    if is_list and param.metavar == "LIST":
        # a line each, since a comma may stand in a word
        return "".join(f"{word}\n" for word in value)
    if not _is_word(value):
        raise InputError(f"{where}: expected {_expected(param)}, got {value!r:.80}.")
    return str(value)


def _is_word(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _expected(param: Any) -> str:
    return "a value or a list of them" if param.metavar == "LIST" else "one string or number"
