"""A float graph and a quantized one, by any tool -> where they part, and which quantizer did it.

Three questions, each answered by running: how far every shared tensor is off (both graphs), what
each quantizer does to the float graph's own values (culprit or victim?), and what the output loses
when it alone is on. The first two go through the samples in groups of tensors, so that memory is
bounded; the last one runs the float graph once a quantizer, for those whose local error is largest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.calib_sets.content import file_sha256
from quantkit.errors import InputError
from quantkit.exporting.diagnosis.compared import Comparison, Row, compare
from quantkit.exporting.diagnosis.diagnosis_rows import Alone, quantizer_rows, tensor_rows
from quantkit.exporting.diagnosis.findings import findings_of
from quantkit.exporting.diagnosis.padding import real_positions
from quantkit.exporting.diagnosis.paired_tensors import (
    Pair,
    by_quantized,
    layer_of,
    pair_of,
    pair_tensors,
)
from quantkit.exporting.diagnosis.quantized_graph import (
    JUDGED,
    PRODUCTS,
    Product,
    constants_of,
    products_of,
)
from quantkit.exporting.diagnosis.quantized_weights import WeightPair
from quantkit.exporting.diagnosis.switched import LOGITS, damage, damages
from quantkit.exporting.diagnosis.tensor_runs import TensorRuns
from quantkit.exporting.graphs import quantized_nodes
from quantkit.onnx_runtime.graph_tensors import input_names, load_float_graph
from quantkit.progress import Progress, silent
from quantkit.results import DataInfo, Diagnosis, GraphInfo, TensorError
from quantkit.results.environment import environment

BYTES_AT_ONCE: Final = 512 << 20
MEASURED: Final = 128
"""Quantizers whose own damage is measured: a run of the float graph each."""
MEASURED_WEIGHTS: Final = 8
"""Weights among them: each is held a second time."""
BEGINS: Final = 0.1
JUMP: Final = 2.0
_FEWEST: Final = 0.2
"""Share of the float graph's products that a quantized form of it shows at the least."""
_RELATED: Final = 0.1
"""Median cosine of weights, below which two files hold different models."""
_OWN: Final = ("", "ai.onnx")


def diagnose(
    float_path: Path,
    quantized_path: Path,
    batches: Sequence[Mapping[str, NDArray[Any]]],
    *,
    data: DataInfo,
    measure: int = MEASURED,
    alone_samples: int = 1,
    bytes_at_once: int = BYTES_AT_ONCE,
    progress: Progress = silent,
) -> Diagnosis:
    """Returns the diagnosis.

    Args:
        batches: Inputs of the float graph by name, one sample each. Positions where an
            `attention_mask` (that neither graph need read) is 0 count in no figure.
        data: What they are.
        measure: The most quantizers whose damage alone is measured.
        alone_samples: Of the first batches, to measure it on.
        bytes_at_once: Of tensors that may be held at a time.

    Raises:
        InputError: a file that is no ONNX graph, swapped or unrelated files, the same file twice,
            no quantizer, inputs that do not fit, or outputs of the float graph that are not finite.
    """
    ours, theirs = check_files(float_path, quantized_path)
    constants = constants_of(ours)
    pairs = pair_tensors(ours, theirs, constants)
    products = products_of(theirs, constants_of(theirs))
    weights = _weight_pairs(pairs, products, ours)
    _require_related(ours, pairs, float_path, quantized_path)
    # first of all that runs: a float graph that is not finite is told at once
    outputs = _outputs(ours)
    total = _total(float_path, quantized_path, outputs, batches[:alone_samples])
    found = compare(
        ours, theirs, float_path, quantized_path, batches, pairs, weights, bytes_at_once, progress
    )
    _require_same_weights(found, float_path, quantized_path)
    chosen = _chosen(found.rows, measure)
    costs = damages(
        float_path,
        [row.site for row in chosen if row.site is not None],
        outputs,
        batches[:alone_samples],
        lambda done, of: progress("one quantizer at a time", done, of),
    )
    metric = "kl" if outputs == [LOGITS] else "relative"
    alone = Alone.of({row.key: cost for row, cost in zip(chosen, costs, strict=True)})
    quantizers = quantizer_rows(found, alone)
    tensors = tensor_rows(ours, found)
    in_float, weight_only = _left(products, pairs)
    others = {
        domain: [node.op_type for node in theirs.graph if node.domain == domain]
        for domain in sorted({node.domain for node in theirs.graph} - set(_OWN))
    }
    opset = theirs.opset_imports.get("", 0)
    return Diagnosis(
        float_graph=_info(float_path, ours),
        quantized_graph=_info(quantized_path, theirs),
        data=data,
        environment=environment(),
        metric=metric,
        total=total,
        measured=len(chosen),
        alone_samples=min(alone_samples, len(batches)),
        begins=_begins(tensors),
        findings=findings_of(
            quantizers,
            metric=metric,
            in_float=in_float,
            weight_only=weight_only,
            domains=others,
            opset=opset,
            products=len(products),
        ),
        quantizers=quantizers,
        tensors=tensors,
        in_float=in_float,
        weight_only=weight_only,
        unmatched=found.unmatched,
        warnings=_not_judged(theirs),
    )


