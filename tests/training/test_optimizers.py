"""Which weights are decayed, by which optimizer, and the learning rate by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quantkit.errors import InputError
from quantkit.jobs import Training
from quantkit.training.arms import new_model
from quantkit.training.optimizers import learning_rate, optimizers_of

HELD = ("embed_tokens", "lambda_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUERIES_KEYS = ("q_proj", "k_proj")


def decays(model: Any, training: Training) -> dict[str, float]:
    """Returns the weight decay of each weight; each stands in one group."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    found: dict[str, float] = {}
    for optimizer in optimizers_of(model, training):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                assert names[id(weight)] not in found
                found[names[id(weight)]] = group["weight_decay"]
    assert found.keys() == set(names.values())
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("with_queries", [True, False], ids=["all matrices", "not q and k"])
@pytest.mark.parametrize("arm", ["baseline", "diff", "diff-v2"])
def test_decay_holds_matrices_alone(
    tiny: Any, arm: str, with_queries: bool, optimizer: str
) -> None:
    model = new_model(arm, tiny().sizes, seed=0)
    training = Training(
        steps=1, weight_decay=0.3, decay_queries_keys=with_queries, optimizer=optimizer
    )
    held = HELD + (QUERIES_KEYS if with_queries else ())
    for name, decay in decays(model, training).items():
        expected = 0.3 if any(f".{part}.weight" in name for part in held) else 0.0
        assert decay == expected, name


def test_muon_has_the_matrices_inside_the_layers(tiny: Any) -> None:
    model = new_model("diff", tiny().sizes, seed=0)
    muon, adamw = optimizers_of(model, Training(steps=1, optimizer="muon"))
    named = {id(weight): name for name, weight in model.named_parameters()}
    inside = {named[id(w)] for group in muon.param_groups for w in group["params"]}
    assert inside == {name for name in named.values() if name.endswith("_proj.weight")}
    assert len(inside) == 7
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)


def test_a_torch_without_muon(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(InputError, match=r"muon: torch .* has none; expected 2\.9"):
        optimizers_of(new_model("diff", tiny().sizes, seed=0), Training(steps=1, optimizer="muon"))


def test_the_learning_rate_by_hand() -> None:
    training = Training(steps=7, warmup_steps=2, learning_rate=1.0, final_fraction=0.1)
    found = [learning_rate(training, step) for step in range(7)]
    # 0.1 + 0.45 (1 + cos(k pi / 4)) after the warm-up
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802, 0.1], abs=1e-6)


@pytest.mark.parametrize(
    ("steps", "warm", "expected"),
    [
        pytest.param(1, 0, [2.0], id="one step"),
        pytest.param(2, 0, [2.0, 0.2], id="no warm-up"),
        pytest.param(2, 4, [0.5, 1.0], id="warm-up longer than the training"),
    ],
)
def test_the_learning_rate_at_the_edges(steps: int, warm: int, expected: list[float]) -> None:
    training = replace(Training(steps=steps, learning_rate=2.0), warmup_steps=warm)
    assert [learning_rate(training, n) for n in range(steps)] == pytest.approx(expected)
