"""DIFF V2 as a model that transformers loads: `DiffV2Config`, `DiffV2ForCausalLM`.

Llama but for the attention, as `DiffDecoder`, whose layers these are. `attention_mask` is the only
thing it takes beside tokens: RoPE is inside the attention and counts from the row's first token.

There is no KV cache: whole sequences alone, so neither generation nor a decoder graph. (A cache
would hold what a Llama's does: both maps of a head have the same keys and values.)
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from quantkit.errors import InputError
from quantkit.jobs import Sizes
from quantkit.models.differential.decoder import WEIGHT_STD, DiffDecoderLayer, DiffSizes

COUNT_TOLERANCE_FRAC: Final = 1e-3
"""How far the parameter counts of matched models may be apart, of the first one's."""
_NO_CACHE: Final = (
    "DIFF V2 keeps no KV cache, so it can be trained and measured, but neither generate text nor "
    "be exported: expected use_cache=False; DiffLlama (V1) does both."
)


class DiffV2Config(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Sizes of a `DiffV2ForCausalLM`, by Llama's names.

    Attributes:
        num_attention_heads: Query heads 2h, both maps' as DiffLlama counts them; h heads leave.
        num_key_value_heads: Default h.
        head_dim: d; default `hidden_size / h`.
        max_position_embeddings: What it was trained for; nothing depends on it.
    """

    model_type = "quantkit-diff-v2"

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 6
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = WEIGHT_STD
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    use_cache: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        pairs = self.num_attention_heads // 2
        if self.num_key_value_heads is None:
            self.num_key_value_heads = pairs
        if self.head_dim is None and pairs:
            self.head_dim = self.hidden_size // pairs
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    def sizes(self) -> DiffSizes:
        """Returns the same as the sizes of a `DiffDecoder`.

        Raises:
            InputError: the sizes do not fit each other.
        """
        if self.num_attention_heads < 2 or self.num_attention_heads % 2:
            raise InputError(
                "num_attention_heads of DIFF V2 counts the heads of both maps: expected an even "
                f"number, got {self.num_attention_heads}."
            )
        return DiffSizes(
            attention="v2",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads // 2,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rope_theta=self.rope_theta,
            norm_eps=self.rms_norm_eps,
            tie_embeddings=self.tie_word_embeddings,
        )


class _DiffV2PreTrained(PreTrainedModel):  # type: ignore[no-untyped-call]
    """What transformers has to know of both models."""

    config_class = DiffV2Config
    base_model_prefix = "model"
    _no_split_modules = ["DiffDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True


class DiffV2Model(_DiffV2PreTrained):  # type: ignore[no-untyped-call]
    """The decoder without its vocabulary head; new weights are random."""

    def __init__(self, config: DiffV2Config) -> None:
        super().__init__(config)
        sizes = config.sizes()
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(DiffDecoderLayer(sizes, n) for n in range(sizes.num_layers))
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        past_key_values: Any = None,
        use_cache: bool | None = None,
    ) -> BaseModelOutput:
        """Returns `last_hidden_state`, `[batch, token, hidden_size]`, after the last norm.

        Args:
            input_ids: `[batch, token]`.
            attention_mask: `[batch, token]`, zero where a token is padding, on either side.

        Raises:
            InputError: a KV cache is asked for; the mask has another shape.
        """
        if use_cache or past_key_values is not None:
            raise InputError(_NO_CACHE)
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask)
        return BaseModelOutput(last_hidden_state=self.norm(hidden))


class DiffV2ForCausalLM(_DiffV2PreTrained):  # type: ignore[no-untyped-call]
    """A language model of DIFF V2 layers: tokens in, logits out; new weights are random."""

    # saved once; said to transformers, which ties where the config does
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DiffV2Config) -> None:
        super().__init__(config)
        self.model = DiffV2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Any = None,
        use_cache: bool | None = None,
    ) -> CausalLMOutput:
        """Returns `logits`, `[batch, token, vocab_size]`, and `loss` where labels are given.

        Args:
            labels: `[batch, token]`, the tokens themselves: they are shifted here; -100 is left
                out. The loss is Llama's, a mean over predicted tokens in nats.
            logits_to_keep: Logits of the last so many tokens, or at these positions; 0: of all.

        Raises:
            InputError: as `DiffV2Model`.
        """
        found = self.model(
            input_ids, attention_mask, past_key_values=past_key_values, use_cache=use_cache
        )
        hidden = found.last_hidden_state
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            last = not isinstance(logits_to_keep, Tensor)
            hidden = hidden[:, slice(-logits_to_keep, None) if last else logits_to_keep]
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size
            )
        return CausalLMOutput(loss=loss, logits=logits)

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises InputError: there is no KV cache to generate with."""
        raise InputError(_NO_CACHE)


def register_diff_v2() -> None:
    """Makes the classes known to transformers' `AutoConfig` and `AutoModel...`; once is enough."""
    AutoConfig.register(DiffV2Config.model_type, DiffV2Config, exist_ok=True)
    AutoModel.register(DiffV2Config, DiffV2Model, exist_ok=True)
    AutoModelForCausalLM.register(DiffV2Config, DiffV2ForCausalLM, exist_ok=True)


register_diff_v2()


def v2_config(sizes: Sizes) -> DiffV2Config:
    """Returns the config of DIFF V2 that stands beside a Llama of these sizes.

    As many heads leave the attention, h of width d with h key-value heads; the h further query
    heads and lambda's projection, `width h (d + 1)` weights a layer, are taken from the MLP, whose
    three matrices are `width` wide: it is narrower by h (d + 1) / 3, to the nearest whole number.

    Raises:
        InputError: no MLP makes the parameter counts agree within `COUNT_TOLERANCE_FRAC`.
    """
    mlp_width = sizes.mlp_width - round(sizes.heads * (sizes.head_size + 1) / 3)
    attends = f"{sizes.heads} heads of {sizes.head_size}"
    if mlp_width < 1:
        raise InputError(
            f"[sizes] diff-v2 takes the second queries of {attends} from an mlp_width of "
            f"{sizes.mlp_width}, which leaves {mlp_width}: give a larger one."
        )
    second = sizes.width * sizes.heads * (sizes.head_size + 1)
    ours = _parameters(sizes, mlp_width) + sizes.layers * second
    baseline = _parameters(sizes, sizes.mlp_width)
    if abs(ours - baseline) > COUNT_TOLERANCE_FRAC * baseline:
        raise InputError(
            f"[sizes] diff-v2 with {attends} and an mlp_width of {mlp_width} has {ours:,} "
            f"parameters, the baseline {baseline:,}: expected at most {COUNT_TOLERANCE_FRAC:.1%} "
            "between them. Equal where heads x (head_size + 1) is a multiple of 3."
        )
    return DiffV2Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=mlp_width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=2 * sizes.heads,
        num_key_value_heads=sizes.heads,
        head_dim=sizes.head_size,
        max_position_embeddings=sizes.context,
        rope_theta=sizes.rope_theta,
        tie_word_embeddings=sizes.tie_embeddings,
    )


def _parameters(sizes: Sizes, mlp_width: int) -> int:
    """Returns how many a Llama of these sizes has, tied ones once."""
    attention = 4 * sizes.width * sizes.heads * sizes.head_size
    layer = attention + 3 * sizes.width * mlp_width + 2 * sizes.width
    tables = 1 if sizes.tie_embeddings else 2
    return sizes.layers * layer + sizes.width + tables * sizes.vocabulary * sizes.width
