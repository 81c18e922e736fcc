"""TOML as manifests and configs need it: strings, numbers, booleans, lists and tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from quantkit.errors import InputError

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_SHORT: Final = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f",
                 "\r": "\\r"}  # fmt: skip


def toml_text(fields: Mapping[str, object]) -> str:
    """Returns the TOML of a mapping: plain fields, then its tables; empty tables are left out.

    Tables in a list are inline. Floats have the digits that give the same number back.

    Raises:
        InputError: a string that is no Unicode text (a lone surrogate, as in a broken file name).
        TypeError: a value of another type.
    """
    return "\n".join(_lines(fields, "")) + "\n"


def _lines(fields: Mapping[str, object], table: str) -> list[str]:
    plain = {key: value for key, value in fields.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in fields.items():
        if isinstance(value, Mapping) and value:
            name = f"{table}.{_key(key)}" if table else _key(key)
            lines += ["", f"[{name}]", *_lines(value, name)]
    return lines


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        if not value:
            return "[]"
        parts = [_value(item) for item in value]
        line = f"[{', '.join(parts)}]"
        return line if len(line) <= 90 else "[\n    " + ",\n    ".join(parts) + ",\n]"
    raise TypeError(f"TOML text cannot hold a {type(value).__name__}: {value!r:.80}")


def _string(text: str) -> str:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise InputError(
            f"{text!r:.80} is no Unicode text: expected one that a TOML file can hold."
        )
    return '"' + "".join(map(_character, text)) + '"'


def _character(c: str) -> str:
    if c in _SHORT:
        return _SHORT[c]
    return f"\\u{ord(c):04X}" if ord(c) < 0x20 or ord(c) == 0x7F else c
