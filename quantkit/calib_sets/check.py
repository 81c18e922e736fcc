"""A set against its manifest: what changed since is named, and stops the run.

Content of the standard library differs between versions of Python, and computed images may differ
between versions of numpy: that is no error, but it is said wherever the set is used. Of a version
that the manifest knows, other content is one.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from quantkit.calib_sets.content import (
    Content,
    check_generator,
    file_content,
    file_sha256,
    shapes_content,
    source_files,
    text_content,
)
from quantkit.calib_sets.find import NamedSet, all_sets, broken_sets, find_set, named_set
from quantkit.calib_sets.manifest import Manifest
from quantkit.calib_sets.numpy_files import check_numbers, common_length, read_arrays
from quantkit.calib_sets.token_files import read_tokens
from quantkit.errors import InputError
from quantkit.results.info import DataInfo

_SHOWN: Final = 3


@dataclass(frozen=True, kw_only=True)
class SetInfo:
    """What a result says about the named set that its data come from.

    Attributes:
        sha256: Of the content that was used.
        warnings: One sentence each.
    """

    name: str
    sha256: str
    licence: str
    warnings: tuple[str, ...] = ()


def set_fields(named: SetInfo | None) -> dict[str, Any]:
    """Returns the fields of a `DataInfo` that speak of a named set."""
    if named is None:
        return {}
    return {
        "named_set": named.name,
        "set_sha256": named.sha256,
        "licence": named.licence,
        "warnings": list(named.warnings),
    }


def verified(found: NamedSet) -> tuple[Content, SetInfo]:
    """Returns the content of a set, all of it hashed again, and what a result says about it.

    Raises:
        InputError: a file changed, is missing or was added (it is named), the content is another
            than the manifest's, or cannot be read.
    """
    manifest = found.manifest
    if found.manifest.files:
        _check_names(found)
    try:
        content = read_content(manifest, found.folder)
    except InputError as error:
        raise InputError(f"calibration set {found.name}: {error}") from error
    changed = [name for name, digest in content.files.items() if manifest.files[name] != digest]
    if changed:
        raise _differs(found, [f"{name} changed" for name in changed])
    return content, SetInfo(
        name=found.name,
        sha256=content.sha256,
        licence=manifest.licence,
        warnings=_warnings(manifest, content.sha256, content.samples),
    )


def verify_sets(names: Sequence[str] = ()) -> Iterator[tuple[NamedSet, SetInfo]]:
    """Yields the sets of these names (all there are, without any) that are as their manifest says.

    Raises:
        InputError: no set of a name; at the end, what is wrong with all the others, in one line.
    """
    wrong = [] if names else list(broken_sets().values())
    for found in [named_set(name) for name in names] if names else all_sets():
        try:
            _, info = verified(found)
        except InputError as error:
            wrong.append(str(error))
            continue
        yield found, info
    if wrong:
        raise InputError(" ".join(wrong))


def image_set(found: NamedSet, skip: int, samples: int) -> tuple[list[Path] | None, SetInfo]:
    """Returns the images of a set, None where they are computed; `samples` are hashed after `skip`.

    Raises:
        InputError: as `verified`, for the files that are hashed and for the names of all.
    """
    manifest = found.manifest
    if manifest.source.type == "generator":
        return None, verified(found)[1]
    paths = _check_names(found)
    names = list(paths)[skip : skip + samples]
    changed = [name for name in names if file_sha256(paths[name]) != manifest.files[name]]
    if changed:
        raise _differs(found, [f"{name} changed" for name in changed])
    info = SetInfo(name=found.name, sha256=manifest.sha256, licence=manifest.licence)
    return list(paths.values()), info


def require_as_read(found: NamedSet, content: Content) -> None:
    """Raises InputError where a file is another than when it was hashed; called after reading."""
    changed = [name for name, path in content.paths.items() if _is_other(path, content.files[name])]
    if changed:
        raise InputError(
            f"calibration set {found.name}: {_listed(changed)} changed while it was read: run "
            "again when nothing writes to it."
        )


def changed_since(data: DataInfo, since: float) -> str:
    """Returns one sentence where the source of an earlier run is not what it was, else nothing.

    A named set is compared by its hash. Of another source the time of the last write is looked at:
    what its hash would be needs the model's tokenizer. Of a source that is not here nothing can be
    said.

    Args:
        since: When the run was written, as `stat().st_mtime`.
    """
    try:
        found = find_set(data.source) or (named_set(data.named_set) if data.named_set else None)
    except InputError:
        return ""
    if found is not None and data.set_sha256:
        try:
            now = verified(found)[1].sha256
        except InputError as error:
            return f"the data changed since they were observed: {str(error).rstrip('.')}"
        if now == data.set_sha256:
            return ""
        return (
            f"calibration set {found.name} has other content than was observed (sha256 "
            f"{now[:10]}, then {data.set_sha256[:10]})"
        )
    path = Path(data.source).expanduser()
    try:
        files = [path, *path.rglob("*")] if path.is_dir() else [path]
        written = max(file.stat().st_mtime for file in files)
    except (OSError, ValueError):
        return ""
    if written <= since:
        return ""
    return f"{data.source} was written to after it was observed: it may hold other data now"


def _is_other(path: Path, digest: str) -> bool:
    try:
        return file_sha256(path) != digest
    except InputError:
        return True


def read_content(manifest: Manifest, folder: Path) -> Content:
    """Returns what the manifest's source holds now, unchecked.

    Raises:
        InputError: it cannot be read, or holds what no model can read.
    """
    source = manifest.source
    is_made = source.type == "generator"
    if manifest.kind == "text":
        draw = manifest.samples if manifest.drawn or is_made else None
        return text_content(source, folder, draw=draw, seed=manifest.seed)
    if is_made:
        kind = check_generator(source)
        if kind != manifest.kind:
            raise InputError(f"{source} makes {kind}: expected {manifest.kind}.")
        return shapes_content()
    paths = _set_files(manifest, folder)
    if manifest.kind == "images":
        empty = [name for name, path in paths.items() if path.stat().st_size == 0]
        if empty:
            raise InputError(f"image {empty[0]} is empty (0 bytes); expected an image file.")
        return file_content(paths, len(paths))
    name, path = next(iter(paths.items()))
    if len(paths) > 1:
        raise InputError(f"a set of {manifest.kind} is one file: got {', '.join(paths)}.")
    count = _rows(name, path, manifest.kind)
    if count == 0:
        raise InputError(f"{name} holds no sample: expected one or more.")
    return file_content(paths, count)


def _rows(name: str, path: Path, kind: str) -> int:
    if kind == "tokens":
        return sum(1 for row in read_tokens(path, name) if row)
    arrays = read_arrays(path, name, path.stem)
    check_numbers(arrays, name)
    return common_length(arrays, name)


def _set_files(manifest: Manifest, folder: Path) -> dict[str, Path]:
    """Returns the files of a set that is no text; of a drawn one, those that were drawn."""
    paths = source_files(manifest.source, folder, manifest.kind)
    if manifest.drawn:
        return {name: paths[name] for name in manifest.files if name in paths}
    return paths


def _check_names(found: NamedSet) -> dict[str, Path]:
    """Returns the files of a set; raises InputError for what is missing or was added, by name."""
    manifest = found.manifest
    if manifest.source.type not in ("path", "package"):
        return {}
    try:
        there = source_files(manifest.source, found.folder, manifest.kind)
    except InputError as error:
        raise InputError(f"calibration set {found.name}: {error}") from error
    said = [f"{name} is missing" for name in manifest.files if name not in there]
    if not (manifest.drawn and manifest.kind == "images"):
        said += [f"{name} was added" for name in there if name not in manifest.files]
    if said:
        raise _differs(found, said)
    return {name: there[name] for name in manifest.files}


def _warnings(manifest: Manifest, sha256: str, samples: int) -> tuple[str, ...]:
    """Returns why other content than the manifest's is no error, where it is none."""
    name, version = manifest.name, platform.python_version()
    if manifest.python:
        own = manifest.python.get(version)
        if own is not None and own != sha256:
            # no error: distributions patch the standard library, and this is the default text
            return (
                f"calibration set {name}: {_listed(manifest.source.names)}: other text than "
                f"{version} is known to carry (sha256 {sha256[:10]}, expected {own[:10]}): the "
                "standard library was changed; figures on it compare only with those of the same "
                "content",
            )
        if sha256 in manifest.python.values():
            return ()
        known = ", ".join(sorted(manifest.python))
        return (
            f"calibration set {name}: content of another version of Python (sha256 "
            f"{sha256[:10]} on {version}; known: {known}): figures on it compare only with those "
            "of the same content",
        )
    if sha256 == manifest.sha256 and samples == manifest.samples:
        return ()
    if manifest.source.type == "generator" and manifest.kind == "images":
        return (
            f"calibration set {name}: images that are computed otherwise here (sha256 "
            f"{sha256[:10]}, numpy {np.__version__})",
        )
    raise InputError(
        f"calibration set {name}: {manifest.source} holds other content than its manifest says "
        f"(sha256 {sha256[:10]}, {samples} samples; expected {manifest.sha256[:10]}, "
        f"{manifest.samples}). Make it again with --force if that is meant."
    )


def _differs(found: NamedSet, said: list[str]) -> InputError:
    return InputError(
        f"calibration set {found.name}: {_listed(said)} since its manifest was written "
        f"({found.where}). Restore the files, or make the set again with --force."
    )


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(words[:_SHOWN]) + more
