"""LLM.int8 against `Linear8bitLt` and two oracles in numpy: bitsandbytes' way and the paper's."""

from __future__ import annotations

import logging
import math
from typing import Any

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from quantkit.errors import InputError, ProbeError
from quantkit.numerics.affine import RangeError
from quantkit.probes import linear_modules
from quantkit.quantization.bitsandbytes_formats import four_bit
from quantkit.quantization.fired import Counter
from quantkit.recipe import BitsAndBytes
from tests.quantization.weights_inside import IDS, forward, inside

F32 = np.float32


def int8_as_bitsandbytes(
    x: NDArray[Any], weight: NDArray[Any], threshold: float
) -> tuple[NDArray[Any], int]:
    """One sequence `[tokens, in]`; the module's docstring says where this is not the paper."""
    half, w = x.astype(np.float16).astype(F32), weight.astype(np.float16).astype(F32)
    large = (np.abs(half) >= threshold) if threshold > 0 else np.zeros(half.shape, bool)
    features = np.flatnonzero(large.any(0))
    small = np.where(large, 0, half)
    row, col = np.abs(small).max(1), np.abs(w).max(1)
    integers = np.rint(small * (F32(127) / row[:, None]))
    integers[:, features] = 0
    weights = np.rint(w * (F32(127) / col[:, None]))
    out = (integers @ weights.T) * np.outer(row, col) / 127**2
    back = weights[:, features] * col[:, None] / 127
    return out + x[:, features] @ back.T, len(features)


def int8_as_the_paper(x: NDArray[Any], weight: NDArray[Any], threshold: float) -> NDArray[Any]:
    """Equation 8: outlier features and their weights in float16, the rest by rows of int8."""
    features = np.abs(x).max(0) >= threshold if threshold > 0 else np.zeros(x.shape[1], bool)
    x_rest, w_rest = x[:, ~features], weight[:, ~features]
    row, col = np.abs(x_rest).max(1), np.abs(w_rest).max(1)
    product = np.rint(127 * x_rest / row[:, None]) @ np.rint(127 * w_rest / col[:, None]).T
    exact = x[:, features].astype(np.float16).astype(F32) @ weight[:, features].astype(F32).T
    return exact + product * np.outer(row, col) / 127**2


