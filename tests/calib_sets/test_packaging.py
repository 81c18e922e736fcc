"""A wheel carries the shipped sets, and what is installed from it finds them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETS = "quantkit/calib_sets/shipped"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, built from a copy of it: a build leaves folders behind."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("quantkit", "calib"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return tree / done.stdout.split()[-1]


def test_a_wheel_has_every_file_of_calib_and_every_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())

    there = {f"{SETS}/{p.relative_to(ROOT / 'calib').as_posix()}" for p in files("calib")}
    assert {name for name in names if name.startswith(SETS)} == there
    assert len(there) >= 6
    modules = {p.relative_to(ROOT).as_posix() for p in files("quantkit") if p.suffix == ".py"}
    assert {name for name in names if name.endswith(".py")} == modules
    pair = {p.relative_to(ROOT).as_posix() for p in files("quantkit/models/pair")}
    assert "quantkit/models/pair/pair.toml" in pair and pair <= names
    assert "quantkit/py.typed" in names
    assert "quantkit/reporting/templates/report.html.j2" in names


def test_what_a_wheel_installs_finds_the_sets_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "cwd").mkdir()
    code = (
        "from quantkit.calib_sets.find import all_sets, shipped_folder\n"
        "from quantkit.calib_sets.check import verified\n"
        "for found in all_sets(): verified(found)\n"
        "print(shipped_folder(), *(found.name for found in all_sets()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "cwd",
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    folder, *names = done.stdout.split()
    assert Path(folder) == tmp_path / "site" / SETS
    assert names == ["docstrings", "pydoc", "retrieval", "shapes", "stdlib-source"]


def files(folder: str) -> list[Path]:
    return [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
