"""How a figure of a run is called and written, and what may be said of it when it moved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from quantkit.reporting.against_documents import DELTAS
from quantkit.reporting.against_values import Estimate, Node, is_absent
from quantkit.reporting.collect import Run
from quantkit.reporting.groups import POINT_WORDS
from quantkit.reporting.sweep_groups import Measured, measured
from quantkit.reporting.sweep_rows import FLOAT
from quantkit.reporting.text import NOT_AVAILABLE, clipped, first_of, number, relative, share, size

Rule = Literal["interval", "exact", "timing", "none"]
"""What judges a change: intervals, nothing but its sign, `TIMING_NOISE`, or nothing."""
Style = Literal["number", "share", "size"]

TIMING_NOISE: Final = 0.10
"""Relative: what medians of times and resident memory move by from one sitting to the next."""
_DIGITS: Final = 16
"""Of a hash."""
_MOST_TEXT: Final = 80


@dataclass(frozen=True, kw_only=True)
class Look:
    """How a figure reads.

    Attributes:
        words: What it is called.
        is_higher_better: None where it has no direction.
        measured: Of a sweep's figure: how its metric is written.
        is_main: Whether it stands in the first table.
    """

    words: str
    is_higher_better: bool | None = None
    rule: Rule = "none"
    style: Style = "number"
    measured: Measured | None = None
    is_main: bool = False


def metrics_of(*runs: Run) -> dict[tuple[str, str], Measured]:
    """Returns (task, metric) -> its direction and its way of writing, the first run's first."""
    found: dict[tuple[str, str], Measured] = {}
    for run in runs:
        for sweeps in (run.sweeps, run.seed_sweeps):
            for one in measured(Run(sweeps=sweeps)):
                found.setdefault((one.task, one.metric), one)
    return found


def look(
    kind: str, path: tuple[str, ...], metrics: Mapping[tuple[str, str], Measured]
) -> Look:  # fmt: skip
    """Returns how the field of a document at `path` reads; one that nobody named, by its path."""
    words = ", ".join(path)
    match (kind, *path):
        case ("statistics", "summary", *rest):
            return _summary(tuple(rest))
        case ("sweep" | "sweep of seeds", task, metric, recipe, *rest) if (task, metric) in metrics:
            one = metrics[task, metric]
            said = f"{one.words}, {'float' if recipe == FLOAT else recipe}"
            is_value = tuple(rest) in ((), ("value",))
            return _scored(
                one, said, tuple(rest), is_main=is_value and kind == "sweep" and one.is_first
            )
        case ("sweep" | "sweep of seeds", start, task, metric, recipe, against, *rest) if (
            start == DELTAS and (task, metric) in metrics
        ):
            beside = [part for part in (against, *rest) if part != "value"]
            end = tuple(rest[-1:]) if rest and rest[-1] == "value" else ()
            base = ", ".join("float" if part == FLOAT else part for part in beside)
            one = metrics[task, metric]
            return _scored(one, f"{one.words}, {recipe} minus {base}", end)
        case ("export", "accuracy", metric, *rest):
            return _accuracy(metric, tuple(rest))
        case ("export", "passed"):
            return Look(words="gates passed", is_higher_better=True, rule="exact", is_main=True)
        case ("export", "latency_ms", which) if which.startswith(("float", "quantized")):
            return _cost(f"latency, {which.replace('_', ' ')}, ms", "number")
        case ("export", "memory_bytes", which):
            return _cost(f"memory, {which}", "size")
        case ("export", "files", name, "bytes"):
            return Look(
                words=f"size of {name}",
                is_higher_better=False,
                rule="exact",
                style="size",
                is_main="/" not in name and ".onnx" in name,
            )
        case ("sensitivity", "total_kl"):
            return Look(
                words="KL in all, nats a token",
                is_higher_better=False,
                rule="interval",
                is_main=True,
            )
        case ("training" | "training of seeds", "measurements", step, "loss"):
            return Look(words=f"held-out loss at {step}", is_higher_better=False)
        case ("diagnosis", "total" | "begins") | ("search", "chosen"):
            return Look(words=words, is_main=True)
        case (_, *_, "bytes"):
            return Look(words=words, style="size")
    return Look(words=words)


def _summary(rest: tuple[str, ...]) -> Look:
    words = ", ".join(("summary", *rest))
    match rest:
        case (point, "abs_top", rank) if point in POINT_WORDS:
            return Look(words=f"{POINT_WORDS[point]}, top-{rank} |x|", is_main=True)
        case (point, "abs_median") if point in POINT_WORDS:
            return Look(words=f"{POINT_WORDS[point]}, median |x|", is_main=True)
        case ("sink_rate",):
            return Look(words="sink rate", style="share", is_main=True)
        case ("massive_activations", "count"):
            return Look(words="massive activations", is_main=True)
        case ("outlier_features", "count"):
            return Look(words="outlier features", is_main=True)
        case ("outlier_tokens", "count"):
            return Look(words="outlier tokens", is_main=True)
    return Look(words=words)


