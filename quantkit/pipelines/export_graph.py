"""`export FILE.onnx`: any float graph -> a quantized one, and how far its outputs moved."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import onnx_ir as ir
import onnxruntime as ort

from quantkit.calib_sets import require_disjoint
from quantkit.calibration import failed_guards, require_trustworthy
from quantkit.errors import InputError
from quantkit.exporting.any_graph import GraphLayers, graph_layers, quantize_layers
from quantkit.exporting.graphs import MODEL_FILE, load_graph, save_graph
from quantkit.exporting.measure import change_of, perplexity_of
from quantkit.exporting.output_agreement import (
    OutputAgreement,
    compare_outputs,
    open_graph,
    paired_milliseconds,
)
from quantkit.exporting.parity import FLOAT_GATE
from quantkit.exporting.prepare import prepare_graph
from quantkit.jobs import ExportJob
from quantkit.models import sha256_of
from quantkit.numerics.choose import choose_range
from quantkit.numerics.methods import Method, MovingAverageRange, parse_methods
from quantkit.numerics.observers import Bundle
from quantkit.onnx_runtime import observe_graph
from quantkit.pipelines.graph_inputs import GraphData, GraphInput, graph_data, inputs_of
from quantkit.pipelines.held_out import kept_in_float
from quantkit.progress import Progress, silent
from quantkit.recipe import Recipe
from quantkit.results import (
    Accuracy,
    DataInfo,
    Export,
    FileInfo,
    ModelInfo,
    Parity,
    QuantizerInfo,
    Range,
)
from quantkit.results.environment import environment
from quantkit.sweeps.cells import digest

BYTES_AT_ONCE: Final = 1 << 30
"""Of layers' inputs that calibration may hold at a time, of one batch."""
FLOAT_REFERENCE: Final = "the float graph in ONNX Runtime"
_UNTRUSTED: Final = ("nonfinite", "mask")
"""Guards that stop an export; a layer that fails another one (its input is constant, or was never
computed) stays in float, and the result says so."""


def export_graph_into(job: ExportJob, folder: Path, progress: Progress = silent) -> Export:
    """Writes `model.onnx` to the folder and returns what it is; `export.json` is the caller's.

    Ranges are chosen from `job.samples` samples of `job.calib`; outputs are compared on others.

    Raises:
        InputError: the file is no float ONNX graph, or its inputs cannot be filled; an option that
            needs the torch model; data that calibration and evaluation share.
    """
    path = Path(job.model).expanduser()
    recipe = job.full_recipe
    method = _check(job)
    steps = 4
    progress(f"exporting {path.name}: reading", 0, steps)
    graph = prepare_graph(path, opset=job.opset)
    layers = graph_layers(graph, recipe)
    parameters = _parameters(graph)
    reference = open_graph(path)
    calib, evaluation, shared = _data(job, inputs_of(reference))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".prepared-") as aside:
        prepared = save_graph(graph, Path(aside))
        same = compare_outputs(reference, open_graph(prepared), [next(iter(evaluation))])
        ranges, unseen = _ranges(prepared, layers, recipe, method, calib, progress)
        keep = [*kept_in_float(job.keep), *unseen]
        progress(f"exporting {path.name}: {recipe}", 2, steps)
        quantizers = quantize_layers(
            graph, layers, recipe, ranges=ranges, keep=keep, storage=job.format.storage
        )
        model_path = save_graph(graph, folder)
    progress(f"exporting {path.name}: accuracy and latency", 3, steps)
    candidate = open_graph(model_path)
    found = compare_outputs(reference, candidate, evaluation)
    parity = {
        "float": _entries(same, "the file as it was", is_float=True),
        "quantized": _entries(found, FLOAT_REFERENCE, is_float=False),
    }
    progress(f"exporting {path.name}: done", steps, steps)
    written = load_graph(model_path)
    return Export(
        model=_model_info(job, path, parameters, evaluation, [*layers.left, *_reasons(unseen)]),
        data=_data_info(evaluation, shared),
        recipe=str(recipe),
        opset=int(written.opset_imports[""]),
        domains=sorted({node.domain or "ai.onnx" for node in written.graph.all_nodes()}),
        files=_files(folder),
        parity=parity,
        accuracy=_accuracy(found, job.seed),
        latency_ms=_latency(reference, candidate, evaluation),
        quantizers=quantizers,
        passed=all(entry.passed for entries in parity.values() for entry in entries),
        kept=_kept(layers, recipe, keep, quantizers),
        ranges_sha256=digest([sorted(keep), ranges]) if ranges or keep else "",
        environment=environment(),
        storage=job.format.storage,
        layout=job.layout,
    )


