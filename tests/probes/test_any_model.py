"""`attach` on models of many kinds: what is recorded is what their own softmax was given.

The oracle is the model itself: the attention weights that it returns from its eager function. From
a recorded call they follow by one line of the textbook, softmax(softcap(s) + bias, mask, sinks).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.errors import ProbeError
from quantkit.probes import AttentionLogits, attach

sys.path.insert(0, str(Path(__file__).parent))
from zoo import FAMILIES, LENGTH, PADDED, Family, pad_mask

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*mismatched key_padding_mask:UserWarning"),  # WavLM
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning"),
]
CASES = [(n, i, p) for n, f in FAMILIES.items() for i in f.implementations for p in f.pads]
TWO_SIDED = ("t5", "bart")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    return {}


def model_of(name: str, built: dict[str, Any]) -> Any:
    if name not in built:
        with torch.inference_mode(False):
            built[name] = FAMILIES[name].build()
    return built[name]


def weights_of(call: AttentionLogits) -> tuple[Tensor, Tensor]:
    """Returns the attention weights and which rows have any, `[batch, heads, query(, key)]`."""
    batch, heads, queries, _ = call.query.shape
    full = (batch, heads, queries, call.key.shape[2])
    logits = torch.full(full, float("-inf"))
    for tile in call.tiles():
        part = tile.logits
        rows, keys = slice(tile.start, tile.start + part.shape[2]), part.shape[3]
        if call.softcap is not None:
            part = call.softcap * torch.tanh(part / call.softcap)
        if call.bias is not None:
            part = part + call.bias.expand(full)[:, :, rows, :keys]
        logits[:, :, rows, :keys] = torch.where(tile.valid, part, float("-inf"))
    seen = logits.isfinite().any(-1)
    if call.sinks is not None:
        sinks = call.sinks.float().reshape(1, -1, 1, 1).expand(*full[:3], 1)
        logits = torch.cat((logits, sinks), -1)
    return logits.softmax(-1)[..., : full[3]], seen


def returned_weights(family: Family, model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Returns what the model says its attention weights are, in the order of execution."""
    eager = copy.deepcopy(model)
    for module in eager.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = "eager"
    if family.attention_class is not None:  # not returned by the model: by its modules
        found: list[Tensor] = []
        for module in eager.modules():
            if type(module).__name__ == family.attention_class:
                module.register_forward_hook(lambda m, a, out: found.append(out[1]))
        eager(**inputs)
        return found
    output = eager(**inputs, output_attentions=True)

    def get(path: str) -> Any:
        value = output
        for part in path.split("."):
            value = getattr(value, part)
        return value

    return [
        weights
        for fields in family.attentions
        for layer in zip(*(get(path) for path in fields.split("+")), strict=True)
        for weights in layer
    ]


@pytest.mark.kind(1, "probes", "models")
@pytest.mark.parametrize(("name", "implementation", "pad"), CASES)
def test_what_is_recorded_gives_the_models_own_weights(
    name: str, implementation: str, pad: str, built: dict[str, Any]
) -> None:
    family, model = FAMILIES[name], model_of(name, built)
    model.set_attn_implementation(implementation)
    inputs = family.inputs(pad)
    expected = returned_weights(family, model, inputs)
    plain = model(**inputs)[0]
    calls: list[tuple[int, bool, int, Tensor, Tensor]] = []

    def see(call: AttentionLogits) -> None:
        calls.append((call.layer, call.is_cross, call.entries, *weights_of(call)))

    state = [
        getattr(getattr(m, "config", None), "_attn_implementation", 0) for m in model.modules()
    ]
    with attach(model, {"attention_logit": see}) as attachment:
        recorded = model(**inputs)[0]
    assert state == [
        getattr(getattr(m, "config", None), "_attn_implementation", 0) for m in model.modules()
    ]
    assert torch.equal(plain, recorded)
    assert len(calls) == len(expected)
    assert sorted(layer for layer, *_ in calls) == list(range(len(expected)))
    assert sum(h.elements for h in attachment.hits["attention_logit"].values()) == sum(
        entries for _, _, entries, *_ in calls
    )
    spread = 0.0
    for (_, _, _, weights, seen), wanted in zip(calls, expected, strict=True):
        if name == "wavlm":  # returns the mean over heads
            weights = weights.mean(1, keepdim=True).expand_as(wanted)
        assert bool(seen.any())
        torch.testing.assert_close(weights[seen], wanted[seen], rtol=1e-4, atol=3e-5)
        spread = max(spread, float(wanted.amax()))
    assert spread > 0.05  # the weights say something
    if pad != "none" and name != "wavlm":  # of the second sequence, padding is no query
        rows = LENGTH + 2 if name in TWO_SIDED else calls[-1][4].shape[2]
        real = calls[0][4] if name != "clip" else calls[-1][4]
        assert real[0].all()
        hole = PADDED
        where = slice(rows - hole, rows) if pad == "right" or name in TWO_SIDED else slice(0, hole)
        assert not real[1, :, where].any() and int(real[1, 0].sum()) == rows - hole
    if name in (*TWO_SIDED, "whisper"):
        assert [cross for _, cross, *_ in calls] == [False] * 3 + [True, False, True]
        if pad != "none":
            assert torch.equal(calls[-1][4][:, 0], pad_mask(pad).bool())


