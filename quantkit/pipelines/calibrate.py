"""`calibrate` as a stage: a job in, a folder with ranges out, which later stages take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from torch import nn

from quantkit.calib_sets import DataSlice, changed_since, data_slice, sample_count_warning
from quantkit.calibration import (
    OBSERVATIONS_FILE,
    RangePlan,
    Recording,
    WeightPlan,
    choose_ranges,
    diagnose,
    forget,
    is_stable,
    observe,
    ranges_now,
    save,
    stability,
)
from quantkit.calibration import load as load_observations
from quantkit.errors import InputError
from quantkit.jobs import (
    CALIBRATION_POINTS,
    DEFAULT_CALIBRATION_POINTS,
    DEFAULT_EVAL_SAMPLES,
    DEFAULT_SYMMETRIC,
    DEFAULT_WEIGHT_BITS,
    CalibrateJob,
)
from quantkit.models import LoadedModel, attention_modules, holds_fused_experts, load, prepare
from quantkit.numerics.affine import RangeError
from quantkit.numerics.methods import MovingAverageRange, parse_methods
from quantkit.pipelines.origin import Origin, PlanWords, finished, origin_of
from quantkit.pipelines.runs import running
from quantkit.pipelines.smoothing import smoothing_of
from quantkit.pipelines.weights import (
    fix_weights,
    observed_model,
    weight_plan_of,
    weights_warning,
)
from quantkit.processes import Processes, joined
from quantkit.progress import Progress, silent
from quantkit.quantization import smoothed
from quantkit.results import (
    Calibration,
    Ranges,
    Smoothing,
    WeightsInfo,
    write_json,
)
from quantkit.results.environment import environment

ALONE: Final = Processes()


def run_calibrate(job: CalibrateJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `ranges.json`, `calibration.json` and `observations.safetensors`.

    Several processes (`accelerate launch`, torchrun) share the batches; the first one writes.

    Raises:
        RangeError: ranges that cannot be trusted; what was observed stays.
    """
    with joined() as processes, running("calibrate", job, processes) as run:
        if run.finished:
            return run.folder
        plan, weights = plan_of(job), weight_plan_of(job)
        if job.from_run is not None:
            source = Path(job.from_run)
            processes.at_first(lambda: _choose_again(source, run.folder, plan, weights, progress))
        else:
            assert job.model is not None  # the job has checked it
            if processes.count > 1:  # one converts or downloads, the others find it done
                processes.at_first(partial(prepare, job.model))
            loaded, data = processes.everywhere(partial(_load_with_data, job, processes))
            calibrate(
                loaded,
                data,
                run.folder,
                plan=plan,
                points=job.points,
                batch_size=job.batch_size,
                weights=weights,
                smooth=job.smooth is not None,
                alpha=job.alpha,
                until_stable=job.until_stable,
                allow_unseen=job.allow_unseen,
                processes=processes,
                progress=progress,
            )
        processes.at_first(run.finish)
        return run.folder


def plan_of(job: CalibrateJob) -> RangePlan:
    """Returns how the job's ranges are chosen."""
    return RangePlan(
        methods=parse_methods(job.method, CALIBRATION_POINTS),
        bits=job.bits,
        symmetric=job.symmetric,
        granularity=job.granularity,
        excludes_first=job.exclude_first,
        allowed=job.allow,
    )


def _load_with_data(job: CalibrateJob, processes: Processes) -> tuple[LoadedModel, DataSlice]:
    assert job.model is not None
    loaded = load(job.model, dtype=job.dtype, device=processes.own_device(job.device))
    data = data_slice(job.calib, loaded, seq_len=job.seq_len, samples=job.most_samples, bos=job.bos)
    if job.until_stable is not None and job.samples is None:
        # where that is all that there is, as much as an evaluation takes is left to it
        left = data.sequences - DEFAULT_EVAL_SAMPLES
        if data.sequences < job.most_samples and left > 0:
            data = data.first(left)
    return loaded, data


