"""The sections of a pair and of trainings, which stand at the top of a report."""

from __future__ import annotations

from quantkit.reporting.blocks import Block, Section
from quantkit.reporting.collect import Run
from quantkit.reporting.drawing import Chart
from quantkit.reporting.outlier_tables import topk_table
from quantkit.reporting.pair_chance import counts
from quantkit.reporting.pair_charts import bit_chart, lambda_chart, mass_chart, outlier_chart
from quantkit.reporting.pair_groups import Pair
from quantkit.reporting.pair_seeds import seed_tables, swept_table
from quantkit.reporting.pair_tables import (
    bits_table,
    crossing_table,
    lambda_table,
    level_table,
    mass_table,
    needles_table,
)
from quantkit.reporting.text import Table
from quantkit.reporting.training_charts import growth_chart, loss_chart
from quantkit.reporting.training_groups import arm_colours
from quantkit.reporting.training_tables import (
    corpus_table,
    growth_table,
    models_table,
    settings_table,
    weights_table,
)


def pair_sections(pair: Pair) -> tuple[Section, ...]:
    """Returns Table 5, Figure 8, and retrieval with attention, of those that were measured."""
    outliers = Section(
        name="pair-outliers",
        title="The pair: outliers",
        blocks=(
            Block(
                title="Largest magnitudes",
                charts=(outlier_chart(pair),),
                tables=(topk_table(pair.run, paper=True),),
            ),
            *_block(
                "lambda",
                _drawn(lambda_chart(pair)),
                lambda_table(pair),
            ),
        ),
    )
    low_bits = Section(
        name="pair-bits",
        title="The pair: low bits",
        blocks=(
            *_tasks(pair),
            *_block("What each model keeps", (), level_table(pair), crossing_table(pair)),
        ),
        folded=_filled(*(bits_table(pair, one) for one in pair.firsts if one.task in pair.needles)),
    )
    looks = Section(
        name="pair-retrieval",
        title="The pair: retrieval and attention",
        blocks=(
            *_block("Needles", (), needles_table(pair)),
            *_block(
                "Attention",
                _drawn(mass_chart(pair)),
                mass_table(pair),
            ),
        ),
    )
    return tuple(section for section in (outliers, low_bits, looks) if not section.is_empty)


def _tasks(pair: Pair) -> list[Block]:
    """Returns a block a task; the paper's Figure 8 stands with the first accuracy that counts.

    Those in which a model may be guessing come last. Of retrieval the pictures alone: there are
    several, and their tables are folded.
    """
    shown = [one for one in pair.firsts if pair.rows(one)]
    shown.sort(key=lambda one: not counts(pair, one))
    able = [one for one in shown if one.is_share and counts(pair, one)]
    beside = [*able, *shown][:1]
    return [
        Block(
            title=one.words,
            charts=_drawn(bit_chart(pair, one, with_paper=one in beside)),
            tables=() if one.task in pair.needles else _filled(bits_table(pair, one)),
        )
        for one in shown
    ]


def training_sections(run: Run) -> tuple[Section, ...]:
    """Returns the trainings, then what their seeds show, of those that are there."""
    colours = arm_colours(run)
    found = [found.result for found in run.trainings if found.result.models]
    trained = Section(
        name="trained",
        title="How the models were trained",
        blocks=tuple(
            block
            for i, result in enumerate(found)
            for block in (
                Block(
                    title=result.name,
                    charts=_drawn(loss_chart(f"training-loss{_nth(i)}", result, colours)),
                    tables=(models_table(result), *_filled(corpus_table(result))),
                ),
                *_block(
                    "Growth of outliers",
                    _drawn(growth_chart(f"training-growth{_nth(i)}", result, colours)),
                ),
            )
        ),
        folded=_filled(
            *(growth_table(result) for result in found),
            *(settings_table(result) for result in found),
            *(weights_table(result) for result in found),
        ),
    )
    small = [found.result for found in run.seed_trainings if found.result.models]
    seeds = Section(
        name="seeds",
        title="Several seeds",
        blocks=(
            *_block("What a gap is worth", (), *seed_tables(run), swept_table(run, fewest=True)),
            *(
                Block(
                    title=result.name,
                    charts=_drawn(
                        loss_chart(f"training-seeds-loss{_nth(i)}", result, colours),
                        growth_chart(f"training-seeds-growth{_nth(i)}", result, colours),
                    ),
                )
                for i, result in enumerate(small)
            ),
        ),
        folded=_filled(
            *(models_table(result) for result in small),
            swept_table(run, fewest=False),
            *(growth_table(result) for result in small),
            *(corpus_table(result) for result in small),
            *(settings_table(result) for result in small),
        ),
    )
    return tuple(section for section in (trained, seeds) if not section.is_empty)


def _nth(index: int) -> str:
    return "" if index == 0 else f"-{index + 1}"


def _drawn(*charts: Chart | None) -> tuple[Chart, ...]:
    return tuple(chart for chart in charts if chart is not None)


def _filled(*tables: Table) -> tuple[Table, ...]:
    return tuple(table for table in tables if table.rows)


def _block(title: str, charts: tuple[Chart, ...], *tables: Table) -> tuple[Block, ...]:
    """Returns the block, or nothing where nothing is in it."""
    filled = _filled(*tables)
    if not charts and not filled:
        return ()
    return (Block(title=title, charts=charts, tables=filled),)
