"""SmoothQuant scales of a model: channels against hooks, alpha from them, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from quantkit.calibration import find_smoothing
from quantkit.errors import InputError
from quantkit.numerics.smoothing import search_alpha, smoothing_scales
from tests.calibration.oracle import loaded_model, text


def inputs_of(model: Any, data: Any, *, without_first: bool) -> dict[str, torch.Tensor]:
    """Every linear layer's input, `[tokens, channels]`, one unpadded row at a time."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def look(_module: Any, args: Any, name: str = name) -> None:
                seen.setdefault(name, []).append(args[0][0, int(without_first) :])

            handles.append(module.register_forward_pre_hook(look))
    for block in data.ids:
        with torch.no_grad():
            model.model(input_ids=block[None])
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("without_first", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_scales_are_those_of_the_inputs(
    without_first: bool, batch_size: int, tiny_llama: LlamaForCausalLM
) -> None:
    model: Any = tiny_llama
    with torch.no_grad():  # an outlier channel, so that there is something to move
        model.model.layers[0].input_layernorm.weight[3] = 40.0
    data = text((9, 30, 4, 17))
    found = find_smoothing(
        loaded_model(model), data, batch_size=batch_size, without_first=without_first
    )
    x = inputs_of(model, data, without_first=without_first)
    modules = dict(model.named_modules())
    assert list(found) == [
        f"model.layers.{n}.{name}"
        for n in range(2)
        for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")
    ]
    for name, group in found.items():
        weights = [modules[linear].weight for linear in group.linears]
        own = x[name]
        expected = search_alpha(own.amin(0), own.amax(0), own.double().square().mean(0), weights)
        assert group.alpha == pytest.approx(expected.alpha)
        assert group.scales == pytest.approx(expected.scales.tolist(), rel=1e-4)
        assert group.expected_error == pytest.approx(expected.expected_error, rel=1e-4)
        assert group.expected_error <= group.expected_error_without
    first = found["model.layers.0.self_attn.q_proj"]
    assert first.alpha > 0.0 and first.scales[3] == max(first.scales)
    assert first.expected_error < 0.5 * first.expected_error_without
    assert first.producer == "model.layers.0.input_layernorm"


def test_a_given_alpha_is_taken_by_every_group(tiny_llama: LlamaForCausalLM) -> None:
    model: Any = tiny_llama
    data = text((9, 30))
    found = find_smoothing(loaded_model(model), data, alpha=0.7)
    x = inputs_of(model, data, without_first=False)
    modules = dict(model.named_modules())
    for name, group in found.items():
        weights = torch.cat([modules[linear].weight for linear in group.linears])
        scales = smoothing_scales(x[name].abs().amax(0), weights.abs().amax(0), 0.7)
        assert group.alpha == 0.7
        assert group.scales == pytest.approx(scales.tolist(), rel=1e-4)


def test_a_model_without_groups_says_so() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=257, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24,
    )  # fmt: skip
    model = BertModel(config).eval()  # its norms' outputs are the residual too
    with pytest.raises(InputError, match=r"no group .* tiny \(BertModel\); leave --smooth out"):
        find_smoothing(loaded_model(model), text((9, 9)))


@pytest.mark.kind(2, "calibrate")
def test_nan_is_named(tiny_llama: LlamaForCausalLM) -> None:
    model: Any = tiny_llama
    loaded = loaded_model(model)
    data = text((9, 9))
    from quantkit.calibration import smoothing as module

    groups = module.smoothing_groups(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "smoothing_groups", lambda _model: groups)
        with pytest.raises(InputError, match=r"layers\.1\.mlp\.down_proj holds NaN"):
            find_smoothing(loaded, data)
