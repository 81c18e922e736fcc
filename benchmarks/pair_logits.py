"""The pair's exports with 8-, 6- and 4-bit logits beside the cells of a sweep, item by item.

Each model is calibrated once and exported at each width with static ranges a head; the graph in
ONNX Runtime and the simulation in torch then answer the same multiple-choice items and score the
same blocks. A row says on how many items they agree (both answers, by `acc_norm` and by `acc`), and
how far a block's perplexity is off at most.

    python benchmarks/pair_logits.py [--items 100]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.calib_sets import text_slice
from quantkit.jobs import SHIPPED_PAIR, CalibrateJob, ExportJob, MultipleChoiceSpec
from quantkit.models import LoadedModel, load
from quantkit.onnx_runtime import open_decoder
from quantkit.pipelines import run_calibrate, run_export
from quantkit.quantization import fake_quantized
from quantkit.results import Export, Ranges, read_json, write_json
from quantkit.results.environment import environment
from quantkit.search.judge import rows_of, session_forward
from quantkit.tasks import MultipleChoice, Perplexity
from quantkit.tasks.forward import text_forward

OUT = Path(__file__).parent / "results" / "pair_logits.json"
TEXT, BITS = "docstrings", (8, 6, 4)
CALIB_BLOCKS, BLOCKS, SEQ_LEN = 32, 24, 256


def measured(loaded: LoadedModel, items: int, folder: Path) -> list[dict[str, Any]]:
    """Returns a row a width."""
    ranges = run_calibrate(
        CalibrateJob(
            model=loaded.name,
            calib=TEXT,
            samples=CALIB_BLOCKS,
            seq_len=SEQ_LEN,
            out=str(folder / "ranges"),
        )
    )
    tensors = read_json(ranges / "ranges.json", Ranges).tensors
    text = text_slice(
        TEXT, loaded.tokenizer, seq_len=SEQ_LEN, samples=BLOCKS, skip=CALIB_BLOCKS, bos="auto"
    )
    blocks = Perplexity.of(text, loaded.tokenizer, 4)
    choice = MultipleChoice.of(
        MultipleChoiceSpec(), loaded.tokenizer, text_source=TEXT, items=items, batch_size=8
    )
    rows = []
    for bits in BITS:
        job = ExportJob(
            model=loaded.name,
            recipe="none",
            attention_bits=bits,
            ranges=str(ranges),
            eval=TEXT,
            eval_samples=BLOCKS,
            seq_len=SEQ_LEN,
            out=str(folder / str(bits)),
        )
        export = read_json(run_export(job) / "export.json", Export)
        graph = session_forward(open_decoder(folder / str(bits) / "model.onnx"))
        with fake_quantized(loaded.model, job.full_recipe, tensors):
            ours = [rows_of(text_forward(loaded), task) for task in (choice, blocks)]
        theirs = [rows_of(graph, task) for task in (choice, blocks)]
        block = [rows[:, 0] / rows[:, 1] for rows in (ours[1], theirs[1])]
        rows.append(
            {
                "model": loaded.name,
                "recipe": str(job.full_recipe),
                "items": len(ours[0]),
                "items_agreed": int((ours[0] == theirs[0]).all(1).sum()),
                "acc_norm": [float(rows[:, 0].mean()) for rows in (ours[0], theirs[0])],
                "perplexity": [
                    float(np.exp(rows[:, 0].sum() / rows[:, 1].sum()))
                    for rows in (ours[1], theirs[1])
                ],
                "block_off_max_frac": float(np.abs(np.exp(block[1] - block[0]) - 1).max()),
                "parity_passed": export.passed,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=100)
    items = parser.parse_args().items
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row for name in SHIPPED_PAIR for row in measured(load(name), items, Path(folder) / name)
        ]
    write_json(OUT, {"environment": environment(), "text": TEXT, "seed": 0, "rows": rows})


if __name__ == "__main__":
    main()
