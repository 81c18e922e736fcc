"""Multiple-choice items: read from a file in HellaSwag's fields, or made from any text.

A made item is a stretch of prose, what follows it, and three stretches from elsewhere in the text.
Every cut is inside a sentence and all four endings have the same number of words and about the
same length, so that neither a capital letter nor the length gives the answer away. It measures
what HellaSwag measures (Zellers et al. 2019) with easier wrong endings: figures are the text's own
and compare between models, not with HellaSwag's.
"""

from __future__ import annotations

import json
import re
import string
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantkit.calib_sets.documents import decoded
from quantkit.calib_sets.draw import Draw
from quantkit.errors import InputError
from quantkit.tasks.items import sampled

CONTEXT_WORDS: Final = (60, 100)
ENDING_WORDS: Final = (8, 15)
ENDINGS: Final = 4
_LENGTH_RATIO: Final = 1.25
"""Endings of one item differ in characters by less than this factor from the true one."""
_TRIES: Final = 400
_PROSE_FRAC: Final = 0.85
_LEAST_WORDS: Final = 12
_MARKS: Final = string.punctuation + "\u201c\u201d\u2018\u2019\u2026\u2013\u2014"
_SENTENCE_END: Final = ".!?:;\u2026"
_CLOSING: Final = "".join(mark for mark in _MARKS if mark not in _SENTENCE_END)
_HALF: Final = re.compile("[\ud800-\udfff]")
"""JSON may spell it; UTF-8 and tokenizers cannot."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A context, endings of which one follows it, and the index of that one."""

    ctx: str
    endings: tuple[str, ...]
    label: int


