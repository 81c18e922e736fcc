"""Which linear layers alone read which norm: by hand for a dozen families, and by running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.models.folding import Fold, folded
from quantkit.models.smoothing_groups import SmoothingGroup, smoothing_groups

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
QKV, GATED = "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "mlp.gate_proj mlp.up_proj"
DOWN = ("mlp.up_proj", "mlp.down_proj")
LLAMA = [("input_layernorm", QKV), ("post_attention_layernorm", GATED), DOWN]
OPT = [
    ("self_attn_layer_norm", "self_attn.k_proj self_attn.v_proj self_attn.q_proj"),
    ("final_layer_norm", "fc1"),
]
FAMILIES: dict[str, tuple[str, dict[str, Any], list[tuple[str, str]]]] = {
    "llama": ("LlamaForCausalLM", {}, LLAMA),
    "diffllama": ("DiffLlamaForCausalLM", {}, LLAMA),
    # its norms multiply by 1 + weight, and two of the four come after what they follow
    "gemma2": (
        "Gemma2ForCausalLM",
        {"head_dim": 8},
        [("input_layernorm", QKV), ("pre_feedforward_layernorm", GATED), DOWN],
    ),
    # fused: what gate and up make cannot be told apart, so nothing folds into up
    "phi3": (
        "Phi3ForCausalLM",
        {},
        [
            ("input_layernorm", "self_attn.qkv_proj"),
            ("post_attention_layernorm", "mlp.gate_up_proj"),
        ],
    ),
    # one norm, read by attention and MLP side by side
    "phi": ("PhiForCausalLM", {}, [("input_layernorm", f"{QKV} mlp.fc1")]),
    "cohere": ("CohereForCausalLM", {}, [("input_layernorm", f"{QKV} {GATED}"), DOWN]),
    # norms after attention and MLP: their output is the residual
    "olmo2": ("Olmo2ForCausalLM", {}, [DOWN]),
    "bert": ("BertModel", {}, []),
    "mixtral": ("MixtralForCausalLM", {}, [("input_layernorm", QKV)]),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}, OPT),
    # the last norm of a layer is also the residual where it stands behind the sum
    "opt, post-norm": (
        "OPTForCausalLM",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
        [],
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}, []),
    "vit": (
        "ViTModel",
        VISION,
        [
            ("layernorm_before", "attention.q_proj attention.k_proj attention.v_proj"),
            ("layernorm_after", "mlp.fc1"),
        ],
    ),
}


def made(kind: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    sizes = changes if "image_size" in changes else SIZES | changes
    model = model_class(model_class.config_class(**sizes)).eval()
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if "Norm" in type(module).__name__:  # as fresh ones are, no norm is told apart
                    parameter.add_(torch.randn_like(parameter) * 0.3)
                elif name == "bias":
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def output(model: Any) -> Tensor:
    ids = torch.arange(30).reshape(2, 15) * 31 % 97
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    inputs = ids if model.main_input_name == "input_ids" else pixels
    with torch.inference_mode():
        first: Tensor = model(inputs)[0]
    return first


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_by_hand(family: str) -> None:
    kind, changes, expected = FAMILIES[family]
    model = made(kind, changes)

    groups = smoothing_groups(model)

    first = [
        (group.producer.split(".0.", 1)[1], " ".join(n.split(".0.", 1)[1] for n in group.linears))
        for group in groups
        if ".0." in f".{group.producer}"
    ]
    assert sorted(first) == sorted(expected)
    assert len(groups) == 2 * len(expected)  # both layers


@pytest.mark.parametrize("family", [f for f in FAMILIES if FAMILIES[f][2]])
def test_any_scales_leave_the_function_unchanged(family: str) -> None:
    """Not the powers of two that the search tries, and another input."""
    kind, changes, _ = FAMILIES[family]
    model = made(kind, changes)
    modules = dict(model.named_modules())
    generator = torch.Generator().manual_seed(3)
    folds = [
        Fold(
            producer=group.producer,
            readers=group.linears,
            scales=torch.rand(modules[group.linears[0]].in_features, generator=generator) * 5 + 0.1,
        )
        for group in smoothing_groups(model)
    ]
    before = output(model)
    state = {n: (t.data_ptr(), t.clone()) for n, t in model.state_dict().items()}
    with folded(model, folds):
        assert not torch.equal(
            modules[folds[0].readers[0]].weight, state[f"{folds[0].readers[0]}.weight"][1]
        )
        after = output(model)
    assert float((after - before).norm() / before.norm()) < 1e-5
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == state[name][0] and torch.equal(tensor, state[name][1]), name


def test_a_norm_that_something_else_reads_gives_no_group() -> None:
    model = made("LlamaForCausalLM", {})
    layer = model.model.layers[1]
    original = type(layer).forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = original(self, hidden_states, *args, **kwargs)
        return found + 0.01 * self.input_layernorm(hidden_states)

    layer.forward = forward.__get__(layer)
    groups = {group.producer for group in smoothing_groups(model)}
    assert not any(name.endswith("input_layernorm") for name in groups)
    assert "model.layers.1.post_attention_layernorm" in groups


def test_a_tied_weight_gives_no_group() -> None:
    model = made("LlamaForCausalLM", {})
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    groups = [group for group in smoothing_groups(model) if "mlp" in group.linears[0]]
    assert groups == []
    fold = Fold(
        producer="model.layers.0.mlp.up_proj",
        readers=("model.layers.0.mlp.down_proj",),
        scales=torch.full((48,), 2.0),
    )
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj"), folded(model, [fold]):
        raise AssertionError("not reached")
    assert second.mlp.up_proj.weight is first.mlp.up_proj.weight


def test_a_dead_norm_gives_no_group() -> None:
    """Its scales move without a trace because nothing of it is seen."""
    model = made("LlamaForCausalLM", {})
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    groups = {group.producer.rsplit(".", 1)[1] for group in smoothing_groups(model)}
    assert groups == {"post_attention_layernorm", "up_proj"}


def test_a_model_that_is_not_understood_gives_none() -> None:
    assert smoothing_groups(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).eval()) == []
    sizes: dict[str, Any] = {"vocab_size": 97, "d_model": 32, "d_ff": 48, "num_heads": 4}
    config = transformers.T5Config(**sizes, num_layers=2)  # wants the decoder's tokens too
    assert smoothing_groups(transformers.T5ForConditionalGeneration(config).eval()) == []


def test_training_mode_is_refused(tiny_llama: Any) -> None:
    with pytest.raises(InputError, match=r"eval\(\)"):
        smoothing_groups(tiny_llama.train())


NORM, QKV_NAMES = (
    "model.layers.0.input_layernorm",
    tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv"),
)


@pytest.mark.parametrize(
    ("producer", "readers", "scales", "said"),
    [
        (NORM, QKV_NAMES, torch.ones(31), "expected 32 positive numbers, got 31"),
        (NORM, QKV_NAMES, torch.zeros(32), "positive"),
        (NORM, QKV_NAMES, torch.full((32,), torch.nan), "positive"),
        ("model.layers.0.input_norm", QKV_NAMES, torch.ones(32), "Did you mean"),
        ("model.layers.0.self_attn", QKV_NAMES, torch.ones(32), "LlamaAttention"),
        ("model.embed_tokens", QKV_NAMES, torch.ones(32), "Embedding"),
        (NORM, (NORM,), torch.ones(32), "LlamaRMSNorm"),
    ],
)
def test_folds_that_cannot_be_are_refused_and_leave_nothing(
    tiny_llama: Any, producer: str, readers: tuple[str, ...], scales: Tensor, said: str
) -> None:
    before = {name: (t.data_ptr(), t.clone()) for name, t in tiny_llama.state_dict().items()}
    fold = Fold(producer=producer, readers=readers, scales=scales)
    with pytest.raises(InputError, match=said), folded(tiny_llama, [fold]):
        raise AssertionError("not reached")
    for name, tensor in tiny_llama.state_dict().items():
        assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1]), name


def test_two_groups_with_one_reader_are_refused(tiny_llama: Any) -> None:
    fold = Fold(producer=NORM, readers=QKV_NAMES, scales=torch.ones(32))
    with pytest.raises(InputError, match="two groups"), folded(tiny_llama, [fold, fold]):
        raise AssertionError("not reached")


class SquaredNorm(nn.Module):
    """Neither proportional to its weight nor to 1 + its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight**2


def test_a_norm_of_another_kind_is_refused() -> None:
    model = nn.ModuleDict({"norm": SquaredNorm(), "linear": nn.Linear(4, 4)})
    scales = torch.tensor([1.0, 2.0, 4.0, 8.0])
    fold = Fold(producer="norm", readers=("linear",), scales=scales)
    with pytest.raises(InputError, match="SquaredNorm is not proportional"), folded(model, [fold]):
        raise AssertionError("not reached")


def test_a_group_says_what_it_is() -> None:
    group = smoothing_groups(made("LlamaForCausalLM", {}))[0]
    assert group == SmoothingGroup(producer=NORM, linears=QKV_NAMES, kind="norm")
