"""The float graph with quantizers that one input switches on, one at a time.

Each stands in a branch of an If, so that one that is off costs a copy, and all are measured in one
session, with no fusion: whatever form the quantized graph has, a static grid is its arithmetic,
`(clip(round(x / scale) + zero_point) - zero_point) * scale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.exporting.diagnosis.padding import Mask, only, real_elements, real_positions
from quantkit.exporting.diagnosis.tensor_runs import Arrays, run
from quantkit.exporting.graphs import constant
from quantkit.onnx_runtime.graph_tensors import load_float_graph, reduced_to
from quantkit.onnx_runtime.sessions import open_graph

SWITCH: Final = "quantkit/switch"
_OFF: Final = -1
LOGITS: Final = "logits"


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """One quantizer, on a tensor of the float graph.

    Attributes:
        readers: First outputs of the nodes that read it quantized; empty: all that read it.
        scale, zero_point, qmin, qmax, axis: A static grid; no scale: found as the graph runs.
        weight: Takes the tensor's place as it is.
    """

    tensor: str
    readers: frozenset[str] = frozenset()
    scale: NDArray[Any] | None = None
    zero_point: NDArray[Any] | None = None
    qmin: int = 0
    qmax: int = 0
    axis: int | None = None
    rank: int = 0
    weight: NDArray[Any] | None = None


def damages(
    path: Path, sites: Sequence[Site], outputs: Sequence[str], batches: Sequence[Arrays], tell: Any
) -> list[float]:
    """Returns what each site alone costs the outputs, see `damage`; the mean over batches.

    Args:
        tell: Called with (sites done, sites).

    Raises:
        InputError: as `damage`.
    """
    graph, names = _switched(path, sites, outputs)
    session = open_graph(path, graph)
    total = np.zeros(len(sites))
    for number, batch in enumerate(batches):
        real = real_positions(batch)
        truth = run(session, names, {**batch, SWITCH: np.asarray(_OFF)}, path)
        for index in range(len(sites)):
            tell(number * len(sites) + index, len(batches) * len(sites))
            found = run(session, names, {**batch, SWITCH: np.asarray(index)}, path)
            total[index] += damage(outputs, truth, found, real) / len(batches)
    return [float(x) for x in total]


def damage(
    outputs: Sequence[str],
    truth: Sequence[NDArray[Any]],
    found: Sequence[NDArray[Any]],
    real: Mask | None = None,
) -> float:
    """Returns how far outputs are from the truth; inf where they are not finite.

    The mean KL(truth || found) over the last axis, in nats, of the one output `logits`; else the
    sum of squared differences over that of squares. A part of the vocabulary that the truth gives
    -inf throughout adds nothing to the KL.

    Args:
        real: bool `[batch, tokens]`, False where padded: that counts in nothing.

    Raises:
        InputError: the truth is not finite, and no measure then; or another shape.
    """
    for name, ours, theirs in zip(outputs, truth, found, strict=True):
        if ours.shape != theirs.shape:
            raise InputError(
                f"output {name!r} is {list(ours.shape)} in the float graph and "
                f"{list(theirs.shape)} in the quantized one: these are not two forms of one model."
            )
    if list(outputs) == [LOGITS]:
        return _divergence(*(_rows(x[0], real) for x in (truth, found)))
    signal = noise = 0.0
    is_finite = True
    for name, ours, theirs in zip(outputs, truth, found, strict=True):
        kept = real_elements(ours.shape, real)
        a, b = only(ours, kept), only(theirs, kept)
        _require_finite(name, int((~np.isfinite(a)).sum()))
        is_finite = is_finite and bool(np.isfinite(b).all())
        if is_finite:
            a64 = a.astype(np.float64)
            signal += float((a64**2).sum())
            noise += float(((a64 - b) ** 2).sum())
    if not is_finite:
        return float("inf")
    return noise / signal if signal else float(noise > 0)


def _rows(logits: NDArray[Any], real: Mask | None) -> torch.Tensor:
    """Returns float32 `[positions, vocabulary]` of the positions that are real."""
    kept = real_elements(logits.shape[:-1], real)
    rows = logits.reshape(-1, logits.shape[-1]) if kept is None else logits[kept]
    return torch.from_numpy(np.asarray(rows, np.float32))


def _divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Returns the mean KL(p || q) of rows of logits; what p never chooses only takes from q."""
    never = p.isneginf().all(0)
    never &= ~never.all()  # of a vocabulary that is hidden as a whole nothing is left to measure
    _require_finite(LOGITS, int((~p[:, ~never].isfinite()).sum()))
    if bool(q.isnan().any() or q.isposinf().any() or q[:, ~never].isneginf().any()):
        return float("inf")
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    terms = torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q))
    return max(0.0, float(terms.sum(-1, dtype=torch.float64).mean()))