@pytest.mark.kind(1, "probes", "models")
@pytest.mark.parametrize("name", ["bloom", "gptj", "mpt", "falcon", "bert", "gpt_oss", "t5"])
def test_the_parts_that_a_model_adds_are_told_apart(name: str, built: dict[str, Any]) -> None:
    model = model_of(name, built)
    calls: list[AttentionLogits] = []
    with attach(model, {"attention_logit": calls.append}):
        model(**FAMILIES[name].inputs("right"))
    assert [call.bias is not None for call in calls[:1]] == [name in ("bloom", "mpt", "t5")]
    assert [call.sinks is not None for call in calls[:1]] == [name == "gpt_oss"]
    for call in calls:
        for tile in call.tiles():
            assert (
                tile.logits.isfinite().all()
                and tile.logits[tile.valid.expand_as(tile.logits)].abs().max() < 9e3
            )


def test_bloom_by_hand(built: dict[str, Any]) -> None:
    model = model_of("bloom", built)
    projected: list[Tensor] = []
    layer = model.transformer.h[0].self_attention
    handle = layer.query_key_value.register_forward_hook(lambda m, a, out: projected.append(out))
    calls: list[AttentionLogits] = []
    with attach(model, {"attention_logit": calls.append}):
        model(**FAMILIES["bloom"].inputs("none"))
    handle.remove()
    split = projected[0].view(2, LENGTH, 4, 3, 8)
    expected = torch.einsum("bihd,bjhd->bhij", split[..., 0, :], split[..., 1, :]) / 8**0.5
    assert calls[0].given is not None
    torch.testing.assert_close(calls[0].given, expected, rtol=1e-5, atol=1e-5)
    # ALiBi: slopes 2^-2, 2^-4, 2^-6, 2^-8 times the key's position
    slopes = torch.tensor([2.0**-n for n in (2, 4, 6, 8)])
    alibi = slopes[:, None] * torch.arange(LENGTH)
    bias, mask = calls[0].bias, calls[0].mask
    assert bias is not None and isinstance(mask, Tensor)
    last = bias[0, :, -1]
    torch.testing.assert_close(last, alibi, rtol=1e-4, atol=1e-4)
    assert torch.equal(mask[0, 0], torch.ones(LENGTH, LENGTH).tril().bool())


@pytest.mark.kind(1, "probes", "models")
def test_an_additive_mask_of_sdpa_is_split(built: dict[str, Any]) -> None:
    """Falcon adds ALiBi / sqrt(d) and finfo.min in one tensor."""
    model = copy.deepcopy(model_of("falcon_alibi", built))
    model.config._attn_implementation = "sdpa"
    calls: list[AttentionLogits] = []
    with attach(model, {"attention_logit": calls.append}):
        model(**FAMILIES["falcon_alibi"].inputs("right"))
    slopes = torch.tensor([2.0**-n for n in (2, 4, 6, 8)])
    alibi = slopes[:, None] * torch.arange(LENGTH) / 8**0.5
    for call in calls:
        assert call.given is None and call.bias is not None and isinstance(call.mask, Tensor)
        torch.testing.assert_close(call.bias[0, :, -1], alibi, rtol=1e-2, atol=1e-6)
        expected = torch.ones(LENGTH, LENGTH).tril().bool() & pad_mask("right").bool()[:, None]
        assert torch.equal(call.mask, expected[:, None].expand_as(call.mask))


