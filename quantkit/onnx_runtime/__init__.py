"""ONNX Runtime: decoder graphs with a cache, and the observation of a graph's tensors.

* `decoder`: which input and output is what, and a run with a cache that may be empty;
* `graph_file`: a file that somebody gave, with its weights where they must lie;
* `graph_tensors`: which tensors of a graph a range is for, and the graph that hands them out;
* `observe`: batches through that graph, one `Bundle` a tensor, in bounded memory;
* `sessions`: sessions of any graph, and ONNX Runtime's refusals in one line.
"""

from quantkit.onnx_runtime.decoder import (
    CacheInput,
    DecoderLayout,
    DecoderOutput,
    DecoderSession,
    decoder_layout,
    open_decoder,
)
from quantkit.onnx_runtime.graph_tensors import linear_inputs, load_float_graph
from quantkit.onnx_runtime.observe import GraphBatch, observe_graph
from quantkit.onnx_runtime.sessions import open_graph

__all__ = [
    "CacheInput",
    "DecoderLayout",
    "DecoderOutput",
    "DecoderSession",
    "GraphBatch",
    "decoder_layout",
    "linear_inputs",
    "load_float_graph",
    "observe_graph",
    "open_decoder",
    "open_graph",
]
