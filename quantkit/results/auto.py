"""`auto.json`: every export that `--quantize auto` tried, and why it took the one that it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from quantkit.errors import InputError
from quantkit.results.export import Accuracy
from quantkit.results.info import DataInfo, ModelInfo
from quantkit.results.result import Result

AUTO_SCHEMA: Final = "quantkit.auto/1"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One graph that was built and measured in ONNX Runtime.

    Attributes:
        name: Of the candidate, unique; recipe and what it was made with.
        smoothing: `none`; SmoothQuant with a strength searched for each group (`auto`), or with one
            for all, e.g. `0.5`.
        method: How static ranges were chosen; empty where the recipe reads none.
        kept: Quantizers of the recipe that stay in float.
        value: The metric of this graph.
        change, change_low, change_high: What quantization changed, with its 95 % interval of paired
            resampled units: quantized / float for a perplexity, quantized - float else. The ends
            are NaN where there is one unit only.
        loss_high: The end of that interval that counts, as a loss: what the budget is held against.
        latency_ms, float_ms: Milliseconds of one prompt, medians of alternating calls.
        bytes: Of the graph with its weights.
        is_within: `loss_high` is at most the budget.
        is_on_front: No other trial is both faster and, by `change`, better.
    """

    name: str
    recipe: str
    storage: str
    smoothing: str
    method: str
    kept: list[str]
    value: float
    change: float
    change_low: float
    change_high: float
    loss_high: float
    latency_ms: float
    float_ms: float
    bytes: int
    is_within: bool
    is_on_front: bool = False

    @property
    def speedup(self) -> float:
        """How many times as fast as the float graph in the same calls."""
        return self.float_ms / self.latency_ms


@dataclass(frozen=True, kw_only=True, repr=False)
class AutoResult(Result):
    """The whole of `auto.json`.

    Attributes:
        data: What the choice was made on; `calibration`: what ranges and smoothing come from. The
            chosen export is measured on a third part, in `export.json`.
        chosen_on: Units of `data` that the choice is made on: all blocks of a text, every other
            item of another task; the others are reported on.
        ranked_on: Blocks of the text by whose divergence inputs were ranked for staying in float.
        max_drop: The budget: relative for a perplexity, in the metric's units else.
        prefill_tokens: Length of the prompt that was timed.
        float_value: The metric of the float graph.
        trials: The fastest first.
        chosen: Name of the one that was taken; empty where none is within the budget.
        reason: One sentence.
        reported: Of a task that is no text: float and chosen on the units that the choice has not
            seen. The perplexity of the third part of the text stands in `export.json`.
    """

    schema: str = AUTO_SCHEMA
    model: ModelInfo
    data: DataInfo
    calibration: DataInfo
    chosen_on: int
    ranked_on: int
    environment: dict[str, str]
    task: str
    metric: str
    units: str
    max_drop: float
    prefill_tokens: int
    seed: int
    float_value: float
    trials: list[Trial]
    chosen: str
    reason: str
    warnings: list[str] = field(default_factory=list)
    reported: Accuracy | None = None

    OLDER: ClassVar[tuple[str, ...]] = ()

    @property
    def winner(self) -> Trial:
        """The trial that was taken.

        Raises:
            InputError: none was, or none of the trials has its name.
        """
        for trial in self.trials:
            if trial.name == self.chosen:
                return trial
        raise InputError(
            f"auto.json of {self.model.name}: {self.chosen!r} was chosen and is none of its "
            "trials: search again."
        )