def _check(job: ExportJob) -> Method:
    """Returns how ranges are chosen.

    Raises:
        InputError: an option that a graph alone cannot serve.
    """
    if job.format.is_half:
        raise InputError("--quantize 16 takes a model of transformers, not an .onnx file.")
    if job.ranges is not None:
        raise InputError(
            "--ranges holds ranges of a torch model's layers, whose names a graph does not have: "
            "leave it out, and the graph is calibrated here."
        )
    method = parse_methods(job.method, ("linear_input",)).of("linear_input")
    if isinstance(method, MovingAverageRange):
        raise InputError(
            f"--method {method} needs each sample's extremes, which are not observed in a graph: "
            "expected minmax, mse, entropy or a percentile."
        )
    return method


def _data(job: ExportJob, inputs: Sequence[GraphInput]) -> tuple[GraphData, GraphData, int]:
    """Returns calibration's samples, evaluation's, and how many they share."""
    calib = graph_data(job.calib, job, inputs, samples=job.samples)
    skip = job.samples if job.eval == job.calib else 0
    evaluation = graph_data(job.eval, job, inputs, samples=job.eval_samples, skip=skip)
    shared = require_disjoint(
        calib.samples, evaluation.samples, "calibration and evaluation", allow=job.allow_overlap
    )
    return calib, evaluation, shared


def _ranges(
    path: Path,
    layers: GraphLayers,
    recipe: Recipe,
    method: Method,
    calib: GraphData,
    progress: Progress,
) -> tuple[dict[str, Range], dict[str, str]]:
    """Returns the ranges of a static recipe, and the quantizers that have none, with why."""
    inputs = recipe.activations
    if inputs is None or inputs.range != "static":
        return {}, {}
    tensors = layers.observed
    seen = observe_graph(
        path,
        calib,
        tensors=sorted(set(tensors.values())),
        bytes_at_once=BYTES_AT_ONCE,
        progress=progress,
    )
    failed = {name: failed_guards(seen[tensor]) for name, tensor in tensors.items()}
    require_trustworthy(
        {
            name: {guard: words for guard, words in found.items() if guard in _UNTRUSTED}
            for name, found in failed.items()
        },
        (),
    )
    unseen = {name: "; ".join(found.values()) for name, found in failed.items() if found}
    known: dict[str, Range] = {}
    for tensor in set(tensors.values()):
        if not failed_guards(seen[tensor]):
            known[tensor] = _range(seen[tensor], method, inputs.bits)
    return {n: known[t] for n, t in tensors.items() if t in known}, unseen


def _range(bundle: Bundle, method: Method, bits: int) -> Range:
    lo, hi = choose_range(method, bundle, bits, symmetric=False)
    return Range(
        lo=float(lo[0]),
        hi=float(hi[0]),
        method=str(method),
        granularity="tensor",
        count=int(bundle.minmax.count.sum()),
        point="linear_input",
        bits=bits if method.depends_on_bits else None,
    )


def _entries(found: OutputAgreement, reference: str, *, is_float: bool) -> list[Parity]:
    """Returns one entry an output. What quantization moved is no parity: it has to be finite."""
    batch = found.shape[0] if found.shape else 0
    length = found.shape[1] if len(found.shape) == 2 else 0
    entries = []
    for name, sums in found.outputs.items():
        is_close = sums.cosine >= FLOAT_GATE.cosine and (
            sums.top1_agreement >= FLOAT_GATE.top1_agreement
        )
        noise = "no difference" if sums.error == 0.0 else f"SQNR {sums.sqnr_db:.1f} dB"
        entries.append(
            Parity(
                reference=f"{reference}: output {name}, {noise}",
                batch=batch,
                seq_len=length,
                cached=0,
                max_abs=sums.max_abs,
                cosine=sums.cosine,
                top1_agreement=sums.top1_agreement,
                passed=sums.is_finite and (is_close or not is_float),
            )
        )
    return entries


