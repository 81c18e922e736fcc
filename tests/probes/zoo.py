"""Small random models of many families, and what to feed them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

VOCAB, BATCH, LENGTH = 61, 2, 11
PADDED = 4
"""Tokens of padding in the second sequence."""
PADS = ("none", "right", "left")


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build a model, what it takes, which padding it allows.

    `attentions`: in the order of execution, which output fields hold the attention weights; or
    `attention_class`, whose modules return them second.
    """

    build: Callable[[], Any]
    inputs: Callable[[str], dict[str, Any]]
    pads: tuple[str, ...] = PADS
    attentions: tuple[str, ...] = ("attentions",)
    implementations: tuple[str, ...] = ("sdpa", "eager")
    attention_class: str | None = None


def ids(seed: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def pad_mask(pad: str, length: int = LENGTH) -> Tensor:
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    if pad == "right":
        mask[1, -PADDED:] = 0
    elif pad == "left":
        mask[1, :PADDED] = 0
    return mask


def text(pad: str) -> dict[str, Any]:
    return {"input_ids": ids(), "attention_mask": pad_mask(pad)}


def two_texts(pad: str) -> dict[str, Any]:
    """The encoder is padded on the right, the decoder as said: so that the two can be mixed up."""
    return {
        "input_ids": ids(5, LENGTH + 2),
        "attention_mask": pad_mask("none" if pad == "none" else "right", LENGTH + 2),
        "decoder_input_ids": ids(),
        "decoder_attention_mask": pad_mask(pad),
    }


def pixels(_pad: str) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    }


def sound(_pad: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_features": torch.randn(BATCH, 8, 2 * LENGTH, generator=generator),
        "decoder_input_ids": ids(),
    }


def wave(pad: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(BATCH, 64, generator=generator)
    mask = torch.ones(BATCH, 64, dtype=torch.int64)
    if pad == "right":
        mask[1, 40:] = 0
    return {"input_values": values, "attention_mask": mask}


def sharpened(model: nn.Module) -> Any:
    """Returns the model with logits far enough from zero that a wrong one is seen."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4 if "embed" not in name else 10)
    return model.eval()


def _make(model: str, config: str, **sizes: Any) -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(7)
        return sharpened(getattr(tf, model)(getattr(tf, config)(**sizes)))

    return build


def decoder(model: str, config: str, **more: Any) -> Callable[[], Any]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    return _make(model, config, **sizes | more)


ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BOTH_SIDES = ("encoder_attentions", "decoder_attentions+cross_attentions")
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        build=decoder("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=4), inputs=text
    ),
    "gqa": Family(build=decoder("Qwen3ForCausalLM", "Qwen3Config"), inputs=text),
    "mistral": Family(
        build=decoder("MistralForCausalLM", "MistralConfig", sliding_window=4), inputs=text
    ),
    "gemma2": Family(
        build=decoder(
            "Gemma2ForCausalLM", "Gemma2Config", sliding_window=4, attn_logit_softcapping=3.0
        ),
        inputs=text,
        implementations=("eager",),
    ),
    "gpt_oss": Family(
        build=decoder("GptOssForCausalLM", "GptOssConfig", sliding_window=4, **MOE),
        inputs=text,
        implementations=("eager",),
    ),
    "mixtral": Family(build=decoder("MixtralForCausalLM", "MixtralConfig", **MOE), inputs=text),
    "gpt2": Family(
        build=_make(
            "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4
        ),
        inputs=text,
    ),
    "gpt2_upcast": Family(
        build=_make(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            reorder_and_upcast_attn=True,
            scale_attn_by_inverse_layer_idx=True,
        ),
        inputs=text,
        implementations=("eager",),
    ),
    "bert": Family(build=_make("BertModel", "BertConfig", **ENCODER), inputs=text),
    "vit": Family(
        build=_make("ViTModel", "ViTConfig", **ENCODER, image_size=16, patch_size=4),
        inputs=pixels,
        pads=("none",),
    ),
    "t5": Family(
        build=_make("T5ForConditionalGeneration", "T5Config", **T5),
        inputs=two_texts,
        attentions=BOTH_SIDES,
    ),
    "bart": Family(
        build=_make(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
        ),
        inputs=two_texts,
        attentions=BOTH_SIDES,
    ),
    "whisper": Family(
        build=_make(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=VOCAB,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=LENGTH,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        inputs=sound,
        pads=("none",),
        attentions=BOTH_SIDES,
    ),
    "clip": Family(
        build=_make(
            "CLIPModel",
            "CLIPConfig",
            text_config=ENCODER | {"eos_token_id": 2},
            vision_config={k: v for k, v in ENCODER.items() if k != "vocab_size"}
            | {"image_size": 16, "patch_size": 4},
            projection_dim=16,
        ),
        inputs=lambda pad: text(pad) | pixels(pad),
        attentions=("vision_model_output.attentions", "text_model_output.attentions"),
    ),
    "swin": Family(
        build=_make(
            "SwinModel",
            "SwinConfig",
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        inputs=pixels,
        pads=("none",),
        attention_class="SwinAttention",
    ),
    "bloom": Family(
        build=_make(
            "BloomForCausalLM", "BloomConfig", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4
        ),
        inputs=text,
    ),
    "falcon": Family(
        build=_make("FalconForCausalLM", "FalconConfig", **ENCODER, alibi=False), inputs=text
    ),
    "falcon_alibi": Family(
        # with sdpa, transformers adds ALiBi otherwise than in eager: a test of its own
        build=_make(
            "FalconForCausalLM", "FalconConfig", **ENCODER, alibi=True, attn_implementation="eager"
        ),
        inputs=text,
        implementations=("eager",),
    ),
    "deberta_v2": Family(
        build=_make(
            "DebertaV2Model",
            "DebertaV2Config",
            **ENCODER,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_buckets=8,
        ),
        inputs=text,
        implementations=("eager",),
    ),
    "gptj": Family(
        build=_make(
            "GPTJForCausalLM",
            "GPTJConfig",
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=4,
        ),
        inputs=text,
        implementations=("eager",),
    ),
    "mpt": Family(
        build=_make(
            "MptForCausalLM",
            "MptConfig",
            vocab_size=VOCAB,
            d_model=32,
            n_layers=2,
            n_heads=4,
            max_seq_len=32,
        ),
        inputs=text,
        implementations=("eager",),
    ),
    "wavlm": Family(
        build=_make(
            "WavLMModel",
            "WavLMConfig",
            **{k: v for k, v in ENCODER.items() if k != "max_position_embeddings"},
            conv_dim=(8, 8),
            conv_kernel=(4, 2),
            conv_stride=(2, 2),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        ),
        inputs=wave,
        pads=("none", "right"),
        implementations=("eager",),
    ),
}
