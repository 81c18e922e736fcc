"""A torch decoder -> a float ONNX graph -> a quantized one, and the proof of both."""

from quantkit.exporting.float_export import DEFAULT_OPSET, export_float
from quantkit.exporting.forced import StepAgreement, forced_parity
from quantkit.exporting.graphs import MODEL_FILE, load_graph, save_graph
from quantkit.exporting.linears import find_linears, match_linears
from quantkit.exporting.measure import ort_perplexity, paired_latency
from quantkit.exporting.parity import (
    FLOAT_GATE,
    QUANTIZED_GATE,
    Agreement,
    Gate,
    check_parity,
    compare_logits,
)
from quantkit.exporting.quantize import quantize_graph
from quantkit.exporting.rewrite_logits import find_logits

__all__ = [
    "DEFAULT_OPSET",
    "FLOAT_GATE",
    "MODEL_FILE",
    "QUANTIZED_GATE",
    "Agreement",
    "Gate",
    "StepAgreement",
    "check_parity",
    "compare_logits",
    "export_float",
    "find_linears",
    "find_logits",
    "forced_parity",
    "load_graph",
    "match_linears",
    "ort_perplexity",
    "paired_latency",
    "quantize_graph",
    "save_graph",
]
