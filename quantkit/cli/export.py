"""`quantkit export`."""

from __future__ import annotations

from quantkit.cli import options
from quantkit.cli.console import run_job
from quantkit.cli.words import share, words
from quantkit.jobs import DEFAULT_TEXT, ExportJob
from quantkit.reporting import export_text


def export(
    model: options.Model,
    quantize: options.Quantize = "w8a8",
    attention_bits: options.AttentionBits = 16,
    max_drop: options.MaxDrop = None,
    task: options.AutoTask = "perplexity",
    search_samples: options.SearchSamples = 16,
    storage: options.StorageOption = None,
    layout: options.Layout = "transformers",
    method: options.ExportMethod = "minmax",
    tokenizer: options.Tokenizer = None,
    ranges: options.Ranges = None,
    keep: options.Keep = None,
    calib: options.Calib = DEFAULT_TEXT,
    eval_text: options.Eval = DEFAULT_TEXT,
    allow_overlap: options.AllowOverlap = False,
    seq_len: options.SeqLen = 512,
    samples: options.Samples = 128,
    eval_samples: options.EvalSamples = 64,
    batch_size: options.BatchSize = 4,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    bos: options.Bos = "auto",
    opset: options.Opset = 21,
    seed: options.Seed = 0,
    out: options.Out = None,
    force: options.Force = False,
    config: options.Config = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a quantized ONNX model and verify it.

    Writes model.onnx and export.json, with the proof from ONNX Runtime. Exit code 1 where the
    graph does not agree with the model.

    Examples:
      quantkit export smollm2 --quantize auto --max-drop 2%
      quantkit export ./my-model --quantize w8a8-dynamic
      quantkit export ./my-model --quantize w8a8 --attention-bits 8 --calib corpus.txt
      quantkit export ./my-model --ranges reports/my-ranges --keep reports/my-sensitivity
      quantkit export encoder.onnx --quantize w8a8 --calib samples.npz
    """
    job = ExportJob(
        model=model,
        recipe=quantize,
        max_drop=None if max_drop is None else share("max-drop", max_drop),
        task=task,
        search_samples=search_samples,
        storage=storage,
        layout=layout,
        method=method,
        tokenizer=tokenizer,
        ranges=ranges,
        keep=() if keep is None else words("keep", keep),
        allow_overlap=allow_overlap,
        calib=calib,
        eval=eval_text,
        seq_len=seq_len,
        samples=samples,
        eval_samples=eval_samples,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        bos=bos,
        opset=opset,
        attention_bits=attention_bits,
        seed=seed,
        out=out,
        force=force,
    )

    run_job(
        "export",
        job,
        result="export.json",
        view=export_text,
        as_json=as_json,
        quiet=quiet,
    )
