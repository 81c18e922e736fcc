"""Attention with its logits on a grid in one fused kernel: torch's `flex_attention`, for CUDA.

What the tiles do, the kernel does on the way: a logit is divided by its row's scale, rounded,
saturated and scaled back before the softmax, and the mask is read off the spans of valid keys.
Queries, keys and values go in as float32, since a kernel in bfloat16 rounds the softmax outputs.

**This has not run on a GPU.** Its numbers are tested on the CPU, where the same functions run
without fusion. Two things a fused kernel does otherwise: it adds up `q . k` in another order, and
its division may be one unit in the last place off (torch 2.13); a logit that lies within that of
the middle between two steps can fall to the other one. Where the kernel cannot be made, the tiles
take over with a warning.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from quantkit.numerics.qtypes import QType
from quantkit.probes.attention import AttentionLogits
from quantkit.probes.masks import Spans
from quantkit.probes.pieces import AttentionEdit, BlockTransform

DEVICES: Final = ["cuda"]
"""Types of device whose calls come here; tests add the CPU."""
NARROWEST: Final = 16
"""Triton multiplies no narrower heads."""
BLOCK: Final = 128
"""Queries and keys of a block that is left out, masked, or taken whole; torch's default."""
MOST_KERNELS: Final = 64
"""Kernels for different heads, widths and kinds of batch; torch gives up after 8 by default."""

IS_KNOWN: Final = torch.__version__ >= "2.13"
"""Whether torch is new enough: what its prototype is called with has changed before."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGrids:
    """The grid of each query row: `x` becomes `scale * clamp(round(x / scale), low, high)`.

    Attributes:
        scale, low, high: float32 `[batch or 1, heads or 1, query or 1, 1]`; `low` and `high` are
            the bounds of the type less the zero point.
    """

    scale: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, scale: Tensor, zero_point: Tensor | int, qtype: QType) -> Self:
        """Returns the grids of a scale and a zero point that broadcast with each other."""
        offset = torch.as_tensor(zero_point, device=scale.device).to(torch.float32)  # exact
        low, high = (bound - offset + torch.zeros_like(scale) for bound in (qtype.qmin, qtype.qmax))
        return cls(scale=scale, low=low, high=high)


class GridTransform(BlockTransform):
    """A transform of logits that puts each query row on one grid, known before the map is made."""

    @abstractmethod
    def row_grids(self, call: AttentionLogits) -> RowGrids:
        """Returns the grids; may take a look at the whole map first."""


def attend_flex(call: AttentionLogits, edit: AttentionEdit, value: Tensor) -> Tensor | None:
    """Returns softmax(logits on their grids) @ value, float32 `[batch, heads, query, d]`.

    Nothing of size query x key is held on CUDA. A query row that is masked altogether gives zeros.
    None where a map is for the tiles: another device than CUDA, an edit of more than the logits'
    grid, sinks, a bias, logits that the model made itself, a mask with holes, gradients; and, with
    a warning, where the kernel cannot be made.

    Args:
        value: `[batch, kv_heads, key, d]`, of as many heads as the keys.
    """
    if not isinstance(edit.logits, GridTransform) or not _fits(call, edit, value):
        return None
    queries, keys = call.query.shape[2], call.key.shape[2]
    device = call.query.device
    kernel = _kernel(device.type)
    try:
        # contiguous throughout: other strides would be another kernel
        attention: Tensor = kernel.run(
            call.query.float().contiguous(),
            call.key.float().contiguous(),
            value.float().contiguous(),
            score_mod=_on_grids(edit.logits.row_grids(call), call),
            block_mask=block_mask(call.attended_spans(), queries, keys, device),
            scale=call.scale,
            enable_gqa=True,
        )
        return attention
    except TorchDynamoException as error:
        kernel.is_broken = True
        reason = str(error).strip().splitlines()[0]
        warnings.warn(
            f"flex_attention cannot be compiled here ({type(error).__name__}: {reason}): attention "
            "with quantized logits goes on in tiles, which give the same numbers more slowly.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _fits(call: AttentionLogits, edit: AttentionEdit, value: Tensor) -> bool:
    device = call.query.device.type
    return (
        device in DEVICES
        and IS_KNOWN
        and edit.probabilities is None
        and call.given is None
        and call.sinks is None
        and call.bias is None
        and not call.all_entries
        and not (torch.is_grad_enabled() and (call.query.requires_grad or call.key.requires_grad))
        and min(call.query.shape[3], value.shape[3]) >= NARROWEST
        and not call.attended_spans().has_holes
        and not _kernel(device).is_broken
    )


def block_mask(spans: Spans, queries: int, keys: int, device: torch.device) -> BlockMask:
    """Returns the mask of a map whose rows have no holes, for all heads alike.

    From the spans alone: `create_block_mask` would hold a mask of size query x key.
    """
    batch = len(spans.lo)
    high, wide = -(-queries // BLOCK), -(-keys // BLOCK)
    rows = torch.zeros(2, batch, high * BLOCK, dtype=torch.int64)
    rows[0, :, :queries], rows[1, :, :queries] = spans.lo, spans.hi
    lo, hi = rows.view(2, batch, high, BLOCK, 1)
    first = torch.arange(wide) * BLOCK
    empty = lo >= hi
    begins = lo.masked_fill(empty, keys).amin(2)
    touched = (first < hi.amax(2)) & (first + BLOCK > begins)
    # a block at the edge is never whole, nor is one with an empty row, whose hi is 0
    whole = (first >= lo.amax(2)) & (first + BLOCK <= hi.amin(2))
    partial, full = (_listed(found, device) for found in (touched & ~whole, whole))
    starts, ends = (x.int().contiguous().to(device) for x in (spans.lo, spans.hi))
    return BlockMask.from_kv_blocks(
        *partial,
        *full,
        BLOCK_SIZE=BLOCK,
        mask_mod=_within(starts, ends),
        seq_lengths=(queries, keys),
        compute_q_blocks=False,  # of the backward pass
    )


def _listed(found: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns (how many, which first) of the blocks found: int32 `[batch, 1, rows (, blocks)]`."""
    order = found.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    count = found.sum(-1)
    return count[:, None].int().to(device), order[:, None].int().contiguous().to(device)


