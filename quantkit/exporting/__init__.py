"""A torch decoder -> a float ONNX graph -> a quantized one, and the proof of both."""

from quantkit.exporting.float_export import DEFAULT_OPSET, export_float
from quantkit.exporting.forced import StepAgreement, forced_parity
from quantkit.exporting.graphs import MODEL_FILE, load_graph, save_graph
from quantkit.exporting.half import to_half
from quantkit.exporting.linears import find_linears, match_linears
from quantkit.exporting.logits import find_logits, maps_of
from quantkit.exporting.measure import (
    BlockScores,
    block_scores,
    change_of,
    latency,
    ort_perplexity,
    paired_latency,
    perplexity_of,
)
from quantkit.exporting.parity import (
    FLOAT_GATE,
    QUANTIZED_GATE,
    Agreement,
    Gate,
    check_parity,
    compare_logits,
)
from quantkit.exporting.peak import feeds_memory, memory
from quantkit.exporting.proof import export_float_once, float_path
from quantkit.exporting.quantize import quantize_graph
from quantkit.exporting.quantizer import QuantkitQuantizer
from quantkit.exporting.worth import LATENCY_TOKENS

__all__ = [
    "DEFAULT_OPSET",
    "FLOAT_GATE",
    "LATENCY_TOKENS",
    "MODEL_FILE",
    "QUANTIZED_GATE",
    "Agreement",
    "BlockScores",
    "Gate",
    "QuantkitQuantizer",
    "StepAgreement",
    "block_scores",
    "change_of",
    "check_parity",
    "compare_logits",
    "export_float",
    "export_float_once",
    "feeds_memory",
    "find_linears",
    "find_logits",
    "float_path",
    "forced_parity",
    "latency",
    "load_graph",
    "maps_of",
    "match_linears",
    "memory",
    "ort_perplexity",
    "paired_latency",
    "perplexity_of",
    "quantize_graph",
    "save_graph",
    "to_half",
]
