"""Ranges of weights: fixed beside `ranges.json`, and read again by the stages that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from quantkit.calibration import (
    WEIGHTS_FILE,
    WeightPlan,
    WeightRanges,
    choose_weight_ranges,
    load_weight_ranges,
    save_weight_ranges,
    weights_info,
)
from quantkit.errors import InputError
from quantkit.jobs import CalibrateJob
from quantkit.models import LoadedModel, load
from quantkit.numerics.granularity import weight_granularity
from quantkit.numerics.methods import MinMaxRange, parse_method
from quantkit.pipelines.origin import Origin
from quantkit.progress import Progress
from quantkit.quantization import smoothed
from quantkit.results import Ranges, WeightsInfo

SAFE_BITS: Final = 8
"""From here on clipping was seen to change nothing."""


def weight_plan_of(job: CalibrateJob) -> WeightPlan | None:
    """Returns how the job's ranges of weights are chosen; None where it asks for none."""
    if job.weights is None:
        return None
    return WeightPlan(
        method=parse_method(job.weight_method),
        bits=job.weight_bits,
        granularity=weight_granularity(job.weights),
    )


def fix_weights(
    loaded: LoadedModel, folder: Path, plan: WeightPlan | None, origin: Origin, progress: Progress
) -> WeightsInfo | None:
    """Returns what `weights.safetensors`, written into the folder, holds; None without a plan.

    The ranges are those of the weights after `origin`'s smoothing.

    Raises:
        RangeError: NaN or inf in a weight, by name.
    """
    if plan is None:
        return None
    with smoothed(loaded.model, origin.smoothing):
        found, figures = choose_weight_ranges(loaded.model, plan, progress=progress)
    return weights_info(found, figures, save_weight_ranges(folder / WEIGHTS_FILE, found))


def weights_warning(info: WeightsInfo | None) -> str | None:
    """Returns one sentence where ranges clip weights on a grid so coarse that it can harm.

    Seen on SmolLM2, one scale a channel at 4 bits (`benchmarks/ranges.py`): perplexity 12.9 in
    float, 25.6 by min-max, 62.1 by MSE, though that has 2 dB more SQNR.
    """
    if info is None or info.method == MinMaxRange.name or info.bits >= SAFE_BITS:
        return None
    return (
        f"ranges of weights by {info.method} are judged on the weights, not on what they multiply: "
        "a clipped weight that reads an outlier channel can cost more than all others gain; "
        f"choose again by --from with --weight-method {MinMaxRange.name}, and sweep both"
    )


def observed_model(run: Path, origin: Origin) -> LoadedModel:
    """Returns the model that a run's observations were made with.

    Raises:
        InputError: it is gone, or its weights are others now.
    """
    model = origin.model
    loaded = load(model.source, dtype=model.dtype, device=model.device)
    if loaded.sha256 != model.sha256:
        raise InputError(
            f"{run} was observed on {model.source} as it was (sha256 {model.sha256[:10]}, now "
            f"{loaded.sha256[:10]}): calibrate {model.source} again."
        )
    return loaded


def read_weights(run: str, ranges: Ranges) -> WeightRanges | None:
    """Returns the ranges of weights beside a run's `ranges.json`; None where it has none.

    Args:
        run: The folder, or its `ranges.json`, as given to `read_ranges`.

    Raises:
        InputError: the file is missing, or is not the one that was written with `ranges`.
    """
    if ranges.weights is None:
        return None
    path = Path(run)
    folder = path if path.is_dir() else path.parent
    return load_weight_ranges(folder / WEIGHTS_FILE, ranges.weights.sha256)
