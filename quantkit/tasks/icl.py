"""Many-shot in-context classification, and its spread over orders of the same shots.

Ye et al. 2024, "Differential Transformer" (arXiv 2410.05258), section 3.5. Every question is asked
once an order: order k is the k-th permutation of each sample's shots. What counts as the answer is
the most likely of the sample's label words, by the sum of the log-probabilities of its tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from quantkit.errors import InputError
from quantkit.jobs.tasks import IclSpec
from quantkit.results import DataInfo
from quantkit.tasks.continuations import (
    Continuation,
    FedRow,
    computed,
    planned,
    scored,
    tokenized,
)
from quantkit.tasks.icl_items import IclItem, icl_item
from quantkit.tasks.items import item_hash, pairs_info
from quantkit.tasks.task import Metric, Rows, Scores, TextForward

Prompt = tuple[Continuation, ...]
"""A prompt with each label word in turn."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Icl:
    """The task: `accuracy` over questions, each asked in every order.

    Its rows have a column an order: 1 where the label is right, 0 where another is as likely, NaN
    where the log-probability of one of the labels is. The orders of one question depend on each
    other, so that the test against chance counts the first alone. Time: a forward pass a question
    and order; as many as labels where the tokenizer has no single token for each of them.

    Attributes:
        prompts: `[items][orders]`.
    """

    spec: IclSpec
    items: tuple[IclItem, ...]
    prompts: tuple[tuple[Prompt, ...], ...]
    batch_size: int
    bos: str
    unit: str = "questions"

    @classmethod
    def of(
        cls,
        spec: IclSpec,
        tokenizer: Any,
        *,
        samples: int,
        seed: int = 0,
        batch_size: int = 4,
        seq_len: int = 512,
        max_length: int | None = None,
        bos: str = "auto",
    ) -> Self:
        """Returns the task for one tokenizer.

        Args:
            seq_len: Tokens that a prompt may have, its answer included.
            max_length: Positions that the model has; it may have no more than these either.

        Raises:
            InputError: a prompt is longer than that, no tokenizer.
        """
        limit = seq_len if max_length is None else min(seq_len, max_length)
        items = tuple(
            icl_item(
                index, seed=seed, labels=spec.labels, shots=spec.shots, orders=spec.orders
            )
            for index in range(samples)
        )  # fmt: skip
        made = []
        for item in items:
            prompts = tuple(_prompt(item, order, tokenizer, bos) for order in range(spec.orders))
            longest = max(_length(prompt) for prompt in prompts)
            if longest > limit:
                fitting = _fitting(spec, item, tokenizer, bos, limit)
                hint = f"shots={fitting}" if fitting >= spec.labels else "fewer labels"
                where = "positions of the model"
                if limit == seq_len:
                    where, hint = "of --seq-len", f"{hint}, or more tokens"
                raise InputError(
                    f"task {spec}: a prompt has {longest} tokens, and about {fitting} shots fit in "
                    f"the {limit} {where}: give {hint}."
                )
            made.append(prompts)
        return cls(spec=spec, items=items, prompts=tuple(made), batch_size=batch_size, bos=bos)

    @property
    def name(self) -> str:
        """The specification."""
        return str(self.spec)

    @property
    def item_hashes(self) -> tuple[str, ...]:
        """One a question, over its prompts and answer."""
        return tuple(
            item_hash(
                [item.prompt(order) for order in range(self.spec.orders)],
                item.labels,
                item.answer,
            )
            for item in self.items
        )  # fmt: skip

    @cached_property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Questions of similar length; with all their orders about `batch_size` prompts."""
        lengths = [max(map(_length, prompts)) for prompts in self.prompts]
        return planned(lengths, max(1, self.batch_size // self.spec.orders))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Positions of each batch, padding included."""
        return tuple(
            computed([fed for fed, _ in self._fed(items)], self.batch_size)
            for items in self.batches
        )

    @property
    def data(self) -> DataInfo:
        """What a result says about the questions."""
        return pairs_info(
            [prompt[0] for prompts in self.prompts for prompt in prompts],
            self.item_hashes,
            source="icl",
            batch_size=self.batch_size,
            bos=self.bos,
        )

    def run(self, forward: TextForward, items: Sequence[int]) -> Rows:
        """Returns which labels are right, `[items, orders]`."""
        found = scored(forward, self._fed(items), batch_size=self.batch_size)
        said = np.array([likely.log_probability for likely in found])
        by_label = said.reshape(len(items), self.spec.orders, self.spec.labels)
        answers = np.array([self.items[item].answer for item in items])
        own = np.take_along_axis(by_label, answers[:, None, None], 2)
        right = (by_label < own).sum(2) == self.spec.labels - 1  # a tie is no answer
        rows: Rows = np.where(np.isnan(by_label).any(2), np.nan, right)
        return rows

    def scores(self, rows: Rows) -> Scores:
        """Returns the accuracy; details are the spread of the orders' accuracies, `order_sd` with
        n - 1, where there is more than one.
        """
        orders = self.spec.orders
        by_order = rows.mean(0)
        spread = {}
        if orders > 1:
            low, high = float(by_order.min()), float(by_order.max())
            spread = {
                "order_min": low,
                "order_max": high,
                "order_range": high - low,
                "order_sd": float(by_order.std(ddof=1)),
            }
        return Scores(
            metrics=(
                Metric(
                    name="accuracy",
                    total=rows.sum(1),
                    weight=np.full(len(rows), float(orders)),
                    chance=1 / self.spec.labels,
                    trials=True,
                    successes=rows[:, 0],
                    is_share=True,
                ),
            ),
            details=spread,
        )

    def _fed(self, items: Sequence[int]) -> list[FedRow]:
        """Returns what is fed for these questions, each with the label words that it decides."""
        found: list[FedRow] = []
        for item in items:
            for prompt in self.prompts[item]:
                if all(pair.fed == prompt[0].fed for pair in prompt):
                    found.append((prompt[0], prompt))
                else:
                    found += [(pair, (pair,)) for pair in prompt]
        return found


def _prompt(item: IclItem, order: int, tokenizer: Any, bos: str) -> Prompt:
    text = item.prompt(order)
    pairs = [tokenized(tokenizer, text, f" {label}", bos=bos) for label in item.labels]
    context = pairs[0].context
    # one tuple for all labels that share it, since a context may be long
    return tuple(
        replace(pair, context=context) if pair.context == context else pair for pair in pairs
    )


def _length(prompt: Prompt) -> int:
    return max(len(pair.context) + len(pair.continuation) for pair in prompt)


def _fitting(spec: IclSpec, item: IclItem, tokenizer: Any, bos: str, limit: int) -> int:
    """Returns how many shots, in the order that they were drawn, a prompt has room for."""

    def size(shots: int) -> int:
        kept = tuple(range(shots))
        return _length(_prompt(replace(item, orders=(kept,)), 0, tokenizer, bos))

    return bisect_right(range(1, spec.shots + 1), limit, key=size)
