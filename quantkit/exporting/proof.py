"""Export, then proof: parity with the torch model that was meant, accuracy, latency, files.

Time: one trace (about a minute for 135 M parameters), then a few forwards in torch and in ONNX
Runtime. Memory: the weights twice, and one batch's vocabulary logits.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, TypedDict

import torch
from torch import Tensor

from quantkit.calib_sets import TokenBatch, TokenSlice
from quantkit.calibration import WeightRanges
from quantkit.exporting.checks import check_graph
from quantkit.exporting.companions import component, save_companions
from quantkit.exporting.float_export import export_float
from quantkit.exporting.forced import forced_parity
from quantkit.exporting.graphs import MODEL_FILE, load_graph, save_graph
from quantkit.exporting.half import to_half
from quantkit.exporting.layouts import apply_layout
from quantkit.exporting.logits import maps_of
from quantkit.exporting.parity import (
    FLOAT_GATE,
    QUANTIZED_GATE,
    Agreement,
    Gate,
    check_parity,
    in_two_calls,
)
from quantkit.exporting.quantize import quantize_graph
from quantkit.exporting.rewrite_linear import group_size_of
from quantkit.exporting.sensitivity import PERTURBATION, sensitivity, widened
from quantkit.exporting.worth import accuracy_of, latencies_of, memory_of
from quantkit.jobs import LAYOUTS, ExportFormat
from quantkit.models import LoadedModel, projection_modules, sha256_of
from quantkit.onnx_runtime import DecoderSession, open_decoder
from quantkit.progress import Progress, silent
from quantkit.quantization import (
    every_quantizer,
    fake_quantized,
    quantizer_names,
    require_known,
    smoothed,
    smoothing_digest,
)
from quantkit.recipe import Recipe
from quantkit.results import (
    Export,
    FileInfo,
    Parity,
    QuantizerInfo,
    Range,
    Ranges,
    Smoothing,
    write_json,
)
from quantkit.results.environment import environment

FLOAT_FOLDER = "float"
STEPS_FILE = "quantizers.json"
STEPS_SCHEMA = "quantkit.quantizers/1"
SMOOTHING_KEY = "quantkit.smoothing"
"""Of the graph's metadata: the sha256 of the scales that its weights carry."""
PARITY_TOKENS = 128
PLAIN: Final = ExportFormat(recipe=Recipe())


class _Chosen(TypedDict):
    """What the graph and every simulation of it share beside recipe and ranges."""

    keep: Collection[str]
    weight_ranges: WeightRanges | None


