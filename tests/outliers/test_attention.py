"""Attention maps made by hand: masks with holes, biases, no causality, a mix that is a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quantkit.outliers.attention import AttentionStatistics
from quantkit.outliers.figures import figures
from quantkit.outliers.maps import MapRecord
from quantkit.probes import AttentionLogits

HEADS, TOKENS, WIDTH = 2, 9, 4


def made(**changes: Any) -> AttentionLogits:
    generator = torch.Generator().manual_seed(changes.pop("seed", 0))
    shape = (2, HEADS, TOKENS, WIDTH)
    given: dict[str, Any] = {
        "layer": 0,
        "name": "attention",
        "map": 1,
        "query": torch.randn(shape, generator=generator) * 3,
        "key": torch.randn(shape, generator=generator),
        "scale": 0.5,
        "mask": None,
        "causal": False,
        "real_queries": None,
    }
    return AttentionLogits(**given | changes)


def logits_of(call: AttentionLogits) -> np.ndarray:
    query, key = (x.numpy().astype(np.float64) for x in (call.query, call.key))
    return np.einsum("bhqd,bhkd->bhqk", query, key) * call.scale


def softmax(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    weights = np.where(mask, np.exp(logits - logits.max()), 0.0)
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)


def nats(shares: np.ndarray) -> np.ndarray:
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    return -(shares * logs).sum(-1)


def check(record: MapRecord, values: np.ndarray, mask: np.ndarray, first: np.ndarray) -> None:
    """Compares classes with a loop; `first` is which entries have the first token as key."""
    mask = np.broadcast_to(mask, values.shape)
    classes = {"others": mask & ~first, "first": mask & first}
    for name, chosen in classes.items():
        for head, got in enumerate(figures(record.classes[name])):
            x = values[:, head][chosen[:, head]]
            assert got["count"] == len(x)
            if len(x):
                assert (got["max"], got["min"]) == pytest.approx((x.max(), x.min()), rel=1e-5)
                assert got["abs_top"]["2"] == pytest.approx(np.sort(np.abs(x))[-2], rel=1e-5)
                off = x - x.mean()
                want = (off**4).mean() / (off**2).mean() ** 2
                assert got["kurtosis"] == pytest.approx(want, rel=1e-4)


def patterned(heads: int) -> np.ndarray:
    """A mask with holes in most rows; everybody sees the first key."""
    mask = np.random.default_rng(heads).random((2, heads, TOKENS, TOKENS)) < 0.5
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(np.ones((1, 1, TOKENS, TOKENS), dtype=bool), id="everything"),
        pytest.param(patterned(1), id="holes that heads share"),
        pytest.param(patterned(HEADS), id="holes of each head"),
    ],
)
def test_a_map_without_causality_has_no_row_0(mask: np.ndarray) -> None:
    call = made(mask=torch.from_numpy(mask))
    statistics = AttentionStatistics()
    statistics.see(call)
    record, values = statistics.maps["attention_logit", 0, 1], logits_of(call)
    first = np.zeros(values.shape, dtype=bool)
    first[..., 0] = True
    check(record, values, mask, first)
    assert record.classes["row 0"].minmax.count.tolist() == [0] * HEADS
    assert record.excluded == values.size - int(np.broadcast_to(mask, values.shape).sum())
    shares = softmax(values, mask)
    assert record.entropy.tolist() == pytest.approx(nats(shares).mean((0, 2)).tolist(), rel=1e-5)
    sink = shares[:, :, 1:64, 0].mean(2)  # [sequence, head]
    got = statistics.sinks[0]
    assert got.share.tolist() == pytest.approx(sink.sum(0).tolist(), rel=1e-5)
    assert got.above.tolist() == (sink > 0.3).sum(0).tolist()


def test_a_bias_is_in_the_modified_logits_alone() -> None:
    bias = torch.randn(1, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)) * 4
    call = made(causal=True, bias=bias)
    statistics = AttentionStatistics()
    statistics.see(call)
    mask = np.tril(np.ones((TOKENS, TOKENS), dtype=bool))[None, None]
    first = np.zeros((2, HEADS, TOKENS, TOKENS), dtype=bool)
    first[..., 0] = True
    plain = logits_of(call)
    seen = np.broadcast_to(mask, plain.shape).copy()
    seen[:, :, 0, 0] = False  # row 0
    modified = plain + bias.numpy().astype(np.float64)
    check(statistics.maps["attention_logit", 0, 1], plain, seen, first)
    record = statistics.maps["logits_modified", 0, 1]
    check(record, modified, seen, first)
    assert record.classes["row 0"].minmax.count.tolist() == [2] * HEADS
    want = nats(softmax(modified, mask)).mean((0, 2))
    assert record.entropy.tolist() == pytest.approx(want.tolist(), rel=1e-5)
    assert statistics.maps["attention_logit", 0, 1].entropy_rows.tolist() == [0] * HEADS


def test_cross_attention_has_no_first_token() -> None:
    statistics = AttentionStatistics()
    statistics.see(made(is_cross=True))
    assert not statistics.sinks and np.isnan(statistics.sink_rate)
    assert statistics.maps["attention_logit", 0, 1].pooled.minmax.count.tolist() == [162, 162]


@pytest.mark.parametrize("holes", [False, True], ids=["causal", "a mask with holes"])
def test_a_mix_by_token_is_in_the_effective_map(holes: bool) -> None:
    """The second sequence has two tokens of padding, whose lambda must not be seen."""
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    real[1, 7:] = False
    mask = np.tril(patterned(1) | ~np.array(holes))
    mask &= real.numpy()[:, None, None, :]
    factor = torch.rand(2, HEADS, TOKENS, generator=torch.Generator().manual_seed(2)) * 0.9
    factor[1, :, 7:] = 77.0
    common = {"mask": torch.from_numpy(mask), "real_queries": real, "maps": 2}
    one = made(**common)
    two = made(**common, map=2, seed=5, mix=-factor)
    statistics = AttentionStatistics()
    statistics.see(one)
    statistics.see(two)
    mask = mask & real.numpy()[:, None, :, None]
    rows = np.broadcast_to(real.numpy()[:, None], (2, HEADS, TOKENS))
    mix = factor.numpy().astype(np.float64)[..., None]
    effective = softmax(logits_of(one), mask) - mix * softmax(logits_of(two), mask)
    found = statistics.effective[0]
    lambdas = mix[..., 0][rows]
    assert found.lambdas.tolist() == pytest.approx(
        [lambdas.sum(), len(lambdas), lambdas.min(), lambdas.max()], rel=1e-6
    )
    assert found.rows.tolist() == rows.sum((0, 2)).tolist()
    sums = (effective.sum(-1) * rows).sum((0, 2))
    assert found.row_sum.tolist() == pytest.approx(sums.tolist(), rel=1e-5)
    assert sums.tolist() == pytest.approx(((1 - mix[..., 0]) * rows).sum((0, 2)).tolist())
    everywhere = np.broadcast_to(mask, effective.shape)
    assert found.weights.tolist() == everywhere.sum((0, 2, 3)).tolist()
    assert found.negative.tolist() == ((effective < 0) & everywhere).sum((0, 2, 3)).tolist()
    size = np.abs(effective)
    total = size.sum(-1, keepdims=True)
    want = (nats(size / np.where(total > 0, total, 1.0)) * rows).sum((0, 2)) / rows.sum((0, 2))
    assert found.map.entropy.tolist() == pytest.approx(want.tolist(), rel=1e-5)
    first = np.zeros(effective.shape, dtype=bool)
    first[..., 0] = True
    seen = everywhere.copy()
    seen[:, :, 0, 0] = False
    check(found.map, effective, seen, first)
