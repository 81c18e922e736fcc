"""From what was seen to `Stats`: every group of every point, and the summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quantkit.numerics.observers import Bundle, merged
from quantkit.outliers.activations import ActivationStatistics
from quantkit.outliers.attention import EFFECTIVE, LOGIT, MODIFIED, UNMASKED, AttentionStatistics
from quantkit.outliers.features import (
    have_one_width,
    outlier_features_of,
    outlier_tokens_of,
    rounded,
    surfaces_of,
)
from quantkit.outliers.figures import figures, span_shares
from quantkit.outliers.maps import MapRecord
from quantkit.outliers.rules import massive_pooled
from quantkit.outliers.statistics import HIDDEN, ModelStatistics
from quantkit.probes.places import unpack
from quantkit.results import (
    DataInfo,
    DifferentialLayer,
    GroupStats,
    MassiveActivations,
    ModelInfo,
    PointSummary,
    ProbeHits,
    Stats,
    StatsSummary,
    TopEntry,
)
from quantkit.results.environment import environment

LOGIT_DEFINITION: Final = (
    "attention logit: scale * q.k after RoPE and the model's own scale, before the mask, softcap "
    "and position bias; masked positions are left out"
)
LOGIT_DEFINITION_MASKED: Final = (
    "attention logit, masked positions counted too: all of QK^T, the paper's reading"
)
STATE_DEFINITION: Final = "hidden state: output of each layer, after both residual additions"
_ENTRIES: Final = 10

TokenText = Callable[[str, int, int], str | None]
"""The text of the token at (side, sequence, position), where there is one.

