"""DINOv2-small's weights out of an ONNX graph that holds them, as a transformers folder.

The exporter kept the names of most weights; it folded the transposed matrices of the linear layers
into anonymous initializers, whose names are those of the MatMul nodes that read them, and split the
position embedding into the class token's row and the 37 x 37 patches'.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from safetensors.torch import save_file

from quantkit.errors import InputError

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-6,
    "image_size": 518,
    "patch_size": 14,
    "num_channels": 3,
    "qkv_bias": True,
    "layerscale_value": 1.0,
    "drop_path_rate": 0.0,
    "use_swiglu_ffn": False,
    "dtype": "float32",
}
PREPROCESSING: Final[dict[str, Any]] = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
"""DINOv2's own: the graph's package pads to 224 x 224 instead, with the same mean and deviation."""
_PREFIX: Final = "backbone."


def write_dinov2(graph_file: Path, folder: Path) -> None:
    """Writes config.json, preprocessor_config.json and model.safetensors into `folder`.

    The weights have the names of DINOv2's published checkpoints, which every version of
    transformers reads; the mask token, which only training uses and the graph lacks, is zero.

    Raises:
        InputError: not a graph with these weights.
    """
    try:
        graph = onnx.load(graph_file).graph
    except Exception as error:  # protobuf raises a type of its own
        raise InputError(f"{graph_file} cannot be read as an ONNX file.") from error
    initializers = {tensor.name: tensor for tensor in graph.initializer}

    def tensor(name: str) -> np.ndarray[Any, Any]:
        return numpy_helper.to_array(initializers[name])

    weights = {
        name.removeprefix(_PREFIX): tensor(name)
        for name in initializers
        if name.startswith(_PREFIX)
    }
    pieces = []
    for node in graph.node:
        anonymous = [name for name in node.input if name.startswith("onnx::")]
        known = [name for name in anonymous if name in initializers]
        where = node.name.strip("/").split("/")
        if not known or where[0] != _PREFIX.rstrip("."):
            continue
        if node.op_type == "MatMul":
            # /backbone/encoder/layer.0/mlp/fc1/MatMul reads fc1's weight, transposed
            weights[".".join(where[1:-1]) + ".weight"] = tensor(known[0]).T
        elif node.op_type in ("Concat", "Reshape") and where[1] == "embeddings":
            pieces.append(tensor(known[0]))
    # one row for the class token, then the patches'
    weights["embeddings.position_embeddings"] = np.concatenate(
        sorted(pieces, key=lambda piece: piece.shape[1]), 1
    )
    weights["embeddings.mask_token"] = np.zeros((1, CONFIG["hidden_size"]), np.float32)
    plain = {name: torch.from_numpy(np.array(value, order="C")) for name, value in weights.items()}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("config", CONFIG), ("preprocessor_config", PREPROCESSING)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
