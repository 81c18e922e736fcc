"""Kind 8: no number in a GGUF file is believed before it fits the file.

Readers of this format followed them: tables of no tensors gave random weights, and negative offsets
other weights than were meant.
"""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.models.gguf_check import check_gguf
from tests.models.test_shipped import cache, tiny_gguf  # noqa: F401 - fixtures
from tests.reliability.one_line import refused, without_network

pytestmark = pytest.mark.kind(8, "models")
NAME = b"token_embd.weight"
TOKENS = b"tokenizer.ggml.tokens"
Damage = Callable[[bytes], bytes]


def put(kind: str, value: int, at: int) -> Damage:
    """Writes a number at a byte of the file."""
    new = struct.pack(kind, value)
    return lambda whole: whole[:at] + new + whole[at + len(new) :]


def of_tensor(kind: str, value: int, behind: int) -> Damage:
    """Writes a number so many bytes behind the name of the first tensor, which has two axes."""
    return lambda whole: put(kind, value, whole.index(NAME) + len(NAME) + behind)(whole)


def of_tokens(kind: str, value: int, behind: int) -> Damage:
    """Writes a number behind the key of the list of tokens: type, type of items, count, items."""
    return lambda whole: put(kind, value, whole.index(TOKENS) + len(TOKENS) + behind)(whole)


BAD: dict[str, tuple[Damage, str]] = {
    "no bytes": (lambda _: b"", "it has 0 bytes, less than a GGUF header"),
    "four bytes": (lambda whole: whole[:4], "it has 4 bytes"),
    "a text": (lambda _: b"hello " * 9, "it begins with b'hell', expected b'GGUF'"),
    "another magic number": (lambda whole: b"GGML" + whole[4:], "it begins with b'GGML'"),
    "the other order of bytes": (put(">I", 3, 4), "expected 2 or 3 in little-endian order"),
    "a version to come": (put("<I", 99, 4), "it has version 99"),
    "no tensors": (put("<Q", 0, 8), "it holds no tensor"),
    "2^60 tensors": (put("<Q", 2**60, 8), "axes, expected 1 to 4"),
    "no keys": (put("<Q", 0, 16), "axes, expected 1 to 4"),
    "2^60 keys": (put("<Q", 2**60, 16), "and the file ends at byte"),
    "a key of 2^60 bytes": (put("<Q", 2**60, 24), "takes 1152921504606846976 bytes"),
    "a key of 2^64 - 1 bytes": (put("<Q", 2**64 - 1, 24), "takes 18446744073709551615 bytes"),
    "a key of other bytes": (put("<H", 0xFEFF, 32), "is not UTF-8 text"),
    "an unknown type of value": (of_tokens("<I", 99, 0), "has the type 99, which GGUF does not"),
    "an unknown type of items": (of_tokens("<I", 99, 4), "has the type 99, which GGUF does not"),
    "2^60 items": (of_tokens("<Q", 2**60, 8), f"the value of '{TOKENS.decode()}' at byte"),
    "an item of 2^60 bytes": (of_tokens("<Q", 2**60, 16), "takes 1152921504606846976 bytes"),
    "2^31 axes": (of_tensor("<I", 2**31, 0), "has 2147483648 axes, expected 1 to 4"),
    "an axis of 0": (of_tensor("<Q", 0, 4), "has the shape [0, 257]"),
    "an axis of 2^60": (of_tensor("<Q", 2**60, 4), f"tensor '{NAME.decode()}' ends at byte"),
    "an unknown type of tensor": (of_tensor("<I", 99, 20), "has the unknown type 99"),
    "a type of fewer bytes": (of_tensor("<I", 2, 20), "begins at 32896, expected 4640"),
    "an offset behind the end": (of_tensor("<Q", 2**60, 24), "expected 0. Get it again"),
    "a negative offset": (of_tensor("<q", -32, 24), "expected 0. Get it again"),
    "an odd offset": (of_tensor("<Q", 7, 24), "begins at 7, no multiple of 32"),
    "half a file": (lambda whole: whole[: len(whole) // 2], "ends at byte"),
    "a byte too few": (lambda whole: whole[:-1], f"and the file at {132255}"),
    "cut in the keys": (lambda whole: whole[:30], "takes 8 bytes, and the file ends at byte 30"),
    "cut in the tensors": (lambda whole: whole[: whole.index(NAME) + 4], "takes 17 bytes"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("cache")
def test_a_damaged_file_is_one_line(
    name: str,
    tiny_gguf: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_network(monkeypatch)
    damage, said = BAD[name]
    tiny_gguf.write_bytes(damage(tiny_gguf.read_bytes()))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = refused("stats", tiny_gguf, "-q", "--out", tmp_path / "out")
    assert line.startswith("error: tiny.gguf is no whole GGUF file: ")
    assert said in line
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 64 << 10  # of 1 KiB
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "cache").rglob("*"))


@pytest.mark.usefixtures("cache")
def test_weights_that_are_not_finite_are_named(
    tiny_gguf: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_network(monkeypatch)
    whole = bytearray(tiny_gguf.read_bytes())
    whole[-4:] = struct.pack("<f", float("nan"))
    tiny_gguf.write_bytes(whole)
    line = refused("stats", tiny_gguf, "-q", "--out", tmp_path / "out")
    assert "weight 'lm_head.weight' holds 1 NaN or inf values" in line


@pytest.mark.usefixtures("cache")
def test_a_tensor_that_is_missing_is_not_made_up(
    tiny_gguf: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has another name, so that the file is whole and the model is not."""
    without_network(monkeypatch)
    whole = tiny_gguf.read_bytes()
    assert whole.count(b"blk.1.ffn_up.weight") == 1
    tiny_gguf.write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    line = refused("stats", tiny_gguf, "-q", "--out", tmp_path / "out")
    assert "lacks 1 weights" in line and "'model.layers.1.mlp.up_proj.weight'" in line


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_byte_is_an_error_of_ours_or_none(
    seed: int,
    tiny_gguf: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """200 tables each, cut or with a byte changed: in time, and nothing but InputError."""
    whole, rng = tiny_gguf.read_bytes(), np.random.default_rng(seed)
    tables = whole.index(NAME) + 1500
    outcomes = {"whole": 0, "refused": 0}
    for number in range(200):
        data = bytearray(whole)
        data[int(rng.integers(tables))] = int(rng.integers(256))
        path = tmp_path / "flipped.gguf"
        path.write_bytes(data)
        if number % 4 == 0:
            os.truncate(path, int(rng.integers(len(whole))))
        outcomes[_outcome(path)] += 1
    assert min(outcomes.values()) > 0


def _outcome(path: Path) -> str:
    try:
        check_gguf(path)
    except InputError as error:
        assert "\n" not in str(error)
        return "refused"
    return "whole"


def test_the_file_that_others_wrote_is_whole(tiny_gguf: Any) -> None:  # noqa: F811
    check_gguf(tiny_gguf)
