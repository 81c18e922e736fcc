"""What a graph is worth beside its float one, in ONNX Runtime: accuracy, latency, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from quantkit.calib_sets import TokenSlice
from quantkit.exporting.measure import accuracy_of_scores, block_scores, latency
from quantkit.exporting.peak import memory
from quantkit.onnx_runtime import DecoderSession
from quantkit.results import Accuracy

LATENCY_TOKENS: Final = 256
"""Of the prompt that is timed, and in the cache of the token that is."""


def accuracy_of(
    float_session: DecoderSession,
    session: DecoderSession,
    text: TokenSlice,
    *,
    batch_size: int,
    seed: int,
) -> Accuracy:
    """Returns both perplexities on the same blocks, and what changed."""
    float_scores = block_scores(float_session, text.batches(batch_size))
    scores = float_scores
    if session is not float_session:
        scores = block_scores(session, text.batches(batch_size))
    return accuracy_of_scores(float_scores, scores, seed)


def latencies_of(
    float_session: DecoderSession, session: DecoderSession, text: TokenSlice
) -> dict[str, float]:
    """Returns median milliseconds of a prompt and of one token behind it, see `Export`."""
    ids = text.ids[0][: LATENCY_TOKENS + 1][None]
    sessions = {"float": float_session, "quantized": session}
    prompt = ids[:, :LATENCY_TOKENS]
    found = {**latency(sessions, prompt), "prefill_tokens": float(prompt.shape[1])}
    if all(one.layout.past for one in sessions.values()):
        cached = ids.shape[1] - 1
        decode = latency(sessions, ids, cached=cached, repeats=9)
        found |= {f"{name}_decode": spent for name, spent in decode.items()}
        found["decode_cached"] = float(cached)
    return found


def memory_of(float_graph: Path, graph: Path, text: TokenSlice) -> dict[str, int]:
    """Returns the peak bytes of a process for each graph; empty where the system does not tell."""
    ids = text.ids[0][:LATENCY_TOKENS][None]
    found = {
        name: memory(path, ids) for name, path in (("float", float_graph), ("quantized", graph))
    }
    return {name: size for name, size in found.items() if size is not None}
