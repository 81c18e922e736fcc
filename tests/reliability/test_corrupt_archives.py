"""Kind 8: packages of texts are read in memory, so that no name in one leads anywhere."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.training.archives import members
from tests.reliability.one_line import contents

pytestmark = pytest.mark.kind(8, "train")
NAMES = {
    "upwards": "../../evil.txt",
    "absolute": "/tmp/quantkit-evil.txt",
    "upwards in the middle": "a/../../evil.txt",
    "another system's": "..\\..\\evil.txt",
}


def zipped(path: Path, name: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "evil")
        archive.writestr("good.txt", "good")


def tarred(path: Path, name: str) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for each, data in ((name, b"evil"), ("good.txt", b"good")):
            info = tarfile.TarInfo(each)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("make", [zipped, tarred], ids=["a wheel", "an sdist"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_unpacked(
    name: str, make: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    path = inner / ("p.whl" if make is zipped else "p.tar.gz")
    (zipped if make is zipped else tarred)(path, NAMES[name])
    before = contents(tmp_path)
    found = members(path)
    assert found["good.txt"] == b"good" and len(found) == 2
    assert contents(tmp_path) == before
    assert not Path("/tmp/quantkit-evil.txt").exists()


def test_links_and_devices_in_a_tar_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "p.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, kind in (("a", tarfile.SYMTYPE), ("b", tarfile.LNKTYPE), ("c", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    assert members(path) == {}


@pytest.mark.parametrize("make", [zipped, tarred], ids=["a wheel", "an sdist"])
def test_half_an_archive_is_one_line(make: object, tmp_path: Path) -> None:
    path = tmp_path / ("p.whl" if make is zipped else "p.tar.gz")
    (zipped if make is zipped else tarred)(path, "a.txt")
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(InputError, match="cannot be read as a package") as error:
        members(path)
    assert "\n" not in str(error.value)
