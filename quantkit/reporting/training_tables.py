"""The tables of trainings: the models, the growth of their outliers, the text, the settings."""

from __future__ import annotations

from quantkit.reporting.text import NOT_AVAILABLE, Table, duration, number
from quantkit.reporting.training_groups import (
    BASELINE_ARM,
    by_arm,
    figures,
    last,
    spaced,
)
from quantkit.results import TrainedModel, TrainingResult

_ROWS = 8
"""Steps of a model in the table of growth, about."""


def models_table(result: TrainingResult) -> Table:
    """Returns a row a model: arm, seed, size, how far and how fast, where it stands."""
    arms = by_arm(result)
    bases = {model.seed: model.parameters for model in arms.get(BASELINE_ARM, [])}
    rows = []
    for arm, models in arms.items():
        for model in models:
            end = last(model)
            rows.append(
                (
                    arm, str(model.seed), _progress(model, result),
                    number(model.parameters), _beside(model, bases), number(model.tokens),
                    NOT_AVAILABLE if end is None else number(end.loss),
                    NOT_AVAILABLE if end is None else number(end.abs_max_logit),
                    number(round(model.tokens_per_second)), duration(model.seconds),
                )
            )  # fmt: skip
    return Table(
        title=f"Models of the training {result.name}",
        columns=(
            "arm", "seed", "steps", "parameters", "against baseline", "tokens", "loss",
            "max |logit|", "tokens/s", "time",
        ),
        rows=tuple(rows),
        text_columns=3,
        note="Loss in nats a token and max |logit| on the training's own held-out text, as last "
        "measured: not the text of the tables of outliers; the time is that of the steps alone"
        + (f", over {result.processes} processes." if result.processes > 1 else "."),
    )  # fmt: skip


def _progress(model: TrainedModel, result: TrainingResult) -> str:
    if model.finished:
        return f"{model.steps:,}"
    asked = result.pair.get("training.steps", "")
    of = f" of {int(asked):,}" if asked.isdigit() else ""
    return f"{model.steps:,}{of}, unfinished"


def _beside(model: TrainedModel, bases: dict[int, int]) -> str:
    """Returns how many more parameters than the baseline of the same seed, in percent."""
    base = bases.get(model.seed)
    if base is None or model.arm == BASELINE_ARM:
        return ""
    return f"{100 * (model.parameters / base - 1):+.3f} %"


def growth_table(result: TrainingResult) -> Table:
    """Returns the growth of every model at a few steps, the first and the last among them."""
    grown = figures(result)
    rows = []
    for arm, models in by_arm(result).items():
        for model in models:
            for found in {found.step: found for found in spaced(model, _ROWS)}.values():
                values = (number(figure.of(found)) for figure in grown)
                rows.append((arm, str(model.seed), number(found.step), *values))
    return Table(
        title="Growth over the training, on the same held-out rows",
        columns=("arm", "seed", "step", *(figure.words for figure in grown)),
        rows=tuple(rows),
        text_columns=2,
        note="Loss in nats a token; the kurtosis is Pearson's (a Gaussian has 3), the largest of "
        "the layers.",
    )


def corpus_table(result: TrainingResult) -> Table:
    """Returns a row a source of text."""
    rows = tuple(
        (
            one.source, one.licence or NOT_AVAILABLE, one.sha256[:16] or NOT_AVAILABLE,
            number(one.documents), number(one.held_out), number(one.duplicates),
            f"{one.bytes / 1e6:,.2f}", number(one.tokens),
        )
        for one in result.corpus.sources
    )  # fmt: skip
    corpus = result.corpus
    kinds = [
        f"{count:,} of {words}"
        for count, words in (
            (corpus.text_rows, "text"),
            (corpus.needles_rows, "generated retrieval"),
            (corpus.icl_rows, "generated many-shot sequences"),
        )
        if count
    ]
    return Table(
        title="The text that all arms are trained on",
        columns=(
            "source", "licence", "sha256", "documents", "held out", "duplicates left out", "MB",
            "tokens",
        ),
        rows=rows,
        text_columns=3,
        note=f"{corpus.rows:,} rows of {corpus.context:,} tokens ({', '.join(kinds) or 'none'}), "
        f"{corpus.held_out_rows:,} rows of held-out text; a vocabulary of {corpus.vocabulary:,}. "
        f"sha256 of the tokenizer {_short(corpus.tokenizer_sha256)}, of the rows "
        f"{_short(corpus.rows_sha256)}, of the held-out ones {_short(corpus.held_out_sha256)}.",
    )  # fmt: skip


def _short(digest: str) -> str:
    return digest[:16] or NOT_AVAILABLE


def settings_table(result: TrainingResult) -> Table:
    """Returns the fields of PAIR.toml, then the environment."""
    return Table(
        title="Settings and environment of the training",
        columns=("what", "value"),
        rows=(*result.pair.items(), *result.environment.items()),
        text_columns=2,
    )


def weights_table(result: TrainingResult) -> Table:
    """Returns where each model lies, and the hash of its weights."""
    return Table(
        title="Weights",
        columns=("arm", "seed", "class", "folder", "sha256"),
        rows=tuple(
            (arm, str(model.seed), model.architecture, model.folder, model.sha256)
            for arm, models in by_arm(result).items()
            for model in models
        ),
        text_columns=5,
    )
