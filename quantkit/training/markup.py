"""Text out of what is written in Markdown, or kept in the modules of the SWORD project."""

from __future__ import annotations

import html
import re
import struct
import zlib
from typing import Final

from quantkit.errors import InputError

_SPAN: Final = r"((?:.|\n(?![ ]*\n))+?)"
"""What emphasis may hold: more than a line, not more than a paragraph."""
_RULES: Final = tuple(
    (re.compile(pattern, re.MULTILINE), to)
    for pattern, to in (
        (r"<!--(?:.|\n)*?-->", ""),
        (r"^[ ]{0,3}(?:```|~~~).*$", ""),  # fences; what they hold stays
        (r"^[ ]{0,3}#{1,6}[ ]+(.*?)[ ]*#*$", r"\n\1\n"),
        (r"^[ ]{0,3}(?:=+|-{2,}|\*(?:[ ]*\*){2,}|_(?:[ ]*_){2,})[ ]*$", ""),  # rules, underlines
        (r"^[ ]{0,3}>[ ]?", ""),
        (r"!?\[([^\]\n]*)\]\([^()\n]*\)", r"\1"),
        (r"<(https?://[^>\s]+)>", r"\1"),
        (r"</?[A-Za-z][^<>\n]*>", ""),
        (rf"(?<![\w*\\])(\*{{1,3}})(?=\S){_SPAN}(?<=[^\s\\])\1(?![\w*])", r"\2"),
        (rf"(?<![\w_\\])(_{{1,3}})(?=\S){_SPAN}(?<=[^\s\\])\1(?![\w_])", r"\2"),
        (r"_+(?=\\?\[)|(?<=\])_+", ""),  # emphasis that was opened or closed alone, as of [Aside]_
        (r"`([^`\n]+)`", r"\1"),
        (r"\\([!-/:-@\[-`{-~])", r"\1"),
    )
)

_RECORD: Final = 12
_JOINED: Final = re.compile(r"</[wq]>(?=<[wq]\b)")
_TAG: Final = re.compile(r"<(/?)([A-Za-z]+)\b([^<>]*)>")
_NOTE: Final = re.compile(r"<(note|figure)\b(?:[^<>]*[^<>/])?>.*?</\1>", re.DOTALL)
_WORD: Final = re.compile(
    r"</?(?:w|hi|q|transChange|divineName|foreign|seg|name|reference)\b[^<>]*>"
)
_PARAGRAPH: Final = frozenset({"p", "title", "chapter", "lg", "table", "list", "div", "h"})
_LINE: Final = frozenset({"l", "lb", "row", "br", "item"})


def markdown_text(text: str) -> str:
    """Returns Markdown without headings' marks, emphasis, links, quotes' marks and tags.

    It is no parser: what it does not know stays as it is.
    """
    for pattern, to in _RULES:
        text = pattern.sub(to, text)
    return html.unescape(text)


def sword_index(name: str) -> str:
    """Returns the name of the index of a module's `.bzz` or `.czz` (or `.vzz`)."""
    return name[:-1] + "s"


def sword_texts(name: str, blocks: bytes, index: bytes) -> list[str]:
    """Returns the text of a zText or zCom module, one a block: a book or a chapter.

    The index has records of three little-endian 32-bit numbers: place and size of a zlib stream
    in `blocks`, and the size of the text in it.

    Raises:
        InputError: another compression, another encoding, or a broken file.
    """
    if len(index) % _RECORD:
        raise InputError(f"{sword_index(name)}: expected records of {_RECORD} bytes.")
    texts = []
    for number, (start, size, length) in enumerate(struct.iter_unpack("<III", index)):
        try:
            data = zlib.decompress(blocks[start : start + size])
            text = data.decode("utf-8")
        except (zlib.error, UnicodeDecodeError) as error:
            raise InputError(
                f"{name}, block {number}: {error}: expected a module with CompressType=ZIP and "
                "Encoding=UTF-8."
            ) from error
        if len(data) != length:
            raise InputError(f"{name}, block {number}: {len(data)} bytes, expected {length}.")
        texts.append(osis_text(text))
    return [text for text in texts if text]


def osis_text(text: str) -> str:
    """Returns the running text of OSIS or ThML: no tags, no notes; paragraphs are kept."""
    text = _JOINED.sub(" ", _NOTE.sub(" ", text))  # two words, where nothing stands between
    text = _WORD.sub("", text)
    text = _TAG.sub(_break, " ".join(text.split()))
    lines = (" ".join(line.split()) for line in html.unescape(text).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _break(tag: re.Match[str]) -> str:
    """Returns what stands for a tag: the end of a paragraph or line, a space, or nothing."""
    name, milestone = tag[2], tag[3]
    if name == "div" and "preverse" in milestone:  # it only says where a verse begins
        return ""
    if name in _PARAGRAPH:
        return "\n\n"
    if name in _LINE:
        return "\n"
    return " " if name in ("cell", "milestone") else ""
