"""The report: one self-contained HTML page and its Markdown twin, from JSON files alone."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Final

import jinja2
from markupsafe import Markup

from quantkit.errors import InputError
from quantkit.reporting import calibration_notes, curves, data_notes, sensitivity_tables
from quantkit.reporting.blocks import FirstScreen, Section
from quantkit.reporting.calibration_definitions import CALIBRATION_DEFINITIONS
from quantkit.reporting.collect import Run, collect, everything
from quantkit.reporting.definitions import DEFINITIONS, Definition
from quantkit.reporting.diagnosis_tables import diagnoses
from quantkit.reporting.drawing import Chart, key_svg, page_svg
from quantkit.reporting.first_screen import first_screen
from quantkit.reporting.pair_definitions import pair_definitions
from quantkit.reporting.picture_files import file_svg, is_ours
from quantkit.reporting.sections import sections
from quantkit.reporting.sensitivity_definitions import SENSITIVITY_DEFINITIONS
from quantkit.reporting.sweep_definitions import sweep_definitions
from quantkit.reporting.text import markdown, printable
from quantkit.reporting.theme import DARK, LIGHT, recoloured, variables
from quantkit.results import ModelInfo, Sweep, written_whole
from quantkit.results.io import remove_abandoned

FIGURES: Final = "figures"
"""Folder beside the page, for the pictures that the Markdown shows."""
MOST_BYTES: Final = 6_000_000
"""Of a page, so that it can be mailed."""
_ROWS: Final = (1000, 200, 50, 20)
"""Rows of folded tables, tried in this order until the page is small enough."""
_EARLIER: Final = ("sweep-*.svg", "pair-*.svg", "training-*.svg")
"""What earlier versions wrote beside the page."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that a page says, in order; `charts` are drawn, by name, a string a panel."""

    context: dict[str, object]
    first: FirstScreen
    sections: tuple[Section, ...]

    @property
    def charts(self) -> tuple[Chart, ...]:
        """Every chart once: one of the first screen may stand below, too."""
        found = list(self.first.charts)
        for section in self.sections:
            found += [*section.charts, *(c for block in section.blocks for c in block.charts)]
        return tuple({chart.name: chart for chart in found}.values())


def write_report(
    run_folders: Sequence[Path], out: Path, *, against: Path | None = None
) -> tuple[Path, ...]:
    """Writes `report.html` and `report.md` into the folder `out`; returns the paths of all files.

    Those two come first, in this order, then `figures/*.svg`, which the Markdown shows; pictures
    of an earlier report that are no longer among them are removed, unless somebody changed them.
    The same files give the same bytes: no clock, no network. Time and size grow with the charts:
    some 50 ms and 30 kB each.

    Args:
        against: Folder of an earlier run, put beside this one with every change marked.

    Raises:
        InputError: no result file below the folders, one of them cannot be read, `against` has
            nothing in common with them, or `out` cannot be written to.
    """
    page = page_of(run_folders, against)
    paths = (out / "report.html", out / "report.md")
    text, twin = render_html(page), render_markdown(page)
    drawn = {f"{chart.name}.svg": file_svg(chart) for chart in page.charts}
    remove_abandoned(out, {path.name for path in paths})
    remove_abandoned(out / FIGURES, drawn)
    for name, svg in drawn.items():
        _write(out / FIGURES / name, svg)
    _write(paths[0], text)
    _write(paths[1], twin)
    _remove_stale(out, set(drawn))
    return (*paths, *(out / FIGURES / name for name in drawn))


def page_of(run_folders: Sequence[Path], against: Path | None = None) -> Page:
    """Returns what the page of these folders says.

    Raises:
        InputError: see `write_report`.
    """
    run = collect(run_folders)
    earlier = None if against is None else collect([against])
    first = first_screen(run, earlier)
    found = sections(run, tuple(run_folders), earlier)
    return Page(context=_context(run), first=first, sections=_with_names(first, found))


