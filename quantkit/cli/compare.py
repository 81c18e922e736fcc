"""`quantkit compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from quantkit.cli import options
from quantkit.cli.console import run_stage
from quantkit.jobs import DEFAULT_TEXT, PAIR_DEFAULTS, SHIPPED_PAIR, CompareJob, default_out
from quantkit.progress import Progress
from quantkit.reporting import terminal_tables, write_report

_PARAMETERS: Final = {"tasks": "task", "range": "range_", "both_readings": "paper"}
"""Fields of the job whose option has another name."""


def _pair_options() -> str:
    """Returns what the comparison of the shipped pair differs in, as one would type it."""
    words: list[str] = []
    for name, value in PAIR_DEFAULTS.items():
        option = "--" + _PARAMETERS.get(name, name).strip("_").replace("_", "-")
        given = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [option] if value is True else [option, given]
    return " ".join(words)


def compare(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]",
            show_default=False,
            help=f"The models to compare. {options.MODEL_WORDS}. LABEL=MODEL names one. None: "
            f"{' and '.join(SHIPPED_PAIR)}, the shipped pair, with {_pair_options()}",
        ),
    ] = None,
    text: options.Text = DEFAULT_TEXT,
    seq_len: options.SeqLen = 512,
    calib_samples: options.CalibSamples = 128,
    eval_samples: options.EvalSamples = 64,
    batch_size: options.BatchSize = 4,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            metavar="LIST",
            help="What is measured, as in quantkit sweep: perplexity, "
            "multiple-choice[=FILE.jsonl], needles[...], icl[...], lm-eval=TASK.",
        ),
    ] = "perplexity",
    items: Annotated[
        int,
        typer.Option(
            "--items",
            metavar="N",
            help="Items of every task but perplexity, at most.",
        ),
    ] = 200,
    bits: options.Bits = "16,8,6,4",
    granularity: options.Granularity = "tensor,head,row",
    range_: Annotated[
        str,
        typer.Option(
            "--range",
            metavar="LIST",
            help="Of the bits of the logits: dynamic (of the call), static (of the calibration "
            "blocks; not for row).",
        ),
    ] = "dynamic",
    paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            help="Count all of QK^T beside the valid logits, as the Differential Transformer paper "
            "does.",
        ),
    ] = False,
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

    Statistics, calibration, sweep and export, then report.html and report.md. Without a model: the
    experiments of the Differential Transformer paper on the matched pair that ships in the package;
    options that are given win over those that it comes with.

    \b
    Examples:
      quantkit compare
      quantkit compare ./baseline ./diff
      quantkit compare ./baseline ./diff --task perplexity,needles --range dynamic,static
      quantkit compare smollm2 --eval-samples 8 --calib-samples 8 --bits 16,8,4
    """
    given: dict[str, Any] = {
        "text": text,
        "seq_len": seq_len,
        "calib_samples": calib_samples,
        "eval_samples": eval_samples,
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device,
        "bos": bos,
        "both_readings": paper,
        "tasks": options.words("task", task),
        "items": items,
        "bits": options.whole_numbers("bits", bits),
        "granularity": options.words("granularity", granularity),
        "range": options.words("range", range_),
        "recipe": quantize,
        "attention_bits": attention_bits,
        "opset": opset,
        "seed": seed,
        "out": out,
        "force": force,
    }
    if models:
        job = CompareJob(models=tuple(models), **given)
    else:
        typed = {name for name in given if _is_typed(context, _PARAMETERS.get(name, name))}
        own = {n: value for n, value in given.items() if n in typed or n not in PAIR_DEFAULTS}
        job = CompareJob.of_pair(**own)

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


def _is_typed(context: typer.Context, parameter: str) -> bool:
    """Whether an option was given, or has its default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name != "DEFAULT"
