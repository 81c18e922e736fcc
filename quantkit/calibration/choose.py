"""Observations -> ranges, by any method, at any width, without another forward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from quantkit.calibration.guards import failed_guards, require_trustworthy
from quantkit.calibration.observation import Observation
from quantkit.numerics.choose import choose_range
from quantkit.numerics.methods import Method, MethodChoice
from quantkit.numerics.observers import Bundle
from quantkit.numerics.observers.moving import MovingAverage
from quantkit.progress import Progress, silent
from quantkit.results import Interval, Range


@dataclass(frozen=True, kw_only=True)
class RangePlan:
    """How ranges are chosen.

    Attributes:
        methods: By point.
        bits: Widths of the grids; the first is the one that figures are given for.
        symmetric: Points whose grid is the symmetric narrow one; of all others it is the
            asymmetric full one.
        granularity: `head`: what attention holds has a range a head; `tensor`: one a layer and map.
        excludes_first: The first token of each sequence does not count: its values saturate.
        allowed: Guards that may fail.
    """

    methods: MethodChoice
    bits: tuple[int, ...] = (8,)
    symmetric: Collection[str] = ("attention_logit",)
    granularity: str = "head"
    excludes_first: bool = False
    allowed: Collection[str] = ()

    def is_symmetric(self, point: str) -> bool:
        """Returns whether the grid of a point is the symmetric one."""
        return point in self.symmetric

    def seen(self, observation: Observation) -> Bundle:
        """Returns the elements that count, one group a range."""
        bundle = observation.seen(without_first=self.excludes_first)
        return bundle.pool() if self._pools(observation) else bundle

    def averages(self, observation: Observation) -> MovingAverage | None:
        """Returns the moving averages that belong to `seen`; None: heads are pooled."""
        if self._pools(observation):
            return None
        return observation.averages(without_first=self.excludes_first)

    def _pools(self, observation: Observation) -> bool:
        return self.granularity == "tensor" and observation.groups > 1


def ranges_now(
    seen: Mapping[str, Observation], plan: RangePlan
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns (lo, hi), float32 `[groups]`, of every tensor for the first width; nothing fails."""
    known: dict[int, tuple[Tensor, Tensor]] = {}
    found = {}
    for name, observation in seen.items():
        if id(observation) not in known:  # linear layers that share an input
            method = plan.methods.of(observation.point)
            known[id(observation)] = range_by(method, observation, plan, plan.bits[0])
        found[name] = known[id(observation)]
    return found


def choose_ranges(
    seen: Mapping[str, Observation], plan: RangePlan, *, progress: Progress = silent
) -> dict[str, Range]:
    """Returns the range of every tensor at every width of the plan.

    Raises:
        RangeError: tensors whose range cannot be trusted; see `guards`.
    """
    distinct = {id(observation): observation for observation in seen.values()}
    bundles = {key: plan.seen(observation) for key, observation in distinct.items()}
    failed = {key: failed_guards(bundle) for key, bundle in bundles.items()}
    waived = require_trustworthy({n: failed[id(o)] for n, o in seen.items()}, plan.allowed)
    known: dict[int, Range] = {}
    found = {}
    for name, observation in seen.items():
        key = id(observation)
        if key not in known:
            progress("choosing ranges", len(known), len(distinct))
            known[key] = _range(observation, bundles[key], plan, waived.get(name, []))
        found[name] = known[key]
    progress("choosing ranges", len(distinct), len(distinct))
    return found


def _range(observation: Observation, bundle: Bundle, plan: RangePlan, waived: list[str]) -> Range:
    method = plan.methods.of(observation.point)
    widths = plan.bits if method.depends_on_bits else plan.bits[:1]
    granularity = "tensor" if plan.granularity == "tensor" else observation.granularity
    intervals = {
        bits: _interval(range_by(method, observation, plan, bits), granularity) for bits in widths
    }
    first = intervals[widths[0]]
    return Range(
        lo=first.lo,
        hi=first.hi,
        method=str(method),
        granularity=granularity,
        count=int(bundle.minmax.count.sum()),
        point=observation.point,
        bits=widths[0] if method.depends_on_bits else None,
        symmetric=plan.is_symmetric(observation.point),
        other_bits={str(bits): intervals[bits] for bits in widths[1:]},
        waived=waived,
    )


def range_by(
    method: Method, observation: Observation, plan: RangePlan, bits: int
) -> tuple[Tensor, Tensor]:
    """Returns (lo, hi), float32 `[groups of plan.seen]`, by any method on the plan's grid."""
    symmetric = plan.is_symmetric(observation.point)
    averages = plan.averages(observation)
    if averages is None and method.is_order_dependent:  # the widest head's, as of the whole
        alone = observation.seen(without_first=plan.excludes_first)
        moving = observation.averages(without_first=plan.excludes_first)
        lo, hi = choose_range(method, alone, bits, symmetric=symmetric, moving=moving)
        return lo.amin(0, keepdim=True), hi.amax(0, keepdim=True)
    return choose_range(method, plan.seen(observation), bits, symmetric=symmetric, moving=averages)


def _interval(pair: tuple[Tensor, Tensor], granularity: str) -> Interval:
    lo, hi = (x.tolist() for x in pair)
    return Interval(lo=lo[0], hi=hi[0]) if granularity == "tensor" else Interval(lo=lo, hi=hi)
