"""`Observation`: what calibration keeps of one tensor, from which every range is chosen later.

A monoid: parts that saw different samples merge into what one pass had seen (counts, extremes and
top-k exactly, moments to float64 rounding). Its size does not depend on how much it saw: at most
0.53 MB a group and class (254 octaves of 2 x 128 bins), and 0.05 to 0.1 MB in practice, where
values span 25 to 50 octaves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch import Tensor

from quantkit.numerics.observers import Bundle
from quantkit.numerics.observers.moving import MovingAverage

CLASSES: Final = ("first", "others")


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """What was seen of one tensor.

    Attributes:
        point: The probe point; `granularity`: what a group is, `tensor` or `head`.
        classes: A bundle for each of `CLASSES`: elements of the first token of a sequence (for
            attention maps: with that token as key), and all others.
        moving: The moving average of each sample's extremes: over all elements, then, in as many
            groups more, without the first token's.
    """

    point: str
    granularity: str
    classes: dict[str, Bundle]
    moving: MovingAverage

    @property
    def groups(self) -> int:
        """How many groups have a range of their own."""
        return self.moving.groups // 2

    def merge(self, other: Self) -> Self:
        """Returns the observation of both parts."""
        return replace(
            self,
            classes={name: self.classes[name].merge(other.classes[name]) for name in CLASSES},
            moving=self.moving.merge(other.moving),
        )

    def seen(self, *, without_first: bool = False) -> Bundle:
        """Returns the bundle of the elements that count, a group each."""
        others = self.classes["others"]
        return others if without_first else others.merge(self.classes["first"])

    def averages(self, *, without_first: bool = False) -> MovingAverage:
        """Returns the moving average over the elements that count, a group each."""
        start = self.groups if without_first else 0
        return self.moving.select(start, start + self.groups)

    @property
    def floor(self) -> dict[str, Tensor]:
        """Magnitudes below which nothing can enter a class's top-k, float32 `[groups]`."""
        return {name: bundle.floor for name, bundle in self.classes.items()}

    def state(self) -> dict[str, Tensor]:
        """Returns flat tensors from which `from_state` makes this again.

        Counts that fit are kept in 32 bits: most of the size of a file is counts.
        """
        tensors: dict[str, Tensor] = {}
        for name, bundle in self.classes.items():
            for part, state in bundle.state().items():
                tensors |= {f"{name}.{part}.{field}": _small(x) for field, x in state.items()}
        tensors |= {f"moving.{field}": x for field, x in self.moving.state().items()}
        return tensors

    @classmethod
    def from_state(cls, point: str, granularity: str, tensors: dict[str, Tensor]) -> Self:
        """Returns the observation whose `state` this was.

        Raises:
            KeyError: a tensor is missing.
        """
        classes = {}
        for name in CLASSES:
            parts: dict[str, dict[str, Tensor]] = {}
            for key, x in tensors.items():
                owner, _, rest = key.partition(".")
                if owner == name:
                    part, _, field = rest.partition(".")
                    wide = x.to(torch.int64) if x.dtype == torch.int32 else x
                    parts.setdefault(part, {})[field] = wide
            classes[name] = Bundle.from_state(parts)
        moving = {key[7:]: x for key, x in tensors.items() if key.startswith("moving.")}
        return cls(
            point=point,
            granularity=granularity,
            classes=classes,
            moving=MovingAverage.from_state(moving),
        )


def _small(x: Tensor) -> Tensor:
    if x.dtype == torch.int64 and x.numel() and int(x.min()) >= 0 and int(x.max()) < 2**31:
        return x.to(torch.int32)
    return x
