"""Members of a wheel, an sdist or a `.deb`, read in memory: nothing is unpacked or run."""

from __future__ import annotations

import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quantkit.errors import InputError

_AR: Final = b"!<arch>\n"
_AR_HEADER: Final = 60
_SHOWN: Final = 3
_BROKEN: Final = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError,
    RuntimeError,  # of zipfile: encrypted, or a compression that it does not know
)  # fmt: skip


def members(path: Path) -> dict[str, bytes]:
    """Returns the files in a package by name, in the order of the names.

    Raises:
        InputError: no such package, or a broken one.
    """
    try:
        return dict(sorted(_members(path)))
    except _BROKEN as error:
        raise InputError(f"{path.name} cannot be read as a package: {error}.") from error


def matching(names: dict[str, bytes], pattern: str, where: str) -> dict[str, bytes]:
    """Returns the files that a pattern fits: `*` and `?` stay in a folder, `**/` is any of them.

    Raises:
        InputError: it fits none.
    """
    fits = _pattern(pattern)
    found = {name: data for name, data in names.items() if fits.fullmatch(name)}
    if not found:
        shown = ", ".join(list(names)[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
        raise InputError(
            f"{where}: files = {pattern!r} fits none of {len(names)} files ({shown}): expected a "
            "pattern such as '**/*.txt'."
        )
    return found


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.suffix == ".deb":
        yield from _tar_members(_deb_data(path.read_bytes()))
    elif path.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    yield info.filename, archive.read(info)
    elif path.name.endswith((".tar.gz", ".tar.bz2", ".tar.xz", ".tgz")):
        yield from _tar_members(path.read_bytes())
    else:
        raise InputError(f"{path.name}: expected a wheel, an sdist or a .deb.")


def _tar_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for info in archive:
            file = archive.extractfile(info) if info.isreg() else None
            if file is not None:
                yield info.name.removeprefix("./"), file.read()


def _deb_data(data: bytes) -> bytes:
    """Returns `data.tar.*` of a Debian package, which is an `ar` archive."""
    if not data.startswith(_AR):
        raise ValueError("it is no ar archive")
    start = len(_AR)
    while start + _AR_HEADER <= len(data):
        header = data[start : start + _AR_HEADER]
        name = header[:16].decode("ascii", "replace").strip().rstrip("/")
        size = int(header[48:58])
        start += _AR_HEADER
        if name.startswith("data.tar"):
            if name.endswith(".zst"):
                raise ValueError(f"{name} is compressed by Zstandard; expected xz, gzip or bzip2")
            return data[start : start + size]
        start += size + size % 2  # members begin at even places
    raise ValueError("it holds no data.tar")


def _pattern(pattern: str) -> re.Pattern[str]:
    found = []
    for piece in re.findall(r"\*\*/|\*+|\?|[^*?]+", pattern):
        known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        found.append(known.get(piece, re.escape(piece)))
    return re.compile("".join(found))
