"""`quantkit compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import run_stage
from quantkit.errors import InputError
from quantkit.jobs import DEFAULT_TEXT, SHIPPED_PAIR, CompareJob, default_out
from quantkit.progress import Progress
from quantkit.reporting import terminal_tables, write_report


def compare(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]", show_default=False, help="The models to compare."),
    ] = None,
    text: options.Text = DEFAULT_TEXT,
    seq_len: options.SeqLen = 512,
    calib_samples: options.CalibSamples = 128,
    eval_samples: options.EvalSamples = 64,
    batch_size: options.BatchSize = 4,
    bits: options.Bits = "16,8,6,4",
    granularity: options.Granularity = "tensor,head,row",
    quantize: options.Quantize = "w8a8",
    attention_bits: options.AttentionBits = 16,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    bos: options.Bos = "auto",
    opset: options.Opset = 21,
    seed: options.Seed = 0,
    out: options.Out = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run every stage, models side by side, and report.

    Statistics, calibration, sweep and export, then report.html and report.md.

    \b
    Examples:
      quantkit compare ./baseline ./diff
      quantkit compare smollm2 --eval-samples 8 --calib-samples 8 --bits 16,8,4
    """
    named = tuple(models or SHIPPED_PAIR)
    if not named:
        raise InputError(
            "no model was named, and no matched pair ships in this version; "
            "name one or more, e.g. `quantkit compare smollm2`."
        )
    job = CompareJob(
        models=named,
        text=text,
        seq_len=seq_len,
        calib_samples=calib_samples,
        eval_samples=eval_samples,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        bos=bos,
        bits=options.whole_numbers("bits", bits),
        granularity=options.words("granularity", granularity),
        recipe=quantize,
        attention_bits=attention_bits,
        opset=opset,
        seed=seed,
        out=out,
        force=force,
    )

    def stage(progress: Progress) -> Path:
        from quantkit.pipelines import run_compare

        return run_compare(job, progress=progress)

    def view(folder: Path) -> str:
        written = "\n        ".join(map(str, write_report([folder], folder)))
        return f"{terminal_tables(folder)}\nreport: {written}\n"

    run_stage(
        stage,
        folder=default_out("compare", job),
        result=None,
        view=view,
        as_json=as_json,
        quiet=quiet,
    )
