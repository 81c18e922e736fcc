"""`collect` against an oracle that stores everything and runs each sequence alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.calib_sets import TokenSlice
from quantkit.calib_sets.text import TokenBatch
from quantkit.errors import InputError
from quantkit.models import LoadedModel, differential_lambda
from quantkit.outliers import collect

FAMILIES = ("llama", "gqa", "diffllama", "diffllama_gqa", "mistral_window")
LENGTHS = (150, 3, 40, 9, 71)
RANKS = (1, 2, 3, 10, 100)


class LeftPadded(TokenSlice):
    """The same sequences, padded on the other side."""

    def batches(self, batch_size: int) -> Iterator[TokenBatch]:
        for batch in super().batches(batch_size):
            ids, mask = batch.input_ids.clone(), batch.attention_mask.clone()
            for row, length in enumerate(mask.sum(1).tolist()):
                ids[row] = ids[row].roll(ids.shape[1] - length)
                mask[row] = mask[row].roll(ids.shape[1] - length)
            yield TokenBatch(
                input_ids=ids, attention_mask=mask, first_sequence=batch.first_sequence
            )


def rows_of(lengths: tuple[int, ...], vocab: int = 97) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def sliced(rows: list[torch.Tensor], kind: type[TokenSlice] = TokenSlice) -> TokenSlice:
    longest = max(len(row) for row in rows)
    return kind(
        source="test", source_sha256="0" * 64, ids=tuple(rows), seq_len=longest, skip=0, bos="never"
    )


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(
        name="tiny", source="test", model=model.eval(), tokenizer=None, sha256="0" * 64
    )


def kurtosis(x: np.ndarray) -> float:
    centered = x - x.mean()
    return float((centered**4).mean() / (centered**2).mean() ** 2)


def check_figures(got: Any, x: np.ndarray, median_error: float, *, rel: float = 1e-5) -> None:
    """Compares what every group reports with all of its elements."""
    size = np.sort(np.abs(x))[::-1]
    atol = rel * size[0]  # a small logit is a difference of large products
    assert got.count == len(x)
    for rank in RANKS:
        if rank <= len(x):
            assert got.abs_top[str(rank)] == pytest.approx(size[rank - 1], rel=rel, abs=atol)
        else:
            assert np.isnan(got.abs_top[str(rank)])
    assert got.max == pytest.approx(x.max(), rel=rel, abs=atol)
    assert got.min == pytest.approx(x.min(), rel=rel, abs=atol)
    median = size[::-1][(len(x) - 1) // 2]
    assert got.abs_median == pytest.approx(median, rel=median_error * 1.01, abs=atol)
    assert got.kurtosis == pytest.approx(kurtosis(x), rel=1e-4)


def check(stats: Any, stored: Any, *, rel: float = 1e-5) -> None:
    """Compares every group and the summary, except what padding leaves out."""
    sequences = range(len(stored.logits))
    summary = stats.summary
    found = {
        (group.layer, group.map, group.head, group.token_class): group
        for group in stats.points["attention_logit"]
    }
    wanted = {
        (layer, map_, head, name)
        for layer in range(stored.layers)
        for map_, head in stored.heads
        for name in ("all", "first", "others")
    }
    assert set(found) == wanted
    assert len(stats.points["attention_logit"]) == len(wanted)
    error = summary.attention_logit.median_relative_error
    assert 0 < error <= 2**-8
    for (layer, map_, head, name), group in found.items():
        check_figures(group, stored.entries(layer, map_, head, name), error, rel=rel)
        if name == "all":
            largest = [stored.largest(n, layer, map_, head) for n in sequences]
            assert group.inf_norm_mean == pytest.approx(np.mean(largest), rel=rel)
    pooled = np.concatenate(
        [stored.entries(n, m, h, "all") for n in range(stored.layers) for m, h in stored.heads]
    )
    check_figures(summary.attention_logit, pooled, error, rel=rel)
    assert summary.attention_logit.abs_max == summary.attention_logit.abs_top["1"]
    largest = [
        max(stored.largest(s, n, m, h) for n in range(stored.layers) for m, h in stored.heads)
        for s in sequences
    ]
    assert summary.attention_logit.inf_norm_mean == pytest.approx(np.mean(largest), rel=rel)
    assert summary.sink_rate == pytest.approx(stored.sink_rate())

    error = summary.hidden_state.median_relative_error
    groups = {(group.layer, group.token_class): group for group in stats.points["hidden_state"]}
    assert len(groups) == len(stats.points["hidden_state"]) == 3 * stored.layers
    for (layer, name), group in groups.items():
        check_figures(group, stored.state_entries(layer, name), error, rel=rel)
    pooled = np.concatenate([stored.state_entries(n, "all") for n in range(stored.layers)])
    check_figures(summary.hidden_state, pooled, error, rel=rel)
    largest = [max(np.abs(layer).max() for layer in stored.states[s]) for s in sequences]
    assert summary.hidden_state.inf_norm_mean == pytest.approx(np.mean(largest), rel=rel)


def check_places(stats: Any, stored: Any) -> None:
    """The largest logit and hidden state of each group stand where the result says."""
    for group in stats.points["attention_logit"]:
        for entry in group.top:
            logits = stored.logits[entry.sequence][group.layer][group.map, group.head]
            assert logits[entry.position, entry.key] == pytest.approx(entry.value, rel=1e-5)
            assert abs(entry.value) == group.abs_top["1"]
        assert len(group.top) == (1 if group.token_class == "all" else 0)
    for group in stats.points["hidden_state"]:
        for entry in group.top:
            states = stored.states[entry.sequence][group.layer]
            assert states[entry.position, entry.channel] == pytest.approx(entry.value, rel=1e-5)


def excluded_logits(stored: Any, lengths: tuple[int, ...], batch_size: int) -> int:
    """Entries of the padded QK^T that are masked, over all layers, maps and heads."""
    total = 0
    for start in range(0, len(lengths), batch_size):
        part = lengths[start : start + batch_size]
        total += len(part) * max(part) ** 2 - sum(int(stored.mask(n).sum()) for n in part)
    return total * stored.layers * len(stored.heads)


def excluded_states(lengths: tuple[int, ...], batch_size: int, layers: int, width: int) -> int:
    parts = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    return sum(len(part) * max(part) - sum(part) for part in parts) * layers * width


@pytest.mark.parametrize("family", FAMILIES)
def test_unpadded_rows_agree_with_the_oracle(
    family: str, make_family: Any, brute_force: Any
) -> None:
    model = make_family(family)
    rows = rows_of(LENGTHS)
    stored = brute_force(model, rows)
    stats = collect(loaded(model), sliced(rows), batch_size=1)
    check(stats, stored)
    check_places(stats, stored)
    assert stats.summary.attention_logit.excluded == excluded_logits(stored, LENGTHS, 1)
    assert stats.summary.hidden_state.excluded == 0


@pytest.mark.parametrize("kind, batch_size", [(TokenSlice, 3), (TokenSlice, 4), (LeftPadded, 4)])
@pytest.mark.parametrize("family", ["gqa", "diffllama", "mistral_window"])
def test_padding_changes_no_statistic(
    family: str, kind: type[TokenSlice], batch_size: int, make_family: Any, brute_force: Any
) -> None:
    model = make_family(family)
    rows = rows_of(LENGTHS)
    stored = brute_force(model, rows)
    stats = collect(loaded(model), sliced(rows, kind), batch_size=batch_size)
    # padding on the left shifts positions, and so rounds RoPE's angles another way
    check(stats, stored, rel=1e-5 if kind is TokenSlice else 1e-4)
    if kind is TokenSlice:
        check_places(stats, stored)
    summary = stats.summary
    assert summary.attention_logit.excluded == excluded_logits(stored, LENGTHS, batch_size)
    assert summary.hidden_state.excluded == excluded_states(LENGTHS, batch_size, 3, 64)


def test_smollm2_agrees_with_the_oracle(smollm2: LoadedModel, brute_force: Any) -> None:
    rows = rows_of((64, 64), vocab=int(smollm2.model.config.vocab_size))
    stored = brute_force(smollm2.model, rows)
    stats = collect(smollm2, sliced(rows), batch_size=2)
    check(stats, stored, rel=1e-4)
    check_places(stats, stored)
    assert 0 < stats.summary.sink_rate < 1
    massive, features = 0, []
    for sequence in stored.states:
        for states in sequence:
            size = np.abs(states)
            middle = np.sort(size.ravel())[(size.size - 1) // 2]
            massive += int(((size > 100) & (size >= 1000 * middle)).sum())
    for layer in range(stored.layers):
        states = np.concatenate([sequence[layer] for sequence in stored.states])
        features.append((np.abs(states) >= 6).mean(0))
    layer_share, share = (np.array(features) > 0).mean(0), np.mean(features, axis=0)
    channels = [int(c) for c in np.flatnonzero((layer_share >= 0.25) & (share >= 0.06))]
    assert stats.summary.massive_activations.count == massive > 0
    assert stats.summary.outlier_features.channels == channels
    assert stats.summary.outlier_features.position_share == pytest.approx(list(share[channels]))


@pytest.mark.parametrize("family", ["llama", "diffllama"])
def test_sink_rate_is_neither_none_nor_all(family: str, make_family: Any, brute_force: Any) -> None:
    model = make_family(family)
    rows = rows_of((70, 2, 3, 4, 5, 6))
    rate = collect(loaded(model), sliced(rows), batch_size=3).summary.sink_rate
    assert 0 < rate < 1
    assert rate == pytest.approx(brute_force(model, rows).sink_rate())


def test_lambdas_are_as_published_and_far_apart(make_family: Any, brute_force: Any) -> None:
    model = make_family("diffllama")
    stored = brute_force(model, rows_of((4,)))
    found = [differential_lambda(layer.self_attn) for layer in model.model.layers]
    assert found == pytest.approx(stored.lambdas, rel=1e-5)
    assert min(abs(one - two) for one, two in itertools.pairwise(found)) > 0.5


@pytest.mark.parametrize("family", ["llama", "diffllama_gqa", "mistral_window"])
def test_count_masked_takes_all_of_qk(family: str, make_family: Any, brute_force: Any) -> None:
    model = make_family(family)
    rows = rows_of((150, 150))
    stored = brute_force(model, rows)
    summary = collect(loaded(model), sliced(rows), batch_size=2, count_masked=True).summary
    everything = np.concatenate(
        [
            logits.ravel()
            for sequence in stored.logits
            for layer in sequence
            for logits in layer.values()
        ]
    )
    error = summary.attention_logit.median_relative_error
    check_figures(summary.attention_logit, everything, error)
    assert summary.attention_logit.excluded == 0
    # what is counted is another question than what is attended to
    assert summary.sink_rate == pytest.approx(stored.sink_rate())


def test_count_masked_leaves_the_sink_rate_alone(make_family: Any) -> None:
    model = loaded(make_family("llama"))
    text = sliced(rows_of((2, 3, 4, 5)))
    masked = collect(model, text, batch_size=2, count_masked=True).summary.sink_rate
    assert masked == collect(model, text, batch_size=2).summary.sink_rate > 0


def test_nan_is_refused_with_its_layer(make_family: Any) -> None:
    model = make_family("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match="attention logits of layer 1"):
        collect(loaded(model), sliced(rows_of((8,))))
