"""`quantkit sweep`."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.cli import complete, options
from quantkit.cli.console import run_job
from quantkit.cli.watch import watching
from quantkit.cli.words import whole_numbers, words
from quantkit.jobs import DEFAULT_TEXT, SweepJob
from quantkit.jobs.config_file import NOTHING
from quantkit.processes import may_talk
from quantkit.reporting import plan_text, sweep_text
from quantkit.results import dumps

_LABELS = "LABEL=MODEL names one; models with one label are seeds of one model."
_WORDS = (
    "Other recipes to measure beside, a comma between; parts of one are joined by +, options "
    "follow a colon: w4:group64, w8a8 (static: needs --ranges), w8a8:token (does not), nf4, fp4, "
    "llm-int8, qk8, probs8, kv4, logits8:head:static. The float row is always measured. The "
    "grammar stands in the README."
)


def sweep(
    model: Annotated[
        list[str],
        options.argument(
            "MODEL",
            f"One or more models. {options.MODEL_WORDS}. {_LABELS}",
            autocompletion=complete.models,
        ),
    ],
    task: options.Tasks = "perplexity",
    bits: options.Bits = "16,8,6,4",
    granularity: options.Granularity = "tensor,head,row",
    range_: options.RangeKind = "dynamic",
    grid: Annotated[
        str,
        options.option(
            "--grid",
            panel=options.QUANTIZED,
            metavar="LIST",
            help="Of the bits of the logits: symmetric, asymmetric.",
        ),
    ] = "symmetric",
    quantize: Annotated[
        str | None,
        options.option(
            "--quantize",
            panel=options.QUANTIZED,
            metavar="LIST",
            show_default="none",
            help=_WORDS,
        ),
    ] = None,
    ranges: Annotated[
        str | None,
        options.option(
            "--ranges",
            panel=options.RANGES,
            metavar="LIST",
            show_default="none",
            help="Folders of calibrate or compare runs, one for each model: their ranges and their "
            "smoothing are taken.",
        ),
    ] = None,
    keep: options.Keep = None,
    eval_text: options.Eval = DEFAULT_TEXT,
    allow_overlap: options.AllowOverlap = False,
    calib: options.CalibOrNone = DEFAULT_TEXT,
    calib_samples: options.CalibSamples = 128,
    seq_len: Annotated[
        int,
        options.option(
            "--seq-len",
            panel=options.DATA,
            metavar="TOKENS",
            help="Length of a block, and of the longest generated prompt.",
        ),
    ] = 512,
    samples: Annotated[
        int,
        options.option(
            "--samples", panel=options.DATA, metavar="BLOCKS", help="Of the perplexity, at most."
        ),
    ] = 64,
    items: options.Items = 200,
    batch_size: options.BatchSize = 4,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    bos: options.Bos = "auto",
    seed: Annotated[
        int,
        options.option(
            "--seed",
            panel=options.COMPUTED,
            metavar="N",
            help="Of generated and drawn items, and of the bootstrap.",
        ),
    ] = 0,
    dry_run: Annotated[
        bool,
        options.option(
            "--dry-run",
            panel=options.OUTPUT,
            help="Print what would run and about how long it takes, which needs the models and a "
            "short run of each recipe; write nothing.",
        ),
    ] = False,
    out: options.Out = None,
    force: options.Force = False,
    config: options.Config = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure what each bit costs, in the tasks that matter.

    Models stand side by side, on the same items; writes sweep.json. Every cell (model, recipe,
    task) is kept when it ends: Ctrl-C and the same command goes on.

    Examples:
      quantkit sweep smollm2 --samples 8
      quantkit sweep ./baseline ./diff --bits 16,8,6,4 --granularity tensor,head
      quantkit sweep smollm2 --task perplexity,multiple-choice --items 100 --dry-run
      quantkit sweep ./my-model --eval heldout.txt --json
      quantkit sweep ./my-model --bits 16 --quantize w8a8:token,nf4,kv4,qk8:smooth
      quantkit sweep ./my-model --ranges reports/my-ranges --quantize w8a8,w8a16
      quantkit sweep diff=./seed0/diff diff=./seed1/diff base=./seed0/base
    """
    job = SweepJob(
        models=tuple(model),
        tasks=words("task", task),
        eval=eval_text,
        calib=None if calib == NOTHING else calib,
        recipes=words("quantize", quantize),
        ranges=words("ranges", ranges),
        keep=words("keep", keep),
        allow_overlap=allow_overlap,
        bits=whole_numbers("bits", bits),
        granularity=words("granularity", granularity),
        range=words("range", range_),
        grid=words("grid", grid),
        seq_len=seq_len,
        samples=samples,
        items=items,
        calib_samples=calib_samples,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        bos=bos,
        seed=seed,
        out=out,
        force=force,
    )
    if dry_run:
        from quantkit.pipelines import plan_sweep

        if not may_talk():  # of several processes one plans
            return
        with watching(quiet, f"loading {', '.join(model)}") as progress:
            plan = plan_sweep(job, progress=progress)
        typer.echo(dumps(plan) if as_json else plan_text(plan), nl=False)
        return

    run_job(
        "sweep",
        job,
        result="sweep.json",
        view=sweep_text,
        as_json=as_json,
        quiet=quiet,
    )
