"""Sums as the rows of `diagnosis.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quantkit.exporting.diagnosis.compared import Comparison, Row
from quantkit.exporting.diagnosis.error_sums import ErrorSums
from quantkit.exporting.diagnosis.paired_tensors import layer_of
from quantkit.exporting.diagnosis.quantized_weights import weight_grid
from quantkit.results import QuantizerDiagnosis, TensorError


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What quantizers cost alone, by key, and each one's share of the sum."""

    cost: Mapping[int, float]
    share: Mapping[int, float]

    @staticmethod
    def of(cost: Mapping[int, float]) -> Alone:
        """Returns costs with their shares; those that are infinite share it all."""
        infinite = [key for key, value in cost.items() if math.isinf(value)]
        if infinite:
            share = {key: (key in infinite) / len(infinite) for key in cost}
        else:
            total = sum(cost.values())
            share = {key: value / total if total else 0.0 for key, value in cost.items()}
        return Alone(cost=cost, share=share)


def quantizer_rows(found: Comparison, alone: Alone) -> list[QuantizerDiagnosis]:
    """Returns one row a quantizer, in the order of the quantized graph, weights last."""
    arriving = {
        str(pair.value.name): sums.inlier_sqnr_db
        for pair, sums in zip(found.pairs, found.errors, strict=True)
    }
    return [_row(row, alone, arriving.get(row.tensor, math.nan)) for row in found.rows]


def tensor_rows(model: ir.Model, found: Comparison) -> list[TensorError]:
    """Returns one row a tensor that both graphs show, in the order of the float graph."""
    worst: dict[ir.Value, float] = {}
    sums = {pair.value: sums for pair, sums in zip(found.pairs, found.errors, strict=True)}
    jumps: dict[ir.Value, float] = {}
    for node in model.graph:
        arriving = max((worst.get(v, 0.0) for v in node.inputs if v is not None), default=0.0)
        for value in node.outputs:
            own = sums.get(value)
            if own is None or not own.count:
                worst[value] = arriving
                continue
            worst[value] = own.relative
            jumps[value] = own.relative / arriving if arriving else math.inf
    return [
        TensorError(
            name=str(pair.value.name),
            quantized_name=str(pair.quantized.name),
            op=pair.node.op_type,
            layer=layer_of(pair.node),
            sqnr_db=own.sqnr_db,
            inlier_sqnr_db=own.inlier_sqnr_db,
            relative_error=own.relative,
            cosine=own.cosine,
            jump=jumps[pair.value],
            elements=own.count,
        )
        for pair, own in zip(found.pairs, found.errors, strict=True)
        if own.count
    ]


