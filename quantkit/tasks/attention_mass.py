"""Where the token that an answer follows looks: the paper's Table 3, one row of each map at a time.

Ye et al. 2024, "Differential Transformer" (arXiv 2410.05258), section 3.4: the attention scores
that go to the answer's span and to the noise of the context. Of every map only the asked rows are
computed, so that time and memory beyond the model's own grow with the length alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.calib_sets import TokenBatch
from quantkit.calib_sets.retrieval import RetrievalSample
from quantkit.errors import InputError
from quantkit.models import backbone
from quantkit.models.placement import input_device
from quantkit.outliers.sinks import mixed
from quantkit.probes import AttentionLogits, LogitTile, attach, grouped_logits
from quantkit.probes.masks import valid_rows

PARTS: Final = ("answer", "needles", "noise", "first", "question")
"""Of a prompt, see `results.AttentionMass`; a key's part is an index into it."""
KINDS: Final = ("signed", "share")
"""The map's own weights; |weight| over the row's sum of |weight|."""
Masses = NDArray[np.float64]
"""`[kinds, parts]`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """A query row to look at: `row` of the batch, `position` in it.

    Attributes:
        parts: int64 `[position + 1]`, the part of each key that it may see.
    """

    row: int
    position: int
    parts: Tensor


def attention_mass(
    model: Any, batches: Iterable[tuple[TokenBatch, Sequence[Look]]]
) -> list[Masses]:
    """Returns the mass on each part, mean over layers and heads, of every look in order.

    Of the effective map, the sum over a head's maps of mix * softmax: softmax 1 - lambda softmax 2
    for a differential head (arXiv 2410.05258, equation 1).

    Args:
        model: A transformers model, not quantized; it is left as it was.

    Raises:
        ProbeError: attention that cannot be seen.
    """
    found: list[Masses] = []
    device = input_device(model)
    for batch, looks in batches:
        watch = _Watch(looks=looks, sums=[np.zeros((len(KINDS), len(PARTS))) for _ in looks])
        inputs: dict[str, Any] = {name: x.to(device) for name, x in batch.inputs.items()}
        with attach(model, {"attention_logit": watch.see}), torch.inference_mode():
            backbone(model)(**inputs, use_cache=False)
        found += [total / watch.heads for total in watch.sums]
    return found


@dataclass(kw_only=True, eq=False)
class _Watch:
    """Sums over the layers and heads of one forward pass; `partial`: of a layer's first maps."""

    looks: Sequence[Look]
    sums: list[Masses]
    heads: int = 0
    partial: dict[int, Tensor] = field(default_factory=dict)

    def see(self, call: AttentionLogits) -> None:
        if call.is_cross:
            return
        for index, look in enumerate(self.looks):
            weights = _weights(call, look)
            if call.map > 1:
                weights = weights + self.partial.pop(index)
            if call.map < call.maps:  # the others of the layer follow, before any other layer's
                self.partial[index] = weights
            else:
                self.sums[index] += _masses(weights, look.parts)
        if call.map == call.maps:
            self.heads += call.heads


def _weights(call: AttentionLogits, look: Look) -> Tensor:
    """Returns one row of one map's share in the effective map, float32 `[heads, position + 1]`."""
    own = call.of_sequence(look.row)
    start, stop = look.position, look.position + 1
    shape = (1, own.query.shape[2], own.key.shape[2])
    valid = valid_rows(own.mask, start, stop, shape, own.causal).to(own.query.device)
    valid = valid.expand(1, -1, 1, shape[2])
    if own.given is None:
        logits = grouped_logits(own.query[:, :, start:stop], own.key, own.scale)
    else:
        logits = own.given[:, :, start:stop].float()
    tile = LogitTile(start=start, logits=logits, valid=valid, attended=valid)
    row = mixed([own], [tile])[0, :, 0]
    return row[:, :stop].cpu()  # what follows is masked


def _masses(weights: Tensor, parts: Tensor) -> Masses:
    """Returns the sums over heads, both kinds."""
    shares = weights.abs() / weights.abs().sum(-1, keepdim=True)
    both = torch.stack([weights.double().sum(0), shares.double().sum(0)])
    masses = torch.zeros(len(KINDS), len(PARTS), dtype=torch.float64)
    return masses.index_add_(1, parts, both).numpy()


def token_characters(tokenizer: Any, text: str, tokens: int) -> list[int]:
    """Returns the last character of `text` that each token stands for; -1 for what precedes it.

    Args:
        tokens: How many the text has with the BOS that may stand before it.

    Raises:
        InputError: a tokenizer that does not say where its tokens stand in the text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"{type(tokenizer).__name__} does not say where its tokens stand in a text, which the "
            "attention to needles needs: expected a fast tokenizer (tokenizer.json)."
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    last = [max(start, end - 1) for start, end in encoded["offset_mapping"]]
    return [-1] * (tokens - len(last)) + last


def prompt_parts(sample: RetrievalSample, query: int, characters: Sequence[int]) -> Tensor:
    """Returns the part of each token, int64 `[tokens]`, for one question.

    The first token is `first` whatever it stands for; all behind the context is `question`, the
    earlier questions and answers, too.

    Args:
        characters: As `token_characters` returns them.
    """
    spans = [(needle.start, needle.start + len(needle.sentence)) for needle in sample.needles]
    found = []
    for token, character in enumerate(characters):
        part = "question" if character >= len(sample.context) else "noise"
        for needle, (start, end) in enumerate(spans):
            if start <= character < end:
                part = "answer" if needle == sample.asked[query] else "needles"
        if token == 0 or character < 0:
            part = "first"
        found.append(PARTS.index(part))
    return torch.tensor(found)
