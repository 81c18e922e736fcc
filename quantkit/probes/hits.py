"""Proof of execution: which probe saw what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch


@dataclass
class Hits:
    """How often a point was visited, and how many elements went through.

    Elements of activations are those of real tokens. Of attention logits they are all of
    batch x heads x query x key, masked entries included: what a statistic or a range left out is
    counted there.
    """

    calls: int = 0
    elements: int = 0


@dataclass
class Attachment:
    """What `attach` yields: `hits[point][module name]`, zero until the module has run.

    Attributes:
        waived: On leaving, what never ran and was allowed not to, as `point module`.
        notes: What a reader of the figures should know, one sentence each, once for a point; it
            names the point and the first module where it was found.
    """

    hits: dict[str, dict[str, Hits]] = field(default_factory=dict)
    waived: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def unseen(self) -> list[str]:
        """Returns `point module` for all that never ran."""
        return [
            f"{point} {name}"
            for point, modules in self.hits.items()
            for name, hits in modules.items()
            if hits.elements == 0
        ]


HitCounts: TypeAlias = dict[str, dict[str, tuple[int, int]]]
"""Hits as plain data, to be kept and sent: by point and module, (calls, elements)."""


def counts_of(attachment: Attachment) -> HitCounts:
    """Returns what the probes counted, as plain data."""
    return {
        point: {name: (hits.calls, hits.elements) for name, hits in modules.items()}
        for point, modules in attachment.hits.items()
    }


def add_counts(known: HitCounts, more: HitCounts) -> None:
    """Adds to `known` what another probe or process counted."""
    for point, modules in more.items():
        mine = known.setdefault(point, {})
        for name, (calls, elements) in modules.items():
            before = mine.get(name, (0, 0))
            mine[name] = (before[0] + calls, before[1] + elements)


def attachment_of(counts: HitCounts) -> Attachment:
    """Returns the hits as probes count them, to be judged over all processes."""
    return Attachment(
        hits={
            point: {name: Hits(calls=n, elements=size) for name, (n, size) in modules.items()}
            for point, modules in counts.items()
        }
    )


def is_repeated() -> bool:
    """Whether a backward pass runs in this thread: gradient checkpointing repeats a forward.

    The same question, asked the same way, as in torch.utils.checkpoint.
    """
    return torch._C._current_graph_task_id() != -1