def _scored(one: Measured, words: str, rest: tuple[str, ...], is_main: bool = False) -> Look:
    if rest not in ((), ("value",)):
        return Look(words=", ".join((words, *rest)))
    return Look(
        words=words,
        is_higher_better=one.higher_is_better,
        rule="interval",
        measured=one,
        is_main=is_main,
    )


def _accuracy(metric: str, rest: tuple[str, ...]) -> Look:
    match rest:
        case ("float" | "quantized" as graph,):
            # neither has an interval of its own, so that neither is judged
            return Look(words=f"{metric}, {graph} graph", is_main=True)
        case ("change",):
            is_loss = "perplexity" in metric or metric == "bits_per_byte"
            return Look(
                words=f"{metric}, quantized beside float",
                is_higher_better=not is_loss,
                rule="interval",
                is_main=True,
            )
    return Look(words=", ".join(("accuracy", metric, *rest)))


def _cost(words: str, style: Style) -> Look:
    return Look(words=words, is_higher_better=False, rule="timing", style=style, is_main=True)


def text_of(node: Node, look: Look) -> str:
    """Returns a field as a table shows it; of several, what they say first or how many they are."""
    if is_absent(node):
        return NOT_AVAILABLE
    if isinstance(node, Mapping):
        for key in ("value", "loss", "change"):
            if key in node:
                return text_of(node[key], look)
        return _count(leaves(node), "figure")
    if isinstance(node, Estimate):
        if look.measured is not None:
            one = look.measured
            return f"{one.value(node.value)} {one.span(node.low, node.high)}"
        ends = f" [{number(node.low)}, {number(node.high)}]"
        return number(node.value) + ("" if math.isnan(node.low) else ends)
    if isinstance(node, list):
        is_words = len(node) <= 3 and all(isinstance(item, str) for item in node)
        listed = clipped(", ".join(map(str, node)), _MOST_TEXT)
        return listed if is_words else _count(len(node), "entry")
    if isinstance(node, bool):
        return "yes" if node else "no"
    if isinstance(node, int | float):
        return _figure(node, look.style)
    text = str(node)
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:_DIGITS] if is_hash else clipped(text, _MOST_TEXT)


def _figure(value: float, style: Style) -> str:
    if style == "share":
        return share(value)
    return size(int(value)) if style == "size" else number(value, 5)


def _count(count: int, what: str) -> str:
    many = {"entry": "entries"}.get(what, f"{what}s")
    return f"{count:,} {what if count == 1 else many}"


def leaves(node: Node) -> int:
    return sum(map(leaves, node.values())) if isinstance(node, Mapping) else not is_absent(node)


def value_of(node: Node) -> float:
    """Returns the figure of a leaf; NaN where it has none."""
    if isinstance(node, Estimate):
        return node.value
    is_number = isinstance(node, int | float) and not isinstance(node, bool)
    return float(node) if is_number else math.nan


def change_text(now: Node, earlier: Node, look: Look) -> str:
    """Returns the signed change: relative, of shares in points; of lists, what differs in them."""
    if isinstance(now, list) and isinstance(earlier, list):
        return _list_change(now, earlier)
    value, base = value_of(now), value_of(earlier)
    if math.isnan(value) or math.isnan(base):
        return ""
    difference = value - base
    if look.style == "share" or (look.measured is not None and look.measured.is_share):
        digits = ".1f" if difference == 0 or abs(difference) >= 0.0005 else ".1g"
        return f"{100 * difference:+{digits}} points"
    if isinstance(now, int) and isinstance(earlier, int) and look.style == "number":
        return f"{difference:+,.0f}"
    if not (math.isfinite(difference) and base > 0 and value >= 0):
        return f"{difference:+,.4g}"
    if 0 < abs(difference / base) < 5e-5:
        return f"{100 * difference / base:+.1g} %"
    return relative(value, base)


def _list_change(now: list[Node], earlier: list[Node]) -> str:
    """Returns what two lists do not share; of numbers the largest step, by its index."""
    if len(now) == len(earlier) and now and all(map(_is_number, [*now, *earlier])):
        steps = {i: abs(a - b) for i, (a, b) in enumerate(zip(now, earlier, strict=True)) if a != b}
        at = max(steps, key=lambda i: steps[i])
        most = f"[{at}]: {number(earlier[at])} to {number(now[at])}"
        return f"{len(steps):,} of {len(now):,} differ, most at {most}"
    added = [str(item) for item in now if item not in earlier]
    lost = [str(item) for item in earlier if item not in now]
    if all(isinstance(item, str) for item in [*now, *earlier]) and (added or lost):
        texts = (f"{sign} {first_of(items, 2)}" for sign, items in (("+", added), ("-", lost)))
        return "; ".join(text for text, items in zip(texts, (added, lost), strict=True) if items)
    if len(now) == len(earlier):
        different = sum(a != b for a, b in zip(now, earlier, strict=True))
        return f"{different:,} of {len(now):,} differ"
    return f"{len(now) - len(earlier):+,} entries"


def _is_number(item: Node) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool)
