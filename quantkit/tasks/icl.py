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
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.jobs.tasks import IclSpec
from quantkit.results import DataInfo
from quantkit.tasks.continuations import Continuation, likelihood, padded, planned, tokenized
from quantkit.tasks.icl_items import IclItem, icl_item
from quantkit.tasks.items import item_hash, pairs_info
from quantkit.tasks.task import Metric, Rows, Scores, TextForward

Prompt = tuple[Continuation, ...]
"""A prompt with each label word in turn."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Icl:
    """The task: `accuracy` over questions, each asked in every order.

    Its rows have a column an order: 1 where the label is right, 0 where another is as likely. The
    orders of one question depend on each other, so that the test against chance counts the first
    alone. Time: a forward pass a question and order; as many as labels where the tokenizer has no
    single token for each of them.

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
        bos: str = "auto",
    ) -> Self:
        """Returns the task for one tokenizer.

        Raises:
            InputError: a prompt is longer than `seq_len` tokens, no tokenizer.
        """
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
            if longest > seq_len:
                raise InputError(_too_long(spec, item, tokenizer, bos, longest, seq_len))
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
            sum(len(part) * max(len(fed.fed) for fed, _ in part) for part in self._parts(items))
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
        said: list[float] = []
        for part in self._parts(items):
            positions = sorted({n for _, pairs in part for pair in pairs for n in pair.positions})
            with torch.inference_mode():
                logits = forward(padded([fed for fed, _ in part]), torch.tensor(positions))
            for row, (_, pairs) in enumerate(part):
                said += [_log_probability(logits[row], positions, pair) for pair in pairs]
        by_label = np.array(said).reshape(len(items), self.spec.orders, self.spec.labels)
        answers = np.array([self.items[item].answer for item in items])
        own = np.take_along_axis(by_label, answers[:, None, None], 2)
        # a tie is no answer, and NaN is below nothing
        right: Rows = ((by_label < own).sum(2) == self.spec.labels - 1).astype(np.float64)
        return right

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
                ),
            ),
            details=spread,
        )

    def _parts(self, items: Sequence[int]) -> list[list[tuple[Continuation, Prompt]]]:
        """Returns what is fed at once, each with the label words that it decides."""
        flat: list[tuple[Continuation, Prompt]] = []
        for item in items:
            for prompt in self.prompts[item]:
                if all(pair.fed == prompt[0].fed for pair in prompt):
                    flat.append((prompt[0], prompt))
                else:
                    flat += [(pair, (pair,)) for pair in prompt]
        size = self.batch_size
        return [flat[start : start + size] for start in range(0, len(flat), size)]


def _log_probability(logits: Tensor, positions: list[int], pair: Continuation) -> float:
    first = positions.index(pair.positions.start)
    own = logits[first : first + len(pair.positions)]
    return likelihood(own, torch.tensor(pair.continuation)).log_probability


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


def _too_long(
    spec: IclSpec, item: IclItem, tokenizer: Any, bos: str, longest: int, seq_len: int
) -> str:
    def size(shots: int) -> int:
        kept = tuple(range(shots))
        return _length(_prompt(replace(item, orders=(kept,)), 0, tokenizer, bos))

    fitting = bisect_right(range(1, spec.shots + 1), seq_len, key=size)
    hint = f"shots={fitting}" if fitting >= spec.labels else "fewer labels"
    return (
        f"task {spec}: a prompt has {longest} tokens, and about {fitting} shots fit in the "
        f"{seq_len} of --seq-len: give {hint}, or more tokens."
    )
