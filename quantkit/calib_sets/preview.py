"""What a set is, and a few of its samples, in words: without a model."""

from __future__ import annotations

import importlib.util
from typing import Final

from quantkit.calib_sets.check import SetInfo
from quantkit.calib_sets.content import Content
from quantkit.calib_sets.find import NamedSet
from quantkit.calib_sets.image_files import open_image
from quantkit.calib_sets.manifest import Manifest
from quantkit.calib_sets.numpy_files import read_arrays
from quantkit.calib_sets.shapes import KINDS
from quantkit.calib_sets.token_files import read_tokens

_CHARACTERS: Final = 240
_LAST: Final = 160
_TOKENS: Final = 16
_FILES: Final = 5


def samples_text(manifest: Manifest) -> str:
    """Returns how many samples a set has."""
    return f"{manifest.samples:,}" if manifest.samples else "no end"


def described(found: NamedSet, info: SetInfo) -> list[tuple[str, str]]:
    """Returns (field, value) of all that is said about a set but its description."""
    manifest = found.manifest
    files = list(manifest.files.items())
    fields = [
        ("where", found.where),
        ("kind", manifest.kind),
        ("source", str(manifest.source)),
        ("copied from", manifest.copied_from),
        ("licence", manifest.licence),
        ("cut", manifest.cut),
        ("samples", samples_text(manifest) + f", drawn by seed {manifest.seed}" * manifest.drawn),
        ("size", f"{manifest.bytes:,} bytes" if manifest.bytes else ""),
        ("sha256", info.sha256),
        ("tokenizer sha256", manifest.tokenizer_sha256),
        ("vocabulary", f"{manifest.vocab_size:,}" if manifest.vocab_size else ""),
        *((f"sha256 on Python {version}", digest) for version, digest in manifest.python.items()),
        *files[:_FILES],
        ("more files", f"{len(files) - _FILES:,}" if len(files) > _FILES else ""),
        *(("warning", warning) for warning in info.warnings),
    ]
    return [(field, value) for field, value in fields if value]


def preview(manifest: Manifest, content: Content, samples: int) -> list[tuple[str, str]]:
    """Returns (which sample, what is in it), for up to `samples` of a set."""
    if manifest.kind == "text":
        if manifest.cut == "blocks":
            return _pieces("\n\n".join(content.documents), samples)
        chosen = enumerate(content.documents[:samples])
        return [(f"document {index}", _ends(text)) for index, text in chosen]
    if manifest.kind == "images":
        return _images(content, samples)
    name, path = next(iter(content.paths.items()))
    if manifest.kind == "tokens":
        rows = read_tokens(path, name)[:samples]
        return [
            (f"row {index}", f"{len(row)} tokens: {', '.join(map(str, row[:_TOKENS]))}")
            for index, row in enumerate(rows)
        ]
    return [
        (label, f"{array.dtype} {list(array.shape)}, {array.min():.4g} to {array.max():.4g}")
        for label, array in read_arrays(path, name, path.stem).items()
        if array.size
    ]


def _pieces(text: str, samples: int) -> list[tuple[str, str]]:
    """Returns pieces at even distances: where a text is cut depends on the tokenizer."""
    places = [len(text) * index // max(1, samples) for index in range(samples)]
    return [(f"character {place:,}", _start(text[place:])) for place in places]


def _start(text: str) -> str:
    return text[:_CHARACTERS] + ("..." if len(text) > _CHARACTERS else "")


def _ends(text: str) -> str:
    """Returns the start and the end of a document: where it has answers, they come last."""
    if len(text) <= _CHARACTERS + _LAST:
        return text
    return f"{text[:_CHARACTERS]} ... {text[-_LAST:]}"


def _images(content: Content, samples: int) -> list[tuple[str, str]]:
    if not content.paths:
        kinds = (KINDS[index % len(KINDS)] for index in range(samples))
        return [(f"image {index}", kind) for index, kind in enumerate(kinds)]
    has_pillow = importlib.util.find_spec("PIL") is not None
    found = []
    for name, path in list(content.paths.items())[:samples]:
        words = f"{path.stat().st_size:,} bytes"
        if has_pillow:
            image = open_image(path)
            words = f"{image.width} x {image.height} pixels, {words}"
        found.append((name, words))
    return found