def read_items(source: str) -> list[Item]:
    """Returns the items of a `.jsonl` with `ctx`, `endings` and `label` in each line.

    Other fields, which HellaSwag's own files have, are left alone; empty lines are skipped.

    Raises:
        InputError: no such file, not UTF-8, no items, or a line that is none; its number is named.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise InputError(f"multiple-choice file {source} {what}: expected a .jsonl.")
    found = []
    text = decoded(path.read_bytes(), path.name).removeprefix("\ufeff")
    # not splitlines: U+2028 ends a line for it, and stands unescaped in many a JSON file
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append(_item(line, f"{path.name}, line {number}"))
    if not found:
        raise InputError(f"{path.name} is empty: expected a JSON object in each line.")
    return found


def _item(line: str, where: str) -> Item:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):  # the latter: nested without end
        row = None
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected a JSON object with ctx, endings and label.")
    for name in ("ctx", "endings", "label"):
        if name not in row:
            raise InputError(f"{where}: expected a field {name!r}; got {', '.join(row) or 'none'}.")
    ctx, endings, label = row["ctx"], row["endings"], row["label"]
    if not isinstance(ctx, str):
        raise InputError(f"{where}: ctx is {type(ctx).__name__}; expected text.")
    if not isinstance(endings, list) or not all(isinstance(e, str) and e for e in endings):
        raise InputError(f"{where}: endings are no list of texts, none of them empty.")
    if len(endings) < 2:
        raise InputError(f"{where}: expected two endings or more, got {len(endings)}.")
    if len(set(endings)) < len(endings):
        raise InputError(f"{where}: one of the endings stands there twice.")
    if any(_HALF.search(text) for text in (ctx, *endings)):
        raise InputError(
            f"{where}: half a surrogate pair (\\ud800 to \\udfff) is no character: expected both."
        )
    if isinstance(label, str) and re.fullmatch("[0-9]+", label):
        label = int(label)
    # True is an int
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < len(endings):
        raise InputError(
            f"{where}: expected a label from 0 to {len(endings) - 1}, got {row['label']!r}."
        )
    return Item(ctx=ctx, endings=tuple(endings), label=label)


def made_from(text: str, *, items: int, seed: int, seen: str = "") -> list[Item]:
    """Returns up to `items` items whose context, true and wrong endings are all of the text.

    No word stands in two contexts or true endings. A paragraph that the text has twice is taken
    once. Where the text gives more than `items`, those are drawn by `seed`, in the text's order.

    Args:
        seen: Text that calibration has seen: its paragraphs are left out wherever they stand.

    Raises:
        InputError: the text gives none.
    """
    prose = _Prose(text, seen=_paragraphs(seen))
    places = _places(prose, Draw(seed, 0))
    found = []
    for index, place in enumerate(places):
        item = _made(prose, place, Draw(seed, 1 + index))
        if item is not None:
            found.append(item)
    if not found:
        raise InputError(
            f"the text has {len(prose.words)} words of prose that calibration has not seen: too "
            f"few for a multiple-choice item of about {sum(CONTEXT_WORDS) // 2} words and three "
            "other endings. Give more text, or set less of it aside by --calib-samples."
        )
    return sampled(found, items, seed)


class _Prose:
    """The words of a text's paragraphs of prose, each different one once: documentation repeats.

    Attributes:
        words: Of all of them, in order.
        begins: Index of each paragraph's first word.
        runs: Index of the first word of each stretch of paragraphs that follow one another.
    """

    def __init__(self, text: str, *, seen: Iterable[str] = ()) -> None:
        known = set(seen)
        self.words: list[str] = []
        self.begins: list[int] = []
        self.runs: list[int] = []
        before = False
        for paragraph in _paragraphs(text):
            words = paragraph.split(" ") if paragraph else []
            is_prose = _is_prose(words) and paragraph not in known
            known.add(paragraph)
            if is_prose:
                if not before:
                    self.runs.append(len(self.words))
                self.begins.append(len(self.words))
                self.words += words
            # an empty stretch parts nothing
            before = is_prose or (before and not words)

    def end(self, word: int) -> int:
        """Returns the index after the last word of a word's paragraph."""
        following = bisect_right(self.begins, word)
        return self.begins[following] if following < len(self.begins) else len(self.words)

    def run_end(self, word: int) -> int:
        """Returns the index after the last word of a word's run."""
        following = bisect_right(self.runs, word)
        return self.runs[following] if following < len(self.runs) else len(self.words)

    def ends_sentence(self, word: int) -> bool:
        """Returns whether a sentence or a paragraph ends with a word."""
        bare = self.words[word].rstrip(_CLOSING)
        return bare.endswith(tuple(_SENTENCE_END)) or self.end(word) == word + 1

    def text(self, begin: int, end: int) -> str:
        """Returns words `[begin, end)`, with an empty line between paragraphs."""
        parts = []
        while begin < end:
            stop = min(self.end(begin), end)
            parts.append(" ".join(self.words[begin:stop]))
            begin = stop
        return "\n\n".join(parts)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Word indices: the context is `[begin, cut)`, the true ending `[cut, end)`."""

    begin: int
    cut: int
    end: int


def _paragraphs(text: str) -> list[str]:
    """Returns what empty lines part, with single spaces."""
    return [" ".join(part.split()) for part in re.split(r"\n[ \t]*\n", text)]


def _is_prose(words: list[str]) -> bool:
    """Returns whether these are words of a language, not code, a table or a heading."""
    if len(words) < _LEAST_WORDS:
        return False
    plain = (re.sub("['\u2019-]", "", word.strip(_MARKS)) for word in words)
    return sum(word.isalpha() for word in plain) >= _PROSE_FRAC * len(words)


def _places(prose: _Prose, draw: Draw) -> list[_Place]:
    """Returns contexts and true endings that do not overlap, from the first word on."""
    found = []
    begin, least, most = 0, *CONTEXT_WORDS
    while begin < len(prose.words):
        length = least + draw.below((most - least) // 2 + 1)
        count = ENDING_WORDS[0] + draw.below(ENDING_WORDS[1] - ENDING_WORDS[0] + 1)
        last = min(begin + most, prose.run_end(begin))
        cut = next((w for w in range(begin + length, last) if _can_cut(prose, w, count)), None)
        if cut is None:
            # the next paragraph
            begin = prose.end(begin)
            continue
        found.append(_Place(begin=begin, cut=cut, end=cut + count))
        begin = cut + count
        while begin < len(prose.words) and not prose.ends_sentence(begin - 1):
            begin += 1
    return found


def _can_cut(prose: _Prose, cut: int, count: int) -> bool:
    """Returns whether an ending of so many words can begin here: inside a sentence."""
    return cut > 0 and not prose.ends_sentence(cut - 1) and prose.end(cut) >= cut + count


def _made(prose: _Prose, place: _Place, draw: Draw) -> Item | None:
    """Returns the item of a place, or None where no three wrong endings are found for it."""
    context = prose.text(place.begin, place.cut)
    true = prose.text(place.cut, place.end)
    count = place.end - place.cut
    if true in context:
        return None
    wrong: list[str] = []
    for _ in range(_TRIES):
        cut = draw.below(len(prose.words))
        if not _can_cut(prose, cut, count) or place.begin - count < cut < place.end:
            continue
        ending = prose.text(cut, cut + count)
        ratio = len(ending) / len(true)
        if ending in (true, *wrong) or ending in context:
            continue
        if 1 / _LENGTH_RATIO < ratio < _LENGTH_RATIO:
            wrong.append(ending)
        if len(wrong) == ENDINGS - 1:
            label = draw.below(ENDINGS)
            endings = (*wrong[:label], true, *wrong[label:])
            return Item(ctx=context, endings=endings, label=label)
    return None
