"""A GGUF file is whole: every count, length and offset in it is held against the file's size.

Readers trust these numbers: a string of 2^60 bytes, a table of no tensors or an offset behind the
end give them anything from an error of their own to random weights. Nothing is allocated here by a
number in the file; the layout is that of the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final

from quantkit.errors import InputError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_NUMBERS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value of each numeric type."""
_UINT32, _STRING, _ARRAY = 4, 8, 9
_DEPTH: Final = 4
"""Of arrays in arrays; files have none."""
_AXES: Final = 4
"""The most that a tensor of GGML has."""
_ALIGNMENT: Final = 32


class _FaultError(Exception):
    """What is wrong with the file."""


def check_gguf(path: Path) -> None:
    """Returns where the file's tables and tensors lie whole in it, one behind the other.

    Raises:
        InputError: they do not; one line with what was expected, and where.
    """
    size = path.stat().st_size
    try:
        if size < 24:
            raise _FaultError(f"it has {size} bytes, less than a GGUF header")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check(_Cursor(data=data, size=size))
    except _FaultError as error:
        raise InputError(f"{path.name} is no whole GGUF file: {error}. Get it again.") from None


@dataclass(kw_only=True)
class _Cursor:
    """A place in the file, which every step moves on; none goes behind the end."""

    data: mmap.mmap
    size: int
    at: int = 0
    values: dict[str, int] = field(default_factory=dict)

    def skip(self, count: int, what: str) -> int:
        """Returns where `count` bytes begin, and goes behind them."""
        start = self.at
        if count > self.size - start:
            raise _FaultError(
                f"{what} at byte {start} takes {count} bytes, and the file ends at byte {self.size}"
            )
        self.at += count
        return start

    def number(self, kind: str, what: str) -> int:
        start = self.skip(struct.calcsize(kind), what)
        return int(struct.unpack_from(kind, self.data, start)[0])

    def text(self, what: str) -> str:
        count = self.number("<Q", f"the length of {what}")
        start = self.skip(count, what)
        try:
            return self.data[start : start + count].decode()
        except UnicodeDecodeError:
            raise _FaultError(f"{what} at byte {start} is not UTF-8 text") from None

    def value(self, kind: int, what: str, depth: int = 0) -> None:
        if kind in _NUMBERS:
            self.skip(_NUMBERS[kind], what)
        elif kind == _STRING:
            self.skip(self.number("<Q", f"the length of {what}"), what)
        elif kind == _ARRAY and depth < _DEPTH:
            inner = self.number("<I", what)
            count = self.number("<Q", f"the length of {what}")
            if inner in _NUMBERS:
                self.skip(count * _NUMBERS[inner], what)
                return
            for _ in range(count):  # an item takes bytes, so that the file's end ends this, too
                self.value(inner, what, depth + 1)
        else:
            raise _FaultError(f"{what} has the type {kind}, which GGUF does not know")


def _check(cursor: _Cursor) -> None:
    start = cursor.skip(4, "the magic number")
    if (found := cursor.data[start : start + 4]) != _MAGIC:
        raise _FaultError(f"it begins with {found!r}, expected {_MAGIC!r}")
    version = cursor.number("<I", "the version")
    if version not in _VERSIONS:
        raise _FaultError(f"it has version {version}, expected 2 or 3 in little-endian order")
    tensors, pairs = cursor.number("<Q", "the header"), cursor.number("<Q", "the header")
    for _ in range(pairs):
        key = cursor.text("a key")
        kind = cursor.number("<I", f"the type of {key!r:.80}")
        at = cursor.at
        cursor.value(kind, f"the value of {key!r:.80}")
        if key == "general.alignment" and kind == _UINT32:
            cursor.values[key] = struct.unpack_from("<I", cursor.data, at)[0]
    if not tensors:
        raise _FaultError("it holds no tensor")
    alignment = cursor.values.get("general.alignment", _ALIGNMENT)
    if alignment < 1:
        raise _FaultError("its alignment is 0")
    places = [_tensor(cursor, alignment) for _ in range(tensors)]
    begin = -(-cursor.at // alignment) * alignment
    expected = 0
    for offset, count, name in sorted(places):
        if offset != expected:  # they lie one behind the other, so that a wrong type shows here
            raise _FaultError(f"tensor {name!r:.80} begins at {offset}, expected {expected}")
        end = offset + count
        expected = -(-end // alignment) * alignment
        if begin + end > cursor.size:
            raise _FaultError(
                f"tensor {name!r:.80} ends at byte {begin + end}, and the file at {cursor.size}"
            )


def _tensor(cursor: _Cursor, alignment: int) -> tuple[int, int, str]:
    """Returns where a tensor begins, its bytes, and its name."""
    name = cursor.text("the name of a tensor")
    axes = cursor.number("<I", f"tensor {name!r:.80}")
    if not 0 < axes <= _AXES:
        raise _FaultError(f"tensor {name!r:.80} has {axes} axes, expected 1 to {_AXES}")
    shape = [cursor.number("<Q", f"tensor {name!r:.80}") for _ in range(axes)]
    kind = cursor.number("<I", f"tensor {name!r:.80}")
    offset = cursor.number("<Q", f"tensor {name!r:.80}")
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # 0.1 s, for GGUF alone

    try:
        block, bytes_of = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise _FaultError(f"tensor {name!r:.80} has the unknown type {kind}") from None
    if 0 in shape or shape[0] % block:
        raise _FaultError(f"tensor {name!r:.80} has the shape {shape}: no blocks of {block} fit")
    if offset % alignment:
        raise _FaultError(f"tensor {name!r:.80} begins at {offset}, no multiple of {alignment}")
    return offset, prod(shape) // block * bytes_of, name
