"""Items of any task: which of many are measured, and what results say of them."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from quantkit.calib_sets.check import SetInfo, set_fields
from quantkit.calib_sets.content import drawn
from quantkit.results import DataInfo
from quantkit.tasks.continuations import Continuation

T = TypeVar("T")

_HASH_DIGITS: Final = 16


def sampled(items: list[T], limit: int, seed: int) -> list[T]:
    """Returns `limit` items, drawn by `seed` where there are more, in the order they came in.

    Drawn and not the first, since files are often sorted by kind.
    """
    if len(items) <= limit:
        return items
    chosen = sorted(drawn(list(range(len(items))), limit, seed, "the task"))
    return [items[index] for index in chosen]


def item_hash(*parts: Any) -> str:
    """Returns 16 hex digits over strings and numbers, or lists of them."""
    return _digest(list(parts))[:_HASH_DIGITS]


def pairs_info(pairs: Sequence[Continuation], hashes: Sequence[str], **said: Any) -> DataInfo:
    """Returns what a result says about items that are scored as these pairs; as `fed_info`."""
    # the last token, which is not fed, is part of an item too
    rows = [(*pair.context, *pair.continuation) for pair in pairs]
    return fed_info(rows, hashes, cut=sum(pair.cut > 0 for pair in pairs), **said)


def fed_info(
    rows: Sequence[Sequence[int]],
    hashes: Sequence[str],
    *,
    cut: int,
    source: str,
    batch_size: int,
    bos: str,
    named: SetInfo | None = None,
) -> DataInfo:
    """Returns what a result says about items that are given as these token ids.

    Args:
        rows: One a forward pass; an item may have several.
        hashes: One an item.
        cut: How many contexts lost their beginning, which a warning says.
    """
    fields: dict[str, Any] = {"warnings": []} | set_fields(named)
    if cut:
        said = f"{cut} of {len(rows)} contexts are cut at the left: the model takes no more."
        fields["warnings"] = [*fields["warnings"], said]
    return DataInfo(
        source=source,
        sha256=_digest(list(map(list, rows))),
        sequences=len(hashes),
        seq_len=max(map(len, rows)),
        tokens=sum(map(len, rows)),
        batch_size=batch_size,
        bos=bos,
        block_hashes=list(hashes),
        skipped_blocks=0,
        python=platform.python_version(),
        **fields,
    )


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
