"""What makes a range untrustworthy, each by name; a tensor that fails one stops the calibration.

| guard | the tensor |
|---|---|
| `unseen` | has no element that counts: its module never ran, or only on padding |
| `nonfinite` | holds NaN or inf |
| `mask` | reaches 1e30: a mask's stand-in for -inf leaked in |
| `zero` | is zero everywhere: its scale would be made up |
| `constant` | has one value alone: its range says nothing about other inputs |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import torch

from quantkit.numerics.affine import RangeError
from quantkit.numerics.observers import Bundle

MASK_VALUE: Final = 1e30
"""A range this wide holds a mask's stand-in for -inf, not data."""
_SHOWN: Final = 3


def failed_guards(seen: Bundle) -> dict[str, str]:
    """Returns the guards that a tensor fails, with what was found. Any of its groups counts."""
    found: dict[str, str] = {}
    known = seen.minmax
    lo, hi = known.finish()
    nans, infs = int(known.nan_count.sum()), int(known.inf_count.sum())
    if nans or infs:
        found["nonfinite"] = f"{nans} NaN and {infs} inf values"
    finite = known.count - known.nan_count - known.inf_count
    if bool((known.count == 0).any()):
        found["unseen"] = "no element" + _of_groups(known.count == 0)
    elif bool((finite == 0).any()):
        found["unseen"] = "no finite element" + _of_groups(finite == 0)
    reached = torch.maximum(lo.abs(), hi.abs()).nan_to_num(nan=0.0)
    if float(reached.max()) >= MASK_VALUE:
        found["mask"] = f"|x| up to {float(reached.max()):.3g}, a mask's stand-in for -inf"
    zero = (lo == 0) & (hi == 0)
    if bool(zero.any()):
        found["zero"] = "nothing but zeros" + _of_groups(zero)
    constant = (lo == hi) & ~zero
    if bool(constant.any()):
        value = float(lo[constant][0])
        found["constant"] = f"the value {value:.6g} alone" + _of_groups(constant)
    return found


def require_trustworthy(
    failed: Mapping[str, Mapping[str, str]], allowed: Collection[str]
) -> dict[str, list[str]]:
    """Returns, by tensor, the guards that it fails and that are waived.

    Args:
        failed: By tensor, what `failed_guards` found.
        allowed: Guards that may fail.

    Raises:
        RangeError: a tensor fails another guard; names tensors and what was found.
    """
    stopping = {
        name: {guard: words for guard, words in found.items() if guard not in allowed}
        for name, found in failed.items()
    }
    stopping = {name: found for name, found in stopping.items() if found}
    if stopping:
        said = [
            f"{name} holds {', '.join(found.values())}"
            for name, found in list(stopping.items())[:_SHOWN]
        ]
        more = f"; and {len(stopping) - _SHOWN} tensors more" if len(stopping) > _SHOWN else ""
        guards = sorted({guard for found in stopping.values() for guard in found})
        raise RangeError(
            f"{len(stopping)} ranges cannot be trusted: {'; '.join(said)}{more}. Mend the model or "
            f"the data, or accept it: quantkit calibrate --allow {','.join(guards)} (recorded in "
            "ranges.json)."
        )
    return {name: sorted(found) for name, found in failed.items() if found}


def _of_groups(which: torch.Tensor) -> str:
    """Returns which groups, in words; empty where there is one."""
    if len(which) == 1:
        return ""
    places = which.nonzero()[:, 0].tolist()
    first = ", ".join(map(str, places[:4]))
    return f" in head{'s' if len(places) > 1 else ''} {first}{', ...' if len(places) > 4 else ''}"
