"""A diagnosis on the page: what is to blame in words, then the worst, by the graph's names."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.reporting.against import against_section
from quantkit.reporting.against_changes import compare
from quantkit.reporting.blocks import FirstScreen
from quantkit.reporting.collect import Run, collect
from quantkit.reporting.diagnosis_tables import WORST, diagnosis_section, diagnosis_verdict
from quantkit.reporting.report import Page, render_html, render_markdown
from quantkit.results import (
    DataInfo,
    Diagnosis,
    Finding,
    GraphInfo,
    QuantizerDiagnosis,
    TensorError,
    write_json,
)

HOSTILE = "</style></svg><script>alert(1)</script>\"'&|`*x*`\x1b[31m\nnext"
TENSORS = 25


def quantizer(name: str, alone: float) -> QuantizerDiagnosis:
    fields = {field.name: 0.5 for field in dataclasses.fields(QuantizerDiagnosis)}
    words = dict.fromkeys(
        ("op", "tensor", "layer", "place", "kind", "dtype", "granularity"), "word"
    )
    whole = {"zero_point_min": 0, "zero_point_max": 0, "levels_used": 1_024, "levels": 4_096}
    row = fields | words | whole | {"worst_channel": -1, "name": name, "alone": alone}
    return QuantizerDiagnosis(**row)  # type: ignore[arg-type]


def tensor(at: int) -> TensorError:
    return TensorError(
        name=f"/layers.{at}/down/MatMul_output_0",
        quantized_name=f"/layers.{at}/down/MatMul_output_0_q",
        op="MatMul",
        layer=f"layers.{at}.down",
        sqnr_db=30.0,
        inlier_sqnr_db=math.nan if at == 0 else 60.0 - at,
        relative_error=0.125 if at == 3 else 0.01,
        cosine=0.9,
        jump=8.5 if at == 3 else 1.0,
        elements=64,
    )


def finding(where: str, severity: str, share: float) -> Finding:
    return Finding(
        severity=severity,  # type: ignore[arg-type]
        kind="wide_range",
        where=where,
        quantizer="q",
        share=share,
        what="the grid is 4.2 bits wider than what it holds",
        advice="calibrate with mse",
    )


def diagnosis(
    name: str = "int8.onnx", where: str = "layers.3.down", **changes: object
) -> Diagnosis:
    graph = GraphInfo(
        source="f/float.onnx", sha256="a" * 64, opset=21, nodes=90, domains={"ai.onnx": 90}
    )
    other = dataclasses.replace(graph, source=f"q/{name}", sha256="b" * 64, nodes=140)
    data = DataInfo(
        source="pydoc",
        sha256="c" * 64,
        sequences=8,
        seq_len=256,
        tokens=2_048,
        batch_size=1,
        bos="auto",
        block_hashes=[],
        skipped_blocks=0,
        python="3.12",
    )  # fmt: skip
    found = Diagnosis(
        float_graph=graph,
        quantized_graph=other,
        data=data,
        environment={"onnxruntime": "1.2.3"},
        metric="kl",
        total=0.25,
        measured=2,
        alone_samples=1,
        begins="/layers.3/down/MatMul_output_0",
        findings=[
            finding(where, "broken", 0.75),
            *(finding(f"layers.{i}.up", "costly", math.nan) for i in range(5)),
        ],
        quantizers=[
            quantizer("low", 0.01),
            quantizer("unmeasured", math.nan),
            quantizer("high", 0.2),
        ],
        tensors=[tensor(i) for i in range(TENSORS)],
        in_float=["lm_head"],
        warnings=["one input was padded"],
    )
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def run_of(tmp_path: Path, *found: Diagnosis) -> Run:
    for i, one in enumerate(found):
        write_json(tmp_path / f"run-{i}" / "diagnosis.json", one)
    return collect([tmp_path])


def test_words_come_before_the_tables(tmp_path: Path) -> None:
    section = diagnosis_section(run_of(tmp_path, diagnosis()))
    assert section.notes == (
        "layers.3.down: 75.0 % of the damage, wide range (broken). The grid is 4.2 bits wider than "
        "what it holds. Try: calibrate with mse.",
        *(
            f"layers.{i}.up: wide range (costly). The grid is 4.2 bits wider than what it holds. "
            "Try: calibrate with mse."
            for i in range(2)
        ),
        "The error begins at /layers.3/down/MatMul_output_0 (MatMul of layers.3.down): 12.5 % off, "
        "8.5 x what it reads.",
        "WARNING: one input was padded.",
    )
    findings, tensors, quantizers, graphs = section.tables
    assert len(findings.rows) == 6
    # the worst by inliers first; what was not compared is left out
    assert [row[4] for row in tensors.rows] == [f"{36.0 + i}" for i in range(WORST)]
    assert tensors.rows[0][:3] == (
        "/layers.24/down/MatMul_output_0", "/layers.24/down/MatMul_output_0_q", "layers.24.down"
    )  # fmt: skip
    assert f"The {WORST} worst of 24" in tensors.note
    assert [row[0] for row in quantizers.rows] == ["high", "low"]
    assert "2 of 3 quantizers were measured" in quantizers.note
    assert [row[2:4] for row in graphs.rows] == [
        ("f/float.onnx", "a" * 16), ("q/int8.onnx", "b" * 16)
    ]  # fmt: skip
    assert [table.rows for table in section.folded] == [
        (("lm_head", "in float"),),
        (("q/int8.onnx", "onnxruntime", "1.2.3"),),
    ]


def test_the_verdict_says_what_is_lost_where_and_by_what(tmp_path: Path) -> None:
    loss, start, blame = diagnosis_verdict(run_of(tmp_path, diagnosis()))
    assert loss == (
        "q/int8.onnx loses KL 0.2500 nats a token beside its float graph on 8 samples of pydoc."
    )
    assert start.startswith("The error begins at /layers.3/down/MatMul_output_0 ")
    assert blame.startswith("layers.3.down: 75.0 % of the damage")


def test_nothing_to_blame_is_said(tmp_path: Path) -> None:
    run = run_of(tmp_path, diagnosis(findings=[], begins="", metric="relative", total=0.0))
    loss, start, blame = diagnosis_verdict(run)
    assert "loses 0 of the output's energy" in loss
    assert start.startswith("The graphs part nowhere by 10 % or more; worst is /layers.24/")
    assert blame.startswith("Nothing to blame")
    assert "Findings" not in diagnosis_section(run).tables[0].title


def test_two_diagnoses_are_told_apart(tmp_path: Path) -> None:
    run = run_of(tmp_path, diagnosis(), diagnosis(total=0.5))
    section = diagnosis_section(run)
    assert len(diagnosis_verdict(run)) == 6
    assert section.tables[0].title == "Findings, what is broken first: q/int8.onnx [1]"
    assert section.tables[3].title == "Findings, what is broken first: q/int8.onnx [2]"
    assert {row[0] for row in section.tables[-1].rows} == {"q/int8.onnx [1]", "q/int8.onnx [2]"}


def test_no_diagnosis_is_an_empty_section() -> None:
    section = diagnosis_section(Run())
    assert section.is_empty and "quantkit diagnose" in section.missing
    assert diagnosis_verdict(Run()) == ()


def test_an_earlier_diagnosis_stands_beside(tmp_path: Path) -> None:
    now = run_of(tmp_path / "now", diagnosis(total=0.125))
    earlier = run_of(tmp_path / "then", diagnosis())
    (row,) = against_section(now, earlier).tables[0].rows
    assert row[1:] == ("total", "changed", "0.25000", "0.12500", "-50.00 %")
    assert len([e for e in compare(now, earlier).entries if e.is_changed]) == 1


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "diagnosis.json"
    path.write_text('{"schema": "quantkit.diagnosis/9"}', "utf-8")
    with pytest.raises(InputError, match=r"version '9' of quantkit\.diagnosis"):
        collect([tmp_path])


@pytest.mark.kind(8, "report")
def test_hostile_names_of_a_graph_are_escaped(tmp_path: Path) -> None:
    run = run_of(tmp_path, diagnosis(name=HOSTILE.replace("/", "_"), where=HOSTILE))
    context: dict[str, object] = {"models": [], "warnings": [], "headlines": [], "definitions": []}
    page = Page(
        context=context,
        first=FirstScreen(sentences=diagnosis_verdict(run)),
        sections=(diagnosis_section(run),),
    )
    for text in (render_html(page), render_markdown(page)):
        assert "<script>alert" not in text and "\x1b" not in text