def export_and_prove(
    loaded: LoadedModel,
    evaluation: TokenSlice,
    ranges: Ranges,
    folder: Path,
    *,
    recipe: Recipe,
    opset: int = 21,
    batch_size: int = 4,
    keep: Collection[str] = (),
    smoothing: Mapping[str, Smoothing] | None = None,
    weight_ranges: WeightRanges | None = None,
    form: ExportFormat = PLAIN,
    layout: str = LAYOUTS[0],
    seed: int = 0,
    progress: Progress = silent,
) -> Export:
    """Writes `float/model.onnx`, `model.onnx` and what loaders want beside it.

    A float graph that is already there is used again: the quantized one never needs a second
    export. Where a parity gate is missed the result says so (`passed`) and every file stays.

    Args:
        form: Storage, precision and allowed domains; its recipe is not looked at.
        layout: Whose names the graph has, see `layouts`.
        keep: Names of quantizers that stay in float, as in `fake_quantized`.
        smoothing: Default: that of `ranges`, which are the smoothed model's. Both graphs are of the
            smoothed model, and the float one is compared with the model as it was.
        weight_ranges: Of the smoothed model where there is one. None: absmax.

    Raises:
        InputError: what the recipe needs is missing from the ranges, or it cannot be exported.
        GateError: a graph that is not valid ONNX, or holds what its form does not allow.
    """
    recipe.require_exportable()
    smoothing = ranges.smoothing if smoothing is None else smoothing
    require_known(keep, every_quantizer(loaded.model), "to keep in float")
    group_size_of(recipe, weight_ranges, form.storage)
    steps = 6
    progress(f"exporting {loaded.name}: float graph", 0, steps)
    batch = parity_batch(evaluation)
    with smoothed(loaded.model, smoothing):
        float_graph = export_float_once(loaded, folder, opset=opset, smoothing=smoothing)
    check_graph(float_graph, ("ai.onnx",))
    progress(f"exporting {loaded.name}: float parity", 1, steps)
    float_session = open_decoder(float_graph)
    parity = {"float": _parity(float_session, loaded, Recipe(), {}, batch, FLOAT_GATE)}
    quantizers: list[QuantizerInfo] = []
    session = float_session
    if not recipe.is_float:
        with smoothed(loaded.model, smoothing):
            progress(f"exporting {loaded.name}: {recipe}", 2, steps)
            graph, quantizers = quantize_graph(
                float_graph,
                module_linears=dict(projection_modules(loaded.model)),
                recipe=recipe,
                ranges=ranges.tensors,
                keep=keep,
                weight_ranges=weight_ranges,
                storage=form.storage,
                maps=maps_of(loaded.model),
            )
            apply_layout(graph, layout)
            session = open_decoder(save_graph(graph, folder))
            progress(f"exporting {loaded.name}: parity of {recipe}", 3, steps)
            chosen = _Chosen(keep=keep, weight_ranges=weight_ranges)
            forced, steps_of = forced_parity(
                graph, loaded.model, recipe, ranges.tensors, batch, **chosen
            )
            parity["quantized"] = [forced]
            write_json(folder / STEPS_FILE, {"schema": STEPS_SCHEMA, "quantizers": steps_of})
            own = sensitivity(loaded.model, recipe, ranges.tensors, batch, **chosen)
            parity["quantized, end to end"] = _parity(
                session, loaded, recipe, ranges.tensors, batch, widened(own), **chosen
            )
            parity["simulation against itself"] = [_own_parity(own, batch)]
    elif form.is_half or layout != LAYOUTS[0]:
        graph = load_graph(float_graph)
        graph = to_half(graph) if form.is_half else graph
        apply_layout(graph, layout)
        session = open_decoder(save_graph(graph, folder))
        parity["float16" if form.is_half else "written"] = _parity(
            session, loaded, Recipe(), {}, batch, QUANTIZED_GATE if form.is_half else FLOAT_GATE
        )
    else:
        _copy(float_graph, folder)
    path = folder / MODEL_FILE
    check_graph(path, dataclasses.replace(form, recipe=recipe).domains)
    progress(f"exporting {loaded.name}: accuracy and latency", 4, steps)
    accuracy = accuracy_of(float_session, session, evaluation, batch_size=batch_size, seed=seed)
    latency_ms = latencies_of(float_session, session, evaluation)
    progress(f"exporting {loaded.name}: memory", 5, steps)
    memory_bytes = memory_of(float_graph, path, evaluation)
    save_companions(loaded, folder)
    progress(f"exporting {loaded.name}: done", steps, steps)
    written = load_graph(path)
    info = loaded.info()
    return Export(
        model=info,
        data=evaluation.info(batch_size),
        recipe=str(recipe),
        opset=int(written.opset_imports[""]),
        domains=sorted({node.domain or "ai.onnx" for node in written.graph.all_nodes()}),
        files=_files(folder),
        parity=parity,
        accuracy=accuracy,
        latency_ms=latency_ms,
        quantizers=quantizers,
        passed=all(entry.passed for entries in parity.values() for entry in entries),
        kept=[name for name in quantizer_names(loaded.model, recipe) if name in keep],
        smoothed={name: group.alpha for name, group in smoothing.items()},
        memory_bytes=memory_bytes,
        environment=environment(),
        storage=form.storage,
        layout=layout,
        precision="float16" if form.is_half else "float32",
        components={"model": component(path, info.architecture)},
    )