class Padded(nn.Module):
    """One linear layer with a padding mask."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def int8_example() -> tuple[Padded, Tensor, Tensor]:
    """Three sequences with other outlier features each, and padding with more of them."""
    torch.manual_seed(6)
    model, x = Padded(nn.Linear(96, 40)), torch.randn(3, 11, 96)
    x[0, :, 5] *= 20
    x[1, 3, [17, 60]] = torch.tensor([-30.0, 9.0])
    x[2, 8:] = 1e4
    mask = torch.ones(3, 11, dtype=torch.int64)
    mask[2, 8:] = 0
    return model, x, mask


def int8_output(model: Padded, x: Tensor, mask: Tensor, threshold: float) -> tuple[Tensor, Any]:
    with torch.inference_mode(), inside(model, f"llm-int8:{threshold:g}") as kept:
        return model(x, attention_mask=mask), kept["layer"]


@pytest.mark.parametrize("threshold", [6.0, 3.5, 0.0])
def test_int8_equals_numpy_and_linear8bitlt(threshold: float) -> None:
    model, x, mask = int8_example()
    layer: Any = bnb.nn.Linear8bitLt(96, 40, has_fp16_weights=False, threshold=threshold)
    layer.load_state_dict(model.layer.state_dict())
    layer.to("cpu").eval()
    found, kept = int8_output(model, x, mask, threshold)
    weight, bias = model.layer.weight.detach().numpy(), model.layer.bias.detach().numpy()
    features = []
    for row in range(3):
        own = x[row, mask[row] == 1]
        real = found[row, mask[row] == 1].numpy()
        with torch.inference_mode():
            assert np.array_equal(real, layer(own).numpy())
        expected, count = int8_as_bitsandbytes(own.numpy(), weight, threshold)
        # its 1 / 127^2 is a constant that is off by 1.8e-5
        assert np.linalg.norm(real - bias - expected) < 4e-5 * np.linalg.norm(expected)
        paper = int8_as_the_paper(own.numpy(), weight, threshold)
        exact = own.numpy() @ weight.T
        error = np.linalg.norm(paper - exact)
        assert np.linalg.norm(real - bias - paper) < 1.5 * error
        assert np.linalg.norm(real - bias - exact) < 2.0 * error < 0.1 * np.linalg.norm(exact)
        features.append(count)
    assert (kept.kept, kept.sequences, kept.width) == (sum(features), 3, 96)
    assert kept.frac == sum(features) / 3 / 96
    if threshold == 6.0:
        assert features == [1, 2, 0]


def test_float_features_save_what_one_outlier_costs() -> None:
    model, x, mask = int8_example()
    exact = model(x).detach()
    errors = [
        float((int8_output(model, x, mask, threshold)[0][1] - exact[1]).norm())
        for threshold in (0.0, 6.0)
    ]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.kind(4, "sweep")
def test_int8_of_a_sequence_is_that_of_the_sequence_alone() -> None:
    model, x, mask = int8_example()
    together, _ = int8_output(model, x, mask, 6.0)
    for row in range(3):
        real = mask[row] == 1
        alone, _ = int8_output(model, x[row, real][None], mask[row, real][None], 6.0)
        assert torch.equal(together[row, real], alone[0])
    whole, _ = int8_output(model, x.flatten(0, 1)[None], torch.ones(1, 33).long(), 6.0)
    # given as one sequence, outliers and padding would have moved the others
    assert not torch.allclose(whole.reshape(3, 11, 40)[0], together[0], atol=1e-4)
    assert torch.equal(together[2, 8:], model(x)[2, 8:])  # padding: as the layer has it


def test_int8_counts_what_it_quantized() -> None:
    model, x, mask = int8_example()
    fired = Counter()
    with torch.inference_mode(), inside(model, "llm-int8", fired=fired) as kept:
        model(x, attention_mask=mask)
        model(x[:1])
    found = fired.fired["weight/layer"]
    assert (found.hits, found.elements) == (2, 11 * 95 + 11 * 94 + 8 * 96 + 11 * 95)
    assert (kept["layer"].sequences, kept["layer"].kept) == (4, 4)


@pytest.mark.kind(1, "sweep")
def test_int8_of_a_model_in_padded_batches(tiny_llama: LlamaForCausalLM) -> None:
    model: Any = tiny_llama
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[3] = 12.0  # a feature with outliers
    exact, fired = forward(model), Counter()
    batch, mask = torch.zeros(2, 12, dtype=torch.int64), torch.ones(2, 12, dtype=torch.int64)
    batch[0], batch[1, :7], mask[1, 7:] = IDS[0], IDS[1, :7], 0
    with torch.inference_mode(), inside(model, "llm-int8", fired=fired) as kept:
        together = model(input_ids=batch, attention_mask=mask, use_cache=False).logits
        alone = [forward(model, IDS[:1])[0], forward(model, IDS[1:, :7])[0]]
    assert torch.allclose(together[0], alone[0], atol=1e-3)
    assert torch.allclose(together[1, :7], alone[1], atol=1e-3)
    assert 0 < (together[0] - exact[0]).norm() / exact[0].norm() < 0.05
    names = [name for name, _ in linear_modules(model)]
    assert sorted(kept) == sorted(names) == sorted(n.removeprefix("weight/") for n in fired.fired)
    assert all(seen.hits == 3 for seen in fired.fired.values())
    assert kept["model.layers.0.self_attn.q_proj"].kept >= 4  # in each of four sequences


@pytest.mark.kind(2, "sweep")
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_int8_refuses_inputs_that_are_not_finite(bad: float) -> None:
    model, x, mask = int8_example()
    x[2, 9, 0] = bad  # padding may be anything
    assert int8_output(model, x, mask, 6.0)[0][:2].isfinite().all()
    x[1, 2, 0] = bad
    with pytest.raises(ProbeError, match="input of layer is not finite"):
        int8_output(model, x, mask, 6.0)


@pytest.mark.kind(3, "sweep")
def test_int8_beyond_float16() -> None:
    model, x, mask = int8_example()
    x[1, 2, 7] = 1e5
    with pytest.raises(ProbeError, match=r"at layer: .*largest input is 1e\+05.*65504"):
        int8_output(model, x, mask, 0.0)
    found, _ = int8_output(model, x, mask, 6.0)  # such a feature stays in float
    exact = model(x).detach()
    assert (found[1, 2] - exact[1, 2]).norm() / exact[1, 2].norm() < 0.01
    with torch.no_grad():
        model.layer.weight[0, 0] = 1e5
    with pytest.raises(RangeError, match=r"layer\.weight in float16"):
        int8_output(model, x, mask, 6.0)


@pytest.mark.kind(2, "sweep")
def test_int8_of_zeros_is_the_bias() -> None:
    model, x, mask = int8_example()
    with torch.no_grad():
        model.layer.weight[4] = 0.0
    x[0, 2] = 0.0
    for threshold in (6.0, 0.0):
        found, _ = int8_output(model, x, mask, threshold)
        assert torch.equal(found[0, 2], model.layer.bias)
        assert torch.equal(found[0, :, 4], model.layer.bias[4].expand(11))


@pytest.mark.kind(2, "sweep")
def test_int8_layers_that_never_run_fail_by_name() -> None:
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "idle": nn.Linear(8, 8)})
    model.forward = model["used"].forward  # type: ignore[method-assign, assignment]
    with pytest.raises(ProbeError, match="idle"), inside(model, "llm-int8"):
        model["used"](torch.ones(1, 2, 8))
    with inside(model, "llm-int8", on=["weight/used"]):
        model["used"](torch.ones(1, 2, 8))
    with inside(model, "llm-int8", on=[]):
        pass


def test_int8_refuses_what_is_never_called() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    with (
        pytest.raises(InputError, match=r"Keep weight/attention\.out_proj in float"),
        inside(model, "llm-int8"),
    ):
        pass


def test_bitsandbytes_says_nothing_and_its_logger_is_as_it_was(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model, x, mask = int8_example()
    logger = logging.getLogger("bitsandbytes")
    caplog.set_level(logging.INFO, logger="bitsandbytes")
    int8_output(model, x, mask, 6.0)
    four_bit(torch.ones(3, 5), BitsAndBytes(format="fp4"))
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
    assert logger.level == logging.INFO
