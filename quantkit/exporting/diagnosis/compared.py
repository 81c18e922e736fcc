"""Both graphs on the same samples: errors of the tensors they share, and of every quantizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.exporting.diagnosis.error_sums import ErrorSums, GridSums, visible_logits
from quantkit.exporting.diagnosis.logit_chains import logit_chains
from quantkit.exporting.diagnosis.padding import Mask, only, real_elements, real_positions
from quantkit.exporting.diagnosis.paired_tensors import (
    Pair,
    by_quantized,
    float_tensor,
    layer_of,
    pair_of,
)
from quantkit.exporting.diagnosis.quantized_graph import (
    LAYOUT,
    PRODUCTS,
    Quantizer,
    constants_of,
    quantizers_of,
)
from quantkit.exporting.diagnosis.quantized_weights import (
    WeightError,
    WeightPair,
    weight_arrays,
    weight_error,
)
from quantkit.exporting.diagnosis.switched import Site
from quantkit.exporting.diagnosis.tensor_runs import TensorRuns, as_float, dealt, tensor_bytes
from quantkit.progress import Progress

Arrays = Mapping[str, NDArray[Any]]
_KEPT_WEIGHTS: Final = 8
"""Dequantized weights that are held, to be measured alone: those with the largest errors."""


@dataclass(kw_only=True, eq=False)
class Row:
    """One quantizer, and what is known of it so far.

    Attributes:
        key: Its number in the quantized graph.
        tensor: Of the float graph, or of the quantized one where `value` is None.
        value: The float graph's tensor.
        grid, dynamic: What a static grid, or one that is found as the graph runs, does.
        site: Where it is switched on in the float graph; None where that cannot be done.
    """

    key: int
    place: str
    layer: str
    tensor: str
    value: ir.Value | None = None
    softmax: ir.Node | None = None
    readers: frozenset[str] = frozenset()
    quantizer: Quantizer | None = None
    grid: GridSums | None = None
    dynamic: DynamicSums | None = None
    weight_pair: WeightPair | None = None
    weight: WeightError | None = None
    site: Site | None = None

    @property
    def local_db(self) -> float:
        """The inliers' error that this quantizer alone makes; -inf where it is not finite."""
        if self.weight is not None:
            return self.weight.sqnr_db
        sums = self.grid.errors if self.grid is not None else None
        sums = self.dynamic.errors if self.dynamic is not None else sums
        return math.inf if sums is None or not sums.count else sums.inlier_sqnr_db


