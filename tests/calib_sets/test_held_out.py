"""The rule of what is held out, and the docstrings that no training reads."""

from __future__ import annotations

import ast
import hashlib
import inspect
import platform
import random
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from quantkit.calib_sets import named_set
from quantkit.calib_sets.check import verified
from quantkit.calib_sets.docstrings import held_out_docstrings, module_docstrings
from quantkit.calib_sets.held_out import (
    HELD_OUT,
    PART,
    fingerprint,
    is_held_out,
    normalised,
    paragraphs,
    parts,
    without_repeats,
)
from quantkit.calib_sets.make import SetRequest, make_set
from quantkit.calib_sets.manifest import read_manifest
from quantkit.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("a\r\nb\rc", "a\nb\nc", id="line ends"),
        pytest.param("a  \n \n\t\n\n  b\tc  ", "a\n\n  b    c", id="empty lines"),
        pytest.param("e\u0301", "\u00e9", id="composed"),
        pytest.param(
            "\u201cIt\u2019s\u201d \u2014 1\u20132\u2026", '"It\'s" -- 1-2...', id="quotes"
        ),
        pytest.param("\ufeffco\u00adop\u200b a\u00a0b\x00\x1b", "coop a b", id="invisible"),
        pytest.param("one\x0ctwo\u2029three", "one\n\ntwo\n\nthree", id="pages"),
        pytest.param("\n\n", "", id="nothing"),
    ],
)
def test_the_normal_form(text: str, expected: str) -> None:
    assert normalised(text) == expected
    assert normalised(expected) == expected


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
def test_a_document_is_held_out_by_the_first_digits_of_its_hash(share: float) -> None:
    for index in range(300):
        text = f"Document {index}\n  of THREE hundred"
        digits = hashlib.sha256(f"document {index} of three hundred".encode()).hexdigest()[:16]

        assert is_held_out(text, share) == (int(digits, 16) / 16**16 < share)


def test_a_larger_share_holds_out_all_that_a_smaller_one_does() -> None:
    keys = [str(index) for index in range(2_000)]
    small = {key for key in keys if is_held_out(key, 0.05)}
    large = {key for key in keys if is_held_out(key, 0.2)}

    assert small < large
    assert 60 < len(small) < 140
    assert 330 < len(large) < 470


def test_white_space_and_case_make_no_other_text() -> None:
    assert fingerprint("A  text\n here") == fingerprint("a text HERE ")
    assert fingerprint("a text here") != fingerprint("a text, here")


def test_parts_end_with_paragraphs_and_lose_nothing() -> None:
    draw = random.Random(0)
    whole = [f"{index} " + "x" * draw.randrange(10, 3_000) for index in range(60)]

    found = parts("\n\n".join(whole))

    assert [p for part in found for p in paragraphs(part)] == whole
    assert len(found) == -(-sum(len(p) + 2 for p in whole) // PART)
    assert all(0.5 * PART < len(part) < PART + 3_000 for part in found)


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("short", 1), ("y" * PART, 1), ("y" * 3 * PART, 1), ("y" * PART + "\n\nz", 2)],
    ids=["empty", "short", "a whole part", "a paragraph is never cut", "one more paragraph"],
)
def test_how_many_parts(text: str, count: int) -> None:
    assert len(parts(text)) == count
    assert "\n\n".join(parts(text)) == text


def test_a_repeated_paragraph_goes_unless_it_is_short() -> None:
    long = "A paragraph of more than forty characters, once."
    shouted = long.upper().replace(" ", "\n", 1)
    seen: set[bytes] = set()

    first = without_repeats([f"Exit\n\n{long}\n\nExit", shouted], seen)
    second = without_repeats([f"{long}\n\nother"], seen)

    assert first == ([f"Exit\n\n{long}\n\nExit"], 1)
    assert second == (["other"], 1)
    assert len(seen) == 1


