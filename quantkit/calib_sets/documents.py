"""Text files as documents: one text, a folder of texts, or the rows of a `.jsonl`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from quantkit.errors import InputError

TEXT_FIELD: Final = "text"
_HALF: Final = re.compile("[\ud800-\udfff]")


def documents_at(path: Path, source: str, field: str = TEXT_FIELD) -> tuple[list[str], bool]:
    """Returns the documents at a path, and whether they are one text to be cut into blocks.

    Raises:
        InputError: a folder without texts, a file that is no text, a row without the field.
    """
    if path.is_dir():
        files = text_files(path)
        if not files:
            raise InputError(f"{source} holds no .txt file: expected one document a file.")
        return [decoded(data_of(file), file.name) for file in files], False
    text = decoded(data_of(path), path.name)
    return (jsonl_rows(text, source, field), False) if is_jsonl(path) else ([text], True)


def data_of(path: Path) -> bytes:
    """Returns a file's content.

    Raises:
        InputError: it cannot be read, or is no longer there.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error


def text_files(folder: Path) -> list[Path]:
    """Returns the texts of a folder, in the order of their names."""
    return sorted(folder.glob("*.txt"))


def is_jsonl(path: Path) -> bool:
    """Returns whether a file has one JSON object a line, by its name."""
    return path.suffix == ".jsonl"


def decoded(data: bytes, name: str) -> str:
    """Returns UTF-8 text, with the line ends that Python reads.

    Raises:
        InputError: other bytes; the first wrong one is named.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start}): expected a text file."
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def jsonl_rows(text: str, source: str, field: str = TEXT_FIELD) -> list[str]:
    """Returns one field of each row; empty lines are left out.

    Raises:
        InputError: a line that is no object with text in that field; its number is named.
    """
    found = []
    # not splitlines: U+2028 ends a line for it, and stands unescaped in many a JSON file
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(
                f"{source}, line {number}: expected a JSON object with a {field!r} field."
            ) from None
        if not isinstance(text, str):
            raise InputError(
                f"{source}, line {number}: expected text in {field!r}, got {text!r:.40}."
            )
        if not text.isascii() and _HALF.search(text):
            raise InputError(
                f"{source}, line {number}: half a surrogate pair (\\ud800 to \\udfff) in "
                f"{field!r} is no character: expected both."
            )
        found.append(text)
    return found
