"""The commands as functions: the same options, the same files, and what they say as an object.

Nothing is printed. Each verb of a stage writes a run folder as its command does, by default below
`reports/`; the same call again finds it done and reads it. What a verb needs is imported when it is
called.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from quantkit.api.folders import (
    Calibrated,
    Comparison,
    read_calibrated,
    read_comparison,
)
from quantkit.api.options import (
    CalibrateOptions,
    CompareOptions,
    DiagnoseOptions,
    ExportOptions,
    Run,
    Runs,
    SensitivityOptions,
    Source,
    Sources,
    StatsOptions,
    SweepOptions,
    TrainOptions,
    fields_of,
    job_of,
    taken,
)
from quantkit.errors import GateError, InputError
from quantkit.jobs import (
    CalibrateJob,
    CompareJob,
    DiagnoseJob,
    ExportJob,
    PairSpec,
    SensitivityJob,
    StatsJob,
    SweepJob,
    TrainJob,
    default_out,
)
from quantkit.progress import Progress, silent
from quantkit.results import (
    Diagnosis,
    Export,
    Sensitivity,
    Stats,
    Sweep,
    TrainingResult,
    read_json,
)

if TYPE_CHECKING:
    from torch import nn


def stats(
    model: Source | nn.Module,
    data: Source | Iterable[Any] | None = None,
    *,
    tokenizer: Any = None,
    name: str | None = None,
    out: Source | None = None,
    progress: Progress = silent,
    **options: Unpack[StatsOptions],
) -> Stats:
    """Returns the outlier statistics of a model, as `quantkit stats`.

    `stats("smollm2", "corpus.txt", seq_len=256)`, or of a model that the program holds:
    `stats(my_model, batches)` and `stats(my_model, "corpus.txt", tokenizer=my_tokenizer)`. That one
    runs in eval mode, is as it was afterwards, and nothing is written without `out`.

    Args:
        model: A folder, a hub id, a shipped name, a `.gguf`, `timm:NAME`; or an nn.Module.
        data: A set, file or folder; None: what ships for such models. For an nn.Module also
            batches: tensors, mappings (by keyword) or tuples (by position).
        tokenizer, name: Of an nn.Module: what reads a text, and what reports call it.

    Raises:
        InputError: what cannot be used. ProbeError: a layer that no probe saw.
    """
    if isinstance(model, str | os.PathLike):
        if tokenizer is not None or name is not None:
            raise InputError("stats reads tokenizer and name for an nn.Module alone: its folder "
                             "has its own.")  # fmt: skip
        own = {"models": model, "data": data, "out": out}
        job = job_of(StatsJob, "stats", options, **own)
        from quantkit.pipelines import run_stats

        return read_json(run_stats(job, progress=progress) / "stats.json", Stats)
    called = type(model).__name__ if name is None else name
    job = job_of(StatsJob, "stats", options, models=called, data=None, out=out)
    from torch import nn

    if not isinstance(model, nn.Module):
        raise InputError(
            f"stats takes one model, its name or folder or an nn.Module; got {model!r:.60}. For "
            "several call it for each, or compare."
        )
    from quantkit.api.modules import stats_of_module

    return stats_of_module(
        model,
        data,
        job,
        given=options.keys(),
        name=called,
        tokenizer=tokenizer,
        progress=progress,
    )


def calibrate(
    model: Source | None = None,
    calib: Source | None = None,
    *,
    out: Source | None = None,
    progress: Progress = silent,
    **options: Unpack[CalibrateOptions],
) -> Calibrated:
    """Returns quantization ranges and whether to trust them, as `quantkit calibrate`.

    `calibrate("smollm2", "corpus.txt", method="mse", bits=(8, 4))`; without a model and with
    `from_run=EARLIER` other ranges from what that run observed.

    Raises:
        InputError: what cannot be used.
    """
    given = None if model is None else _named("calibrate", model)
    job = job_of(CalibrateJob, "calibrate", options, model=given, calib=calib, out=out)
    from quantkit.pipelines import run_calibrate

    return read_calibrated(run_calibrate(job, progress=progress))


def sensitivity(
    model: Source,
    ranges: Run,
    *,
    out: Source | None = None,
    progress: Progress = silent,
    **options: Unpack[SensitivityOptions],
) -> Sensitivity:
    """Returns which quantizers cost most, as `quantkit sensitivity`.

    `sensitivity("smollm2", calibrate("smollm2"), quantize="w8a8")`.

    Args:
        ranges: What `calibrate` returned, or its folder.

    Raises:
        InputError: what cannot be used.
    """
    own = {"model": _named("sensitivity", model), "ranges": ranges, "out": out}
    job = job_of(SensitivityJob, "sensitivity", options, **own)
    from quantkit.pipelines import run_sensitivity

    return read_json(run_sensitivity(job, progress=progress) / "sensitivity.json", Sensitivity)


def sweep(
    models: Sources,
    *,
    out: Source | None = None,
    progress: Progress = silent,
    **options: Unpack[SweepOptions],
) -> Sweep:
    """Returns what each bit costs, models side by side, as `quantkit sweep`.

    `sweep("smollm2", bits=(16, 8, 4), samples=8)`, or several: `sweep(["base=./a", "diff=./b"])`.

    Raises:
        InputError: what cannot be used.
    """
    job = job_of(SweepJob, "sweep", options, models=_all_named("sweep", models), out=out)
    from quantkit.pipelines import run_sweep

    return read_json(run_sweep(job, progress=progress) / "sweep.json", Sweep)


def export(
    model: Source,
    *,
    out: Source | None = None,
    progress: Progress = silent,
    **options: Unpack[ExportOptions],
) -> Export:
    """Returns the proof of a quantized ONNX model, as `quantkit export`; it lies in `.folder`.

    `export("smollm2", quantize="auto", max_drop=0.02)`.

    Raises:
        InputError: what cannot be used.
        GateError: the graph does not agree with the model; its files are written, for `load`.
    """
    job = job_of(ExportJob, "export", options, model=_named("export", model), out=out)
    from quantkit.pipelines import run_export

    return read_json(run_export(job, progress=progress) / "export.json", Export)


def diagnose(
    float_graph: Source,
    quantized_graph: Source,
    *,
    out: Source | None = None,
    progress: Progress = silent,
    **options: Unpack[DiagnoseOptions],
) -> Diagnosis:
    """Returns where a quantized graph parts from its float graph, as `quantkit diagnose`.

    Raises:
        InputError: what cannot be used.
    """
    own = {"float_graph": float_graph, "quantized_graph": quantized_graph, "out": out}
    job = job_of(DiagnoseJob, "diagnose", options, **own)
    from quantkit.pipelines import run_diagnose

    return read_json(run_diagnose(job, progress=progress) / "diagnosis.json", Diagnosis)


def compare(
    models: Sources | None = None,
    *,
    out: Source | None = None,
    progress: Progress = silent,
    **options: Unpack[CompareOptions],
) -> Comparison:
    """Returns every stage of every model, with the report over all of it, as `quantkit compare`.

    Without models: the pair that ships, with what `quantkit compare` does for it.

    Raises:
        InputError: what cannot be used.
        GateError: an export does not agree with its model; everything is written, for `load`.
    """
    named = None if models is None else _all_named("compare", models)
    fields = fields_of(CompareJob, "compare", options, models=named or (), out=out)
    if named is None:
        del fields["models"]
    job = CompareJob.of_pair(**fields) if named is None else CompareJob(**fields)
    from quantkit.pipelines import run_compare
    from quantkit.reporting import write_report

    try:
        folder = run_compare(job, progress=progress)
    except GateError:
        folder = default_out("compare", job)
        if (folder / "sweep.json").is_file():
            write_report([folder], folder)
        raise
    write_report([folder], folder)
    return read_comparison(folder)


def train(
    pair: Source | PairSpec,
    *,
    out: Source | None = None,
    progress: Progress = silent,
    **options: Unpack[TrainOptions],
) -> TrainingResult:
    """Returns how matched models were trained, as `quantkit train`; they lie in `.folder`.

    Args:
        pair: A PAIR.toml, the name of one that ships, or what is in one.

    Raises:
        InputError: what cannot be used.
    """
    spec = pair if isinstance(pair, PairSpec) else PairSpec.read(taken("pair", pair, str))
    job = job_of(TrainJob, "train", options, pair=spec, out=out)
    from quantkit.pipelines import run_train

    return read_json(run_train(job, progress=progress) / "training.json", TrainingResult)


def report(
    runs: Runs,
    out: Source | None = None,
    *,
    against: Run | None = None,
) -> tuple[Path, ...]:
    """Returns the paths of a report over runs: the page, its Markdown twin, and their charts.

    Args:
        runs: Folders, result files, or results that know theirs.
        out: Folder; None: that of the run, or `reports/report` of several.
        against: An earlier run to put beside these, with every change marked.

    Raises:
        InputError: what cannot be read or written.
    """
    from quantkit.reporting import write_report

    paths = [Path(found).expanduser() for found in taken("runs", runs, tuple[str, ...])]
    if not paths:
        raise InputError("report: no run was given; expected the folder that a command wrote.")
    if out is not None:
        folder = Path(out).expanduser()
    elif len(paths) == 1:
        folder = paths[0] if paths[0].is_dir() else paths[0].parent
    else:
        folder = Path("reports") / "report"
    earlier = None if against is None else Path(taken("against", against, str)).expanduser()
    return write_report(paths, folder, against=earlier)


def _named(verb: str, model: object) -> str:
    """Returns the name or folder of a model.

    Raises:
        InputError: a model itself: a run is known by what it was made of, and that is a file.
    """
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    if isinstance(model, Sequence):
        raise InputError(f"{verb} takes one model, got {model!r:.60}.")
    raise InputError(
        f"{verb} takes the name or the folder of a model, got a {type(model).__name__}: save it "
        "and its tokenizer with save_pretrained(FOLDER), and give FOLDER."
    )


def _all_named(verb: str, models: Sources) -> tuple[str, ...]:
    if isinstance(models, str) or not isinstance(models, Sequence):
        return (_named(verb, models),)
    return tuple(_named(verb, found) for found in models)
