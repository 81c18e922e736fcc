"""Packages: fetched by the real pip (from a folder) and a stand-in for apt-get, then read."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.jobs import TextSource
from quantkit.training.archives import matching, members
from quantkit.training.packages import package_file

FILES = {"poems/a.txt": b"one", "poems/more/b.txt": b"two", "poems/c.md": b"three"}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wheel(name: str = "poems", files: dict[str, bytes] = FILES) -> bytes:
    info = f"{name}-1.0.dist-info"
    every = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("poems")
        for path, data in every.items():
            archive.writestr(zipfile.ZipInfo(path), data)
    return buffer.getvalue()


def tar(files: dict[str, bytes], mode: str = "w:xz", prefix: str = "./") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        folder = tarfile.TarInfo(f"{prefix}poems")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for path, data in files.items():
            info = tarfile.TarInfo(prefix + path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo(f"{prefix}poems/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return buffer.getvalue()


def deb(data: bytes, name: str = "data.tar.xz") -> bytes:
    """An `ar` archive: a member of odd size first, as control.tar may be."""
    out = b"!<arch>\n"
    for member, content in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), (name, data)):
        out += f"{member:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        out += content + b"\n" * (len(content) % 2)
    return out


@pytest.mark.parametrize(
    ("name", "data", "top"),
    [
        pytest.param("poems-1.0-py3-none-any.whl", wheel(), "", id="wheel"),
        pytest.param(
            "poems-1.0.tar.gz", tar(FILES, "w:gz", "poems-1.0/"), "poems-1.0/", id="sdist"
        ),
        pytest.param("poems_1.0_all.deb", deb(tar(FILES)), "", id="deb, xz"),
        pytest.param(
            "poems_1.0_all.deb", deb(tar(FILES, "w:gz"), "data.tar.gz/"), "", id="deb, gz"
        ),
        pytest.param("poems_1.0_all.deb", deb(tar(FILES, "w"), "data.tar"), "", id="deb, plain"),
    ],
)
def test_the_files_of_a_package(tmp_path: Path, name: str, data: bytes, top: str) -> None:
    (tmp_path / name).write_bytes(data)

    found = members(tmp_path / name)

    assert {n: d for n, d in found.items() if "dist-info" not in n} == {
        top + path: content for path, content in FILES.items()
    }
    assert list(found) == sorted(found)


@pytest.mark.kind(8, "train")
@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        pytest.param("a.whl", b"no zip", "a.whl cannot be read as a package", id="no zip"),
        pytest.param("a.deb", b"no ar", "it is no ar archive", id="no ar"),
        pytest.param("a.deb", b"!<arch>\n", "it holds no data.tar", id="no data"),
        pytest.param("a.deb", deb(b"x", "data.tar.zst"), "Zstandard; expected xz", id="zstandard"),
        pytest.param("a.deb", deb(lzma.compress(b"no tar" * 99)), "cannot be read", id="no tar"),
        pytest.param("a.deb", deb(tar(FILES))[:-80], "cannot be read", id="cut short"),
        pytest.param("a.tar.gz", b"no gzip", "cannot be read", id="no gzip"),
        pytest.param("a.exe", b"", "expected a wheel, an sdist or a .deb", id="something else"),
    ],
)
def test_a_broken_package(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)

    with pytest.raises(InputError, match=message):
        members(tmp_path / name)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.txt", ["poems/a.txt", "poems/more/b.txt"]),
        ("poems/*.txt", ["poems/a.txt"]),
        ("poems/**/*.txt", ["poems/a.txt", "poems/more/b.txt"]),
        ("poems/**", ["poems/a.txt", "poems/c.md", "poems/more/b.txt"]),
        ("poems/?.md", ["poems/c.md"]),
        ("poems/a.txt", ["poems/a.txt"]),
    ],
)
def test_a_pattern(pattern: str, expected: list[str]) -> None:
    assert sorted(matching(FILES, pattern, "here")) == expected


@pytest.mark.parametrize("pattern", ["*.txt", "poems/a?txt", "**/*.TXT", "poems/[a].txt", "poems"])
def test_a_pattern_that_fits_nothing(pattern: str) -> None:
    files = FILES if "?" not in pattern else {"poems/a/txt": b""}
    with pytest.raises(
        InputError, match=r"^pypi:poems: files = .* fits none of \d files \(poems/a"
    ):
        matching(files, pattern, "pypi:poems")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the index, and no network."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    (folder / "poems-1.0-py3-none-any.whl").write_bytes(wheel())
    return folder


def poems(sha256: str = "", version: str = "1.0") -> TextSource:
    return TextSource(source=f"pypi:poems=={version}", sha256=sha256 or sha(wheel()))


def test_pip_is_asked_once(registry: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    path = package_file(poems(), cache)
    (registry / path.name).unlink()

    assert path == cache / sha(wheel())[:16] / "poems-1.0-py3-none-any.whl"
    assert path.read_bytes() == wheel()
    assert package_file(poems(), cache) == path
    assert [p.name for p in cache.iterdir()] == [sha(wheel())[:16]]


def test_pip_finds_another_file(registry: Path, tmp_path: Path) -> None:
    other = sha(b"what the author had")

    with pytest.raises(InputError, match=f"sha256 {sha(wheel())}, expected {other}.: correct"):
        package_file(poems(other), tmp_path / "cache")

    assert list((tmp_path / "cache").iterdir()) == []


def test_pip_finds_nothing(registry: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pip cannot get it: .*poems==2\.0.*put the file itself"):
        package_file(poems(version="2.0"), tmp_path / "cache")

    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("names", "message"),
    [
        pytest.param(["poems.whl"], "is another file.*remove it", id="changed"),
        pytest.param([], "holds 0 files", id="empty"),
        pytest.param(["a", "b"], "holds 2 files", id="two files"),
    ],
)
def test_what_is_wrong_in_the_cache(tmp_path: Path, names: list[str], message: str) -> None:
    folder = tmp_path / sha(wheel())[:16]
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"something else")

    with pytest.raises(InputError, match=message):
        package_file(poems(), tmp_path)


def test_a_file_that_was_put_there_by_hand(tmp_path: Path) -> None:
    folder = tmp_path / sha(wheel())[:16]
    folder.mkdir()
    (folder / "mine.whl").write_bytes(wheel())

    assert package_file(poems(), tmp_path) == folder / "mine.whl"


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes `apt-get` a script."""

    def made(script: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "apt-get").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "apt-get").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return made


