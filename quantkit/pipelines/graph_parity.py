"""What `export FILE.onnx` says of a graph: gates that it met, and what quantization cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from quantkit.exporting.grid_proof import GridProof
from quantkit.exporting.measure import accuracy_of_scores
from quantkit.exporting.output_agreement import OutputAgreement, OutputSums
from quantkit.exporting.parity import FLOAT_GATE
from quantkit.onnx_runtime import GraphBatch
from quantkit.results import Accuracy, Parity

FLOAT_REFERENCE: Final = "the float graph in ONNX Runtime"
LOGITS: Final = "logits"
"""The output whose largest entry is what a client reads."""


def output_entries(found: OutputAgreement, reference: str, *, is_float: bool) -> list[Parity]:
    """Returns one entry an output. What quantization moved is no parity: it has to be finite.

    The largest entry of a row means something where it is chosen: in logits, not in features or in
    a cache, where near ties are many.
    """
    entries = []
    for name, sums in found.outputs.items():
        is_close = sums.cosine >= FLOAT_GATE.cosine and (
            name != LOGITS or sums.top1_agreement >= FLOAT_GATE.top1_agreement
        )
        noise = "no difference" if sums.error == 0.0 else f"SQNR {sums.sqnr_db:.1f} dB"
        passed = sums.is_finite and (is_close or not is_float)
        entries.append(
            _entry(f"{reference}: output {name}, {noise}", sums, found.shape, passed=passed)
        )
    return entries


def proof_entries(proofs: Sequence[GridProof], sample: GraphBatch) -> list[Parity]:
    """Returns one entry for weights, inputs and products each; none where nothing is quantized."""
    shape = next(iter(sample.feeds.values())).shape
    return [
        _entry(f"numpy's grids: {proof.said}", proof.sums, shape, passed=proof.passed)
        for proof in proofs
    ]


def _entry(reference: str, sums: OutputSums, shape: tuple[int, ...], *, passed: bool) -> Parity:
    return Parity(
        reference=reference,
        batch=shape[0] if shape else 0,
        seq_len=shape[1] if len(shape) == 2 else 0,
        cached=0,
        max_abs=sums.max_abs,
        cosine=sums.cosine,
        top1_agreement=sums.top1_agreement,
        passed=passed,
    )


def accuracy_of(found: OutputAgreement, seed: int) -> Accuracy | None:
    """Returns the perplexity of a language model, else the cosine of the worst output."""
    if found.is_language_model:
        before = (found.float_nll, found.predicted)
        behind = (found.quantized_nll, found.predicted)
        return accuracy_of_scores(before, behind, seed)
    cosines = [sums.cosine for sums in found.outputs.values()]
    if not cosines or not math.isfinite(min(cosines)):
        return None
    worst = min(cosines)
    return Accuracy(
        metric="cosine", float=1.0, quantized=worst, change=worst - 1.0, loss=1.0 - worst
    )
