"""What a report shows, section by section, of the files that were found."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from quantkit.reporting import (
    auto_tables,
    calibration_charts,
    calibration_notes,
    calibration_tables,
    channel_charts,
    curves,
    export_tables,
    outlier_charts,
    outlier_tables,
    place_tables,
    point_tables,
    sensitivity_charts,
    sensitivity_tables,
    sweep_charts,
    sweep_tables,
    tables,
    weight_tables,
)
from quantkit.reporting.against import against_section
from quantkit.reporting.blocks import Section
from quantkit.reporting.collect import Run
from quantkit.reporting.diagnosis_tables import diagnosis_section
from quantkit.reporting.pair_groups import Pair, pair_of
from quantkit.reporting.pair_page import pair_sections, training_sections
from quantkit.reporting.pareto_charts import pareto_charts
from quantkit.reporting.provenance import commands_table
from quantkit.reporting.surface_charts import surface_charts
from quantkit.reporting.text import Table

_MOST_ROWS: Final = 24
"""Rows of paired differences, and of seeds, beyond which such a table is folded."""


def sections(
    run: Run, folders: tuple[Path, ...] = (), earlier: Run | None = None
) -> tuple[Section, ...]:
    """Returns the sections from top to bottom.

    What changed against an `earlier` run comes first, then a pair, and what says the same is left
    out below. What was not measured is said where statistics or a sweep are what the page is about.
    """
    pair = pair_of(run)
    first = (
        *(() if earlier is None else (against_section(run, earlier),)),
        *(pair_sections(pair) if pair else ()),
        *training_sections(run),
        *((diagnosis_section(run),) if run.diagnoses else ()),
    )
    has_stats = bool(run.stats or run.sweeps)
    rest = [s for s in _stages(run, pair, folders) if (has_stats and not first) or not s.is_empty]
    # of a pair, too, where the outliers are comes right behind how large they are
    ahead = 1 + (earlier is not None) if pair and rest and rest[0].name == "outliers" else 0
    return (*first[:ahead], *rest[: bool(ahead)], *first[ahead:], *rest[bool(ahead) :])


def _stages(run: Run, pair: Pair | None, folders: tuple[Path, ...]) -> tuple[Section, ...]:
    sections = (
        _outliers(run, pair),
        _bits(run, pair),
        Section(
            name="export",
            title="Export",
            tables=_filled(
                *auto_tables.auto_tables(run),
                export_tables.export_table(run),
                export_tables.parity_table(run),
                export_tables.latency_table(run),
                export_tables.file_table(run),
            ),
            missing="No export.json was found. `quantkit export MODEL --quantize w8a8` writes it.",
            notes=(
                *(note for found in run.searches for note in auto_tables.auto_notes(found.result)),
                *export_tables.notes(run),
            ),
            charts=pareto_charts(run),
            folded=_filled(export_tables.kept_table(run), export_tables.smoothed_table(run)),
        ),
        _calibration(run),
        _sensitivity(run),
        Section(
            name="provenance",
            title="Provenance",
            tables=_filled(
                commands_table(folders),
                tables.provenance_table(run),
                sweep_tables.task_table(run),
                tables.environment_table(run),
            ),
            missing="Nothing is known about where the numbers come from.",
        ),
    )
    return (*sections[:1], *_training(run), *sections[1:])


def _outliers(run: Run, pair: Pair | None) -> Section:
    is_differential = any(found.result.model.maps > 1 for found in run.stats)
    lines = [outlier_charts.entropy_chart(run)]
    lines += [] if pair else [outlier_charts.lambda_chart(run)]
    topk = () if pair else (outlier_tables.topk_table(run, paper=is_differential),)
    return Section(
        name="outliers",
        title="Outliers by layer and head" if pair else "Outliers",
        tables=_filled(
            *topk,
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
        charts=(
            *outlier_charts.heat_maps(run),
            *outlier_charts.depth_charts(run),
            *surface_charts(run),
            *(line for line in lines if line is not None),
            *channel_charts.channel_charts(run),
        ),
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


def _bits(run: Run, pair: Pair | None) -> Section:
    long = (sweep_tables.spread_table(run), sweep_tables.delta_table(run))
    folded = [table for table in long if len(table.rows) > _MOST_ROWS]
    masses = sweep_tables.mass_table(run, parts=sweep_tables.MASS_PARTS)
    bits = (*sweep_tables.bit_tables(run),)
    return Section(
        name="bits",
        title="What the bits cost, the rest" if pair else "What the bits cost",
        tables=_filled(
            *(() if pair else bits),
            *sweep_tables.recipe_tables(run),
            *(() if pair else (masses,)),
            *(table for table in long if table not in folded),
        ),
        missing="No sweep.json was found. `quantkit sweep MODEL` writes it.",
        charts=(
            *sweep_charts.sweep_charts(run, with_bits=pair is None),
            *sweep_charts.recipe_charts(run),
        ),
        notes=sweep_tables.notes(run),
        folded=_filled(
            *((*bits, masses) if pair else ()),
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
        charts=(
            *calibration_charts.histogram_charts(run),
            *calibration_charts.stability_charts(run),
        ),
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
        charts=(*sensitivity_charts.ranking_charts(run), *sensitivity_charts.kept_charts(run)),
        notes=sensitivity_tables.notes(run),
        folded=_filled(*sensitivity_tables.keep_tables(run), *sensitivity_tables.other_tables(run)),
    )


def _training(run: Run) -> tuple[Section, ...]:
    """Returns the section of the training curves; none without curves."""
    if not run.curves:
        return ()
    is_told = bool(run.trainings)
    section = Section(
        name="training",
        title="Training, batch by batch" if is_told else "Training",
        tables=(curves.summary_table(run), *_filled(curves.steps_table(run))),
        charts=(*curves.line_charts(run, with_loss=not is_told), *curves.heat_maps(run)),
    )
    return (section,)


def _filled(*candidates: Table) -> tuple[Table, ...]:
    return tuple(table for table in candidates if table.rows)
