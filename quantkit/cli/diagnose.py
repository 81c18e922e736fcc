"""`quantkit diagnose`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from quantkit.cli import complete, options
from quantkit.cli.console import run_job
from quantkit.errors import InputError
from quantkit.jobs import DiagnoseJob
from quantkit.jobs.diagnose import MEASURED
from quantkit.reporting import diagnosis_text


def diagnose(
    float_graph: Annotated[str, options.argument("FLOAT.onnx", "The float model.")],
    quantized_graph: Annotated[
        str,
        options.argument(
            "QUANTIZED.onnx", "What any tool made of it: Q/DQ, QLinear, dynamic or MatMulNBits."
        ),
    ],
    calib: Annotated[
        str | None,
        options.option(
            "--calib",
            panel=options.DATA,
            metavar="SET",
            show_default="pydoc, where the graphs read tokens",
            autocompletion=complete.sets,
            help="What the graphs read: text (a named set, a text file, a folder, a .jsonl), a "
            "folder of images, or .npz and .npy files named after the inputs.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        options.option(
            "--tokenizer",
            panel=options.DATA,
            metavar="DIR",
            show_default="beside the files, or one folder above",
            help="Folder with the tokenizer.",
        ),
    ] = None,
    seq_len: options.SeqLen = 256,
    samples: options.Samples = 8,
    measure: Annotated[
        int,
        options.option(
            "--measure",
            panel=options.MEASURED,
            metavar="QUANTIZERS",
            help="Those whose cost alone is measured, by a run of the float model each: those "
            "with the largest local error.",
        ),
    ] = MEASURED,
    alone_samples: Annotated[
        int,
        options.option(
            "--alone-samples",
            panel=options.MEASURED,
            metavar="SAMPLES",
            help="Samples that it is measured on.",
        ),
    ] = 1,
    bos: options.Bos = "auto",
    top: options.Top = 20,
    out: options.Out = None,
    force: options.Force = False,
    config: options.Config = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Say where a quantized ONNX model lost its accuracy.

    Runs both models on the same samples. Names the tensor where they part, the quantizers that did
    most of the damage, masks inside ranges, bad scales and layers left in float, each with what to
    try; writes diagnosis.json.

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

    run_job(
        "diagnose",
        job,
        result="diagnosis.json",
        view=partial(diagnosis_text, top=top),
        as_json=as_json,
        quiet=quiet,
    )
