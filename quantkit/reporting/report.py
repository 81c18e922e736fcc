"""The report: one self-contained HTML page and its Markdown twin, from JSON files alone."""

from __future__ import annotations

import html
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jinja2

from quantkit.errors import InputError
from quantkit.reporting import (
    calibration_charts,
    calibration_notes,
    calibration_tables,
    channel_charts,
    charts,
    curves,
    data_notes,
    dot_charts,
    export_tables,
    outlier_charts,
    outlier_tables,
    pictures,
    place_tables,
    point_tables,
    sensitivity_charts,
    sensitivity_tables,
    sweep_charts,
    sweep_tables,
    tables,
    weight_tables,
)
from quantkit.reporting.calibration_definitions import CALIBRATION_DEFINITIONS
from quantkit.reporting.collect import Run, collect, everything
from quantkit.reporting.definitions import DEFINITIONS, Definition
from quantkit.reporting.sensitivity_definitions import SENSITIVITY_DEFINITIONS
from quantkit.reporting.sweep_definitions import sweep_definitions
from quantkit.reporting.text import Table, markdown, printable
from quantkit.reporting.verdict import verdict
from quantkit.results import ModelInfo, Sweep

_MOST_ROWS: Final = 24
"""Rows of paired differences, and of seeds, beyond which such a table is folded."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section; with no table it shows `missing`."""

    name: str
    title: str
    tables: tuple[Table, ...]
    missing: str
    lines: tuple[charts.LineChart, ...] = ()
    dots: tuple[dot_charts.DotChart, ...] = ()
    heats: tuple[charts.HeatMap, ...] = ()
    across: str = "head"
    """What the columns of `heats` are."""
    channels: tuple[charts.ChannelChart, ...] = ()
    histograms: tuple[calibration_charts.HistogramGroup, ...] = ()
    notes: tuple[str, ...] = ()
    folded: tuple[Table, ...] = ()
    """Long tables, which open when asked for."""


def write_report(run_folders: list[Path], out: Path) -> tuple[Path, ...]:
    """Writes `report.html` and `report.md` into the folder `out`; returns the paths of all files.

    Those two come first, in this order. Then the pictures of sweeps, `sweep-TASK.svg`, which the
    Markdown shows; those of an earlier report that are no longer among them are removed. The same
    files give the same bytes: no clock, no network.

    Raises:
        InputError: no result file below the folders, one of them cannot be read, or `out` cannot
            be written to.
    """
    run = collect(run_folders)
    page, twin = render_html(run), render_markdown(run)
    paths = (out / "report.html", out / "report.md")
    environment = _environment(autoescape=True)
    drawn = pictures.pictures(run)
    for picture in drawn:
        _write(out / picture.name, pictures.svg(picture, environment))
    _write(paths[0], page)
    _write(paths[1], twin)
    pictures.remove_stale(out, {picture.name for picture in drawn})
    return (*paths, *(out / picture.name for picture in drawn))


def render_html(run: Run) -> str:
    """Returns the page: inline style and pictures, nothing to fetch, every name escaped."""
    return _environment(autoescape=True).get_template("report.html.j2").render(_context(run))


def render_markdown(run: Run) -> str:
    """Returns the Markdown twin: the same sentences and tables, and links to the pictures."""
    environment = _environment(autoescape=False)
    environment.filters["md"] = markdown
    environment.filters["summary"] = lambda text: html.escape(printable(text))
    context = _context(run) | {"pictures": pictures.pictures(run)}
    return environment.get_template("report.md.j2").render(context)


def _finalize(value: object) -> object:
    """Returns foreign text without control characters; markup of macros stays as it is."""
    return printable(value) if type(value) is str else value


def _environment(autoescape: bool) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("quantkit.reporting", "templates"),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _context(run: Run) -> dict[str, object]:
    found_models: list[ModelInfo] = []
    for found in everything(run):
        result = found.result
        found_models += result.models if isinstance(result, Sweep) else [result.model]
    return {
        "models": list(dict.fromkeys([*(m.name for m in found_models), *curves.names(run)])),
        "warnings": list(
            dict.fromkeys(
                [
                    *(f"{f.result.model.name}: {w}" for f in run.stats for w in f.result.warnings),
                    *(f"{m.name}: {w}" for m in found_models for w in m.warnings),
                    *(w for f in everything(run) for w in f.result.data.warnings),
                    *(w for f in run.sweeps for t in f.result.tasks for w in t.data.warnings),
                    *calibration_notes.warnings(run),
                    *sensitivity_tables.warnings(run),
                    *data_notes.overlaps(run),
                ]
            )
        ),
        "verdict": verdict(run),
        "headlines": [f.result.headline for f in run.sweeps if f.result.headline],
        "sections": _sections(run),
        "definitions": [
            *DEFINITIONS,
            *(CALIBRATION_DEFINITIONS if run.calibrations or run.ranges else ()),
            *(SENSITIVITY_DEFINITIONS if run.sensitivities else ()),
            *sweep_definitions(run),
            *_found_definitions(run),
        ],
    }


