"""What notebooks show: the figures of the files, every name escaped, whatever was not measured."""

from __future__ import annotations

import dataclasses
import html
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quantkit.results import (
    AutoResult,
    Calibration,
    CorpusInfo,
    Curves,
    CurvesHeader,
    CurveStep,
    Diagnosis,
    DrawnHistogram,
    Export,
    Finding,
    GraphInfo,
    HiddenCurve,
    LogitCurve,
    Measurement,
    MethodRange,
    Ranges,
    Result,
    Sensitivity,
    Stats,
    Sweep,
    TensorDiagnosis,
    TrainedModel,
    TrainingResult,
    Trial,
    UnitSensitivity,
    read_json,
    to_plain,
    write_json,
)
from quantkit.results.notebook import MOST_ROWS, number

NEWEST = Path(__file__).parent / "fixtures" / "v4"
V3 = Path(__file__).parent / "fixtures" / "v3"
BAD = '<script>alert("1")</script>&'
STATS = read_json(NEWEST / "base" / "stats.json", Stats)
SWEEP = read_json(NEWEST / "sweep.json", Sweep)
MODEL = dataclasses.replace(STATS.model, name=BAD)
DATA = dataclasses.replace(STATS.data, source=BAD)


class Cells(HTMLParser):
    """Rows of finished text, and every tag that stands in the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []  # every tag is closed

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open.append(tag)
        assert {name for name, _ in attrs} <= {"style"}
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row[0] == first)


def method(name: str, db: float) -> MethodRange:
    return MethodRange(
        method=name, lo=-1.0, hi=3.5, clipped_frac=0.25, sqnr_db=math.nan, inlier_sqnr_db=db
    )


def tensors(count: int) -> list[TensorDiagnosis]:
    return [
        TensorDiagnosis(
            name=f"{BAD}{n}", point="linear_input", count=9, bits=8, symmetric=False, min=-1.0,
            max=3.5, mean=0.0, std=1.0, span_lo=-1.0, span_hi=1.0, bits_wasted=math.inf,
            chosen="mse", methods=[method("minmax", 1.0), method("mse", 31.25)],
            histogram=DrawnHistogram(edges=[0, 1], counts=[1]), first_max_abs=math.nan,
            others_max_abs=1.0,
        )
        for n in range(count)
    ]  # fmt: skip


def unit(name: str, kl: float) -> UnitSensitivity:
    return UnitSensitivity(
        name=name, point="mixed", quantizers=[name], rank=1, enable_one_kl=kl,
        enable_one_stderr=math.nan, disable_one_kl=math.nan, removed_frac=math.nan,
        removed_stderr_frac=math.nan, tokens=8,
    )  # fmt: skip


def graph(name: str) -> GraphInfo:
    return GraphInfo(source=name, sha256="", opset=21, nodes=1, domains={})


def measurement() -> Measurement:
    return Measurement(
        step=4, tokens=64, loss=2.125, quantized_loss={}, max_logit=3.0, abs_max_logit=math.nan,
        abs_max_hidden=1.0, kurtosis=1234567.0, inf_norm_mean=1.0, accuracies={},
        quantized_accuracies={}, lambdas=[],
    )  # fmt: skip


def trained(*, finished: bool) -> TrainedModel:
    return TrainedModel(
        arm=BAD, seed=1, architecture="A", parameters=5_000_000, folder="", sha256="", steps=4,
        tokens=64, seconds=1.0, tokens_per_second=64.0, finished=finished, losses=[],
        measurements=[measurement()] if finished else [],
    )  # fmt: skip


def curve_step(n: int) -> CurveStep:
    logit = LogitCurve(layer=0, map=1, max=2.0, min=-7.0, abs_max=7.0, head=0, nan=0)
    hidden = HiddenCurve(layer=0, abs_max=41.0 + n, inf_norm_mean=1.0, kurtosis=3.0, nan=0)
    return CurveStep(
        step=n, loss=math.nan, lr=0.1, forwards=1, sequences=1, tokens=8, logits=[logit],
        hidden=[hidden],
    )  # fmt: skip


CORPUS = CorpusInfo(
    sources=[], context=8, vocabulary=8, rows=1, text_rows=1, needles_rows=0, icl_rows=0,
    held_out_rows=1, tokenizer_sha256="", rows_sha256="", held_out_sha256="",
)  # fmt: skip
TRIAL = Trial(
    name=BAD, recipe="w8a8", storage="qdq", smoothing="none", method="", kept=[], value=12.5,
    change=1.0125, change_low=math.nan, change_high=math.nan, loss_high=0.01, latency_ms=10.0,
    float_ms=25.0, bytes=3_400_000, is_within=True,
)  # fmt: skip
FINDING = Finding(
    severity="broken", kind="scale", where=BAD, quantizer="q", share=0.625, what=BAD, advice=BAD
)
RESULTS: dict[str, Result] = {
    "stats": dataclasses.replace(STATS, model=MODEL, data=DATA, warnings=[BAD]),
    "ranges": dataclasses.replace(
        read_json(V3 / "base" / "ranges.json", Ranges), model=MODEL, data=DATA, warnings=[BAD]
    ),
    "calibration": Calibration(
        model=MODEL, data=DATA, environment={}, method="mse", excludes_first=False,
        tensors=tensors(30), warnings=[BAD],
    ),
    "sweep": dataclasses.replace(
        SWEEP, cells=[dataclasses.replace(cell, model=BAD) for cell in SWEEP.cells], notes=[BAD]
    ),
    "sensitivity": Sensitivity(
        model=MODEL, data=DATA, ranges="r", calibration=DATA, method="mse", environment={},
        recipe="w8a8", group="tensor", modes=["enable-one"], total_kl=0.5, total_stderr=0.1,
        rows=[unit(BAD, 0.25), unit("b", 0.125)], target_frac=0.1, reached=False, keep=[BAD],
    ),
    "export": dataclasses.replace(read_json(V3 / "base" / "export.json", Export), model=MODEL),
    "auto": AutoResult(
        model=MODEL, data=DATA, calibration=DATA, chosen_on=1, ranked_on=1, environment={},
        task="perplexity", metric="perplexity", units="blocks", max_drop=0.01, prefill_tokens=8,
        seed=0, float_value=12.0, trials=[TRIAL], chosen=BAD, reason=BAD,
    ),
    "diagnosis": Diagnosis(
        float_graph=graph("f.onnx"), quantized_graph=graph(BAD), data=DATA, environment={},
        metric="kl", total=0.75, measured=1, alone_samples=1, begins=BAD, findings=[FINDING],
        quantizers=[], tensors=[],
    ),
    "training": TrainingResult(
        name=BAD, pair={}, corpus=CORPUS, processes=1, environment={},
        models=[trained(finished=True), trained(finished=False)],
    ),
    "curves": Curves(
        header=CurvesHeader(
            name=BAD, architecture="A", parameters=1, layers=1, maps=1, every=1, ranks=1,
            versions={},
        ),
        steps=tuple(curve_step(n) for n in range(100)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS.keys())
def test_a_hostile_name_is_text(result: Result) -> None:
    page = result._repr_html_()
    assert Cells(page).tags <= {"div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    assert html.escape(BAD) in page and "<script" not in page
    tables = [Cells(table) for table in re.findall("<table.*?</table>", page)]
    assert tables and all(len({*map(len, table.rows)}) == 1 for table in tables)
    assert len(page) < 20_000
    assert len(repr(result)) < 200 and "\n" not in repr(result)


def test_stats_are_table_5() -> None:
    found = Cells(STATS._repr_html_())
    for words, point in (
        ("attention logits", STATS.summary.attention_logit),
        ("hidden states", STATS.summary.hidden_state),
    ):
        figures = [float(text.replace(",", "")) for text in found.row(words)[1:]]
        tops = [point.abs_top[rank] for rank in ("1", "2", "3", "10", "100")]
        assert figures == pytest.approx([*tops, point.abs_median, point.kurtosis], rel=1e-3)
    assert found.row("|x|")[1:] == ["top-1", "top-2", "top-3", "top-10", "top-100", "median",
                                    "kurtosis"]  # fmt: skip
    rate = f"Sink rate {100 * STATS.summary.sink_rate:.1f} %"
    massive = f"massive activations: {STATS.summary.massive_activations.count}"
    assert rate in STATS._repr_html_() and massive in STATS._repr_html_()


def test_a_sweep_has_a_row_a_recipe_and_a_column_a_model() -> None:
    found = Cells(SWEEP._repr_html_())
    task = SWEEP.tasks[0]
    models = list(dict.fromkeys(cell.model for cell in SWEEP.cells))
    head = next(row for row in found.rows if row[1:] == models)
    assert task.metrics[0] in head[0]
    first = [c for c in SWEEP.cells if c.task == task.name and c.metric == task.metrics[0]]
    for column, model in enumerate(models, 1):
        base = next(cell for cell in first if cell.model == model and cell.recipe == "none")
        text = found.row("float (16 bits)")[column]
        assert float(text.split(" ")[0]) == pytest.approx(base.value, rel=1e-3)
        low, high = text.split("[")[1].rstrip("]").split(", ")
        assert (float(low), float(high)) == pytest.approx((base.ci_low, base.ci_high), rel=1e-3)
    quantized = next(cell for cell in first if cell.granularity is not None)
    label = f"{quantized.bits} bits per {quantized.granularity} ({quantized.recipe})"
    assert found.row(label)[1].startswith(number(quantized.value))


ROWS: dict[str, list[str]] = {
    "calibration": [f"{BAD}0", "mse", "-1.000", "3.500", "25 %", "31.25", "inf"],
    "sensitivity": ["1", BAD, "mixed", "0.2500", "n/a"],
    "auto": [BAD, "12.50", "1.012", "2.50x", "3.4 MB", "chosen"],
    "diagnosis": ["broken", BAD, "scale", BAD, BAD, "62.5 %"],
    "training": [BAD, "1", "5,000,000", "64", "2.125", "n/a", "1,234,567"],
    "curves": ["0", "n/a", "7.000", "41.00", "3.000"],
}


@pytest.mark.parametrize("name", ROWS)
def test_the_first_row_is_the_first_of_the_file(name: str) -> None:
    assert Cells(RESULTS[name]._repr_html_()).rows[1] == ROWS[name]


def test_long_tables_are_cut_and_say_so() -> None:
    page = RESULTS["calibration"]._repr_html_()
    assert len(Cells(page).rows) == 1 + MOST_ROWS
    assert f"The first {MOST_ROWS} of 30 rows." in page
    steps = [row[0] for row in Cells(RESULTS["curves"]._repr_html_()).rows[1:]]
    assert len(steps) == MOST_ROWS and (steps[0], steps[-1]) == ("0", "99")


def test_an_unmet_gate_and_an_unfinished_arm_are_said() -> None:
    export = RESULTS["export"]
    assert isinstance(export, Export)
    assert "every gate met" in export._repr_html_()
    assert "a gate FAILED" in dataclasses.replace(export, passed=False)._repr_html_()
    assert f"Not finished: {html.escape(BAD)}-seed1." in RESULTS["training"]._repr_html_()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "n/a"), (math.nan, "n/a"), (math.inf, "inf"), (-math.inf, "-inf"), (0.0, "0"),
     (12, "12"), (1234567, "1,234,567"), (0.00012345, "0.0001234"), (1.5e-9, "1.5e-09"),
     (-12.3456, "-12.35"), (98765.4, "98,765"), (3e12, "3e+12")],
    ids=repr,
)  # fmt: skip
def test_numbers_have_four_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_the_folder_is_where_it_was_read_from_and_in_no_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "stats.json"
    write_json(path, STATS)
    found = read_json(path, Stats)
    assert found.folder == tmp_path / "deep"
    assert to_plain(found) == to_plain(STATS) and "folder" not in path.read_text(encoding="utf-8")
    moved = found.in_folder(tmp_path)
    assert (moved.folder, found.folder) == (tmp_path, tmp_path / "deep")
    assert str(tmp_path) in repr(moved)
    assert dataclasses.replace(found, seed=1).folder is None  # no file says that
    one, other = (Curves(header=RESULTS["curves"].header, steps=()) for _ in range(2))  # type: ignore[attr-defined]
    assert one.in_folder(tmp_path) == other  # of what they say
