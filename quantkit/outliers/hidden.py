"""Statistics of hidden states, per layer and token class, and the rules on whole sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from quantkit.numerics.outliers import (
    MASSIVE_ABOVE,
    MASSIVE_TIMES_MEDIAN,
    massive_mask,
    outlier_feature_counts,
)
from quantkit.outliers.bundle import Bundle, merged
from quantkit.outliers.places import first_real, pack
from quantkit.probes import Activation

CLASSES: Final = ("first", "others")
_KEPT: Final = 20


@dataclass
class HiddenStatistics:
    """Grows by `see(visit)` once for each layer of a forward pass.

    Attributes:
        bundles: By (layer, class), one group each.
        inf_norm: By layer: sum over sequences of max |x|.
        feature_counts: By layer: positions at which each channel reaches |x| >= 6, int64.
        massive: Count by the rule with the median of each sequence and layer.
        massive_top: Largest of them as (|x|, signed, layer, tag).
        first_sequence: Index of the batch's first sequence; set before each batch.
    """

    bundles: dict[tuple[int, str], Bundle] = field(default_factory=dict)
    inf_norm: dict[int, float] = field(default_factory=dict)
    feature_counts: dict[int, Tensor] = field(default_factory=dict)
    massive: int = 0
    massive_top: list[tuple[float, float, int, int]] = field(default_factory=list)
    excluded: int = 0
    first_sequence: int = 0
    batch_inf_norm: Tensor | None = None

    def see(self, visit: Activation) -> None:
        """Adds the output of one layer."""
        layer, tensor, real = visit.layer, visit.tensor.detach().float(), visit.real
        batch, _, channels = tensor.shape
        self.excluded += int((~real).sum()) * channels
        largest = tensor.abs().masked_fill(~real[..., None], 0.0).amax(dim=(1, 2))
        self.inf_norm[layer] = self.inf_norm.get(layer, 0.0) + float(largest.double().sum())
        self.batch_inf_norm = (
            largest if self.batch_inf_norm is None else torch.maximum(self.batch_inf_norm, largest)
        )
        first = first_real(real)
        for index in range(batch):
            self._see_sequence(layer, self.first_sequence + index, tensor[index], real[index])
        position = torch.arange(tensor.shape[1])[None, :, None]
        sequence = torch.arange(self.first_sequence, self.first_sequence + batch)[:, None, None]
        tags = pack(sequence, position, torch.arange(channels)[None, None])
        is_first = real & (position[..., 0] == first[:, None])
        for name, chosen in (("first", is_first), ("others", real & ~is_first)):
            before = self.bundles.get((layer, name)) or Bundle.empty(1)
            self.bundles[layer, name] = before.update(
                tensor[chosen].reshape(1, -1), tags[chosen].reshape(-1)
            )

    def _see_sequence(self, layer: int, sequence: int, states: Tensor, real: Tensor) -> None:
        positions = real.nonzero()[:, 0]
        tokens = states[positions]
        counts = outlier_feature_counts(tokens)
        self.feature_counts[layer] = self.feature_counts.get(layer, 0) + counts
        mask = massive_mask(tokens)
        self.massive += int(mask.sum())
        size = tokens.abs().masked_fill(~mask, 0.0).reshape(-1)
        largest = size.topk(min(_KEPT, size.numel(), int(mask.sum()))).indices
        for index in largest.tolist():
            row, channel = divmod(index, tokens.shape[1])
            value = float(tokens[row, channel])
            place = pack(torch.tensor(sequence), positions[row], torch.tensor(channel))
            self.massive_top.append((abs(value), value, layer, int(place)))
        self.massive_top = sorted(self.massive_top, reverse=True)[:_KEPT]

    def pooled_classes(self, layer: int) -> Bundle:
        """Returns one layer over all token classes."""
        return merged([self.bundles[layer, name] for name in CLASSES])

    def massive_pooled(self) -> int:
        """Returns the count with each layer's median over all sequences.

        Read off the histogram: an element counts if its bin's lower edge does.
        """
        total = 0
        for layer in self.inf_norm:
            histogram = self.pooled_classes(layer).histogram
            median = float(histogram.quantile_abs(0.5)[0])
            threshold = max(MASSIVE_ABOVE, MASSIVE_TIMES_MEDIAN * median)
            counts = histogram.counts[0].sum(0).reshape(-1)
            total += int(counts[histogram.edges() >= threshold].sum())
        return total