def _with_names(first: FirstScreen, found: tuple[Section, ...]) -> tuple[Section, ...]:
    """Returns the sections with chart names that differ; one on the first screen keeps its own."""
    taken: dict[str, Chart] = {chart.name: chart for chart in first.charts}

    def renamed(chart: Chart) -> Chart:
        name, again = chart.name, 2
        while name in taken and taken[name] != chart:
            name, again = f"{chart.name}-{again}", again + 1
        taken[name] = chart
        return chart if name == chart.name else replace(chart, name=name)

    return tuple(
        replace(
            section,
            charts=tuple(map(renamed, section.charts)),
            blocks=tuple(
                replace(block, charts=tuple(map(renamed, block.charts))) for block in section.blocks
            ),
        )
        for section in found
    )


def render_html(page: Page) -> str:
    """Returns the page: inline style, script and pictures, nothing to fetch, every name escaped.

    Where it would be larger than `MOST_BYTES`, folded tables are cut, which their titles then say,
    and after that the largest pictures are left out: they are in `figures/`.
    """
    drawn = {
        chart.name: [Markup(page_svg(panel, chart.title)) for panel in chart.panels]
        for chart in page.charts
    }
    text = _html(page, drawn)
    for rows in _ROWS:
        if len(text.encode(errors="replace")) <= MOST_BYTES:
            return text
        page = replace(page, sections=tuple(_cut(section, rows) for section in page.sections))
        text = _html(page, drawn)
    by_size = sorted(drawn, key=lambda name: -sum(map(len, drawn[name])))
    for name in by_size:
        if len(text.encode(errors="replace")) <= MOST_BYTES:
            break
        drawn[name] = []
        text = _html(page, drawn)
    return text


def policy(script: str) -> str:
    """Returns the page's content security policy: this script alone runs, nothing is fetched.

    So a name that got past escaping could still do nothing.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _html(page: Page, drawn: dict[str, list[Markup]]) -> str:
    script = _script()
    return (
        _environment(autoescape=True)
        .get_template("report.html.j2")
        .render(
            page.context
            | {
                "first": page.first,
                "sections": page.sections,
                "drawn": drawn,
                "figures": FIGURES,
                "key_svg": lambda key: Markup(key_svg(key)),
                "script": Markup(script),
                "policy": policy(script),
                "light": variables(LIGHT),
                "dark": variables(DARK),
                "recoloured": Markup(recoloured("figure svg ")),
            }
        )
    )


def _script() -> str:
    path = resources.files("quantkit.reporting").joinpath("templates", "page.js")
    return path.read_text(encoding="utf-8")


def _cut(section: Section, rows: int) -> Section:
    """Returns the section with folded tables of `rows` rows at most."""
    folded = []
    for table in section.folded:
        if len(table.rows) > rows:
            note = f"The first {rows:,} of {len(table.rows):,} rows; the result files have all."
            note = f"{note} {table.note}".rstrip()
            table = replace(table, rows=table.rows[:rows], note=note)
        folded.append(table)
    return replace(section, folded=tuple(folded))


def render_markdown(page: Page) -> str:
    """Returns the Markdown twin: the same sentences and tables, and links to the pictures."""
    environment = _environment(autoescape=False)
    environment.filters["md"] = markdown
    environment.filters["summary"] = lambda text: html.escape(printable(text))
    context = page.context | {"first": page.first, "sections": page.sections, "figures": FIGURES}
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
        "models": list(
            dict.fromkeys(
                [
                    *(m.name for m in found_models),
                    *_trained_names(run),
                    *(name for name, _ in diagnoses(run)),
                ]
            )
        ),
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
        "headlines": [f.result.headline for f in run.sweeps if f.result.headline],
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


def _remove_stale(out: Path, current: set[str]) -> None:
    """Removes pictures that earlier reports wrote, but for those of this one.

    One is known by its last line, which holds the hash of the rest: what somebody else made, or
    changed since, stays.

    Raises:
        InputError: one of them cannot be removed.
    """
    found = [path for path in (out / FIGURES).glob("*.svg") if path.name not in current]
    found += [path for pattern in _EARLIER for path in out.glob(pattern)]
    for path in sorted(found):
        if path.is_symlink() or not path.is_file():
            continue
        try:
            if is_ours(path.read_bytes()):
                path.unlink()
        except PermissionError as error:
            raise InputError(f"cannot remove {path}: {error.strerror or error}.") from error


def _write(path: Path, text: str) -> None:
    """Writes the file whole or not at all."""
    with written_whole(path) as file:
        file.write(text.encode(errors="replace"))
