"""What the candidates of `auto` are built from: ranges and float graphs, by smoothing and method.

Time: the first use of a smoothing costs an export, and a calibration or a pass over channels; each
further method of its ranges is chosen from what was observed, once.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from quantkit.calib_sets import TokenSlice
from quantkit.calibration import OBSERVATIONS_FILE, RangePlan, choose_ranges
from quantkit.calibration import load as load_observations
from quantkit.exporting import export_float_once, float_path
from quantkit.jobs import CALIBRATION_POINTS, DEFAULT_WEIGHT_BITS, ExportJob
from quantkit.models import LoadedModel
from quantkit.numerics.methods import parse_methods
from quantkit.pipelines.calibrate import calibrate, no_ranges
from quantkit.pipelines.runs import ALONE, SEARCH_FOLDER
from quantkit.pipelines.smoothing import smoothing_of
from quantkit.progress import Progress
from quantkit.quantization import smoothed
from quantkit.results import Ranges, Smoothing
from quantkit.search.candidates import Candidate, Smoothed
from quantkit.search.judge import Source

WORDS: Final[dict[Smoothed, str]] = {
    "none": "as-it-is",
    "auto": "smoothed",
    "0.5": "smoothed-0.5",
}
"""Folders of what is made for each smoothing."""


@dataclass(kw_only=True, eq=False)
class Sources:
    """Ranges and float graphs by smoothing, made when they are first asked for."""

    job: ExportJob
    loaded: LoadedModel
    calib: TokenSlice
    folder: Path
    progress: Progress
    known: dict[tuple[Smoothed, bool, str], Ranges] = field(default_factory=dict)

    def float_graph(self, smoothing: Smoothed) -> Path:
        """Returns the float graph of the model, smoothed or as it is."""
        scales = {} if smoothing == "none" else self._smoothing(smoothing)
        self.progress(f"exporting the float graph ({WORDS[smoothing]})", 0, 1)
        with smoothed(self.loaded.model, scales):
            return export_float_once(
                self.loaded, self._folder(smoothing), opset=self.job.opset, smoothing=scales
            )

    def source(self, candidate: Candidate) -> Source:
        """Returns what a candidate is built from."""
        return Source(
            ranges=self.source_ranges(candidate), graph=self.float_graph(candidate.smoothing)
        )

    def source_ranges(self, candidate: Candidate) -> Ranges:
        """Returns the ranges of a candidate, with its smoothing."""
        method = candidate.method or self.job.method
        key = (candidate.smoothing, candidate.recipe.needs_ranges, method)
        if key not in self.known:
            self.known[key] = self._ranges(*key)
        return self.known[key]

    def hand_over(self, smoothing: Smoothed) -> None:
        """Gives the chosen float graph to the export, and removes the other one."""
        for kind in WORDS:
            own = float_path(self._folder(kind))
            if not own.parent.is_dir():
                continue
            target = float_path(self.folder).parent
            if kind == smoothing and not target.exists():
                shutil.move(own.parent, target)
            else:
                shutil.rmtree(own.parent)

    def _folder(self, smoothing: Smoothed) -> Path:
        return self.folder / SEARCH_FOLDER / WORDS[smoothing]

    def _plan(self, method: str) -> RangePlan:
        return RangePlan(methods=parse_methods(method, CALIBRATION_POINTS))

    def _smoothing(self, smoothing: Smoothed) -> dict[str, Smoothing]:
        if smoothing == "none":
            return {}
        return smoothing_of(
            self.loaded,
            self.calib,
            self._folder(smoothing),
            self._plan(self.job.method),
            None if smoothing == "auto" else float(smoothing),
            DEFAULT_WEIGHT_BITS,
            self.job.batch_size,
            ALONE,
            self.progress,
        )

    def _ranges(self, smoothing: Smoothed, needs_ranges: bool, method: str) -> Ranges:
        if not needs_ranges:
            scales = self._smoothing(smoothing)
            return no_ranges(self.loaded, self.calib, self.job.batch_size, smoothing=scales)
        first = (smoothing, True, self.job.method)
        if first not in self.known:
            self.known[first] = calibrate(
                self.loaded,
                self.calib,
                self._folder(smoothing),
                plan=self._plan(self.job.method),
                smooth=smoothing != "none",
                alpha=None if smoothing in ("none", "auto") else float(smoothing),
                batch_size=self.job.batch_size,
                progress=self.progress,
            )
        if method == self.job.method:
            return self.known[first]
        recording, _ = load_observations(self._folder(smoothing) / OBSERVATIONS_FILE)
        tensors = choose_ranges(recording.seen, self._plan(method), progress=self.progress)
        return replace(self.known[first], tensors=tensors, method=method)