def _row(row: Row, alone: Alone, arriving_db: float) -> QuantizerDiagnosis:
    scales = _scales(row)
    sums = row.grid.errors if row.grid is not None else None
    sums = row.dynamic.errors if row.dynamic is not None else sums
    local = local_inliers = math.nan
    if sums is not None and sums.count:
        local, local_inliers = sums.sqnr_db, sums.inlier_sqnr_db
    if row.weight is not None:
        local = row.weight.sqnr_db
    known = sums is not None and sums.count > 0
    assert sums is not None or row.grid is None  # a grid has sums
    wide, wasted, visible = math.nan, math.nan, math.nan
    lo = hi = math.nan
    below = above = hidden = math.nan
    levels = used = 0
    if row.grid is not None:
        lo, hi = row.grid.ends
        wide = hi - lo
        levels = row.grid.qmax - row.grid.qmin + 1 if row.grid.qmax > row.grid.qmin else 0
        used = int(row.grid.used.sum())
    if row.grid is not None and sums is not None and known:
        span = sums.span_hi - sums.span_lo
        with np.errstate(all="ignore"):
            wasted = float(np.log2(np.float64(wide) / np.float64(span)))
            visible = float(np.float64(sums.hi - sums.lo) / np.float64(wide))
        below, above = row.grid.below / sums.count, row.grid.above / sums.count
        hidden = row.grid.hidden / (sums.count + row.grid.hidden)
    extremes = (sums.lo, sums.hi) if sums is not None and known else (math.nan, math.nan)
    if row.grid is not None and known:
        extremes = (row.grid.lo, row.grid.hi)
    if row.weight is not None:
        extremes = (row.weight.lo, row.weight.hi)
    quantizer = row.quantizer
    node = row.weight_pair.product.node if row.weight_pair is not None else None
    return QuantizerDiagnosis(
        name=quantizer.name if quantizer is not None else f"{row.layer}/weight",
        op=quantizer.op if quantizer is not None else ("" if node is None else node.op_type),
        tensor=row.tensor,
        layer=row.layer,
        place=row.place,
        kind=_kind(row),
        dtype=scales.dtype,
        granularity=scales.granularity,
        scale_min=scales.lo,
        scale_max=scales.hi,
        zero_point_min=scales.zero_lo,
        zero_point_max=scales.zero_hi,
        lo=lo,
        hi=hi,
        tensor_min=extremes[0],
        tensor_max=extremes[1],
        span_lo=sums.span_lo if sums is not None and known else math.nan,
        span_hi=sums.span_hi if sums is not None and known else math.nan,
        wasted_bits=wasted,
        median_steps=_median_steps(sums, scales.hi),
        below_frac=below,
        above_frac=above,
        levels_used=used,
        levels=levels,
        hidden_frac=hidden,
        visible_frac=visible,
        local_sqnr_db=local,
        local_inlier_sqnr_db=local_inliers,
        arriving_sqnr_db=arriving_db,
        worst_channel=-1 if row.weight is None else row.weight.worst_channel,
        worst_channel_sqnr_db=math.nan if row.weight is None else row.weight.worst_channel_sqnr_db,
        alone=alone.cost.get(row.key, math.nan),
        share=alone.share.get(row.key, math.nan),
    )


def _median_steps(sums: ErrorSums | None, scale: float) -> float:
    if sums is None or not sums.count or not scale > 0.0:
        return math.nan
    return sums.median_abs / scale


@dataclass(frozen=True, kw_only=True)
class _Scales:
    dtype: str
    granularity: str
    lo: float
    hi: float
    zero_lo: int
    zero_hi: int


def _scales(row: Row) -> _Scales:
    if row.dynamic is not None:
        lo, hi = row.dynamic.scale_min, row.dynamic.scale_max
        return _Scales(dtype="UINT8", granularity="call", lo=lo, hi=hi, zero_lo=0, zero_hi=0)
    if row.weight_pair is not None:
        grid = weight_grid(row.weight_pair.product)
        scale, zero, dtype = grid.scale, grid.zero_point, grid.dtype
        blocked = scale is not None and (row.weight_pair.product.weight_kind == "blocks")
        blocked = blocked or (scale is not None and scale.ndim > 1)
    else:
        assert row.quantizer is not None  # a row is one or the other
        scale, zero, dtype = row.quantizer.scale, row.quantizer.zero_point, row.quantizer.dtype
        blocked = row.quantizer.blocked
    if scale is None:
        nan = math.nan
        return _Scales(dtype=dtype, granularity="", lo=nan, hi=nan, zero_lo=0, zero_hi=0)
    many = "group" if blocked else "channel"
    zeros = np.zeros(1, np.int64) if zero is None else np.asarray(zero, np.int64)
    return _Scales(
        dtype=dtype,
        granularity=many if scale.size > 1 else "tensor",
        lo=float(scale.min()),
        hi=float(scale.max()),
        zero_lo=int(zeros.min()),
        zero_hi=int(zeros.max()),
    )


def _kind(row: Row) -> str:
    if row.weight_pair is not None:
        return "weight"
    static = row.quantizer is not None and row.quantizer.scale is not None
    return "static" if static else "dynamic"
