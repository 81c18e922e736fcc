"""What `quantkit compare` prints of a matched pair: 100 columns, the paper's layouts."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Final

from quantkit.reporting.collect import Run
from quantkit.reporting.outlier_tables import topk_table
from quantkit.reporting.pair_groups import Pair
from quantkit.reporting.pair_tables import bits_table, needles_table
from quantkit.reporting.pair_verdict import pair_verdict
from quantkit.reporting.text import Table, plain_table, printable

WIDTH: Final = 100


def pair_text(pair: Pair, run: Run) -> str:
    """Returns the verdict, Table 5 with its ratio, each task by bits, and retrieval unquantized."""
    said = [line for text in pair_verdict(pair, run) for line in textwrap.wrap(text, WIDTH)]
    tables = [
        topk_table(pair.run, paper=True, narrow=True),
        *_grids(pair),
        needles_table(pair, narrow=True),
    ]
    texts = ["".join(f"{printable(line)}\n" for line in said)]
    return "\n".join([*texts, *(plain_table(table, WIDTH) for table in tables if table.rows)])


def _grids(pair: Pair) -> list[Table]:
    """Returns the tables of bits but of retrieval; what marks are is said below the last."""
    parts = [one for one in pair.firsts if one.task not in pair.needles]
    filled = [table for one in parts if (table := bits_table(pair, one)).rows]
    return [*(replace(table, note="") for table in filled[:-1]), *filled[-1:]]
