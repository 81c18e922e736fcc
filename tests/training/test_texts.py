"""Sources of text -> documents: markup, paragraphs once, what is held out."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from quantkit.calib_sets.docstrings import held_out_docstrings
from quantkit.errors import InputError
from quantkit.jobs import TextSource
from quantkit.training.markup import markdown_text, osis_text, sword_texts
from quantkit.training.texts import Documents, read_documents


def key(text: str) -> str:
    return " ".join(text.split()).casefold()


def held_out_by_hash(text: str, share: float) -> bool:
    return int(hashlib.sha256(key(text).encode()).hexdigest()[:16], 16) < share * 2**64


def long_paragraphs(texts: Any) -> list[str]:
    return [key(p) for text in texts for p in text.split("\n\n") if len(p) >= 40]


@pytest.fixture
def package(tmp_path: Path) -> Any:
    """Puts a wheel of these files into the cache and returns it as a source."""

    def made(name: str, inside: dict[str, bytes], **fields: Any) -> TextSource:
        path = tmp_path / f"{name}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member, data in inside.items():
                archive.writestr(zipfile.ZipInfo(member), data)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        (tmp_path / "cache" / sha256[:16]).mkdir(parents=True)
        path.rename(tmp_path / "cache" / sha256[:16] / path.name)
        return TextSource(source=f"pypi:{name}==1.0", sha256=sha256, **fields)

    return made


def folder(path: Path, texts: list[str]) -> TextSource:
    """A folder of one file a text."""
    path.mkdir()
    for index, text in enumerate(texts):
        (path / f"{index:03d}.txt").write_text(text, encoding="utf-8")
    return TextSource(source=str(path))


def made_up(seed: int, documents: int) -> list[str]:
    """Documents of paragraphs that often repeat, some in other white space or case."""
    draw = random.Random(seed)
    stock = [f"Sentence {index} is one of many that stand in several texts." for index in range(60)]
    stock += ["Exit", "Enter two"]
    texts = []
    for _ in range(documents):
        chosen = [draw.choice(stock) for _ in range(draw.randrange(1, 6))]
        chosen = [p.upper() if draw.random() < 0.1 else p.replace(" ", "\n", 1) for p in chosen]
        texts.append("\n\n".join([*chosen, f"Only here: {draw.random()}, {draw.random()}, so."]))
    return texts


def brute_force(sources: list[list[str]], share: float) -> list[tuple[list[str], list[str], int]]:
    """(train, held out, duplicates) of each source, slowly."""
    sides = [([t for t in ts if not held_out_by_hash(t, share)],
              [t for t in ts if held_out_by_hash(t, share)]) for ts in sources]  # fmt: skip
    before: list[str] = []
    left: dict[tuple[int, int], list[str]] = {}
    dropped = [0] * len(sources)
    for side, index in itertools.product((1, 0), range(len(sources))):
        left[side, index] = []
        for text in sides[index][side]:
            kept = []
            for paragraph in text.split("\n\n"):
                if len(paragraph) >= 40 and key(paragraph) in before:
                    dropped[index] += 1
                    continue
                before.append(key(paragraph))
                kept.append(paragraph)
            left[side, index] += ["\n\n".join(kept)] if kept else []
    return [(left[0, i], left[1, i], dropped[i]) for i in range(len(sources))]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
def test_documents_are_those_of_brute_force(tmp_path: Path, share: float) -> None:
    texts = [made_up(seed, 30) for seed in range(3)]
    sources = [folder(tmp_path / str(index), some) for index, some in enumerate(texts)]

    found = read_documents(sources, held_out=share, cache=tmp_path / "cache")

    expected = brute_force(texts, share)
    assert [(list(d.train), list(d.held_out), d.duplicates) for d in found] == expected
    assert [d.source for d in found] == sources
    assert sum(d.duplicates for d in found) > 50
    assert bool(sum(len(d.held_out) for d in found)) == (share > 0)


def test_no_held_out_paragraph_is_trained_on(tmp_path: Path) -> None:
    texts = [made_up(seed, 40) for seed in (5, 6)]
    texts[1] += texts[0][:10]  # whole documents too
    sources = [folder(tmp_path / str(index), some) for index, some in enumerate(texts)]

    found = read_documents(sources, held_out=0.3, cache=tmp_path)

    train = long_paragraphs(text for d in found for text in d.train)
    held_out = long_paragraphs(text for d in found for text in d.held_out)
    assert not set(train) & set(held_out)
    assert len(set(train)) == len(train)
    assert len(set(held_out)) == len(held_out)
    every = {key(p) for some in texts for text in some for p in text.split("\n\n")}
    assert {p for p in every if len(p) >= 40} == {*train, *held_out}
    assert "Exit" in " ".join(text for d in found for text in d.train)
    assert "Exit" in " ".join(text for d in found for text in d.held_out)


def test_the_split_does_not_depend_on_the_other_sources(tmp_path: Path) -> None:
    sources = [folder(tmp_path / str(seed), made_up(seed, 30)) for seed in range(3)]

    def held_out(order: list[TextSource]) -> tuple[set[str], set[str]]:
        found = read_documents(order, held_out=0.3, cache=tmp_path)
        return tuple(  # type: ignore[return-value]
            {p for d in found for text in side(d) for p in long_paragraphs([text])}
            for side in (lambda d: d.held_out, lambda d: d.train)
        )

    assert held_out(sources) == held_out(sources[::-1])
    alone = read_documents(sources[1:2], held_out=0.3, cache=tmp_path)[0]
    assert set(long_paragraphs(alone.held_out)) <= held_out(sources)[0]


def test_long_documents_are_cut_before_they_are_split(tmp_path: Path) -> None:
    book = "\n\n".join(f"Paragraph {index}. " + "Words " * 60 for index in range(600))
    (tmp_path / "book.txt").write_text(book)
    source = TextSource(source=str(tmp_path / "book.txt"))

    [found] = read_documents([source], held_out=0.3, cache=tmp_path)

    assert found.train and found.held_out
    assert all(held_out_by_hash(text, 0.3) for text in found.held_out)
    assert not any(held_out_by_hash(text, 0.3) for text in found.train)
    assert len(found.train) + len(found.held_out) == -(-len(book) // 20_000)
    sizes = [len(text) for text in [*found.train, *found.held_out]]
    assert min(sizes) > 10_000 and max(sizes) < 21_000


def test_a_package_is_read_by_its_pattern(package: Any, tmp_path: Path) -> None:
    source = package(
        "plays",
        {
            "plays/b.txt": "It\u2019s \u201cB\u201d.\r\nSecond   line.".encode(),
            "plays/a.txt": b"A.\n\n\n\nEnd.",
            "code.py": b"import this",
        },
        files="plays/*.txt",
    )
    seen: list[tuple[str, int, int]] = []

    [found] = read_documents(
        [source], held_out=0.0, cache=tmp_path / "cache", progress=lambda *step: seen.append(step)
    )

    assert found == Documents(
        source=source,
        sha256=source.sha256,
        train=("A.\n\nEnd.", 'It\'s "B".\nSecond   line.'),
        held_out=(),
        duplicates=0,
    )
    assert seen == [("reading pypi:plays==1.0", 0, 1), ("reading text", 1, 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("# Title\n## Part *one* ##", "Title\n\n\nPart one", id="headings"),
        pytest.param("Title\n=====\ntext\n* * *\nend", "Title\n\ntext\n\nend", id="rules"),
        pytest.param("**WHO**  \nSays _this_, *that*.", "WHO  \nSays this, that.", id="emphasis"),
        pytest.param("_Enter A,\nand B_", "Enter A,\nand B", id="emphasis over a line's end"),
        pytest.param("_one\n\ntwo_", "_one\n\ntwo_", id="none over a paragraph's end"),
        pytest.param("__\\[Aside]_ x [To B]_ y", "[Aside] x [To B] y", id="odd stage directions"),
        pytest.param("a_b_c 2 * 3 * 4", "a_b_c 2 * 3 * 4", id="no emphasis"),
        pytest.param("\\*not\\* \\_so\\_", "*not* _so_", id="escapes"),
        pytest.param(
            "see [the page](http://a/b_c) ![a cat](x.png)", "see the page a cat", id="links"
        ),
        pytest.param("<!-- no\n\nmore --><b>bold</b> x < y", "bold x < y", id="tags"),
        pytest.param("> He said\n> so", "He said\nso", id="quotes"),
        pytest.param("```py\nx = 1\n```\n`y` &amp; z", "x = 1\n\ny & z", id="code"),
        pytest.param("- item\n1. first", "- item\n1. first", id="lists stay"),
    ],
)
def test_markdown(text: str, expected: str) -> None:
    assert markdown_text(text).strip() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            '<w lemma="strong:G1">The</w> <w lemma="strong:G2">book</w>, old', "The book, old",
            id="words",
        ),
        pytest.param("<w>priests</w><w>and</w> he", "priests and he", id="words that touch"),
        pytest.param(
            'Christ</w>,<note placement="foot"><reference>1:1 </reference>or: Messiah</note><w>the',
            "Christ, the",
            id="notes go",
        ),
        pytest.param('<note n="1"/>kept<note>gone</note>', "kept", id="an empty note"),
        pytest.param(
            '<title type="x">Head</title><div sID="1"/>One\n two.<div eID="1"/> <p>Three',
            "Head\n\nOne two.\n\nThree",
            id="paragraphs",
        ),
        pytest.param(
            'He<div type="x-milestone" subType="x-preverse" sID="pv1"/> went', "He went",
            id="a verse is no paragraph",
        ),
        pytest.param("<lg><l>first</l><l>second</l></lg>", "first\n\nsecond", id="verses"),
        pytest.param(
            "<table> <row><cell>Vows.</cell><cell>(1-2)</cell></row> </table>", "Vows. (1-2)",
            id="tables",
        ),
        pytest.param("a &amp; b &lt;c&gt; &#8217;", "a & b <c> \u2019", id="entities"),
        pytest.param('<milestone type="x-importer"/>', "", id="nothing"),
    ],
)  # fmt: skip
def test_osis(text: str, expected: str) -> None:
    assert osis_text(text) == expected


def module(texts: list[str]) -> tuple[bytes, bytes]:
    """(`.bzz`, `.bzs`) of a module with these blocks."""
    blocks, index = b"", b""
    for text in texts:
        data = zlib.compress(text.encode())
        index += struct.pack("<III", len(blocks), len(data), len(text.encode()))
        blocks += data
    return blocks, index


BOOKS = ['<milestone n="x"/>', "<title>First</title> It\u2019s <w>one</w>.", "<p>Second</p>"]


def test_a_module_of_sword(package: Any, tmp_path: Path) -> None:
    blocks, index = module(BOOKS)
    files = {"m/nt.bzz": b"", "m/nt.bzs": b"", "m/ot.czz": blocks, "m/ot.czs": index}
    source = package("bible", files, files="**/*zz", format="sword")

    [found] = read_documents([source], held_out=0.0, cache=tmp_path / "cache")

    assert found.train == ("First\n\nIt's one.", "Second")


@pytest.mark.parametrize(
    ("blocks", "index", "message"),
    [
        pytest.param(*(x[:-1] for x in module(BOOKS)), "records of 12 bytes", id="index cut short"),
        pytest.param(module(BOOKS)[0][:-9], module(BOOKS)[1], "block 2.*CompressType=ZIP",
                     id="blocks cut short"),
        pytest.param(b"BZh9", struct.pack("<III", 0, 4, 9), "block 0", id="another compression"),
        pytest.param(zlib.compress(b"\xe9t\xe9"), struct.pack("<III", 0, 99, 3), "Encoding=UTF-8",
                     id="another encoding"),
        pytest.param(zlib.compress(b"ab"), struct.pack("<III", 0, 99, 3), "2 bytes, expected 3",
                     id="another size"),
    ],
)  # fmt: skip
def test_a_broken_module(blocks: bytes, index: bytes, message: str) -> None:
    with pytest.raises(InputError, match=f"ot.bz[sz].*{message}"):
        sword_texts("m/ot.bzz", blocks, index)


def test_sources_that_give_no_text(package: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    cases = {
        "fits none of 1 files": package("one", {"a.md": b"x"}),
        "no index m/ot.bzs": package("two", {"m/ot.bzz": b"x"}, files="**/*zz", format="sword"),
        "is not UTF-8": package("three", {"a.txt": b"\xff\xfe"}),
        "is empty: expected text": package("four", {"a.txt": b" \n\n "}),
        "read in a package alone": TextSource(source=str(tmp_path / "a.txt"), format="sword"),
        "no such file or folder": TextSource(source="no-such-thing"),
    }
    for message, source in cases.items():
        with pytest.raises(InputError, match=message):
            read_documents([source], held_out=0.1, cache=tmp_path / "cache")


def test_markdown_and_rows_outside_packages(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text}) for text in ("# One", "_two_")))

    [found] = read_documents(
        [TextSource(source=str(rows), format="markdown")], held_out=0.0, cache=tmp_path
    )

    assert found.train == ("One", "two")
    assert len(found.sha256) == 64


def test_the_docstrings_of_this_python(tmp_path: Path) -> None:
    source = TextSource(source="docstrings")

    [found] = read_documents([source], held_out=0.02, cache=tmp_path)

    train, held_out = long_paragraphs(found.train), long_paragraphs(found.held_out)
    assert set(held_out) == set(long_paragraphs(held_out_docstrings()))  # the named set
    assert not set(train) & set(held_out)
    assert len(set(train)) == len(train)
    assert 6 * sum(map(len, found.held_out)) < sum(map(len, found.train))
    assert sum(map(len, found.train)) > 900_000
    assert max(map(len, found.train)) < 25_000
    assert found.duplicates > 100
    assert read_documents([source], held_out=0.02, cache=tmp_path) == [found]
