"""What a graph costs and what it is worth, in ONNX Runtime: milliseconds and perplexity."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.errors import InputError
from quantkit.exporting.parity import Batch
from quantkit.numerics.resampling import interval, resampled
from quantkit.onnx_runtime import DecoderSession
from quantkit.results import Accuracy

BlockScores = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Negative log-likelihood in nats and predicted tokens, both `[blocks]`."""

_WARMUP: Final = 1
"""Calls of each session that are not counted: the first one plans memory."""


def latency(
    sessions: Mapping[str, DecoderSession], ids: Tensor, *, cached: int = 0, repeats: int = 5
) -> dict[str, float]:
    """Returns the median milliseconds of a call, by the sessions' names.

    The sessions take turns, see `alternating`. Prefill: `cached` 0. Decoding: one token more than
    `cached`.

    Args:
        ids: `[batch, tokens]`. The first `cached` ones stand in each session's own cache, filled
            beforehand; the others are the call that is timed.

    Raises:
        InputError: no session, no repeat, nothing behind the cache, or a graph without a cache
            where there is something to stand in it.
    """
    if not sessions or repeats < 1:
        raise InputError(
            f"latency takes at least 1 session and 1 repeat, got {len(sessions)} and {repeats}."
        )
    if not 0 <= cached < ids.shape[1]:
        raise InputError(
            f"latency takes at least 1 token behind {cached} cached ones, got {ids.shape[1]} in "
            "all."
        )
    tokens = ids.cpu().numpy().astype(np.int64)
    past: dict[str, tuple[NDArray[np.generic], ...]] = dict.fromkeys(sessions, ())
    for name, session in sessions.items() if cached else ():
        if not session.layout.past:
            raise InputError(f"graph {name!r} has no cache that {cached} tokens could stand in.")
        past[name] = session.run(tokens[:, :cached]).present

    def call(name: str) -> Callable[[], object]:
        return lambda: sessions[name].run(tokens[:, cached:], None, past[name])

    return alternating({name: call(name) for name in sessions}, repeats)


def alternating(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the median milliseconds of each call, by name, without the first one.

    They take turns, every second round backwards, so that a machine that slows down slows all.

    Raises:
        InputError: no call or no repeat.
    """
    if not calls or repeats < 1:
        raise InputError(
            f"expected at least 1 call and 1 repeat to time, got {len(calls)} and {repeats}."
        )
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(_WARMUP + repeats):
        for name in calls if turn % 2 else reversed(list(calls)):
            start = time.perf_counter()
            calls[name]()
            if turn >= _WARMUP:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(spent) for name, spent in times.items()}


def paired_latency(
    float_session: DecoderSession,
    quantized_session: DecoderSession,
    ids: Tensor,
    repeats: int = 5,
) -> tuple[float, float]:
    """Returns the median milliseconds of one prompt, float and quantized, see `latency`."""
    found = latency({"float": float_session, "quantized": quantized_session}, ids, repeats=repeats)
    return found["float"], found["quantized"]


def block_scores(session: DecoderSession, batches: Iterable[Batch]) -> BlockScores:
    """Returns the negative log-likelihood of each block, and how many tokens it predicts.

    A token counts where it and the one before it are real, so n real tokens predict n - 1.
    """
    nll: list[float] = []
    predicted: list[int] = []
    for batch in batches:
        ids, mask = batch.input_ids.cpu(), batch.attention_mask.cpu().bool()
        output = session.run(ids.numpy().astype(np.int64), mask.numpy().astype(np.int64))
        for row, targets, real in zip(output.logits, ids, mask, strict=True):
            keep = real[1:] & real[:-1]
            scores = torch.from_numpy(row[:-1])[keep].double()
            found = torch.nn.functional.cross_entropy(scores, targets[1:][keep], reduction="sum")
            nll.append(float(found))
            predicted.append(int(keep.sum()))
    return np.array(nll, np.float64), np.array(predicted, np.float64)


def perplexity_of(scores: BlockScores) -> float:
    """Returns exp of the mean negative log-likelihood over every predicted real token.

    Raises:
        InputError: no token is predicted.
    """
    nll, predicted = scores
    if not predicted.sum():
        raise InputError("perplexity takes at least one predicted token, got none.")
    try:
        return math.exp(nll.sum() / predicted.sum())
    except OverflowError:  # of a ruined graph: more than 709 nats a token
        return math.inf


def ort_perplexity(session: DecoderSession, batches: Iterable[Batch]) -> float:
    """Returns the perplexity of a graph, see `block_scores` and `perplexity_of`."""
    return perplexity_of(block_scores(session, batches))


def change_of(
    float_scores: BlockScores, quantized_scores: BlockScores, seed: int
) -> tuple[float, float | None, float | None]:
    """Returns the quantized perplexity / the float one, and its 95 % interval.

    Paired: blocks are drawn with replacement, each with both of its scores. No interval (None) of
    one block, or where a score is not finite.

    Raises:
        InputError: the two are not of the same blocks, or no token is predicted.
    """
    (float_nll, predicted), (nll, same) = float_scores, quantized_scores
    if not np.array_equal(predicted, same):
        raise InputError(
            "expected scores of the same blocks, got "
            f"{len(predicted)} blocks of {predicted.sum():.0f} predicted tokens and "
            f"{len(same)} of {same.sum():.0f}."
        )
    change = perplexity_of((nll - float_nll, predicted))
    ratio = _Change(total=nll - float_nll, weight=predicted, value=change)
    _, low, high = interval(ratio, resampled(ratio, seed))
    if not (math.isfinite(low) and math.isfinite(high)):
        return change, None, None
    return change, low, high


def accuracy_of_scores(
    float_scores: BlockScores, quantized_scores: BlockScores, seed: int
) -> Accuracy:
    """Returns both perplexities on the same blocks, and what changed, see `change_of`."""
    change, low, high = change_of(float_scores, quantized_scores, seed)
    return Accuracy(
        metric="perplexity",
        float=perplexity_of(float_scores),
        quantized=perplexity_of(quantized_scores),
        change=change,
        change_low=low,
        change_high=high,
        loss=change - 1.0,
        units=len(quantized_scores[0]),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Change:
    """A ratio of perplexities as exp of a mean over blocks: what each block's score grew by."""

    total: NDArray[np.float64]
    weight: NDArray[np.float64]
    value: float
    link: Literal["identity", "exp"] = "exp"
    is_share: bool = False
