"""Ranges of a model's weights: figures by numpy, the file there and back, what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from quantkit.calibration import (
    WeightPlan,
    WeightRanges,
    choose_weight_ranges,
    load_weight_ranges,
    save_weight_ranges,
    weights_info,
)
from quantkit.calibration.weights import WEIGHTS_SCHEMA
from quantkit.errors import InputError
from quantkit.models import sha256_of
from quantkit.numerics.affine import RangeError
from quantkit.numerics.granularity import weight_granularity
from quantkit.numerics.methods import parse_method
from quantkit.results import WeightsInfo
from quantkit.results.io import decode, to_plain
from tests.conftest import make_tiny

UP = "model.layers.0.mlp.up_proj"


def plan(words: str = "channel", method: str = "mse", bits: int = 4) -> WeightPlan:
    return WeightPlan(method=parse_method(method), bits=bits, granularity=weight_granularity(words))


def test_every_linear_layer_but_the_head(tiny_llama: Any) -> None:
    found, figures = choose_weight_ranges(tiny_llama, plan("group:20"))
    assert len(found.absmax) == 2 * 7 and "lm_head" not in found.absmax
    assert found.absmax.keys() == figures.keys()
    assert found.absmax["model.layers.1.mlp.down_proj"].shape == (32, 3)  # 48 inputs: 20, 20, 8
    assert found.absmax[UP].shape == (48, 2)
    assert found.group_size == 20


def db(power: float, error: float) -> float:
    return 10 * np.log10(power / error)


def test_figures_by_numpy(tiny_llama: Any) -> None:
    """Also for a channel that dominates: the whole says little of the worst."""
    weight = dict(tiny_llama.named_modules())[UP].weight
    with torch.no_grad():
        weight[5] *= 50.0
        weight[7, 3] = 0.08  # an outlier that is worth clipping
        weight[9] = 0.0
    found, figures = choose_weight_ranges(tiny_llama, plan())
    exact = weight.detach().double().numpy()
    assert 0 < float(found.absmax[UP][7]) < 0.08
    for absmax, whole, worst in (
        (found.absmax[UP].numpy(), figures[UP].sqnr_db, figures[UP].worst_channel_sqnr_db),
        (
            np.abs(exact).max(1, keepdims=True).astype(np.float32),
            figures[UP].absmax_sqnr_db,
            figures[UP].worst_channel_absmax_sqnr_db,
        ),
    ):
        scale = np.where(absmax == 0, np.float32(1), absmax / np.float32(7))
        values = np.clip(np.rint(exact.astype(np.float32) / scale), -7, 7) * scale
        power, error = (exact**2).sum(1), ((values - exact) ** 2).sum(1)
        assert whole == pytest.approx(db(power.sum(), error.sum()), abs=1e-4)
        some = error > 0
        assert worst == pytest.approx(min(db(power[some], error[some])), abs=1e-4)
    assert figures[UP].worst_channel_sqnr_db > figures[UP].worst_channel_absmax_sqnr_db
    assert figures[UP].sqnr_db > figures[UP].absmax_sqnr_db


def test_a_weight_that_is_on_the_grid_loses_nothing(tiny_llama: Any) -> None:
    weight = dict(tiny_llama.named_modules())[UP].weight
    with torch.no_grad():
        weight.zero_()
    _, figures = choose_weight_ranges(tiny_llama, plan())
    plain = to_plain(figures[UP])
    assert plain["sqnr_db"] == plain["worst_channel_sqnr_db"] == "inf"


@pytest.mark.parametrize("words", ["channel", "group:20"])
def test_there_and_back(words: str, tiny_llama: Any, tmp_path: Path) -> None:
    found, figures = choose_weight_ranges(tiny_llama, plan(words, "upper-percentile:99.5", 6))
    path = tmp_path / "run" / "weights.safetensors"
    digest = save_weight_ranges(path, found)
    assert digest == sha256_of(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    again = load_weight_ranges(path, digest)
    assert again.plan == found.plan
    assert again.absmax.keys() == found.absmax.keys()
    assert all(torch.equal(again.absmax[name], x) for name, x in found.absmax.items())
    info = weights_info(found, figures, digest)
    assert decode(json.loads(json.dumps(to_plain(info))), WeightsInfo, "", "", False) == info
    assert (info.granularity, info.group_size) == {
        "channel": ("channel", None), "group:20": ("group", 20),
    }[words]  # fmt: skip
    with safe_open(path, "pt") as file:  # what other tools read
        plain = json.loads(file.metadata()["quantkit"])
    assert plain == {
        "schema": WEIGHTS_SCHEMA, "method": "upper-percentile:99.5", "bits": 6,
        "granularity": info.granularity, "group_size": info.group_size,
    }  # fmt: skip


def test_a_file_that_is_not_the_one_is_named(tiny_llama: Any, tmp_path: Path) -> None:
    found, _ = choose_weight_ranges(tiny_llama, plan())
    path = tmp_path / "weights.safetensors"
    with pytest.raises(InputError, match=r"no such file: .*weights\.safetensors.*--weights"):
        load_weight_ranges(path, "0" * 64)
    digest = save_weight_ranges(path, found)
    changed = dataclasses.replace(found, absmax={n: 2 * x for n, x in found.absmax.items()})
    save_weight_ranges(path, changed)
    with pytest.raises(InputError, match=rf"weights\.safetensors is not .*expected {digest[:10]}"):
        load_weight_ranges(path, digest)
    path.write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"weights\.safetensors cannot be read"):
        load_weight_ranges(path, sha256_of(path))
    save_file({"x": torch.ones(1)}, path, metadata={"quantkit": '{"schema": "other/1"}'})
    with pytest.raises(InputError, match=r"expected schema quantkit\.weights/1, got other/1"):
        load_weight_ranges(path, sha256_of(path))


def test_another_width_needs_another_choice() -> None:
    ones = {"m": torch.ones(2, 1)}
    searched = WeightRanges(plan=plan(bits=4), absmax=ones)
    assert float(searched.scale("m", torch.Size([2, 8]), 4)[0]) == pytest.approx(1 / 7)
    said = r"by mse for 4 bits, .* asked for 8: .*--weight-method mse --weight-bits 8"
    with pytest.raises(InputError, match=said):
        searched.scale("m", torch.Size([2, 8]), 8)
    grouped = WeightRanges(plan=plan("group:4"), absmax={"m": torch.ones(2, 2)})
    with pytest.raises(InputError, match="--weights group:4 --weight-method mse --weight-bits 3"):
        grouped.require_width(3)
    plain = WeightRanges(plan=plan(method="minmax", bits=4), absmax=ones)  # looks at no width
    assert float(plain.scale("m", torch.Size([2, 8]), 8)[0]) == pytest.approx(1 / 127)


@pytest.mark.parametrize(
    ("absmax", "said"),
    [
        ({"n": torch.ones(2, 1)}, r"weight of 'm' \(1 ranges are known\)"),
        ({"m": torch.ones(3, 1)}, r"Expected ranges \[2, 1\] for the weight of 'm', got \[3, 1\]"),
        ({"m": torch.ones(2, 4)}, r"Expected ranges \[2, 1\]"),
        ({"m": torch.tensor([[1.0], [torch.nan]])}, r"'m\.weight', got NaN"),
    ],
)
def test_ranges_that_do_not_fit(absmax: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(InputError, match=said):
        WeightRanges(plan=plan(), absmax=absmax).scale("m", torch.Size([2, 8]), 4)


@pytest.mark.kind(2, "calibrate")
def test_nan_in_a_weight_is_named(tiny_llama: Any) -> None:
    with torch.no_grad():
        dict(tiny_llama.named_modules())[UP].weight[0, 0] = torch.nan
    with pytest.raises(RangeError, match=rf"{UP}\.weight"):
        choose_weight_ranges(tiny_llama, plan())


@pytest.mark.kind(5, "calibrate")
@pytest.mark.parametrize(("words", "step"), [("channel", 64), ("group:6", 6)])
def test_conv1d_is_seen_as_the_linear_layer_it_is(words: str, step: int) -> None:
    """GPT-2's weight is stored [in, out]; a channel is an output, a group lies along the inputs."""
    config = GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    found, figures = choose_weight_ranges(model, plan(words, "minmax"))
    stored = {n: m.weight for n, m in model.named_modules() if isinstance(m, Conv1D)}
    assert len(stored) == 8 and found.absmax.keys() == figures.keys() == stored.keys()
    for name, weight in stored.items():
        size = np.abs(weight.detach().numpy())  # [in, out]
        starts = range(0, len(size), step)
        expected = np.stack([size[at : at + step].max(0) for at in starts], axis=1)
        assert np.array_equal(found.absmax[name].numpy(), expected), name
        assert figures[name].sqnr_db == figures[name].absmax_sqnr_db > 0


@pytest.mark.kind(5, "calibrate")
def test_layers_that_share_a_weight_share_its_ranges() -> None:
    model = make_tiny(LlamaForCausalLM, LlamaConfig)
    gate, up = (
        dict(model.named_modules())[f"model.layers.0.mlp.{n}"] for n in ("gate_proj", "up_proj")
    )
    gate.weight = up.weight
    found, _ = choose_weight_ranges(model, plan())
    assert torch.equal(found.absmax["model.layers.0.mlp.gate_proj"], found.absmax[UP])
