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
from quantkit.exporting.forced_attention import ForcedAttention
from quantkit.exporting.graphs import save_graph, scopes_of
from quantkit.exporting.parity import QUANTIZED_GATE, Batch, Gate, compare_logits
from quantkit.exporting.rewrite_cache import PREFIXES
from quantkit.exporting.rewrite_tokens import UNIT
from quantkit.models import attention_modules, layout_of
from quantkit.onnx_runtime import open_decoder
from quantkit.probes import Activation, attach
from quantkit.quantization import (
    Counter,
    fake_quantized,
    input_quantizer,
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
    """Where a quantized tensor can be read: integers with their grid, or the real values.

    Attributes:
        unit: Output with the range `[..., 1]` by which the graph divided before the grid; None:
            it did not.
    """

    output: str
    scale: Tensor
    zero_point: Tensor
    is_integer: bool
    unit: str | None = None

    def real(self, arrays: Mapping[str, Any]) -> Tensor:
        """Returns the real numbers that the integers stand for."""
        values = torch.from_numpy(np.asarray(arrays[self.output]))
        if not self.is_integer:
            return values.float() if self.unit is None else values.float() * self._unit(arrays)
        return (values.to(torch.int32) - self.zero_point).float() * self.step(arrays)

    def step(self, arrays: Mapping[str, Any]) -> Tensor:
        """Returns the distance of two integers, to be broadcast with `real`."""
        return self.scale if self.unit is None else self.scale * self._unit(arrays)

    def _unit(self, arrays: Mapping[str, Any]) -> Tensor:
        return torch.from_numpy(np.asarray(arrays[str(self.unit)])).float()

    @property
    def outputs(self) -> tuple[str, ...]:
        """All that has to be read."""
        return (self.output,) if self.unit is None else (self.output, self.unit)


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
    points: dict[str, Any] = {}

    def tap(name: str) -> tuple[Tensor, Tensor]:
        if name not in taps:
            raise InputError(f"the graph holds no quantizer {name!r}, which the recipe asks for.")
        real = taps[name].real(arrays)
        return real, taps[name].step(arrays).broadcast_to(real.shape)

    if recipe.activations is not None:
        quantizer = input_quantizer(recipe.activations, ranges, Counter())

        def force_input(visit: Activation) -> Tensor | None:
            name = f"linear_input/{visit.name}"
            if name in keep:
                return None
            ours = quantizer(visit)
            # a Gemm has all tokens in one axis
            theirs, step = (part.reshape(ours.shape) for part in tap(name))
            real = visit.real[..., None].expand_as(ours)
            steps.append(_steps(name, ((ours - theirs) / step)[real]))
            return theirs

        points["linear_input"] = force_input
    if recipe.logits is not None or recipe.cache is not None:
        attention = ForcedAttention(
            recipe=recipe,
            ranges=ranges,
            keep=keep,
            parts={
                layer: layout_of(module).calls_per_layer
                for layer, (_, module) in enumerate(attention_modules(model))
            },
            tap=tap,
            record=lambda name, distance: steps.append(_steps(name, distance)),
        )
        points["attention_logit"] = attention.edit
        if recipe.cache is not None:
            points["attention_value"] = attention.value
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
    wanted = sorted({output for tap in taps.values() for output in tap.outputs})
    decoder = open_decoder(path, extra_outputs=wanted)
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
            # a cache's integers are an output already, which the decoder's layout counts as such
            is_integer = integers.dtype in _READABLE and not integers.is_graph_output()
            value = integers if is_integer else node.outputs[0]
            unit = _unit_of(node)
            scale, zero_point = (_constant(node.inputs[index]) for index in (1, 2))
            axis = node.attributes.get_int("axis", 1)
            shape = [-1 if i == axis else 1 for i in range(4)] if scale.dim() == 1 else []
            taps.setdefault(
                name,
                _Tap(
                    output=str(value.name),
                    scale=scale.float().reshape(shape),
                    zero_point=zero_point.to(torch.int32).reshape(shape),
                    is_integer=is_integer,
                    unit=None if unit is None else str(unit.name),
                ),
            )
            for read in (value, unit) if taps[name].output == value.name else ():
                if read is not None and read.name not in added:
                    added.add(str(read.name))
                    model.graph.outputs.append(read)
    return taps


def _quantize_of(node: ir.Node) -> ir.Node | None:
    """Returns the QuantizeLinear whose integers this DequantizeLinear turns back."""
    producer = node.inputs[0].producer() if node.inputs[0] is not None else None
    while producer is not None and producer.op_type != "QuantizeLinear":
        first = producer.inputs[0]
        producer = first.producer() if first is not None else None
    return producer


def _unit_of(node: ir.Node) -> ir.Value | None:
    """Returns the range by which a dynamic rewrite divides, of a token or of logits, if it did."""
    divided = _quantize_of(node)
    while divided is not None and divided.op_type in ("QuantizeLinear", "Max", "Min"):
        source = divided.inputs[0]  # of Max and Min: the clip of a grid below 4 or 16 bits
        divided = None if source is None else source.producer()
    if divided is None or not (divided.name or "").endswith(UNIT):
        return None
    return divided.inputs[1]


def _quantizer_names(node: ir.Node, modules: set[str]) -> list[str]:
    """Returns the names of the quantizers that end in this DequantizeLinear."""
    if (node.name or "").startswith(PREFIXES):
        return [str(node.name).removesuffix("/dequantize")]
    producer = _quantize_of(node)
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
