"""Outliers in reports and on terminals: numbers equal those in the JSON, pooled rows are no heads.

`fixtures/v2` holds two random models of three layers, run through `quantkit.outliers.collect` on
three sentences: `base` (Llama, four heads) and `diff` (DiffLlama, two pairs of heads, every further
point, 32 sampled rows).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from quantkit.reporting.channel_charts import channel_charts
from quantkit.reporting.collect import Found, Run
from quantkit.reporting.outlier_charts import (
    depth_charts,
    entropy_chart,
    heat_maps,
    lambda_chart,
)
from quantkit.reporting.place_tables import (
    differential_table,
    token_table,
    worst_logits_table,
    worst_states_table,
)
from quantkit.reporting.point_tables import (
    head_tables,
    hits_table,
    layer_tables,
    points_table,
    sampling_notes,
)
from quantkit.reporting.text import number, quoted
from quantkit.results import GroupStats, Stats, read_json
from tests.reporting.drawn import axis, layers, marks, rows, series, tips

V2 = Path(__file__).parent / "fixtures" / "v2"


def stats_of(name: str) -> Stats:
    return read_json(V2 / name / "stats.json", Stats)


def run_of(*stats: Stats) -> Run:
    return Run(stats=tuple(Found(place=s.model.name, result=s) for s in stats))


def per_head(stats: Stats) -> list[GroupStats]:
    groups = stats.points["attention_logit"]
    found = [g for g in groups if g.layer is not None and g.head is not None]
    return sorted((g for g in found if g.token_class == "all"), key=lambda g: -g.abs_top["1"])


def test_the_worst_heads_are_heads() -> None:
    stats = stats_of("diff")
    rows = worst_logits_table(run_of(stats), most=5).rows
    for row, group in zip(rows, per_head(stats)[:5], strict=True):
        entry = group.top[0]
        place = (group.layer, group.head, group.map, entry.position, entry.key, entry.sequence)
        assert row == ("diff", quoted(entry.token), number(entry.value), *map(str, place))


def test_the_worst_layers_are_layers() -> None:
    stats = stats_of("base")
    groups = [
        g for g in stats.points["hidden_state"] if g.layer is not None and g.token_class == "all"
    ]
    worst = max(groups, key=lambda g: g.abs_top["1"])
    row = worst_states_table(run_of(stats)).rows[0]
    entry = worst.top[0]
    assert row[1:6] == (
        quoted(entry.token), number(entry.value), str(worst.layer), str(entry.position),
        str(entry.channel),
    )  # fmt: skip
    assert row[6] == number(worst.channel_ratio)
    assert len(worst_states_table(run_of(stats)).rows) == stats.model.layers


def test_tables_of_rules_lambda_points_and_hits() -> None:
    stats = stats_of("diff")
    run = run_of(stats)
    assert len(token_table(run).rows) == 9
    first = stats.summary.outlier_tokens.entries[0]
    assert token_table(run).rows[0][2:4] == (number(first.ratio), str(first.layer))
    assert [row[2] for row in differential_table(run).rows] == [
        number(part.lambda_mean) for part in stats.differential
    ]
    assert [row[5] for row in differential_table(run).rows] == [
        number(part.row_sum) for part in stats.differential
    ]
    assert differential_table(run_of(stats_of("base"))).rows == ()
    assert [row[0] for row in points_table(run).rows] == [
        "effective attention map", "attention output", "MLP input", "MLP down-projection input",
        "linear-layer inputs",
    ]  # fmt: skip
    assert points_table(run_of(stats_of("base"))).rows == ()
    titles = [table.title for table in (*head_tables(run), *layer_tables(run))]
    assert "By layer: linear-layer inputs of diff" in titles
    assert len(hits_table(run).rows) == len(stats.hits) > 0
    assert "32 sampled query rows" in sampling_notes(run)[0]
    assert sampling_notes(run_of(stats_of("base"))) == ()


# pictures


def test_heat_maps_are_of_heads_alone() -> None:
    stats = stats_of("diff")
    maps = heat_maps(run_of(stats))
    assert [m.title.split(": ")[1] for m in maps] == ["diff, map 1", "diff, map 2", "diff"]
    assert [len(marks(m.panels[0])) for m in maps] == [6, 6, 6]
    worst = per_head(stats)[0]
    tip = next(c["tip"] for m in maps for c in marks(m.panels[0]) if c["o"] == 1.0)
    assert number(worst.abs_top["1"]) in tip
    assert f"layer {worst.layer}, head {worst.head}" in tip
    assert f"key {worst.top[0].key} {worst.top[0].token!r}" in tip
    ends = [m.ramp for m in maps]
    assert ends[0] == ends[1] != ends[2]  # both maps on one scale
    assert ends[2] is not None and (ends[2].low, ends[2].high) == ("0.0 %", "100.0 %")
    first = marks(maps[0].panels[0])
    values = {(g.layer, g.head): g.abs_top["1"] for g in per_head(stats) if g.map == 1}
    assert {(c["layer"], c["column"]) for c in first} == set(values)
    order = sorted(first, key=lambda c: values[c["layer"], c["column"]])
    assert [c["o"] for c in order] == sorted(c["o"] for c in order)


def test_layers_that_were_not_recorded_take_no_room() -> None:
    stats = stats_of("base")
    groups = [g for g in stats.points["attention_logit"] if g.layer in (0, 2)]
    points = stats.points | {"attention_logit": groups}
    heat = heat_maps(run_of(dataclasses.replace(stats, points=points)))[0]
    assert axis(heat.panels[0], "y")["scale"]["domain"] == [0, 2]
    assert {cell["layer"] for cell in marks(heat.panels[0])} == {0, 2}


def test_lines_over_depth() -> None:
    run = run_of(stats_of("base"), stats_of("diff"))
    first, others = depth_charts(run)
    assert (first.title[-11:], others.title[-12:]) == ("first token", "other tokens")
    for chart, token_class in ((first, "first"), (others, "others")):
        drawn = series(chart.panels[0])
        assert len(drawn) == len(chart.keys) == 8
        assert all(len(line.marks) == 3 for line in drawn)
        groups = [
            g for g in stats_of("base").points["hidden_state"]
            if g.layer is not None and g.token_class == token_class
        ]  # fmt: skip
        expected = [g.abs_top["1"] for g in sorted(groups, key=lambda g: g.layer or 0)]
        assert [row["y"] for row in drawn[0].marks] == expected
    entropy, lambdas = entropy_chart(run), lambda_chart(run)
    assert entropy is not None and lambdas is not None
    names = [key.name for key in entropy.keys]
    assert names == ["base, entropy", "diff, map 1", "diff, map 2", "diff, effective map"]
    for line in series(entropy.panels[0]):
        for mark, span in zip(line.marks, line.spans, strict=True):
            assert span["y"] <= mark["y"] <= span["y2"]
    assert [len(line.marks) for line in series(lambdas.panels[0])] == [3, 3, 3]
    assert lambda_chart(run_of(stats_of("base"))) is None


def test_channels_of_the_worst_layer() -> None:
    stats = stats_of("diff")
    (chart,) = channel_charts(run_of(stats))
    assert "channel 3: 300.0" in tips(chart.panels[0])[0]
    stems, _, points, words = layers(chart.panels[0])
    assert rows(words)[0]["words"] == "3"
    assert len(rows(points)) == 5
    assert len(rows(stems)) == 16
    group = next(g for g in stats.points["hidden_state"] if g.channel_absmax)
    wide = dataclasses.replace(
        group, channel_absmax=[1.0 + (i == 4097) for i in range(5000)] + [0.0, math.inf]
    )
    changed = dataclasses.replace(stats, points={"hidden_state": [wide]})
    (chart,) = channel_charts(run_of(changed))
    assert "channel 4097: 2.000" in tips(chart.panels[0])[0]
    drawn = rows(layers(chart.panels[0])[0])
    assert len(drawn) <= 400 and 4097 in [row["c"] for row in drawn]
    empty = dataclasses.replace(wide, channel_absmax=[0.0] * 8)
    assert (
        channel_charts(run_of(dataclasses.replace(stats, points={"hidden_state": [empty]}))) == ()
    )