The side is `decoder` in the decoder of an encoder-decoder, else `text`.
"""


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Turns what was seen into the parts of `Stats`.

    Attributes:
        token: Looks up the text of a token.
        quantiles: Of |x|, fractions; beside the median.
        count_masked: What the logits' definition says.
        two_sides: The model is an encoder-decoder.
    """

    statistics: ModelStatistics
    token: TokenText
    quantiles: Sequence[float] = ()
    count_masked: bool = False
    two_sides: bool = False

    def summary(self) -> StatsSummary:
        """Returns the figures that a report opens with."""
        attention = self.statistics.attention
        states = self.statistics.activations[HIDDEN]
        records = [attention.maps[LOGIT, *slot] for slot in attention.slots(LOGIT)]
        definition = LOGIT_DEFINITION_MASKED if self.count_masked else LOGIT_DEFINITION
        unmasked = [attention.maps[UNMASKED, *slot] for slot in attention.slots(UNMASKED)]
        return StatsSummary(
            attention_logit=self._point(
                [record.pooled for record in records],
                sum(record.excluded for record in records),
                attention.inf_norm.mean,
                definition,
            ),
            hidden_state=self._point(
                [record.pooled for record in states.records.values()],
                sum(record.excluded for record in states.records.values()),
                states.inf_norm.mean,
                STATE_DEFINITION,
            ),
            sink_rate=attention.sink_rate,
            massive_activations=self._massive(states),
            outlier_features=outlier_features_of(states),
            outlier_tokens=outlier_tokens_of(states, self._token_of),
            attention_entropy=_mean_entropy(attention),
            attention_logit_unmasked=(
                self._point(
                    [record.pooled for record in unmasked],
                    sum(record.excluded for record in unmasked),
                    float("nan"),
                    LOGIT_DEFINITION_MASKED,
                )
                if unmasked
                else None
            ),
        )

    def points(self) -> dict[str, list[GroupStats]]:
        """Returns the full set of every point, per layer, head, map and token class."""
        attention = self.statistics.attention
        found: dict[str, list[GroupStats]] = {}
        for point in (LOGIT, MODIFIED):
            if attention.slots(point):
                found[point] = list(self._map_groups(point))
        if attention.effective:
            found[EFFECTIVE] = list(self._effective_groups())
        for point, statistics in self.statistics.activations.items():
            found[point] = list(self._activation_groups(statistics))
        return found

    def differential(self) -> list[DifferentialLayer]:
        """Returns lambda and the effective map's row sums, one entry a differential layer."""
        return [
            DifferentialLayer(
                layer=layer,
                lambda_mean=float(record.lambdas[0] / record.lambdas[1]),
                lambda_min=float(record.lambdas[2]),
                lambda_max=float(record.lambdas[3]),
                row_sum=float(record.row_sum.sum() / record.rows.sum()),
                negative_frac=float(record.negative.sum() / record.weights.sum()),
            )
            for layer, record in sorted(self.statistics.attention.effective.items())
        ]

    def hits(self) -> list[ProbeHits]:
        """Returns the proof of execution of every probe."""
        return [
            ProbeHits(point=point, name=name, calls=calls, elements=elements)
            for point, modules in self.statistics.hits.items()
            for name, (calls, elements) in modules.items()
        ]

    def stats(
        self,
        model: ModelInfo,
        data: DataInfo,
        *,
        rows: int | None,
        seed: int,
        processes: int,
        allow_unseen: Sequence[str],
        waived: Sequence[str],
    ) -> Stats:
        """Returns the whole of `stats.json`."""
        warnings = [*self.statistics.nonfinite(), *self.statistics.notes]
        if not have_one_width(self.statistics.activations[HIDDEN]):
            warnings.append("outlier features are not counted: the layers have several widths.")
        return Stats(
            model=model,
            data=data,
            environment=environment(),
            summary=self.summary(),
            points=self.points(),
            sampled_rows=rows,
            seed=seed,
            processes=processes,
            differential=self.differential(),
            hits=self.hits(),
            allow_unseen=list(allow_unseen),
            waived=list(waived),
            warnings=warnings,
            surfaces=surfaces_of(self.statistics.activations, self._token_of),
        )

    def _point(
        self, bundles: list[Bundle], excluded: int, inf_norm_mean: float, definition: str
    ) -> PointSummary:
        bundle = merged([part.pool() for part in bundles])
        (shared,) = figures(bundle, self.quantiles)
        return PointSummary(
            **shared,
            excluded=excluded,
            inf_norm_mean=inf_norm_mean,
            definition=definition,
            median_relative_error=float(bundle.histogram.relative_error),
        )

    def _map_groups(self, point: str) -> Iterator[GroupStats]:
        attention = self.statistics.attention
        slots = attention.slots(point)
        for layer, map_ in slots:
            record = attention.maps[point, layer, map_]
            extra: list[dict[str, Any]] = [{} for _ in range(len(record.entropy))]
            if point == LOGIT and map_ == 1 and not attention.effective:
                self._add_sinks(extra, layer)
            yield from self._record_groups(record, layer, map_, attention.names[layer], extra)
        maps = sorted({map_ for _, map_ in slots})
        for map_ in maps if len(maps) > 1 else []:
            records = [attention.maps[point, layer, m] for layer, m in slots if m == map_]
            yield from self._pooled_groups(_class_bundles(records), map_)
        records = [attention.maps[point, layer, map_] for layer, map_ in slots]
        yield from self._pooled_groups(_class_bundles(records), None)

    def _add_sinks(self, fields: list[dict[str, Any]], layer: int) -> None:
        """Adds to each head's fields how much its layer attends to the first token."""
        sinks = self.statistics.attention.sinks.get(layer)
        for head, of_head in enumerate(fields if sinks is not None else []):
            assert sinks is not None
            sequences = float(sinks.sequences[head]) or float("nan")
            of_head["first_token_attention"] = float(sinks.share[head]) / sequences
            of_head["sink_rate"] = float(sinks.above[head]) / sequences

    def _side(self, name: str | None) -> str:
        """Returns which of an encoder-decoder's two token sequences a module reads."""
        is_decoder = name is not None and f".{name}".find(".decoder.") >= 0
        return "decoder" if is_decoder and self.two_sides else "text"

    def _effective_groups(self) -> Iterator[GroupStats]:
        attention = self.statistics.attention
        for layer, effective in sorted(attention.effective.items()):
            extra: list[dict[str, Any]] = [
                {
                    "negative_frac": float(effective.negative[head] / effective.weights[head]),
                    "row_sum": float(effective.row_sum[head] / effective.rows[head]),
                }
                for head in range(len(effective.rows))
            ]
            self._add_sinks(extra, layer)
            name = attention.names[layer]
            yield from self._record_groups(effective.map, layer, None, name, extra)
        records = [record.map for record in attention.effective.values()]
        yield from self._pooled_groups(_class_bundles(records), None)

    def _record_groups(
        self,
        record: MapRecord,
        layer: int,
        map_: int | None,
        name: str,
        extra: list[dict[str, Any]],
    ) -> Iterator[GroupStats]:
        """Yields the groups of one layer and map: each head, then all of them."""
        entropy = record.entropy
        for token_class, bundle in _with_all(record.classes, record.pooled).items():
            is_all = token_class == "all"
            spans = span_shares(bundle)
            for head, shared in enumerate(figures(bundle, self.quantiles)):
                fields: dict[str, Any] = {}
                if is_all:
                    fields = {
                        "inf_norm_mean": float(record.means.inf_norm_mean[head]),
                        "kurtosis_oft": float(record.means.kurtosis_oft[head]),
                        "entropy": float(entropy[head]) if record.entropy_rows[head] else None,
                        "top": self._entries(bundle, head, layer, name, count=1, is_key=True),
                        **extra[head],
                    }
                yield GroupStats(
                    layer=layer,
                    head=head,
                    map=map_,
                    token_class=token_class,  # type: ignore[arg-type]  # "all" and keys of classes
                    name=name,
                    span_999_frac=spans[head],
                    **shared,
                    **fields,
                )
        yield from self._pooled_groups(record.classes, map_, layer=layer, name=name)

    def _pooled_groups(
        self,
        classes: dict[str, Bundle],
        map_: int | None,
        *,
        layer: int | None = None,
        name: str | None = None,
    ) -> Iterator[GroupStats]:
        """Yields one group a token class, over all heads."""
        for token_class, bundle in _with_all(classes, merged(list(classes.values()))).items():
            pooled = bundle.pool()
            (shared,) = figures(pooled, self.quantiles)
            yield GroupStats(
                layer=layer,
                head=None,
                map=map_,
                token_class=token_class,  # type: ignore[arg-type]  # "all" and keys of classes
                name=name,
                span_999_frac=span_shares(pooled)[0],
                **shared,
            )

    def _activation_groups(self, statistics: ActivationStatistics) -> Iterator[GroupStats]:
        for layer, record in sorted(statistics.records.items()):
            for token_class, bundle in _with_all(record.classes, record.pooled).items():
                (shared,) = figures(bundle, self.quantiles)
                fields: dict[str, Any] = {}
                if token_class == "all":
                    fields = {
                        "inf_norm_mean": float(record.means.inf_norm_mean[0]),
                        "kurtosis_oft": float(record.means.kurtosis_oft[0]),
                        "channel_absmax": rounded(record.channel_top.tolist()),
                        "channel_ratio": record.channel_ratio,
                        "top": self._entries(
                            bundle, 0, layer, statistics.names[layer], count=_ENTRIES, is_key=False
                        ),
                    }
                yield GroupStats(
                    layer=layer,
                    head=None,
                    map=None,
                    token_class=token_class,  # type: ignore[arg-type]  # "all" and keys of classes
                    name=statistics.names[layer],
                    span_999_frac=span_shares(bundle)[0],
                    **shared,
                    **fields,
                )
        classes = [record.classes for record in statistics.records.values()]
        pooled = {name: merged([part[name] for part in classes]) for name in classes[0]}
        yield from self._pooled_groups(pooled, None)

    def _massive(self, states: ActivationStatistics) -> MassiveActivations:
        rules = [record.rules for record in states.records.values() if record.rules is not None]
        top = sorted((entry for rule in rules for entry in rule.massive_top), reverse=True)
        return MassiveActivations(
            count=sum(rule.massive for rule in rules),
            count_pooled=sum(massive_pooled(record.pooled) for record in states.records.values()),
            entries=[
                self._state_entry(value, layer, tag, self._side(states.names[layer]))
                for _, value, layer, tag in top[:20]
            ],
        )

    def _token_of(self, name: str, sequence: int, position: int) -> str | None:
        """Returns the text of a token of the sequence that a module reads."""
        return self.token(self._side(name), sequence, position)

    def _entries(
        self, bundle: Bundle, group: int, layer: int, name: str, *, count: int, is_key: bool
    ) -> list[TopEntry]:
        side = key_side = self._side(name)
        if layer in self.statistics.attention.cross:
            key_side = "text"  # the keys are the encoder's
        found = []
        for rank in range(min(count, int((bundle.topk.values[group] >= 0).sum()))):
            value = float(bundle.topk.signed[group, rank])
            tag = int(bundle.topk.tags[group, rank])
            if not is_key:
                found.append(self._state_entry(value, layer, tag, side))
                continue
            sequence, position, key = unpack(tag)
            found.append(
                TopEntry(
                    value=value,
                    sequence=sequence,
                    position=position,
                    key=key,
                    token=self.token(key_side, sequence, key),
                    query_token=self.token(side, sequence, position),
                )
            )
        return found

    def _state_entry(self, value: float, layer: int, tag: int, side: str) -> TopEntry:
        sequence, position, channel = unpack(tag)
        return TopEntry(
            value=value,
            layer=layer,
            sequence=sequence,
            position=position,
            channel=channel,
            token=self.token(side, sequence, position),
        )


def _with_all(classes: dict[str, Bundle], pooled: Bundle) -> dict[str, Bundle]:
    """Returns "all" (pooled over the classes) and the two classes that are reported."""
    return {"all": pooled, "first": classes["first"], "others": classes["others"]}


def _class_bundles(records: Sequence[MapRecord]) -> dict[str, Bundle]:
    """Returns each class over several layers and all their heads."""
    return {
        name: merged([record.classes[name].pool() for record in records])
        for name in records[0].classes
    }


def _mean_entropy(attention: AttentionStatistics) -> float:
    """Returns nats, over all rows, heads and maps, of the logits the softmax was taken of."""
    point = MODIFIED if attention.slots(MODIFIED) else LOGIT
    records = [attention.maps[point, *slot] for slot in attention.slots(point)]
    rows = sum(int(record.entropy_rows.sum()) for record in records)
    total = sum(float(record.entropy_sum.sum()) for record in records)
    return total / rows if rows else float("nan")
