"""Search: what to keep in higher precision. Loads torch when a name is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.search.ranking import sensitivity

__all__ = ["sensitivity"]


def __getattr__(name: str) -> Any:
    """Returns `sensitivity`: the command line reads its job from here and must not load torch."""
    if name == "sensitivity":
        from quantkit.search.ranking import sensitivity

        return sensitivity
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
