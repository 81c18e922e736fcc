"""What a run found, as trees of fields that are named by what they are, never by their folder.

A layer, a tensor, a cell of a sweep or a step of a training is a key of words, so that two runs can
be laid over each other field by field, whatever the order of their files and lists.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quantkit.results import (
    Accuracy,
    AttentionMass,
    Cell,
    CurveStep,
    Delta,
    DifferentialLayer,
    FileInfo,
    Finding,
    GroupStats,
    HiddenCurve,
    KeptPoint,
    LogitCurve,
    LossPoint,
    Measurement,
    MethodRange,
    ModelInfo,
    OutlierTokens,
    Parity,
    ProbeHits,
    QuantizerDiagnosis,
    QuantizerInfo,
    SeedSpread,
    Sensitivity,
    SourceInfo,
    StabilityPoint,
    TaskInfo,
    TensorDiagnosis,
    TensorError,
    Trial,
    UnitSensitivity,
    to_plain,
)

Node = Any
"""A mapping of nodes by words, or a leaf: a number, text, a list of plain data, an `Estimate`."""
Z_95: Final = 1.96

_NAMED_BY: Final[dict[type, tuple[str, ...]]] = {
    AttentionMass: ("model", "task", "depth_frac", "kind"),
    CurveStep: ("step",),
    DifferentialLayer: ("layer",),
    FileInfo: ("name",),
    Finding: ("kind", "where", "quantizer"),
    GroupStats: ("layer", "head", "map", "token_class"),
    HiddenCurve: ("layer",),
    KeptPoint: ("units",),
    LogitCurve: ("layer", "map"),
    LossPoint: ("step",),
    Measurement: ("step",),
    MethodRange: ("method",),
    ModelInfo: ("name",),
    Parity: ("reference", "batch", "seq_len", "cached"),
    ProbeHits: ("point", "name"),
    QuantizerDiagnosis: ("name",),
    QuantizerInfo: ("name",),
    SeedSpread: ("group", "recipe", "task", "metric"),
    SourceInfo: ("source",),
    StabilityPoint: ("samples",),
    TaskInfo: ("name",),
    TensorDiagnosis: ("name",),
    TensorError: ("name",),
    Trial: ("name",),
    UnitSensitivity: ("name",),
}
"""What tells the items of a list apart; a list of anything else is one leaf."""
_ESTIMATES: Final[dict[type, tuple[str, str, str]]] = {
    Cell: ("value", "ci_low", "ci_high"),
    Delta: ("value", "ci_low", "ci_high"),
    Accuracy: ("change", "change_low", "change_high"),
    Trial: ("change", "change_low", "change_high"),
}
_LEFT_OUT: Final = ("schema", "block_hashes", "headline")
"""Read as the newest; stated by the slice's hash; words about cells that are compared."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and the ends of its 95 % interval, NaN where there is none."""

    value: float
    low: float
    high: float


def tree(value: object, without: Sequence[str] = ()) -> Node:
    """Returns the fields of a result as a tree."""
    if isinstance(value, Estimate):
        return value
    if isinstance(value, OutlierTokens) and not value.by_layer:
        return None  # a version that did not look for them
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        for name in (*_LEFT_OUT, *without):
            fields.pop(name, None)
        return {key: tree(item) for key, item in _with_estimate(value, fields).items()}
    if isinstance(value, Mapping):
        return {str(key): tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return _by_name(value) if value and type(value[0]) in _NAMED_BY else to_plain(value)
    return value


def _with_estimate(value: object, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields, a figure and the ends of its interval as one leaf."""
    if isinstance(value, Sensitivity):
        half = Z_95 * fields.pop("total_stderr")
        middle = value.total_kl
        fields["total_kl"] = Estimate(value=middle, low=middle - half, high=middle + half)
    names = _ESTIMATES.get(type(value))
    if names is not None:
        ends = [math.nan if fields[name] is None else float(fields[name]) for name in names]
        del fields[names[1]], fields[names[2]]
        fields[names[0]] = Estimate(value=ends[0], low=ends[1], high=ends[2])
    return fields


def _by_name(items: Sequence[object]) -> dict[str, Node]:
    """Returns the items by what they are called, the second of one name as `name [2]`."""
    found: dict[str, Node] = {}
    for item in items:
        names = _NAMED_BY[type(item)]
        words = ", ".join(_word(name, getattr(item, name)) for name in names)
        key, again = words, 2
        while key in found:
            key, again = f"{words} [{again}]", again + 1
        found[key] = tree(item, names)
    return found


def _word(name: str, value: object) -> str:
    if name == "token_class":
        return f"{value} tokens"
    if value is None:
        return f"every {name}"
    return value if isinstance(value, str) else f"{name} {value}"


def is_absent(node: Node) -> bool:
    """True where there is nothing: no value, NaN, no text, no items, or fields that are all so."""
    if isinstance(node, Mapping):
        return all(is_absent(item) for item in node.values())
    if isinstance(node, Estimate):
        return math.isnan(node.value)
    if isinstance(node, float):
        return math.isnan(node)
    return node is None or node == "" or node == []


SAME_FRAC: Final = 1e-5
"""Relative: what the size and the order of batches may change of a figure, by contract."""


def is_same(one: Node, other: Node) -> bool:
    """True where both say the same, numbers to `SAME_FRAC`."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, Estimate) and isinstance(other, Estimate):
        return is_same(dataclasses.asdict(one), dataclasses.asdict(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, float) and isinstance(other, int | float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=SAME_FRAC, abs_tol=1e-12)
    if isinstance(one, int) and isinstance(other, float):
        return is_same(other, one)
    return bool(one == other)
