"""Plain tables, as TOML gives them, to dataclasses: an unknown or wrong field is named."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from quantkit.errors import InputError, suggest

T = TypeVar("T")
_WORDS: Final = {str: "a string", int: "a whole number", bool: "true or false"}


def decoded(plain: dict[str, Any], cls: type[T], where: str = "") -> T:
    """Returns one table as its class; a class that stands in a table names it: `cls.table`.

    Args:
        where: What messages begin with, such as `[sizes] `.

    Raises:
        InputError: a field that is unknown, missing, or of another kind.
    """
    hints = get_type_hints(cls)
    known = {found.name: found for found in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in plain.items():
        if name not in known:
            raise InputError(f"{where}unknown field {name!r}.{suggest(name, known)}")
        values[name] = _value(value, hints[name], f"{where}{name}")
    for name, found in known.items():
        has_default = (
            found.default is not dataclasses.MISSING
            or found.default_factory is not dataclasses.MISSING
        )
        if name not in values and not has_default:
            raise InputError(f"{where}missing field {name!r}.")
    return cls(**values)


def _value(value: Any, kind: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _table(value, kind, where)
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if dataclasses.is_dataclass(item):
            rows = _of_kind(value, (list,), where, f"tables [[{where}]]")
            return tuple(_table(row, item, where) for row in rows)
        rows = _of_kind(value, (list,), where, "a list")
        return tuple(_value(row, item, where) for row in rows)
    if kind is float:
        number = _of_kind(value, (int, float), where, "a number")
        try:
            return float(number)
        except OverflowError as error:
            raise InputError(f"{where}: expected a number below 1.8e308.") from error
    return _of_kind(value, (kind,), where, _WORDS[kind])


def _table(value: Any, kind: Any, where: str) -> Any:
    return decoded(_of_kind(value, (dict,), where, "a table"), kind, f"[{kind.table}] ")


def _of_kind(value: Any, kinds: tuple[type, ...], where: str, words: str) -> Any:
    is_bool = isinstance(value, bool) and bool not in kinds
    if is_bool or not isinstance(value, kinds):
        raise InputError(f"{where}: expected {words}, got {value!r:.60}.")
    return value