@pytest.mark.kind(3, "probes", "models")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gptj", "falcon_alibi", "t5"])
def test_in_16_bits(name: str, dtype: torch.dtype, built: dict[str, Any]) -> None:
    model = copy.deepcopy(model_of(name, built)).to(dtype)
    inputs = FAMILIES[name].inputs("left")
    plain = model(**inputs)[0]
    counts: list[tuple[int, int]] = []

    def see(call: AttentionLogits) -> None:
        for tile in call.tiles():
            assert tile.logits.dtype == torch.float32
            valid = tile.valid.expand_as(tile.logits)
            assert tile.logits[valid].isfinite().all() and tile.logits[valid].abs().max() < 9e3
            counts.append((int(valid.sum()), call.heads))

    with attach(model, {"attention_logit": see}):
        recorded = model(**inputs)[0]
    assert torch.equal(plain, recorded) or bool(plain.isnan().any())
    if name != "t5":
        short = LENGTH - PADDED
        assert counts == [(4 * (LENGTH * (LENGTH + 1) + short * (short + 1)) // 2, 4)] * 2


@pytest.mark.parametrize("name", ["llama", "gptj", "bloom"])
def test_a_cache_and_two_lengths(name: str, built: dict[str, Any]) -> None:
    model = model_of(name, built)
    tokens = FAMILIES[name].inputs("none")["input_ids"]
    whole: list[Tensor] = []
    parts: list[Tensor] = []
    layers: list[tuple[int, int]] = []

    def see(call: AttentionLogits) -> None:
        layers.append((call.layer, call.query_offset))
        parts.append(weights_of(call)[0])

    with attach(model, {"attention_logit": lambda call: whole.append(weights_of(call)[0])}):
        model(tokens)
    with attach(model, {"attention_logit": see}):
        cache = model(tokens[:, :7], use_cache=True).past_key_values
        model(tokens[:, 7:], past_key_values=cache)
    assert layers == [(0, 0), (1, 0), (0, 7), (1, 7)]
    for layer in range(2):
        torch.testing.assert_close(parts[layer], whole[layer][:, :, :7, :7], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(parts[2 + layer], whole[layer][:, :, 7:], rtol=1e-4, atol=1e-5)


@pytest.mark.kind(7, "probes", "models")
@pytest.mark.parametrize("name", ["llama", "gptj", "wavlm", "deberta_v2"])
def test_a_model_that_trains(name: str, built: dict[str, Any]) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        model = copy.deepcopy(model_of(name, built)).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for knob in ("attention_dropout", "dropout"):
                if isinstance(getattr(module, knob, None), float):
                    setattr(module, knob, 0.0)
        if name == "wavlm":
            model.config.layerdrop = model.config.mask_time_prob = 0.0
        inputs = FAMILIES[name].inputs("none")
        gradients = []
        for record in (False, True):
            model.zero_grad()
            if record:

                def see(call: AttentionLogits) -> None:
                    assert all(block.logits.isfinite().all() for block in call.blocks())

                with attach(model, {"attention_logit": see}):
                    model(**inputs)[0].float().pow(2).sum().backward()
            else:
                model(**inputs)[0].float().pow(2).sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert len(gradients[0]) > 5
        for plain, recorded in zip(*gradients, strict=True):
            torch.testing.assert_close(plain, recorded, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gptj", "bloom", "falcon", "gemma2", "gpt_oss", "t5", "wavlm"])
def test_replacing_logits_by_themselves(name: str, built: dict[str, Any]) -> None:
    model = model_of(name, built)
    inputs = FAMILIES[name].inputs("none")
    plain = model(**inputs)[0]
    with attach(model, {"attention_logit": lambda call: lambda tile: tile.logits}):
        replaced = model(**inputs)[0]
    torch.testing.assert_close(replaced, plain, rtol=1e-3, atol=1e-3)
    with attach(model, {"attention_logit": lambda call: lambda tile: 0.3 * tile.logits}):
        assert (model(**inputs)[0] - plain).abs().max() > 1e-3


@pytest.mark.kind(7, "probes", "models")
def test_an_exception_restores_everything(built: dict[str, Any]) -> None:
    model = model_of("clip", built)
    inputs = FAMILIES["clip"].inputs("none")

    def state() -> Any:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        configs = (model.config, model.config.text_config, model.config.vision_config)
        names = [str(config._attn_implementation) for config in configs]
        return hooks, names, torch.backends.mha.get_fastpath_enabled()

    def fail(call: AttentionLogits) -> None:
        raise KeyError("mine")

    before, plain = state(), model(**inputs)[0]
    with pytest.raises(KeyError, match="mine"), attach(model, {"attention_logit": fail}):
        assert state() != before
        model(**inputs)
    assert state() == before and torch.equal(model(**inputs)[0], plain)


@pytest.mark.kind(2, "probes", "models")
def test_experts_are_seen_each_and_the_idle_named(built: dict[str, Any]) -> None:
    model = model_of("mixtral", built)
    inputs = FAMILIES["mixtral"].inputs("none")
    plain = model(**inputs)[0]
    place = "model.layers.0.mlp.experts"
    seen: dict[str, Tensor] = {}
    points = {"mlp_down_input": lambda visit: seen.__setitem__(visit.name, visit.tensor)}
    inside: list[Any] = []
    experts = model.get_submodule(place)
    handle = experts.register_forward_pre_hook(lambda m, args: inside.append(args))
    with attach(model, points) as attachment:
        assert torch.equal(model(**inputs)[0], plain)
    handle.remove()
    assert len(attachment.hits["mlp_down_input"]) == 8
    states, chosen, _ = inside[0]
    for expert in range(4):
        tokens = torch.where((chosen == expert).T)[1]  # by rank of the choice, then by token
        gate, up = (states[tokens] @ experts.gate_up_proj[expert].T).chunk(2, -1)
        wanted = nn.functional.silu(gate) * up
        torch.testing.assert_close(seen[f"{place}.{expert}.down_proj"][0], wanted)
    with torch.inference_mode(False), torch.no_grad():
        idle = copy.deepcopy(model)
        router = idle.model.layers[0].mlp.gate
        router.weight[3] = 0
        router.weight[:3] = router.weight[:1] * torch.tensor([[1.0], [-1.0], [2.0]])
    with (
        pytest.raises(ProbeError, match=r"mlp_down_input model\.layers\.0\.mlp\.experts\.\d"),
        attach(idle, points),
    ):
        idle(input_ids=inputs["input_ids"][:1, :1])
    with attach(idle, points, allow_unseen="*.experts.*") as attachment:
        idle(input_ids=inputs["input_ids"][:1, :1])
    assert len(attachment.waived) >= 2


MLPS = {
    "llama": ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"),
    "gpt2": ("transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"),
    "bert": ("encoder.layer.0.intermediate.dense", "encoder.layer.0.output.dense"),
    "bloom": ("transformer.h.0.mlp.dense_h_to_4h", "transformer.h.0.mlp.dense_4h_to_h"),
    "t5": (
        "encoder.block.0.layer.1.DenseReluDense.wi",
        "encoder.block.0.layer.1.DenseReluDense.wo",
    ),
    "swin": ("encoder.layers.0.blocks.0.mlp.fc1", "encoder.layers.0.blocks.0.mlp.fc2"),
    "gptj": ("transformer.h.0.mlp.fc_in", "transformer.h.0.mlp.fc_out"),
    "mixtral": ("model.layers.0.mlp", "model.layers.0.mlp.experts.0.down_proj"),
}


@pytest.mark.parametrize("name", MLPS)
def test_the_other_points(name: str, built: dict[str, Any]) -> None:
    model, inputs = model_of(name, built), FAMILIES[name].inputs("none")
    plain = model(**inputs)[0]
    widths: dict[str, int] = {}
    points = ("mlp_input", "mlp_down_input", "attention_output", "hidden_state", "linear_input")

    def see(visit: Any) -> None:
        assert visit.tensor.dim() == 3 and visit.real.shape == visit.tensor.shape[:2]
        widths[visit.point] = visit.tensor.shape[-1]

    select = ["*mlp*"] if name in ("gpt2", "llama") else None
    with attach(model, dict.fromkeys(points, see), select=select) as attachment:
        assert torch.equal(model(**inputs)[0], plain)
    first, down = MLPS[name]
    assert next(iter(attachment.hits["mlp_input"])) == first
    assert next(iter(attachment.hits["mlp_down_input"])) == down
    if select:
        linears = attachment.hits["linear_input"]
        assert linears and all("mlp" in linear for linear in linears)
    if name == "llama":
        assert widths["mlp_input"] == widths["attention_output"] == 32
        assert widths["mlp_down_input"] == 48
