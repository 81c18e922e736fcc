"""What the verbs take by keyword: the options of the commands, by their names.

`--seq-len 256` is `seq_len=256`, `--bits 16,8` is `bits=(16, 8)`, `--from` is `from_run`, a word of
Python's own. What each one does is said once, in the jobs (`quantkit.jobs`) and in the help of the
commands; the defaults are the jobs'.
"""

from __future__ import annotations

import dataclasses
import keyword
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Final, Protocol, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from quantkit.errors import InputError, suggest
from quantkit.jobs import Job
from quantkit.jobs.config_file import option_of

J = TypeVar("J", bound=Job)
_WORDS: Final[dict[Any, str]] = {
    str: "a string or a path",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
}

_OWN: Final = {"arms": "arm"}
"""Options that no config file has."""


class HasFolder(Protocol):
    """A result, which stands for the run that it was read from."""

    @property
    def folder(self) -> Path | None: ...


Source = str | os.PathLike[str]
Run = Source | HasFolder
Words = str | Sequence[str]
Sources = Source | Sequence[Source]
Runs = Run | Sequence[Run]
Numbers = int | Sequence[int]
Fractions = float | Sequence[float]


class StatsOptions(TypedDict, total=False):
    """Of `stats`."""

    seq_len: int
    samples: int
    batch_size: int
    dtype: str
    device: str
    device_map: str | None
    max_memory: Words
    bos: str
    count_masked: bool
    paper: bool
    points: Words | None
    quantiles: Fractions
    rows: int | None
    seed: int
    layers: Words
    linear: Words
    allow_unseen: Words
    force: bool


class CalibrateOptions(TypedDict, total=False):
    """Of `calibrate`."""

    from_run: Run | None
    seq_len: int
    samples: int | None
    batch_size: int
    dtype: str
    device: str
    bos: str
    method: str
    points: Words | None
    bits: Numbers
    symmetric: Words
    granularity: str
    exclude_first: bool
    smooth: str | None
    until_stable: float | None
    weights: str | None
    weight_method: str
    weight_bits: int
    allow: Words
    allow_unseen: Words
    force: bool


class SensitivityOptions(TypedDict, total=False):
    """Of `sensitivity`."""

    quantize: str
    eval: Source
    seq_len: int
    samples: int
    batch_size: int
    dtype: str
    device: str
    modes: Words
    group: str
    weights: bool
    remaining: float
    allow_overlap: bool
    force: bool


class SweepOptions(TypedDict, total=False):
    """Of `sweep`."""

    task: Words
    eval: Source
    calib: Source | None
    quantize: Words
    ranges: Runs
    keep: Runs
    allow_overlap: bool
    bits: Numbers
    granularity: Words
    range: Words
    grid: Words
    seq_len: int
    samples: int
    items: int
    calib_samples: int
    batch_size: int
    dtype: str
    device: str
    bos: str
    seed: int
    force: bool


class ExportOptions(TypedDict, total=False):
    """Of `export`."""

    quantize: str
    calib: Source
    eval: Source
    seq_len: int
    samples: int
    eval_samples: int
    batch_size: int
    dtype: str
    device: str
    bos: str
    opset: int
    attention_bits: int
    storage: str | None
    layout: str
    max_drop: float | None
    task: str
    search_samples: int
    method: str
    tokenizer: Source | None
    ranges: Run | None
    keep: Runs
    allow_overlap: bool
    seed: int
    force: bool


class DiagnoseOptions(TypedDict, total=False):
    """Of `diagnose`."""

    calib: Source | None
    tokenizer: Source | None
    seq_len: int
    samples: int
    bos: str
    measure: int
    alone_samples: int
    force: bool


class TrainOptions(TypedDict, total=False):
    """Of `train`."""

    device: str
    arm: Words
    force: bool


class CompareOptions(TypedDict, total=False):
    """Of `compare`."""

    text: Source
    seq_len: int
    calib_samples: int
    eval_samples: int
    batch_size: int
    dtype: str
    device: str
    bos: str
    paper: bool
    task: Words
    items: int
    bits: Numbers
    granularity: Words
    range: Words
    quantize: str
    attention_bits: int
    opset: int
    seed: int
    force: bool


def argument_of(field: str) -> str:
    """Returns the keyword that says a field of a job: its option's name, where Python allows it."""
    name = _OWN.get(field, option_of(field)).replace("-", "_")
    return field if keyword.iskeyword(name) else name


def fields_of(cls: type[J], verb: str, options: Mapping[str, Any], **own: object) -> dict[str, Any]:
    """Returns the fields of a job that were given.

    Args:
        options: By keyword; `own`: what the verb's own parameters say, by field.

    Raises:
        InputError: an unknown keyword, or a value of another kind.
    """
    hints = get_type_hints(cls)
    names = {argument_of(field): field for field in cls.__dataclass_fields__ if field not in own}
    for name in options:
        if name not in names:
            raise InputError(f"{verb} has no option {name!r}.{suggest(name, names)}")
    given = {field: taken(field, value, hints[field]) for field, value in own.items()}
    return given | {
        names[name]: taken(name, value, hints[names[name]]) for name, value in options.items()
    }


def job_of(cls: type[J], verb: str, options: Mapping[str, Any], **own: object) -> J:
    """Returns the job; see `fields_of`.

    Raises:
        InputError: as `fields_of`, and what the job itself refuses.
    """
    return cls(**fields_of(cls, verb, options, **own))


def taken(name: str, value: Any, kind: Any) -> Any:
    """Returns a value as the annotation `kind` of a job's field has it; one word is a list of one.

    Raises:
        InputError: a value of another kind.
    """
    kinds = [found for found in get_args(kind) if found is not NoneType]
    if NoneType in get_args(kind):
        if value is None:
            return None
        (kind,) = kinds
    if dataclasses.is_dataclass(kind):
        return value  # a verb made it
    if get_origin(kind) is not tuple:
        return _one(name, value, kind)
    item = get_args(kind)[0]
    is_list = isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes)
    return tuple(_one(name, found, item) for found in (value if is_list else (value,)))


def _one(name: str, value: Any, kind: Any) -> Any:
    if kind is str:
        folder = getattr(value, "folder", None)
        if isinstance(value, str | os.PathLike):
            return os.fspath(value)
        if isinstance(folder, Path):
            return str(folder)
    elif kind is bool:
        if isinstance(value, bool):
            return value
    elif not isinstance(value, bool):
        if kind is float and isinstance(value, int | float):
            return float(value)
        try:
            return operator.index(value)  # numpy's whole numbers too
        except TypeError:
            pass
    raise InputError(f"{name}: expected {_WORDS[kind]}, got {value!r:.60}.")
