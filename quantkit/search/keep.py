"""The fewest of the worst units that have to stay in float, by measuring."""

from __future__ import annotations

from collections.abc import Callable

from quantkit.results import KeptPoint


def fewest_kept(
    measure: Callable[[int], float], units: int, *, total_kl: float, target_frac: float
) -> list[KeptPoint]:
    """Returns the points that were tried, by number of units kept.

    Doubles from 1 until less than `target_frac` of the error remains, then halves the gap: at most
    2 log2(units) + 1 measurements. The error need not fall with every unit, so a smaller number
    that happens to do may be passed over.

    Args:
        measure: Returns the KL when that many of the worst units stay in float.
    """
    tried: dict[int, KeptPoint] = {}

    def is_enough(count: int) -> bool:
        kl = measure(count)
        tried[count] = KeptPoint(units=count, kl=kl, remaining_frac=kl / total_kl)
        return kl < target_frac * total_kl

    few, enough = 0, 1
    while not is_enough(enough):
        if enough == units:
            return _by_units(tried)
        few, enough = enough, min(2 * enough, units)
    while enough - few > 1:
        middle = (few + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            few = middle
    return _by_units(tried)


def _by_units(tried: dict[int, KeptPoint]) -> list[KeptPoint]:
    return [tried[count] for count in sorted(tried)]
