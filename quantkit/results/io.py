"""Frozen dataclasses to JSON and back, strictly: what a file says is what the class has.

Three rules that the JSON standard leaves open:

* NaN is written as `null`, and `null` in a float field is read as NaN;
* infinities are written as the strings `"inf"` and `"-inf"`; the words NaN and Infinity, which are
  no JSON, and a field that stands there twice, are refused;
* a file is written whole or not at all: to a temporary name in its folder, then renamed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tempfile
import time
import types
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import (
    Any,
    BinaryIO,
    Final,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from quantkit.errors import InputError, suggest
from quantkit.results.result import Result

T = TypeVar("T")

_INFINITIES = {"inf": math.inf, "-inf": -math.inf}
_MISSING = object()
_HALF: Final = re.compile("[\ud800-\udfff]")
_EXACT: Final = (float, int)
"""Of what a list is taken whole where it holds nothing else; a bool is no int here."""


def to_plain(value: object) -> Any:
    """Returns the value as dicts, lists, strings, finite numbers, booleans and None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        return float(value)
    raise TypeError(f"a result cannot hold a {type(value).__name__}: {value!r:.80}")


def dumps(value: object) -> str:
    """Returns the JSON text of a result: UTF-8, indented by one, keys in the class's order."""
    return json.dumps(to_plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, value: object) -> None:
    """Writes a dataclass (or plain data) as JSON; a reader sees the old file or the new one.

    Raises:
        TypeError: the value holds something that is not data.
        InputError: the folder cannot be written to.
    """
    text = dumps(value)
    with written_whole(path) as file:
        # half a surrogate pair, as in the name of a file that is no text, is no character
        file.write(text.encode(errors="replace"))


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Yields a temporary file in the folder of `path`, which takes its place at the end.

    The folder is made. Where the body raises, the temporary file is removed and `path` stays as it
    was.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}.") from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror or error}.") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


_TEMPORARY: Final = re.compile(r"\.[^/]+\.[a-z0-9_]{8}")
"""What `written_whole` calls a file until it is whole."""
ABANDONED_S: Final = 600.0
"""Age of a temporary file that nobody writes any more; a younger one may be another process's."""


def remove_abandoned(folder: Path, names: Container[str]) -> None:
    """Removes what killed processes left of files of these names, once nobody may be writing it."""
    for path in folder.glob(".*") if folder.is_dir() else ():
        name = path.name[1:].rpartition(".")[0]
        if name in names and _TEMPORARY.fullmatch(path.name) and path.is_file():
            with suppress(OSError):  # another process was quicker
                if time.time() - path.stat().st_mtime > ABANDONED_S:
                    path.unlink()


