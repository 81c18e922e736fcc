"""The sections of a pair and of trainings, which stand at the top of a report."""

from __future__ import annotations

from quantkit.reporting.blocks import Block, Figure, Panels, Section
from quantkit.reporting.collect import Run
from quantkit.reporting.outlier_tables import topk_table
from quantkit.reporting.pair_chance import counts
from quantkit.reporting.pair_charts import (
    bit_panels,
    lambda_panels,
    mass_panels,
    outlier_panels,
)
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
from quantkit.reporting.pictures import slug
from quantkit.reporting.text import Table
from quantkit.reporting.training_charts import growth_panels, loss_panels
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
                figures=_figures(("pair-outliers", outlier_panels(pair))),
                tables=(topk_table(pair.run, paper=True),),
            ),
            *_block(
                "lambda",
                _figures(("pair-lambda", lambda_panels(pair))),
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
                _figures(("pair-attention", mass_panels(pair))),
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
    names: list[str] = []
    blocks = []
    for one in shown:
        name = f"pair-bits-{slug(one.task)}"
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
        panels = bit_panels(pair, one, with_paper=one in beside)
        blocks.append(
            Block(
                title=one.words,
                figures=_figures((names[-1], panels)),
                tables=() if one.task in pair.needles else _filled(bits_table(pair, one)),
            )
        )
    return blocks


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
                    figures=_figures((f"training-loss{_nth(i)}", loss_panels(result, colours))),
                    tables=(models_table(result), *_filled(corpus_table(result))),
                ),
                *_block(
                    "Growth of outliers",
                    _figures((f"training-growth{_nth(i)}", growth_panels(result, colours))),
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
                    figures=_figures(
                        (f"training-seeds-loss{_nth(i)}", loss_panels(result, colours)),
                        (f"training-seeds-growth{_nth(i)}", growth_panels(result, colours)),
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


def _figures(*named: tuple[str, Panels | None]) -> tuple[Figure, ...]:
    return tuple(Figure(name=name, panels=panels) for name, panels in named if panels is not None)


def _filled(*tables: Table) -> tuple[Table, ...]:
    return tuple(table for table in tables if table.rows)


def _block(title: str, figures: tuple[Figure, ...], *tables: Table) -> tuple[Block, ...]:
    """Returns the block, or nothing where nothing is in it."""
    filled = _filled(*tables)
    if not figures and not filled:
        return ()
    return (Block(title=title, figures=figures, tables=filled),)
