"""What the makers share: their command line, and prompts as a graph's inputs. Imported by no test.

Every maker is a script for one tool, run in a process of its own and maybe in another virtual
environment, so that nothing here may import quantkit:

    python MAKER.py METHOD OUT --float GRAPH.onnx --calib TOKENS.npy

It writes `OUT/model.onnx` (and its weights beside it), and to stdout the versions it was made with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

MODEL_FILE = "model.onnx"


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a maker is asked for; `blocks` are token ids `[blocks, tokens]`."""

    out: Path
    float_path: Path
    blocks: NDArray[np.int64]

    @property
    def path(self) -> Path:
        """Where the graph is to be."""
        return self.out / MODEL_FILE

    def feeds(self) -> list[dict[str, NDArray[Any]]]:
        """Returns a prompt without a cache for each block, for the float graph's inputs."""
        graph = onnx.load(str(self.float_path), load_external_data=False).graph
        return [_feeds(graph, block[None]) for block in self.blocks]


def _feeds(graph: onnx.GraphProto, ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for value in graph.input:
        if value.name == "input_ids":
            found[value.name] = ids
        elif value.name == "attention_mask":
            found[value.name] = np.ones_like(ids)
        else:
            _, heads, _, width = (dim.dim_value for dim in value.type.tensor_type.shape.dim)
            found[value.name] = np.zeros((1, heads, 0, width), np.float32)
    return found


def run_maker(methods: Mapping[str, Callable[[Order], None]], *packages: str) -> None:
    """Reads the command line, makes the graph and says with which versions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=sorted(methods))
    parser.add_argument("out", type=Path)
    parser.add_argument("--float", type=Path, required=True)
    parser.add_argument("--calib", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    blocks = np.load(options.calib)
    methods[options.method](Order(out=options.out, float_path=options.float, blocks=blocks))
    print(json.dumps({name: metadata.version(name) for name in packages}))
