"""What a model is measured by, against plain torch and numpy on the same rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from quantkit.errors import InputError
from quantkit.models import load
from quantkit.quantization import fake_quantized
from quantkit.results import TrainingResult, read_json
from quantkit.tasks import Task
from quantkit.training.arms import new_model
from quantkit.training.corpus import Corpus, prepare_corpus
from quantkit.training.measure import Gauge, recipes_of

ARMS = ("baseline", "diff", "diff-v2")
ROWS = 6


@pytest.fixture(scope="module")
def held_out(whole: Path) -> np.ndarray:
    return np.asarray(np.load(whole / "data" / "heldout.npy"))


@pytest.fixture(scope="module")
def gauge(whole: Path, tiny: Any, held_out: np.ndarray) -> Gauge:
    return Gauge(tiny(), held_out, AutoTokenizer.from_pretrained(whole / "data" / "tokenizer"))


@pytest.fixture(scope="module")
def ids(held_out: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(held_out[:ROWS].astype("int64"))


@pytest.fixture
def model(request: pytest.FixtureRequest, tiny: Any) -> Any:
    """An arm in training mode, with logits that are far from 0."""
    model = new_model(request.param, tiny().sizes, seed=5).train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(8)
    return model


def by_arm(function: Any) -> Any:
    return pytest.mark.parametrize("model", ARMS, indirect=True)(function)


def rotated(x: np.ndarray, *, of_v2: bool) -> np.ndarray:
    """RoPE, `[row, head, token, 16]`, theta 10,000; V2 turns neighbours, the others the halves."""
    angles = np.arange(x.shape[2])[:, None] * 10_000.0 ** -(np.arange(8) / 8)
    one, two = (x[..., ::2], x[..., 1::2]) if of_v2 else (x[..., :8], x[..., 8:])
    turned = (one + 1j * two) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)  # a dot product takes any order


@by_arm
def test_loss_and_outliers_by_hand(model: Any, gauge: Gauge, ids: torch.Tensor) -> None:
    found = gauge.measured(model, step=3, tokens=99)
    assert (found.step, found.tokens) == (3, 99)

    layer, seen = model.model.layers[0], {}
    model.eval()
    handles = [
        part.register_forward_hook(lambda _m, _a, out, name=name: seen.update({name: out}))
        for name, part in (
            ("q", layer.self_attn.q_proj),
            ("k", layer.self_attn.k_proj),
            ("hidden", layer),
        )
    ]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    for handle in handles:
        handle.remove()
    assert found.loss == pytest.approx(float(loss), rel=1e-6)

    q, k = (seen[name].double().numpy().reshape(ROWS, 32, -1, 16) for name in ("q", "k"))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)  # V2: two queries of a head share a key
    of_v2 = "V2" in type(model).__name__
    q, k = (rotated(x.transpose(0, 2, 1, 3), of_v2=of_v2) for x in (q, k))
    logits = (q @ k.swapaxes(2, 3) / 4)[..., np.tril(np.ones((32, 32), bool))]
    assert found.max_logit == pytest.approx(logits.max(), rel=1e-5)
    assert found.abs_max_logit == pytest.approx(np.abs(logits).max(), rel=1e-5)

    hidden = seen["hidden"]
    hidden = (hidden[0] if isinstance(hidden, tuple) else hidden).double().numpy()
    assert found.abs_max_hidden == pytest.approx(np.abs(hidden).max(), rel=1e-5)
    assert found.inf_norm_mean == pytest.approx(np.abs(hidden).max((1, 2)).mean(), rel=1e-5)
    centred = hidden - hidden.mean()
    kurtosis = (centred**4).mean() / (centred**2).mean() ** 2
    assert found.kurtosis == pytest.approx(kurtosis, rel=1e-5)


@by_arm
def test_the_model_is_left_as_it_was(model: Any, gauge: Gauge) -> None:
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    torch.manual_seed(1)
    random = torch.get_rng_state()
    attention = model.config._attn_implementation
    gauge.measured(model, step=0, tokens=0)
    assert model.training and all(module.training for module in model.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), random)
    assert gauge.measured(model.eval(), step=0, tokens=0) and not model.training


@by_arm
def test_the_quantized_loss_is_that_of_the_recipe(
    model: Any, gauge: Gauge, ids: torch.Tensor
) -> None:
    found = gauge.measured(model, step=0, tokens=0)
    assert list(found.quantized_loss) == recipes_of((4,))
    for recipe, loss in found.quantized_loss.items():
        with fake_quantized(model.eval(), recipe), torch.no_grad():
            by_hand = torch.stack(
                [model(input_ids=row[None], labels=row[None], use_cache=False).loss for row in ids]
            ).mean()
        assert loss == pytest.approx(float(by_hand), rel=1e-5)
        assert loss != found.loss
    assert len(set(found.quantized_loss.values())) == 3


def test_fewer_rows_than_are_to_be_measured_are_refused(
    whole: Path, tiny: Any, held_out: np.ndarray
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(whole / "data" / "tokenizer")
    said = r"measure_rows: the held-out text gives 5 rows of 32 tokens, expected at least 6"
    with pytest.raises(InputError, match=said):
        Gauge(tiny(), held_out[: ROWS - 1], tokenizer)
    assert Gauge(tiny(), held_out[:ROWS], tokenizer)._rows.shape == (ROWS, 32)


def test_lambda_is_per_layer_and_of_v1_alone(tiny: Any, gauge: Gauge) -> None:
    measured = {
        arm: gauge.measured(new_model(arm, tiny().sizes, seed=5), step=0, tokens=0).lambdas
        for arm in ARMS
    }
    assert measured["baseline"] == [] and measured["diff-v2"] == []
    attention = new_model("diff", tiny().sizes, seed=5).model.layers[0].self_attn
    with torch.no_grad():
        one, two = (
            math.exp(getattr(attention, f"lambda_q{n}") @ getattr(attention, f"lambda_k{n}"))
            for n in "12"
        )
    assert measured["diff"] == pytest.approx([one - two + 0.8 - 0.6], rel=1e-5)


def test_the_last_figures_are_of_the_weights_that_are_written(
    whole: Path, ids: torch.Tensor
) -> None:
    result = read_json(whole / "training.json", TrainingResult)
    assert [model.folder for model in result.models] == ["baseline-seed0", "diff-seed0"]
    for trained in result.models:
        loaded = load(str(whole / trained.folder))
        assert type(loaded.model).__name__ == trained.architecture
        with torch.no_grad():
            loss = loaded.model(input_ids=ids, labels=ids).loss
        assert trained.measurements[-1].step == trained.steps
        assert trained.measurements[-1].loss == pytest.approx(float(loss), rel=1e-6)
        assert trained.measurements[-1].loss < trained.measurements[0].loss - 0.3
        decoded = loaded.tokenizer.decode(ids[0, 1:].tolist())
        assert len(decoded) > 20  # the tokenizer stands beside the weights


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> tuple[Any, Corpus]:
    """Rows that are long enough for the generated tasks, and few."""
    wide = {"context = 32": "context = 512", "vocabulary = 400": "vocabulary = 1200"}
    pair = tiny(changed=wide | {"held_out = 0.2": "held_out = 0.2\nneedles = 0.2\nicl = 0.1"})
    pair = replace(pair, records=replace(pair.records, measure_rows=1, measure_items=3))
    folder = tmp_path_factory.mktemp("long")
    return pair, prepare_corpus(pair, folder, cache=folder / "cache")


def test_generated_tasks_are_measured_with_each_recipe(
    long_corpus: tuple[Any, Corpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, corpus = long_corpus
    gauge = Gauge(pair, corpus.held_out, AutoTokenizer.from_pretrained(corpus.tokenizer))
    model = new_model("baseline", pair.sizes, seed=0)
    found = gauge.measured(model, step=0, tokens=0)
    assert found.accuracies.keys() == {"needles", "icl"}
    assert found.quantized_accuracies.keys() == {
        f"{task} logits4:{word}" for task in found.accuracies for word in ("tensor", "head", "row")
    }
    assert all(0 <= value <= 1 for value in found.accuracies.values())
    assert found.accuracies["needles"] == 0  # six digits that nobody has learnt
    tasks: dict[str, Task[Any]] = gauge._tasks
    assert all(len(task.item_hashes) >= 3 for task in tasks.values())
