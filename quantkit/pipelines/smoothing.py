"""The SmoothQuant migration of a run: found once, kept in `smoothing.json` beside its ranges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quantkit.calib_sets import DataSlice
from quantkit.calibration import RangePlan, find_smoothing
from quantkit.models import LoadedModel
from quantkit.processes import Processes
from quantkit.progress import Progress
from quantkit.results import Smoothing, read_json, write_json

SMOOTHING_FILE: Final = "smoothing.json"


@dataclass(frozen=True, kw_only=True)
class _KeptSmoothing:
    """`smoothing.json`: found before the pass that fixes ranges; an interrupted job goes on."""

    schema: str = "quantkit.smoothing/1"
    model_sha256: str
    data_sha256: str
    asked: list[float | bool | None]
    groups: dict[str, Smoothing]


def smoothing_of(
    loaded: LoadedModel,
    data: DataSlice,
    folder: Path,
    plan: RangePlan,
    alpha: float | None,
    weight_bits: int,
    batch_size: int,
    processes: Processes,
    progress: Progress,
) -> dict[str, Smoothing]:
    """Returns the migration that the folder holds already, else finds it and writes it there."""
    path = folder / SMOOTHING_FILE
    asked = [alpha, plan.bits[0], weight_bits, plan.excludes_first]

    def known() -> dict[str, Smoothing] | None:
        if not path.is_file():
            return None
        kept = read_json(path, _KeptSmoothing)
        same = (kept.model_sha256, kept.data_sha256) == (loaded.sha256, data.sha256)
        return kept.groups if same and kept.asked == asked else None

    found = processes.at_first(known)
    if found is not None:
        return found
    found = find_smoothing(
        loaded,
        data,
        alpha=alpha,
        activation_bits=plan.bits[0],
        weight_bits=weight_bits,
        batch_size=batch_size,
        without_first=plan.excludes_first,
        processes=processes,
        progress=progress,
    )
    kept = _KeptSmoothing(
        model_sha256=loaded.sha256, data_sha256=data.sha256, asked=asked, groups=found
    )
    processes.at_first(lambda: write_json(path, kept))
    return found
