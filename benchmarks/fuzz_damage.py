"""Damage for `fuzz.py`: what people, disks and other programs do to files and option words."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

RAW = {
    "huge": "1e400",
    "tiny": "-1e-400",
    "nan": "NaN",
    "infinity": "Infinity",
    "minus": "-Infinity",
    "digits": "9" * 400,
    "more digits": "-" + "7" * 5000,
    "deep": "[" * 3000 + "]" * 3000,
    "deeper": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "half": '"\\ud800"',
    "zero byte": '"\\u0000"',
    "lines": '"one\\ntwo\\r\\u2028three"',
    "long": '"' + "x" * 20_000 + '"',
}
"""What stands in a file as these characters, whatever a JSON writer would make of it."""
PLAIN: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 1 << 31, 1 << 53, 1 << 63, -(1 << 64), 0.5, -0.0, 1e308,
    5e-324, "", " ", "inf", "-inf", "nan", "0", "text", "é\u202e\U0001f600", "../../x",
    "<script>", "%s{0}", [], [[]], {}, {"": 0}, [None], [1, "a"], {"a": {"b": []}},
)  # fmt: skip
BYTES = (
    b"\xef\xbb\xbf", b"\xff\xfe", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\r\n", b"\n",
    b"\n\n", b'"', b"'", b"\\", b"{", b"}", b"[", b"]", b",", b":", b"=", b"#", b"+", b"-", b".",
    b"/", b"%", b" ", b"0", b"9" * 30, b"9" * 5000, b"1e999", b"NaN", b"inf", b"null",
    b"\xe2\x80\xa8", b"\xd9\xa3", b"1979-05-27", b"\x1b[31m",
)  # fmt: skip
WORDS = (
    "", ":", "::", "+", ",", "=", "==", "#", "?", "&", "/", "..", "*", "[", "]", "-1", "0", "1",
    "2", "8", "16", "17", "1e9", "nan", "inf", "-inf", "1_0", "0x8", "08", "9" * 30, "9" * 5000,
    "٣", "²", "\u0131", "İ", "none", "w8", "a8", "w8a8", "logits4", "kv8", "qk8", "probs8", "nf4",
    "llm-int8", "group", "group0", "group32", "tensor", "head", "row", "token", "static",
    "dynamic", "smooth", "symmetric", "asymmetric", "unit", "minmax", "mse", "entropy",
    "percentile", "needles", "needles=2", "depths=0/1", "icl", "shots=16", "module", "package",
    "datasets", "generator", "int", "u", "n", "\n", "\x00", "\ud800", "é" * 50, "a" * 20_000,
)  # fmt: skip


def damaged(kind: str, seed: bytes, draw: random.Random) -> bytes:
    """Returns a seed with one to three things wrong with it (one in twenty is left as it is)."""
    for _ in range(draw.choice((0, *(1,) * 12, *(2,) * 4, *(3,) * 3))):
        ways = _WAYS[kind]
        seed = draw.choice(ways)(seed, draw)
    return seed


def cut_bytes(data: bytes, draw: random.Random) -> bytes:
    """Returns its beginning."""
    return data[: draw.randrange(len(data) + 1)]


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Returns it with bytes replaced, put in, taken out or repeated at one place."""
    at = draw.randrange(len(data) + 1)
    upto = min(len(data), at + draw.choice((1, 1, 2, 8, 64)))
    way = draw.randrange(4)
    if way == 0:
        return data[:at] + bytes(draw.randrange(256) for _ in range(upto - at)) + data[upto:]
    if way == 1:
        return data[:at] + draw.choice(BYTES) + data[at:]
    if way == 2:
        return data[:at] + data[upto:]
    return data[:upto] + data[at:upto] * draw.choice((1, 2, 50)) + data[upto:]


def begun_otherwise(data: bytes, draw: random.Random) -> bytes:
    """Returns it behind a byte order mark, or in another encoding."""
    text = data.decode("utf-8", "replace")
    way = draw.choice(("utf-8-sig", "utf-16", "utf-32", "cp037"))
    return text.encode(way, "replace")


def changed_words(data: bytes, draw: random.Random) -> bytes:
    """Returns it with a word put in, put in the place of another, or taken twice."""
    text = data.decode("utf-8", "surrogatepass")
    places = [i for i, c in enumerate(text) if not c.isalnum()] or [0]
    at = draw.choice((*places, 0, len(text)))
    word = draw.choice(WORDS)
    way = draw.randrange(4)
    if way == 0:
        changed = text[:at] + word + text[at:]
    elif way == 1:
        end = next((i for i in places if i > at), len(text))
        changed = text[:at] + text[at : at + 1] + word + text[end:]
    elif way == 2:
        changed = text + draw.choice("+:,=") + text
    else:
        changed = text.upper() if draw.randrange(2) else f" {text}\t"
    return changed.encode("utf-8", "surrogatepass")


def changed_json(data: bytes, draw: random.Random) -> bytes:
    """Returns JSON with one value or key of another kind, missing, there twice, or renamed."""
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError):
        return changed_bytes(data, draw)
    return _changed(plain, draw).encode("utf-8", "surrogatepass")


