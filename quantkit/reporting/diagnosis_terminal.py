"""What `quantkit diagnose` prints: the ranked findings, and where the graphs part."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Final

from quantkit.reporting.text import decibels, number, printable, share
from quantkit.results import Diagnosis, Finding, TensorError, read_json

WIDTH: Final = 100
WORST: Final = 20
_METRIC: Final = {"kl": "KL {} nats a token", "relative": "{} of the output's energy"}


def diagnosis_text(run_folder: Path, top: int = WORST) -> str:
    """Returns the findings, the costliest first, and the tensor at which the error begins."""
    found = read_json(run_folder / "diagnosis.json", Diagnosis)
    lines = [
        f"Diagnosis: {found.quantized_graph.source} against {found.float_graph.source}",
        f"{found.data.sequences} samples; lost in all: {lost(found)}; {found.measured} of "
        f"{len(found.quantizers)} quantizers measured alone",
        *(f"WARNING: {line}" for line in found.warnings),
        begins(found),
        "What is broken comes first, then the largest share of all damages alone added up.",
        "",
    ]
    for rank, finding in enumerate(found.findings[:top], 1):
        lines += _finding(rank, finding)
    more = len(found.findings) - top
    if more > 0:
        lines.append(f"{more} more in diagnosis.json.")
    if not found.findings:
        lines.append("Nothing to blame: no quantizer costs the output anything that matters.")
    return "".join(f"{printable(line)}\n" for line in lines)


def _finding(rank: int, found: Finding) -> list[str]:
    part = "" if math.isnan(found.share) else f"{share(found.share)} of the damage, "
    head = f"{rank:3}. {found.where}: {part}{found.kind.replace('_', ' ')} ({found.severity})"
    body = [f"{found.what}", f"try: {found.advice}"]
    return [head, *(line for text in body for line in _wrapped(text))]


def _wrapped(text: str) -> list[str]:
    indent = " " * 5
    return textwrap.wrap(
        printable(text), WIDTH, initial_indent=indent, subsequent_indent=indent
    )  # fmt: skip


def lost(found: Diagnosis) -> str:
    """Returns what the output loses, with its unit."""
    total = number(found.total)
    known = _METRIC.get(found.metric)
    return f"{total} ({found.metric})" if known is None else known.format(total)


def begins(found: Diagnosis) -> str:
    """Returns where the graphs part, or the worst tensor where they part nowhere."""
    first = next((tensor for tensor in found.tensors if tensor.name == found.begins), None)
    if first is None:
        return f"the graphs part nowhere by 10 % or more; {_worst(found.tensors)}"
    return (
        f"the error begins at {first.name} ({first.op} of {first.layer}): "
        f"{share(first.relative_error)} off, {number(first.jump, 2)} x what it reads"
    )


def _worst(tensors: list[TensorError]) -> str:
    known = [tensor for tensor in tensors if not math.isnan(tensor.inlier_sqnr_db)]
    if not known:
        return "no tensor could be compared"
    worst = min(known, key=lambda tensor: tensor.inlier_sqnr_db)
    return f"worst is {worst.name} ({worst.layer}) at {decibels(worst.inlier_sqnr_db)} dB"
