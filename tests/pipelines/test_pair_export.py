"""The shipped pair with quantized logits: the graph answers as the simulation does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit.calib_sets import text_slice
from quantkit.jobs import ExportJob, MultipleChoiceSpec
from quantkit.models import load
from quantkit.onnx_runtime import open_decoder
from quantkit.pipelines import run_export
from quantkit.quantization import fake_quantized
from quantkit.results import Export, Ranges, read_json
from quantkit.search.judge import rows_of, session_forward
from quantkit.tasks import MultipleChoice, Perplexity
from quantkit.tasks.forward import text_forward

ITEMS, EQUAL_ITEMS = 24, 0.99


@pytest.mark.parametrize(("model", "bits"), [("diff", 8), ("diff", 4), ("baseline", 6)])
def test_items_agree_with_the_simulation(model: str, bits: int, tmp_path: Path) -> None:
    job = ExportJob(
        model=model,
        recipe="none",
        attention_bits=bits,
        calib="docstrings",
        eval="docstrings",
        samples=8,
        eval_samples=4,
        seq_len=128,
        out=str(tmp_path / "out"),
    )
    folder = run_export(job)
    export = read_json(folder / "export.json", Export)
    assert export.passed and export.accuracy is not None
    loaded = load(model)
    ranges = read_json(folder / "ranges.json", Ranges)
    choice = MultipleChoice.of(
        MultipleChoiceSpec(), loaded.tokenizer, text_source="docstrings", items=ITEMS, batch_size=8
    )
    text = text_slice("docstrings", loaded.tokenizer, seq_len=128, samples=4, skip=8, bos="auto")
    blocks = Perplexity.of(text, loaded.tokenizer, 4)
    graph = session_forward(open_decoder(folder / "model.onnx"))
    with fake_quantized(loaded.model, job.full_recipe, ranges.tensors):
        ours = [rows_of(text_forward(loaded), task) for task in (choice, blocks)]
    theirs = [rows_of(graph, task) for task in (choice, blocks)]
    equal = (ours[0] == theirs[0]).all(1).mean()
    assert equal >= EQUAL_ITEMS
    np.testing.assert_allclose(theirs[1], ours[1], rtol=2e-3)
    # and the export's own figure is of the same blocks
    nll, tokens = theirs[1][:, 0].sum(), theirs[1][:, 1].sum()
    assert export.accuracy.quantized == pytest.approx(np.exp(nll / tokens), rel=1e-5)
