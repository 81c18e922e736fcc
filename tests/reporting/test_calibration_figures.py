"""The pictures of a calibration: what they draw is where the file says it is."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quantkit.reporting import write_report
from quantkit.results import Calibration, write_json


def rendered(folder: Path, result: Calibration) -> tuple[str, str]:
    write_json(folder / "run" / "calibration.json", result)
    page, twin, *_ = write_report([folder / "run"], folder / "out")
    return page.read_text("utf-8"), twin.read_text("utf-8")


def value_of(text: str) -> float:
    return float(text.replace(",", ""))


def figures(page: str) -> list[ElementTree.Element]:
    """The SVG of each histogram."""
    group = page[page.index('<div class="figures small">') :]
    texts = re.findall(r"<figure>.*?(<svg .*?</svg>).*?</figure>", group, re.DOTALL)
    return [ElementTree.fromstring(text) for text in texts]


def titles(svg: ElementTree.Element, of: str) -> list[str]:
    (group,) = (g for g in svg.iter("g") if g.get("class") == of)
    return ["".join(title.itertext()) for title in group.iter("title")]


def test_a_histogram_counts_every_element(calibration: Calibration, tmp_path: Path) -> None:
    page, _ = rendered(tmp_path, calibration)
    drawn = figures(page)
    assert [svg.get("aria-label") for svg in drawn] == [t.name for t in calibration.tensors[:20]]
    for svg, tensor in zip(drawn, calibration.tensors, strict=False):
        texts = titles(svg, "bins")
        assert len(texts) <= 72
        found = [re.fullmatch(r"(\S+) to (\S+): ([\d,]+) elements", text) for text in texts]
        assert sum(int(m.group(3).replace(",", "")) for m in found if m) == tensor.count
        assert all(found)
        first, last = found[0], found[-1]
        assert first is not None and last is not None
        assert value_of(first.group(1)) == pytest.approx(tensor.min, rel=1e-3)
        assert value_of(last.group(2)) == pytest.approx(tensor.max, rel=1e-3)


def test_marks_stand_at_the_ends_of_each_methods_range(
    calibration: Calibration, tmp_path: Path
) -> None:
    page, _ = rendered(tmp_path, calibration)
    for svg, tensor in zip(figures(page), calibration.tensors, strict=False):
        ticks = [t for t in svg.iter("text") if t.get("text-anchor") == "middle"]
        (x0, v0), (x1, v1) = (
            (float(t.get("x", "")), value_of(t.text or "")) for t in (ticks[0], ticks[-1])
        )
        slope = (v1 - v0) / (x1 - x0)
        lanes = [g for g in svg.iter("g") if "method" in (g.get("class") or "")]
        assert len(lanes) == len(tensor.methods)
        heights = set()
        for lane, method in zip(lanes, tensor.methods, strict=True):
            path = next(p for p in lane.iter("path") if p.get("class") == "line").get("d", "")
            low, y, high = (
                float(n)
                for n in re.match(r"M(\S+) \S+?V(\S+?)H(\S+?)V", path).groups()  # type: ignore[union-attr]
            )
            near = 0.03 * abs(slope)  # two roundings to 0.01
            assert v0 + (low - x0) * slope == pytest.approx(method.lo, abs=near)
            assert v0 + (high - x0) * slope == pytest.approx(method.hi, abs=near)
            heights.add(y)
            words = "".join(next(lane.iter("title")).itertext())
            assert words.startswith(f"{method.method}: ")
            assert ("chosen" in lane.get("class", "").split()) == (method.method == tensor.chosen)
        assert len(heights) == len(tensor.methods)  # also where the intervals are one


def test_a_reader_who_sees_no_picture_is_told(calibration: Calibration, tmp_path: Path) -> None:
    page, _ = rendered(tmp_path, calibration)
    pictures = re.findall(r"<svg [^>]*role=\"img\".*?</svg>", page, re.DOTALL)
    assert len(pictures) == 21
    for text in pictures:
        svg = ElementTree.fromstring(text)
        assert svg.get("aria-label")
        assert len("".join(next(svg.iter("desc")).itertext())) > 30
    worst = calibration.tensors[0]
    description = "".join(next(figures(page)[0].iter("desc")).itertext())
    assert all(method.method in description for method in worst.methods)


def test_legend_marks_differ_without_colour(calibration: Calibration, tmp_path: Path) -> None:
    page, _ = rendered(tmp_path, calibration)
    legend = re.search(r"<h3>Histograms.*?<ul class=\"key\">(.*?)</ul>", page, re.DOTALL)
    assert legend is not None
    items = re.findall(r"<li>(.*?)</li>", legend.group(1), re.DOTALL)
    names = [re.sub(r"<.*?>", "", item, flags=re.DOTALL).split() for item in items]
    assert names == [[str(i + 1), m.method] for i, m in enumerate(calibration.tensors[0].methods)]
    plain = {re.sub(r"c\d", "", item[: item.rindex("</svg>")]) for item in items}
    assert len(plain) == len(items)


def test_stability_is_drawn_from_the_file(calibration: Calibration, tmp_path: Path) -> None:
    page, _ = rendered(tmp_path, calibration)
    figure = next(f for f in re.findall(r"<figure>.*?</figure>", page, re.DOTALL) if "moved" in f)
    svg = ElementTree.fromstring(re.search(r"<svg .*?</svg>", figure, re.DOTALL).group())  # type: ignore[union-attr]
    for point in calibration.stability:
        assert (
            f"all tensors: most, {point.samples} samples: moved "
            f"{100 * point.moved_max_frac:#.3g}" in figure
        )
    grid = [float(g.get("y1", "")) for g in svg.iter("line") if g.get("class") == "grid"]
    ticks = [t for t in svg.iter("text") if t.get("text-anchor") == "end"]
    logs = [math.log10(value_of(t.text or "")) for t in ticks]
    slope = (logs[-1] - logs[0]) / (grid[-1] - grid[0])
    first = next(g for g in svg.iter("g") if (g.get("class") or "").startswith("series"))
    heights = [float(circle.get("cy", "")) for circle in first.iter("circle")]
    found = [10 ** (logs[0] + (y - grid[0]) * slope) for y in heights]
    assert found == pytest.approx([100 * p.moved_max_frac for p in calibration.stability], rel=0.01)
    moved = sorted(
        (t for t in calibration.tensors if t.stability), key=lambda t: -t.stability[-1][1]
    )
    assert moved[0].name in figure
    assert "ranges that did not move" in figure


def test_tensors_without_anything_to_draw_are_named(
    calibration: Calibration, tmp_path: Path
) -> None:
    seen, unseen = calibration.tensors[0], calibration.tensors[-1]
    point = dataclasses.replace(
        seen,
        name="constant",
        histogram=dataclasses.replace(seen.histogram, edges=[2.0, 2.0], counts=[seen.count]),
        methods=[dataclasses.replace(m, lo=2.0, hi=2.0) for m in seen.methods],
        span_lo=2.0,
        span_hi=2.0,
        bits_wasted=math.nan,
    )
    page, _ = rendered(tmp_path, dataclasses.replace(calibration, tensors=[point, unseen]))
    (svg,) = figures(page)
    assert svg.get("aria-label") == "constant"
    assert titles(svg, "bins") == [f"2.000 to 2.000: {seen.count:,} elements"]
    assert f"Without a histogram: {unseen.name}." in page
    only, _ = rendered(tmp_path / "b", dataclasses.replace(calibration, tensors=[unseen]))
    assert "Histograms and ranges" not in only
