"""`manifest.toml`: what a calibration set is, where it comes from, and the hashes that fix it."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from quantkit.calib_sets.source import Source
from quantkit.calib_sets.toml_text import toml_text
from quantkit.errors import InputError
from quantkit.results.io import check_schema, decode, to_plain

MANIFEST: Final = "manifest.toml"
SCHEMA: Final = "quantkit.calib/1"
KINDS: Final = ("text", "tokens", "images", "arrays")
CUTS: Final = ("blocks", "documents")
NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A calibration set.

    Attributes:
        name: That of its folder.
        licence: Of the data: an SPDX identifier, or words.
        cut: `blocks`: the documents are one text, joined by an empty line, which is cut into
            consecutive blocks. `documents`: one document, image or array row is one sample.
        samples: Documents, images or rows; 0 where there is no end.
        drawn: Whether the documents were drawn, by `seed`, from more; else they are all, in the
            order of the source.
        bytes: Size of the content: of the text in UTF-8, or of the files.
        sha256: Of the text's documents, a zero byte between two; of other kinds, of the lines
            `<sha256 of the file> <its name>`.
        copied_from: Source of the documents where the files of the set are copies; else empty.
        tokenizer_sha256: Of the vocabulary that made the tokens (`tokenizer_sha256`); empty where
            it is not known, or where the set is no tokens.
        vocab_size: The same as a number; 0 where it is not known.
        files: sha256 of each file, by its name: as in `source.names`, or below it; of a path or a
            package at least one.
        python: sha256 of the content by version of Python, where it is the standard library's.
    """

    schema: str = SCHEMA
    name: str
    kind: Literal["text", "tokens", "images", "arrays"]
    description: str
    licence: str
    cut: Literal["blocks", "documents"]
    seed: int
    samples: int
    drawn: bool
    bytes: int
    sha256: str
    source: Source
    copied_from: str = ""
    tokenizer_sha256: str = ""
    vocab_size: int = 0
    files: dict[str, str] = field(default_factory=dict)
    python: dict[str, str] = field(default_factory=dict)


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest at a path, which is called after its folder.

    Raises:
        InputError: no such file, no TOML, another schema, or a field that is missing, unknown or of
            the wrong kind; the file and the field are named.
    """
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no such file: {path}.") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:  # ValueError: bytes, TOML, a number's length
        raise InputError(f"{path} is not TOML: {error}.") from error
    check_schema(path, plain, SCHEMA)
    # optional fields may be missing, as in an older file
    found: Manifest = decode(plain, Manifest, f"{path}: ", "", True)
    _check(found, path)
    return found


def manifest_text(manifest: Manifest) -> str:
    """Returns the TOML of a manifest, without what is as by default; `read_manifest` reads it."""
    plain = _said(manifest) | {"source": _said(manifest.source)}
    return toml_text({"schema": manifest.schema} | plain)


def check_name(name: str) -> None:
    """Raises InputError for a name that cannot be a folder on every system."""
    if not NAME.fullmatch(name):
        raise InputError(
            f"calibration set {name!r:.80}: expected a name of up to 64 small letters, digits, "
            "'.', '_' and '-', the first one a letter or digit."
        )


def _said(value: Manifest | Source) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(value)
    silent = {field.name: field.default for field in dataclasses.fields(value)}
    return {name: item for name, item in plain.items() if item != silent[name]}


def _check(manifest: Manifest, path: Path) -> None:
    hashes = {"sha256": manifest.sha256}
    hashes |= {f"files.{name}": digest for name, digest in manifest.files.items()}
    hashes |= {f"python.{version}": digest for version, digest in manifest.python.items()}
    if manifest.tokenizer_sha256:
        hashes["tokenizer_sha256"] = manifest.tokenizer_sha256
    for name, digest in hashes.items():
        if not _HASH.fullmatch(digest):
            raise InputError(
                f"{path}: field `{name}`: expected a sha256, 64 hex digits; got {digest!r:.80}."
            )
    for name in ("seed", "samples", "bytes", "vocab_size"):
        if getattr(manifest, name) < 0:
            raise InputError(
                f"{path}: field `{name}`: expected 0 or more, got {getattr(manifest, name)}."
            )
    if not manifest.source.names:
        raise InputError(f"{path}: field `source.names` is empty: expected at least one.")
    if manifest.kind != "text" and manifest.source.type in ("module", "datasets", "stdlib"):
        raise InputError(
            f"{path}: field `kind`: a {manifest.source.type} holds text, got {manifest.kind!r}."
        )
    if manifest.source.type in ("path", "package") and not manifest.files:
        raise InputError(
            f"{path}: [files] is missing or empty: a {manifest.source.type} needs the sha256 of "
            "each of its files, which `quantkit calib make` writes."
        )
    if manifest.name != path.resolve().parent.name:
        raise InputError(
            f"{path}: field `name`: expected that of its folder, "
            f"{path.resolve().parent.name!r}; got {manifest.name!r:.80}."
        )
