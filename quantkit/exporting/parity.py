"""Proof that a graph computes what the torch model computes, on shapes and caches it will meet."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from quantkit.errors import InputError
from quantkit.onnx_runtime import DecoderSession
from quantkit.results import Parity

Array = Tensor | NDArray[np.generic]
TorchForward = Callable[[Tensor, Tensor], Tensor]
"""(ids `[batch, tokens]`, mask of the same shape) -> logits `[batch, tokens, vocabulary]`."""
CachedForward = Callable[[Tensor, Tensor, int], Tensor]
"""(ids, mask, tokens of an earlier call) -> logits of the tokens that come after those."""


class Batch(Protocol):
    """Token ids and a mask, both `[batch, tokens]`, padded on the right."""

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def attention_mask(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How close two logit tensors are at the valid positions.

    Attributes:
        max_abs: Largest |difference|.
        cosine: Mean over positions of the cosine of the two rows, each less its own mean: a
            softmax does not see the mean, and a large common one would hide every difference.
        top1_agreement: Share of positions with the same largest entry.
        positions: How many were compared.
    """

    max_abs: float
    cosine: float
    top1_agreement: float
    positions: int


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The least agreement that passes."""

    cosine: float
    top1_agreement: float

    def passes(self, agreement: Agreement) -> bool:
        """Returns False also where a figure is NaN."""
        return (
            math.isfinite(agreement.max_abs)
            and agreement.cosine >= self.cosine
            and agreement.top1_agreement >= self.top1_agreement
        )


FLOAT_GATE: Final = Gate(cosine=0.9999, top1_agreement=0.999)
QUANTIZED_GATE: Final = Gate(cosine=0.999, top1_agreement=0.97)
"""Looser: a value at the tie of two steps goes either way with the last bit of a sum."""


def compare_logits(reference: Array, candidate: Array, valid: Array) -> Agreement:
    """Returns how close `candidate` is to `reference`, both `[batch, tokens, vocabulary]`.

    Args:
        valid: `[batch, tokens]`, true where there is a real token.

    Raises:
        InputError: shapes that do not match, or nothing valid.
    """
    keep = torch.as_tensor(valid).bool()
    left, right = torch.as_tensor(reference), torch.as_tensor(candidate)
    if left.shape != right.shape or left.shape[:2] != keep.shape:
        raise InputError(
            f"expected logits of one shape and a mask of their first two sizes, got "
            f"{list(left.shape)}, {list(right.shape)} and {list(keep.shape)}."
        )
    if not bool(keep.any()):
        raise InputError("no valid position to compare.")
    cosines, agreements, max_abs = 0.0, 0, 0.0
    for a, b, rows in zip(left, right, keep, strict=True):  # float64, one sequence at a time
        a, b = a[rows].double(), b[rows].double()
        if not len(a):
            continue
        gap = float((a - b).abs().max())
        max_abs = gap if math.isnan(gap) else max(max_abs, gap)
        agreements += int((a.argmax(-1) == b.argmax(-1)).sum())
        a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
        cosines += float(torch.nn.functional.cosine_similarity(a, b, dim=-1, eps=1e-30).sum())
    count = int(keep.sum())
    return Agreement(
        max_abs=max_abs,
        cosine=cosines / count,
        top1_agreement=agreements / count,
        positions=count,
    )


def check_parity(
    session: DecoderSession,
    torch_forward: TorchForward,
    batches: Sequence[Batch],
    gate: Gate,
    *,
    reference: str = "torch",
    cached_forward: CachedForward | None = None,
) -> list[Parity]:
    """Returns one entry for each run of the graph: every batch, a second shape, a filled cache.

    The second shape is the first sequence alone, cut in half, and always another than the first
    batch's. With a cache, the first half of each sequence goes through the graph and then the rest
    behind its own `present`; torch sees the whole at once. `passed` says what met the gate.

    Args:
        cached_forward: What torch does instead where a call has ranges of its own, so that two of
            them are not one: see `in_two_calls`.

    Raises:
        InputError: no batch, or one of fewer than 4 tokens.
    """
    results: list[Parity] = []
    for ids, mask, cached in _runs(batches):
        if cached and cached_forward is not None:
            expected = cached_forward(ids, mask, cached)
        else:
            expected = torch_forward(ids, mask)[:, cached:]
        tokens = ids.numpy().astype(np.int64)
        attention = mask.numpy().astype(np.int64)
        if cached:
            prefix = session.run(tokens[:, :cached], attention[:, :cached])
            output = session.run(tokens[:, cached:], attention, prefix.present)
        else:
            output = session.run(tokens, attention)
        agreement = compare_logits(expected.detach().cpu(), output.logits, mask[:, cached:])
        results.append(
            Parity(
                reference=reference,
                batch=ids.shape[0],
                seq_len=ids.shape[1] - cached,
                cached=cached,
                max_abs=agreement.max_abs,
                cosine=agreement.cosine,
                top1_agreement=agreement.top1_agreement,
                passed=gate.passes(agreement),
            )
        )
    return results


def in_two_calls(model: PreTrainedModel, ids: Tensor, mask: Tensor, cached: int) -> Tensor:
    """Returns the logits of all but the first tokens, which go through the model's cache."""
    # transformers renamed it: 5.24's decoders take `cache`, others the old name
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    first = model(input_ids=ids[:, :cached], attention_mask=mask[:, :cached], use_cache=True)
    rest = model(
        input_ids=ids[:, cached:],
        attention_mask=mask,
        use_cache=True,
        **{name: getattr(first, name)},
    )
    logits: Tensor = rest.logits
    return logits


def _runs(batches: Sequence[Batch]) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yields (ids, mask, tokens that go through the cache)."""
    if not batches or any(batch.input_ids.shape[1] < 4 for batch in batches):
        raise InputError("parity takes at least one batch, of at least 4 tokens.")
    for batch in batches:
        yield batch.input_ids, batch.attention_mask, 0
    ids, mask = batches[0].input_ids, batches[0].attention_mask
    half = ids.shape[1] // 2
    yield ids[:1, :half], mask[:1, :half], 0
    yield ids, mask, half
