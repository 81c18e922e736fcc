"""Writes `reports/benchmarks/README.md` and the README's tables from `benchmarks/results`.

First one table of everything, as ratios to the peer that ran beside us; then how our commands grow,
then each benchmark's own table, with its command, versions and processor.

    python benchmarks/page.py [--check]

`--check` writes nothing and fails where they say something else than the files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import tables
from benchmarks.parts import PARTS

PAGE = Path(__file__).parents[1] / "reports" / "benchmarks" / "README.md"
README = Path(__file__).parents[1] / "README.md"
PICTURE = "growth.svg"
Row = tuple[str, str, str, str, str]


def overview() -> str:
    """Returns the one table: what was done, ours, the peer, both figures, ratio."""
    rows = [*_recording(), *_calibration(), *_logits(), *_exports(), *_monitor()]
    return tables.markdown(["what", "quantkit", "beside", "the other", "other / ours"], rows)


def _recording() -> list[Row]:
    found, rows = tables.results("recording"), list[Row]()
    for length in sorted({point["seq_len"] for point in found["times"]}):
        ours = tables.one(found["times"], seq_len=length, mode="all rows")
        memory = tables.one(found["memory"], seq_len=length, mode="all rows", samples=1)
        for mode, words in (("plain", "the plain forward"), ("eager", "`output_attentions=True`")):
            time = tables.one(found["times"], seq_len=length, mode=mode)
            extra = tables.one(found["memory"], seq_len=length, mode=mode, samples=1)
            ratio = 1.0 if mode == "plain" else None if time is None else time["ratio"]
            if ours is None or memory is None or ratio is None or extra is None:
                continue
            what = f"record every statistic, {length:,} tokens"
            rows.append((f"{what}: time beside plain", _x(ours["ratio"]), words, _x(ratio),
                         _x(ratio / ours["ratio"])))  # fmt: skip
            if mode == "eager":
                rows.append((f"{what}: memory beyond plain", _mib(memory["extra_mib"]), words,
                             _mib(extra["extra_mib"]),
                             _x(extra["extra_mib"] / memory["extra_mib"])))  # fmt: skip
    return rows


def _calibration() -> list[Row]:
    found, rows = tables.results("calibration"), list[Row]()
    points = found["calibrators"] + found["growth"]
    for count in sorted({point["samples"] for point in points}):
        ours = tables.one(points, calibrator="quantkit", samples=count)
        for other in points:
            if other["samples"] != count or other["calibrator"] == "quantkit" or ours is None:
                continue
            what, name = (
                f"calibrate, {count} samples",
                other["calibrator"].replace("ort", "onnxruntime"),
            )
            if other["seconds"] is None:
                limit = f"over {found['limit_gib']:g} GiB"
                rows.append(
                    (f"{what}: memory", tables.gigabytes(ours["peak_mib"]), name, limit, "")
                )
                continue
            rows.append((f"{what}: time", f"{ours['seconds']:.0f} s", name,
                         f"{other['seconds']:.0f} s",
                         _x(other["seconds"] / ours["seconds"])))  # fmt: skip
            rows.append((f"{what}: memory", tables.gigabytes(ours["peak_mib"]), name,
                         tables.gigabytes(other["peak_mib"]),
                         _x(other["peak_mib"] / ours["peak_mib"])))  # fmt: skip
    return rows


def _logits() -> list[Row]:
    found, rows = tables.results("logits"), list[Row]()
    pairs = {"logits4": "eager tensor", "logits4:head": "eager head", "logits4:row": "eager row"}
    for mode, eager in pairs.items():
        ours, other = (tables.one(found["times"], mode=name) for name in (mode, eager))
        if ours is not None and other is not None:
            rows.append((f"forward with `{mode}`, {found['seq_len']:,} tokens: time beside plain",
                         _x(ours["median_ratio"]), "eager", _x(other["median_ratio"]),
                         _x(other["median_ratio"] / ours["median_ratio"])))  # fmt: skip
    for length in sorted({point["seq_len"] for point in found["memory"]}):
        ours, other = (
            tables.one(found["memory"], mode=name, seq_len=length)
            for name in ("logits4", "eager tensor")
        )
        if ours is not None and other is not None:
            rows.append((f"forward with `logits4`, {length:,} tokens: memory",
                         _mib(ours["growth_mib"]), "eager", _mib(other["growth_mib"]),
                         _x(other["growth_mib"] / ours["growth_mib"])))  # fmt: skip
    return rows


def _exports() -> list[Row]:
    graphs, rows = tables.results("export_peers")["graphs"], list[Row]()
    ours = next(graph for graph in graphs if graph["graph"].startswith("quantkit"))
    for other in graphs:
        if other is ours:
            continue
        name = other["graph"]
        rows.append(("export: perplexity / float", f"{ours['ratio']:.3f}", name,
                     f"{other['ratio']:.3f}" if other["ratio"] < 1000 else "ruined",
                     _x(other["ratio"] / ours["ratio"])
                     if other["ratio"] < 1000 else ""))  # fmt: skip
        for key, words in (("prefill_speed", "prefill"), ("decode_speed", "decode")):
            rows.append((f"export: {words}, times as fast as float", _x(ours[key]), name,
                         _x(other[key]), _x(other[key] / ours[key])))  # fmt: skip
        rows.append(("export: size", _mb(ours["bytes"]), name, _mb(other["bytes"]),
                     _x(other["bytes"] / ours["bytes"])))  # fmt: skip
    return rows


def _monitor() -> list[Row]:
    found = tables.results("monitor")
    return [
        (f"training step with the monitor every {found['every']}, {model['model']}: processor time",
         f"{model['processor']['expected_ratio']:.4f}x", "without it", "1x",
         _x(1 / model["processor"]["expected_ratio"]))
        for model in found["models"]
    ]  # fmt: skip


def _x(value: float) -> str:
    return f"{value:.0f}x" if value >= 100 else f"{value:.2f}x"


def _mib(value: float) -> str:
    return f"{value:,.0f} MiB"


def _mb(value: float) -> str:
    return f"{value / 1e6:,.0f} MB"


def page() -> str:
    """Returns the whole page."""
    parts = [
        "# What it costs, beside its peers",
        "`make bench` runs all of this and writes the page anew. The figures of a line come from "
        "one run, in which the peer ran too. The last column is above 1 where the other takes "
        "more, or, of speeds, is faster. SmolLM2 on 2 cores where nothing else is said.",
        overview(),
        "## How the commands grow",
        "Exponents of time (with their standard error) and of memory, fitted to whole commands: 1 "
        "is linear, 0 constant, `flat` a rise that differs by less than 16 MiB. Fixed costs pull "
        "exponents down. (`benchmarks/growth.py`)",
        tables.growth(tables.results("growth")),
        f"![seconds by size]({PICTURE})",
    ]
    for part in PARTS:
        if part.name == "growth" or part.result is None:
            continue
        found = tables.results(part.result)
        parts += [f"## {part.words}", f"`{part.command}`{_where(found)}"]
        parts.append(tables.PAGE_TABLES[part.result](found))
    return "\n\n".join(parts) + "\n"


def _where(found: Mapping[str, Any]) -> str:
    """Returns the versions and the processor that a result names."""
    known = found.get("environment", found)
    versions = [
        f"{name} {known[name]}"
        for name in ("python", "torch", "transformers", "onnxruntime")
        if name in known
    ]
    processor = [known["processor"]] if "processor" in known else []
    return f": {', '.join([*versions, *processor])}." if versions else "."


def picture() -> str:
    """Returns the growth of seconds as an SVG: a panel an axis, both axes logarithmic."""
    from quantkit.reporting.charts import Line, Value, line_panel
    from quantkit.reporting.drawing import together
    from quantkit.reporting.picture_files import file_svg

    fits = tables.results("growth")["fits"]
    commands = list(dict.fromkeys(fit["command"] for fit in fits))
    panels = []
    for axis, words in (
        ("samples", "samples"),
        ("seq_len", "tokens a sample"),
        ("layers", "layers"),
    ):
        its = [fit for fit in fits if fit["axis"] == axis]
        lines = [
            Line(
                name=fit["command"],
                colour=commands.index(fit["command"]),
                style=commands.index(fit["command"]),
                values=tuple(Value(x=i, y=y) for i, y in enumerate(fit["processor_s"])),
            )
            for fit in its
        ]
        names = [f"{size:,}" for size in its[0]["sizes"]]
        panels.append(
            line_panel(
                x_label=words,
                y_label="seconds (log)",
                x_names=names,
                lines=lines,
                log=True,
                title=words,
            )
        )
    return file_svg(together("growth", "Processor seconds of whole commands", panels))


def main() -> int:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    texts = {PAGE: page(), README: tables.quoted(README.read_text(encoding="utf-8"))}
    if options.check:
        old = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
        print(*(f"{path} is not what the results say" for path in old), sep="\n")
        return int(bool(old))
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    (PAGE.parent / PICTURE).write_text(picture(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