def _sections(run: Run) -> tuple[Section, ...]:
    sections = (
        _outliers(run),
        _bits(run),
        Section(
            name="export",
            title="Export",
            tables=_filled(
                export_tables.export_table(run),
                export_tables.parity_table(run),
                export_tables.latency_table(run),
                export_tables.file_table(run),
            ),
            missing="No export.json was found. `quantkit export MODEL --quantize w8a8` writes it.",
            notes=export_tables.notes(run),
            folded=_filled(export_tables.kept_table(run), export_tables.smoothed_table(run)),
        ),
        _calibration(run),
        _sensitivity(run),
        Section(
            name="provenance",
            title="Provenance",
            tables=_filled(
                tables.provenance_table(run),
                sweep_tables.task_table(run),
                tables.environment_table(run),
            ),
            missing="Nothing is known about where the numbers come from.",
        ),
    )
    return (*sections[:1], *_training(run), *sections[1:])


def _outliers(run: Run) -> Section:
    is_differential = any(found.result.model.maps > 1 for found in run.stats)
    lines = (outlier_charts.entropy_chart(run), outlier_charts.lambda_chart(run))
    return Section(
        name="outliers",
        title="Outliers",
        tables=_filled(
            outlier_tables.topk_table(run, paper=is_differential),
            outlier_tables.spread_table(run),
            outlier_tables.class_table(run),
            outlier_tables.outlier_table(run),
            place_tables.worst_logits_table(run),
            place_tables.worst_states_table(run),
            place_tables.massive_table(run),
            place_tables.token_table(run),
            point_tables.points_table(run),
        ),
        missing="No stats.json was found. `quantkit stats MODEL` writes it.",
        lines=(*outlier_charts.depth_charts(run), *(line for line in lines if line is not None)),
        heats=outlier_charts.heat_maps(run),
        channels=channel_charts.channel_charts(run),
        notes=point_tables.sampling_notes(run),
        folded=(
            *point_tables.head_tables(run),
            *point_tables.layer_tables(run),
            *_filled(
                place_tables.differential_table(run),
                place_tables.feature_table(run),
                point_tables.hits_table(run),
            ),
        ),
    )


def _bits(run: Run) -> Section:
    long = (sweep_tables.spread_table(run), sweep_tables.delta_table(run))
    folded = [table for table in long if len(table.rows) > _MOST_ROWS]
    return Section(
        name="bits",
        title="What the bits cost",
        tables=_filled(
            *sweep_tables.bit_tables(run),
            *sweep_tables.recipe_tables(run),
            sweep_tables.mass_table(run, parts=sweep_tables.MASS_PARTS),
            *(table for table in long if table not in folded),
        ),
        missing="No sweep.json was found. `quantkit sweep MODEL` writes it.",
        lines=sweep_charts.sweep_charts(run),
        dots=sweep_charts.recipe_charts(run),
        notes=sweep_tables.notes(run),
        folded=_filled(
            *folded,
            *sweep_tables.seed_tables(run),
            *sweep_tables.detail_tables(run),
            sweep_tables.fired_table(run),
        ),
    )


def _calibration(run: Run) -> Section:
    return Section(
        name="ranges",
        title="Calibration",
        tables=_filled(
            calibration_tables.worst_table(run),
            calibration_tables.point_table(run),
            calibration_tables.stability_table(run),
            calibration_tables.first_token_table(run),
            tables.ranges_table(run),
            calibration_tables.set_table(run),
        ),
        missing="No ranges.json and no calibration.json was found. `quantkit calibrate MODEL` "
        "writes both.",
        lines=calibration_charts.stability_charts(run),
        histograms=calibration_charts.histogram_groups(run),
        notes=calibration_notes.notes(run),
        folded=_filled(
            *calibration_tables.method_tables(run),
            *calibration_tables.other_tables(run),
            calibration_tables.smoothing_table(run),
            *weight_tables.weight_tables(run),
            calibration_tables.waived_table(run),
        ),
    )


def _sensitivity(run: Run) -> Section:
    return Section(
        name="sensitivity",
        title="What to keep in higher precision",
        tables=_filled(sensitivity_tables.worst_table(run), sensitivity_tables.kept_table(run)),
        missing="No sensitivity.json was found. `quantkit sensitivity MODEL --ranges RUN` writes "
        "it.",
        lines=sensitivity_charts.kept_charts(run),
        notes=sensitivity_tables.notes(run),
        folded=_filled(*sensitivity_tables.keep_tables(run), *sensitivity_tables.other_tables(run)),
    )


def _training(run: Run) -> tuple[Section, ...]:
    """Returns the section of the training curves; none without curves."""
    if not run.curves:
        return ()
    section = Section(
        name="training",
        title="Training",
        tables=(curves.summary_table(run), *_filled(curves.steps_table(run))),
        missing="",
        lines=curves.line_charts(run),
        heats=curves.heat_maps(run),
        across="step",
    )
    return (section,)


def _filled(*candidates: Table) -> tuple[Table, ...]:
    return tuple(table for table in candidates if table.rows)


def _found_definitions(run: Run) -> list[Definition]:
    """Returns the definitions that the files themselves carry."""
    found = []
    for stats in run.stats:
        summary = stats.result.summary
        found.append(("attention logit, as measured", summary.attention_logit.definition))
        found.append(("hidden state, as measured", summary.hidden_state.definition))
    if run.curves:
        found.append(curves.DEFINITION)
    return [Definition(term=term, meaning=words) for term, words in dict.fromkeys(found) if words]


def _write(path: Path, text: str) -> None:
    """Writes the file whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}.") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
