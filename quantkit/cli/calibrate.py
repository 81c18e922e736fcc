"""`quantkit calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import run_stage
from quantkit.jobs import DEFAULT_TEXT, METHODS, CalibrateJob, default_out
from quantkit.progress import Progress
from quantkit.reporting import ranges_text


def calibrate(
    model: options.Model,
    calib: options.Calib = DEFAULT_TEXT,
    seq_len: options.SeqLen = 512,
    samples: options.Samples = 128,
    batch_size: options.BatchSize = 4,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    bos: options.Bos = "auto",
    method: Annotated[
        str,
        typer.Option(
            "--method", metavar="NAME", help=f"How ranges are chosen: {', '.join(METHODS)}."
        ),
    ] = "minmax",
    out: options.Out = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Fix quantization ranges from a calibration text.

    Writes ranges.json.

    \b
    Examples:
      quantkit calibrate smollm2 --calib pydoc
      quantkit calibrate ./my-model --calib corpus.txt --samples 128 --seq-len 512
    """
    job = CalibrateJob(
        model=model,
        calib=calib,
        seq_len=seq_len,
        samples=samples,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        bos=bos,
        method=method,
        out=out,
        force=force,
    )

    def stage(progress: Progress) -> Path:
        from quantkit.pipelines import run_calibrate

        return run_calibrate(job, progress=progress)

    run_stage(
        stage,
        folder=default_out("calibrate", job),
        result="ranges.json",
        view=ranges_text,
        as_json=as_json,
        quiet=quiet,
    )
