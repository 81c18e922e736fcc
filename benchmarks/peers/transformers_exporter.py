"""transformers' exporter with its `OnnxRuntimeQuantizer`, as its documentation shows it.

The model is traced anew, a step of some tokens behind a filled cache, and the exporter hands the
graph to the quantizer. It needs the model itself: `smollm2` is loaded by quantkit, and nothing
else of quantkit is used.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
from calibration import Order, run_maker
from torch import Tensor
from transformers import DynamicCache
from transformers.exporters.configs import OnnxConfig
from transformers.exporters.exporter_onnx import OnnxExporter
from transformers.exporters.quantizers import (
    OnnxRuntimeDynamicConfig,
    OnnxRuntimeQuantizer,
    OnnxRuntimeStaticConfig,
)

from quantkit.models import load

OPSET = 21
CACHED = 4
"""Tokens that stand in the cache of the traced step, and of each calibration sample."""
TRACED = (2, 7)
"""Sequences and tokens, those in the cache included: a batch of 1 would become a constant."""


def step(model: Any, ids: Tensor, mask: Tensor) -> dict[str, Any]:
    """Returns the keyword arguments of a step behind a cache."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(
            input_ids=ids[:, :CACHED],
            attention_mask=mask[:, :CACHED],
            cache=cache,
            use_cache=True,
        )
    return {"input_ids": ids[:, CACHED:], "attention_mask": mask, "cache": cache}


def export(order: Order, *, static: bool) -> None:
    model = load("smollm2").model
    ids = torch.arange(TRACED[0] * TRACED[1]).reshape(TRACED)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0  # a mask of ones would be dropped from the graph
    if static:
        blocks = torch.from_numpy(order.blocks)
        samples = [step(model, block[None], torch.ones_like(block[None])) for block in blocks]
        quantizer = OnnxRuntimeQuantizer(OnnxRuntimeStaticConfig(per_channel=True), samples)
    else:
        quantizer = OnnxRuntimeQuantizer(OnnxRuntimeDynamicConfig())
    config = OnnxConfig(dynamic=True, opset_version=OPSET, quantizer=quantizer)
    exported = OnnxExporter().export(model, step(model, ids, mask), config)
    exported.save_pretrained(str(order.out))
    write_sizes(order.path)


def write_sizes(path: Path) -> None:
    """Makes a size of an input that is written as the symbol `"64"` the number, as clients read it.

    Nothing that is computed changes, and the weights beside the graph are not touched.
    """
    model = onnx.load(str(path), load_external_data=False)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param.isdecimal():
                dim.dim_value = int(dim.dim_param)
    path.write_bytes(model.SerializeToString())


if __name__ == "__main__":
    run_maker(
        {"dynamic": partial(export, static=False), "static": partial(export, static=True)},
        "transformers",
        "torch",
        "onnx",
        "onnxruntime",
    )
