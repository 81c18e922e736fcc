"""Parity of a quantized graph, quantizer by quantizer, with the graph's own values fed forward.

Rounding is discontinuous: an input that differs in the last bit of a sum can land on the next step,
and in a model with massive activations one step is enough to move every later token. Two correct
programs therefore part, and so does one from itself: for SmolLM2 in W8A8, `make demo` finds the
torch simulation's top-1 agreement with itself at 61 % once its first layer's output moves by 1e-5
(see `sensitivity`). Comparing outputs end to end measures that chaos, not the graph.

So the graph runs once with its quantized tensors as outputs, and torch runs the same batch: each
quantizer is compared on its own input and then replaced by the graph's tensor. Every quantizer
sees what the graph saw, differences do not pile up, and a wrong scale has nowhere to hide.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from transformers import PreTrainedModel

from quantkit.calibration import WeightRanges
from quantkit.errors import InputError
from quantkit.exporting.graphs import save_graph, scopes_of
from quantkit.exporting.parity import QUANTIZED_GATE, Batch, Gate, compare_logits
from quantkit.onnx_runtime import open_decoder
from quantkit.probes import Activation, AttentionLogits, LogitTile, LogitTransform, attach
from quantkit.quantization import (
    Counter,
    fake_quantized,
    input_quantizer,
    logit_quantizer,
)
from quantkit.recipe import Recipe
from quantkit.results import Parity, Range

ONE_STEP_GATE: Final = 0.9999
"""Least share of a quantizer's values within one step of torch's."""
_READABLE: Final = (
    ir.DataType.INT8,
    ir.DataType.UINT8,
    ir.DataType.INT16,
    ir.DataType.UINT16,
)
"""Integer types that numpy holds; others are read after DequantizeLinear."""
EXACT_GATE: Final = 0.99
"""Least share on the very same step; the rest stood at the tie of two."""


@dataclass(frozen=True, kw_only=True)
class StepAgreement:
    """One quantizer of the graph against torch's on the same input.

    Attributes:
        exact_frac: Share of valid values on the same step.
        one_step_frac: Share at most one step apart.
        max_steps: Largest distance in steps.
    """

    name: str
    elements: int
    exact_frac: float
    one_step_frac: float
    max_steps: float

    @property
    def passed(self) -> bool:
        """Returns False also where nothing was compared."""
        near = self.one_step_frac >= ONE_STEP_GATE
        return self.elements > 0 and near and self.exact_frac >= EXACT_GATE


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tap:
    """Where a quantized tensor can be read: integers with their grid, or the real values."""

    output: str
    scale: Tensor
    zero_point: Tensor
    is_integer: bool

    def real(self, array: Any) -> Tensor:
        values = torch.from_numpy(np.asarray(array))
        if not self.is_integer:
            return values.float()
        return (values.to(torch.int32) - self.zero_point).float() * self.scale


def forced_parity(
    graph: ir.Model,
    model: PreTrainedModel,
    recipe: Recipe,
    ranges: Mapping[str, Range],
    batch: Batch,
    *,
    gate: Gate = QUANTIZED_GATE,
    keep: Collection[str] = (),
    weight_ranges: WeightRanges | None = None,
) -> tuple[Parity, list[StepAgreement]]:
    """Returns the agreement of the outputs and of each quantizer, worst first.

    The parity passes if the outputs meet `gate` and every quantizer the step gates.

    Args:
        graph: The quantized graph; it is not changed.
        keep: Names of quantizers that stay in float, in both.
        weight_ranges: Those that the graph was made with.

    Raises:
        InputError: a quantizer of the recipe that the graph does not hold, by name.
    """
    tapped = graph.clone()
    names = {name for name, _ in model.named_modules()}
    taps = _taps(tapped, names)
    with tempfile.TemporaryDirectory() as folder:
        logits, arrays = _run_tapped(save_graph(tapped, Path(folder)), batch, taps)
    steps: list[StepAgreement] = []
    seen: set[tuple[str, int]] = set()
    points: dict[str, Any] = {}

    def tap(name: str) -> Tensor:
        if name not in taps:
            raise InputError(f"the graph holds no quantizer {name!r}, which the recipe asks for.")
        return taps[name].real(arrays[taps[name].output])

    if recipe.activations is not None:
        quantizer = input_quantizer(recipe.activations, ranges, Counter())

        def force_input(visit: Activation) -> Tensor | None:
            name = f"linear_input/{visit.name}"
            if name in keep:
                return None
            ours = quantizer(visit)
            theirs = tap(name).reshape(ours.shape)  # a Gemm has all tokens in one axis
            real = visit.real[..., None].expand_as(ours)
            steps.append(_compare(name, ours[real], theirs[real], taps[name].scale))
            return theirs

        points["linear_input"] = force_input
    if recipe.logits is not None:
        make = logit_quantizer(recipe.logits, ranges)

        def force_logits(call: AttentionLogits) -> LogitTransform | None:
            if f"attention_logit/{call.layer}/map {call.map}" in keep:
                return None
            name = f"attention_logit/{call.layer}"
            heads = slice((call.map - 1) * call.heads, call.map * call.heads)
            theirs = tap(name)[:, heads]
            transform = make(call)
            scale = taps[name].scale
            scale = scale if scale.numel() == 1 else scale[:, heads]

            def force(tile: LogitTile) -> Tensor:
                rows, keys = tile.logits.shape[2:]
                part = theirs[:, :, tile.start : tile.start + rows, :keys]
                ours = transform(tile)
                valid = tile.valid.expand_as(ours)
                label = f"{name}/map {call.map}"
                distance = (ours - part) / scale
                if (label, tile.start) not in seen:  # a layer may use its logits twice
                    seen.add((label, tile.start))
                    steps.append(_steps(label, distance[valid]))
                return part

            return force

        points["attention_logit"] = force_logits
    weights = Recipe(weights=recipe.weights)
    with (
        torch.inference_mode(),
        fake_quantized(model, weights, keep=keep, weight_ranges=weight_ranges),
        attach(model, points),
    ):
        expected = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), use_cache=False
        ).logits
    agreement = compare_logits(expected, logits, batch.attention_mask)
    parity = Parity(
        reference=f"torch fake-quantized {recipe}, each quantizer fed the graph's values",
        batch=batch.input_ids.shape[0],
        seq_len=batch.input_ids.shape[1],
        cached=0,
        max_abs=agreement.max_abs,
        cosine=agreement.cosine,
        top1_agreement=agreement.top1_agreement,
        passed=gate.passes(agreement) and all(step.passed for step in steps),
    )
    return parity, sorted(steps, key=lambda step: (step.exact_frac, step.name))


def _run_tapped(
    path: Path, batch: Batch, taps: Mapping[str, _Tap]
) -> tuple[Tensor, dict[str, Any]]:
    """Returns (logits, value of each tap's output) of one run with an empty cache."""
    decoder = open_decoder(path, extra_outputs={tap.output for tap in taps.values()})
    wanted = sorted({tap.output for tap in taps.values()})
    ids = batch.input_ids.numpy().astype(np.int64)
    mask = batch.attention_mask.numpy().astype(np.int64)
    values = decoder.run_named([decoder.layout.logits, *wanted], ids, mask)
    return torch.from_numpy(values.pop(decoder.layout.logits)), values


def _taps(model: ir.Model, modules: set[str]) -> dict[str, _Tap]:
    """Adds what can be read to the graph's outputs; returns it by quantizer name."""
    taps: dict[str, _Tap] = {}
    added: set[str] = set()
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or node.inputs[0] is None:
            continue
        integers = node.inputs[0]
        if integers.const_value is not None:  # a weight
            continue
        for name in _quantizer_names(node, modules):
            is_integer = integers.dtype in _READABLE
            value = integers if is_integer else node.outputs[0]
            scale, zero_point = (_constant(node.inputs[index]) for index in (1, 2))
            shape = (1, -1, 1, 1) if scale.dim() == 1 else ()
            taps.setdefault(
                name,
                _Tap(
                    output=str(value.name),
                    scale=scale.float().reshape(shape),
                    zero_point=zero_point.to(torch.int32).reshape(shape),
                    is_integer=is_integer,
                ),
            )
            if taps[name].output == value.name and value.name not in added:
                added.add(str(value.name))
                model.graph.outputs.append(value)
    return taps


def _quantizer_names(node: ir.Node, modules: set[str]) -> list[str]:
    """Returns the names of the quantizers that end in this DequantizeLinear."""
    producer = node.inputs[0].producer() if node.inputs[0] is not None else None
    while producer is not None and producer.op_type != "QuantizeLinear":
        first = producer.inputs[0]
        producer = first.producer() if first is not None else None
    if producer is None or not producer.name:
        return []
    name = producer.name.removesuffix("/quantize")
    if name.startswith("attention_logit/"):
        return [name.split("/call ")[0]]
    readers = [user for user, _ in node.outputs[0].uses()]
    scopes = [[part for part in scopes_of(user) if part in modules] for user in readers]
    return [f"linear_input/{found[-1]}" for found in scopes if found]


def _constant(value: ir.Value | None) -> Tensor:
    assert value is not None and value.const_value is not None  # this package wrote the node
    array = np.array(value.const_value.numpy())
    return torch.from_numpy(array if array.dtype == np.float32 else array.astype(np.int32))


def _compare(name: str, ours: Tensor, theirs: Tensor, scale: Tensor) -> StepAgreement:
    return _steps(name, (ours - theirs) / scale)


def _steps(name: str, distance: Tensor) -> StepAgreement:
    """Returns the agreement of differences in steps, whole numbers up to float32's rounding."""
    whole = distance.double().abs().round()
    count = whole.numel()
    return StepAgreement(
        name=name,
        elements=count,
        exact_frac=float((whole == 0).double().mean()) if count else 0.0,
        one_step_frac=float((whole <= 1).double().mean()) if count else 0.0,
        max_steps=float(whole.max()) if count else float("nan"),
    )