def _accuracy(found: OutputAgreement, seed: int) -> Accuracy | None:
    """Returns the perplexity of a language model, else the cosine of the worst output."""
    if found.is_language_model:
        before = (found.float_nll, found.predicted)
        behind = (found.quantized_nll, found.predicted)
        change, low, high = change_of(before, behind, seed)
        return Accuracy(
            metric="perplexity",
            float=perplexity_of(before),
            quantized=perplexity_of(behind),
            change=change,
            change_low=low,
            change_high=high,
            units=len(found.predicted),
        )
    cosines = [sums.cosine for sums in found.outputs.values()]
    if not cosines or not math.isfinite(min(cosines)):
        return None
    return Accuracy(metric="cosine", float=1.0, quantized=min(cosines), change=min(cosines) - 1.0)


def _latency(
    reference: ort.InferenceSession, candidate: ort.InferenceSession, data: GraphData
) -> dict[str, float]:
    """Returns the milliseconds of one sample."""
    feeds = next(iter(data.alone)).feeds
    before, behind = paired_milliseconds(reference, candidate, feeds)
    found = {"float": before, "quantized": behind}
    ids = feeds.get("input_ids")
    return found if ids is None else found | {"prefill_tokens": float(ids.size)}


def _kept(
    layers: GraphLayers,
    recipe: Recipe,
    keep: Collection[str],
    quantizers: Sequence[QuantizerInfo],
) -> list[str]:
    """Returns the quantizers of the recipe that are not there."""
    if not keep:
        return []
    made = {info.name for info in quantizers}
    kinds = ("weight",) if recipe.activations is None else ("linear_input", "weight")
    if recipe.weights is None:
        kinds = ("linear_input",)
    return [
        name
        for name in layers.names
        if name.partition("/")[0] in kinds and name not in made and name in keep
    ]


def _reasons(unseen: Mapping[str, str]) -> list[str]:
    if not unseen:
        return []
    name, why = next(iter(unseen.items()))
    more = f", and {len(unseen) - 1} more" if unseen.keys() - {name} else ""
    return [f"{name} stays in float, since calibration saw {why}{more}"]


def _parameters(graph: ir.Model) -> int:
    """Returns the number of floats that the prepared graph holds."""
    tensors = [value.const_value for value in graph.graph.initializers.values()]
    return sum(int(x.size) for x in tensors if x is not None and x.dtype.is_floating_point())


def _model_info(
    job: ExportJob, path: Path, parameters: int, data: GraphData, warnings: list[str]
) -> ModelInfo:
    original = load_graph(path)
    return ModelInfo(
        name=path.stem,
        source=job.model,
        sha256=_sha256(path, original),
        architecture=" ".join(
            filter(None, ("ONNX", original.producer_name, original.producer_version))
        ),
        parameters=parameters,
        dtype="float32",
        device="cpu",
        layers=0,
        heads=0,
        kv_heads=0,
        head_dim=0,
        maps=1,
        hidden_size=0,
        warnings=warnings,
        modality=data.samples.info(data.batch_size).modality,
    )


def _sha256(path: Path, graph: ir.Model) -> str:
    """Returns the hash of the file, and of the files that hold its weights where there are any."""
    files = {
        tensor.path
        for value in graph.graph.initializers.values()
        if isinstance(tensor := value.const_value, ir.ExternalTensor)
    }
    found = [sha256_of(path), *(sha256_of(Path(file)) for file in sorted(map(str, files)))]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def _data_info(data: GraphData, shared: int) -> DataInfo:
    info = data.samples.info(data.batch_size)
    if not shared:
        return info
    said = f"these samples and calibration's share {shared}: they are not held out."
    return dataclasses.replace(info, shared_blocks=shared, warnings=[*info.warnings, said])


def _files(folder: Path) -> list[FileInfo]:
    return [
        FileInfo(name=path.name, bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(folder.glob(f"{MODEL_FILE}*"))
    ]
