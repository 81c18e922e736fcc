"""`quantkit compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from quantkit.cli import complete, options
from quantkit.cli.console import run_job
from quantkit.cli.words import whole_numbers, words
from quantkit.jobs import DEFAULT_TEXT, PAIR_DEFAULTS, SHIPPED_PAIR, CompareJob
from quantkit.jobs.config_file import option_of
from quantkit.reporting import terminal_tables, write_report

_PARAMETERS: Final = {"range": "range_"}
"""Options whose parameter has another name."""


def _pair_options() -> str:
    """Returns what the comparison of the shipped pair differs in, as one would type it."""
    words: list[str] = []
    for name, value in PAIR_DEFAULTS.items():
        option = f"--{option_of(name)}"
        given = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if len(given) > 60:  # one word must fit into a line
            given = given.replace(",", ", ")
        words += [option] if value is True else [option, given]
    return " ".join(words)


def compare(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        options.argument(
            "[MODEL]",
            f"The models to compare. {options.MODEL_WORDS}. LABEL=MODEL names one. None: "
            f"{' and '.join(SHIPPED_PAIR)}, the shipped pair, with {_pair_options()}",
            autocompletion=complete.models,
        ),
    ] = None,
    text: options.Text = DEFAULT_TEXT,
    seq_len: options.SeqLen = 512,
    calib_samples: options.CalibSamples = 128,
    eval_samples: options.EvalSamples = 64,
    batch_size: options.BatchSize = 4,
    task: options.Tasks = "perplexity",
    items: options.Items = 200,
    bits: options.Bits = "16,8,6,4",
    granularity: options.Granularity = "tensor,head,row",
    range_: options.RangeKind = "dynamic",
    paper: Annotated[
        bool,
        options.option(
            "--paper",
            panel=options.MEASURED,
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
    config: options.Config = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run every stage, models side by side, and report.

    Statistics, calibration, sweep and export, then report.html and report.md. Without a model: the
    experiments of the Differential Transformer paper on the matched pair that ships in the package;
    options that are given win over those that it comes with.

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
        "tasks": words("task", task),
        "items": items,
        "bits": whole_numbers("bits", bits),
        "granularity": words("granularity", granularity),
        "range": words("range", range_),
        "recipe": quantize,
        "attention_bits": attention_bits,
        "opset": opset,
        "seed": seed,
        "out": out,
        "force": force,
    }
    if model:
        job = CompareJob(models=tuple(model), **given)
    else:
        typed = {name for name in given if _is_typed(context, name)}
        own = {n: value for n, value in given.items() if n in typed or n not in PAIR_DEFAULTS}
        job = CompareJob.of_pair(**own)

    def view(folder: Path) -> str:
        written = "\n        ".join(map(str, write_report([folder], folder)[:2]))
        return f"{terminal_tables(folder)}\nreport: {written}\n"

    run_job(
        "compare",
        job,
        result=None,
        view=view,
        as_json=as_json,
        quiet=quiet,
    )


def _is_typed(context: typer.Context, field: str) -> bool:
    """Whether the option of a field was given, or has its default."""
    option = option_of(field)
    source = context.get_parameter_source(_PARAMETERS.get(option, option.replace("-", "_")))
    return source is not None and source.name != "DEFAULT"
