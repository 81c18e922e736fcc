"""The tables of exports: parity, size, latency and accuracy, files."""

from __future__ import annotations

import math
from typing import Final

from quantkit.reporting.collect import Run
from quantkit.reporting.text import NOT_AVAILABLE, Table, first_of, number, share, size
from quantkit.results import Export


def export_table(run: Run) -> Table:
    """Returns recipe, size, latency and accuracy, one row an export."""
    rows = []
    for found in run.exports:
        result = found.result
        latency = result.latency_ms
        float_ms = latency.get("float", math.nan)
        quantized_ms = latency.get("quantized", math.nan)
        known = float_ms > 0 and quantized_ms > 0
        accuracy = result.accuracy
        figures = (
            number(accuracy.float if accuracy else None),
            number(accuracy.quantized if accuracy else None),
        )
        rows.append(
            (
                result.model.name,
                recipe_of(result),
                "passed" if result.passed else "FAILED",
                accuracy.metric if accuracy else NOT_AVAILABLE,
                *figures,
                number(float_ms),
                number(quantized_ms),
                f"{float_ms / quantized_ms:.2f}x" if known else NOT_AVAILABLE,
                size(sum(file.bytes for file in result.files if "/" not in file.name)),
                number(len(result.quantizers)),
            )
        )
    return Table(
        title="Exports",
        columns=(
            "model", "recipe", "gates", "metric", "float", "quantized", "float ms", "quantized ms",
            "speed-up", "size", "quantizers",
        ),
        rows=tuple(rows),
        text_columns=4,
        note="Latency in ONNX Runtime, milliseconds a call, paired runs.",
    )  # fmt: skip


def recipe_of(result: Export) -> str:
    """Returns what an export is called: its recipe, and how that is stored where it matters."""
    name = result.recipe if result.precision == "float32" else result.precision
    return f"{name}, MatMulNBits" if result.storage == "matmulnbits" else name


def notes(run: Run) -> tuple[str, ...]:
    """Returns what each export left in float, smoothed and lost; nothing where it did none."""
    many = len(run.exports) > 1
    return tuple(
        f"{found.result.model.name}, {found.result.recipe}: {part}" if many else part
        for found in run.exports
        for part in (_kept(found.result), _smoothed(found.result), _lost(found.result))
        if part
    )


MUCH_LOST: Final = 0.05
"""Of a perplexity, relative; from here on an export says so, though its arithmetic is proven."""
LEAST_COSINE: Final = 0.99
"""Of an output with float's: the same."""


def _lost(result: Export) -> str:
    accuracy = result.accuracy
    moved = [check.cosine for check in result.parity.get("outputs", [])]
    if accuracy is not None and accuracy.metric == "perplexity":
        is_much = not accuracy.quantized <= (1 + MUCH_LOST) * accuracy.float
        said = f"perplexity {number(accuracy.float)} became {number(accuracy.quantized)}"
    else:
        is_much = bool(moved) and not min(moved) >= LEAST_COSINE
        said = f"an output keeps a cosine of {number(min(moved))} with float's" if moved else ""
    if not is_much:
        return ""
    return (
        f"WARNING: accuracy is lost, {said}: the gates prove the arithmetic, not the recipe. Try "
        "--quantize auto or w8a8-dynamic, or --keep what quantkit diagnose names"
    )


def _kept(result: Export) -> str:
    kept = result.kept
    return f"kept in float: {_count(len(kept), 'quantizer')} ({first_of(kept)})" if kept else ""


def _smoothed(result: Export) -> str:
    alphas = result.smoothed.values()
    if not alphas:
        return ""
    low, high = f"{min(alphas):.2f}", f"{max(alphas):.2f}"
    span = low if low == high else f"{low} .. {high}"
    return f"smoothed: {_count(len(alphas), 'group')}, alpha {span}"


def _count(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def kept_table(run: Run) -> Table:
    """Returns the quantizers that were left in float."""
    return Table(
        title="Quantizers left in float",
        columns=("model", "recipe", "quantizer"),
        rows=tuple(
            (found.result.model.name, found.result.recipe, name)
            for found in run.exports
            for name in found.result.kept
        ),
        text_columns=3,
    )


def smoothed_table(run: Run) -> Table:
    """Returns the groups of linear layers whose input was smoothed, with their alpha."""
    return Table(
        title="Smoothed groups of the export",
        columns=("model", "recipe", "group", "alpha"),
        rows=tuple(
            (found.result.model.name, found.result.recipe, group, f"{alpha:.2f}")
            for found in run.exports
            for group, alpha in found.result.smoothed.items()
        ),
        text_columns=3,
    )


def parity_table(run: Run) -> Table:
    """Returns every comparison of ONNX Runtime with torch, by graph and shape."""
    rows = []
    against: dict[str, None] = {}
    for found in run.exports:
        for graph, checks in found.result.parity.items():
            for check in checks:
                against[f"{graph}: against {check.reference}"] = None
                shape = f"{check.batch} x {check.seq_len} + {check.cached}"
                figures = (check.max_abs, check.cosine, check.top1_agreement)
                verdict = "passed" if check.passed else "FAILED"
                texts = (number(figures[0]), number(figures[1], 7), share(figures[2]))
                name = found.result.model.name
                rows.append((name, graph, verdict, shape, *texts))
    return Table(
        title="Parity",
        columns=(
            "model", "graph", "gate", "batch x tokens + cached", "max abs", "cosine", "top-1",
        ),
        rows=tuple(rows),
        text_columns=3,
        note="max abs: largest difference of an output logit; top-1: share of positions with the "
        f"same best token. {'; '.join(against)}.",
    )  # fmt: skip


def latency_table(run: Run) -> Table:
    """Returns every latency that was measured; what a call was is in the note."""
    sizes = {
        f"{what.replace('_', ' ')}: {value:,.0f}": None
        for found in run.exports
        for what, value in found.result.latency_ms.items()
        if what.endswith(_COUNTS)
    }
    return Table(
        title="Latency",
        columns=("model", "recipe", "what", "ms"),
        rows=tuple(
            (found.result.model.name, found.result.recipe, what, number(value))
            for found in run.exports
            for what, value in found.result.latency_ms.items()
            if not what.endswith(_COUNTS)
        ),
        text_columns=3,
        note=f"{'; '.join(sizes)}." if sizes else "",
    )


_COUNTS: Final = ("_tokens", "_cached")
"""Ends of what stands among the latencies and is a number of tokens."""


def file_table(run: Run) -> Table:
    """Returns the files of the exports with sizes and hashes."""
    return Table(
        title="Files",
        columns=("file", "sha256", "size", "bytes"),
        rows=tuple(
            (file.name, file.sha256[:16], size(file.bytes), number(file.bytes))
            for found in run.exports
            for file in found.result.files
        ),
        text_columns=2,
    )
