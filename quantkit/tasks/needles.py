"""Multi-needle retrieval: facts hidden in a long context, asked for at its end.

Ye et al. 2024, "Differential Transformer" (arXiv 2410.05258), section 3.4: N needles, R queries, at
chosen depths and context lengths. The samples are `calib_sets.retrieval`'s, but none that a
calibration set can hold. All R questions are asked in one prompt, one after the other; a sample is
right when greedy decoding gives all R numbers.

One forward pass of the whole text, true answers included, decides that. Up to its first wrong token
a model has written the true text, so that it would have been given the same context: it writes the
tokens of all answers if and only if each of them is the argmax after the true ones. The numbers in
other tokens do not count, and a longer number that begins with the right one does. With dynamic
`tensor` and `head` scales, which see the true answers too, it is not exact; with `row` and static
ones it is (`continuations.py`). After a wrong answer decoding and this part; the share of right
answers, `query_accuracy`, is therefore said with the true earlier ones given.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np

from quantkit.calib_sets.retrieval import RetrievalSample, retrieval_sample
from quantkit.errors import InputError
from quantkit.jobs.tasks import NeedlesSpec
from quantkit.results import AttentionMass, DataInfo
from quantkit.tasks.attention_mass import (
    KINDS,
    PARTS,
    Look,
    Masses,
    attention_mass,
    prompt_parts,
    token_characters,
)
from quantkit.tasks.continuations import (
    Continuation,
    FedRow,
    computed,
    in_parts,
    padded,
    planned,
    scored,
    tokenized,
)
from quantkit.tasks.items import item_hash, pairs_info
from quantkit.tasks.task import Metric, Rows, Scores, TextForward

FIRST_INDEX: Final = 1 << 20
"""Index of the first sample: calibration sets of the same generator count from 0."""
_NUMBERS: Final = 900_000
"""Six-digit numbers."""
_LEAST_TOKENS: Final = 5
"""Of a distractor sentence, with any tokenizer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """A sample as one model reads it.

    Attributes:
        depth_frac: Where the asked needles stand.
        pairs: One a question: all before its answer, and the answer; the true earlier ones are in
            it.
    """

    sample: RetrievalSample
    depth_frac: float
    pairs: tuple[Continuation, ...]

    @cached_property
    def rows(self) -> tuple[FedRow, ...]:
        """What is fed, with the questions that it decides: all of them at once where the tokens of
        each are the beginning of the last one's, which a token across their border prevents.
        """
        last = self.pairs[-1]
        whole = (*last.context, *last.continuation)
        parts = ((*pair.context, *pair.continuation) for pair in self.pairs)
        if all(whole[: len(part)] == part for part in parts):
            return ((last, self.pairs),)
        return tuple((pair, (pair,)) for pair in self.pairs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Needles:
    """The task: `exact_match` over samples, `query_accuracy` over their questions.

    Its rows have a column a question: 1 where its answer is right, NaN where the model says no
    numbers there. Time: a forward pass a sample.
    """

    spec: NeedlesSpec
    samples: tuple[Asked, ...]
    tokenizer: Any
    batch_size: int
    seq_len: int
    bos: str
    unit: str = "samples"

    @classmethod
    def of(
        cls,
        spec: NeedlesSpec,
        tokenizer: Any,
        *,
        samples: int,
        seed: int = 0,
        batch_size: int = 4,
        seq_len: int = 512,
        max_length: int | None = None,
        bos: str = "auto",
    ) -> Self:
        """Returns the task for one tokenizer: each prompt is as long as the limit allows.

        Args:
            seq_len: The limit in tokens, answers included, where the specification gives none.
            max_length: Positions that the model has; the limit is at most this.

        Raises:
            InputError: the specification asks for more tokens than the model has positions, the
                limit is too short for the needles and questions, no tokenizer.
        """
        room = math.inf if max_length is None else max_length
        if spec.tokens is not None and spec.tokens > room:
            raise InputError(
                f"task {spec}: {spec.tokens} tokens are more than the {max_length} positions of "
                f"the model: give tokens={max_length} or fewer."
            )
        limit = int(min(spec.tokens or seq_len, room))
        made = []
        for index in range(samples):
            depth = spec.depths[index % len(spec.depths)]
            made.append(_longest(spec, tokenizer, FIRST_INDEX + index, seed, depth, limit, bos))
        return cls(
            spec=spec,
            samples=tuple(made),
            tokenizer=tokenizer,
            batch_size=batch_size,
            seq_len=limit,
            bos=bos,
        )

    @property
    def name(self) -> str:
        """The specification."""
        return str(self.spec)

    @property
    def item_hashes(self) -> tuple[str, ...]:
        """One a sample, over its text and answers."""
        return tuple(item_hash(_texts(asked.sample)[-1]) for asked in self.samples)

    @cached_property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Samples of similar length."""
        lengths = [max(len(fed.fed) for fed, _ in asked.rows) for asked in self.samples]
        return planned(lengths, self.batch_size)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Positions of each batch, padding included."""
        return tuple(
            computed([fed for fed, _ in self._fed(items)], self.batch_size)
            for items in self.batches
        )

    @property
    def data(self) -> DataInfo:
        """What a result says about the samples."""
        return pairs_info(
            [asked.pairs[-1] for asked in self.samples],
            self.item_hashes,
            source="retrieval",
            batch_size=self.batch_size,
            bos=self.bos,
        )

    def run(self, forward: TextForward, items: Sequence[int]) -> Rows:
        """Returns which answers greedy decoding gives, `[items, queries]`, the true earlier ones
        given.
        """
        found = scored(forward, self._fed(items), batch_size=self.batch_size)
        right = np.array([likely.greedy_or_nan for likely in found])
        return right.reshape(len(items), self.spec.queries)

    def scores(self, rows: Rows) -> Scores:
        """Returns the accuracies; `exact_match at D` for each depth D that has samples."""
        spec, count = self.spec, len(rows)
        exact: Rows = (rows.sum(1) == spec.queries).astype(np.float64)
        depths = np.array([asked.depth_frac for asked in self.samples])
        # someone who names a number of the context each time, and none twice
        each = [1 / (spec.needles - index) for index in range(spec.queries)]
        if spec.needles == 1:  # the number is the context's only one: finding it is no guess
            each = [1 / _NUMBERS]
        return Scores(
            metrics=(
                Metric(
                    name="exact_match",
                    total=exact,
                    weight=np.ones(count),
                    chance=math.prod(each),
                    trials=True,
                    is_share=True,
                ),
                Metric(
                    name="query_accuracy",
                    total=rows.sum(1),
                    weight=np.full(count, float(spec.queries)),
                    chance=sum(each) / len(each),
                    is_share=True,
                ),
            ),
            details={
                f"exact_match at {depth:g}": float(exact[depths == depth].mean())
                for depth in sorted(set(spec.depths))
                if (depths == depth).any()
            },
        )

    def attention(self, model: Any, name: str) -> list[AttentionMass]:
        """Returns where a transformers model looks when it is about to answer, by depth and kind.

        From the position that predicts the first token of each answer, the earlier ones given.
        `name` is the model's in results.

        Raises:
            InputError: a tokenizer that does not say where its tokens stand in the text.
            ProbeError: attention that cannot be seen.
        """
        parts = [
            part
            for items in self.batches
            for part in in_parts(
                [(item, row) for item in items for row in self.samples[item].rows], self.batch_size
            )
        ]
        fed = (padded([fed for _, (fed, _) in part]) for part in parts)
        masses = attention_mass(model, zip(fed, map(self._looks, parts), strict=True))
        asked = (item for part in parts for item, (_, pairs) in part for _ in pairs)
        found: dict[float, list[Masses]] = {}
        for item, mass in zip(asked, masses, strict=True):
            found.setdefault(self.samples[item].depth_frac, []).append(mass)
        return [
            AttentionMass(
                model=name,
                task=self.name,
                depth_frac=depth,
                kind=kind,
                n=len(found[depth]),
                **dict(zip(PARTS, np.mean(found[depth], 0)[row].tolist(), strict=True)),
            )
            for depth in sorted(found)
            for row, kind in enumerate(KINDS)
        ]

    def _fed(self, items: Sequence[int]) -> list[FedRow]:
        """Returns what is fed for these samples, with the questions that it decides."""
        return [row for item in items for row in self.samples[item].rows]

    def _looks(self, part: Sequence[tuple[int, FedRow]]) -> list[Look]:
        """Returns one look a question, in order; a part is rows with the samples they are of."""
        found = []
        for row, (item, (fed, pairs)) in enumerate(part):
            asked = self.samples[item]
            text = _texts(asked.sample)[asked.pairs.index(fed)]
            tokens = len(fed.context) + len(fed.continuation)
            characters = token_characters(self.tokenizer, text, tokens)
            for pair in pairs:
                position = pair.positions.start
                parts = prompt_parts(
                    asked.sample, asked.pairs.index(pair), characters[: position + 1]
                )
                found.append(Look(row=row, position=position, parts=parts))
        return found


def _texts(sample: RetrievalSample) -> list[str]:
    """Returns the text up to the end of each answer."""
    text, found = sample.context, []
    for question, answer in zip(sample.questions, sample.answers, strict=True):
        text += f"\n\n{question} {answer}"
        found.append(text)
        text += "."
    return found


def _pair(sample: RetrievalSample, query: int, tokenizer: Any, bos: str) -> Continuation:
    text, answer = _texts(sample)[query], sample.answers[query]
    border = len(text) - len(answer) - 1  # before the space, which belongs to the answer
    return tokenized(tokenizer, text[:border], text[border:], bos=bos)


def _longest(
    spec: NeedlesSpec, tokenizer: Any, index: int, seed: int, depth: float, limit: int, bos: str
) -> Asked:
    """Returns the sample with the most distractors whose tokens, answers included, fit."""

    def sample(sentences: int) -> RetrievalSample:
        return retrieval_sample(
            index,
            seed=seed,
            needles=spec.needles,
            queries=spec.queries,
            sentences=sentences,
            depths=(depth,) * spec.queries,
        )

    def size(sentences: int) -> int:
        last = _pair(sample(sentences), -1, tokenizer, bos)
        return len(last.context) + len(last.continuation)

    if size(1) > limit:
        raise InputError(
            f"task {spec}: {limit} tokens are too few; with one sentence around the needles a "
            f"prompt has {size(1)}. Give more, as far as the model goes: tokens=N, or --seq-len."
        )
    # more sentences are the same ones and more behind them, so that the size only grows
    most = max(1, limit // _LEAST_TOKENS)
    best = sample(bisect_right(range(1, most + 1), limit, key=size))
    pairs = (_pair(best, query, tokenizer, bos) for query in range(spec.queries))
    return Asked(sample=best, depth_frac=depth, pairs=tuple(pairs))