@dataclass(kw_only=True, eq=False)
class DynamicSums:
    """What DynamicQuantizeLinear does to a tensor: one range a call, with 0 in it, 256 levels."""

    errors: ErrorSums = field(default_factory=ErrorSums)
    scale_min: float = math.inf
    scale_max: float = -math.inf

    def add(self, x: NDArray[np.float32], real: Mask | None = None) -> None:
        """Adds a batch; the range is of all of it, the error of what is `real`."""
        lo, hi = min(0.0, float(x.min())), max(0.0, float(x.max()))
        scale = (hi - lo) / 255.0
        self.scale_min, self.scale_max = min(self.scale_min, scale), max(self.scale_max, scale)
        with np.errstate(all="ignore"):
            zero = np.clip(np.round(-lo / scale), 0, 255) if scale else 0.0
            steps = np.round(x.astype(np.float64) / scale) + zero if scale else np.zeros(x.shape)
            back = (np.clip(steps, 0, 255) - zero) * scale
            self.errors.add(only(x, real), only(back, real))


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """All sums: `errors[i]` belongs to `pairs[i]`."""

    pairs: list[Pair]
    errors: list[ErrorSums]
    rows: list[Row]
    unmatched: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Task:
    """Something to add up, and the tensors of either graph that it reads."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    pair: int = -1
    row: Row | None = None
    softmax_input: str = ""


def compare(
    ours: ir.Model,
    theirs: ir.Model,
    float_path: Path,
    quantized_path: Path,
    batches: Sequence[Arrays],
    pairs: list[Pair],
    weights: Sequence[WeightPair],
    limit: int,
    progress: Progress,
) -> Comparison:
    """Returns the sums of every pair and quantizer over all batches.

    Args:
        limit: Bytes of tensors and of weights that may be held at a time.
    """
    constants = constants_of(ours)
    chains = logit_chains(ours, constants)
    rows = _rows(ours, theirs, pairs, chains, constants)
    rows += _weight_rows(weights, len(rows), float_path, quantized_path, limit)
    errors = [ErrorSums() for _ in pairs]
    tasks = [*_pair_tasks(pairs, chains), *_row_tasks(rows)]
    costs = _costs(tasks, float_path, quantized_path, batches[0])
    groups = list(dealt(costs, limit))
    for number, group in enumerate(groups):
        chosen = [tasks[index] for index in group]
        one = TensorRuns(float_path, [name for task in chosen for name in task.ours])
        other = TensorRuns(quantized_path, [name for task in chosen for name in task.theirs])
        for done, batch in enumerate(batches):
            progress(f"comparing tensors, part {number + 1} of {len(groups)}", done, len(batches))
            a, b = one.run(batch), other.run(batch)
            real = real_positions(batch)
            for task in chosen:
                _add(task, pairs, errors, a, b, real)
    for row in rows:
        if row.weight_pair is None:
            row.site = _site(row)
    shown = {pair.value for pair in pairs}
    every = [v for n in ours.graph if n.op_type not in LAYOUT for v in n.outputs]
    missing = [v for v in every if v not in shown and v not in constants]
    return Comparison(pairs=pairs, errors=errors, rows=rows, unmatched=len(missing))


def _rows(
    ours: ir.Model,
    theirs: ir.Model,
    pairs: Sequence[Pair],
    chains: Mapping[ir.Value, ir.Node],
    constants: set[ir.Value],
) -> list[Row]:
    known_pairs = by_quantized(pairs)
    values = {str(v.name): v for v in ours.graph.inputs}
    values |= {str(v.name): v for node in ours.graph for v in node.outputs}
    rows = []
    for key, quantizer in enumerate(quantizers_of(theirs, constants_of(theirs))):
        value = float_tensor(quantizer, known_pairs, values)
        nodes = [_float_reader(reader, known_pairs) for reader in quantizer.readers]
        known = [node for node in nodes if node is not None]
        place, layer = _place(quantizer, value, known, chains, constants)
        direct = value is not None and all(n is not None and value in n.inputs for n in nodes)
        own = quantizer.source if quantizer.source is not None else quantizer.integers
        named = value if value is not None else own
        row = Row(
            key=key,
            place=place,
            layer=layer,
            tensor="" if named is None else str(named.name),
            value=value,
            softmax=None if value is None else chains.get(value),
            readers=frozenset(str(n.outputs[0].name) for n in known) if direct else frozenset(),
            quantizer=quantizer,
        )
        if quantizer.scale is None or quantizer.zero_point is None:
            row.dynamic = DynamicSums() if quantizer.op.startswith("Dynamic") else None
        elif not quantizer.blocked:
            row.grid = GridSums(
                scale=quantizer.scale.reshape(-1),
                zero_point=np.broadcast_to(quantizer.zero_point, quantizer.scale.shape).reshape(-1),
                qmin=quantizer.qmin,
                qmax=quantizer.qmax,
                axis=quantizer.axis,
            )
        rows.append(row)
    return rows


def _float_reader(reader: ir.Node, pairs: Mapping[ir.Value, Pair]) -> ir.Node | None:
    found = pair_of(reader, pairs)
    return None if found is None else found.node


def _place(
    quantizer: Quantizer,
    value: ir.Value | None,
    readers: Sequence[ir.Node],
    chains: Mapping[ir.Value, ir.Node],
    constants: set[ir.Value],
) -> tuple[str, str]:
    """Returns what a quantizer is to which layer."""
    if value is not None and value in chains:
        return "logits", layer_of(chains[value])
    producer = None if value is None else value.producer()
    if producer is not None and producer.op_type == "Softmax":
        return "probabilities", layer_of(producer)
    layers = [n for n in readers if n.op_type in PRODUCTS and constants.intersection(n.inputs[:2])]
    if layers:
        return "input", layer_of(layers[0])
    if producer is not None and producer.op_type in PRODUCTS:
        return "output", layer_of(producer)
    if readers:
        return "input", layer_of(readers[0])
    return "output", layer_of(producer) if producer is not None else quantizer.name


def _weight_rows(
    weights: Sequence[WeightPair], key: int, float_path: Path, quantized_path: Path, limit: int
) -> list[Row]:
    rows: list[Row] = []
    for index, a, b in weight_arrays(weights, float_path, quantized_path, limit):
        pair = weights[index]
        row = Row(
            key=key + index,
            place="weight",
            layer=layer_of(pair.node),
            tensor=str(pair.value.name),
            value=pair.value,
            weight_pair=pair,
            weight=weight_error(pair.node, pair.value, a, b),
        )
        row.site = Site(
            tensor=row.tensor,
            readers=frozenset([str(pair.node.outputs[0].name)]),
            weight=np.array(b, np.float32),
        )
        rows.append(row)
        held = [other for other in rows if other.site is not None]
        if len(held) > _KEPT_WEIGHTS:
            max(held, key=lambda other: other.local_db).site = None
    return rows


def _pair_tasks(pairs: Sequence[Pair], chains: Mapping[ir.Value, ir.Node]) -> Iterable[_Task]:
    for index, pair in enumerate(pairs):
        top = _softmax_input(chains.get(pair.value))
        yield _Task(
            ours=tuple(filter(None, (str(pair.value.name), top))),
            theirs=(str(pair.quantized.name),),
            pair=index,
            softmax_input=top,
        )


def _row_tasks(rows: Sequence[Row]) -> Iterable[_Task]:
    for row in rows:
        if row.grid is None and row.dynamic is None:
            continue
        top = _softmax_input(row.softmax)
        if row.value is not None:
            yield _Task(
                ours=tuple(filter(None, (row.tensor, top))), theirs=(), row=row, softmax_input=top
            )
        elif row.quantizer is not None and row.quantizer.source is not None:
            yield _Task(ours=(), theirs=(row.tensor,), row=row)


def _softmax_input(node: ir.Node | None) -> str:
    value = None if node is None else node.inputs[0]
    return "" if value is None else str(value.name)


def _costs(
    tasks: Sequence[_Task], float_path: Path, quantized_path: Path, batch: Arrays
) -> list[int]:
    ours = tensor_bytes(float_path, list({n: 0 for t in tasks for n in t.ours}), batch)
    theirs = tensor_bytes(quantized_path, list({n: 0 for t in tasks for n in t.theirs}), batch)
    return [sum(ours[n] for n in t.ours) + sum(theirs[n] for n in t.theirs) for t in tasks]


def _add(
    task: _Task,
    pairs: Sequence[Pair],
    errors: Sequence[ErrorSums],
    a: Arrays,
    b: Arrays,
    positions: Mask | None,
) -> None:
    visible = visible_logits(as_float(a[task.softmax_input])) if task.softmax_input else None
    if task.row is not None:
        x = as_float(a[task.ours[0]] if task.ours else b[task.theirs[0]])
        if not x.size:
            return
        if task.row.grid is not None:
            task.row.grid.add(x, visible, real_elements(x.shape, positions))
        elif task.row.dynamic is not None:
            task.row.dynamic.add(x, real_elements(x.shape, positions))
        return
    pair = pairs[task.pair]
    x, y = a[task.ours[0]], b[task.theirs[0]]
    if x.shape != y.shape or x.dtype.kind != "f":
        return
    if pair.scale is not None:
        zero = 0 if pair.zero_point is None else pair.zero_point.astype(np.float64)
        y = (y.astype(np.float64) - zero) * pair.scale
    kept = real_elements(x.shape, positions)
    if visible is not None and visible.shape == x.shape:
        kept = visible if kept is None else visible & kept
    errors[task.pair].add(only(x, kept), only(y, kept))


def _site(row: Row) -> Site | None:
    if row.value is None or (row.grid is None and row.dynamic is None):
        return None
    if row.grid is None:
        return Site(tensor=row.tensor, readers=row.readers)
    if row.grid.qmin == row.grid.qmax:
        return None
    return Site(
        tensor=row.tensor,
        readers=row.readers,
        scale=row.grid.scale,
        zero_point=row.grid.zero_point,
        qmin=row.grid.qmin,
        qmax=row.grid.qmax,
        axis=row.grid.axis,
        rank=row.grid.rank,
    )
