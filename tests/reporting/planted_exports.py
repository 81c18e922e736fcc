"""Exports with figures made by hand: nothing was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from quantkit.reporting.collect import Found, Run
from quantkit.results import Accuracy, AutoResult, Export, FileInfo, read_json

V3 = Path(__file__).parent.parent / "results" / "fixtures" / "v3" / "base"
AUTO = Path(__file__).parents[2] / "benchmarks" / "results" / "auto_smollm2.json"
"""A search that was made: twelve graphs."""
FILES = [
    FileInfo(name="model.onnx", bytes=1_000_000, sha256="a" * 64),
    FileInfo(name="model.onnx.data", bytes=9_000_000, sha256="b" * 64),
    FileInfo(name="float/model.onnx", bytes=40_000_000, sha256="c" * 64),
]


def accuracy(change: float, low: float | None, high: float | None) -> Accuracy:
    """A perplexity of float 10, with its change and that one's interval."""
    return Accuracy(
        metric="perplexity", float=10.0, quantized=10.0 * change, change=change, change_low=low,
        change_high=high,
    )  # fmt: skip


def export(recipe: str, ms: float, found: Accuracy | None, *, passed: bool = True) -> Export:
    """10 MB, of 40 MB in float; float takes 100 ms."""
    kept = read_json(V3 / "export.json", Export)
    return dataclasses.replace(
        kept, recipe=recipe, accuracy=found, passed=passed, files=FILES, kept=[], smoothed={},
        latency_ms={"float": 100.0, "quantized": ms},
    )  # fmt: skip


def run_of(*exports: Export, searches: tuple[AutoResult, ...] = ()) -> Run:
    return Run(
        exports=tuple(Found(place=f"run/{e.recipe}/export.json", result=e) for e in exports),
        searches=tuple(Found(place="run/auto.json", result=found) for found in searches),
    )
