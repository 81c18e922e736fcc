"""`curves.jsonl`: how outliers grow over a training, one line a recorded step.

The first line is the header, whose first field is `schema`; each further line is one `CurveStep`.
Lines are appended whole. What a killed process left of a line is the file's tail without a line
end: it is ignored on reading and removed before the next line is written. A step that stands
there twice (a training that went on from an older checkpoint) counts as its later line says.
NaN is `null`, infinities are `"inf"` and `"-inf"`, as in every result file.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from quantkit.errors import InputError
from quantkit.results.io import check_schema, decode, to_plain
from quantkit.results.result import Result

CURVES_SCHEMA: Final = "quantkit.curves/1"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CurvesHeader:
    """The first line: the model that is trained, and how it is watched.

    Attributes:
        name: The short name that reports use.
        architecture: Class of the model.
        parameters: Number of weights, tied ones once.
        layers: Attention modules that were seen.
        maps: Attention maps per head, 2 for a differential head.
        every: Steps between two lines, when the file was begun.
        ranks: Processes that train; the figures are of rank 0's share of each batch.
        versions: Of python, quantkit, torch, transformers.
    """

    schema: str = CURVES_SCHEMA
    name: str
    architecture: str
    parameters: int
    layers: int
    maps: int
    every: int
    ranks: int
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class LogitCurve:
    """Attention logits of one layer and map at one step, over all sequences and heads.

    Attributes:
        max, min: Signed extremes of the valid logits, NaN where one of them is NaN. `max` is what
            QK-Clip compares with its threshold (Kimi K2 report, arXiv 2507.20534, MuonClip).
        abs_max: max(|max|, |min|).
        head: The head, counted within its map, that has `abs_max`; of NaN, the first that has one.
        nan: Valid logits that are NaN.
    """

    layer: int
    map: int
    max: float
    min: float
    abs_max: float
    head: int
    nan: int


@dataclass(frozen=True, kw_only=True)
class HiddenCurve:
    """Output of one layer at one step, padding left out.

    Attributes:
        abs_max: The largest |x|.
        inf_norm_mean: Mean over sequences of the per-sequence max |x|.
        kurtosis: Pearson's, pooled over all elements: a Gaussian has 3.
        nan: Elements that are NaN.

    The last two figures are what Quantizable Transformers watches (Bondarenko et al. 2023,
    arXiv 2306.12929), which takes the mean of per-sequence kurtoses instead of pooling.
    """

    layer: int
    abs_max: float
    inf_norm_mean: float
    kurtosis: float
    nan: int


@dataclass(frozen=True, kw_only=True)
class CurveStep:
    """One recorded step.

    Attributes:
        loss, lr: As noted; NaN where nobody did.
        forwards: Forward passes that were seen: more than one with gradient accumulation.
        sequences: In all of them; `tokens`: without padding.
    """

    step: int
    loss: float
    lr: float
    forwards: int
    sequences: int
    tokens: int
    logits: list[LogitCurve]
    hidden: list[HiddenCurve]


@dataclass(frozen=True, kw_only=True, repr=False)
class Curves(Result):
    """The whole of `curves.jsonl`: `steps` ascending, each once."""

    header: CurvesHeader
    steps: tuple[CurveStep, ...]


def read_curves(path: Path) -> Curves:
    """Returns the curves of a file, without what was half-written at its end.

    Raises:
        InputError: no such file, no complete header, another schema, or a line that is not a
            whole record (the line is named).
    """
    lines, _ = _whole_lines(path, _read(path))
    if not lines:
        raise InputError(f"{path}: no complete header line; nothing was recorded in it.")
    header = _header(path, lines[0])
    steps: dict[int, CurveStep] = {}
    for line, plain in enumerate(lines[1:], 2):
        step: CurveStep = decode(plain, CurveStep, f"{path}, line {line}: ", "", False)
        steps[step.step] = step
    curves = Curves(header=header, steps=tuple(steps[number] for number in sorted(steps)))
    return curves.in_folder(path.parent)


def prepare_curves(path: Path) -> CurvesHeader | None:
    """Returns the header of curves that are to be continued, or None where none stand there yet.

    Makes the folder. The tail that a killed process left is removed, so that the next line starts
    on its own.

    Raises:
        InputError: the path is a folder, cannot be written to, or is another kind of file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    if path.is_dir():
        raise InputError(f"{path} is a folder; expected the path of a file, e.g. curves.jsonl.")
    place = path if path.exists() else path.parent
    if not os.access(place, os.W_OK):
        raise InputError(f"cannot write {path}: Permission denied.")
    if not path.exists():
        return None
    data = _read(path)
    lines, end = _whole_lines(path, data)
    if not lines:
        if data.strip() and not data.startswith(b'{"schema"'[: len(data)]):
            raise InputError(f"{path} is not a file of curves; name another, or remove it.")
        _truncate(path, 0)
        return None
    header = _header(path, lines[0])
    if end < len(data):
        _truncate(path, end)
    elif not data.endswith(b"\n"):
        _append(path, b"\n")
    return header


def append_curves(path: Path, *lines: CurvesHeader | CurveStep) -> None:
    """Appends the lines in one write.

    Raises:
        InputError: the file cannot be written to.
    """
    texts = [json.dumps(to_plain(line), allow_nan=False, separators=(",", ":")) for line in lines]
    _append(path, "".join(f"{text}\n" for text in texts).encode())


def _header(path: Path, plain: Any) -> CurvesHeader:
    check_schema(path, plain, CURVES_SCHEMA)
    header: CurvesHeader = decode(plain, CurvesHeader, f"{path}, line 1: ", "", False)
    return header


def _whole_lines(path: Path, data: bytes) -> tuple[list[Any], int]:
    """Returns the parsed lines, and where the last whole one ends.

    Only the last line may be broken, and only where it has no line end.
    """
    *ended, tail = data.split(b"\n")
    plain = []
    for line, text in enumerate(ended, 1):
        try:
            plain.append(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path}, line {line}: not a whole JSON record ({error}). Only the last line of a "
                "file may be cut off: restore the line or remove it."
            ) from error
    try:
        return [*plain, json.loads(tail)], len(data)
    except (ValueError, RecursionError):
        return plain, len(data) - len(tail)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"no such file: {path}.") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error


def _append(path: Path, data: bytes) -> None:
    try:
        with path.open("ab") as file:
            file.write(data)
    except OSError as error:
        raise _unwritable(path, error) from error


def _truncate(path: Path, size: int) -> None:
    try:
        os.truncate(path, size)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot write {path}: {error.strerror or error}.")
