"""`run_diagnose`: two graphs and samples in, `diagnosis.json` out."""

from __future__ import annotations

from pathlib import Path

from quantkit.calib_sets.content import file_sha256
from quantkit.errors import InputError
from quantkit.exporting.diagnosis.diagnose import check_files, diagnose
from quantkit.jobs import DiagnoseJob
from quantkit.pipelines.graph_samples import graph_samples
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
        model, _ = check_files(paths[0], paths[1])
        folders = [path.absolute().parent for path in paths]
        samples = graph_samples(
            model,
            job.calib,
            folders=list(dict.fromkeys([*folders, *(folder.parent for folder in folders)])),
            tokenizer=job.tokenizer,
            seq_len=job.seq_len,
            samples=job.samples,
            bos=job.bos,
        )
        found = diagnose(
            paths[0],
            paths[1],
            samples.batches,
            data=samples.data,
            measure=job.measure,
            alone_samples=job.alone_samples,
            progress=progress,
        )
        write_json(result, found)
        run.finish()
        return run.folder
