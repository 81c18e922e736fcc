"""SmoothQuant for a model and its data: channels are observed, alpha is searched, group by group.

A pass of its own before the one that fixes ranges, since ranges are those of the smoothed model.
Time: a forward over the data. Memory: three numbers a channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quantkit.calib_sets import DataSlice
from quantkit.errors import InputError
from quantkit.models import LoadedModel, run_batch
from quantkit.models.smoothing_groups import SmoothingGroup, smoothing_groups
from quantkit.numerics.smoothing import search_alpha
from quantkit.probes import Activation, attach
from quantkit.probes.places import first_real
from quantkit.processes import Processes
from quantkit.progress import Progress, silent
from quantkit.results import Smoothing

ALONE = Processes()


@dataclass(frozen=True, kw_only=True, eq=False)
class Channels:
    """The channels of one input; a monoid.

    Attributes:
        lo, hi: float32 `[channels]`; `squares`: float64 `[channels]`, sums of x^2.
        tokens: How many were seen.
    """

    lo: Tensor
    hi: Tensor
    squares: Tensor
    tokens: int

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """Returns what is seen of `x` `[tokens, channels]`, at least one token."""
        wide = x.float()
        return cls(
            lo=wide.amin(0),
            hi=wide.amax(0),
            squares=wide.double().square().sum(0),
            tokens=len(wide),
        )

    def merge(self, other: Self) -> Self:
        """Returns the channels of both parts' tokens."""
        return type(self)(
            lo=torch.minimum(self.lo, other.lo),
            hi=torch.maximum(self.hi, other.hi),
            squares=self.squares + other.squares,
            tokens=self.tokens + other.tokens,
        )


def find_smoothing(
    loaded: LoadedModel,
    data: DataSlice,
    *,
    alpha: float | None = None,
    weight_bits: int = 8,
    activation_bits: int = 8,
    batch_size: int = 4,
    without_first: bool = False,
    processes: Processes = ALONE,
    progress: Progress = silent,
) -> dict[str, Smoothing]:
    """Returns the migration of every group that the model has, in every process.

    Args:
        alpha: The same for all groups; None: searched, group by group.
        without_first: The first token of each sequence does not count.

    Raises:
        InputError: the model has no group in which scales can move, or channels that are not
            finite.
    """
    groups = smoothing_groups(loaded.model)
    if not groups:
        raise InputError(
            f"--smooth: no group of linear layers whose scales can move was found in {loaded.name} "
            f"({type(loaded.model).__name__}); leave --smooth out."
        )
    seen = _observe(loaded, data, groups, batch_size, without_first, processes, progress)
    modules = dict(loaded.model.named_modules())

    def search() -> dict[str, Smoothing]:
        found = {}
        for index, group in enumerate(groups):
            progress("searching the strength of smoothing", index, len(groups))
            channels = seen.get(group.linears[0])
            if channels is None:  # an expert that never ran: nothing is known of its input
                continue
            weights = [modules[name].weight.detach().float() for name in group.linears]
            found[group.linears[0]] = _smoothing(
                group, channels, weights, alpha, weight_bits, activation_bits
            )
        progress("searching the strength of smoothing", len(groups), len(groups))
        return found

    return processes.at_first(search)


def _smoothing(
    group: SmoothingGroup,
    channels: Channels,
    weights: Sequence[Tensor],
    alpha: float | None,
    weight_bits: int,
    activation_bits: int,
) -> Smoothing:
    if not bool((channels.lo.isfinite() & channels.hi.isfinite()).all()):
        raise InputError(
            f"the input of {group.linears[0]} holds NaN or inf: expected finite values, to smooth."
        )
    result = search_alpha(
        channels.lo,
        channels.hi,
        channels.squares / channels.tokens,
        weights,
        weight_bits=weight_bits,
        activation_bits=activation_bits,
        alpha=alpha,
    )
    return Smoothing(
        producer=group.producer,
        linears=list(group.linears),
        alpha=result.alpha,
        scales=result.scales.tolist(),
        expected_error=result.expected_error,
        expected_error_without=result.expected_error_without,
    )


def _observe(
    loaded: LoadedModel,
    data: DataSlice,
    groups: Sequence[SmoothingGroup],
    batch_size: int,
    without_first: bool,
    processes: Processes,
    progress: Progress,
) -> dict[str, Channels]:
    """Returns the channels of each group's input at the first process, by its first linear."""
    seen: dict[str, Channels] = {}

    def look(visit: Activation) -> None:
        real = visit.real
        if without_first:
            positions = torch.arange(real.shape[1], device=real.device)
            real = real & (positions != first_real(real.cpu()).to(real.device)[:, None])
        chosen = visit.tensor[real]
        if len(chosen):
            before, new = seen.get(visit.name), Channels.of(chosen)
            seen[visit.name] = new if before is None else before.merge(new)

    batches = math.ceil(data.sequences / batch_size)
    mine = [index for index in range(batches) if processes.mine(index)]
    if mine:
        names = [group.linears[0] for group in groups]
        what = f"looking at the channels of {loaded.name}"
        with (
            torch.no_grad(),
            attach(loaded.model, {"linear_input": look}, select=names, allow_unseen="*"),
        ):
            for index, batch in enumerate(data.batches(batch_size)):
                if processes.mine(index):
                    progress(what, mine.index(index), len(mine))
                    run_batch(loaded, batch.inputs, data.source)
        progress(what, len(mine), len(mine))
    together: dict[str, Channels] = {}
    for theirs in processes.gather(seen):
        for name, channels in theirs.items():
            before = together.get(name)
            together[name] = channels if before is None else before.merge(channels)
    return together
