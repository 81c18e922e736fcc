"""How far the outputs of a quantized graph lie from those of the float one, on held-out inputs.

This is accuracy, not parity: the two differ by what quantization costs. All sums are float64, and
nothing grows with the number of batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.onnx_runtime import GraphBatch
from quantkit.onnx_runtime.sessions import MESSAGE, first_line

Feeds = Mapping[str, NDArray[Any]]


@dataclass(kw_only=True, eq=False)
class OutputSums:
    """Sums over what was seen of one output of two graphs.

    Attributes:
        rows: Rows along the last axis; `agreed`: those whose largest entry is at the same place.
    """

    squares: float = 0.0
    other_squares: float = 0.0
    products: float = 0.0
    error: float = 0.0
    max_abs: float = 0.0
    rows: int = 0
    agreed: int = 0

    def add(self, a: NDArray[Any], b: NDArray[Any]) -> None:
        """Adds rows `[rows, columns]` of the float and of the quantized graph."""
        x, y = a.astype(np.float64), b.astype(np.float64)
        self.squares += float((x * x).sum())
        self.other_squares += float((y * y).sum())
        self.products += float((x * y).sum())
        self.error += float(((x - y) ** 2).sum())
        gap = float(np.abs(x - y).max())
        self.max_abs = gap if math.isnan(gap) else max(self.max_abs, gap)
        self.rows += len(x)
        self.agreed += int((x.argmax(-1) == y.argmax(-1)).sum())

    @property
    def is_finite(self) -> bool:
        """Whether no NaN or inf was seen."""
        return math.isfinite(self.error) and math.isfinite(self.max_abs)

    @property
    def cosine(self) -> float:
        """Of all elements as one vector; 1 of two that are zero."""
        norm = math.sqrt(self.squares * self.other_squares)
        return self.products / norm if norm else float(self.squares == self.other_squares)

    @property
    def sqnr_db(self) -> float:
        """Power of the float output over that of the difference; inf where they are equal."""
        if self.error == 0.0:
            return math.inf
        return 10.0 * math.log10(self.squares / self.error) if self.squares else -math.inf

    @property
    def top1_agreement(self) -> float:
        """Share of rows whose largest entry is at the same place."""
        return self.agreed / self.rows if self.rows else 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputAgreement:
    """What both graphs gave on held-out inputs.

    Attributes:
        outputs: By name, the float ones.
        float_nll, quantized_nll: Of each sequence, in nats, `[sequences]`; `predicted`: tokens.
            Empty where the graph is no causal language model.
        shape: Of the first input of the first batch.
    """

    outputs: dict[str, OutputSums]
    float_nll: NDArray[np.float64]
    quantized_nll: NDArray[np.float64]
    predicted: NDArray[np.float64]
    shape: tuple[int, ...] = field(default=())

    @property
    def is_language_model(self) -> bool:
        """Whether there is a perplexity."""
        return bool(self.predicted.sum())


def compare_outputs(
    reference: ort.InferenceSession,
    candidate: ort.InferenceSession,
    batches: Iterable[GraphBatch],
    *,
    logits: str = "logits",
    ids: str = "input_ids",
) -> OutputAgreement:
    """Returns how the outputs of two graphs agree; padded positions are left out.

    The likelihood of the next token is taken where there are `ids` and `logits`
    `[batch, tokens, vocabulary]`, and no logit depends on a later token: that is tried.

    Raises:
        InputError: no batch, no output of floats, or what ONNX Runtime refuses to run.
    """
    found = [x for x in reference.get_outputs() if x.type in ("tensor(float)", "tensor(float16)")]
    names = [value.name for value in found]
    if not names:
        raise InputError("the graph has no output of floats, so nothing to compare.")
    sums = {name: OutputSums() for name in names}
    scores: tuple[list[float], list[float], list[int]] = ([], [], [])
    causal: bool | None = None
    shape: tuple[int, ...] = ()
    for batch in batches:
        ours, theirs = (
            run_graph(session, names, batch.feeds) for session in (reference, candidate)
        )
        shape = shape or next(iter(batch.feeds.values())).shape
        for name in names:
            a, b = _rows(ours[name], batch.real), _rows(theirs[name], batch.real)
            if a.size:
                sums[name].add(a, b)
        if causal is None:
            causal = _is_causal(reference, ours, batch.feeds, logits, ids)
        if causal:
            tokens = batch.feeds[ids]
            real = np.ones(tokens.shape, np.bool_) if batch.real is None else batch.real
            for row, targets in enumerate(tokens):
                keep = real[row, 1:] & real[row, :-1]
                scores[0].append(_nll(ours[logits][row], targets, keep))
                scores[1].append(_nll(theirs[logits][row], targets, keep))
                scores[2].append(int(keep.sum()))
    if causal is None:
        raise InputError("no batch to compare on: expected at least one.")
    return OutputAgreement(
        outputs={name: total for name, total in sums.items() if total.rows},
        float_nll=np.array(scores[0], np.float64),
        quantized_nll=np.array(scores[1], np.float64),
        predicted=np.array(scores[2], np.float64),
        shape=shape,
    )


def run_graph(
    session: ort.InferenceSession, names: Sequence[str], feeds: Feeds
) -> dict[str, NDArray[Any]]:
    """Returns these outputs by name.

    Raises:
        InputError: ONNX Runtime refuses the feeds, in the first line of its words.
    """
    try:
        return dict(zip(names, session.run(list(names), dict(feeds)), strict=True))
    except Exception as error:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in feeds.items())
        raise InputError(
            f"ONNX Runtime cannot run the graph: {first_line(error)} (given {shapes[:MESSAGE]})"
        ) from error


def _is_causal(
    session: ort.InferenceSession,
    outputs: Mapping[str, NDArray[Any]],
    feeds: Feeds,
    logits: str,
    ids: str,
) -> bool:
    """Returns whether the logits of all but the last token are the same with another last one."""
    if logits not in outputs or ids not in feeds:
        return False
    before, tokens = outputs[logits], feeds[ids]
    if before.ndim != 3 or before.shape[:2] != tokens.shape or tokens.shape[1] < 2:
        return False
    if int(tokens.max()) >= before.shape[2]:
        return False
    other = tokens.copy()
    other[:, -1] = (other[:, -1] + 1) % before.shape[2]
    mask = {name: np.ones_like(x) for name, x in feeds.items() if name == "attention_mask"}
    here = run_graph(session, [logits], {**feeds, **mask})[logits][:, :-1]
    there = run_graph(session, [logits], {**feeds, **mask, ids: other})[logits][:, :-1]
    return bool(np.allclose(here, there, rtol=1e-3, atol=1e-3 * float(np.abs(here).max())))


def _nll(scores: NDArray[Any], targets: NDArray[Any], keep: NDArray[np.bool_]) -> float:
    rows = torch.from_numpy(np.asarray(scores[:-1][keep], np.float64))
    wanted = torch.from_numpy(np.asarray(targets[1:][keep], np.int64))
    return float(torch.nn.functional.cross_entropy(rows, wanted, reduction="sum"))


def _rows(x: NDArray[Any], real: NDArray[np.bool_] | None) -> NDArray[Any]:
    """Returns `[rows, last axis]`; of `[batch, tokens, ...]` only real positions."""
    if real is not None and x.shape[:2] == real.shape:
        x = x[real]
    return x.reshape(-1, x.shape[-1] if x.ndim > 1 and x.shape[-1] else 1)
