"""A script, never imported: prints the peak resident bytes of this process, as Linux counts them.

    python -P peak_child.py [GRAPH FEEDS.npz]

Without arguments it has imported what is needed, and nothing else. `FEEDS.npz`: first the names of
the inputs, then their arrays in that order.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

QUIET = 3
FLOAT_ACTIVATIONS = ("session.qdq_matmulnbits_accuracy_level", "1")
"""As `quantkit.onnx_runtime` opens a graph; importing that would bring torch along."""


def main() -> None:
    """Loads and runs the graph, if there is one, and prints the peak."""
    if len(sys.argv) > 1:
        options = ort.SessionOptions()
        options.log_severity_level = QUIET
        options.add_session_config_entry(*FLOAT_ACTIVATIONS)
        session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
        with np.load(sys.argv[2]) as file:
            names, *arrays = (file[key] for key in file.files)
        session.run(None, dict(zip(names.tolist(), arrays, strict=True)))
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            print(int(line.split()[1]) * 1024)


if __name__ == "__main__":
    main()
