"""The folder of a set: copies of what was chosen, and a write that is whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quantkit.calib_sets.content import Content, file_content
from quantkit.calib_sets.manifest import Manifest
from quantkit.calib_sets.source import Source
from quantkit.errors import InputError

COPIED_TEXT: Final = "samples.jsonl"
COPIED_FILES: Final = "files"


def copied(manifest: Manifest, content: Content, folder: Path, source: str) -> Manifest:
    """Returns the manifest of a set that keeps its own files, which are written to `folder`."""
    if manifest.source.type == "generator" and manifest.kind != "text":
        raise InputError(f"{source} has no end: it cannot be copied.")
    if manifest.kind == "text":
        rows = (json.dumps({"text": text}, ensure_ascii=False) for text in content.documents)
        text = "".join(f"{row}\n" for row in rows)
        (folder / COPIED_TEXT).write_text(text, encoding="utf-8", newline="\n")
        paths = {COPIED_TEXT: folder / COPIED_TEXT}
        name = COPIED_TEXT
    else:
        name = COPIED_FILES
        common = os.path.commonpath([path.parent for path in content.paths.values()])
        paths = {}
        for path in content.paths.values():
            below = path.relative_to(common).as_posix()
            (folder / name / below).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name / below)
            paths[f"{name}/{below}"] = folder / name / below
        if manifest.kind != "images":
            name = next(iter(paths))
    stored = file_content(paths, content.samples)
    return dataclasses.replace(
        manifest,
        source=Source(type="path", names=(name,)),
        copied_from=source,
        drawn=False,
        files=stored.files,
        python={},
        sha256=manifest.sha256 if manifest.kind == "text" else stored.sha256,
    )


@contextlib.contextmanager
def new_folder(target: Path, force: bool) -> Iterator[Path]:
    """Yields a folder that takes the place of `target` at the end, and is removed on an error."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}.") from error
    old: Path | None = None
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp's is for one user alone
        if force and target.exists():
            old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.")) / "old"
            target.rename(old)
        try:
            folder.rename(target)
        except OSError as error:
            if old is not None:
                old.rename(target)
            raise InputError(f"cannot write {target}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if old is not None:
            shutil.rmtree(old.parent, ignore_errors=True)
