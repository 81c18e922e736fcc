"""The tables of exports: no column mixes units, and none is wider than what it says."""

from __future__ import annotations

import dataclasses

from quantkit.reporting.definitions import DEFINITIONS
from quantkit.reporting.export_tables import latency_table, parity_table
from quantkit.reporting.text import table_width
from tests.reporting.planted_exports import export, run_of


def test_what_a_call_was_is_no_latency() -> None:
    times = {"float": 8.0, "quantized": 4.0, "prefill_tokens": 256.0, "quantized_decode": 2.0,
             "decode_cached": 255.0}  # fmt: skip
    made = dataclasses.replace(export("w8a8", 4.0, None), latency_ms=times)
    table = latency_table(run_of(made))
    assert {row[2]: row[3] for row in table.rows} == {
        "float": "8.000", "quantized": "4.000", "quantized_decode": "2.000"
    }  # fmt: skip
    assert table.note == "prefill tokens: 256; decode cached: 255."
    assert latency_table(run_of(export("w8a8", 4.0, None))).note == ""


def test_parity_fits_a_terminal_and_says_below_what_was_compared() -> None:
    made = export("w8a8", 4.0, None)
    table = parity_table(run_of(made))
    assert len(table.rows) == sum(map(len, made.parity.values()))
    assert table_width(table) <= 120
    for graph, checks in made.parity.items():
        assert all(f"{graph}: against {check.reference}" in table.note for check in checks)


def test_what_the_first_screen_says_of_exports_is_defined() -> None:
    terms = [definition.term for definition in DEFINITIONS]
    assert len(terms) == len(set(terms))
    for word in ("recommended export", "budget (--max-drop)", "Pareto front", "gates", "speed"):
        assert word in terms
