"""`sweep.json`: what each bit width costs, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, Self

from quantkit.results.info import DataInfo, ModelInfo
from quantkit.results.result import Result
from quantkit.results.spread import deviation, mean

SWEEP_SCHEMA: Final = "quantkit.sweep/4"
CHANCE_ALPHA: Final = 0.05
"""What guessing reaches with more than this probability is not shown to be above chance."""
CHANCE_REACH: Final = 0.10
"""Absolute: what is at chance is shown to lie less than this far above it."""

ChanceVerdict = Literal["above", "at", "open"]
"""`above`: the test rejects guessing. `at`: it does not, and the interval rules out more than
`CHANCE_REACH` above chance (what lies below chance counts as at it). `open`: it does not, and there
are too few items to say more: a test that rejects nothing proves no equality."""


@dataclass(frozen=True, kw_only=True)
class Fired:
    """How often a quantizer ran, and on how many elements in all; a weight once."""

    hits: int
    elements: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model, recipe, task and metric.

    Attributes:
        model: `ModelInfo.name`.
        recipe: Canonical name, see `quantkit.recipe`.
        bits: Of the logits; 16 where they are not quantized.
        granularity, range: Of the logits; None where they are not quantized.
        weights, activations: Bits, None where floating point.
        task: Canonical name, e.g. `perplexity`, `needles:needles=4`.
        metric: e.g. `perplexity`, `bits_per_byte`, `acc_norm`.
        stderr, ci_low, ci_high: Of `value`; the interval is at 95 %. NaN where there is none.
        n: Resampled units: blocks for perplexity, items for accuracies.
        hits: How often the cell's quantizers fired, 0 for the float row.
        group: What the seeds of one model are called together; the model's name where it is alone.
        chance: What guessing reaches in this metric, the mean over items; None where that has no
            meaning.
        chance_p: Probability that guessing reaches `value` or more: a binomial, one-sided. Exact
            where all items have one chance; at the mean chance of items with different numbers of
            endings, where it is too large above chance, if anything (Hoeffding 1956). Of `icl` it
            is of each question's first order alone, while `value` is over all orders. None as for
            `chance`, and where trials depend on each other: `query_accuracy` of needles has a
            chance and no p.
        details: Other figures of the task, without an interval; under LLM.int8 also
            `float_features_frac`, the share of a linear layer's input features that stayed in
            float, mean over layers and sequences. Of the task's first metric only.
        quantizers: Every quantizer that was installed, by name; of the task's first metric only.
    """

    model: str
    recipe: str
    bits: int
    granularity: str | None
    range: str | None
    weights: int | None
    activations: int | None
    task: str
    metric: str
    value: float
    stderr: float
    ci_low: float
    ci_high: float
    n: int
    seed: int
    hits: int
    group: str = ""
    chance: float | None = None
    chance_p: float | None = None
    details: dict[str, float] = field(default_factory=dict)
    quantizers: dict[str, Fired] = field(default_factory=dict)

    @property
    def chance_verdict(self) -> ChanceVerdict | None:
        """Whether the figure is more than guessing; None where no test was made."""
        if self.chance is None or self.chance_p is None:
            return None
        if self.chance_p <= CHANCE_ALPHA:
            return "above"
        # written so that NaN is open
        return "at" if self.ci_high <= self.chance + CHANCE_REACH else "open"

    @property
    def may_guess(self) -> bool:
        """Whether a test was made and did not reject guessing."""
        return self.chance_verdict in ("at", "open")


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A paired difference of `recipe` minus `against`, with its 95 % interval.

    Attributes:
        against_model: The other model, measured on the same items; empty where it is `model`.
        margin: What the metric may lose for the row still to be level with the other, in the
            metric's units; NaN in files that did not say.
        is_level: Whether the interval rules out a loss of more than `margin` and n is large enough
            for it to mean something; None in files that did not say.
    """

    model: str
    recipe: str
    against: str
    task: str
    metric: str
    value: float
    ci_low: float
    ci_high: float
    n: int
    against_model: str = ""
    margin: float = float("nan")
    is_level: bool | None = None


@dataclass(frozen=True, kw_only=True)
class SeedSpread:
    """Several seeds of one model in one cell: how far apart they are, beside the sampling error.

    Attributes:
        group: What they are called together; `models`: their names.
        mean, sd, low, high: Over the seeds' values; sd with n - 1.
        sampling_stderr: Root mean square of the seeds' own standard errors.
    """

    group: str
    models: list[str]
    recipe: str
    task: str
    metric: str
    mean: float
    sd: float
    low: float
    high: float
    sampling_stderr: float

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> Self:
        """Returns the spread of two or more seeds' cells of one recipe, task and metric."""
        values = [cell.value for cell in cells]
        return cls(
            group=cells[0].group or cells[0].model,
            models=[cell.model for cell in cells],
            recipe=cells[0].recipe,
            task=cells[0].task,
            metric=cells[0].metric,
            mean=mean(values),
            sd=deviation(values),
            low=min(values),
            high=max(values),
            sampling_stderr=math.hypot(*(c.stderr for c in cells)) / math.sqrt(len(cells)),
        )


@dataclass(frozen=True, kw_only=True)
class AttentionMass:
    """Where the token that an answer follows looks: the paper's Table 3, of the float model.

    Mean over samples, questions, layers and heads of the effective attention map's mass on each
    part of the context. `answer`, `needles` (the other ones), `noise` (everything else of the
    context), `first` (the first token) and `question` add up to the row's sum: 1, or 1 - lambda
    for a differential head, whose weights can be negative.

    Attributes:
        depth_frac: Where the asked needle stands, 0 to 1.
        kind: `signed` is the map's own weights, `share` is |weight| over the row's sum of |weight|.
        n: Questions.
    """

    model: str
    task: str
    depth_frac: float
    kind: str
    answer: float
    needles: float
    noise: float
    first: float
    question: float
    n: int


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """A task as it was measured.

    Attributes:
        name: As in `Cell.task`; `metrics`: the first is the one that is looked at first.
        unit: What is resampled: `blocks`, `items`, `samples`, `images`.
        higher_is_better: By metric.
        sha256: Hash of all items, the same for models that were given the same ones.
        shares: Metrics that are shares of something by definition: differences of them are points.
            None in files that did not say.
    """

    name: str
    metrics: list[str]
    unit: str
    higher_is_better: dict[str, bool]
    items: int
    data: DataInfo
    sha256: str
    shares: list[str] | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Sweep(Result):
    """The whole of `sweep.json`; `headline` says the result in one sentence.

    Attributes:
        data: Of the first task and model.
        ranges_sha256: Hash of the ranges, smoothing and kept quantizers that quantized cells read;
            empty where they read none.
        kept: Quantizers that stay in float in every row.
        tasks: Of the first model; one that another was given other items for is named in `notes`.
        notes: One sentence each, e.g. that a task is at chance.
    """

    schema: str = SWEEP_SCHEMA
    models: list[ModelInfo]
    data: DataInfo
    environment: dict[str, str]
    cells: list[Cell]
    deltas: list[Delta] = field(default_factory=list)
    headline: str = ""
    ranges_sha256: str = ""
    kept: list[str] = field(default_factory=list)
    tasks: list[TaskInfo] = field(default_factory=list)
    spreads: list[SeedSpread] = field(default_factory=list)
    attention_mass: list[AttentionMass] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    OLDER: ClassVar[tuple[str, ...]] = ("quantkit.sweep/1", "quantkit.sweep/2", "quantkit.sweep/3")
    """Schemas that are read too; what they lack has its default."""