def calibrate(
    loaded: LoadedModel,
    data: DataSlice,
    folder: Path,
    *,
    plan: RangePlan,
    points: Sequence[str] | None = None,
    batch_size: int = 4,
    weights: WeightPlan | None = None,
    smooth: bool = False,
    alpha: float | None = None,
    until_stable: float | None = None,
    allow_unseen: Sequence[str] = (),
    processes: Processes = ALONE,
    progress: Progress = silent,
) -> Ranges:
    """Returns the ranges, written into the folder by the first process.

    What the folder already holds of the same model, data and options is taken up.

    Args:
        points: From `jobs.CALIBRATION_POINTS`; None: inputs of linear layers, and logits where the
            model attends.
        weights: How weights get ranges, written to `weights.safetensors`; None: they get none.
        smooth: Migrate scales first; `alpha`: how strongly, None: searched by group.

    Raises:
        InputError: the folder's files are of another model or other data.
        RangeError: ranges that cannot be trusted.
    """
    if points is None:
        attends = bool(attention_modules(loaded.model))
        points = [p for p in DEFAULT_CALIBRATION_POINTS if attends or p != "attention_logit"]
    averaging_constant = _averaging_constant(plan)
    smoothing: dict[str, Smoothing] = {}
    if smooth:
        smoothing = smoothing_of(
            loaded,
            data,
            folder,
            plan,
            alpha,
            DEFAULT_WEIGHT_BITS if weights is None else weights.bits,
            batch_size,
            processes,
            progress,
        )
    origin = Origin(
        model=loaded.info(),
        data=data.info(batch_size),
        points=list(points),
        averaging_constant=averaging_constant,
        plan=PlanWords.of(plan),
        smoothing=smoothing,
        until_stable=until_stable,
        allow_unseen=list(allow_unseen),
        warnings=left_out(loaded, points),
    )
    path = folder / OBSERVATIONS_FILE
    kept: list[tuple[Recording, Origin]] = []  # at the first process

    def is_done() -> bool:
        found = finished(path, origin)
        if found is not None:
            keep(found)
        return found is not None

    def keep(recording: Recording) -> Origin:
        used = data.first(recording.samples) if recording.samples < data.sequences else data
        few = sample_count_warning(used)
        warnings = [*origin.warnings, *([few] if few else [])]
        own = replace(origin, data=used.info(batch_size), warnings=warnings)
        kept.append((recording, own))
        return own

    def finish(recording: Recording) -> None:
        save(path, recording, keep(recording).identity)
        forget(folder)

    if not processes.at_first(is_done):
        with ExitStack() as stack:
            if smoothing:
                stack.enter_context(smoothed(loaded.model, smoothing))
            observe(
                loaded,
                data,
                points=points,
                choose=lambda seen: ranges_now(seen, plan),
                averaging_constant=averaging_constant,
                until_stable=until_stable,
                allow_unseen=allow_unseen,
                store=folder,
                identity=origin.identity,
                finish=finish,
                batch_size=batch_size,
                processes=processes,
                progress=progress,
            )

    def write() -> Ranges:
        recording, own = kept[0]
        return _write(
            folder,
            recording,
            own,
            plan,
            [],
            lambda: fix_weights(loaded, folder, weights, own, progress),
            progress,
        )

    return processes.at_first(write)


def no_ranges(
    loaded: LoadedModel,
    data: DataSlice,
    batch_size: int,
    *,
    smoothing: Mapping[str, Smoothing] | None = None,
) -> Ranges:
    """Returns the ranges of a recipe that reads none: nothing is calibrated."""
    return Ranges(
        model=loaded.info(),
        data=data.info(batch_size),
        method="none",
        environment=environment(),
        tensors={},
        smoothing=dict(smoothing or {}),
    )


