"""Proof of execution: which probe saw what."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Hits:
    """How often a point was visited, and how many elements went through."""

    calls: int = 0
    elements: int = 0


@dataclass
class Attachment:
    """What `attach` yields: `hits[point][module name]`, zero until the module has run.

    Attributes:
        waived: On leaving, what never ran and was allowed not to, as `point module`.
    """

    hits: dict[str, dict[str, Hits]] = field(default_factory=dict)
    waived: list[str] = field(default_factory=list)

    def unseen(self) -> list[str]:
        """Returns `point module` for all that never ran."""
        return [
            f"{point} {name}"
            for point, modules in self.hits.items()
            for name, hits in modules.items()
            if hits.elements == 0
        ]