def docstrings_of(path: Path) -> list[str]:
    """By the lines that they stand on."""
    nodes = [
        node
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
        and isinstance(node.body[0].value.value, str)
    ]
    nodes.sort(key=lambda node: node.body[0].lineno)
    return [inspect.cleandoc(node.body[0].value.value) for node in nodes]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, str], dict[str, str]]:
    """(trained on, held out)."""
    return (
        module_docstrings(share=HELD_OUT, held_out=False),
        module_docstrings(share=HELD_OUT, held_out=True),
    )


def test_docstrings_come_in_the_order_of_the_source(both: Any) -> None:
    texts = both[0] | both[1]
    root = Path(sysconfig.get_paths()["stdlib"])

    for name in ("argparse", "heapq", "json.decoder", "asyncio.tasks"):
        path = root / (name.replace(".", "/") + ".py")
        found = [text for text in docstrings_of(path) if text]
        assert texts[name] == normalised("\n\n".join(found)), name
    assert texts["collections"].startswith("This module implements specialized container datatypes")
    assert "test.support" not in texts
    assert not {"idlelib", "lib2to3", "encodings", "turtle"} & {n.split(".")[0] for n in texts}
    assert {name.split(".")[0] for name in texts} <= set(sys.stdlib_module_names)


def test_modules_are_held_out_by_name_alone(both: Any) -> None:
    train, held_out = both

    assert not set(train) & set(held_out)
    assert list(train) == sorted(train)
    for name in [*train, *held_out]:
        digits = hashlib.sha256(f"docstrings:{name}".lower().encode()).hexdigest()[:16]
        assert (name in held_out) == (int(digits, 16) < 0.1 * 16**16), name
    assert module_docstrings(share=0.0, held_out=True) == held_out  # never less than the set
    assert module_docstrings(share=0.3, held_out=True).items() > held_out.items()


def folded(texts: Iterable[str]) -> set[str]:
    return {" ".join(p.split()).casefold() for text in texts for p in text.split("\n\n")}


def test_the_named_set_is_the_held_out_part(both: Any) -> None:
    content, info = verified(named_set("docstrings"))

    assert content.documents == tuple(held_out_docstrings())
    assert content.bytes >= 150_000
    texts = both[1].values()
    assert folded(content.documents) == folded(texts)
    long = [p for text in content.documents for p in paragraphs(text) if len(p) >= 40]
    assert len(folded(long)) == len(long)
    if platform.python_version() in named_set("docstrings").manifest.python:
        assert info.warnings == ()


def test_docstrings_of_another_python_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_set(SetRequest(name="mine", source="stdlib:docstrings"))
    manifest = read_manifest(folder / "manifest.toml")
    assert (manifest.cut, list(manifest.python)) == ("blocks", [platform.python_version()])
    path = folder / "manifest.toml"
    other = manifest.python[platform.python_version()]
    path.write_text(path.read_text().replace(other, "0" * 64))

    assert "docstrings: other text than" in verified(named_set("mine"))[1].warnings[0]


def test_a_python_without_source_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})

    with pytest.raises(InputError, match=r"not in .*expected \.py files"):
        held_out_docstrings()


def test_a_file_that_is_odd_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    (tmp_path / "abc.py").write_text(
        "'''Module.'''\nx = '\\d'\nif x:\n    def f():\n        '''First.'''\n"
        "match x:\n    case 1:\n        class C:\n            '''Second.'''\n"
        "            async def g(self):\n                '''\n                Third,\n"
        "                  indented.\n                '''\n"
        "try:\n    pass\nexcept OSError:\n    def h():\n        'Fourth.'\n"
        "def i():\n    f'no docstring {x}'\n"
    )
    (tmp_path / "test").mkdir()
    (tmp_path / "test/__init__.py").write_text("'''A test.'''")
    (tmp_path / "mypackage.py").write_text("'''Not of the standard library.'''")
    texts = module_docstrings(share=1.0, held_out=True)

    assert texts == {"abc": "Module.\n\nFirst.\n\nSecond.\n\nThird,\n  indented.\n\nFourth."}
