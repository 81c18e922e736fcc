"""The tables of ranges and provenance, as finished strings for HTML, Markdown, terminal."""

from __future__ import annotations

import math

from quantkit.reporting.collect import Run, everything, labels
from quantkit.reporting.text import Table, number
from quantkit.results import Export, Range, Sweep


def ranges_table(run: Run) -> Table:
    """Returns how many tensors were calibrated, how, and the widest range of each point."""
    rows = []
    names = labels([found.result.model for found in run.ranges])
    for name, found in zip(names, run.ranges, strict=True):
        points: dict[str, dict[str, Range]] = {}
        for tensor, span in found.result.tensors.items():
            points.setdefault(span.point, {})[tensor] = span
        for point, tensors in points.items():
            widest = max(tensors, key=lambda tensor: _reach(tensors[tensor]))
            reach = _reach(tensors[widest])
            methods = dict.fromkeys(span.method for span in tensors.values())
            rows.append(
                (
                    name, point, widest, ", ".join(methods), number(len(tensors)),
                    number(math.nan if reach < 0 else reach),
                )
            )  # fmt: skip
    return Table(
        title="Calibrated ranges",
        columns=("model", "point", "widest tensor", "method", "tensors", "widest |x|"),
        rows=tuple(rows),
        text_columns=4,
    )


def _reach(span: Range) -> float:
    """Returns the largest magnitude of the interval, over its groups; -1 where none is known."""
    ends = [
        end for ends in (span.lo, span.hi) for end in (ends if isinstance(ends, list) else [ends])
    ]
    return max((abs(end) for end in ends if not math.isnan(end)), default=-1.0)


def provenance_table(run: Run) -> Table:
    """Returns where every number comes from: file, model, text."""
    rows = []
    for found in everything(run):
        result = found.result
        models = result.models if isinstance(result, Sweep) else [result.model]
        data = result.data
        for model in models:
            rows.append(
                (
                    found.place, model.name, model.source, model.sha256[:16], model.architecture,
                    f"{model.dtype} on {model.device}", data.source, data.sha256[:16], data.bos,
                    data.python, number(model.parameters),
                    f"{data.sequences} x {data.seq_len}", number(data.tokens),
                    number(data.batch_size), number(data.skipped_blocks),
                )
            )  # fmt: skip
    return Table(
        title="Provenance",
        columns=(
            "file", "model", "source", "model sha256", "architecture", "computed", "text",
            "text sha256", "bos", "python", "parameters", "blocks", "tokens", "batch",
            "blocks skipped",
        ),
        rows=tuple(rows),
        text_columns=10,
    )  # fmt: skip


def environment_table(run: Run) -> Table:
    """Returns the environments; files that share one stand in one row a fact."""
    places: dict[tuple[str, str], list[str]] = {}
    known = [
        (found.place, found.result.environment)
        for found in everything(run)
        if not isinstance(found.result, Export)
    ]
    for place, environment in known:
        for key, value in environment.items():
            places.setdefault((key, value), []).append(place)
    return Table(
        title="Environment",
        columns=("what", "value", "files"),
        rows=tuple(
            (key, value, "all" if len(files) == len(known) else ", ".join(files))
            for (key, value), files in places.items()
        ),
        text_columns=3,
    )
