"""What a graph costs and what it is worth, in ONNX Runtime: milliseconds and perplexity."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.exporting.parity import Batch
from quantkit.onnx_runtime import DecoderSession


def paired_latency(
    float_session: DecoderSession,
    quantized_session: DecoderSession,
    ids: Tensor,
    repeats: int = 5,
) -> tuple[float, float]:
    """Returns the median milliseconds of one prompt, float and quantized.

    The two alternate, so that a machine that slows down slows both; the first run of each, which
    plans memory, is not counted.

    Args:
        ids: `[batch, tokens]`.
    """
    if repeats < 1:
        raise InputError(f"latency takes at least 1 repeat, got {repeats}.")
    tokens = ids.numpy().astype(np.int64)
    sessions = (float_session, quantized_session)
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(repeats + 1):
        for session, spent in zip(sessions, times, strict=True):
            start = time.perf_counter()
            session.run(tokens)
            if round_:
                spent.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def ort_perplexity(session: DecoderSession, batches: Iterable[Batch]) -> float:
    """Returns exp of the mean negative log-likelihood over every predicted real token.

    Raises:
        InputError: no token is predicted.
    """
    total, count = 0.0, 0
    for batch in batches:
        ids, mask = batch.input_ids.cpu(), batch.attention_mask.cpu().bool()
        output = session.run(ids.numpy().astype(np.int64), mask.numpy().astype(np.int64))
        for row, targets, real in zip(output.logits, ids, mask, strict=True):
            keep = real[1:] & real[:-1]
            scores = torch.from_numpy(row[:-1])[keep].double()
            nll = torch.nn.functional.cross_entropy(scores, targets[1:][keep], reduction="sum")
            total += float(nll)
            count += int(keep.sum())
    if not count:
        raise InputError("perplexity takes at least one predicted token, got none.")
    return math.exp(total / count)
