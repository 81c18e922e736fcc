"""Where a set comes from, as data: `Source.parse(text)` reads it and `str(source)` is its inverse.

| text | is |
|---|---|
| `prose.txt`, `texts/`, `set.jsonl`, `set.jsonl#field`, `photos/`, `set.npz` | files |
| `module:pydoc_data.topics#topics` | text in a module's variable: a string, a list or a dict |
| `module:ast,argparse` | the source code of modules |
| `package:NAME/path` | a file or folder inside an installed Python package |
| `stdlib:docstrings` | docstrings of the standard library that are held out of training |
| `datasets:ID[:CONFIG]/SPLIT#FIELD` | a column of a data set of the package `datasets` |
| `generator:retrieval?needles=4&queries=2` | text of ours; `generator:shapes`: images of ours |
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final, Literal

from quantkit.errors import InputError

ATTRIBUTES: Final = {"pydoc_data.topics": "topics"}
"""The variable that is meant where a module is nothing but that."""
_FIELD: Final = "text"
_KINDS: Final = ("module", "package", "datasets", "generator", "stdlib")
_DOCSTRINGS: Final = "docstrings"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the content is.

    Attributes:
        names: Paths, relative to the manifest's folder or absolute; modules; one `NAME/path` of a
            package; one id of a data set; one generator; `docstrings`, of `stdlib`.
        field: The variable of a module (empty: its source code); the column of a data set or a
            `.jsonl`.
        config, split: Of a data set; the config may be empty.
        parameters: Of a generator; what is not named has the generator's default.
    """

    type: Literal["path", "module", "package", "datasets", "generator", "stdlib"]
    names: tuple[str, ...]
    field: str = ""
    config: str = ""
    split: str = ""
    parameters: dict[str, int] = dataclasses.field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> Source:
        """Returns the source that a text names.

        Raises:
            InputError: nothing is named, or a part is missing.
        """
        kind, colon, rest = text.partition(":")
        if not colon or kind not in _KINDS:
            return _path(text)
        if not rest.strip("#/?"):
            raise InputError(f"source {text!r}: expected a name after {kind}:.")
        if kind == "stdlib":
            if rest != _DOCSTRINGS:
                raise InputError(f"source {text!r}: expected stdlib:{_DOCSTRINGS}.")
            return Source(type="stdlib", names=(rest,))
        if kind == "module":
            listed, _, attribute = rest.partition("#")
            names = tuple(name.strip() for name in listed.split(","))
            if not all(names):
                raise InputError(f"source {text!r}: expected modules with commas between them.")
            attribute = attribute or (ATTRIBUTES.get(names[0], "") if len(names) == 1 else "")
            return Source(type="module", names=names, field=attribute)
        if kind == "package":
            name, _, column = rest.partition("#")
            if not all(name.partition("/")):
                raise InputError(f"source {text!r}: expected package:NAME/path/in/package.")
            return Source(type="package", names=(name,), field=column)
        return _dataset(text, rest) if kind == "datasets" else _generator(text, rest)

    def __str__(self) -> str:
        """Returns the text that `parse` reads."""
        names = ",".join(self.names)
        column = f"#{self.field}" if self.field else ""
        if self.type == "path":
            return names + column
        if self.type == "datasets":
            config = f":{self.config}" if self.config else ""
            return f"datasets:{names}{config}/{self.split}{column}"
        options = "&".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.type}:{names}{column}" + (f"?{options}" if options else "")


def _path(text: str) -> Source:
    path, mark, column = text.rpartition("#")
    if mark and path.lower().endswith(".jsonl"):
        return Source(type="path", names=(path,), field=column)
    if not text:
        raise InputError("the source is empty: expected a file, a folder, or module:, package: ...")
    return Source(type="path", names=(text,))


def _dataset(text: str, rest: str) -> Source:
    place, _, column = rest.partition("#")
    identity, _, split = place.rpartition("/")
    name, colon, config = identity.rpartition(":")
    if not colon:
        name, config = identity, ""
    if not name or not split:
        raise InputError(f"source {text!r}: expected datasets:ID[:CONFIG]/SPLIT#FIELD.")
    return Source(
        type="datasets", names=(name,), field=column or _FIELD, config=config, split=split
    )


def _generator(text: str, rest: str) -> Source:
    name, _, options = rest.partition("?")
    parameters = {}
    for option in options.split("&") if options else []:
        key, _, value = option.partition("=")
        if not (key and value.isascii() and value.isdigit()) or key in parameters:
            raise InputError(
                f"source {text!r}: expected name=whole number, each once; got {option!r}."
            )
        parameters[key] = int(value)
    return Source(type="generator", names=(name,), parameters=parameters)