def _require_finite(name: str, wrong: int) -> None:
    if wrong:
        raise InputError(
            f"the float graph's output {name!r} holds {wrong} NaN or infinite values on these "
            "samples: expected finite ones, to measure the quantized graph by."
        )


def _switched(path: Path, sites: Sequence[Site], outputs: Sequence[str]) -> tuple[bytes, list[str]]:
    """Returns the serialized graph, and what its outputs are called now."""
    model = load_float_graph(path)
    values = {str(v.name): v for v in (*model.graph.inputs, *model.graph.initializers.values())}
    values |= {str(v.name): v for node in model.graph for v in node.outputs}
    uses = {site.tensor: list(values[site.tensor].uses()) for site in sites}
    switch = ir.Value(name=SWITCH, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
    model.graph.inputs.append(switch)
    head = model.graph[0]
    renamed = {name: name for name in outputs}
    for index, site in enumerate(sites):
        name = f"quantkit/{index}"
        number = constant(model, f"{name}/number", np.asarray(index), ir.DataType.INT64)
        is_on = ir.node("Equal", [switch, number], name=f"{name}/is_on")
        chosen = [
            (user, at)
            for user, at in uses[site.tensor]
            if not site.readers or str(user.outputs[0].name) in site.readers
        ]
        source = chosen[0][0].inputs[chosen[0][1]] if chosen else values[site.tensor]
        assert source is not None  # it is read there
        branches = {
            f"{word}_branch": ir.Graph(
                (), nodes[-1].outputs[:1], nodes=nodes, name=f"{name}/{word}"
            )
            for word, nodes in (
                ("then", _quantized(model, site, source, name)),
                ("else", [_node("Identity", [source], f"{name}/as_is", source)]),
            )
        }
        either = _node("If", [is_on.outputs[0]], f"{name}/either", source, branches)
        is_on.outputs[0].name = f"{name}/is_on_output"
        producer = source.producer()
        if producer is None:
            model.graph.insert_before(head, [is_on, either])
        else:
            model.graph.insert_after(producer, [is_on, either])
        for user, at in chosen:
            user.replace_input_with(at, either.outputs[0])
        if site.tensor in renamed and not site.readers:
            renamed[site.tensor] = str(either.outputs[0].name)
    names = list(renamed.values())
    return reduced_to(model, names), names


def _quantized(model: ir.Model, site: Site, source: ir.Value, name: str) -> list[ir.Node]:
    """Returns the nodes of a branch; its constants become the model's."""
    if site.weight is not None:
        held = constant(model, f"{name}/weight", site.weight, source.dtype or ir.DataType.FLOAT)
        return [_node("Identity", [held], f"{name}/quantized", source)]
    if site.scale is None:
        dynamic = ir.node("DynamicQuantizeLinear", [source], num_outputs=3, name=f"{name}/q")
        for output, word in zip(dynamic.outputs, ("integers", "scale", "zero"), strict=True):
            output.name = f"{name}/q/{word}"
        back = _node("DequantizeLinear", dynamic.outputs, f"{name}/dq", source)
        return [dynamic, back]
    assert site.zero_point is not None  # it comes with the scale
    shape = [1] * site.rank
    if site.axis is not None:
        shape[site.axis] = -1
    half = source.dtype == ir.DataType.FLOAT16
    numbers = {
        "scale": site.scale.reshape(shape if site.axis is not None else []),
        "zero": site.zero_point.reshape(shape if site.axis is not None else []),
        "qmin": np.asarray(site.qmin),
        "qmax": np.asarray(site.qmax),
    }
    held_ = {
        key: constant(model, f"{name}/{key}", np.asarray(x, np.float32), ir.DataType.FLOAT)
        for key, x in numbers.items()
    }
    steps = [
        *([("Cast", None)] if half else []),
        ("Div", "scale"), ("Round", None), ("Add", "zero"), ("Max", "qmin"), ("Min", "qmax"),
        ("Sub", "zero"), ("Mul", "scale"), *([("Cast", None)] if half else []),
    ]  # fmt: skip
    nodes: list[ir.Node] = []
    for number, (operation, key) in enumerate(steps):
        inputs = [nodes[-1].outputs[0] if nodes else source]
        if key is not None:
            inputs.append(held_[key])
        to = ir.DataType.FLOAT if number == 0 else ir.DataType.FLOAT16
        attributes = {"to": int(to)} if operation == "Cast" else {}
        nodes.append(_node(operation, inputs, f"{name}/{number}", source, attributes))
    return nodes


def _node(
    operation: str,
    inputs: Sequence[ir.Value],
    name: str,
    like: ir.Value,
    attributes: dict[str, Any] | None = None,
) -> ir.Node:
    """Returns a node whose output has the type of `like`."""
    node = ir.node(operation, list(inputs), attributes or {}, name=name)
    node.outputs[0].name = f"{name}_output"
    if like.dtype is not None:
        node.outputs[0].type = ir.TensorType(like.dtype)
    return node
