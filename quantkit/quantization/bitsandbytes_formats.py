"""Weights as bitsandbytes keeps them: NF4 and FP4 blocks, and LLM.int8. Its numbers, not ours.

NF4, FP4 (Dettmers et al. 2023, arXiv 2305.14314): what `Linear4bit` with a compute type of the
model's multiplies with. Blocks run over the weight row after row, across the ends of rows where a
row is no multiple of them; the scales are not quantized again.

LLM.int8 (Dettmers et al. 2022, arXiv 2208.07339, equations 4 to 8): what `Linear8bitLt` does in
inference. How bitsandbytes 0.50 differs from the paper, seen in what it computes:

* Inputs and weights are cast to float16 before they are quantized, whatever their type.
* Features with |x| >= threshold somewhere in the sequence are multiplied in the model's own type,
  but with weights that come back from int8; in the paper those are float16.
* The scale of a row is the absmax of its entries below the threshold, those in float features too.
* Its 1/127^2 on the CPU is a constant that is too large by 1.8e-5 of it.

The one thing that is not bitsandbytes' own: each sequence is a call of its own, of its real tokens
alone. Given a batch, it looks for outlier features over all of it, and a result would depend on
the batch size and on padding.
"""

from __future__ import annotations

import glob
import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from quantkit.errors import InputError, ProbeError
from quantkit.numerics.affine import check_range
from quantkit.probes import Activation, attach
from quantkit.quantization.fired import Counter
from quantkit.quantization.inputs import require_finite
from quantkit.recipe import BitsAndBytes

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class FloatFeatures:
    """What LLM.int8 kept in float at one layer.

    Attributes:
        width: Features of the input.
        sequences: How many were seen.
        kept: Features that reached the threshold, a sum over the sequences.
    """

    width: int
    sequences: int = 0
    kept: int = 0

    @property
    def frac(self) -> float:
        """Share of the features, the mean over sequences; 0 where none was seen."""
        return self.kept / (self.width * self.sequences) if self.sequences else 0.0


def four_bit(matrix: Tensor, quant: BitsAndBytes) -> Tensor:
    """Returns `[out, in]` as it comes back from NF4 or FP4 blocks, in its own type.

    Raises:
        InputError: bitsandbytes is missing.
    """
    functional = _bitsandbytes("functional")
    source = matrix if matrix.dtype in _TYPES else matrix.float()
    # it compiles a part of this for odd shapes, which takes seconds a shape and needs a compiler
    with _quiet(), torch.compiler.set_stance("force_eager"):
        packed, state = functional.quantize_4bit(
            source.contiguous(),
            blocksize=quant.block,
            quant_type=quant.format,
            compress_statistics=False,
        )
        found: Tensor = functional.dequantize_4bit(packed, state)
    return found.to(matrix.dtype)


@contextmanager
def llm_int8(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    matrices: Mapping[str, Tensor],
    quant: BitsAndBytes,
    fired: Counter,
) -> Iterator[dict[str, FloatFeatures]]:
    """Layers return what bitsandbytes' `Linear8bitLt` computes; yields what stays in float.

    Padding keeps what the layer itself made of it, which also runs.

    Args:
        modules: The linear layers, by name; `matrices`: their weights `[out, in]`.

    Raises:
        InputError: bitsandbytes is missing, or a layer that is not called as one.
        RangeError: a weight beyond float16, by name.
        ProbeError: when called, an input that is not finite, or float16 overflow; on leaving
            without an exception, a layer that never ran.
    """
    bnb = _bitsandbytes("")
    layers = {
        name: _Int8Layer(bnb, matrices[name], module, quant.threshold, name)
        for name, module in modules.items()
    }
    kept = {name: FloatFeatures(width=matrix.shape[1]) for name, matrix in matrices.items()}
    inputs: dict[str, Tensor] = {}

    def remember(visit: Activation) -> None:
        require_finite(visit)
        inputs[visit.name] = visit.tensor

    def replace(visit: Activation) -> Tensor:
        x, out = inputs.pop(visit.name), visit.tensor.clone()
        seen = kept[visit.name]
        quantized = hits = 0
        for row, real in zip(range(len(x)), visit.real, strict=True):
            tokens = x[row, real]
            if len(tokens) == 0:
                continue
            found, features = layers[visit.name](tokens)
            out[row, real] = found.to(out.dtype)
            seen.sequences += 1
            seen.kept += features
            quantized += len(tokens) * (seen.width - features)
            hits += 1
        if hits:
            fired.add(f"weight/{visit.name}", quantized)
        return out

    if not modules:
        yield kept
        return
    points = {"linear_input": remember, "linear_output": replace}
    chosen = [glob.escape(name) for name in modules]
    with _quiet(), attach(model, points, select=chosen):
        yield kept


class _Int8Layer:
    """One linear layer's int8 weight, and what bitsandbytes computes with it."""

    def __init__(
        self, bnb: Any, matrix: Tensor, module: nn.Module, threshold: float, name: str
    ) -> None:
        if isinstance(module, NonDynamicallyQuantizableLinear):
            raise InputError(
                f"{name} is part of nn.MultiheadAttention, which never calls it: LLM.int8 cannot "
                f"replace what it computes. Keep weight/{name} in float."
            )
        half = matrix.to(torch.float16).contiguous()
        check_range(half.min(), half.max(), f"{name}.weight in float16")
        with _quiet():
            integers, scales, _ = bnb.functional.int8_vectorwise_quant(half)
        self.matmul, self.name, self.weight = bnb.matmul, name, integers
        self.state = bnb.MatmulLtState()
        self.state.CB, self.state.SCB = integers, scales
        self.state.has_fp16_weights, self.state.is_training = False, False
        self.state.threshold = threshold
        self.bias: Tensor | None = module.bias  # type: ignore[assignment]

    def __call__(self, tokens: Tensor) -> tuple[Tensor, int]:
        """Returns the outputs of `[tokens, in]`, and how many features stayed in float."""
        bias = None if self.bias is None else self.bias.to(tokens.dtype)
        out: Tensor = self.matmul(tokens, self.weight, bias=bias, state=self.state)
        if not bool(out.isfinite().all()):
            raise ProbeError(
                f"LLM.int8 at {self.name}: the output is not finite; its largest input is "
                f"{float(tokens.abs().amax()):.3g}, and bitsandbytes quantizes in float16, which "
                "ends at 65504. With a threshold such features stay in float."
            )
        features = 0 if self.state.idx is None else int(self.state.idx.numel())
        return out, features if self.state.threshold > 0 else 0


def _bitsandbytes(part: str) -> Any:
    """Returns the package, or a module of it.

    Raises:
        InputError: it is missing; says what to install.
    """
    name = f"bitsandbytes.{part}" if part else "bitsandbytes"
    try:
        with _quiet():
            return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            "llm-int8, nf4 and fp4 are computed by the package bitsandbytes, which is missing: "
            "pip install 'quantkit[bnb]'."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Holds back what bitsandbytes says at each call: that it casts to float16, for one."""
    logger = logging.getLogger("bitsandbytes")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
