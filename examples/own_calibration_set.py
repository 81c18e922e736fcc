"""Your own calibration set: texts of yours get a name, a hash and a licence, then fix ranges.

Makes the set `mine` in ./calib of a folder, calibrates a shipped model on it and measures static
8-bit activations on other text. Prints the set's hash, the ranges and both perplexities. It is of
16 short texts, to be quick; give some hundred.

    python examples/own_calibration_set.py [FOLDER]
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import quantkit
from quantkit.calib_sets.make import SetRequest, make_set

SHAPE = {"seq_len": 64, "batch_size": 4}


def main(folder: Path) -> None:
    texts = [
        f"def add_{n}(x):\n    return x + {n}  # the sum of x and {n}\n" * 8 for n in range(16)
    ]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (folder / "mine.jsonl").write_text(lines, encoding="utf-8")
    with contextlib.chdir(folder):  # as `quantkit calib make mine --from mine.jsonl --copy`
        make_set(SetRequest(name="mine", source="mine.jsonl", licence="CC0-1.0", copy=True))

        found = quantkit.calibrate("baseline", "mine", **SHAPE, samples=16, out="ranges")
        data = found.ranges.data
        print(f"set {data.named_set}, {data.sequences} texts, sha256 {data.set_sha256[:12]}")
        print(f"{len(found.ranges.tensors)} ranges, the worst: {found.calibration.tensors[0].name}")

        sweep = quantkit.sweep(
            "baseline", ranges=found, quantize="w8a8", bits=16, eval="docstrings", samples=8,
            **SHAPE, out="sweep",
        )  # fmt: skip
        for cell in sweep.cells:
            if cell.metric == "perplexity":
                print(f"{cell.recipe}: perplexity {cell.value:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