def _copy(float_graph: Path, folder: Path) -> None:
    """Puts the float graph where a graph is looked for; the checker refuses hard links."""
    for source in float_graph.parent.glob(f"{MODEL_FILE}*"):
        shutil.copyfile(source, folder / source.name)


def float_path(folder: Path) -> Path:
    """Returns where a run's float graph is."""
    return folder / FLOAT_FOLDER / MODEL_FILE


def export_float_once(
    loaded: LoadedModel, folder: Path, *, opset: int, smoothing: Mapping[str, Smoothing]
) -> Path:
    """Writes the float graph of the smoothed model, unless it is there; returns its path.

    Args:
        smoothing: What the model has been smoothed with, for the graph to say.
    """
    path, digest = float_path(folder), smoothing_digest(smoothing)
    is_there = path.is_file()
    if not is_there or load_graph(path).metadata_props.get(SMOOTHING_KEY, "") != digest:
        metadata = {SMOOTHING_KEY: digest} if digest else {}
        export_float(loaded.model, path.parent, opset=opset, metadata=metadata)
    return path


def parity_batch(text: TokenSlice) -> TokenBatch:
    """Returns up to two held-out sequences, the second a quarter shorter and padded."""
    first = text.ids[0][:PARITY_TOKENS]
    second = text.ids[min(1, text.sequences - 1)][: max(4, len(first) * 3 // 4)]
    return next(dataclasses.replace(text, ids=(first, second)).batches(2))


def _parity(
    session: DecoderSession,
    loaded: LoadedModel,
    recipe: Recipe,
    ranges: Mapping[str, Range],
    batch: TokenBatch,
    gate: Gate,
    *,
    keep: Collection[str] = (),
    weight_ranges: WeightRanges | None = None,
) -> list[Parity]:
    model = loaded.model

    def forward(ids: Tensor, mask: Tensor) -> Tensor:
        with (
            torch.inference_mode(),
            fake_quantized(model, recipe, ranges, keep=keep, weight_ranges=weight_ranges),
        ):
            output = model(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                use_cache=False,
            )
            logits: Tensor = output.logits
            return logits.float().cpu()

    def cached_forward(ids: Tensor, mask: Tensor, cached: int) -> Tensor:
        on_device = (ids.to(model.device), mask.to(model.device))
        with (
            torch.inference_mode(),
            fake_quantized(model, recipe, ranges, keep=keep, weight_ranges=weight_ranges),
        ):
            return in_two_calls(model, *on_device, cached).float().cpu()

    reference = "torch float" if recipe.is_float else f"torch fake-quantized {recipe}"
    logits = recipe.logits
    is_of_a_call = logits is not None and logits.range == "dynamic" and logits.granularity != "row"
    return check_parity(
        session,
        forward,
        [batch],
        gate,
        reference=reference,
        cached_forward=cached_forward if is_of_a_call else None,
    )


def _own_parity(own: Agreement, batch: TokenBatch) -> Parity:
    """Returns the sensitivity as an entry beside the others; it is context and always passes."""
    return Parity(
        reference=f"torch simulation, first layer's output moved by {PERTURBATION:g}",
        batch=batch.input_ids.shape[0],
        seq_len=batch.input_ids.shape[1],
        cached=0,
        max_abs=own.max_abs,
        cosine=own.cosine,
        top1_agreement=own.top1_agreement,
        passed=True,
    )


def _files(folder: Path) -> list[FileInfo]:
    return [
        FileInfo(
            name=path.relative_to(folder).as_posix(),
            bytes=path.stat().st_size,
            sha256=sha256_of(path),
        )
        for path in sorted([*folder.glob(f"{MODEL_FILE}*"), *folder.glob(f"float/{MODEL_FILE}*")])
    ]
