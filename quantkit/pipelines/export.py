"""`export` as a stage: a job in, a finished run folder out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from quantkit.calib_sets import TokenSlice, require_disjoint, text_slice
from quantkit.calibration import RangePlan, WeightRanges
from quantkit.errors import GateError, InputError
from quantkit.exporting import MODEL_FILE
from quantkit.exporting.proof import export_and_prove
from quantkit.jobs import (
    CALIBRATION_POINTS,
    DEFAULT_CALIBRATION_POINTS,
    LAYOUTS,
    CompareJob,
    ExportFormat,
    ExportJob,
)
from quantkit.models import LoadedModel
from quantkit.numerics.methods import parse_methods
from quantkit.pipelines.auto import AUTO_FILE, search_export
from quantkit.pipelines.calibrate import calibrate, left_out, no_ranges
from quantkit.pipelines.export_graph import export_graph_into
from quantkit.pipelines.held_out import (
    HeldOut,
    held_out,
    kept_in_float,
    read_ranges,
    require_unchanged,
)
from quantkit.pipelines.inputs import load_decoder, same_source
from quantkit.pipelines.runs import running
from quantkit.pipelines.weights import read_weights
from quantkit.progress import Progress, silent
from quantkit.quantization import quantizer_names, require_ranges
from quantkit.recipe import Recipe
from quantkit.results import AutoResult, Export, Ranges, read_json, write_json
from quantkit.sweeps import digest_of

RESULT: Final = "export.json"


def run_export(job: ExportJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `model.onnx` and `export.json`.

    Raises:
        GateError: parity outside the gates; the files stay, as evidence.
    """
    with running("export", job) as run:
        keep = kept_in_float(job.keep)
        if run.finished and job.ranges is not None:
            path = run.folder / RESULT
            now = digest_of(read_ranges(job.ranges), keep)
            require_unchanged(path, read_json(path, Export).ranges_sha256, now)
        if not run.finished:
            if job.is_graph:
                write_json(run.folder / RESULT, export_graph_into(job, run.folder, progress))
            elif job.format.is_auto:
                _search_and_export(job, run.folder, progress)
            else:
                loaded = load_decoder(job.model, job)
                ranges, held = _ranges_and_text(job, loaded, run.folder, progress)
                weights = None if job.ranges is None else read_weights(job.ranges, ranges)
                export_into(
                    loaded,
                    held,
                    ranges,
                    run.folder,
                    job,
                    progress,
                    how=How(recipe=job.full_recipe, form=job.format, keep=keep, layout=job.layout),
                    weight_ranges=weights,
                )
            run.finish()
        require_passed(run.folder)
        require_within(run.folder, job)
        return run.folder


def _search_and_export(job: ExportJob, folder: Path, progress: Progress) -> None:
    loaded = load_decoder(job.model, job)
    chosen = search_export(job, loaded, folder, progress)
    one = chosen.candidate
    form = ExportFormat(recipe=one.recipe, storage=one.storage)
    how = How(recipe=one.recipe, form=form, keep=one.keep, layout=job.layout, searched=AUTO_FILE)
    export_into(loaded, chosen.held, chosen.ranges, folder, job, progress, how=how)
    chosen.finish(folder / MODEL_FILE)


def _ranges_and_text(
    job: ExportJob, loaded: LoadedModel, folder: Path, progress: Progress
) -> tuple[Ranges, HeldOut]:
    """Returns the ranges, those of an earlier run or now calibrated, and text to measure on."""
    if job.ranges is None:
        calib, held = two_slices(
            loaded,
            job.calib,
            job.eval,
            job.seq_len,
            job.samples,
            job.eval_samples,
            job.bos,
            allow_overlap=job.allow_overlap,
        )
        if not job.full_recipe.needs_ranges:
            return no_ranges(loaded, calib, job.batch_size), held
        ranges = ranges_into(
            loaded,
            calib,
            folder,
            job.batch_size,
            progress,
            method=job.method,
            points=points_of(job.full_recipe),
        )
        return ranges, held
    ranges = read_ranges(job.ranges)
    held = held_out(
        job.eval,
        job.ranges,
        ranges,
        loaded,
        seq_len=job.seq_len,
        samples=job.eval_samples,
        allow_overlap=job.allow_overlap,
    )
    return ranges, held