def verses(data: bytes) -> TextSource:
    return TextSource(source="deb:verses=2.1-1", sha256=sha(data))


def test_apt_puts_the_package_where_it_runs(apt: Callable[[str], None], tmp_path: Path) -> None:
    data = deb(tar(FILES))
    (tmp_path / "there.deb").write_bytes(data)
    apt(
        '[ "$1" = download ] || exit 3\nfor last; do :; done\n'
        '[ "$last" = verses=2.1-1 ] || exit 4\n'
        "echo 'W: Download is performed unsandboxed' >&2\n"
        f"cp {tmp_path}/there.deb verses_2.1-1_all.deb"
    )

    path = package_file(verses(data), tmp_path / "cache")

    assert path.name == "verses_2.1-1_all.deb"
    assert members(path) == FILES


@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param(
            "echo \"E: Version '2.1-1' for 'verses' was not found\" >&2; exit 100",
            r"apt-get cannot get it: Version '2\.1-1' for 'verses' was not found \(exit code 100\)",
            id="no such version",
        ),
        pytest.param("exit 1", "it said nothing", id="says nothing"),
        pytest.param("exit 0", "left 0 files", id="does nothing"),
        pytest.param("echo x > verses.deb", "the registry has another file", id="another file"),
    ],
)
def test_apt_that_fails(
    apt: Callable[[str], None], tmp_path: Path, script: str, message: str
) -> None:
    apt(script)

    with pytest.raises(InputError, match=message):
        package_file(verses(b"a package"), tmp_path / "cache")

    assert list((tmp_path / "cache").iterdir()) == []


def test_without_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(InputError, match=r"apt-get cannot be run .*install it, or put the file"):
        package_file(verses(b"a package"), tmp_path / "cache")


@pytest.mark.kind(6, "train")
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")

    with pytest.raises(InputError, match="cannot write"):
        package_file(verses(b"a package"), tmp_path / "cache")