def left_out(loaded: LoadedModel, points: Sequence[str]) -> list[str]:
    """Returns one sentence for each kind of layer whose input gets no range."""
    if "linear_input" not in points:
        return []
    convolutions = [m for m in loaded.model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    experts = [name for name, m in loaded.model.named_modules() if holds_fused_experts(m)]
    found = []
    if convolutions:
        count = len(convolutions)
        found.append(
            f"{count} convolution{'s' if count > 1 else ''} of {loaded.name}: inputs of linear "
            "layers alone get ranges here"
        )
    if experts:
        found.append(
            f"{len(experts)} module{'s' if len(experts) > 1 else ''} of {loaded.name} (such as "
            f"{experts[0]}) hold the weights of all experts as one: their inputs get no range, and "
            "they stay in float"
        )
    return found


def _choose_again(
    run: Path, folder: Path, plan: RangePlan, weights: WeightPlan | None, progress: Progress
) -> None:
    """Chooses ranges from what another run observed; its model is loaded for weights alone."""
    path = run if run.is_file() else run / OBSERVATIONS_FILE
    recording, identity = load_observations(path)
    origin = origin_of(path, identity)
    warnings = [f"chosen again from {run.name}, by {plan.methods}"]
    changed = changed_since(origin.data, path.stat().st_mtime)
    warnings += [changed] if changed else []
    for method in plan.methods.methods:
        if isinstance(method, MovingAverageRange):
            known = origin.averaging_constant
            if method.averaging_constant != known:
                raise InputError(
                    f"{path} holds moving averages with constant {known:g}, asked for "
                    f"{method.averaging_constant:g}: calibrate MODEL with --method {method}."
                )
    for point in (*plan.methods.by_point, *plan.symmetric):
        if point not in origin.points and point not in DEFAULT_SYMMETRIC:
            raise InputError(
                f"{path} holds nothing of {point}, which --method or --symmetric names: it holds "
                f"{', '.join(origin.points)}."
            )
    if origin.plan != PlanWords.of(plan):
        recording.checkpoints = []  # of other ranges than these
        warnings.append(
            "how far ranges move with the number of samples was looked at for another choice: it "
            "is left out"
        )

    def fix() -> WeightsInfo | None:
        if weights is None:
            return None
        return fix_weights(observed_model(run, origin), folder, weights, origin, progress)

    _write(folder, recording, origin, plan, warnings, fix, progress, source=run)


def _write(
    folder: Path,
    recording: Recording,
    origin: Origin,
    plan: RangePlan,
    warnings: Sequence[str],
    fix: Callable[[], WeightsInfo | None],
    progress: Progress,
    *,
    source: Path | None = None,
) -> Ranges:
    """Returns the ranges, written with `calibration.json` beside them.

    Args:
        source: Where the observations are; None: in the folder.
    """
    try:
        tensors = choose_ranges(recording.seen, plan, progress=progress)
    except RangeError as error:
        raise RangeError(
            f"{error} What was observed stays: quantkit calibrate --from {source or folder}."
        ) from error
    info = fix()
    more = weights_warning(info)
    said = [*warnings, *origin.warnings, *recording.notes, *([more] if more else [])]
    for method in plan.methods.methods:
        if method.is_order_dependent:
            said.append(f"{method} depends on the order of the samples")
    target = origin.until_stable if recording.checkpoints else None
    if target is not None and len(recording.checkpoints) < 2:
        said.append(
            f"{recording.samples:,} samples are too few to see whether ranges are stable: expected "
            "22 or more"
        )
    elif target is not None and not is_stable(recording.checkpoints, target):
        said.append(
            f"after {recording.samples:,} samples, the most that were asked for or there, ranges "
            f"still moved by more than {100 * target:g} %"
        )
    calibration = Calibration(
        model=origin.model,
        data=origin.data,
        environment=environment(),
        method=str(plan.methods),
        excludes_first=plan.excludes_first,
        tensors=diagnose(
            recording.seen, plan, recording.checkpoints, ranges=tensors, progress=progress
        ),
        stability=stability(recording.checkpoints),
        warnings=said,
    )
    ranges = Ranges(
        model=origin.model,
        data=origin.data,
        method=str(plan.methods),
        environment=environment(),
        tensors=tensors,
        smoothing=origin.smoothing,
        excludes_first=plan.excludes_first,
        stability=calibration.stability,
        allowed=[*plan.allowed, *origin.allow_unseen],
        warnings=said,
        until_stable_frac=target,
        weights=info,
    )
    write_json(folder / "calibration.json", calibration)
    write_json(folder / "ranges.json", ranges)
    return ranges


def _averaging_constant(plan: RangePlan) -> float:
    """Returns the constant of the plan's moving average, its default where there is none.

    Raises:
        InputError: two different ones.
    """
    methods = plan.methods.methods
    known = [m.averaging_constant for m in methods if isinstance(m, MovingAverageRange)]
    if len(set(known)) > 1:
        raise InputError(
            f"--method names moving averages with constants {', '.join(map(str, known))}: expected "
            "one, since one pass keeps one."
        )
    return known[0] if known else MovingAverageRange().averaging_constant
