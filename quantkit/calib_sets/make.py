"""`quantkit calib make`: a source and a few numbers become a folder with a manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantkit.calib_sets.check import read_content
from quantkit.calib_sets.content import (
    GENERATORS,
    Content,
    check_generator,
    drawn,
    files_sha256,
    source_files,
)
from quantkit.calib_sets.dataset_yaml import is_dataset_yaml
from quantkit.calib_sets.documents import is_jsonl
from quantkit.calib_sets.find import FOLDER, shipped_folder
from quantkit.calib_sets.image_files import IMAGE_SUFFIXES, image_files, open_image, require_pillow
from quantkit.calib_sets.manifest import (
    KINDS,
    MANIFEST,
    Manifest,
    check_name,
    manifest_text,
)
from quantkit.calib_sets.numpy_files import ARRAY_SUFFIXES
from quantkit.calib_sets.source import Source
from quantkit.calib_sets.store import copied, new_folder
from quantkit.calib_sets.text_sources import is_standard, package_path
from quantkit.calib_sets.token_files import IDS, tokenizer_sha256
from quantkit.errors import InputError, suggest

GENERATED: Final = 512
"""Documents that a generator makes where no number is given."""
_BLANK: Final = "0" * 64


@dataclass(frozen=True, kw_only=True)
class SetRequest:
    """What a set is made of.

    Attributes:
        source: As `Source.parse` reads it; relative paths start at the working directory.
        kind: One of KINDS; None takes what the source looks like.
        samples: Documents or images that are drawn, by `seed`; None takes all, in order.
        copy: Whether the set keeps its own copy of what was chosen.
        force: Whether a set of this name is replaced.
        tokenizer: Folder of the tokenizer that made the tokens.
        vocab_size: Size of its vocabulary, where there is no such folder.
    """

    name: str
    source: str
    kind: str | None = None
    samples: int | None = None
    seed: int = 0
    licence: str = "unknown"
    description: str = ""
    copy: bool = False
    force: bool = False
    tokenizer: str | None = None
    vocab_size: int = 0


def make_set(request: SetRequest) -> Path:
    """Returns the folder `calib/NAME`, written whole or not at all.

    Raises:
        InputError: a name that cannot be a folder or is taken, a source that cannot be read or
            holds too little, what no model can read.
    """
    name, target = request.name, Path(FOLDER) / request.name
    check_name(name)
    _check_free(request, target)
    _check_counts(request)
    source = Source.parse(request.source)
    kind = request.kind or _kind(source)
    if kind not in KINDS:
        raise InputError(f"--kind {kind!r}: unknown kind.{suggest(kind, KINDS)}")
    if kind != "tokens" and (request.tokenizer or request.vocab_size):
        raise InputError(f"a set of {kind} has no tokens: leave --tokenizer and --vocab-size out.")
    manifest = Manifest(
        name=name,
        kind=kind,  # type: ignore[arg-type]  # checked above
        description=request.description,
        licence=request.licence,
        cut=_cut(source, kind),
        seed=request.seed,
        samples=_asked(request, source, kind),
        drawn=request.samples is not None and source.type != "generator",
        bytes=0,
        sha256=_BLANK,
        source=_seen_from(source, target),
        tokenizer_sha256=_tokenizer(request.tokenizer),
        vocab_size=request.vocab_size,
    )
    manifest, content = _filled(manifest, target)
    with new_folder(target, request.force) as folder:
        if request.copy:
            manifest = copied(manifest, content, folder, str(source))
        elif manifest.source.type == "path" and _is_inside(content, target):
            raise InputError(
                f"{request.source} lies in the folder of the set, {target}, which is written anew: "
                "keep it elsewhere, or add --copy."
            )
        (folder / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
    return target


def _check_free(request: SetRequest, target: Path) -> None:
    if request.force:
        return
    if target.exists():
        raise InputError(f"{target} is there already: name another set, or --force replaces it.")
    if (shipped_folder() / request.name / MANIFEST).is_file():
        raise InputError(
            f"{request.name} is the name of a shipped set: name another one, or --force hides the "
            "shipped one in this working directory."
        )


def _check_counts(request: SetRequest) -> None:
    if request.samples is not None and request.samples < 1:
        raise InputError(f"--samples takes 1 or more, got {request.samples}.")
    if request.seed < 0 or request.vocab_size < 0:
        raise InputError(
            f"--seed and --vocab-size take 0 or more; got {request.seed}, {request.vocab_size}."
        )


def _kind(source: Source) -> str:
    """Returns the kind that a source looks like."""
    if source.type == "generator":
        return check_generator(source)
    if source.type not in ("path", "package"):
        return "text"
    name = source.names[0]
    path = package_path(name) if source.type == "package" else Path(name).expanduser()
    suffix = path.suffix.lower()
    if is_dataset_yaml(name):
        raise InputError(
            f"{name}: a set is made of the folder of its images; commands that read images take a "
            "data.yaml itself."
        )
    if suffix in ARRAY_SUFFIXES:
        return "arrays"
    if suffix in IMAGE_SUFFIXES or (
        path.is_dir() and image_files(path) and not any(path.glob("*.txt"))
    ):
        return "images"
    if is_jsonl(path) and path.is_file() and not source.field:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = next((line for line in file if line.strip()), "")
        with contextlib.suppress(ValueError):
            row = json.loads(first)
            if isinstance(row, dict) and IDS in row and "text" not in row:
                return "tokens"
    return "text"


def _cut(source: Source, kind: str) -> Any:
    """Returns `blocks` for what is one text, `documents` for what is many."""
    if kind == "text" and source.type in ("module", "stdlib"):
        return "blocks"
    name = Path(source.names[0])
    is_file = source.type == "package" and package_path(source.names[0]).is_file()
    is_file = is_file or (source.type == "path" and name.expanduser().is_file())
    return "blocks" if kind == "text" and is_file and not is_jsonl(name) else "documents"


def _asked(request: SetRequest, source: Source, kind: str) -> int:
    if source.type == "generator":
        if GENERATORS.get(source.names[0]) == "images" and request.samples is not None:
            raise InputError(f"{source} has no end: leave --samples out.")
        return request.samples or GENERATED
    if request.samples is not None and kind in ("arrays", "tokens"):
        raise InputError(
            f"a set of {kind} is its whole file: leave --samples out (the --samples of a command "
            "takes the first ones)."
        )
    return request.samples or 0


def _seen_from(source: Source, target: Path) -> Source:
    """Returns the source with its relative paths seen from the folder of the set."""
    if source.type != "path":
        return source
    name = os.path.expanduser(source.names[0])
    if not os.path.isabs(name):
        # the system follows links before "..", so both are taken as they really are
        real = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
        name = Path(os.path.relpath(real, os.path.realpath(target))).as_posix()
    return dataclasses.replace(source, names=(name,))


def _filled(manifest: Manifest, target: Path) -> tuple[Manifest, Content]:
    """Returns the manifest with the numbers and hashes of its content."""
    # `target` need not be there, and a path through what is not there leads nowhere
    folder = Path(os.path.realpath(target))
    source = manifest.source
    if source.type == "path":
        absolute = os.path.normpath(folder / source.names[0])
        seen = dataclasses.replace(source, names=(absolute,))
    else:
        seen = source
    given = dataclasses.replace(manifest, source=seen)
    if manifest.drawn and manifest.kind == "images":
        paths = source_files(seen, folder, "images")
        names = drawn(list(paths), manifest.samples, manifest.seed, str(source))
        given = dataclasses.replace(given, files=dict.fromkeys(names, _BLANK))
    content = read_content(given, folder)
    if manifest.kind == "images" and content.paths:
        require_pillow()
        for path in content.paths.values():
            open_image(path)
    before, after = seen.names[0], source.names[0]
    content = dataclasses.replace(
        content,
        files={_renamed(name, before, after): digest for name, digest in content.files.items()},
        paths={_renamed(name, before, after): path for name, path in content.paths.items()},
    )
    sha256 = content.sha256 if manifest.kind == "text" or not content.files else ""
    filled = dataclasses.replace(
        manifest,
        samples=content.samples,
        bytes=content.bytes,
        sha256=sha256 or files_sha256(content.files),
        files=content.files,
        python={platform.python_version(): content.sha256} if is_standard(source) else {},
    )
    return filled, content


def _renamed(name: str, before: str, after: str) -> str:
    return after.rstrip("/") + name[len(before) :] if name.startswith(before) else name


def _is_inside(content: Content, target: Path) -> bool:
    return any(path.resolve().is_relative_to(target.resolve()) for path in content.paths.values())


def _tokenizer(folder: str | None) -> str:
    if folder is None:
        return ""
    if not Path(folder).expanduser().is_dir():
        raise InputError(f"--tokenizer {folder}: no such folder.")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            Path(folder).expanduser(), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"--tokenizer {folder} cannot be used: {first}") from error
    return tokenizer_sha256(tokenizer)