def read_plain(path: Path) -> Any:
    """Returns the parsed JSON of a file, unchecked.

    Raises:
        InputError: no such file, or not JSON; names the file and the place.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text, parse_constant=_no_number, object_pairs_hook=_object)
    except FileNotFoundError as error:
        raise InputError(f"no such file: {path}.") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:  # ValueError: bytes, JSON, a number's length
        raise InputError(f"{path} is not JSON: {error}.") from error


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(k for k, _ in pairs).items() if count > 1)
        raise ValueError(f"the field {twice!r:.80} stands there twice")
    return found


def read_json(path: Path, cls: type[T]) -> T:
    """Returns the file as an instance of `cls`, whose first field is `schema`.

    Raises:
        InputError: another schema or another version (both are named; versions in the class's
            `OLDER` are read, their missing fields have their defaults), a field that is missing,
            unknown or of the wrong kind (the file and the field are named).
    """
    plain = read_plain(path)
    older = getattr(cls, "OLDER", ())
    is_older = isinstance(plain, dict) and plain.get("schema") in older
    if not is_older:
        check_schema(path, plain, schema_of(cls), older)
    value: Any = decode(plain, cls, f"{path}: ", "", is_older)
    if is_older:
        value = dataclasses.replace(value, schema=schema_of(cls))
    if isinstance(value, Result):
        value = value.in_folder(path.parent)
    found: T = value
    return found


def schema_of(cls: type) -> str:
    """Returns the schema that a result class reads and writes, e.g. `quantkit.stats/1`."""
    for field in dataclasses.fields(cls):
        if field.name == "schema":
            return str(field.default)
    raise TypeError(f"{cls.__name__} has no field `schema`")


def check_schema(path: Path, plain: object, expected: str, older: Sequence[str] = ()) -> None:
    """Raises InputError unless the field `schema` of the file is this one.

    Args:
        older: What else is read, for the message; oldest first.
    """
    if not isinstance(plain, dict):
        raise InputError(f"{path}: expected a JSON object, got {_kind(plain)}.")
    found = plain.get("schema", _MISSING)
    if found is _MISSING:
        raise InputError(f"{path}: no field `schema`; expected {expected!r}.")
    if found == expected:
        return
    kind = expected.partition("/")[0]
    found_kind, _, found_version = str(found).partition("/")
    if found_kind == kind:
        versions = [repr(known.partition("/")[2]) for known in (*older, expected)]
        raise InputError(
            f"{path}: this is version {found_version!r:.80} of {kind}, and this quantkit reads "
            f"version{'s' if older else ''} {', '.join(versions)}. Use the quantkit that wrote it, "
            "or run the command again."
        )
    raise InputError(f"{path}: schema {str(found)[:80]!r}, expected {expected!r}.")


def decode(plain: Any, kind: Any, file: str, where: str, older: bool) -> Any:
    """Returns plain data as an instance of the annotation `kind`, or raises InputError."""
    if kind is float:
        return _decode_float(plain, file, where)
    if kind is str:
        return _decode_text(plain, file, where)
    if kind is int:
        if isinstance(plain, int) and not isinstance(plain, bool):
            return plain
        raise _wrong("a whole number", plain, file, where)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(plain, kind, file, where, older)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(plain, get_args(kind), file, where, older)
    if origin is Literal:
        if any(plain == known and type(plain) is type(known) for known in get_args(kind)):
            return plain
        hint = suggest(str(plain), map(str, get_args(kind)))
        raise InputError(f"{file}field `{where}`: unknown value {plain!r:.80}.{hint}")
    if origin is list or origin is tuple:
        items = _expect(plain, list, "a list", file, where)
        item_kind = get_args(kind)[0]
        if item_kind in _EXACT and set(map(type, items)) <= {item_kind}:
            decoded = list(items)  # histograms: most of a file is such lists
        else:
            decoded = [
                decode(item, item_kind, file, f"{where}[{i}]", older)
                for i, item in enumerate(items)
            ]
        return tuple(decoded) if origin is tuple else decoded
    if origin is dict:
        fields = _expect(plain, dict, "an object", file, where)
        item_kind = get_args(kind)[1]
        return {
            _decode_text(key, file, where): decode(item, item_kind, file, f"{where}.{key}", older)
            for key, item in fields.items()
        }
    if kind is bool:
        return _expect(plain, bool, "true or false", file, where)
    if kind is type(None):
        if plain is None:
            return None
        raise _wrong("null", plain, file, where)
    raise TypeError(f"no JSON form for the annotation {kind!r}")


def _decode_union(plain: Any, kinds: tuple[Any, ...], file: str, where: str, older: bool) -> Any:
    """Returns the first alternative that fits; `null` is None where None is one of them."""
    if plain is None and type(None) in kinds:
        return None
    alternatives = [kind for kind in kinds if kind is not type(None)]
    for kind in alternatives[:-1]:
        try:
            return decode(plain, kind, file, where, older)
        except InputError:
            continue
    return decode(plain, alternatives[-1], file, where, older)


def _decode_float(plain: Any, file: str, where: str) -> float:
    if plain is None:
        return math.nan
    if isinstance(plain, str) and plain in _INFINITIES:
        return _INFINITIES[plain]
    if isinstance(plain, int | float) and not isinstance(plain, bool):
        try:
            return float(plain)
        except OverflowError:
            raise _wrong("a number below 1.8e308", plain, file, where) from None
    raise _wrong("a number", plain, file, where)


def _decode_text(plain: Any, file: str, where: str) -> str:
    text: str = _expect(plain, str, "a string", file, where)
    if not text.isascii() and _HALF.search(text):
        raise _wrong("a string (half a surrogate pair is no character)", plain, file, where)
    return text


def _decode_dataclass(plain: Any, cls: Any, file: str, where: str, older: bool) -> Any:
    given = _expect(plain, dict, "an object", file, where)
    hints, known, defaults = _fields_of(cls)
    dot = f"{where}." if where else ""
    for name in given:
        if name not in hints:
            raise InputError(f"{file}unknown field `{dot}{name}`.{suggest(name, known)}")
    for name in known:
        if name not in given and not (older and name in defaults):
            raise InputError(f"{file}missing field `{dot}{name}`.")
    return cls(
        **{
            name: decode(given[name], hints[name], file, dot + name, older)
            for name in known
            if name in given
        }
    )


@cache
def _fields_of(cls: Any) -> tuple[dict[str, Any], tuple[str, ...], frozenset[str]]:
    """Returns a dataclass's annotations, its fields, and those with a default.

    Evaluating annotations takes longer than reading an object, and files hold thousands.
    """
    fields = dataclasses.fields(cls)
    return (
        get_type_hints(cls),
        tuple(field.name for field in fields),
        frozenset(
            field.name
            for field in fields
            if field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        ),
    )


def _expect(plain: Any, kind: type, words: str, file: str, where: str) -> Any:
    if isinstance(plain, kind):
        return plain
    raise _wrong(words, plain, file, where)


def _wrong(expected: str, plain: object, file: str, where: str) -> InputError:
    place = f"field `{where}`: " if where else ""
    return InputError(f"{file}{place}expected {expected}, got {_kind(plain)}.")


def _kind(plain: object) -> str:
    return {"dict": "an object", "list": "a list", "NoneType": "null"}.get(
        type(plain).__name__, f"{plain!r:.40}"
    )
