"""Arms: as many parameters, the same beginnings, and only the attention differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DiffLlamaForCausalLM, LlamaForCausalLM

from quantkit.errors import InputError
from quantkit.jobs import PairSpec
from quantkit.models import DiffV2ForCausalLM
from quantkit.training.arms import new_model, require_matched

ARMS = ("baseline", "diff", "diff-v2")


@pytest.fixture(scope="module")
def pair(tiny: Any) -> PairSpec:
    return tiny(arms=ARMS)


@pytest.fixture(scope="module")
def models(pair: PairSpec) -> dict[str, Any]:
    return {arm: new_model(arm, pair.sizes, seed=3) for arm in ARMS}


def numel(model: Any) -> int:
    return sum(weight.numel() for weight in dict(model.named_parameters()).values())


def test_the_counts_are_those_of_the_sizes_and_agree(
    pair: PairSpec, models: dict[str, Any]
) -> None:
    width, mlp, vocabulary = 96, 256, 400
    layer = 4 * width * width + 3 * width * mlp + 2 * width
    baseline = vocabulary * width + layer + width  # one layer; tied embeddings once
    found = require_matched(pair)
    assert found == {arm: numel(model) for arm, model in models.items()}
    assert found["baseline"] == baseline
    assert found["diff"] == baseline + 4 * 16  # four lambda vectors of the head size
    assert all(abs(count - baseline) <= 0.001 * baseline for count in found.values())


def test_the_classes_and_their_sizes(models: dict[str, Any]) -> None:
    classes = [LlamaForCausalLM, DiffLlamaForCausalLM, DiffV2ForCausalLM]
    assert [type(models[arm]) for arm in ARMS] == classes
    for model in models.values():
        assert model.config.head_dim == 16 and model.config.vocab_size == 400
        assert model.dtype == torch.float32
        assert model.lm_head.weight is model.model.embed_tokens.weight
    # DiffLlama counts the heads of both maps, as the baseline does; V2 has twice the queries
    heads = [models[arm].config.num_attention_heads for arm in ARMS]
    assert heads == [6, 6, 12]


@pytest.mark.parametrize("arm", ["diff", "diff-v2"])
def test_what_a_baseline_has_begins_as_there(models: dict[str, Any], arm: str) -> None:
    baseline, other = models["baseline"].state_dict(), models[arm].state_dict()
    shared = [n for n in other if n in baseline and baseline[n].shape == other[n].shape]
    own = [name for name in other if name not in shared]
    assert all(torch.equal(baseline[name], other[name]) for name in shared)
    assert any("embed" in name for name in shared) and any("o_proj" in name for name in shared)
    assert any("lambda" in name for name in own)
    assert all(other[name].std() > 0 for name in own if other[name].ndim == 2)
    if arm == "diff":
        assert all("lambda" in name for name in own)


@pytest.mark.parametrize("arm", ARMS)
def test_the_seed_alone_decides(pair: PairSpec, models: dict[str, Any], arm: str) -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again, other = (new_model(arm, pair.sizes, seed=seed).state_dict() for seed in (3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in models[arm].state_dict().items():
        assert torch.equal(weight, again[name])
        if weight.ndim == 2:
            assert not torch.equal(weight, other[name]), name


def test_dropout_is_of_the_attention(pair: PairSpec) -> None:
    model = new_model("baseline", pair.sizes, seed=0, dropout=0.25)
    assert model.config.attention_dropout == 0.25
    for arm in ("diff", "diff-v2"):
        with pytest.raises(InputError, match=f"dropout: {arm} has none"):
            new_model(arm, pair.sizes, seed=0, dropout=0.25)


def test_counts_too_far_apart(tiny: Any) -> None:
    small = tiny()
    # 4 x 16 lambdas of about 14,000 parameters
    sizes = replace(small.sizes, width=24, head_size=16, heads=2, mlp_width=32)
    small = replace(small, sizes=sizes)
    said = r"diff has [\d,]+ parameters and baseline .* at most 0\.1%"
    with pytest.raises(InputError, match=said):
        require_matched(small)
    assert require_matched(replace(small, arms=("baseline",)))
