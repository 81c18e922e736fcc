"""The KV cache of a graph as int8: what it takes, keeps and returns are integers of a static grid.

Before: `past`, float, and this call's keys or values are joined and attended to. After: `past` is
int8, the new ones are quantized behind RoPE, joined to it, and turned back for attention. So a
prompt already computes with what a later call will find in the cache, as the simulation does, and a
cache takes a quarter of the memory. Its owner needs no scale: the graph holds it.

A differential layer's maps have key heads of their own, each on its map's grid. Its values are
attended to in halves of their heads, which the model repeats: a quantizer each, of half the heads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.exporting.graphs import constant
from quantkit.numerics.affine import QParams
from quantkit.quantization.grids import cache_grid, cache_range_name
from quantkit.recipe import CacheQuant
from quantkit.results import QuantizerInfo, Range

PREFIXES: Final = ("cache_key/", "cache_value/")
"""How the names of these quantizers begin."""
_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheValue:
    """One tensor of a graph's cache, `[batch, heads, token, width]`.

    Attributes:
        kind: `key` or `value`.
        past: The input.
        join: The Concat that adds this call's tokens and whose result is an output.
    """

    layer: int
    kind: str
    heads: int
    width: int
    past: ir.Value
    join: ir.Node


def find_cache(model: ir.Model) -> list[CacheValue]:
    """Returns every tensor of the cache, in the order of the graph's inputs.

    Raises:
        InputError: no input `past_key_values.<layer>.key|value`, or one that the graph does more
            with than add new tokens.
    """
    found: list[CacheValue] = []
    for past in model.graph.inputs:
        match = _PAST.fullmatch(past.name or "")
        if match is None:
            continue
        readers = [user for user, _ in past.uses() if user.op_type != "Shape"]
        shape = past.shape if past.shape is not None and len(past.shape) == 4 else [None] * 4
        heads, width = shape[1], shape[3]
        if (
            [(user.op_type, user.inputs[0] is past, len(user.inputs)) for user in readers]
            != [("Concat", True, 2)]
            or not readers[0].outputs[0].is_graph_output()
            or not isinstance(heads, int)
            or not isinstance(width, int)
        ):
            raise InputError(
                f"cache input {past.name!r}: expected heads and a width that are fixed, and a "
                "Concat of it and the new tokens that is an output; write the recipe without kv8."
            )
        found.append(
            CacheValue(
                layer=int(match[1]),
                kind=match[2],
                heads=heads,
                width=width,
                past=past,
                join=readers[0],
            )
        )
    if not found:
        raise InputError(
            "the graph has no input past_key_values.<layer>.key: no cache to quantize."
        )
    return found


def quantize_cache(
    model: ir.Model,
    quant: CacheQuant,
    ranges: Mapping[str, Range],
    keep: Collection[str] = (),
) -> list[QuantizerInfo]:
    """Rewrites every tensor of the cache in place; returns its quantizers, as the simulation's.

    They are `cache_key/<layer>/map <n>` and `cache_value/<layer>`, with `/part 2` where a layer
    attends twice; how many of them there are is what `ranges` knows.

    Args:
        keep: Names that stay in float; those of one tensor all or none.

    Raises:
        InputError: not static 8 bits; a range that is missing, was chosen for another grid or is of
            other heads; a cache that cannot be rewritten; a name to keep that is not in the graph,
            or that shares a tensor with one that is not kept.
    """
    if quant.range != "static" or quant.bits != 8:
        raise InputError(
            f"a graph takes a cache of 8 bits with static ranges, got {str(quant)!r}: write "
            "kv8:static."
        )
    infos: list[QuantizerInfo] = []
    known: list[str] = []
    for cached in find_cache(model):
        names = _names(cached, ranges)
        known += names
        if _is_kept(names, keep):
            continue
        grids = _grids(cached, names, quant, ranges)
        _rewrite(model, cached, grids)
        infos += [
            QuantizerInfo(
                name=name,
                qtype=str(grid.qtype),
                granularity=quant.granularity,
                scale_min=float(grid.scale.min()),
                scale_max=float(grid.scale.max()),
                hits=1,
            )
            for name, grid in zip(names, grids, strict=True)
        ]
    unknown = [name for name in keep if name.startswith(PREFIXES) and name not in known]
    if unknown:
        raise InputError(
            f"to keep in float: {unknown[0]!r} is none of the graph's {len(known)} tensors of the "
            f"cache, {known[0]!r} to {known[-1]!r}."
        )
    return infos


def _names(cached: CacheValue, ranges: Mapping[str, Range]) -> list[str]:
    """Returns the quantizers of one tensor: the first, and all that ranges know beside it."""
    base = f"cache_{cached.kind}/{cached.layer}"
    word = "map" if cached.kind == "key" else "part"
    names = [f"{base}/map 1" if cached.kind == "key" else base]
    while cache_range_name(more := f"{base}/{word} {len(names) + 1}") in ranges:
        names.append(more)
    return names


def _is_kept(names: list[str], keep: Collection[str]) -> bool:
    kept = [name for name in names if name in keep]
    rest = [name for name in names if name not in keep]
    if kept and rest:
        raise InputError(
            f"{kept[0]!r} cannot stay in float alone: the graph holds it in one tensor with "
            f"{rest[0]!r}. Keep that too, or neither."
        )
    return bool(kept)


def _grids(
    cached: CacheValue, names: list[str], quant: CacheQuant, ranges: Mapping[str, Range]
) -> list[QParams]:
    """Returns the grid of each quantizer, for one number or each of its heads in the tensor."""
    each, rest = divmod(cached.heads, len(names))
    if rest:
        raise InputError(
            f"{cached.past.name!r} has {cached.heads} heads, not as many for each of "
            f"{', '.join(names)}: calibrate this model."
        )
    repeated = len(names) if cached.kind == "value" else 1
    grids: list[QParams] = []
    for name in names:
        grid = cache_grid(ranges, name, quant, heads=each * repeated)
        if grid.scale.numel() > 1 and repeated > 1:
            grid = _of_own_heads(grid, repeated, name)
        grids.append(grid)
    return grids


def _of_own_heads(grid: QParams, times: int, name: str) -> QParams:
    """Returns the grid of heads that the model repeats so many times, once each."""
    scales, zeros = (part.reshape(times, -1) for part in (grid.scale, grid.zero_point))
    if not (bool((scales == scales[0]).all()) and bool((zeros == zeros[0]).all())):
        raise InputError(
            f"{cache_range_name(name)!r} has two ranges for one head of the cache, which the model "
            "repeats: calibrate this model."
        )
    return QParams(scale=scales[0], zero_point=zeros[0], qtype=grid.qtype)


def _rewrite(model: ir.Model, cached: CacheValue, grids: list[QParams]) -> None:
    """Puts Q in front of the Concat and DQ behind it; who asks for a shape reads the integers."""
    name, new = f"cache_{cached.kind}/{cached.layer}", cached.join.inputs[1]
    assert new is not None  # a Concat's inputs are not optional
    present, qtype = cached.join.outputs[0], grids[0].qtype
    readers = [(user, index) for user, index in present.uses() if user.op_type != "Shape"]
    axis, scale, zero_point = _along_axis(cached, grids)
    parameters = [
        constant(model, f"{name}/scale", scale, ir.DataType.FLOAT),
        constant(model, f"{name}/zero_point", zero_point, ir.DataType.INT8),
    ]
    along = {"axis": axis}
    nodes = [ir.node("QuantizeLinear", [new, *parameters], along, name=f"{name}/quantize")]
    if qtype.narrow:
        bounds = [
            constant(model, f"{name}/{end}", np.asarray(bound), ir.DataType.INT8)
            for end, bound in (("qmin", qtype.qmin), ("qmax", qtype.qmax))
        ]
        nodes.append(ir.node("Clip", [nodes[0].outputs[0], *bounds], name=f"{name}/clip"))
    for node in nodes:
        _describe(node, new, ir.DataType.INT8)
    model.graph.insert_before(cached.join, nodes)
    cached.join.replace_input_with(1, nodes[-1].outputs[0])
    for value in (cached.past, present):
        value.type = ir.TensorType(ir.DataType.INT8)
    whole = ir.node("DequantizeLinear", [present, *parameters], along, name=f"{name}/dequantize")
    _describe(whole, present, ir.DataType.FLOAT)
    model.graph.insert_after(cached.join, whole)
    for user, index in readers:
        user.replace_input_with(index, whole.outputs[0])


def _along_axis(
    cached: CacheValue, grids: list[QParams]
) -> tuple[int, NDArray[np.float32], NDArray[np.int32]]:
    """Returns (axis, scales, zero points): one a head, or one a channel where there is one head.

    Never a single one, though the grid may be: ONNX Runtime 1.32 moves such a DequantizeLinear
    behind the Unsqueeze that repeats heads, makes it one of uint8, and refuses what it wrote.
    """
    scales = [np.broadcast_to(grid.scale.numpy(), cached.heads // len(grids)) for grid in grids]
    zeros = [np.broadcast_to(grid.zero_point.numpy(), len(scales[0])) for grid in grids]
    scale, zero_point = np.concatenate(scales), np.concatenate(zeros)
    if cached.heads > 1:
        return 1, scale, zero_point
    return 3, np.repeat(scale, cached.width), np.repeat(zero_point, cached.width)


def _describe(node: ir.Node, like: ir.Value, dtype: ir.DataType) -> None:
    output = node.outputs[0]
    output.name, output.shape = f"{node.name}_output", like.shape
    output.type = ir.TensorType(dtype)
