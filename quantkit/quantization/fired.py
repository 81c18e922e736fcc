"""Proof of execution: which quantizer ran, how often, and on how much."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from quantkit.errors import ProbeError
from quantkit.probes.hits import is_repeated
from quantkit.results import Fired

_SHOWN: Final = 4


class Counter:
    """Counts hits and elements by name of quantizer; one that is only installed has none."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._counts: dict[str, tuple[int, int]] = dict.fromkeys(names, (0, 0))

    def add(self, name: str, elements: int) -> None:
        """Counts one more run of a quantizer; a forward that a backward pass repeats is none."""
        if is_repeated():
            return
        hits, before = self._counts.get(name, (0, 0))
        self._counts[name] = (hits + 1, before + elements)

    @property
    def fired(self) -> dict[str, Fired]:
        """What was counted, by name, in the order in which the names became known."""
        return {name: Fired(hits=n, elements=size) for name, (n, size) in self._counts.items()}

    @property
    def hits(self) -> int:
        """How often a quantizer fired, all together."""
        return sum(hits for hits, _ in self._counts.values())

    def require_all(self) -> None:
        """Raises ProbeError if a quantizer never fired, by name."""
        unseen = [name for name, (hits, _) in self._counts.items() if hits == 0]
        if unseen:
            more = f" and {len(unseen) - _SHOWN} more" if unseen[_SHOWN:] else ""
            raise ProbeError(
                f"a quantizer never fired: {', '.join(unseen[:_SHOWN])}{more}. What it stands for "
                "stayed in float; check that the model ran inside the `with`, or keep it in float "
                "by name."
            )
