"""Rows that teach what the tasks `needles` and `icl` measure, by the tasks' own generators.

A needles row holds one sample that fills it or several short ones, from a fact with its question to
as many distractors as fit; in most, all facts are asked for, since the numbers of the answers are
all that can be learnt of it. An icl row holds shots with their labels, the question last: each is a
question on those before it. EOS separates the samples, and they are tokenized as the tasks tokenize
them, question and answer together.

A row is a function of tokenizer, context, seed and index alone. Its samples' indices begin at 2^52,
those of evaluations and calibration sets lie far below 2^32: no sample is one of theirs, whichever
seeds below 2^32 the two have. (`Draw` joins seed and index as words of 32 bits, so that the upper
word of a longer seed could stand where a short seed's index does.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from quantkit.calib_sets.draw import Draw
from quantkit.calib_sets.retrieval import retrieval_sample
from quantkit.tasks.icl_items import icl_item
from quantkit.training.tokenizer import plain_encoder, special_tokens

Rows = NDArray[np.uint16]

_FIRST_PLAN: Final = 1 << 51
_FIRST_SAMPLE: Final = 1 << 52
_ROW_SAMPLES: Final = 1 << 20
"""Indices of samples that a row has to itself."""
_MOST_NEEDLES: Final = 8
_MOST_LABELS: Final = 8
_MOST_SHOTS: Final = 64
_LEVELS: Final = (0, 1, 2, 4, 8, 16)
"""The most distractors in a sample of a row of several."""
_LEAST_TOKENS: Final = 5
"""Of a distractor sentence, with any tokenizer."""


def needles_rows(tokenizer: Any, count: int, *, context: int, seed: int) -> Rows:
    """Returns retrieval rows, uint16 `[count, context]`, BOS first.

    Half of the rows begin with a sample that fills them; its facts are spread over all of it. What
    is left at the end of a row is filled by the beginning of a sample.

    Raises:
        InputError: a tokenizer without BOS or EOS.
    """

    def row(encoder: Tokenizer, draw: Draw) -> _Sample:
        level = _LEVELS[draw.below(len(_LEVELS))]
        fills = draw.below(2) == 0

        def sample(index: int, room: int) -> list[int]:
            sentences = draw.below(level + 1)
            if fills and index % _ROW_SAMPLES == 0:
                sentences = room // _LEAST_TOKENS
            return _retrieval(encoder, draw, index, seed, sentences, room)

        return sample

    return _rows(tokenizer, count, context, seed, row)


def icl_rows(tokenizer: Any, count: int, *, context: int, seed: int) -> Rows:
    """Returns many-shot rows, uint16 `[count, context]`, BOS first.

    Each sample has 2 to 8 labels and up to 64 shots; the last of a row ends where the row does.

    Raises:
        InputError: a tokenizer without BOS or EOS.
    """

    def row(encoder: Tokenizer, draw: Draw) -> _Sample:
        def sample(index: int, _room: int) -> list[int]:
            labels = 2 + draw.below(_MOST_LABELS - 1)
            shots = labels + draw.below(_MOST_SHOTS - labels + 1)
            return _encoded(encoder, _icl_text(index, seed, labels, shots))

        return sample

    return _rows(tokenizer, count, context, seed, row)


def sample_texts(count: int, *, seed: int) -> Iterator[str]:
    """Yields `count` samples of each kind as text, for a tokenizer to be trained on."""
    for index in range(_FIRST_SAMPLE, _FIRST_SAMPLE + count):
        needles = 1 + index % _MOST_NEEDLES
        sample = retrieval_sample(index, seed=seed, needles=needles, queries=needles, sentences=2)
        yield sample.text
        yield _icl_text(index, seed, _MOST_LABELS, _MOST_SHOTS)


_Sample = Callable[[int, int], list[int]]
"""(Index, room) -> the tokens of a sample; more than there is room for, where none is so short."""


def _rows(
    tokenizer: Any,
    count: int,
    context: int,
    seed: int,
    row: Callable[[Tokenizer, Draw], _Sample],
) -> Rows:
    bos, eos = special_tokens(tokenizer)
    encoder = plain_encoder(tokenizer)
    rows = np.empty((count, context), np.uint16)
    for index in range(count):
        sample = row(encoder, Draw(seed, _FIRST_PLAN + index))
        ids, number = [bos], _FIRST_SAMPLE + index * _ROW_SAMPLES
        while len(ids) < context:
            # a sample whose last token is the row's needs no EOS
            ids += [*sample(number, context - len(ids)), eos]
            number += 1
        rows[index] = ids[:context]
    return rows


def _retrieval(
    encoder: Tokenizer, draw: Draw, index: int, seed: int, sentences: int, room: int
) -> list[int]:
    """Returns a sample with up to `sentences` distractors and 8 facts, as many as fit."""
    needles = 1 + draw.below(_MOST_NEEDLES)
    queries = needles if draw.below(4) else 1 + draw.below(needles)
    # the sample itself would ask for the facts that were drawn first, in that order
    order = draw.several(_MOST_NEEDLES, _MOST_NEEDLES)

    def ids(sentences: int) -> list[int]:
        sample = retrieval_sample(index, seed=seed, needles=needles, sentences=sentences, queries=1)
        asked = [place for place in order if place < needles][:queries]
        return _encoded(encoder, replace(sample, asked=tuple(asked)).text)

    while needles > 1 and len(ids(0)) > room:
        needles -= 1
    # more sentences are the same ones and more behind them, so that the size only grows
    fitting = bisect_right(range(1, sentences + 1), room, key=lambda count: len(ids(count)))
    return ids(fitting)


def _icl_text(index: int, seed: int, labels: int, shots: int) -> str:
    item = icl_item(index, seed=seed, labels=labels, shots=shots, orders=1)
    return f"{item.prompt(0)} {item.labels[item.answer]}"


def _encoded(encoder: Tokenizer, text: str) -> list[int]:
    return list(encoder.encode(text, add_special_tokens=False).ids)
