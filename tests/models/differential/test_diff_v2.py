"""DIFF V2 under transformers: its equations in numpy, loading, training, the matched config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

from quantkit.cli import app
from quantkit.errors import InputError
from quantkit.exporting import export_float
from quantkit.jobs import Sizes
from quantkit.models import is_decoder_only, load, mlp_of
from quantkit.models.differential import (
    DiffDecoder,
    DiffV2Config,
    DiffV2ForCausalLM,
    DiffV2Model,
    register_diff_v2,
    v2_config,
)
from quantkit.models.families import layer_modules
from tests.models.differential.v2_oracle import SIZES, make_v2, numpy_logits

# The model


@pytest.mark.parametrize("kv_heads", (4, 2, 1), ids=("mha", "grouped", "one_kv"))
def test_logits_are_the_equations(kv_heads: int, tokens: Tensor) -> None:
    model = make_v2(num_key_value_heads=kv_heads).double()
    with torch.no_grad():
        got = model(tokens).logits.numpy()
    for row, one in zip(tokens, got, strict=True):
        np.testing.assert_allclose(one, numpy_logits(model, row), rtol=0, atol=1e-9)


@pytest.mark.parametrize("masked", (False, True), ids=("whole", "padded"))
@pytest.mark.parametrize("tied", (False, True), ids=("untied", "tied"))
def test_it_is_the_plain_decoder_bitwise(masked: bool, tied: bool, tokens: Tensor) -> None:
    model = make_v2(tie_word_embeddings=tied)
    plain = DiffDecoder(model.config.sizes())
    plain.load_state_dict({k.removeprefix("model."): v for k, v in model.state_dict().items()})
    mask = torch.ones_like(tokens)
    mask[0, :3] = mask[1, 9:] = 0
    given = mask if masked else None
    with torch.no_grad():
        out = model(tokens, given)
        assert torch.equal(out.logits, plain(tokens, given))
        hidden = model.model(tokens, given).last_hidden_state
        assert torch.equal(model.lm_head(hidden), out.logits)
    assert out.loss is None


@pytest.mark.parametrize("side", ("left", "right"))
def test_padding_changes_nothing_for_real_tokens(
    side: str, v2_model: DiffV2ForCausalLM, tokens: Tensor
) -> None:
    pad = torch.zeros_like(tokens[:, :4])
    parts = (pad, tokens) if side == "left" else (tokens, pad)
    real = torch.cat([torch.zeros_like(p) if p is pad else torch.ones_like(p) for p in parts], 1)
    with torch.no_grad():
        padded = v2_model(torch.cat(parts, 1), real).logits[real.bool()].view(3, 12, -1)
        torch.testing.assert_close(padded, v2_model(tokens).logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "keep", (1, 5, torch.tensor([0, 7, 11])), ids=("last", "last_five", "positions")
)
def test_logits_to_keep(keep: Any, v2_model: DiffV2ForCausalLM, tokens: Tensor) -> None:
    with torch.no_grad():
        whole, kept = v2_model(tokens).logits, v2_model(tokens, logits_to_keep=keep).logits
    wanted = keep if isinstance(keep, Tensor) else list(range(12 - keep, 12))
    torch.testing.assert_close(kept, whole[:, wanted])


@pytest.mark.parametrize(
    "changes",
    (
        {"num_attention_heads": 7},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"head_dim": 5},
        {"vocab_size": 0},
    ),
    ids=("odd_heads", "no_heads", "kv_heads", "odd_width", "no_vocabulary"),
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    name = next(iter(changes)).removeprefix("num_")
    with pytest.raises(InputError, match=rf"({name}|num_kv_heads).* got"):
        DiffV2ForCausalLM(DiffV2Config(**SIZES | changes))


# Loading


def test_a_saved_model_loads_as_any_decoder(
    v2_model: DiffV2ForCausalLM, v2_folder: Path, tokens: Tensor
) -> None:
    loaded = load(str(v2_folder))
    info = loaded.info()
    assert isinstance(loaded.model, DiffV2ForCausalLM) and is_decoder_only(loaded.model.config)
    assert (info.layers, info.maps, info.heads, info.kv_heads, info.head_dim) == (2, 2, 8, 2, 6)
    assert (info.hidden_size, info.modality, info.warnings) == (24, "text", [])
    assert info.parameters == sum(p.numel() for p in v2_model.parameters())
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(v2_folder / "model.safetensors")
    assert {type(m).__name__ for _, m in layer_modules(loaded.model)} == {"DiffDecoderLayer"}
    assert [mlp_of(n, m).downs[0][0] for n, m in layer_modules(loaded.model)] == [
        f"model.layers.{n}.mlp.down_proj" for n in (0, 1)
    ]
    with torch.no_grad():
        for again in (loaded.model, AutoModelForCausalLM.from_pretrained(v2_folder).eval()):
            assert torch.equal(again(tokens).logits, v2_model(tokens).logits)


def test_the_backbone_alone_loads_too(
    v2_model: DiffV2ForCausalLM, tmp_path: Path, tokens: Tensor
) -> None:
    v2_model.model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path)).model
    assert type(loaded) is DiffV2Model
    with torch.no_grad():
        got, expected = loaded(tokens), v2_model.model(tokens)
    assert torch.equal(got.last_hidden_state, expected.last_hidden_state)


def test_a_weight_that_is_missing_is_named(v2_folder: Path) -> None:
    path = v2_folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.lambda_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 weights.*layers\.1\.self_attn\.lambda_proj"):
        load(str(v2_folder))


def test_a_second_registration_changes_nothing() -> None:
    register_diff_v2()
    config = AutoConfig.for_model("quantkit-diff-v2", **SIZES)
    assert type(config) is DiffV2Config
    assert type(AutoModelForCausalLM.from_config(config)) is DiffV2ForCausalLM
    assert type(AutoModel.from_config(config)) is DiffV2Model


def test_new_weights_have_the_initial_range() -> None:
    torch.manual_seed(0)
    model = DiffV2ForCausalLM(DiffV2Config(**SIZES | {"initializer_range": 0.05}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.25), name


# No cache


@pytest.mark.parametrize(
    "ask",
    (
        lambda model, ids: model(ids, use_cache=True),
        lambda model, ids: model(ids, past_key_values=DynamicCache()),
        lambda model, ids: model.generate(ids, max_new_tokens=2),
    ),
    ids=("use_cache", "past", "generate"),
)
def test_a_cache_is_refused(ask: Any, v2_model: DiffV2ForCausalLM, tokens: Tensor) -> None:
    with pytest.raises(InputError, match=r"^DIFF V2 keeps no KV cache.*use_cache=False"):
        ask(v2_model, tokens)
    assert not v2_model.can_generate()


def test_export_says_why_not_in_one_line(
    v2_model: DiffV2ForCausalLM, v2_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="DIFF V2 keeps no KV cache"):
        export_float(v2_model, tmp_path / "graph")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, range(80))), encoding="utf-8")
    sizes = ("--calib", str(text), "--eval", str(text), "--seq-len", "16", "--samples", "2")
    arguments = ("export", str(v2_folder), *sizes, "--out", str(tmp_path / "out"))
    result = CliRunner().invoke(app, arguments, prog_name="quantkit")
    assert result.exit_code == 2
    assert "DIFF V2 keeps no KV cache" in result.stderr.splitlines()[-1]


# Training


def test_the_loss_is_the_mean_over_what_is_predicted(
    v2_model: DiffV2ForCausalLM, tokens: Tensor
) -> None:
    labels = tokens.clone()
    labels[1, 5:] = -100
    with torch.no_grad():
        out = v2_model(tokens, labels=labels)
    logits, targets = out.logits[:, :-1].reshape(-1, 257), labels[:, 1:].reshape(-1)
    kept = targets != -100
    assert int(kept.sum()) == 11 + 4 + 11
    expected = F.cross_entropy(logits[kept], targets[kept])
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("autocast", (False, True), ids=("float32", "bfloat16"))
def test_it_learns(autocast: bool, tokens: Tensor) -> None:
    torch.manual_seed(1)
    model = DiffV2ForCausalLM(DiffV2Config(**SIZES, tie_word_embeddings=True)).train()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(tokens, labels=tokens)
        assert out.logits.dtype == (torch.bfloat16 if autocast else torch.float32)
        optimizer.zero_grad()
        out.loss.backward()
        losses.append(out.loss.item())
        for name, p in model.named_parameters():
            assert p.grad is not None and p.grad.dtype == torch.float32, name
            assert bool(p.grad.isfinite().all()) and bool(p.grad.any()), name
        optimizer.step()
    assert losses[0] == pytest.approx(np.log(257), abs=0.1)
    assert losses[-1] < losses[0] - 1
    assert all(not torch.equal(p, start[name]) for name, p in model.named_parameters())


def test_autocast_is_near_float32(tokens: Tensor) -> None:
    torch.manual_seed(1)
    model = DiffV2ForCausalLM(DiffV2Config(**SIZES)).eval()
    with torch.no_grad():
        exact = model(tokens).logits
        with torch.autocast("cpu", torch.bfloat16):
            near = model(tokens).logits.float()
    assert 0 < (near - exact).abs().max() < 0.02 * exact.abs().max()


# The matched config


@pytest.mark.parametrize(
    "sizes",
    (
        Sizes(layers=8, width=256, heads=8, vocabulary=8192),
        Sizes(layers=6, width=192, heads=6, vocabulary=4096, tie_embeddings=False),
        Sizes(layers=5, width=128, heads=4, head_size=48, vocabulary=2048, mlp_width=512),
        Sizes(layers=3, width=96, heads=2, head_size=64, vocabulary=1000, rope_theta=5e4),
        Sizes(layers=12, width=512, heads=8, vocabulary=16384, context=1024),
    ),
    ids=("pair", "untied", "wide_heads", "two_heads", "large"),
)
def test_the_config_matches_a_llama(sizes: Sizes) -> None:
    config = v2_config(sizes)
    with torch.device("meta"):
        ours = DiffV2ForCausalLM(config)
        baseline = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=sizes.vocabulary,
                hidden_size=sizes.width,
                intermediate_size=sizes.mlp_width,
                num_hidden_layers=sizes.layers,
                num_attention_heads=sizes.heads,
                num_key_value_heads=sizes.heads,
                head_dim=sizes.head_size,
                tie_word_embeddings=sizes.tie_embeddings,
            )
        )
    counts = [sum(p.numel() for p in m.parameters()) for m in (ours, baseline)]
    assert abs(counts[0] - counts[1]) <= 1e-3 * counts[1]
    attention: Any = ours.model.layers[0].self_attn
    assert (attention.num_heads, attention.num_kv_heads) == (sizes.heads, sizes.heads)
    assert attention.head_dim == sizes.head_size and attention.rope_theta == sizes.rope_theta
    assert len(ours.model.layers) == sizes.layers and config.vocab_size == sizes.vocabulary
    assert config.max_position_embeddings == sizes.context
    wider, narrower = (
        abs(counts[0] + step * 3 * sizes.width * sizes.layers - counts[1]) for step in (1, -1)
    )
    assert abs(counts[0] - counts[1]) <= min(wider, narrower)  # the nearest MLP there is


@pytest.mark.parametrize(
    ("sizes", "message"),
    (
        (Sizes(layers=8, width=16, heads=2, head_size=6, vocabulary=300), r"multiple of 3"),
        (Sizes(layers=2, width=64, heads=4, mlp_width=20), r"mlp_width of 20, which leaves -3"),
    ),
    ids=("too_coarse", "no_mlp"),
)
def test_a_config_without_a_match_is_refused(sizes: Sizes, message: str) -> None:
    with pytest.raises(InputError, match=rf"^\[sizes\] diff-v2 .*{message}"):
        v2_config(sizes)
