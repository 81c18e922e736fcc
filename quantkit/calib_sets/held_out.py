"""Which text is held out of training, by a hash alone; and the same paragraph never twice.

The rule needs neither the other texts nor their order, so that whoever evaluates finds the same
held-out part as whoever trained.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from typing import Final

HELD_OUT: Final = 0.1
"""Share of the standard library's modules whose docstrings are never trained on."""
PART: Final = 20_000
"""Characters; a longer document is cut, since whole books would make the split lumpy."""
SHORT: Final = 40
"""Characters; a shorter paragraph (`Returns nothing.`, `Exit`) may repeat."""

_BREAK: Final = re.compile(r"\n(?:[ ]*\n)+")
_FOLDED: Final = str.maketrans({
    "\u2018": "'", "\u2019": "'", "\u201a": "'", "\u201b": "'", "\u2032": "'",
    "\u201c": '"', "\u201d": '"', "\u201e": '"', "\u201f": '"', "\u2033": '"',
    "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\u2212": "-",
    "\u2014": "--", "\u2015": "--", "\u2026": "...", "\u2028": "\n", "\u2029": "\n\n",
    "\u00a0": " ", "\u202f": " ", "\t": "    ", "\r": "\n", "\x0b": "\n", "\x0c": "\n\n",
    "\u00ad": "", "\u200b": "", "\u200c": "", "\u200d": "", "\u2060": "", "\ufeff": "",
})  # fmt: skip
_CONTROL: Final = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")


def normalised(text: str) -> str:
    """Returns the text in NFC, with ASCII quotes and dashes, and one empty line a paragraph.

    A small vocabulary has better uses than three kinds of apostrophe, and a text that is set in
    another typography is the same text. The indentation of lines is kept.
    """
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n")).translate(_FOLDED)
    lines = (line.rstrip() for line in _CONTROL.sub("", text).split("\n"))
    return _BREAK.sub("\n\n", "\n".join(lines)).strip("\n")


def paragraphs(text: str) -> list[str]:
    """Returns what stands between the empty lines of a normalised text."""
    return [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]


def parts(text: str) -> list[str]:
    """Returns a normalised text in parts of about `PART` characters, cut between paragraphs."""
    if len(text) <= PART:
        return [text] if text else []
    size = len(text) / -(-len(text) // PART)
    found: list[list[str]] = [[]]
    done = 0
    for paragraph in paragraphs(text):
        if found[-1] and done >= len(found) * size:
            found.append([])
        found[-1].append(paragraph)
        done += len(paragraph) + 2
    return ["\n\n".join(part) for part in found]


def fingerprint(text: str) -> bytes:
    """Returns the sha256 of a text without regard to its white space and case."""
    return hashlib.sha256(" ".join(text.split()).casefold().encode("utf-8", "replace")).digest()


def is_held_out(key: str, share: float) -> bool:
    """Returns whether what has this key (a document's text, or its name) is held out.

    A larger share holds out all that a smaller one does.
    """
    return int.from_bytes(fingerprint(key)[:8], "big") < share * 2**64


def without_repeats(documents: Iterable[str], seen: set[bytes]) -> tuple[list[str], int]:
    """Returns the documents without paragraphs that are in `seen`, and how many were left out.

    What is kept is added to `seen`. Short paragraphs are kept and not added; a document of which
    nothing is left is none.
    """
    found, repeats = [], 0
    for document in documents:
        kept = []
        for paragraph in paragraphs(document):
            if len(paragraph) >= SHORT:
                key = fingerprint(paragraph)
                if key in seen:
                    repeats += 1
                    continue
                seen.add(key)
            kept.append(paragraph)
        if kept:
            found.append("\n\n".join(kept))
    return found, repeats
