"""batches x probes x observers -> `Stats`.

Memory: one batch's activations, one tile of logits, and observers of fixed size (about 0.2 MB a
head and class); it does not grow with the number of samples, and linearly with their length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from quantkit.calib_sets import TokenSlice
from quantkit.errors import InputError, ProbeError
from quantkit.models import LoadedModel, attention_modules, backbone, differential_lambda
from quantkit.numerics.outliers import outlier_features
from quantkit.outliers.attention import CLASSES as LOGIT_CLASSES
from quantkit.outliers.attention import LogitStatistics
from quantkit.outliers.bundle import Bundle, figures, merged
from quantkit.outliers.hidden import CLASSES as STATE_CLASSES
from quantkit.outliers.hidden import HiddenStatistics
from quantkit.outliers.places import unpack
from quantkit.probes import attach
from quantkit.progress import Progress, silent
from quantkit.results import (
    GroupStats,
    MassiveActivations,
    OutlierFeatures,
    PointSummary,
    Stats,
    StatsSummary,
    TopEntry,
)
from quantkit.results.environment import environment

LOGIT_DEFINITION = (
    "attention logit: scale * q.k after RoPE and the model's own scale, before the mask, softcap "
    "and position bias; masked positions are left out"
)
LOGIT_DEFINITION_MASKED = (
    "attention logit, masked positions counted too: all of QK^T, the paper's reading"
)
STATE_DEFINITION = "hidden state: output of each decoder layer, after both residual additions"
_ENTRIES = 10


def collect(
    loaded: LoadedModel,
    text: TokenSlice,
    *,
    batch_size: int = 4,
    count_masked: bool = False,
    progress: Progress = silent,
) -> Stats:
    """Returns outlier statistics of attention logits and hidden states of one model on one text.

    Only the backbone runs: vocabulary logits, the largest tensor of a forward, are never made.
    Time: about three plain forward passes; it grows as a forward does.

    Args:
        count_masked: Count every entry of QK^T, masked ones too, as the DIFF paper's Table 5 does.

    Raises:
        ProbeError: a layer that no probe saw.
        InputError: NaN or inf in an activation, naming the layer.
    """
    model = loaded.model
    layers = attention_modules(model)
    is_differential = loaded.info().maps == 2
    logits = LogitStatistics(
        lambdas=[differential_lambda(module) for _, module in layers] if is_differential else []
    )
    states = HiddenStatistics()
    inf_norms = {"attention_logit": 0.0, "hidden_state": 0.0}
    points: dict[str, Callable[[Any], None]] = {
        "attention_logit": logits.see,
        "hidden_state": states.see,
    }
    batches = math.ceil(text.sequences / batch_size)
    with torch.inference_mode(), attach(model, points, count_masked=count_masked):
        for done, batch in enumerate(text.batches(batch_size)):
            progress(f"statistics of {loaded.name}", done, batches)
            for statistics in (logits, states):
                statistics.first_sequence = batch.first_sequence
                statistics.batch_inf_norm = None
            backbone(model)(
                input_ids=batch.input_ids.to(model.device),
                attention_mask=batch.attention_mask.to(model.device),
                use_cache=False,
            )
            for point, statistics in (("attention_logit", logits), ("hidden_state", states)):
                if statistics.batch_inf_norm is None:
                    raise ProbeError(f"no {point} was seen in {loaded.name}")
                inf_norms[point] += float(statistics.batch_inf_norm.double().sum())
    progress(f"statistics of {loaded.name}", batches, batches)
    _refuse_nonfinite(logits, states)
    return _assemble(loaded, text, batch_size, count_masked, logits, states, inf_norms)


def _refuse_nonfinite(logits: LogitStatistics, states: HiddenStatistics) -> None:
    named: list[tuple[str, Bundle]] = [
        (f"attention logits of layer {layer}, map {map_}", logits.pooled_classes(layer, map_))
        for layer, map_ in logits.layers()
    ]
    named += [
        (f"hidden state of layer {layer}", states.pooled_classes(layer))
        for layer in states.inf_norm
    ]
    for name, bundle in named:
        bad = int(bundle.minmax.nan_count.sum()) + int(bundle.minmax.inf_count.sum())
        if bad:
            raise InputError(
                f"{name} holds {bad} NaN or inf values: expected finite ones. Check the weights, "
                "or use --dtype float32 if the model ran in 16 bits."
            )


def _assemble(
    loaded: LoadedModel,
    text: TokenSlice,
    batch_size: int,
    count_masked: bool,
    logits: LogitStatistics,
    states: HiddenStatistics,
    inf_norms: dict[str, float],
) -> Stats:
    sequences = text.sequences
    by_layer = {slot: logits.pooled_classes(*slot) for slot in logits.layers()}
    all_logits = merged([bundle.pool() for bundle in by_layer.values()])
    all_states = merged([states.pooled_classes(layer) for layer in sorted(states.inf_norm)])
    definition = LOGIT_DEFINITION_MASKED if count_masked else LOGIT_DEFINITION
    summary = StatsSummary(
        attention_logit=_summary(
            all_logits, logits.excluded, inf_norms["attention_logit"] / sequences, definition
        ),
        hidden_state=_summary(
            all_states, states.excluded, inf_norms["hidden_state"] / sequences, STATE_DEFINITION
        ),
        sink_rate=logits.sink_rate,
        massive_activations=MassiveActivations(
            count=states.massive,
            count_pooled=states.massive_pooled(),
            entries=[_state_entry(loaded, text, *entry[1:]) for entry in states.massive_top],
        ),
        outlier_features=_features(states, text.tokens),
    )
    return Stats(
        model=loaded.info(),
        data=text.info(batch_size),
        environment=environment(),
        summary=summary,
        points={
            "attention_logit": _logit_groups(loaded, text, logits),
            "hidden_state": _state_groups(loaded, text, states),
        },
    )


def _summary(bundle: Bundle, excluded: int, inf_norm_mean: float, definition: str) -> PointSummary:
    shared: dict[str, Any] = figures(bundle, 0)
    return PointSummary(
        **shared,
        excluded=excluded,
        inf_norm_mean=inf_norm_mean,
        abs_max=shared["abs_top"]["1"],
        definition=definition,
        median_relative_error=float(bundle.histogram.relative_error),
    )


def _features(states: HiddenStatistics, tokens: int) -> OutlierFeatures:
    counts = torch.stack([states.feature_counts[layer] for layer in sorted(states.feature_counts)])
    shares = outlier_features(counts, tokens)
    channels = [int(channel) for channel in shares.is_outlier.nonzero()[:, 0]]
    return OutlierFeatures(
        channels=channels,
        count=len(channels),
        layer_share=[float(shares.layer_frac[channel]) for channel in channels],
        position_share=[float(shares.position_frac[channel]) for channel in channels],
    )


def _logit_groups(
    loaded: LoadedModel, text: TokenSlice, logits: LogitStatistics
) -> list[GroupStats]:
    groups = []
    for layer, map_ in logits.layers():
        parts = {
            "all": logits.pooled_classes(layer, map_),
            **{name: logits.bundles[layer, map_, name] for name in LOGIT_CLASSES[1:]},
        }
        mean = logits.inf_norm[layer, map_] / text.sequences
        for token_class, bundle in parts.items():
            for head in range(bundle.minmax.groups):
                shared: dict[str, Any] = figures(bundle, head)
                groups.append(
                    GroupStats(
                        layer=layer,
                        head=head,
                        map=map_,
                        token_class=token_class,  # type: ignore[arg-type]  # keys of `parts`
                        inf_norm_mean=float(mean[head]) if token_class == "all" else None,
                        top=(
                            _entries(loaded, text, bundle, head, layer, count=1, is_key=True)
                            if token_class == "all"
                            else []
                        ),
                        **shared,
                    )
                )
    return groups


def _state_groups(
    loaded: LoadedModel, text: TokenSlice, states: HiddenStatistics
) -> list[GroupStats]:
    groups = []
    for layer in sorted(states.inf_norm):
        parts = {
            "all": states.pooled_classes(layer),
            **{name: states.bundles[layer, name] for name in STATE_CLASSES},
        }
        for token_class, bundle in parts.items():
            is_all = token_class == "all"
            shared: dict[str, Any] = figures(bundle, 0)
            groups.append(
                GroupStats(
                    layer=layer,
                    head=None,
                    map=None,
                    token_class=token_class,  # type: ignore[arg-type]  # keys of `parts`
                    inf_norm_mean=states.inf_norm[layer] / text.sequences if is_all else None,
                    top=(
                        _entries(loaded, text, bundle, 0, layer, count=_ENTRIES, is_key=False)
                        if is_all
                        else []
                    ),
                    **shared,
                )
            )
    return groups


def _entries(
    loaded: LoadedModel,
    text: TokenSlice,
    bundle: Bundle,
    group: int,
    layer: int,
    *,
    count: int,
    is_key: bool,
) -> list[TopEntry]:
    found = []
    for rank in range(min(count, int(bundle.minmax.count[group]))):
        value = float(bundle.topk.signed[group, rank])
        tag = int(bundle.topk.tags[group, rank])
        if is_key:
            sequence, position, key = unpack(tag)
            token = _token(loaded, text, sequence, key)
            found.append(
                TopEntry(value=value, sequence=sequence, position=position, key=key, token=token)
            )
        else:
            found.append(_state_entry(loaded, text, value, layer, tag))
    return found


def _state_entry(
    loaded: LoadedModel, text: TokenSlice, value: float, layer: int, tag: int
) -> TopEntry:
    sequence, position, channel = unpack(tag)
    return TopEntry(
        value=value,
        layer=layer,
        sequence=sequence,
        position=position,
        channel=channel,
        token=_token(loaded, text, sequence, position),
    )


def _token(loaded: LoadedModel, text: TokenSlice, sequence: int, position: int) -> str | None:
    """Returns the text of one token; slices are padded on the right, so positions are indices."""
    if loaded.tokenizer is None or position >= len(text.ids[sequence]):
        return None  # padding is seen where masked entries are asked for
    return str(loaded.tokenizer.decode([int(text.ids[sequence][position])]))
