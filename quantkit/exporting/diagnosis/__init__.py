"""Why a quantized graph, of any tool, is worse than its float one, tensor by tensor.

quantized_graph.py    the quantizers of a foreign graph, by format
paired_tensors.py     which tensor of one graph is which of the other
tensor_runs.py        values inside both graphs, in groups, in bounded memory
error_sums.py         what is added up of a tensor's error; compared.py: of all of them
quantized_weights.py  weights beside their integers
logit_chains.py       where masks enter attention logits
padding.py            which positions count
switched.py           one quantizer alone, in the float graph
diagnosis_rows.py     measured -> rows; findings.py: rows -> what is wrong and what to try
diagnose.py           all of it
"""

from quantkit.exporting.diagnosis.diagnose import check_files, diagnose

__all__ = ["check_files", "diagnose"]