# Both index by aten's own function: `scale[b, h, i]` needs torch's function modes, and those are
# off while a callback runs. What differs from call to call is tensors: a number that a function
# closes over would be a kernel of its own for every width of the grid.
def _at(x: Tensor, *places: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.index(x, list(places))
    return found


def _on_grids(grids: RowGrids, call: AttentionLogits) -> ScoreMod:
    shape = call.query.shape[:3]
    scale, low, high = (
        x.squeeze(-1).expand(shape).contiguous() for x in (grids.scale, grids.low, grids.high)
    )
    softcap = call.softcap

    def score_mod(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, _j: Tensor) -> Tensor:
        step = _at(scale, b, h, i)
        steps = torch.round(logit / step)  # half to even
        steps = torch.minimum(torch.maximum(steps, _at(low, b, h, i)), _at(high, b, h, i))
        logit = steps * step
        return logit if softcap is None else torch.tanh(logit / softcap) * softcap

    return score_mod


def _within(lo: Tensor, hi: Tensor) -> MaskMod:
    def mask_mod(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= _at(lo, b, i)) & (j < _at(hi, b, i))

    return mask_mod


@dataclass
class _Kernel:
    """flex_attention, compiled; `is_broken` once that has failed."""

    run: Callable[..., Any]
    is_broken: bool = False


@cache
def _kernel(device: str) -> _Kernel:
    options: dict[str, Any] = {
        "backend": "inductor" if device == "cuda" else "eager",
        "fullgraph": True,  # an error, never the unfused form
        "recompile_limit": MOST_KERNELS,
    }
    return _Kernel(run=torch.compile(flex_attention, **options))
