"""The calibration report: what the page draws and says is what `calibration.json` holds."""

from __future__ import annotations

import dataclasses
import html
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from quantkit.numerics.methods import METHODS
from quantkit.reporting import write_report
from quantkit.reporting.calibration_definitions import CALIBRATION_DEFINITIONS
from quantkit.reporting.collect import Found, Run, collect, everything
from quantkit.reporting.tables import ranges_table
from quantkit.reporting.verdict import verdict
from quantkit.results import Calibration, Range, Ranges, TensorDiagnosis, write_json

HOSTILE = "<script>alert(1)</script></svg></title>\"'&|`*x*`\x1b[31m\nnext"
LIMIT_BYTES = 6_000_000


class Tables(HTMLParser):
    """Every table of a page under the words that stand before it, as rows of cell texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: dict[str, list[list[str]]] = {}
        self._title = ""
        self._into: str | None = None
        self._rows: list[list[str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("h3", "summary"):
            self._title, self._into = "", "title"
        elif tag == "table":
            self._rows = self.found.setdefault(self._title, [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            self._into = "cell"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h3", "summary", "td", "th"):
            self._into = None

    def handle_data(self, data: str) -> None:
        if self._into == "title":
            self._title += data
        elif self._into == "cell":
            self._rows[-1][-1] += data

    def columns(self, title: str) -> dict[str, list[str]]:
        """The table whose title starts so, by column; a name that comes again gets a star."""
        (rows,) = (rows for name, rows in self.found.items() if name.startswith(title))
        names: list[str] = []
        for name in rows[0]:
            names.append(f"{name}*" if name in names else name)
        return {name: [row[i] for row in rows[1:]] for i, name in enumerate(names)}


def rendered(folder: Path, *results: Calibration | Ranges) -> tuple[str, str]:
    for i, result in enumerate(results):
        name = "calibration.json" if isinstance(result, Calibration) else "ranges.json"
        write_json(folder / str(i) / name, result)
    page, twin, *_ = write_report([folder], folder / "out")
    return page.read_text("utf-8"), twin.read_text("utf-8")


def value_of(text: str) -> float:
    return math.nan if text == "n/a" else float(text.replace(",", "").removesuffix(" %"))


def close(texts: list[str], values: list[float], abs_tolerance: float) -> None:
    found = np.array([value_of(text) for text in texts])
    np.testing.assert_allclose(found, np.array(values), atol=abs_tolerance, rtol=1e-3)


def ours(tensor: TensorDiagnosis) -> object:
    (found,) = (m for m in tensor.methods if m.method == tensor.chosen)
    return found


def figures(page: str) -> list[ElementTree.Element]:
    """The SVG of each histogram."""
    group = page[page.index('<figure id="ranges-calibration-histograms"') :]
    group = group[: group.index("</figure>")]
    texts = re.findall(r'<svg [^>]*role="group".*?</svg>', group, re.DOTALL)
    return [ElementTree.fromstring(text) for text in texts]


# tables


def test_the_worst_tensors_come_first_with_the_figures_of_the_file(
    calibration: Calibration, tmp_path: Path
) -> None:
    page, _ = rendered(tmp_path, calibration)
    table = Tables(page).columns("20 worst tensors")
    tensors = calibration.tensors[:20]
    assert table["tensor"] == [t.name for t in tensors]
    assert "model" not in table
    methods = [ours(t) for t in tensors]
    close(table["bits wasted"], [t.bits_wasted for t in tensors], 0.006)
    close(table["SQNR, dB"], [m.sqnr_db for m in methods], 0.06)  # type: ignore[attr-defined]
    close(table["inlier SQNR, dB"], [m.inlier_sqnr_db for m in methods], 0.06)  # type: ignore[attr-defined]
    ends = [text.split(" .. ") for text in table["range"]]
    close([low for low, _ in ends], [m.lo for m in methods], 0)  # type: ignore[attr-defined]
    close([high for _, high in ends], [m.hi for m in methods], 0)  # type: ignore[attr-defined]
    for tensor, name, level in zip(
        tensors, table["best other method"], table["its SQNR, dB"], strict=True
    ):
        others = {m.method: m.sqnr_db for m in tensor.methods if m.method != tensor.chosen}
        assert others[name] == max(others.values())
        assert value_of(level) == pytest.approx(others[name], abs=0.06)


def test_a_file_in_another_order_gives_the_same_page(
    calibration: Calibration, tmp_path: Path
) -> None:
    page, _ = rendered(tmp_path / "a", calibration)
    turned = dataclasses.replace(calibration, tensors=calibration.tensors[::-1])
    again, _ = rendered(tmp_path / "b", turned)
    assert [t.get("aria-label") for t in figures(page)] == [
        t.get("aria-label") for t in figures(again)
    ]
    worst = Tables(again).columns("20 worst tensors")["tensor"]
    assert worst[0] == calibration.tensors[0].name


def test_points_have_median_and_worst(calibration: Calibration, tmp_path: Path) -> None:
    page, _ = rendered(tmp_path, calibration)
    table = Tables(page).columns("Calibration by point")
    assert sorted(table["point"]) == sorted({t.point for t in calibration.tensors})
    for i, point in enumerate(table["point"]):
        mine = [t for t in calibration.tensors if t.point == point]
        wasted = [t.bits_wasted for t in mine]
        inliers = [ours(t).inlier_sqnr_db for t in mine]  # type: ignore[attr-defined]
        assert table["tensors"][i] == str(len(mine))
        assert value_of(table["bits wasted: median"][i]) == pytest.approx(
            np.nanmedian(wasted), abs=0.006
        )
        assert value_of(table["worst"][i]) == pytest.approx(np.nanmax(wasted), abs=0.006)
        found = value_of(table["inlier SQNR, dB: median"][i])
        assert found == pytest.approx(np.nanmedian(inliers), abs=0.06)
        assert table["worst tensor"][i] == mine[int(np.nanargmin(inliers))].name


def test_every_method_and_every_tensor_is_in_a_table(
    calibration: Calibration, tmp_path: Path
) -> None:
    page, twin = rendered(tmp_path, calibration)
    every = Tables(page).columns("Every method on the 20 worst tensors")
    expected = [(t.name, m) for t in calibration.tensors[:20] for m in t.methods]
    assert list(zip(every["tensor"], every["method"], strict=True)) == [
        (name, m.method) for name, m in expected
    ]
    close(every["clipped"], [100 * m.clipped_frac for _, m in expected], 0)
    assert every["in force"].count("yes") == 20
    rest = Tables(page).columns("The other tensors")
    assert rest["tensor"] == [t.name for t in calibration.tensors[20:]]
    assert rest["inlier SQNR, dB"][-1] == rest["range"][-1] == "n/a"
    for tensor in calibration.tensors:
        assert tensor.name.replace("_", r"\_") in twin


def test_first_tokens_are_set_against_the_others(calibration: Calibration, tmp_path: Path) -> None:
    page, _ = rendered(tmp_path / "a", calibration)
    table = Tables(page).columns("What the first token does")
    known = [t for t in calibration.tensors if math.isfinite(t.first_max_abs)]
    known.sort(key=lambda t: t.others_max_abs / t.first_max_abs)
    assert table["tensor"] == [t.name for t in known[:10]]
    close(table["max |x|: first token"], [t.first_max_abs for t in known[:10]], 0)
    bits = [np.log2(max(t.first_max_abs, t.others_max_abs) / t.others_max_abs) for t in known[:10]]
    close(table["bits it takes"], bits, 0.006)
    larger = sum(t.first_max_abs > t.others_max_abs for t in known)
    assert f"largest magnitude of {larger} of {len(known)} tensors" in page
    assert "is in the ranges" in page
    without, _ = rendered(tmp_path / "b", dataclasses.replace(calibration, excludes_first=True))
    assert "is in no range" in without
    assert set(Tables(without).columns("What the first")["first token in the range"]) == {"no"}


def test_stability_has_a_row_a_sample_count(calibration: Calibration, tmp_path: Path) -> None:
    page, _ = rendered(tmp_path, calibration)
    table = Tables(page).columns("Stability against")
    assert table["samples"] == [str(p.samples) for p in calibration.stability]
    close(table["moved: most"], [100 * p.moved_max_frac for p in calibration.stability], 0)
    close(table["median"], [100 * p.moved_median_frac for p in calibration.stability], 0)


# sentences


def test_verdict_has_a_sentence_from_the_file(calibration: Calibration) -> None:
    found = verdict(Run(calibrations=(Found(place="a", result=calibration),)))
    assert len(found) == 4
    worst, last = calibration.tensors[0], calibration.stability[-1]
    times = 2**worst.bits_wasted
    for words in (
        "Calibration of base on 8 blocks of 512 tokens of pydoc", worst.name,
        f"is {times:.1f} times ({worst.bits_wasted:.2f} bits) as wide as its 99.9 % span",
        f"moved at most {100 * last.moved_max_frac:#.3g} % (median 0 %) over the last quarter",
    ):  # fmt: skip
        assert words in found[1]
    assert len(verdict(Run())) == 3


def test_verdict_of_what_is_not_known(calibration: Calibration) -> None:
    unseen = dataclasses.replace(calibration, tensors=calibration.tensors[-1:], stability=[])
    images = dataclasses.replace(calibration.data, modality="image", seq_len=0)
    empty = dataclasses.replace(unseen, tensors=[], data=images)
    (_, first, *_), (_, second, *_) = (
        verdict(Run(calibrations=(Found(place="a", result=result),))) for result in (unseen, empty)
    )
    assert "cannot be compared with its 99.9 % span" in first
    assert "was not measured" in first
    assert "8 images of pydoc: no tensor was seen" in second
    assert "nan" not in first + second


def test_smoothing_guards_and_targets_are_told(ranges3: Ranges, tmp_path: Path) -> None:
    page, twin = rendered(tmp_path, ranges3)
    table = Tables(page).columns("Smoothing groups")
    gains = sorted(
        ranges3.smoothing.items(),
        key=lambda item: item[1].expected_error - item[1].expected_error_without,
    )
    assert table["group"] == [name for name, _ in gains]
    close(table["alpha"], [s.alpha for _, s in gains], 0)
    close(table["expected error"], [s.expected_error for _, s in gains], 0)
    close(table["without"], [s.expected_error_without for _, s in gains], 0)
    waived = Tables(page).columns("Waived guards")
    assert dict(zip(waived["tensor"], waived["failed"], strict=True)) == {
        name: ", ".join(found.waived) for name, found in ranges3.tensors.items() if found.waived
    }
    for text in (page, twin):
        assert "NOT reached at 128 samples (2.40 %)" in text
        assert "holds a constant tensor" in text
        assert "unseen 2, constant 1" in text
    met = dataclasses.replace(ranges3, until_stable_frac=0.05)
    again, _ = rendered(tmp_path / "met", met)
    assert "5.00 %: reached at 128 samples" in again


def test_ranges_by_head_and_unknown_ones_are_in_the_table(ranges3: Ranges) -> None:
    rows = {
        row[1]: row for row in ranges_table(Run(ranges=(Found(place="a", result=ranges3),))).rows
    }
    assert rows["attention_logit"][2:] == ("attention_logit/1/map 1", "mse, minmax", "2", "69.00")
    assert rows["kv_cache"][2:] == ("kv_cache/5", "minmax", "1", "n/a")
    spread = Range(lo=[], hi=[], method="m", granularity="head", count=0, point="softmax")
    empty = dataclasses.replace(ranges3, tensors={"softmax/0": spread})
    (row,) = ranges_table(Run(ranges=(Found(place="a", result=empty),))).rows
    assert row[-1] == "n/a"


def test_the_data_and_their_warnings_are_told(calibration: Calibration, tmp_path: Path) -> None:
    data = dataclasses.replace(
        calibration.data, named_set="prose", licence="MIT", warnings=["Other text."]
    )
    page, _ = rendered(tmp_path / "a", dataclasses.replace(calibration, data=data))
    assert page.count("<li>Other text.</li>") == 1
    table = Tables(page).columns("Calibration data")
    assert (table["named set"], table["licence"], table["samples"]) == (["prose"], ["MIT"], ["8"])
    assert "shared with evaluation" not in table  # only what is measured later can share


def test_what_ranges_of_weights_cost_is_told(ranges3: Ranges, tmp_path: Path) -> None:
    info = ranges3.weights
    assert info is not None
    page, twin = rendered(tmp_path / "a", ranges3)
    table = Tables(page).columns("Ranges of weights: mse at 4 bits by group:64")
    worst = sorted(info.modules, key=lambda name: info.modules[name].worst_channel_sqnr_db)
    figures = [info.modules[name] for name in worst]
    assert table["module"] == worst != list(info.modules)
    close(table["SQNR, dB: absmax"], [f.absmax_sqnr_db for f in figures], 0.051)
    close(table["chosen"], [f.sqnr_db for f in figures], 0.051)
    close(
        table["worst channel, dB: absmax"], [f.worst_channel_absmax_sqnr_db for f in figures], 0.051
    )
    close(table["chosen*"], [f.worst_channel_sqnr_db for f in figures], 0.051)
    before = np.median([f.absmax_sqnr_db for f in figures])
    after = np.median([f.sqnr_db for f in figures])
    sentence = (
        f"weights: mse at 4 bits by group:64; SQNR median {before:.1f} -> {after:.1f} dB "
        f"(absmax -> chosen), worst channel {figures[0].worst_channel_sqnr_db:.1f} dB."
    )
    assert sentence in html.unescape(page)
    assert sentence in html.unescape(twin.replace("\\", ""))
    folded = page.index(">Ranges of weights")
    assert "(3 rows)" in page[folded : page.index("</summary>", folded)]
    channels = dataclasses.replace(info, granularity="channel", group_size=None)
    again, _ = rendered(tmp_path / "b", dataclasses.replace(ranges3, weights=channels))
    assert "weights: mse at 4 bits by channel; SQNR" in again
    without, _ = rendered(tmp_path / "c", dataclasses.replace(ranges3, weights=None))
    assert "weights: " not in without and "Ranges of weights" not in without


# the page


def test_page_is_whole_and_has_no_nan(
    calibration: Calibration, ranges3: Ranges, tmp_path: Path
) -> None:
    page, twin = rendered(tmp_path, calibration, ranges3)
    shown = re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"\bnan\b|\bNone\b", shown)
    assert not re.search(r"\bnan\b|\bNone\b", twin)
    assert not re.search(r"https?://(?!www\.w3\.org/)|url\(|@import|<script|<link|<img", shown)
    for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    assert page.count("<figure ") == page.count("</figure>") == 2
    assert "inlier SQNR</dt>" in page and "bits wasted</dt>" in page
    assert [f.place.split("/")[-1] for f in everything(collect([tmp_path]))] == [
        "ranges.json", "calibration.json"
    ]  # fmt: skip
    assert "0/calibration.json" in page[page.index('id="provenance"') :]


def test_every_method_is_defined_with_its_source() -> None:
    known = {entry.term: entry for entry in CALIBRATION_DEFINITIONS}
    assert set(METHODS) <= set(known)
    assert all(known[method].source and known[method].formula for method in METHODS)


def test_the_moving_average_says_how_much_the_first_sample_keeps() -> None:
    (entry,) = (e for e in CALIBRATION_DEFINITIONS if e.term == "moving-average")
    weights = np.zeros(128)  # of each sample in the average
    weights[0] = 1.0
    for sample in range(1, 128):
        weights *= 0.99
        weights[sample] = 0.01
    assert f"keeps 0.99^127 = {100 * weights[0]:.0f} % of the weight" in entry.meaning
    assert weights[1:].max() <= 0.01 and "no other has more than 1 %" in entry.meaning


def test_definitions_of_calibration_only_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    kept = Path(__file__).parent / "fixtures" / "v2" / "base" / "stats.json"
    (tmp_path / "run" / "stats.json").write_bytes(kept.read_bytes())
    page, *_ = write_report([tmp_path / "run"], tmp_path / "out")
    assert "inlier SQNR" not in page.read_text("utf-8")


@pytest.mark.kind(8, "report")
def test_hostile_names_stay_text(calibration: Calibration, ranges3: Ranges, tmp_path: Path) -> None:
    tensors = [
        dataclasses.replace(
            t,
            name=f"{HOSTILE}{i}",
            point=HOSTILE,
            chosen=HOSTILE,
            methods=[dataclasses.replace(t.methods[0], method=HOSTILE), *t.methods[1:]],
        )
        for i, t in enumerate(calibration.tensors)
    ]
    info = {"named_set": HOSTILE, "set_sha256": HOSTILE, "licence": HOSTILE, "source": HOSTILE}
    bad = dataclasses.replace(
        calibration,
        tensors=tensors,
        method=HOSTILE,
        warnings=[HOSTILE],
        data=dataclasses.replace(calibration.data, **info),
        model=dataclasses.replace(calibration.model, name=HOSTILE),
        stability=[dataclasses.replace(p, worst=HOSTILE) for p in calibration.stability],
    )
    (first, *_) = ranges3.smoothing.values()
    smoothing = {HOSTILE: dataclasses.replace(first, producer=HOSTILE)}
    named = {HOSTILE: next(iter(ranges3.tensors.values()))}
    page, twin = rendered(
        tmp_path,
        bad,
        dataclasses.replace(ranges3, smoothing=smoothing, tensors=named, allowed=[HOSTILE]),
    )
    assert page.count("<script") == 1  # its own
    assert "&lt;script&gt;alert(1)" in page
    assert not re.search(r"(?<!\\)<script", twin)
    assert "\x1b" not in page + twin
    for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    assert page.count("<figure ") == 2


def test_1300_tensors_stay_below_6_mb(calibration: Calibration, tmp_path: Path) -> None:
    seen = calibration.tensors[:-1]
    many = [
        dataclasses.replace(
            seen[i % len(seen)], name=f"linear_input/model.layers.{i}.mlp.down_proj"
        )
        for i in range(1300)
    ]
    page, twin = rendered(tmp_path, dataclasses.replace(calibration, tensors=many))
    assert len(page.encode()) < LIMIT_BYTES
    assert len(twin.encode()) < LIMIT_BYTES
    assert len(Tables(page).columns("The other tensors")["tensor"]) == 1280
    assert len(figures(page)) == 9


def test_two_calibrations_are_told_apart(calibration: Calibration, tmp_path: Path) -> None:
    other = dataclasses.replace(
        calibration, model=dataclasses.replace(calibration.model, name="diff")
    )
    page, _ = rendered(tmp_path, calibration, other)
    table = Tables(page).columns("20 worst tensors")
    assert table["model"] == ["base"] * 20 + ["diff"] * 20
    for words in ("worst tensors of base", "worst tensors of diff"):
        assert f"Histograms and ranges of the 9 {words}" in page


def test_rendering_loads_no_torch(calibration: Calibration, tmp_path: Path) -> None:
    write_json(tmp_path / "calibration.json", calibration)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from quantkit.reporting import calibration_text, write_report\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "write_report([folder], folder)\nassert 'worst tensors' in calibration_text(folder)\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'onnx'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_page_that_is_too_large_is_cut_and_says_so(
    calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = calibration.tensors[:-1]
    many = [dataclasses.replace(seen[i % len(seen)], name=f"linear_input/{i}") for i in range(1300)]
    result = dataclasses.replace(calibration, tensors=many)
    whole, twin = rendered(tmp_path / "whole", result)
    assert "rows; the result files have all" not in whole and "Left out here" not in whole
    for share, pictures in ((0.8, True), (0.05, False)):
        limit = int(share * len(whole.encode()))
        monkeypatch.setattr("quantkit.reporting.report.MOST_BYTES", limit)
        page, again = rendered(tmp_path / str(share), result)
        assert re.search(r"The first [\d,]+ of 1,280 rows; the result files have all", page)
        assert ("Left out here for its size: it is figures/" not in page) == pictures
        assert len(page.encode()) <= limit or not pictures
        assert again.count("\n") == twin.count("\n")  # the twin has all