def changed_value(data: bytes, draw: random.Random) -> bytes:
    """Returns JSON of the same form with one value another of its kind, or one list empty."""
    plain = json.loads(data)
    box, key = draw.choice([place for place in _places(plain, []) if place[1] != "schema"])
    value = box[key]
    if isinstance(value, float):
        box[key] = draw.choice((0.0, -0.0, -1.5, None, "inf", "-inf", 1e308, -1e308, 5e-324))
    elif isinstance(value, int) and not isinstance(value, bool):
        box[key] = draw.choice((0, -1, 1, 1 << 31, 1 << 70))
    elif isinstance(value, str):
        box[key] = draw.choice(
            ("", "<script>alert(1)</script>", "\u202e", "a\nb", "x" * 3000, "{}")
        )
    elif isinstance(value, list | dict):
        box[key] = type(value)()
    return json.dumps(plain).encode()


def changed_line(data: bytes, draw: random.Random) -> bytes:
    """Returns lines of JSON with one of them changed, taken out, or put elsewhere."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    way = draw.randrange(8)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(draw.randrange(len(lines)), lines[at])
    else:
        lines[at] = changed_json(lines[at], draw)
    return b"\n".join(lines)


def changed_table(data: bytes, draw: random.Random) -> bytes:
    """Returns TOML with one line's value of another kind, or a line missing, twice or renamed."""
    lines = data.decode("utf-8", "replace").split("\n")
    at = draw.randrange(len(lines))
    key, equals, _ = lines[at].partition("=")
    way = draw.randrange(5)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(draw.randrange(len(lines)), lines[at])
    elif way == 2 and equals:
        lines[at] = f"{draw.choice(WORDS[:30])}{key.strip()}={lines[at].partition('=')[2]}"
    elif equals:
        value = draw.choice((*PLAIN, *RAW))
        lines[at] = f"{key}= {RAW.get(str(value)) or json.dumps(value)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def changed_header(data: bytes, draw: random.Random) -> bytes:
    """Returns a safetensors file whose header says something else, or is of another length."""
    if len(data) < 8:
        return changed_bytes(data, draw)
    size = struct.unpack("<Q", data[:8])[0]
    header, rest = data[8 : 8 + size], data[8 + size :]
    way = draw.randrange(4)
    if way == 0:
        size = draw.choice((0, 1, size - 1, size + 1, 1 << 20, 1 << 62, (1 << 64) - 1))
        return struct.pack("<Q", size % (1 << 64)) + header + rest
    header = _changed_metadata(header, draw) if way == 1 else changed_json(header, draw)
    return struct.pack("<Q", len(header)) + header + rest


def _changed_metadata(header: bytes, draw: random.Random) -> bytes:
    """Returns a header whose own JSON, a string inside of it, is changed."""
    try:
        plain = json.loads(header)
        name, text = next(iter(plain["__metadata__"].items()))
        changed = changed_json(text.encode(), draw).decode("utf-8", "replace")
        plain["__metadata__"][name] = changed
        return json.dumps(plain).encode("utf-8", "replace")
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError):
        return changed_bytes(header, draw)


def _places(plain: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns every (container, key) of JSON data, a long list's first ones alone."""
    if isinstance(plain, dict):
        items: list[tuple[Any, Any]] = list(plain.items())
    elif isinstance(plain, list):
        items = list(enumerate(plain[:4]))
    else:
        return found
    for key, value in items:
        found.append((plain, key))
        _places(value, found)
    return found


def _changed(plain: Any, draw: random.Random) -> str:
    places = _places(plain, [])
    if not places:
        return RAW[draw.choice(list(RAW))]
    # half of the damage is at the top, where a schema and the large tables are
    top = [place for place in places if place[0] is plain]
    box, key = draw.choice(top if draw.randrange(2) else places)
    raw, twice = "", ""
    way = draw.randrange(8)
    if way == 0:
        del box[key]
    elif way == 1 and isinstance(box, dict):
        twice = f"{json.dumps(key)}: {json.dumps(draw.choice((box[key], *PLAIN)))}, "
        box["@twice@"] = 0
    elif way == 2 and isinstance(box, dict):
        box[draw.choice((*WORDS, key + "s", key.upper()))] = box.pop(key)
    elif way == 3:
        raw = RAW[draw.choice(list(RAW))]
        box[key] = "@raw@"
    elif way == 4:
        other, at = draw.choice(places)
        box[key] = json.loads(json.dumps(other[at])) if at in _keys(other) else None
    elif way == 5 and isinstance(box[key], str) and "/" in box[key]:
        box[key] = box[key].rpartition("/")[0] + "/" + draw.choice(("0", "1", "2", "3", "99", "é"))
    else:
        box[key] = draw.choice(PLAIN)
    text = json.dumps(plain, ensure_ascii=False)
    return text.replace('"@raw@"', raw).replace('"@twice@": 0', twice.removesuffix(", "))


def _keys(box: Any) -> Any:
    return box if isinstance(box, dict) else range(len(box))


Way = Callable[[bytes, random.Random], bytes]
_ANY: tuple[Way, ...] = (cut_bytes, changed_bytes)
_WAYS: dict[str, tuple[Way, ...]] = {
    "words": (changed_words,),
    "json": (*_ANY, begun_otherwise, *(changed_json,) * 7),
    "values": (changed_value,),
    "lines": (*_ANY, begun_otherwise, *(changed_line,) * 7),
    "toml": (*_ANY, changed_bytes, begun_otherwise, *(changed_table,) * 6),
    "tensors": (*_ANY, *(changed_header,) * 6),
    "bytes": (*_ANY, changed_bytes),
}
