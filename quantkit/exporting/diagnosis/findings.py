"""From figures to a ranked list: what is wrong, how much of the damage it is, and what to try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from quantkit.exporting.diagnosis.error_sums import NEGLIGIBLE
from quantkit.results import Finding, QuantizerDiagnosis
from quantkit.results.diagnosis import Severity

FLOOR: Final = {"kl": 0.01, "relative": 1e-3}
"""Damage below which a quantizer that works as meant is not blamed: 1 % of perplexity, or 30 dB."""
SHARE: Final = 0.01
SATURATED: Final = 1e-3
"""Share of elements beyond the grid from which on they, and not its steps, are the trouble."""
WASTED: Final = 2.0
"""Bits of the grid that 99.9 % of the elements leave unused, from which on they are named."""
COARSE: Final = 2.0
"""Steps up to the median |x|, below which half of all elements fall on five levels or fewer."""
WIDE: Final = 2.0
"""Width of the grid over that of all that the tensor holds, from which on the range is wrong."""
VISIBLE: Final = 0.25
"""Share of the grid that logits have to span, or the mask has the rest."""
_UNHEARD_DB: Final = 20.0
"""Local error of a quantizer whose damage was not measured, from which on it is named."""
QDQ_OPSET: Final = 21
"""The first one whose QuantizeLinear has 4- and 16-bit types."""
_ORDER: Final = ("broken", "costly", "note")
_SUBNORMAL: Final = float(np.finfo(np.float32).tiny)
_ALONE: Final = {"kl": "alone {:.3g} nats", "relative": "alone {:.3g} of the output's energy"}


def findings_of(
    quantizers: Sequence[QuantizerDiagnosis],
    *,
    metric: str,
    in_float: Sequence[str],
    weight_only: Sequence[str],
    domains: Mapping[str, Sequence[str]],
    opset: int,
    products: int,
) -> list[Finding]:
    """Returns all findings: what is broken, what costs most, then notes.

    Args:
        in_float, weight_only: Layers, of `products` in all.
        domains: Operators of each domain that is not ONNX's.
    """
    found = [f for q in quantizers if (f := _finding(q, metric)) is not None]
    found.sort(key=lambda f: (_ORDER.index(f.severity), -_weight(f.share)))
    if in_float:
        found.append(
            _note(
                "in_float", in_float[0],
                f"{len(in_float)} of {products} layers with constant weights have no quantizer: "
                f"{_listed(in_float)}",
                "quantize them, or list them as left in float on purpose",
            )
        )  # fmt: skip
    if weight_only:
        found.append(
            _note(
                "weight_only", weight_only[0],
                f"{len(weight_only)} of {products} layers have quantized weights and float inputs",
                "as meant, or quantize their inputs too: only then products are of integers",
            )
        )  # fmt: skip
    for domain, operators in domains.items():
        found.append(
            _note(
                "domain", domain,
                f"{len(operators)} nodes of domain {domain}: {_listed(sorted(set(operators)))}",
                _domain_advice(opset, operators),
            )
        )  # fmt: skip
    return found


def _finding(q: QuantizerDiagnosis, metric: str) -> Finding | None:
    where = f"{q.place} of {q.layer}"
    broken = _broken(q)
    if broken is not None:
        kind, what, advice = broken
        return _made("broken", kind, where, q, f"{what}{_cost(q, metric)}", advice)
    heard = q.alone >= FLOOR[metric] and q.share >= SHARE
    if math.isnan(q.alone):
        level = q.local_sqnr_db if q.kind == "weight" else q.local_inlier_sqnr_db
        heard = level < _UNHEARD_DB
    if not heard:
        return None
    kind, what, advice = _cause(q)
    return _made("costly", kind, where, q, f"{what}{_cost(q, metric)}", advice)


def _broken(q: QuantizerDiagnosis) -> tuple[str, str, str] | None:
    """Returns (kind, what, advice) of what is wrong whatever it costs."""
    word = _bad_scale(q)
    if word == "infinite" and q.place == "logits":
        return (
            "mask",
            "the scale is infinite: the mask's -inf was calibrated as a value",
            "quantize before the mask, or calibrate without what it hides",
        )
    if word:
        return (
            "scale",
            f"the scale is {word}",
            "calibrate it anew: what it was calibrated on was empty, constant or not finite",
        )
    has_mask = q.tensor_min < q.span_lo - NEGLIGIBLE
    if has_mask and q.hidden_frac > 0.0 and q.visible_frac < VISIBLE and q.span_hi > q.span_lo:
        return (
            "mask",
            f"a mask of {q.tensor_min:.4g} lies inside {_range(q)}: the logits that count fall on "
            f"{q.levels_used} of {q.levels} levels",
            "quantize before the mask, or calibrate without what it hides",
        )
    return None


def _bad_scale(q: QuantizerDiagnosis) -> str:
    """Returns what is wrong with the scales, "" where nothing is or where the graph finds them."""
    if q.kind == "dynamic" or not q.granularity:
        return ""
    ends = (q.scale_min, q.scale_max)
    if any(math.isnan(x) for x in ends):
        return "NaN"
    if any(math.isinf(x) for x in ends):
        return "infinite"
    if q.scale_min <= 0.0:
        return "zero" if q.scale_min == 0.0 else "negative"
    return "subnormal" if q.scale_min < _SUBNORMAL else ""


def _cause(q: QuantizerDiagnosis) -> tuple[str, str, str]:
    """Returns (kind, what, advice) of a quantizer that works as meant and costs much."""
    if q.kind == "weight":
        return (
            "weight",
            f"its worst output channel, {q.worst_channel}, keeps {q.worst_channel_sqnr_db:.1f} dB, "
            f"the whole {q.local_sqnr_db:.1f} dB, with a scale a {q.granularity}",
            "a scale for each output channel, or groups"
            if q.granularity == "tensor"
            else "smaller groups, more bits, or leave this weight in float",
        )
    if q.kind == "dynamic":
        return (
            "outliers",
            f"one range for all tokens of a call, and 99.9 % of them lie in {_span(q)} of "
            f"{q.tensor_min:.4g} .. {q.tensor_max:.4g}",
            "leave this input in float, a range for each token, or smooth it into the weights",
        )
    outside = q.below_frac + q.above_frac
    width, whole = q.hi - q.lo, q.tensor_max - q.tensor_min
    if outside >= SATURATED:
        return (
            "saturation",
            f"{q.below_frac:.2%} lie below and {q.above_frac:.2%} above {_range(q)}; the tensor "
            f"goes from {q.tensor_min:.4g} to {q.tensor_max:.4g}",
            "calibrate on data like these, or with a method that clips less",
        )
    if whole > 0.0 and width > WIDE * whole:
        return (
            "wide_range",
            f"{_range(q)} is {width / whole:.3g} times as wide as the tensor, "
            f"{q.tensor_min:.4g} .. {q.tensor_max:.4g}: {q.wasted_bits:.1f} bits wasted",
            "calibrate on data like these: what stretched the range is not in them",
        )
    if q.hidden_frac > 0.0 and q.place == "logits":
        return (
            "hidden",
            f"the logits that count span {q.visible_frac:.0%} of {_range(q)}: masked positions "
            f"and outliers have the rest; {q.levels_used} of {q.levels} levels are used",
            "calibrate on unmasked positions only, with a scale a head, or leave it in float",
        )
    if q.wasted_bits >= WASTED or q.median_steps < COARSE:
        advice = "leave this input in float, smooth it into the weights, or a range for each token"
        return (
            "outliers",
            f"99.9 % of it lie in {_span(q)}, the range is {q.lo:.4g} .. {q.hi:.4g}: "
            f"{q.wasted_bits:.1f} bits wasted; the median is {q.median_steps:.2g} steps from 0",
            advice if q.place == "input" else "leave it in float, or calibrate with mse",
        )
    return (
        "rounding",
        f"its steps of {q.scale_max:.3g} leave {q.local_inlier_sqnr_db:.1f} dB",
        "leave it in float, or give it more bits",
    )


def _made(
    severity: Severity, kind: str, where: str, q: QuantizerDiagnosis, what: str, advice: str
) -> Finding:
    return Finding(
        severity=severity,
        kind=kind,
        where=where,
        quantizer=q.name,
        share=q.share,
        what=what,
        advice=advice,
    )


def _note(kind: str, where: str, what: str, advice: str) -> Finding:
    return Finding(
        severity="note",
        kind=kind,
        where=where,
        quantizer="",
        share=math.nan,
        what=what,
        advice=advice,
    )


def _domain_advice(opset: int, operators: Sequence[str]) -> str:
    if opset < QDQ_OPSET and any("Linear" in operator for operator in operators):
        return f"opset {opset} has no 4- and 16-bit QuantizeLinear: write the model at {QDQ_OPSET}"
    return "only ONNX Runtime runs them; for other runtimes write ONNX's own operators"


def _weight(share: float) -> float:
    """Returns what to sort by: an output that is not finite first, what is unknown last."""
    return -1.0 if math.isnan(share) else share


def _range(q: QuantizerDiagnosis) -> str:
    return f"the range {q.lo:.4g} .. {q.hi:.4g}"


def _span(q: QuantizerDiagnosis) -> str:
    return f"{q.span_lo:.4g} .. {q.span_hi:.4g}"


def _cost(q: QuantizerDiagnosis, metric: str) -> str:
    return "" if math.isnan(q.alone) else f"; {_ALONE[metric].format(q.alone)}"


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
