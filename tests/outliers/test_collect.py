"""`collect` against an oracle that stores everything and runs each sequence alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.calib_sets import TokenSlice
from quantkit.errors import ProbeError
from quantkit.models import LoadedModel, differential_lambda
from tests.outliers.oracle import (
    LENGTHS,
    Decoder,
    LeftPadded,
    check,
    check_attention,
    check_differential,
    check_figures,
    check_places,
    loaded,
    measure,
    rows_of,
    same,
    store_v2,
)

FAMILIES = ("llama", "gqa", "diffllama", "diffllama_gqa", "mistral_window")


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


@pytest.mark.kind(4, "stats")
@pytest.mark.parametrize("family", FAMILIES)
def test_unpadded_rows_agree_with_the_oracle(family: str, stored_family: Any) -> None:
    rows = rows_of()
    model, stored = stored_family(family, rows)
    stats = measure(model, rows, batch_size=1)
    check(stats, stored)
    check_places(stats, stored)
    assert stats.summary.attention_logit.excluded == excluded_logits(stored, LENGTHS, 1)
    assert stats.summary.hidden_state.excluded == 0


@pytest.mark.kind(1, "stats")
@pytest.mark.parametrize(
    ("kind", "batch_size"),
    [
        pytest.param(TokenSlice, 3, id="right, in threes"),
        pytest.param(TokenSlice, 4, id="right, in fours"),
        pytest.param(LeftPadded, 4, id="left, in fours"),
    ],
)
@pytest.mark.parametrize("family", ["gqa", "diffllama", "mistral_window"])
def test_padding_changes_no_statistic(
    family: str, kind: type[TokenSlice], batch_size: int, stored_family: Any
) -> None:
    rows = rows_of()
    model, stored = stored_family(family, rows)
    stats = measure(model, rows, kind, batch_size=batch_size)
    # padding on the left shifts positions, and so rounds RoPE's angles another way
    check(stats, stored, rel=1e-5 if kind is TokenSlice else 1e-4)
    if kind is TokenSlice:
        check_places(stats, stored)
    summary = stats.summary
    assert summary.attention_logit.excluded == excluded_logits(stored, LENGTHS, batch_size)
    assert summary.hidden_state.excluded == excluded_states(LENGTHS, batch_size, 3, 64)


@pytest.mark.parametrize("kind", [TokenSlice, LeftPadded], ids=["right", "left"])
def test_logits_under_a_softcap_are_a_point_of_their_own(
    kind: type[TokenSlice], tiny_gemma2: Any, brute_force: Any
) -> None:
    rows = rows_of((40, 3, 25))
    stored = brute_force(tiny_gemma2, rows)
    stats = measure(tiny_gemma2, rows, kind, batch_size=2)
    check(stats, stored, rel=1e-5 if kind is TokenSlice else 1e-4)
    assert stats.summary.attention_logit.abs_max > 10
    modified = [g for g in stats.points["logits_modified"] if g.layer is None]
    assert all(4.5 < group.abs_max <= 5.0 for group in modified)


def test_lambda_that_differs_by_token_enters_the_effective_map() -> None:
    model, rows = Decoder().eval(), rows_of((70, 2, 33))
    stored = store_v2(model, rows)
    spread = np.concatenate([layer.ravel() for row in stored.lambdas for layer in row])
    assert spread.min() < 0.2 and spread.max() > 0.8
    for batch_size in (1, 3):
        stats = measure(model, rows, batch_size=batch_size)
        check(stats, stored)
        check_places(stats, stored)


def test_smollm2_agrees_with_the_oracle(smollm2: LoadedModel, brute_force: Any) -> None:
    rows = rows_of((64, 64), vocab=int(smollm2.model.config.vocab_size))
    stored = brute_force(smollm2.model, rows)
    stats = measure(smollm2, rows, batch_size=2)
    check(stats, stored, rel=1e-4)
    check_places(stats, stored)
    assert 0 < stats.summary.sink_rate < 1
    assert stats.summary.massive_activations.count > 0
    assert stats.summary.outlier_tokens.count > 0
    entry = stats.summary.massive_activations.entries[0]
    token = rows[entry.sequence][entry.position]
    assert entry.token == smollm2.tokenizer.decode([int(token)])


@pytest.mark.parametrize("family", ["llama", "diffllama"])
def test_sink_rate_is_neither_none_nor_all(family: str, stored_family: Any) -> None:
    rows = rows_of((70, 2, 3, 4, 5, 6))
    model, stored = stored_family(family, rows)
    rate = measure(model, rows, batch_size=3).summary.sink_rate
    assert 0 < rate < 1
    assert rate == pytest.approx(stored.sink_rate())


@pytest.mark.kind(2, "stats")
def test_a_sequence_of_one_token_has_no_sink_and_no_kurtosis(
    make_family: Any, brute_force: Any
) -> None:
    model, rows = make_family("llama"), rows_of((1, 6))
    stats = measure(model, rows, batch_size=2)
    check(stats, brute_force(model, rows))
    alone = measure(model, rows[:1], batch_size=1)
    assert np.isnan(alone.summary.sink_rate)
    assert alone.summary.attention_entropy == 0.0
    head = next(g for g in alone.points["attention_logit"] if g.head == 0)
    assert head.count == 1 and np.isnan(head.kurtosis_oft) and np.isnan(head.sink_rate)


def test_lambdas_are_as_published_and_far_apart(stored_family: Any) -> None:
    model, stored = stored_family("diffllama", rows_of())
    found = [differential_lambda(layer.self_attn) for layer in model.model.layers]
    assert found == pytest.approx([float(one.item()) for one in stored.lambdas[0]], rel=1e-5)
    assert min(abs(one - two) for one, two in itertools.pairwise(found)) > 0.5


# Rules on hidden states


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_planted_outliers_are_found_where_they_stand(
    batch_size: int, planted: Any, brute_force: Any
) -> None:
    rows = rows_of((30, 3, 12, 40))
    rows[0][7], rows[2][0], rows[3][39] = 3, 3, 4
    stored = brute_force(planted, rows)
    stats = measure(planted, rows, batch_size=batch_size)
    check(stats, stored)
    summary = stats.summary
    where = {(e.sequence, e.position, e.channel) for e in summary.massive_activations.entries}
    assert {(0, 7, 5), (2, 0, 5)} <= where
    assert summary.massive_activations.count >= 6  # each in all of three layers
    assert 9 in summary.outlier_features.channels
    assert min(summary.outlier_tokens.by_layer) >= 2
    assert summary.outlier_tokens.entries[0].ratio > 100


def test_a_token_is_named_where_there_is_a_tokenizer(planted: Any) -> None:
    class Tokenizer:
        """Decodes a token to its number."""

        def decode(self, ids: list[int]) -> str:
            return f"<{ids[0]}>"

    rows = rows_of((20,))
    rows[0][4] = 3
    stats = measure(loaded(planted, Tokenizer()), rows)
    assert stats.summary.massive_activations.entries[0].token == "<3>"
    assert stats.summary.outlier_tokens.entries[0].token == "<3>"
    head = next(g for g in stats.points["attention_logit"] if g.head == 1)
    assert head.top[0].token == f"<{rows[0][head.top[0].key]}>"  # of a logit, its key's
    assert head.top[0].query_token == f"<{rows[0][head.top[0].position]}>"
    assert head.top[0].key != head.top[0].position
    state = next(g for g in stats.points["hidden_state"] if g.top)
    assert state.top[0].query_token is None


# All of QK^T


@pytest.mark.parametrize("family", ["llama", "diffllama_gqa", "mistral_window"])
def test_count_masked_takes_all_of_qk(family: str, stored_family: Any) -> None:
    rows = rows_of((150, 150))
    model, stored = stored_family(family, rows)
    stats = measure(model, rows, batch_size=2, count_masked=True)
    summary = stats.summary
    everything = np.concatenate(
        [
            logits.ravel()
            for sequence in stored.logits
            for layer in sequence
            for logits in layer.values()
        ]
    )
    check_figures(summary.attention_logit, everything)
    assert summary.attention_logit.excluded == 0
    assert "masked positions counted too" in summary.attention_logit.definition
    # what is counted is another question than what is attended to
    assert summary.sink_rate == pytest.approx(stored.sink_rate())
    slots = [(n, *slot) for n in range(stored.layers) for slot in stored.heads]
    nats = np.concatenate([stored.row_entropies("attention_logit", *slot) for slot in slots])
    same(summary.attention_entropy, nats.mean(), rel=1e-4, abs_=1e-4)
    if stored.lambdas:
        check_attention(stats, stored, "effective_map")
        check_differential(stats, stored)


def test_count_masked_leaves_the_sink_rate_alone(make_family: Any) -> None:
    model, rows = make_family("llama"), rows_of((2, 3, 4, 5))
    masked = measure(model, rows, batch_size=2, count_masked=True).summary
    plain = measure(model, rows, batch_size=2).summary
    assert masked.sink_rate == plain.sink_rate > 0
    assert masked.attention_entropy == pytest.approx(plain.attention_entropy, rel=1e-5)


# NaN and inf


@pytest.mark.kind(2, "stats")
def test_nan_is_told_with_its_layer_and_leaves_the_others_alone(make_family: Any) -> None:
    model, rows = make_family("llama"), rows_of((9, 20))
    clean = measure(model, rows, batch_size=2)
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[0, 0] = float("nan")
    stats = measure(model, rows, batch_size=2)
    logits = sum(n * (n + 1) // 2 for n in (9, 20))
    assert stats.warnings == [
        f"attention_logit of layer 2, map 1 holds {logits} NaN and 0 inf values; they are left out "
        "of its figures.",
        f"hidden_state of layer 2 holds {29 * 64} NaN and 0 inf values; they are left out of its "
        "figures.",
    ]
    for point in ("attention_logit", "hidden_state"):
        pairs = zip(stats.points[point], clean.points[point], strict=True)
        for got, want in pairs:
            if got.layer in (0, 1) or (point == "attention_logit" and got.head in (1, 2, 3)):
                assert repr(got) == repr(want)
    bad = next(g for g in stats.points["attention_logit"] if (g.layer, g.head) == (2, 0))
    assert (bad.count, bad.nan_count, bad.inf_count) == (logits, logits, 0)
    assert np.isnan([bad.max, bad.min, bad.abs_max, bad.abs_median, bad.kurtosis]).all()
    assert bad.entropy is None
    assert stats.summary.attention_logit.nan_count == logits
    assert stats.summary.hidden_state.nan_count == 29 * 64
    assert stats.summary.hidden_state.count == clean.summary.hidden_state.count
    assert np.isfinite(stats.summary.attention_logit.kurtosis)
    others = [g for g in clean.points["hidden_state"] if g.layer in (0, 1)]
    largest = max(group.abs_max for group in others)
    assert stats.summary.hidden_state.abs_max == largest


# What was asked for


def test_quantiles_are_those_asked_for(stored_family: Any) -> None:
    rows = rows_of((40,))
    model, stored = stored_family("llama", rows)
    stats = measure(model, rows, quantiles=(0.25, 0.9999))
    x = np.abs(stored.entries("attention_logit", None, None, None, "all"))
    got = stats.summary.attention_logit.abs_quantiles
    assert list(got) == ["0.25", "0.9999"]
    for q in (0.25, 0.9999):
        want = np.quantile(x, q, method="inverted_cdf")
        assert got[f"{q:g}"] == pytest.approx(want, rel=2**-8 * 1.01)


def test_every_probe_says_that_it_fired(make_family: Any) -> None:
    rows = rows_of((7, 4, 5))
    stats = measure(make_family("gqa"), rows, batch_size=2, points=["mlp_input"])
    hits = {(hit.point, hit.name): (hit.calls, hit.elements) for hit in stats.hits}
    # two batches, of 2 x 7 and 1 x 5 positions; four heads, 64 channels
    assert hits == {
        **{
            ("attention_logit", f"model.layers.{n}.self_attn"): (2, 4 * (2 * 49 + 25))
            for n in range(3)
        },
        **{("hidden_state", f"model.layers.{n}"): (2, 16 * 64) for n in range(3)},
        **{("mlp_input", f"model.layers.{n}.mlp.gate_proj"): (2, 16 * 64) for n in range(3)},
    }
    assert stats.data.sequences == 3 and stats.model.layers == 3
    assert (stats.sampled_rows, stats.processes, stats.points.keys()) == (
        None,
        1,
        {"attention_logit", "hidden_state", "mlp_input"},
    )


def test_an_unknown_point_is_refused(make_family: Any) -> None:
    with pytest.raises(ProbeError, match="unknown probe point 'mlp_inputs'"):
        measure(make_family("llama"), rows_of((4,)), points=["mlp_inputs"])
