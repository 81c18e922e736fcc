"""`quantkit sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import run_stage
from quantkit.jobs import DEFAULT_TEXT, SweepJob, default_out
from quantkit.progress import Progress
from quantkit.reporting import sweep_text


def sweep(
    models: options.Models,
    bits: options.Bits = "16,8,6,4",
    granularity: options.Granularity = "tensor,head,row",
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            metavar="LIST",
            show_default=False,
            help="Other recipes to measure beside, e.g. w8a8,w8a16,logits8:head:static.",
        ),
    ] = None,
    ranges: options.Ranges = None,
    keep: options.Keep = None,
    eval_text: options.Eval = DEFAULT_TEXT,
    allow_overlap: options.AllowOverlap = False,
    calib: options.Calib = DEFAULT_TEXT,
    calib_samples: options.CalibSamples = 128,
    seq_len: options.SeqLen = 512,
    samples: options.Samples = 64,
    batch_size: options.BatchSize = 4,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    bos: options.Bos = "auto",
    seed: options.Seed = 0,
    out: options.Out = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure what each bit of the attention logits costs.

    Models stand side by side; writes sweep.json.

    \b
    Examples:
      quantkit sweep smollm2 --samples 8
      quantkit sweep ./baseline ./diff --bits 16,8,6,4 --granularity tensor,head
      quantkit sweep ./my-model --eval heldout.txt --json
      quantkit sweep ./my-model --ranges reports/my-ranges --quantize w8a8,w8a16
    """
    job = SweepJob(
        models=tuple(models),
        eval=eval_text,
        calib=calib,
        recipes=() if quantize is None else options.words("quantize", quantize),
        ranges=ranges,
        keep=() if keep is None else options.words("keep", keep),
        allow_overlap=allow_overlap,
        bits=options.whole_numbers("bits", bits),
        granularity=options.words("granularity", granularity),
        seq_len=seq_len,
        samples=samples,
        calib_samples=calib_samples,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        bos=bos,
        seed=seed,
        out=out,
        force=force,
    )

    def stage(progress: Progress) -> Path:
        from quantkit.pipelines import run_sweep

        return run_sweep(job, progress=progress)

    run_stage(
        stage,
        folder=default_out("sweep", job),
        result="sweep.json",
        view=sweep_text,
        as_json=as_json,
        quiet=quiet,
    )
