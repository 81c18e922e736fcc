"""`export FILE.onnx`: any float graph -> a quantized one, its proof, and how far outputs moved."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import onnx_ir as ir
import onnxruntime as ort

from quantkit.calib_sets import require_disjoint, sample_count_warning
from quantkit.calibration import failed_guards, require_trustworthy
from quantkit.errors import InputError
from quantkit.exporting.any_graph import GraphLayers, graph_layers, quantize_layers
from quantkit.exporting.checks import STANDARD, check_graph, schema_fault
from quantkit.exporting.graphs import MODEL_FILE, load_graph, save_graph
from quantkit.exporting.half import KEPT_KEY, to_half
from quantkit.exporting.layer_proof import prove_layers
from quantkit.exporting.measure import alternating
from quantkit.exporting.output_agreement import compare_outputs
from quantkit.exporting.prepare import prepare_graph
from quantkit.exporting.rewrite_conv import conv_names
from quantkit.jobs import DEFAULT_TEXT, ExportJob
from quantkit.models import sha256_of
from quantkit.numerics.choose import choose_range
from quantkit.numerics.methods import Method, MovingAverageRange, parse_methods
from quantkit.numerics.observers import Bundle
from quantkit.onnx_runtime import observe_graph, open_graph
from quantkit.pipelines.graph_inputs import GraphData, GraphInput, graph_data, inputs_of
from quantkit.pipelines.graph_parity import (
    FLOAT_REFERENCE,
    accuracy_of,
    output_entries,
    proof_entries,
)
from quantkit.pipelines.held_out import kept_in_float
from quantkit.progress import Progress, silent
from quantkit.recipe import Recipe
from quantkit.results import (
    DataInfo,
    Export,
    FileInfo,
    ModelInfo,
    QuantizerInfo,
    Range,
)
from quantkit.results.environment import environment
from quantkit.sweeps.cells import digest

BYTES_AT_ONCE: Final = 1 << 30
"""Of tensors that calibration and proof may hold at a time, of one batch."""
_REPEATS: Final = 5
_UNTRUSTED: Final = ("nonfinite", "mask")
"""Guards that stop an export; a layer that fails another one (its input is constant, or was never
computed) stays in float, and the result says so."""


def export_graph_into(job: ExportJob, folder: Path, progress: Progress = silent) -> Export:
    """Writes `model.onnx` to the folder and returns what it is; `export.json` is the caller's.

    Ranges are chosen from `job.samples` samples of `job.calib`; outputs are compared on others.

    Raises:
        InputError: the file is no float ONNX graph, or its inputs cannot be filled; an option that
            needs the torch model; data that calibration and evaluation share.
        GateError: what was written is no sound graph; one line with the node and its fault.
    """
    path = Path(job.model).expanduser()
    recipe = job.full_recipe
    method = _check(job)
    steps = 4
    progress(f"exporting {path.name}: reading", 0, steps)
    graph = prepare_graph(path, opset=job.opset)
    is_half = job.format.is_half
    layers = GraphLayers(linears=[]) if is_half else graph_layers(graph, recipe)
    parameters, domains = _parameters(graph), {_domain(node) for node in graph.graph.all_nodes()}
    unread = [str(value.name) for value in graph.graph.inputs if not value.uses()]
    reference = open_graph(path)
    calib, evaluation, shared = _data(job, path, inputs_of(reference))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".prepared-") as aside:
        prepared = save_graph(graph, Path(aside))
        same = compare_outputs(reference, open_graph(prepared), [next(iter(evaluation))])
        ranges, unseen = _ranges(prepared, layers, recipe, method, calib, progress)
        keep = [*kept_in_float(job.keep), *unseen]
        progress(f"exporting {path.name}: {recipe}", 2, steps)
        quantizers: list[QuantizerInfo] = []
        if is_half:
            graph = to_half(graph)
        else:
            quantizers = quantize_layers(
                graph, layers, recipe, ranges=ranges, keep=keep, storage=job.format.storage
            )
        model_path = save_graph(graph, folder)
        own = dataclasses.replace(job.format, recipe=recipe).domains
        fault = schema_fault(prepared)  # of the file as it was; ONNX Runtime asks for less
        check_graph(model_path, domains | set(own), unread=unread, schemas=not fault)
        sample = next(iter(evaluation.alone))
        proofs = prove_layers(
            prepared,
            model_path,
            layers,
            recipe,
            ranges=ranges,
            quantizers=[info.name for info in quantizers],
            feeds=sample.feeds,
            bytes_at_once=BYTES_AT_ONCE,
        )
    progress(f"exporting {path.name}: accuracy and latency", 3, steps)
    candidate = open_graph(model_path)
    found = compare_outputs(reference, candidate, evaluation)
    parity = {
        "float": output_entries(same, "the file as it was", is_float=True),
        "outputs": output_entries(found, FLOAT_REFERENCE, is_float=False),
    }
    if not recipe.is_float:
        parity["quantized"] = proof_entries(proofs, sample)
    progress(f"exporting {path.name}: done", steps, steps)
    written = load_graph(model_path)
    return Export(
        model=_model_info(
            job,
            path,
            parameters,
            evaluation,
            [
                *layers.left,
                *_reasons(unseen),
                *_unsound(fault),
                *_told(calib, recipe),
                *_wide(graph),
            ],
        ),
        data=_data_info(evaluation, shared),
        recipe=str(recipe),
        opset=int(written.opset_imports[""]),
        domains=sorted({_domain(node) for node in written.graph.all_nodes()}),
        files=_files(folder),
        parity=parity,
        accuracy=accuracy_of(found, job.seed),
        latency_ms=_latency(reference, candidate, evaluation),
        quantizers=quantizers,
        passed=all(
            entries and all(entry.passed for entry in entries) for entries in parity.values()
        ),
        kept=_kept(layers, recipe, keep, quantizers),
        ranges_sha256=digest([sorted(keep), ranges]) if ranges or keep else "",
        environment=environment(),
        storage=job.format.storage,
        layout=job.layout,
        precision="float16" if is_half else "float32",
    )


def _check(job: ExportJob) -> Method:
    """Returns how ranges are chosen.

    Raises:
        InputError: an option that a graph alone cannot serve.
    """
    if job.format.is_half and job.keep:
        raise InputError("--keep names quantizers, and --quantize 16 has none: leave it out.")
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


def _data(
    job: ExportJob, path: Path, inputs: Sequence[GraphInput]
) -> tuple[GraphData, GraphData, int]:
    """Returns calibration's samples, evaluation's, and how many they share."""
    # data of one's own are evaluated on, too, where nothing else was named
    is_own = job.eval == DEFAULT_TEXT and job.calib != DEFAULT_TEXT
    held_out = job.calib if is_own else job.eval

    def samples_of(source: str, count: int, skip: int = 0) -> GraphData:
        return graph_data(
            source,
            path,
            inputs,
            samples=count,
            skip=skip,
            seq_len=job.seq_len,
            bos=job.bos,
            batch_size=job.batch_size,
            tokenizer=job.tokenizer,
        )

    calib, taken = samples_of(job.calib, job.samples), job.samples
    there = calib.samples.sequences + calib.left_out
    if held_out == job.calib and 1 < there < job.samples:
        # that is all there is: a third is left to evaluate
        taken = max(1, there * 2 // 3)
        calib = samples_of(job.calib, taken)
    evaluation = samples_of(held_out, job.eval_samples, taken if held_out == job.calib else 0)
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


def _latency(
    reference: ort.InferenceSession, candidate: ort.InferenceSession, data: GraphData
) -> dict[str, float]:
    """Returns the milliseconds of one sample."""
    feeds = dict(next(iter(data.alone)).feeds)
    found = alternating(
        {
            "float": lambda: reference.run(None, feeds),
            "quantized": lambda: candidate.run(None, feeds),
        },
        _REPEATS,
    )
    ids = feeds.get("input_ids")
    return found if ids is None else found | {"prefill_tokens": float(ids.size)}


def _kept(
    layers: GraphLayers,
    recipe: Recipe,
    keep: Collection[str],
    quantizers: Sequence[QuantizerInfo],
) -> list[str]:
    """Returns the quantizers of the recipe that are not there.

    Of a convolution all are left out where one is: ONNX Runtime has no half of it.
    """
    made = {info.name for info in quantizers}
    wanted = set(keep)
    for conv in layers.convs:
        names = set(conv_names(conv))
        wanted |= names if names & wanted else set()
    kinds = ("weight",) if recipe.activations is None else ("linear_input", "weight")
    if recipe.weights is None:
        kinds = ("linear_input",)
    return [
        name
        for name in layers.names
        if name.partition("/")[0] in kinds and name not in made and name in wanted
    ]


def _reasons(unseen: Mapping[str, str]) -> list[str]:
    if not unseen:
        return []
    name, why = next(iter(unseen.items()))
    more = f", and {len(unseen) - 1} more" if unseen.keys() - {name} else ""
    return [f"{name} stays in float, since calibration saw {why}{more}"]


def _unsound(fault: str) -> list[str]:
    return [f"ONNX's checker refuses the file as it was: {fault}"] if fault else []


def _told(calib: GraphData, recipe: Recipe) -> list[str]:
    """Returns what calibration's samples are warned of, where ranges come from them."""
    if recipe.activations is None or recipe.activations.range != "static":
        return []
    few = sample_count_warning(calib.samples)
    return [*calib.samples.info(calib.batch_size).warnings, *([few] if few else [])]


def _wide(graph: ir.Model) -> list[str]:
    """Returns a sentence for each weight that half precision could not hold."""
    kept = graph.metadata_props.get(KEPT_KEY, "")
    return [f"weight {line} stays in float32: float16 ends at 65504" for line in kept.splitlines()]


def _parameters(graph: ir.Model) -> int:
    """Returns the number of floats that the prepared graph holds."""
    tensors = [value.const_value for value in graph.graph.initializers.values()]
    return sum(int(x.size) for x in tensors if x is not None and x.dtype.is_floating_point())


def _domain(node: ir.Node) -> str:
    return node.domain or STANDARD


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
