"""Sweeps of the version-3 fixture with planted cells, for tests of an earlier run beside a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantkit.reporting.collect import Found, Run
from quantkit.results import Cell, Sweep, read_json

FIXTURES = Path(__file__).parent.parent / "results" / "fixtures"
V3 = FIXTURES / "v3"


def sweep_run(change: Callable[[Cell], Cell] = lambda cell: cell, **changes: Any) -> Run:
    sweep = read_json(V3 / "sweep.json", Sweep)
    sweep = dataclasses.replace(sweep, deltas=[], cells=[change(c) for c in sweep.cells], **changes)
    return planted(sweep)


def planted(sweep: Sweep) -> Run:
    return Run(sweeps=(Found(place="x/sweep.json", result=sweep),))
