"""The content of a set: its documents or its files, and the hashes of both.

Everything is read and hashed each time, which takes time in proportion to its size; a run over a
set of images hashes only those that it uses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from quantkit.calib_sets.docstrings import held_out_docstrings
from quantkit.calib_sets.documents import (
    TEXT_FIELD,
    data_of,
    decoded,
    is_jsonl,
    jsonl_rows,
    text_files,
)
from quantkit.calib_sets.image_files import image_files
from quantkit.calib_sets.retrieval import retrieval_sample
from quantkit.calib_sets.shapes import shape_image
from quantkit.calib_sets.source import Source
from quantkit.calib_sets.text_sources import dataset_texts, module_texts, package_path
from quantkit.errors import InputError, suggest

T = TypeVar("T")

GENERATORS: Final = {"retrieval": "text", "shapes": "images"}
"""Generators of ours, and the kind of what they make."""
_RETRIEVAL: Final = ("needles", "queries", "sentences")
_SHAPES_HASHED: Final = 16
_SHAPES_SIZE: Final = 32


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a source holds now.

    Attributes:
        documents: Of text; empty for the other kinds.
        paths: The files, by the names that a manifest has for them.
        files: Their hashes.
    """

    documents: tuple[str, ...] = ()
    paths: dict[str, Path] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    samples: int
    bytes: int
    sha256: str


def text_content(source: Source, folder: Path, *, draw: int | None, seed: int) -> Content:
    """Returns the documents of a source of text.

    Args:
        folder: That of the manifest, which relative paths start from.
        draw: How many documents are drawn, by `seed`; None takes all. A generator makes so many.

    Raises:
        InputError: the source cannot be read, or holds fewer.
    """
    paths: dict[str, Path] = {}
    files: dict[str, str] = {}
    if source.type == "generator":
        documents = _generated(source, draw or 0, seed)
    elif source.type == "module":
        documents = module_texts(source)
    elif source.type == "stdlib":
        documents = held_out_docstrings()
    elif source.type == "datasets":
        documents = dataset_texts(source)
    else:
        paths = source_files(source, folder, "text")
        documents = []
        for name, path in paths.items():
            data = data_of(path)
            files[name] = hashlib.sha256(data).hexdigest()
            text = decoded(data, name)
            column = source.field or TEXT_FIELD
            documents += jsonl_rows(text, name, column) if is_jsonl(path) else [text]
    if source.type != "generator" and draw is not None:
        documents = drawn(documents, draw, seed, str(source))
    if not any(document.strip() for document in documents):
        raise InputError(f"{source} is empty: expected text.")
    encoded = [document.encode("utf-8", "surrogatepass") for document in documents]
    return Content(
        documents=tuple(documents),
        paths=paths,
        files=files,
        samples=len(documents),
        bytes=sum(map(len, encoded)),
        sha256=hashlib.sha256(b"\x00".join(encoded)).hexdigest(),
    )


def shapes_content() -> Content:
    """Returns the generated images: they have no end, so the first sixteen, small, are hashed."""
    digest = hashlib.sha256()
    for index in range(_SHAPES_HASHED):
        digest.update(shape_image(index, _SHAPES_SIZE, _SHAPES_SIZE).tobytes())
    return Content(samples=0, bytes=0, sha256=digest.hexdigest())


def file_content(paths: dict[str, Path], samples: int) -> Content:
    """Returns files as they are."""
    files = {name: file_sha256(path) for name, path in paths.items()}
    return Content(
        paths=paths,
        files=files,
        samples=samples,
        bytes=sum(path.stat().st_size for path in paths.values()),
        sha256=files_sha256(files),
    )


def files_sha256(files: dict[str, str]) -> str:
    """Returns one hash over files, by their names and hashes, in the order of their names."""
    lines = (f"{files[name]} {name}\n" for name in sorted(files))
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def file_sha256(path: Path) -> str:
    """Returns the hash of a file.

    Raises:
        InputError: it cannot be read, or is no longer there.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error


def source_files(source: Source, folder: Path, kind: str) -> dict[str, Path]:
    """Returns the files of a path or a package: those that its kind of set reads.

    Raises:
        InputError: no such file or folder, or none of the kind in it.
    """
    found: dict[str, Path] = {}
    for name in source.names:
        path = package_path(name) if source.type == "package" else _below(folder, name)
        if path.is_dir():
            if kind not in _IN_FOLDERS:
                raise InputError(f"{name} is a folder: expected one file of {kind}.")
            inside = [(file.relative_to(path).as_posix(), file) for file in _IN_FOLDERS[kind](path)]
            if not inside:
                raise InputError(f"{name} holds no file of {kind}: expected {_EXPECTED[kind]}.")
            # "." is the folder of the set itself
            found |= {f"{name.rstrip('/')}/{below}": file for below, file in inside}
        elif path.is_file():
            found[name] = path
        else:
            raise InputError(f"{name}: no such file or folder (looked for {path}).")
    return found


def drawn(items: list[T], count: int, seed: int, source: str) -> list[T]:
    """Returns `count` items in an order that depends on `seed` and nothing else.

    Raises:
        InputError: there are fewer.
    """
    if len(items) < count:
        raise InputError(f"{source} holds {len(items)} samples: expected {count} or more.")
    order = sorted(range(len(items)), key=lambda i: hashlib.sha256(f"{seed} {i}".encode()).digest())
    return [items[index] for index in order[:count]]


def check_generator(source: Source) -> str:
    """Returns the kind of what a generator makes.

    Raises:
        InputError: there is no such generator, or it has no such parameter.
    """
    name = source.names[0]
    if name not in GENERATORS:
        raise InputError(f"no generator {name!r}.{suggest(name, GENERATORS)}")
    known = _RETRIEVAL if name == "retrieval" else ()
    for parameter in source.parameters:
        if parameter not in known:
            hint = suggest(parameter, known) if known else " It takes none."
            raise InputError(f"generator {name} has no parameter {parameter!r}.{hint}")
    return GENERATORS[name]


def _generated(source: Source, count: int, seed: int) -> list[str]:
    if check_generator(source) != "text":
        raise InputError(f"{source} makes {GENERATORS[source.names[0]]}: expected text.")
    options: dict[str, Any] = dict(source.parameters)
    return [retrieval_sample(index, seed=seed, **options).text for index in range(count)]


def _below(folder: Path, name: str) -> Path:
    return folder / Path(name).expanduser()


_IN_FOLDERS: Final[dict[str, Callable[[Path], Iterable[Path]]]] = {
    "text": text_files,
    "images": image_files,
}
_EXPECTED: Final = {"text": ".txt files", "images": ".png, .jpg, .webp or .bmp files"}
