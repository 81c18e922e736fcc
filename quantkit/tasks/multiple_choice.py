"""Multiple choice: the ending of a context that a model finds likeliest is its answer.

`acc_norm` divides an ending's log-likelihood by its length, since a longer one is less likely for
being longer; `acc` does not. The length is that of the ending alone in bytes of UTF-8. EleutherAI's
harness means the same by `acc_norm` but counts characters, and calls bytes `acc_bytes`: in ASCII
all three are one. Where another ending is as likely as the right one, that is no answer and counts
as wrong; the harness takes the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from quantkit.calib_sets.check import SetInfo
from quantkit.calib_sets.plain_text import documents_of, joined
from quantkit.jobs.tasks import MultipleChoiceSpec
from quantkit.results import DataInfo
from quantkit.tasks.choice_items import Item, made_from, read_items
from quantkit.tasks.continuations import (
    Continuation,
    computed,
    log_likelihoods,
    planned,
    tokenized,
)
from quantkit.tasks.items import item_hash, pairs_info, sampled
from quantkit.tasks.task import Metric, Rows, Scores, TextForward

_METRICS: Final = ("acc_norm", "acc")


@dataclass(frozen=True, kw_only=True, eq=False)
class MultipleChoice:
    """Items with endings. Rows: 1 where the right ending is likelier than any other, by metric.

    Attributes:
        name: As the specification; `source`: where the items come from.
        pairs: Of each item, one an ending.
        batch_size: Endings of a forward pass.
        bos: As it was asked for.
        named: The calibration set that the text is of, if it is.
    """

    name: str
    source: str
    items: tuple[Item, ...]
    pairs: tuple[tuple[Continuation, ...], ...]
    batch_size: int
    bos: str
    named: SetInfo | None = None

    @classmethod
    def of(
        cls,
        spec: MultipleChoiceSpec,
        tokenizer: Any,
        *,
        text_source: str,
        seen: str = "",
        items: int = 100,
        seed: int = 0,
        batch_size: int = 4,
        max_length: int | None = None,
        bos: str = "auto",
    ) -> MultipleChoice:
        """Returns the task for one tokenizer.

        Args:
            text_source: What items are made from where the specification names no file: a named
                set, a file, a folder or a `.jsonl`.
            seen: Text that calibration has seen: no item is made of its paragraphs.
            items: How many; of a file that has more they are drawn by `seed`.
            max_length: Positions that the model takes.

        Raises:
            InputError: no such file or text, an item that is none, too little text, an ending that
                is longer than the model takes.
        """
        named = None
        if spec.source is not None:
            chosen = sampled(read_items(spec.source), items, seed)
        else:
            documents = documents_of(text_source)
            named = documents.named
            chosen = made_from(joined(documents), items=items, seed=seed, seen=seen)
        pairs = (
            tuple(
                tokenized(tokenizer, item.ctx, _joint(item, ending), bos=bos, max_length=max_length)
                for ending in item.endings
            )
            for item in chosen
        )
        return cls(
            name=str(spec),
            source=text_source if spec.source is None else spec.source,
            items=tuple(chosen),
            pairs=tuple(pairs),
            batch_size=batch_size,
            bos=bos,
            named=named,
        )

    @property
    def unit(self) -> str:
        """What is resampled."""
        return "items"

    @property
    def item_hashes(self) -> tuple[str, ...]:
        """One short hash an item."""
        return tuple(item_hash(item.ctx, item.endings, item.label) for item in self.items)

    @property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Items whose endings fill a forward pass; one item with more takes several."""
        most = max(len(pairs) for pairs in self.pairs)
        longest = [max(len(pair.fed) for pair in pairs) for pairs in self.pairs]
        return planned(longest, max(1, self.batch_size // most))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Positions that each batch computes."""
        return tuple(
            computed([pair for index in batch for pair in self.pairs[index]], self.batch_size)
            for batch in self.batches
        )

    @property
    def data(self) -> DataInfo:
        """What a result says about the items."""
        return pairs_info(
            [pair for pairs in self.pairs for pair in pairs],
            self.item_hashes,
            source=self.source,
            batch_size=self.batch_size,
            bos=self.bos,
            named=self.named,
        )

    def run(self, forward: TextForward, items: Sequence[int]) -> Rows:
        """Returns `[items, 2]`; NaN where a model's likelihoods are."""
        pairs = [pair for index in items for pair in self.pairs[index]]
        found = iter(log_likelihoods(forward, pairs, batch_size=self.batch_size))
        rows = np.empty((len(items), len(_METRICS)))
        for row, index in enumerate(items):
            item = self.items[index]
            likely = np.array([next(found).log_probability for _ in item.endings])
            sizes = np.array([len(ending.encode()) for ending in item.endings])
            for column, values in enumerate((likely / sizes, likely)):
                # no other is as likely
                right = float((values >= values[item.label]).sum() == 1)
                rows[row, column] = math.nan if np.isnan(values).any() else right
        return rows

    def scores(self, rows: Rows) -> Scores:
        """Returns `acc_norm` and `acc`; the chance is the mean of 1 / endings."""
        chance = float(np.mean([1 / len(item.endings) for item in self.items]))
        weight = np.ones(len(rows))
        return Scores(
            metrics=tuple(
                Metric(
                    name=name,
                    total=rows[:, column],
                    weight=weight,
                    chance=chance,
                    trials=True,
                    is_share=True,
                )
                for column, name in enumerate(_METRICS)
            )
        )


def _joint(item: Item, ending: str) -> str:
    """Returns the ending with a space before it, unless one is there or nothing is."""
    is_apart = not item.ctx or item.ctx[-1].isspace() or ending[0].isspace()
    return ending if is_apart else f" {ending}"