def check_files(float_path: Path, quantized_path: Path) -> tuple[ir.Model, ir.Model]:
    """Returns both graphs.

    Raises:
        InputError: as `diagnose`, for what the files alone say.
    """
    ours, theirs = load_float_graph(float_path), load_float_graph(quantized_path)
    if float_path.resolve() == quantized_path.resolve() or file_sha256(float_path) == file_sha256(
        quantized_path
    ):
        raise InputError(
            f"{float_path} and {quantized_path} are the same graph: expected the float one and "
            "then the quantized one."
        )
    is_quantized = [bool(quantized_nodes(model)) for model in (ours, theirs)]
    if is_quantized == [True, False]:
        raise InputError(
            f"{float_path} is quantized and {quantized_path} is not: expected the float file "
            "first. Swap them."
        )
    if is_quantized[0]:
        raise InputError(f"{float_path} is quantized itself: expected the float graph first.")
    if not is_quantized[1]:
        raise InputError(
            f"{quantized_path} has no quantizer: expected QuantizeLinear, DequantizeLinear, "
            "MatMulInteger, MatMulNBits or a QLinear operator in it."
        )
    unknown = [name for name in input_names(theirs) if name not in input_names(ours)]
    if unknown:
        raise InputError(
            f"{quantized_path} reads {unknown[0]!r}, which {float_path} does not: these are not "
            "two forms of one model."
        )
    outputs = [{value.name for value in model.graph.outputs} for model in (ours, theirs)]
    if not outputs[0] & outputs[1]:
        raise InputError(
            f"{quantized_path} has no output of {float_path} ({', '.join(map(str, outputs[0]))}): "
            "these are not two forms of one model."
        )
    return ours, theirs


def _not_judged(model: ir.Model) -> list[str]:
    """Returns a line on the quantized operators that no row is about, nor could be."""
    left = quantized_nodes(model)
    left -= Counter(node.op_type for node in model.graph if node.op_type in JUDGED)
    if not left:
        return []
    said = ", ".join(f"{count} {name}" for name, count in sorted(left.items()))
    return [f"{said}: quantized in a form that is not judged alone, only by what comes after it."]


def _require_related(
    model: ir.Model, pairs: Sequence[Pair], float_path: Path, quantized_path: Path
) -> None:
    products = [node for node in model.graph if node.op_type in PRODUCTS]
    shown = sum(pair.node.op_type in PRODUCTS for pair in pairs)
    if not pairs or shown < _FEWEST * len(products):
        raise InputError(
            f"{quantized_path} shows {shown} of the {len(products)} products of {float_path}: "
            "these are not two forms of one model."
        )


def _require_same_weights(found: Comparison, float_path: Path, quantized_path: Path) -> None:
    known = [row.weight.cosine for row in found.rows if row.weight is not None]
    cosines = [cosine for cosine in known if math.isfinite(cosine)]
    if cosines and float(np.median(cosines)) < _RELATED:
        raise InputError(
            f"the weights of {quantized_path} are not those of {float_path} (median cosine "
            f"{float(np.median(cosines)):.2f}): these are two models."
        )


def _weight_pairs(
    pairs: Sequence[Pair], products: Sequence[Product], model: ir.Model
) -> list[WeightPair]:
    constants = constants_of(model)
    by_output = by_quantized(pairs)
    found = []
    for product in products:
        pair = pair_of(product.node, by_output)
        if pair is None or product.weight_kind == "float" or pair.node.op_type not in PRODUCTS:
            continue
        held = [v for v in pair.node.inputs[:2] if v is not None and v in constants]
        if held:
            found.append(WeightPair(product=product, node=pair.node, value=held[0]))
    return found


def _outputs(model: ir.Model) -> list[str]:
    """Returns the outputs that damage is measured on: `logits`, else all of float."""
    names = [str(value.name) for value in model.graph.outputs]
    if LOGITS in names:
        return [LOGITS]
    floats = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
    return [str(value.name) for value in model.graph.outputs if value.dtype in floats]


def _total(
    float_path: Path,
    quantized_path: Path,
    outputs: Sequence[str],
    batches: Sequence[Mapping[str, NDArray[Any]]],
) -> float:
    theirs = [str(value.name) for value in load_float_graph(quantized_path).graph.outputs]
    names = [str(value.name) for value in load_float_graph(float_path).graph.outputs]
    if any(name not in theirs for name in outputs):
        if len(theirs) != len(names):
            return math.nan
        same = [theirs[names.index(name)] for name in outputs]
    else:
        same = list(outputs)
    one, other = TensorRuns(float_path, outputs), TensorRuns(quantized_path, same)
    costs = []
    for batch in batches:
        truth, found = one.run(batch), other.run(batch)
        values = [truth[n] for n in outputs], [found[n] for n in same]
        costs.append(damage(outputs, *values, real_positions(batch)))
    return float(np.mean(costs))


def _chosen(rows: Sequence[Row], measure: int) -> list[Row]:
    """Returns the quantizers to measure: those with the largest local error."""
    can = sorted((row for row in rows if row.site is not None), key=lambda row: row.local_db)
    weights = [row for row in can if row.weight is not None][:MEASURED_WEIGHTS]
    return [row for row in can if row.weight is None or row in weights][:measure]


def _left(products: Sequence[Product], pairs: Sequence[Pair]) -> tuple[list[str], list[str]]:
    """Returns the layers in float, and those whose weights alone are quantized."""
    known = by_quantized(pairs)
    in_float, weight_only = [], []
    for product in products:
        pair = pair_of(product.node, known)
        layer = layer_of(product.node if pair is None else pair.node)
        if product.weight_kind == "float" and not product.input_quantized:
            in_float.append(layer)
        elif not product.input_quantized:
            weight_only.append(layer)
    return in_float, weight_only


def _begins(tensors: Sequence[TensorError]) -> str:
    for tensor in tensors:
        if tensor.relative_error >= BEGINS and tensor.jump >= JUMP:
            return tensor.name
    return ""


def _info(path: Path, model: ir.Model) -> GraphInfo:
    domains = Counter(node.domain or "ai.onnx" for node in model.graph)
    return GraphInfo(
        source=str(path),
        sha256=file_sha256(path),
        opset=model.opset_imports.get("", 0),
        nodes=len(model.graph),
        domains=dict(sorted(domains.items())),
    )
