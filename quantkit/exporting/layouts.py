"""Whose loaders a decoder graph is for: `transformers` as exported, `optimum` with its positions.

optimum-onnx 0.1.0's `ORTModelForCausalLM` loads our graphs as they are: file names and the names of
tokens, mask and cache are its own. One input is missing: its own exports take `position_ids`, which
it counts from a sequence's first real token. Ours count from the length of the cache. With rotary
embeddings the two agree; a model with a table of positions (GPT-2) needs the input as soon as a
batch is padded on the left, as `generate` pads it.

Before: positions are the numbers behind the cache's length, the same for every sequence. After:
they are the input `position_ids` [batch, sequence]; the causal mask still counts from the cache.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

from quantkit.errors import InputError
from quantkit.exporting.graphs import constant, remove_unused_initializers
from quantkit.jobs.choices import LAYOUTS

POSITIONS: Final = "position_ids"
_TRANSFORMERS, _OPTIMUM = LAYOUTS
_AXES: Final = ((0,), (0, 2))
"""Where positions get their other axes: `[1, sequence]` for a table, `[1, sequence, 1]` for angles.
The causal mask's become `[1, 1, sequence]`."""


def apply_layout(model: ir.Model, layout: str) -> None:
    """Rewrites the graph in place, so that the inputs are those of one of `LAYOUTS`.

    Raises:
        InputError: an unknown layout, or a graph without positions that follow the cache.
    """
    if layout not in LAYOUTS:
        raise InputError(f"expected a layout of {' or '.join(LAYOUTS)}, got {layout!r}.")
    if layout == _OPTIMUM:
        take_positions(model)


def take_positions(model: ir.Model) -> None:
    """Makes `position_ids` [batch, sequence] an input; a graph that has it is left as it is.

    Raises:
        InputError: no tokens among the inputs, or no positions that follow the cache.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    if POSITIONS in inputs:
        return
    ids = inputs.get("input_ids")
    found = _positions(model)
    if ids is None or not found:
        raise InputError(
            "--layout optimum makes positions an input, and this graph has none that follow its "
            "cache: expected a decoder as `quantkit export` traces it. Use --layout transformers."
        )
    positions = ir.Value(name=POSITIONS, shape=ids.shape, type=ir.TensorType(ir.DataType.INT64))
    after = 1 + max(
        index
        for index, value in enumerate(model.graph.inputs)
        if value.name in ("input_ids", "attention_mask")
    )
    model.graph.inputs.insert(after, positions)
    for node, axes in found:
        old = node.outputs[0]
        new = positions
        if axes != (0,):
            last = constant(
                model, f"{old.name}/last_axis", np.asarray([axes[1]]), ir.DataType.INT64
            )
            unsqueeze = ir.node(
                "Unsqueeze", [positions, last], name=f"{old.name}/{POSITIONS}", metadata_props={}
            )
            new = unsqueeze.outputs[0]
            new.name, new.type = f"{old.name}/by_sequence", old.type
            new.shape = old.shape
            model.graph.insert_before(node, unsqueeze)
        ir.convenience.replace_all_uses_with(old, new)
        model.graph.remove(node, safe=True)
        _widen(new, positions)
    remove_unused_initializers(model)


def _positions(model: ir.Model) -> list[tuple[ir.Node, tuple[int, ...]]]:
    """Returns the nodes that shape positions for a table or for angles, with the axes they add."""
    found: list[tuple[ir.Node, tuple[int, ...]]] = []
    for node in model.graph:
        if node.op_type != "Unsqueeze" or node.inputs[0] is None or node.inputs[1] is None:
            continue
        axes = node.inputs[1].const_value
        if axes is None or not _follows_cache(node.inputs[0].producer()):
            continue
        added = tuple(int(axis) for axis in axes.numpy())
        if added in _AXES:
            found.append((node, added))
    return found


def _follows_cache(node: ir.Node | None) -> bool:
    """Whether a node adds a number to 0, 1, 2, ...: the length of the cache to new tokens."""
    if node is None or node.op_type != "Add":
        return False
    makers = [value.producer() for value in node.inputs if value is not None]
    return any(maker is not None and maker.op_type == "Range" for maker in makers)


def _widen(value: ir.Value, like: ir.Value) -> None:
    """Writes the batch where a value's shape, and that of what is made from it, says 1."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        is_one = each.shape is not None and len(each.shape) > 1 and each.shape[0] == 1
        if is_one and each.shape is not None and like.shape is not None:
            each.shape = ir.Shape([like.shape[0], *each.shape[1:]])
        if is_one or each is like:
            waiting.extend(output for node, _ in each.uses() for output in node.outputs)
