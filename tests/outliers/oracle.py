"""A second implementation of the statistics: it stores everything and shares no code with ours.

`Stored` holds what a model computed for each sequence alone, without padding, as float64 numpy;
`check` compares with it every group and every figure of a summary. What a figure is, is written
here again, from the definitions in design.md and the docstrings of `quantkit.results.stats`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quantkit.calib_sets import TokenSlice
from quantkit.calib_sets.text import TokenBatch
from quantkit.models import LoadedModel
from quantkit.models.differential import DiffDecoder, DiffSizes
from quantkit.outliers import collect
from quantkit.results import Stats

RANKS = (1, 2, 3, 10, 100)
QUANTILES = (0.99, 0.999)
CLASSES = ("all", "first", "others")
BIN = 2**-8  # relative error of a histogram with 7 bits of mantissa
LENGTHS = (150, 3, 40, 9, 71)


@dataclass(kw_only=True)
class Stored:
    """Everything of some sequences, each run alone and without padding.

    Attributes:
        logits: By sequence, layer and (map, head): float64 `[query, key]`, masked ones included.
        states: By sequence and layer: float64 `[position, channel]`.
        window: Sliding window, or None.
        lambdas: By sequence and layer, for differential attention: `[head or 1, query or 1]`.
        softcap: Of attention logits, or None.
        rows: By sequence, the query rows that moments, histogram and entropy are of; None: all.
    """

    logits: list[list[dict[tuple[int, int], np.ndarray]]]
    states: list[list[np.ndarray]]
    window: int | None = None
    lambdas: list[list[np.ndarray]] = field(default_factory=list)
    softcap: float | None = None
    rows: list[np.ndarray] | None = None

    @property
    def layers(self) -> int:
        return len(self.states[0])

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """The (map, head) pairs of a layer."""
        return sorted(self.logits[0][0])

    @property
    def maps(self) -> list[int]:
        return sorted({map_ for map_, _ in self.heads})

    def length(self, sequence: int) -> int:
        return len(self.states[sequence][0])

    def mask(self, length: int) -> np.ndarray:
        """Which (query, key) a causal, maybe windowed, model sees."""
        distance = np.arange(length)[:, None] - np.arange(length)
        return (distance >= 0) & (self.window is None or distance < self.window)

    def matrix(self, point: str, sequence: int, layer: int, map_: int, head: int) -> np.ndarray:
        """The values of one point, `[query, key]`, masked ones included (0 in an effective map)."""
        logits = self.logits[sequence][layer]
        if point == "effective_map":
            factor = self.lambdas[sequence][layer]
            factor = factor[head if len(factor) > 1 else 0][:, None]
            return self.softmax(logits[1, head]) - factor * self.softmax(logits[2, head])
        values = logits[map_, head]
        return values if point == "attention_logit" else self.capped(values)

    def capped(self, logits: np.ndarray) -> np.ndarray:
        """The logits that the softmax is taken of."""
        if self.softcap is None:
            return logits
        return self.softcap * np.tanh(logits / self.softcap)

    def softmax(self, logits: np.ndarray) -> np.ndarray:
        masked = np.where(self.mask(len(logits)), self.capped(logits), -np.inf)
        weights = np.exp(masked - masked.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True)

    def slots(
        self, point: str, layer: int | None, map_: int | None, head: int | None
    ) -> Iterator[tuple[int, int, int]]:
        """The (layer, map, head) that a group is over; an effective map stands under map 1."""
        for n in range(self.layers):
            for m, h in self.heads:
                skips = point == "effective_map" and m != 1
                if layer in (None, n) and map_ in (None, m) and head in (None, h) and not skips:
                    yield n, m, h

    def entries(
        self,
        point: str,
        layer: int | None,
        map_: int | None,
        head: int | None,
        token_class: str,
        *,
        sampled: bool = False,
        sequences: Sequence[int] | None = None,
    ) -> np.ndarray:
        """All valid elements of a group; with `sampled` those of the sampled rows."""
        parts = []
        for sequence in range(len(self.logits)) if sequences is None else sequences:
            seen = self.mask(self.length(sequence))
            if token_class != "all":
                seen[0, 0] = False
            if token_class == "first":
                seen[:, 1:] = False
            if token_class == "others":
                seen[:, 0] = False
            if sampled and self.rows is not None:
                kept = np.zeros(len(seen), dtype=bool)
                kept[self.rows[sequence]] = True
                seen &= kept[:, None]
            for slot in self.slots(point, layer, map_, head):
                parts.append(self.matrix(point, sequence, *slot)[seen])
        return np.concatenate(parts)

    def row_entropies(self, point: str, layer: int, map_: int, head: int) -> np.ndarray:
        """Nats of each query row: of the softmax, or of |a| / sum |a|."""
        found = []
        for sequence in range(len(self.logits)):
            if point == "effective_map":
                shares = np.abs(self.matrix(point, sequence, layer, map_, head))
                shares /= shares.sum(1, keepdims=True)
            else:
                shares = self.softmax(self.logits[sequence][layer][map_, head])
            logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
            is_all = self.rows is None or point == "effective_map"  # whose rows all go by anyway
            rows = slice(None) if is_all else self.rows[sequence]
            found.append(-(shares * logs).sum(1)[rows])
        return np.concatenate(found)

    def first_token(self, layer: int, head: int) -> np.ndarray:
        """Mean share of the first token over queries 1 to 63, by sequence of two or more."""
        found = []
        for sequence in range(len(self.logits)):
            if self.lambdas:
                attention = self.matrix("effective_map", sequence, layer, 1, head)
            else:
                attention = self.softmax(self.logits[sequence][layer][1, head])
            size = np.abs(attention[1:64])
            if len(size):
                found.append((size[:, 0] / size.sum(1)).mean())
        return np.array(found)

    def sink_rate(self) -> float:
        """Share of (sequence, layer, head) with a mean share of the first token above 0.3."""
        shares = [
            self.first_token(n, h) for n in range(self.layers) for m, h in self.heads if m == 1
        ]
        return float((np.concatenate(shares) > 0.3).mean())

    def state_entries(self, layer: int | None, token_class: str) -> np.ndarray:
        """All hidden-state elements of one layer (None: all) and class of tokens."""
        kept = {"all": slice(None), "first": slice(1), "others": slice(1, None)}[token_class]
        return np.concatenate(
            [
                state[kept].ravel()
                for states in self.states
                for n, state in enumerate(states)
                if layer in (None, n)
            ]
        )


def rows_of(lengths: tuple[int, ...] = LENGTHS, vocab: int = 97) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


class LeftPadded(TokenSlice):
    """The same sequences, padded on the other side."""

    def batches(self, batch_size: int) -> Iterator[TokenBatch]:
        for batch in super().batches(batch_size):
            ids, mask = batch.input_ids.clone(), batch.attention_mask.clone()
            for row, length in enumerate(mask.sum(1).tolist()):
                ids[row] = ids[row].roll(ids.shape[1] - length)
                mask[row] = mask[row].roll(ids.shape[1] - length)
            yield replace(batch, input_ids=ids, attention_mask=mask)


def sliced(rows: list[torch.Tensor], kind: type[TokenSlice] = TokenSlice) -> TokenSlice:
    longest = max(len(row) for row in rows)
    return kind(
        source="test", source_sha256="0" * 64, ids=tuple(rows), seq_len=longest, skip=0, bos="never"
    )


def loaded(model: Any, tokenizer: Any = None) -> LoadedModel:
    return LoadedModel(
        name="tiny", source="test", model=model.eval(), tokenizer=tokenizer, sha256="0" * 64
    )


def measure(
    model: Any, rows: list[torch.Tensor], kind: type[TokenSlice] = TokenSlice, /, **options: Any
) -> Stats:
    """`collect` at attention logits and hidden states alone, unless `points` says more."""
    of = model if isinstance(model, LoadedModel) else loaded(model)
    found = collect(of, sliced(rows, kind), **{"points": ()} | options)
    assert found is not None
    return found


# Running a model


def store(model: Any, rows: list[torch.Tensor], sampled: Any = None) -> Stored:
    """Runs each row alone and recomputes q and k after RoPE from the projections' outputs."""
    config = model.config
    maps = 2 if config.model_type == "diffllama" else 1
    base, seen = model.model, {}
    handles = [base.rotary_emb.register_forward_hook(lambda m, a, out: seen.update(rope=out))]
    for index, layer in enumerate(base.layers):
        for name in ("q_proj", "k_proj"):
            handles.append(_keeping(getattr(layer.self_attn, name), (name, index), seen))
        handles.append(_keeping(layer, ("state", index), seen))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scale = (getattr(config, "query_pre_attn_scalar", None) or width) ** -0.5
    logits, states = [], []
    for row in rows:
        seen.clear()
        with torch.no_grad():
            model(row[None])
        by_layer = []
        for index in range(len(base.layers)):
            query, key = (
                seen[name, index].view(1, len(row), -1, width).transpose(1, 2)
                for name in ("q_proj", "k_proj")
            )
            query, key = (
                part[0].numpy() for part in apply_rotary_pos_emb(query, key, *seen["rope"])
            )
            per_map, per_key = len(query) // maps, len(query) // len(key)
            by_layer.append(
                {
                    (head // per_map + 1, head % per_map): query[head].astype(np.float64)
                    @ key[head // per_key].astype(np.float64).T
                    * scale
                    for head in range(len(query))
                }
            )
        logits.append(by_layer)
        states.append([_double(seen["state", index][0]) for index in range(len(base.layers))])
    for handle in handles:
        handle.remove()
    lambdas = [np.array([[_lambda(layer.self_attn, n)]]) for n, layer in enumerate(base.layers)]
    return Stored(
        logits=logits,
        states=states,
        window=config.sliding_window if config.model_type == "mistral" else None,
        lambdas=[lambdas] * len(rows) if maps == 2 else [],
        softcap=getattr(config, "attn_logit_softcapping", None),
        rows=sampled,
    )


def _keeping(module: Any, slot: object, seen: dict[Any, Any]) -> Any:
    """Keeps what a module returns."""

    def keep(_module: Any, _args: Any, out: Any) -> None:
        seen[slot] = out[0] if isinstance(out, tuple) else out

    return module.register_forward_hook(keep)


def _double(x: torch.Tensor) -> np.ndarray:
    return x.detach().numpy().astype(np.float64)


def _lambda(attention: Any, depth: int) -> float:
    """Equation 2 of arXiv 2410.05258; 0 where there is none."""
    if not hasattr(attention, "lambda_q1"):
        return 0.0
    part = {
        name: _double(getattr(attention, f"lambda_{name}")) for name in ("q1", "k1", "q2", "k2")
    }
    initial = 0.8 - 0.6 * math.exp(-0.3 * depth)
    one, two = part["q1"] @ part["k1"], part["q2"] @ part["k2"]
    return math.exp(one) - math.exp(two) + initial


class Decoder(torch.nn.Module):
    """A `DiffDecoder` of DIFF V2 that is called as transformers' models are; lambda goes far."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.decoder = DiffDecoder(
            DiffSizes(
                attention="v2",
                vocab_size=97,
                hidden_size=32,
                intermediate_size=48,
                num_layers=2,
                num_heads=4,
                num_kv_heads=2,
            )
        )
        with torch.no_grad():
            for layer in self.decoder.layers:
                for name, factor in (("q_proj", 12.0), ("k_proj", 12.0), ("lambda_proj", 20.0)):
                    getattr(layer.self_attn, name).weight.mul_(factor)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns logits."""
        return self.decoder(input_ids, attention_mask)


def store_v2(model: Decoder, rows: list[torch.Tensor]) -> Stored:
    """The same for DIFF V2 (unilm): maps are heads 2i and 2i+1, over the keys of their group."""
    logits, states, lambdas = [], [], []
    for row in rows:
        seen: dict[Any, Any] = {}
        handles = []
        for index, layer in enumerate(model.decoder.layers):
            for name in ("q_proj", "k_proj", "lambda_proj"):
                handles.append(_keeping(getattr(layer.self_attn, name), (name, index), seen))
            handles.append(_keeping(layer, ("state", index), seen))
        with torch.no_grad():
            model(row[None])
        for handle in handles:
            handle.remove()
        by_layer, by_lambda = [], []
        for index, layer in enumerate(model.decoder.layers):
            width = layer.self_attn.head_dim
            query = _turned(_double(seen["q_proj", index][0]), width)
            key = _turned(_double(seen["k_proj", index][0]), width)
            per_key = len(query) // len(key)
            by_layer.append(
                {
                    (head % 2 + 1, head // 2): query[head] @ key[head // per_key].T / width**0.5
                    for head in range(len(query))
                }
            )
            by_lambda.append(1 / (1 + np.exp(-_double(seen["lambda_proj", index][0]).T)))
        logits.append(by_layer)
        lambdas.append(by_lambda)
        states.append([_double(seen["state", n][0]) for n in range(len(model.decoder.layers))])
    return Stored(logits=logits, states=states, lambdas=lambdas)


def _turned(x: np.ndarray, width: int) -> np.ndarray:
    """`[token, heads * width]` as `[heads, token, width]`, components (2j, 2j+1) turned."""
    x = x.reshape(len(x), -1, width).transpose(1, 0, 2)
    angle = np.arange(x.shape[1])[:, None] * 10_000.0 ** -(np.arange(0, width, 2) / width)
    out = np.empty_like(x)
    out[..., 0::2] = x[..., 0::2] * np.cos(angle) - x[..., 1::2] * np.sin(angle)
    out[..., 1::2] = x[..., 0::2] * np.sin(angle) + x[..., 1::2] * np.cos(angle)
    return out


# Figures


def kurtosis(x: np.ndarray) -> float:
    """Pearson's; NaN without spread."""
    centered = x - x.mean() if len(x) else x
    variance = (centered**2).mean() if len(x) > 1 else 0.0
    return float((centered**4).mean() / variance**2) if variance > 0 else math.nan


def quantile(x: np.ndarray, q: float) -> float:
    """The element of rank ceil(q n), counted from 1."""
    return float(np.sort(x)[max(1, math.ceil(round(q * len(x), 6))) - 1])


def mean_kurtosis(parts: list[np.ndarray]) -> float:
    """Over those sequences that have one."""
    found = [value for value in map(kurtosis, parts) if not math.isnan(value)]
    return float(np.mean(found)) if found else math.nan


def same(got: float, want: float, *, rel: float, abs_: float = 0.0) -> None:
    assert got == pytest.approx(want, rel=rel, abs=abs_, nan_ok=True)


def check_figures(
    got: Any, x: np.ndarray, sampled: np.ndarray | None = None, *, rel: float = 1e-5
) -> None:
    """Compares what every group reports with all of its elements, all of them finite."""
    sampled = x if sampled is None else sampled
    size = np.sort(np.abs(x))[::-1]
    atol = rel * size[0]  # a small logit is a difference of large products
    assert (got.count, got.nan_count, got.inf_count) == (len(x), 0, 0)
    assert set(got.abs_top) == {str(rank) for rank in RANKS}
    for rank in RANKS:
        want = size[rank - 1] if rank <= len(x) else math.nan
        same(got.abs_top[str(rank)], want, rel=rel, abs_=atol)
    same(got.abs_max, size[0], rel=rel)
    same(got.max, x.max(), rel=rel, abs_=atol)
    same(got.min, x.min(), rel=rel, abs_=atol)
    assert set(got.abs_quantiles) == {f"{q:g}" for q in QUANTILES}
    for q, value in ((0.5, got.abs_median), *((q, got.abs_quantiles[f"{q:g}"]) for q in QUANTILES)):
        want = quantile(np.abs(sampled), q) if len(sampled) else math.nan
        same(value, want, rel=BIN * 1.01, abs_=atol)
    same(got.kurtosis, kurtosis(sampled), rel=1e-4)
    if hasattr(got, "span_999_frac") and len(sampled):
        check_span(got.span_999_frac, x, sampled)


def check_span(got: float, x: np.ndarray, sampled: np.ndarray) -> None:
    """(Q(0.9995) - Q(0.0005)) / (max - min); both quantiles are off a histogram."""
    width = x.max() - x.min()
    if width == 0:
        assert math.isnan(got)
        return
    high, low = quantile(sampled, 0.9995), quantile(sampled, 0.0005)
    error = (abs(high) + abs(low)) * BIN * 1.01 / width + 1e-5
    same(got, min((high - low) / width, 1.0), rel=1e-5, abs_=error)


def wanted_groups(stored: Stored, point: str) -> set[tuple[Any, ...]]:
    """(layer, map, head, class) that a point of attention must have, and no others."""
    maps: list[int | None] = [None] if point == "effective_map" else [*stored.maps]
    heads: list[int | None] = [*sorted({head for _, head in stored.heads}), None]
    found: set[tuple[Any, ...]] = {(None, None, None)}
    found |= {(layer, m, head) for layer in range(stored.layers) for m in maps for head in heads}
    found |= {(None, m, None) for m in maps if len(maps) > 1}
    return {(*group, name) for group in found for name in CLASSES}


def check_attention(
    stats: Any, stored: Stored, point: str, *, rel: float = 1e-5, entropy: bool = True
) -> None:
    """Compares every group of one point of attention with the oracle."""
    groups = stats.points[point]
    found = {(g.layer, g.map, g.head, g.token_class): g for g in groups}
    assert set(found) == wanted_groups(stored, point)
    assert len(groups) == len(found)
    sequences = range(len(stored.logits))
    has_sinks = point == ("effective_map" if stored.lambdas else "attention_logit")
    for (layer, map_, head, name), got in found.items():
        where = (point, layer, map_, head)
        full = stored.entries(*where, name)
        check_figures(got, full, stored.entries(*where, name, sampled=True), rel=rel)
        assert (got.name is None) == (layer is None)
        if name != "all" or head is None:
            for unset in ("inf_norm_mean", "kurtosis_oft", "entropy", "first_token_attention"):
                assert getattr(got, unset) is None
            assert got.sink_rate is got.negative_frac is got.row_sum is None
            assert not got.top
            continue
        slot = (layer, map_ or 1, head)
        largest = [np.abs(stored.entries(*where, "all", sequences=[s])).max() for s in sequences]
        same(got.inf_norm_mean, np.mean(largest), rel=rel)
        parts = [stored.entries(*where, "all", sequences=[s], sampled=True) for s in sequences]
        same(got.kurtosis_oft, mean_kurtosis(parts), rel=1e-4)
        nats = stored.row_entropies(point, *slot)
        if entropy:
            same(got.entropy, nats.mean(), rel=10 * rel, abs_=max(1e-5, 2 * rel * largest[0]))
        else:
            assert got.entropy is None
        if has_sinks and slot[1] == 1:
            share = stored.first_token(layer, head)
            same(got.first_token_attention, share.mean(), rel=20 * rel, abs_=20 * rel)
            same(got.sink_rate, (share > 0.3).mean(), rel=1e-12)
        else:
            assert got.first_token_attention is got.sink_rate is None
        if point == "effective_map":
            rows = [stored.matrix(point, s, *slot).sum(1) for s in sequences]
            same(got.row_sum, np.concatenate(rows).mean(), rel=1e-5, abs_=1e-5)
            same(got.negative_frac, (full < 0).mean(), rel=1e-3, abs_=2 / len(full))
        else:
            assert got.row_sum is got.negative_frac is None


def check_states(
    groups: Any,
    entries: Callable[[int | None, str], np.ndarray],
    sequences: list[list[np.ndarray]],
    *,
    rel: float = 1e-5,
) -> None:
    """Compares every group of one activation point; `sequences` is by sequence and layer."""
    layers = range(len(sequences[0]))
    found = {(g.layer, g.token_class): g for g in groups}
    assert len(groups) == len(found)
    assert set(found) == {(layer, name) for layer in [None, *layers] for name in CLASSES}
    for (layer, name), got in found.items():
        assert got.head is got.map is None
        check_figures(got, entries(layer, name), rel=rel)
        assert got.entropy is got.sink_rate is got.row_sum is None
        if layer is None or name != "all":
            assert got.inf_norm_mean is got.kurtosis_oft is got.channel_ratio is None
            assert not got.channel_absmax and not got.top
            continue
        parts = [states[layer] for states in sequences]
        same(got.inf_norm_mean, np.mean([np.abs(part).max() for part in parts]), rel=rel)
        same(got.kurtosis_oft, mean_kurtosis([part.ravel() for part in parts]), rel=1e-4)
        tops = np.max([np.abs(part).max(0) for part in parts], axis=0)
        atol = rel * tops.max()
        assert got.channel_absmax == pytest.approx(list(tops), rel=2e-6 + rel, abs=atol)
        same(got.channel_ratio, tops.max() / quantile(tops, 0.5), rel=10 * rel)
        assert len(got.top) == 10


def check_rules(stats: Any, stored: Stored) -> None:
    """Compares massive activations, outlier features and outlier tokens with the oracle."""
    summary = stats.summary
    massive, tokens = [], []
    for s, states in enumerate(stored.states):
        for layer, x in enumerate(states):
            size = np.abs(x)
            found = (size > 100) & (size >= 1000 * quantile(size.ravel(), 0.5))
            massive += [(size[t, c], layer, s, t, c, x[t, c]) for t, c in np.argwhere(found)]
            tops = size.max(1)
            ratio = tops / quantile(tops, 0.5)
            tokens += [(ratio[t], layer, s, int(t)) for t in np.flatnonzero(ratio > 64)]
    massive.sort(reverse=True)
    tokens.sort(reverse=True)
    got = summary.massive_activations
    assert got.count == len(massive)
    assert len(got.entries) == min(20, len(massive))
    for entry, (_, layer, s, t, c, value) in zip(got.entries, massive, strict=False):
        assert (entry.layer, entry.sequence, entry.position, entry.channel) == (layer, s, t, c)
        same(entry.value, value, rel=1e-5)
    out = summary.outlier_tokens
    assert out.count == len(tokens) == sum(out.by_layer)
    layers = [layer for _, layer, _, _ in tokens]
    assert out.by_layer == [layers.count(n) for n in range(stored.layers)]
    assert len(out.entries) == min(20, len(tokens))
    for token, (ratio, layer, s, t) in zip(out.entries, tokens, strict=False):
        assert (token.layer, token.sequence, token.position) == (layer, s, t)
        same(token.ratio, ratio, rel=1e-4)

    def pooled(slack: float) -> tuple[int, int]:
        """Counts by each layer's pooled median, with thresholds that much higher."""
        many = few = 0
        for layer in range(stored.layers):
            size = np.abs(stored.state_entries(layer, "all"))
            least = max(100.0, 1000 * quantile(size, 0.5))
            many += int((size >= least * slack).sum())
            tops = np.concatenate([np.abs(states[layer]).max(1) for states in stored.states])
            few += int((tops > 64 * quantile(tops, 0.5) * slack).sum())
        return many, few

    error = 1 + 3 * BIN  # of the median, half a bin; of what is counted, one
    (most_m, most_t), (least_m, least_t) = pooled(1 / error), pooled(error)
    assert least_m <= got.count_pooled <= most_m
    assert least_t <= out.count_pooled <= most_t

    reached = []
    for layer in range(stored.layers):
        states = np.concatenate([part[layer] for part in stored.states])
        reached.append((np.abs(states) >= 6).mean(0))
    in_layers, share = (np.array(reached) > 0).mean(0), np.mean(reached, axis=0)
    channels = [int(c) for c in np.flatnonzero((in_layers >= 0.25) & (share >= 0.06))]
    features = summary.outlier_features
    assert (features.channels, features.count) == (channels, len(channels))
    assert features.layer_share == pytest.approx(list(in_layers[channels]))
    assert features.position_share == pytest.approx(list(share[channels]))


def check(stats: Any, stored: Stored, *, rel: float = 1e-5) -> None:
    """Compares every group and the summary, except what padding leaves out."""
    sequences = range(len(stored.logits))
    summary = stats.summary
    points = {"attention_logit", "hidden_state"}
    if stored.lambdas:
        points.add("effective_map")
        check_attention(stats, stored, "effective_map", rel=rel)
        check_differential(stats, stored)
    else:
        assert not stats.differential
    if stored.softcap is not None:
        points.add("logits_modified")
        check_attention(stats, stored, "logits_modified", rel=rel)
    assert points <= set(stats.points)
    is_softmax = stored.softcap is None
    check_attention(stats, stored, "attention_logit", rel=rel, entropy=is_softmax)
    check_states(stats.points["hidden_state"], stored.state_entries, stored.states, rel=rel)

    every = ("attention_logit", None, None, None, "all")
    check_figures(
        summary.attention_logit,
        stored.entries(*every),
        stored.entries(*every, sampled=True),
        rel=rel,
    )
    largest = [np.abs(stored.entries(*every, sequences=[s])).max() for s in sequences]
    same(summary.attention_logit.inf_norm_mean, np.mean(largest), rel=rel)
    assert summary.attention_logit.median_relative_error == BIN
    check_figures(summary.hidden_state, stored.state_entries(None, "all"), rel=rel)
    largest = [max(np.abs(layer).max() for layer in stored.states[s]) for s in sequences]
    same(summary.hidden_state.inf_norm_mean, np.mean(largest), rel=rel)
    same(summary.sink_rate, stored.sink_rate(), rel=1e-12)
    point = "attention_logit" if is_softmax else "logits_modified"
    nats = [
        stored.row_entropies(point, n, m, h) for n in range(stored.layers) for m, h in stored.heads
    ]
    same(summary.attention_entropy, np.concatenate(nats).mean(), rel=10 * rel, abs_=10 * rel)
    check_rules(stats, stored)
    assert not stats.warnings


def check_differential(stats: Any, stored: Stored) -> None:
    """Compares lambda and the row sums of each layer."""
    assert [entry.layer for entry in stats.differential] == list(range(stored.layers))
    heads = [head for map_, head in stored.heads if map_ == 1]
    for entry in stats.differential:
        values = np.concatenate([row[entry.layer].ravel() for row in stored.lambdas])
        same(entry.lambda_mean, values.mean(), rel=1e-5)
        same(entry.lambda_min, values.min(), rel=1e-5)
        same(entry.lambda_max, values.max(), rel=1e-5)
        sums, entries = [], []
        for s in range(len(stored.logits)):
            seen = stored.mask(stored.length(s))
            for head in heads:
                effective = stored.matrix("effective_map", s, entry.layer, 1, head)
                sums.append(effective.sum(1))
                entries.append(effective[seen])
        same(entry.row_sum, np.concatenate(sums).mean(), rel=1e-5, abs_=1e-5)
        same(entry.row_sum, 1 - entry.lambda_mean, rel=1e-5, abs_=1e-5)
        negative = np.concatenate(entries) < 0
        same(entry.negative_frac, negative.mean(), rel=1e-3, abs_=1e-3)


def check_places(stats: Any, stored: Stored) -> None:
    """The largest logit and hidden state of each group stand where the result says."""
    for point in ("attention_logit", "effective_map"):
        for group in stats.points.get(point, []):
            is_one = group.token_class == "all" and group.head is not None
            assert len(group.top) == (1 if is_one else 0)
            for entry in group.top:
                slot = (entry.sequence, group.layer, group.map or 1, group.head)
                value = stored.matrix(point, *slot)[entry.position, entry.key]
                same(entry.value, value, rel=1e-5)
                assert abs(entry.value) == group.abs_top["1"]
    for group in stats.points["hidden_state"]:
        values = [entry.value for entry in group.top]
        assert values == sorted(values, key=abs, reverse=True)
        for entry in group.top:
            states = stored.states[entry.sequence][group.layer]
            same(entry.value, states[entry.position, entry.channel], rel=1e-5)
