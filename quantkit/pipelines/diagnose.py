"""`run_diagnose`: two graphs and samples in, `diagnosis.json` out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.calib_sets.content import file_sha256
from quantkit.errors import InputError
from quantkit.exporting.diagnosis.diagnose import check_files, diagnose
from quantkit.jobs import DiagnoseJob
from quantkit.jobs.choices import DEFAULT_TEXT
from quantkit.onnx_runtime import GraphBatch, open_graph
from quantkit.pipelines.graph_inputs import MASK, beside, graph_data, inputs_of
from quantkit.pipelines.runs import running
from quantkit.progress import Progress, silent
from quantkit.results import Diagnosis, read_json, write_json


def run_diagnose(job: DiagnoseJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `diagnosis.json`.

    Raises:
        InputError: two files that are not a float graph and its quantized form, or no samples.
    """
    paths = [Path(name).expanduser() for name in (job.float_graph, job.quantized_graph)]
    with running("diagnose", job) as run:
        result = run.folder / "diagnosis.json"
        if run.finished:
            found = read_json(result, Diagnosis)
            for path, info in zip(paths, (found.float_graph, found.quantized_graph), strict=True):
                if not path.is_file() or file_sha256(path) != info.sha256:
                    raise InputError(
                        f"{result} was made from another {path}: it changed since. Name another "
                        "--out, or --force."
                    )
            return run.folder
        check_files(paths[0], paths[1])
        samples = graph_data(
            DEFAULT_TEXT if job.calib is None else job.calib,
            paths[0],
            inputs_of(open_graph(paths[0])),
            samples=job.samples,
            seq_len=job.seq_len,
            bos=job.bos,
            tokenizer=job.tokenizer,
            folders=beside(*paths),
        )
        found = diagnose(
            paths[0],
            paths[1],
            [_feeds(batch) for batch in samples],
            data=samples.samples.info(samples.batch_size),
            measure=job.measure,
            alone_samples=job.alone_samples,
            progress=progress,
        )
        write_json(result, found)
        run.finish()
        return run.folder


def _feeds(batch: GraphBatch) -> Mapping[str, NDArray[Any]]:
    """Returns a batch with its mask, which says what is padding also where no graph reads it."""
    if batch.real is None:
        return batch.feeds
    return {MASK: batch.real.astype(np.int64), **batch.feeds}
