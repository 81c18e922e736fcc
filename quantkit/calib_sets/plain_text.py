"""The text of a source, before any tokenizer: a named set, a file, a folder or a `.jsonl`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from quantkit.calib_sets.check import SetInfo, verified
from quantkit.calib_sets.documents import documents_at
from quantkit.calib_sets.find import find_set, set_names
from quantkit.errors import InputError, suggest


@dataclass(frozen=True, kw_only=True)
class Documents:
    """What a source holds.

    Attributes:
        documents: One where it is a running text, to be cut into blocks: `whole`.
        sha256: Of all of it.
        named: The set that it comes from, if it does.
    """

    documents: tuple[str, ...]
    whole: bool
    sha256: str
    named: SetInfo | None = None


def documents_of(source: str) -> Documents:
    """Returns the documents of a source of text.

    Raises:
        InputError: no such source, a set that changed or holds no text, an empty text.
    """
    found = find_set(source)
    if found is not None:
        if found.manifest.kind != "text":
            raise InputError(
                f"calibration set {found.name} holds {found.manifest.kind}: expected text."
            )
        content, named = verified(found)
        whole = found.manifest.cut == "blocks"
        parts = ["\n\n".join(content.documents)] if whole else content.documents
        return Documents(documents=tuple(parts), whole=whole, sha256=content.sha256, named=named)
    path = Path(source).expanduser()
    if not path.exists():
        hint = suggest(source, set_names("text", "tokens"))
        raise InputError(f"text {source!r}: no such file or folder.{hint}")
    documents, whole = documents_at(path, source)
    if not any(document.strip() for document in documents):
        raise InputError(f"{source} is empty: expected text.")
    digest = hashlib.sha256("\x00".join(documents).encode()).hexdigest()
    return Documents(documents=tuple(documents), whole=whole, sha256=digest)


def joined(documents: Documents) -> str:
    """Returns all of them as one text; an empty line stands between two."""
    return "\n\n".join(documents.documents)
