"""The report: one self-contained HTML page and its Markdown twin, from JSON files alone."""

from __future__ import annotations

import html
from pathlib import Path

import jinja2

from quantkit.reporting import (
    calibration_notes,
    curves,
    data_notes,
    pictures,
    sensitivity_tables,
)
from quantkit.reporting.calibration_definitions import CALIBRATION_DEFINITIONS
from quantkit.reporting.collect import Run, collect, everything
from quantkit.reporting.definitions import DEFINITIONS, Definition
from quantkit.reporting.pair_definitions import pair_definitions
from quantkit.reporting.pair_groups import pair_of
from quantkit.reporting.panel_pictures import figures_of, panel_picture, panel_svg
from quantkit.reporting.sections import opening, sections
from quantkit.reporting.sensitivity_definitions import SENSITIVITY_DEFINITIONS
from quantkit.reporting.sweep_definitions import sweep_definitions
from quantkit.reporting.text import markdown, printable
from quantkit.results import ModelInfo, Sweep, written_whole


def write_report(run_folders: list[Path], out: Path) -> tuple[Path, ...]:
    """Writes `report.html` and `report.md` into the folder `out`; returns the paths of all files.

    Those two come first, in this order. Then the pictures that the Markdown shows, of sweeps
    (`sweep-TASK.svg`), of a matched pair (`pair-*.svg`) and of trainings (`training-*.svg`); those
    of an earlier report that are no longer among them are removed. The same
    files give the same bytes: no clock, no network.

    Raises:
        InputError: no result file below the folders, one of them cannot be read, or `out` cannot
            be written to.
    """
    run = collect(run_folders)
    page, twin = render_html(run), render_markdown(run)
    paths = (out / "report.html", out / "report.md")
    environment = _environment(autoescape=True)
    drawn = {p.name: pictures.svg(p, environment) for p in _sweep_pictures(run)}
    for figure in figures_of(sections(run)):
        picture = panel_picture(figure)
        drawn[picture.name] = panel_svg(picture, environment)
    for name, text in drawn.items():
        _write(out / name, text)
    _write(paths[0], page)
    _write(paths[1], twin)
    pictures.remove_stale(out, drawn)
    return (*paths, *(out / name for name in drawn))


def render_html(run: Run) -> str:
    """Returns the page: inline style and pictures, nothing to fetch, every name escaped."""
    return _environment(autoescape=True).get_template("report.html.j2").render(_context(run))


def render_markdown(run: Run) -> str:
    """Returns the Markdown twin: the same sentences and tables, and links to the pictures."""
    environment = _environment(autoescape=False)
    environment.filters["md"] = markdown
    environment.filters["summary"] = lambda text: html.escape(printable(text))
    context = _context(run) | {"pictures": _sweep_pictures(run)}
    return environment.get_template("report.md.j2").render(context)


def _sweep_pictures(run: Run) -> tuple[pictures.Picture, ...]:
    return pictures.pictures(run, with_bits=pair_of(run) is None)


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
        "models": list(dict.fromkeys([*(m.name for m in found_models), *_trained_names(run)])),
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
        "verdict": opening(run),
        "headlines": [f.result.headline for f in run.sweeps if f.result.headline],
        "sections": sections(run),
        "definitions": [
            *DEFINITIONS,
            *(CALIBRATION_DEFINITIONS if run.calibrations or run.ranges else ()),
            *(SENSITIVITY_DEFINITIONS if run.sensitivities else ()),
            *sweep_definitions(run),
            *pair_definitions(run),
            *_found_definitions(run),
        ],
    }


def _trained_names(run: Run) -> list[str]:
    arms = [m.arm for found in run.trainings for m in found.result.models]
    return [*arms, *curves.names(run)]


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
    with written_whole(path) as file:
        file.write(text.encode(errors="replace"))
