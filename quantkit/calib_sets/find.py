"""Where named sets are: `./calib/NAME` of the working directory, then those that ship."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quantkit.calib_sets.manifest import MANIFEST, NAME, Manifest, read_manifest
from quantkit.errors import InputError, suggest

FOLDER: Final = "calib"
_PACKAGE: Final = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class NamedSet:
    """A set that was found.

    Attributes:
        where: `shipped`, or the path of its folder as the user would write it.
    """

    folder: Path
    manifest: Manifest
    where: str

    @property
    def name(self) -> str:
        """Its name."""
        return self.manifest.name


def shipped_folder() -> Path:
    """Returns where the shipped sets are.

    A wheel carries the repository's `calib/` beside this file; a checkout, also when it is
    installed to be edited, has it at its top.
    """
    carried = _PACKAGE / "shipped"
    return carried if carried.is_dir() else _PACKAGE.parents[1] / FOLDER


def find_set(source: str) -> NamedSet | None:
    """Returns the set of this name, or in this folder; None where the source is no set.

    A file or folder that is called like a set comes first, as for every other source.

    Raises:
        InputError: its manifest cannot be read.
    """
    path = Path(source).expanduser()
    try:
        if path.exists():
            is_set = (path / MANIFEST).is_file()
            return _read(path, str(path)) if is_set else None
    except (OSError, ValueError):  # too long for a path, or a zero byte
        return None
    if not NAME.fullmatch(source):
        return None
    for root, where in _roots():
        if (root / source / MANIFEST).is_file():
            return _read(root / source, where or f"{FOLDER}/{source}")
    return None


def named_set(name: str) -> NamedSet:
    """Returns the set of this name, or in this folder.

    Raises:
        InputError: there is none; the nearest name is suggested.
    """
    found = find_set(name)
    if found is None:
        if (Path(FOLDER) / name).is_dir() and NAME.fullmatch(name):
            raise InputError(f"{FOLDER}/{name} holds no {MANIFEST}: it is no calibration set.")
        raise InputError(f"no calibration set {name!r}.{suggest(name, set_names())}")
    return found


def all_sets() -> list[NamedSet]:
    """Returns the sets of the working directory, then the shipped ones that they do not hide.

    Without those whose manifest cannot be read: see `broken_sets`.
    """
    return list(_all()[0].values())


def broken_sets() -> dict[str, str]:
    """Returns by name what is wrong with the sets whose manifest cannot be read."""
    return _all()[1]


def _all() -> tuple[dict[str, NamedSet], dict[str, str]]:
    found: dict[str, NamedSet] = {}
    broken: dict[str, str] = {}
    for folder, where in _folders():
        if folder.name in found or folder.name in broken:
            continue
        try:
            found[folder.name] = _read(folder, where)
        except InputError as error:
            broken[folder.name] = str(error)
    return found, broken


def set_names(*kinds: str) -> list[str]:
    """Returns the names of all sets, or of these kinds; broken ones are left out."""
    names = []
    for folder, where in _folders():
        try:
            if not kinds or _read(folder, where).manifest.kind in kinds:
                names.append(folder.name)
        except InputError:  # this lists what could be used
            continue
    return sorted(set(names))


def _roots() -> list[tuple[Path, str]]:
    here, shipped = Path(FOLDER), shipped_folder()
    if here.is_dir() and here.resolve() == shipped.resolve():  # a checkout's top is where we are
        return [(shipped, "shipped")]
    return [(here, ""), (shipped, "shipped")]


def _folders() -> Iterator[tuple[Path, str]]:
    for root, where in _roots():
        for manifest in sorted(root.glob(f"*/{MANIFEST}")):
            if NAME.fullmatch(manifest.parent.name):
                yield manifest.parent, where or f"{FOLDER}/{manifest.parent.name}"


def _read(folder: Path, where: str) -> NamedSet:
    return NamedSet(folder=folder, manifest=read_manifest(folder / MANIFEST), where=where)