def two_slices(
    loaded: LoadedModel,
    calib: str,
    evaluation: str,
    seq_len: int,
    calib_samples: int,
    eval_samples: int,
    bos: str,
    *,
    allow_overlap: bool = False,
) -> tuple[TokenSlice, HeldOut]:
    """Returns calibration's blocks and evaluation's; of one source, the later ones."""
    first = text_slice(calib, loaded.tokenizer, seq_len=seq_len, samples=calib_samples, bos=bos)
    second = text_slice(
        evaluation,
        loaded.tokenizer,
        seq_len=seq_len,
        samples=eval_samples,
        skip=calib_samples if calib == evaluation else 0,
        bos=bos,
    )
    shared = require_disjoint(first, second, "calibration and evaluation", allow=allow_overlap)
    said = f"this text and calibration's share {shared} blocks: it is not held out."
    return first, HeldOut(text=second, shared=shared, warnings=(said,) if shared else ())


def ranges_into(
    loaded: LoadedModel,
    text: TokenSlice,
    folder: Path,
    batch_size: int,
    progress: Progress,
    *,
    method: str = "minmax",
    points: Sequence[str] | None = None,
) -> Ranges:
    path = folder / "ranges.json"
    if path.exists():
        return same_source(path, read_json(path, Ranges), loaded, text)
    # a layer whose input is always the same, or 0, has an exact grid
    plan = RangePlan(
        methods=parse_methods(method, CALIBRATION_POINTS), allowed=("zero", "constant")
    )
    return calibrate(
        loaded,
        text,
        folder,
        plan=plan,
        points=points,
        batch_size=batch_size,
        progress=progress,
    )


def points_of(recipe: Recipe) -> tuple[str, ...] | None:
    """Returns the points whose ranges a recipe reads; None: those that are always fixed."""
    if recipe.cache is None:
        return None
    return (*DEFAULT_CALIBRATION_POINTS, "attention_key", "attention_value")


@dataclass(frozen=True, kw_only=True)
class How:
    """What a graph is made of.

    Attributes:
        form: Storage and precision.
        searched: The file that says why.
    """

    recipe: Recipe
    form: ExportFormat
    keep: Sequence[str] = ()
    layout: str = LAYOUTS[0]
    searched: str = ""


def export_into(
    loaded: LoadedModel,
    held: HeldOut,
    ranges: Ranges,
    folder: Path,
    job: ExportJob | CompareJob,
    progress: Progress,
    *,
    how: How,
    weight_ranges: WeightRanges | None = None,
) -> Export:
    path = folder / RESULT
    if path.exists():
        return same_source(path, read_json(path, Export), loaded, held.text)
    require_ranges(loaded.model, how.recipe, ranges.tensors, keep=how.keep)
    names = quantizer_names(loaded.model, how.recipe)
    if names and set(names) <= set(how.keep):
        raise InputError(
            f"--keep leaves none of the {len(names)} quantizers of {how.recipe}: keep fewer, or "
            "--quantize none."
        )
    exported = export_and_prove(
        loaded,
        held.text,
        ranges,
        folder,
        recipe=how.recipe,
        opset=job.opset,
        batch_size=job.batch_size,
        keep=how.keep,
        form=how.form,
        layout=how.layout,
        weight_ranges=weight_ranges,
        seed=job.seed,
        progress=progress,
    )
    exported = replace(
        exported,
        model=replace(
            exported.model,
            warnings=[*exported.model.warnings, *left_out(loaded, ["linear_input"])],
        ),
        data=held.noted(exported.data),
        ranges_sha256=digest_of(ranges, how.keep),
        searched=how.searched,
    )
    write_json(path, exported)
    return exported


def require_passed(folder: Path) -> None:
    export = read_json(folder / RESULT, Export)
    if not export.passed:
        failed = [
            f"{name}, against {parity.reference} (batch {parity.batch}, {parity.seq_len} tokens: "
            f"cosine {parity.cosine:.6f}, top-1 agreement {parity.top1_agreement:.4f})"
            for name, parities in export.parity.items()
            for parity in parities
            if not parity.passed
        ]
        raise GateError(
            f"{folder}: the exported graph is outside the parity gates"
            f"{f': {failed[0]}' if failed else ''}; the files stay, see export.json and "
            "quantizers.json."
        )


def require_within(folder: Path, job: ExportJob) -> None:
    """Raises GateError where what `auto` chose loses more than the budget on unseen text."""
    accuracy = read_json(folder / RESULT, Export).accuracy
    if job.max_drop is None or not job.format.is_auto:
        return
    reported = read_json(folder / AUTO_FILE, AutoResult).reported or accuracy
    if reported is None or reported.loss is None or not reported.loss <= job.max_drop:
        values = (math.nan, math.nan) if reported is None else (reported.float, reported.quantized)
        raise GateError(
            f"{folder}: on what took no part in the choice the metric of float, {values[0]:.4g}, "
            f"became {values[1]:.4g}, which is more than the budget of {job.max_drop:.4g} allows. "
            "The files stay; search on more (--search-samples)."
        )
