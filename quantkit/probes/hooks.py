"""Hooks that stay behind when their module is copied or pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """Calls what it was made of; a deep copy, or what comes out of a pickle, does nothing.

    Hooks lie in a module's own dictionaries, so that a model which is copied while it is probed
    takes them along: the copy would report to the observers of the original, and for ever.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the hook returns."""
        return self.call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_of_nothing, ()


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Does what a hook does that only looks, without looking."""


def _made_of_nothing() -> Callable[..., None]:
    return _nothing
