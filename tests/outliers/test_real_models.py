"""Real weights of an encoder and a vision transformer against q and k taken by hooks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.calib_sets import data_slice
from quantkit.models import LoadedModel, load
from quantkit.outliers import collect

PROJECTIONS = {
    "minilm": ("attention.self.query", "attention.self.key"),
    "dinov2-small": ("attention.q_proj", "attention.k_proj"),
}


def brute_force(loaded: LoadedModel, data: Any, length: int) -> list[np.ndarray]:
    """All logits of each layer, float64, `[sequence, head, query, key]`; nothing is masked."""
    heads = loaded.info().heads
    taken: dict[str, list[torch.Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda m, a, out, name=name: taken.setdefault(name, []).append(out)
        )
        for name, module in loaded.model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad():
        for batch in data.batches(1):
            loaded.model(**batch.inputs)
    for handle in handles:
        handle.remove()
    query, key = (
        [
            torch.cat(taken[name]).double().numpy()
            for name in taken
            if name.endswith(PROJECTIONS[loaded.name][which])
        ]
        for which in (0, 1)
    )
    assert len(query) == len(key) == loaded.info().layers
    found = []
    for q, k in zip(query, key, strict=True):
        assert q.shape[1] == length
        split = (len(q), length, heads, -1)
        q, k = (x.reshape(split).transpose(0, 2, 1, 3) for x in (q, k))
        found.append(q @ k.transpose(0, 1, 3, 2) / math.sqrt(q.shape[-1]))
    return found


@pytest.mark.parametrize("name, length", [("minilm", 48), ("dinov2-small", 257)])
def test_logits_of_a_bidirectional_model(name: str, length: int) -> None:
    loaded = load(name)
    data = data_slice(None, loaded, seq_len=length, samples=2)
    logits = brute_force(loaded, data, length)
    stats = collect(loaded, data, batch_size=2)
    assert stats is not None
    everything = np.concatenate([layer.ravel() for layer in logits])
    summary = stats.summary.attention_logit
    assert summary.count == everything.size == len(logits) * 2 * loaded.info().heads * length**2
    assert summary.excluded == 0
    size = np.sort(np.abs(everything))[::-1]
    for rank in (1, 2, 3, 10, 100):
        assert summary.abs_top[str(rank)] == pytest.approx(size[rank - 1], rel=1e-4)
    assert summary.max == pytest.approx(everything.max(), rel=1e-4)
    assert summary.min == pytest.approx(everything.min(), rel=1e-4)
    assert summary.abs_median == pytest.approx(np.median(np.abs(everything)), rel=5e-3)
    groups = {
        (g.layer, g.head): g for g in stats.points["attention_logit"] if g.token_class == "all"
    }
    for layer, values in enumerate(logits):
        weights = np.exp(values - values.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        entropy = -(weights * np.log(np.maximum(weights, 1e-300))).sum(-1)
        for head in range(values.shape[1]):
            group = groups[layer, head]
            assert group.abs_top["1"] == pytest.approx(np.abs(values[:, head]).max(), rel=1e-4)
            assert group.entropy == pytest.approx(entropy[:, head].mean(), rel=1e-3, abs=1e-5)
            share = weights[:, head, 1:64, 0].mean(-1)
            assert group.first_token_attention == pytest.approx(share.mean(), rel=1e-3, abs=1e-6)
            assert group.sink_rate == pytest.approx((share > 0.3).mean())
