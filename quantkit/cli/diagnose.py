"""`quantkit diagnose`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import run_stage
from quantkit.errors import InputError
from quantkit.jobs import DiagnoseJob, default_out
from quantkit.jobs.diagnose import MEASURED
from quantkit.progress import Progress
from quantkit.reporting import diagnosis_text


def diagnose(
    float_graph: Annotated[
        str, typer.Argument(metavar="FLOAT.onnx", show_default=False, help="The float model.")
    ],
    quantized_graph: Annotated[
        str,
        typer.Argument(
            metavar="QUANTIZED.onnx",
            show_default=False,
            help="What any tool made of it: Q/DQ, QLinear, dynamic or MatMulNBits.",
        ),
    ],
    calib: Annotated[
        str | None,
        typer.Option(
            "--calib",
            metavar="SET",
            show_default=False,
            help="What the graphs read: text (a named set, a text file, a folder, a .jsonl), a "
            "folder of images, or .npz and .npy files named after the inputs. Default: pydoc, for "
            "graphs that read tokens.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="DIR",
            show_default=False,
            help="Folder with the tokenizer. Default: beside the files, or one folder above.",
        ),
    ] = None,
    seq_len: options.SeqLen = 256,
    samples: options.Samples = 8,
    measure: Annotated[
        int,
        typer.Option(
            "--measure",
            metavar="N",
            help="Quantizers whose cost alone is measured, by a run of the float model each: those "
            "with the largest local error.",
        ),
    ] = MEASURED,
    alone_samples: Annotated[
        int, typer.Option("--alone-samples", metavar="N", help="Samples that it is measured on.")
    ] = 1,
    bos: options.Bos = "auto",
    top: Annotated[
        int, typer.Option("--top", metavar="N", help="Rows to show; the file has all.")
    ] = 20,
    out: options.Out = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Say where a quantized ONNX model lost its accuracy.

    Runs both models on the same samples. Names the tensor where they part, the quantizers that did
    most of the damage, masks inside ranges, bad scales and layers left in float, each with what to
    try; writes diagnosis.json.

    \b
    Examples:
      quantkit diagnose float/model.onnx int8/model.onnx --tokenizer ./my-model
      quantkit diagnose vit.onnx vit_int8.onnx --calib images.npz --samples 16
      quantkit diagnose a.onnx b.onnx --calib corpus.txt --measure 500 --top 40
    """
    if top < 1:
        raise InputError(f"--top takes a whole number of at least 1, got {top}.")
    job = DiagnoseJob(
        float_graph=float_graph,
        quantized_graph=quantized_graph,
        calib=calib,
        tokenizer=tokenizer,
        seq_len=seq_len,
        samples=samples,
        bos=bos,
        measure=measure,
        alone_samples=alone_samples,
        out=out,
        force=force,
    )

    def stage(progress: Progress) -> Path:
        from quantkit.pipelines import run_diagnose

        return run_diagnose(job, progress=progress)

    run_stage(
        stage,
        folder=default_out("diagnose", job),
        result="diagnosis.json",
        view=partial(diagnosis_text, top=top),
        as_json=as_json,
        quiet=quiet,
    )
