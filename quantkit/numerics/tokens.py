"""Figures of the tokens of one hidden state: largest magnitudes and the exact median of |x|.

Compiled where `scan.compiled` is; in torch each is several passes over memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.numerics import scan


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSummary:
    """Largest magnitudes of some tokens; NaN and inf do not take part.

    Attributes:
        token_top: float32 `[tokens]`, 0 for tokens that were not used.
        channel_top: float32 `[channels]`.
        channel_reached: int64 `[channels]`: tokens at which the channel reaches the threshold.
        is_finite: Whether there was no NaN or inf.
    """

    token_top: Tensor
    channel_top: Tensor
    channel_reached: Tensor
    is_finite: bool


def token_summary(x: Tensor, use: Tensor, *, above: float) -> TokenSummary:
    """Returns row and column maxima of |x| and counts of |x| >= `above`.

    Args:
        x: float32 `[tokens, channels]`; `use`: bool `[tokens]`.
    """
    kernels = scan.compiled()
    if kernels is None or x.device.type != "cpu":
        size = x.abs().nan_to_num(nan=0.0, posinf=0.0).masked_fill(~use[:, None], 0.0)
        return TokenSummary(
            token_top=size.amax(1).cpu(),
            channel_top=size.amax(0).cpu(),
            channel_reached=(size >= above).sum(0).cpu(),
            is_finite=bool(x[use].isfinite().all()),
        )
    token_top, channel_top = torch.zeros(x.shape[0]), torch.zeros(x.shape[1])
    reached = torch.zeros(x.shape[1], dtype=torch.int64)
    outs = (part.numpy() for part in (token_top, channel_top, reached))
    finite = kernels.token_pass(x.detach().contiguous().numpy(), use.cpu().numpy(), above, *outs)
    return TokenSummary(
        token_top=token_top,
        channel_top=channel_top,
        channel_reached=reached,
        is_finite=bool(finite),
    )


def abs_median(x: Tensor) -> float:
    """Returns the exact lower median of |x| (as `torch.median`), of finite x; NaN of none."""
    flat = x.detach().float().reshape(-1)
    kernels = scan.compiled()
    if kernels is None or flat.device.type != "cpu" or flat.numel() == 0:
        return float(flat.abs().median()) if flat.numel() else float("nan")
    return float(kernels.abs_select(flat.contiguous().numpy(), (flat.numel() - 1) // 2))


def warm_up() -> None:
    """Loads the compiled passes over tokens, and those of `scan`."""
    scan.warm_up()
    token_summary(torch.ones(1, 1), torch.ones(1, dtype=torch.bool), above=1.0)
    abs_median(torch.ones(1))
