"""A diagnosis on the page: what is to blame in words, then the worst tensors and quantizers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import PurePath
from typing import Final

from quantkit.reporting.blocks import Section
from quantkit.reporting.collect import Run
from quantkit.reporting.diagnosis_terminal import begins, lost
from quantkit.reporting.text import NOT_AVAILABLE, Table, decibels, number, share, small_share
from quantkit.results import Diagnosis, Finding, GraphInfo, QuantizerDiagnosis, TensorError

WORST: Final = 20
"""Rows of the tables of the worst; the file has all."""
_IN_WORDS: Final = 3
"""Findings that are said in words above the tables."""


def diagnosis_verdict(run: Run) -> tuple[str, ...]:
    """Returns what is lost, where the graphs part and what is to blame most, of each diagnosis."""
    return tuple(
        sentence
        for name, found in diagnoses(run)
        for sentence in (_loss(name, found), _start(begins(found)), *_blamed(found, 1))
    )


def diagnosis_section(run: Run) -> Section:
    """Returns the findings in words and in a table, the worst tensors and quantizers, the graphs.

    Without a `diagnosis.json` it is empty, and says which command writes one.
    """
    found = diagnoses(run)
    many = len(found) > 1
    return Section(
        name="diagnosis",
        title="Where the accuracy went",
        missing="No diagnosis.json was found. `quantkit diagnose FLOAT.onnx QUANTIZED.onnx` "
        "writes it.",
        notes=tuple(
            f"{name}: {note}" if many else note for name, one in found for note in _notes(one)
        ),
        tables=_filled(
            *(_named(table, name, many) for name, one in found for table in _tables(one)),
            _graph_table(found),
        ),
        folded=_filled(
            *(_named(_float_table(one), name, many) for name, one in found),
            _environment_table(found),
        ),
    )


def diagnoses(run: Run) -> list[tuple[str, Diagnosis]]:
    """Returns (label, diagnosis) of every file: the quantized graph's, numbered if need be.

    A label is the file and its folder: many a graph is a `model.onnx`.
    """
    sources = [PurePath(found.result.quantized_graph.source) for found in run.diagnoses]
    names = ["/".join(source.parts[-2:]) for source in sources]
    return [
        (name if names.count(name) == 1 else f"{name} [{names[:at].count(name) + 1}]", one.result)
        for at, (name, one) in enumerate(zip(names, run.diagnoses, strict=True))
    ]


def _loss(name: str, found: Diagnosis) -> str:
    return (
        f"{_start(name, end='')} loses {lost(found)} beside its float graph on "
        f"{found.data.sequences:,} samples of {found.data.source}."
    )


def _blamed(found: Diagnosis, most: int) -> list[str]:
    if not found.findings:
        return ["Nothing to blame: no quantizer costs the output anything that matters."]
    return [_finding(finding) for finding in found.findings[:most]]


def _finding(finding: Finding) -> str:
    part = "" if math.isnan(finding.share) else f"{share(finding.share)} of the damage, "
    return (
        f"{_start(finding.where, end='')}: {part}{finding.kind.replace('_', ' ')} "
        f"({finding.severity}). {_start(finding.what)} Try: {_closed(finding.advice)}"
    )


def _notes(found: Diagnosis) -> tuple[str, ...]:
    warnings = (f"WARNING: {_closed(text)}" for text in found.warnings)
    return (*_blamed(found, _IN_WORDS), _start(begins(found)), *warnings)


def _start(text: str, end: str = ".") -> str:
    """Returns a part of a line as a sentence; names of graphs keep their letters."""
    is_name = any(mark in text.split(" ", 1)[0] for mark in "./_")
    first = text[:1] if is_name else text[:1].upper()
    return _closed(first + text[1:]) if end else first + text[1:]


def _closed(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _tables(found: Diagnosis) -> tuple[Table, ...]:
    return (_finding_table(found), _tensor_table(found), _quantizer_table(found))


def _finding_table(found: Diagnosis) -> Table:
    return Table(
        title="Findings, what is broken first",
        columns=("where", "kind", "severity", "what", "try", "share of damage"),
        rows=tuple(
            (
                one.where, one.kind.replace("_", " "), one.severity, one.what, one.advice,
                share(one.share),
            )
            for one in found.findings
        ),
        text_columns=5,
        note="The share is of all damages alone added up.",
    )  # fmt: skip


def _tensor_table(found: Diagnosis) -> Table:
    known = [tensor for tensor in found.tensors if not math.isnan(tensor.inlier_sqnr_db)]
    worst = sorted(known, key=lambda tensor: tensor.inlier_sqnr_db)[:WORST]
    beyond = f" The {len(worst)} worst of {len(known):,}." if len(known) > len(worst) else ""
    return Table(
        title="The worst tensors, quantized against float",
        columns=(
            "tensor", "in the quantized graph", "layer", "op", "inlier SQNR, dB", "SQNR, dB",
            "off", "jump", "cosine",
        ),
        rows=tuple(map(_tensor_row, worst)),
        text_columns=4,
        note="Inliers lie between the 0.05 % and the 99.95 % quantile; off is their relative "
        "error, jump that over the largest of what the node reads." + beyond,
    )  # fmt: skip


def _tensor_row(tensor: TensorError) -> tuple[str, ...]:
    return (
        tensor.name, tensor.quantized_name, tensor.layer, tensor.op,
        decibels(tensor.inlier_sqnr_db), decibels(tensor.sqnr_db), share(tensor.relative_error),
        number(tensor.jump, 2), number(tensor.cosine, 6),
    )  # fmt: skip


def _quantizer_table(found: Diagnosis) -> Table:
    known = [one for one in found.quantizers if not math.isnan(one.alone)]
    worst = sorted(known, key=lambda one: -one.alone)[:WORST]
    unit = "KL, nats a token" if found.metric == "kl" else "share of the output's energy"
    return Table(
        title="The quantizers that cost most alone",
        columns=(
            "quantizer", "tensor", "layer", "place", "kind", "alone", "share", "local SQNR, dB",
            "wasted bits", "clipped", "levels",
        ),
        rows=tuple(map(_quantizer_row, worst)),
        text_columns=5,
        note=f"alone: what the output loses by this one ({unit}), on {found.alone_samples:,} "
        f"samples; {len(known):,} of {len(found.quantizers):,} quantizers were measured.",
    )  # fmt: skip


def _quantizer_row(one: QuantizerDiagnosis) -> tuple[str, ...]:
    levels = f"{one.levels_used:,} of {one.levels:,}" if one.levels else NOT_AVAILABLE
    return (
        one.name, one.tensor, one.layer, one.place, one.kind, number(one.alone), share(one.share),
        decibels(one.local_sqnr_db), number(one.wasted_bits, 2),
        small_share(one.below_frac + one.above_frac), levels,
    )  # fmt: skip


def _float_table(found: Diagnosis) -> Table:
    parts = (("in float", found.in_float), ("weight only", found.weight_only))
    return Table(
        title="Layers that compute in float",
        columns=("layer", "how"),
        rows=tuple((layer, how) for how, layers in parts for layer in layers),
        text_columns=2,
    )


def _graph_table(found: list[tuple[str, Diagnosis]]) -> Table:
    return Table(
        title="The graphs that were compared",
        columns=("graph", "which", "file", "sha256", "domains", "text", "text sha256", "opset",
                 "nodes"),
        rows=tuple(
            _graph_row(name, which, graph, one)
            for name, one in found
            for which, graph in (("float", one.float_graph), ("quantized", one.quantized_graph))
        ),
        text_columns=7,
    )  # fmt: skip


def _graph_row(name: str, which: str, graph: GraphInfo, found: Diagnosis) -> tuple[str, ...]:
    domains = ", ".join(f"{domain} {count:,}" for domain, count in graph.domains.items())
    return (
        name, which, graph.source, graph.sha256[:16], domains, found.data.source,
        found.data.sha256[:16], number(graph.opset), number(graph.nodes),
    )  # fmt: skip


def _environment_table(found: list[tuple[str, Diagnosis]]) -> Table:
    return Table(
        title="Environment of the diagnosis",
        columns=("graph", "what", "value"),
        rows=tuple((name, *fact) for name, one in found for fact in one.environment.items()),
        text_columns=3,
    )


def _named(table: Table, name: str, many: bool) -> Table:
    """Returns the table with the graph in its title, where there are several."""
    return replace(table, title=f"{table.title}: {name}") if many else table


def _filled(*candidates: Table) -> tuple[Table, ...]:
    return tuple(table for table in candidates if table.rows)
