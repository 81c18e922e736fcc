"""What a report says about the data that its numbers come from."""

from __future__ import annotations

from quantkit.reporting.collect import Run, everything
from quantkit.results import Sweep


def overlaps(run: Run) -> list[str]:
    """Returns one line for each file whose data should be held out, and are not."""
    lines = []
    for found in everything(run):
        result = found.result
        tasks = result.tasks if isinstance(result, Sweep) else []
        shared = max([result.data.shared_blocks, *(task.data.shared_blocks for task in tasks)])
        if not shared:
            continue
        models = result.models if isinstance(result, Sweep) else [result.model]
        names = ", ".join(model.name for model in models)
        lines.append(
            f"{names}: {shared:,} blocks that {found.place} was measured on are calibration's too "
            "(--allow-overlap): its figures look better than they are."
        )
    return list(dict.fromkeys(lines))
