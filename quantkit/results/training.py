"""`training.json`: matched models that were trained, what on, and how their outliers grew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quantkit.results.result import Result

TRAINING_SCHEMA: Final = "quantkit.training/1"
TRAINED_MODEL_SCHEMA: Final = "quantkit.trained-model/1"


@dataclass(frozen=True, kw_only=True)
class SourceInfo:
    """One source of text after it was read.

    Attributes:
        documents, bytes: What is left of it after deduplication, held-out part included.
        duplicates: Paragraphs that repeat an earlier or a held-out one, left out.
        held_out: Documents that no arm is trained on.
        tokens: Of its part that is trained on.
    """

    source: str
    sha256: str
    licence: str
    documents: int
    bytes: int
    duplicates: int
    held_out: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """The rows that all arms are trained on.

    Attributes:
        rows: Of `context` tokens; `text_rows`, `needles_rows`, `icl_rows` of them by kind.
        held_out_rows: Of held-out text.
        tokenizer_sha256, rows_sha256, held_out_sha256: Of the files.
    """

    sources: list[SourceInfo]
    context: int
    vocabulary: int
    rows: int
    text_rows: int
    needles_rows: int
    icl_rows: int
    held_out_rows: int
    tokenizer_sha256: str
    rows_sha256: str
    held_out_sha256: str


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One model at one step, on held-out rows (the same at every step and for every arm).

    Attributes:
        tokens: That it has been trained on.
        loss: Mean negative log-likelihood a token, nats, in float32 with unquantized logits.
        quantized_loss: The same by recipe of the logits, e.g. `logits4:row`.
        max_logit, abs_max_logit: Signed and absolute, over all layers, maps and valid positions.
        abs_max_hidden: The largest |x| of the layers' outputs; `kurtosis`: the largest of the
            layers' pooled ones (Pearson); `inf_norm_mean`: the largest of the layers'.
        accuracies: Of generated tasks by name, unquantized: e.g. `needles`, `icl`.
        quantized_accuracies: `TASK RECIPE` -> accuracy.
        lambdas: Per layer; empty for a baseline.
    """

    step: int
    tokens: int
    loss: float
    quantized_loss: dict[str, float]
    max_logit: float
    abs_max_logit: float
    abs_max_hidden: float
    kurtosis: float
    inf_norm_mean: float
    accuracies: dict[str, float]
    quantized_accuracies: dict[str, float]
    lambdas: list[float]


@dataclass(frozen=True, kw_only=True)
class LossPoint:
    """Mean training loss (nats a token) of the steps since the point before."""

    step: int
    loss: float
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """One arm of one seed.

    Attributes:
        schema: Of `model.json`, which holds this one alone.
        folder: Relative to the file; a transformers folder with its tokenizer.
        sha256: Of `model.safetensors`, in float16; empty until it is written.
        parameters: Tied ones once.
        seconds: Of the steps alone, over all sittings; `tokens_per_second` goes with it.
        finished: Whether it went through all steps.
    """

    schema: str = TRAINED_MODEL_SCHEMA
    arm: str
    seed: int
    architecture: str
    parameters: int
    folder: str
    sha256: str
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    finished: bool
    losses: list[LossPoint]
    measurements: list[Measurement]


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingResult(Result):
    """A finished (or interrupted) `quantkit train`.

    Attributes:
        pair: PAIR.toml's fields, e.g. `sizes.layers` -> `4`.
        processes: That shared each batch.
        environment: Versions and processor of the last sitting.
    """

    schema: str = TRAINING_SCHEMA
    name: str
    pair: dict[str, str]
    corpus: CorpusInfo
    models: list[TrainedModel]
    processes: int
    environment: dict[str, str]
